// Included by faults.cu and clusters.cu: the emulator must find shared memory in headers, too.
#pragma once

struct Argument {
  float* out;
  long long index;
};

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}

// The sum of x over a block of whole warps. Calls may follow each other without a barrier.
__device__ __forceinline__ float block_sum(float x, int thread, int threads) {
  __shared__ float sums[THREADS / 32];
  x = warp_sum(x);
  if (thread % 32 == 0) sums[thread / 32] = x;
  __syncthreads();
  float total = 0.0f;
  for (int warp = 0; warp < threads / 32; ++warp) total += sums[warp];
  __syncthreads();  // before the next call overwrites the sums
  return total;
}
