// Kernels for test_emulator.py. Those above the line are correct and must run under every order
// of threads; each of those below has one bug, which must be reported.
#include "faults.cuh"

// out[i] = the sum of 0 … n-1, for every thread i of a block of n.
extern "C" __global__ void __launch_bounds__(THREADS, 1) sum_of_block(const Argument a) {
  const int threads = blockDim.x * blockDim.y * blockDim.z;
  const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const float sum = block_sum(float(thread), thread, threads);
  a.out[blockIdx.x * threads + thread] = block_sum(sum, thread, threads) / float(threads);
}

// out[i] = the block's values reversed, through shared memory whose size the launch chooses.
extern "C" __global__ void reverse(const Argument a) {
  extern __shared__ __align__(16) float values[];
  const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  for (int round = 0; round < 2; ++round) {
    values[threadIdx.x] = float(block * 1000 + int(threadIdx.x) + round);
    __syncthreads();
    a.out[block * blockDim.x + threadIdx.x] = values[blockDim.x - 1 - threadIdx.x];
    __syncthreads();  // before the next round overwrites what others still read
  }
}

// Every way to exchange values between lanes; the last warp may be partial. out[i] = 1 if all are right.
extern "C" __global__ void lanes(const Argument a) {
  const int lane = threadIdx.x % 32;
  const int first = threadIdx.x - lane;
  const int count = min(32, int(blockDim.x) - first);
  const unsigned exist = count == 32 ? ~0u : (1u << count) - 1;
  const unsigned all = 0xffffffffu;
  bool right = __shfl_sync(all, lane, 5 % count) == 5 % count;
  right &= __shfl_up_sync(exist, lane, 1) == max(lane - 1, 0);
  right &= __shfl_down_sync(all, double(lane), 1, 1) == lane;
  right &= __shfl_xor_sync(exist, lane, count == 32 ? 16 : 0) == (count == 32 ? lane ^ 16 : lane);
  right &= __shfl_xor_sync(all, 1ll << 40, 0) == 1ll << 40;
  right &= __ballot_sync(all, lane % 2) == (exist & 0xaaaaaaaau);
  right &= __any_sync(all, lane == 0) == 1 && __any_sync(all, 0) == 0;
  right &= __all_sync(all, lane >= 0) == 1 && __all_sync(all, lane > 0) == 0;
  right &= __syncthreads_count(lane == 0) == int(blockDim.x + 31) / 32;
  right &= __syncthreads_or(threadIdx.x == 0) == 1;
  right &= __syncthreads_and(threadIdx.x == 0) == (blockDim.x == 1);
  a.out[blockIdx.x * blockDim.x + threadIdx.x] = right ? 1.0f : 0.0f;
}

// Neighbours exchange values through shared memory, ordered by a __syncwarp of each half warp.
extern "C" __global__ void warp_neighbours(const Argument a) {
  __shared__ float values[THREADS];
  const unsigned half = threadIdx.x % 32 < 16 ? 0xffffu : 0xffff0000u;
  for (int round = 0; round < 3; ++round) {
    values[threadIdx.x] = float(threadIdx.x + round);
    __syncwarp(half);
    a.out[blockIdx.x * blockDim.x + threadIdx.x] = values[threadIdx.x ^ 1];
    __syncwarp(half);
  }
}

// out[i] = i + 1, through shared memory, by cp.async one round ahead.
extern "C" __global__ void copied_ahead(const Argument a) {
  extern __shared__ __align__(16) float values[];
  float* const mine = values + 4 * threadIdx.x;
  float* const out = a.out + 4 * threadIdx.x;
  for (int i = 0; i < 4; ++i) out[i] = float(4 * threadIdx.x + i);
  emulator::cp_async<uint4>(mine, out);
  for (int round = 0; round < 2; ++round) {
    emulator::cp_async_wait();
    float copied[4];
    for (int i = 0; i < 4; ++i) copied[i] = mine[i];
    for (int i = 0; i < 4; ++i) out[i] = copied[i] + 0.5f;
    if (round == 0) emulator::cp_async<uint4>(mine, out);
  }
}

// Sums of neighbours, from a ring of bulk copies a round ahead, with the bug that a.index selects: 0 is none. In round r the
// first block copies out[r·n … r·n + n], and out[r·n + i] becomes its number i plus number i + 1.
extern "C" __global__ void ring(const Argument a) {
  constexpr int STAGES = 2, ROUNDS = 5;
  extern __shared__ __align__(16) float values[];
  __shared__ unsigned long long arrived[STAGES];
  if (blockIdx.x) return;
  const int n = blockDim.x, bytes = n * 4 + 16;
  const bool first = threadIdx.x == 0;
  if (first) {
    for (auto& barrier : arrived) emulator::mbarrier_init(&barrier);
  }
  __syncthreads();
  const auto copy = [&](int round) {
    if (!first || round >= ROUNDS) return;
    unsigned long long* const barrier = &arrived[round % STAGES];
    if (a.index != 1) emulator::mbarrier_expect_tx(barrier, a.index == 2 ? bytes + 16 : bytes);
    emulator::cp_async_bulk(values + round % STAGES * (n + 4), a.out + round * n, bytes, barrier);  // of a round
  };
  for (int round = 0; round < STAGES; ++round) copy(round);
  for (int round = 0; round < ROUNDS; ++round) {
    const unsigned parity = round / STAGES % 2;
    if (a.index != 3)
      emulator::mbarrier_wait(&arrived[round % STAGES], a.index == 4 ? 0 : a.index == 5 ? !parity : parity);
    if (a.index == 6) copy(round + STAGES);
    const float* const here = values + round % STAGES * (n + 4) + threadIdx.x;
    const float sum = here[0] + here[1];
    __syncthreads();  // all have read this stage
    if (a.index != 6) copy(round + STAGES);
    a.out[round * n + threadIdx.x] = sum;
  }
}

// out[2 i + 1], out[2 i + 2]: tickets that thread i drew at its start and after __syncwarp.
extern "C" __global__ void tickets(const Argument a) {
  const int thread = blockIdx.x * blockDim.x + threadIdx.x;
  a.out[2 * thread + 1] = atomicAdd(a.out, 1.0f);
  __syncwarp();
  a.out[2 * thread + 2] = atomicAdd(a.out, 1.0f);
}

// Each block waits for all others, up to a limit. A GPU does not guarantee that they run at once.
extern "C" __global__ void blocks_meet(const Argument a) {
  atomicAdd(a.out, 1.0f);
  for (int i = 0; i < 1 << 28 && atomicAdd(a.out, 0.0f) < float(gridDim.x); ++i) {
  }
  a.out[1 + blockIdx.x] = atomicAdd(a.out, 0.0f);
}

extern "C" __global__ void count_threads(const Argument a) { atomicAdd(a.out, 1.0f); }

// ------------------------------------------------------------------------------------------------

extern "C" __global__ void some_threads_at_barrier(const Argument a) {
  if (threadIdx.x < 64) __syncthreads();
  a.out[threadIdx.x] = 1.0f;
}

extern "C" __global__ void two_barriers(const Argument a) {
  if (threadIdx.x & 1) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  a.out[threadIdx.x] = 1.0f;
}

extern "C" __global__ void barrier_after_return(const Argument a) {
  if (threadIdx.x == 37) return;
  __syncthreads();
  a.out[threadIdx.x] = 1.0f;
}

extern "C" __global__ void half_a_warp_shuffles(const Argument a) {
  float sum = 1.0f;
  if (threadIdx.x % 32 < 16) sum = warp_sum(sum);
  __syncthreads();  // half of each warp is here
  a.out[threadIdx.x] = sum;
}

extern "C" __global__ void two_shuffles(const Argument a) {
  float value = 1.0f;
  if (threadIdx.x % 32 < 16) {
    value = __shfl_xor_sync(0xffffffffu, value, 1);
  } else {
    value = __shfl_xor_sync(0xffffffffu, value, 2);
  }
  a.out[threadIdx.x] = value;
}

extern "C" __global__ void exited_lane(const Argument a) {
  if (threadIdx.x == 37) return;
  a.out[threadIdx.x] = warp_sum(1.0f);
}

extern "C" __global__ void lane_not_in_mask(const Argument a) {
  a.out[threadIdx.x] = __shfl_sync(0x0000ffffu, 1.0f, 0);
}

extern "C" __global__ void source_not_in_mask(const Argument a) {
  if (threadIdx.x % 32 < 16) a.out[threadIdx.x] = __shfl_sync(0x0000ffffu, 1.0f, 16);
}

extern "C" __global__ void unwritten_static(const Argument a) {
  __shared__ float values[THREADS];
  if (threadIdx.x != 7) values[threadIdx.x] = 1.0f;
  __syncthreads();
  a.out[threadIdx.x] = values[threadIdx.x];
}

extern "C" __global__ void unwritten_dynamic(const Argument a) {
  extern __shared__ float values[];
  if (threadIdx.x != 7 || blockIdx.x == 0) values[threadIdx.x] = 1.0f;  // block 1 finds its own
  __syncthreads();
  a.out[blockIdx.x * blockDim.x + threadIdx.x] = values[threadIdx.x];
}

extern "C" __global__ void copy_not_awaited(const Argument a) {
  extern __shared__ float values[];
  if (threadIdx.x == 7) emulator::cp_async<unsigned>(values + 7, a.out);
  a.out[threadIdx.x] = threadIdx.x == 7 ? values[7] : 1.0f;
  emulator::cp_async_wait();
}

extern "C" __global__ void copy_left_behind(const Argument a) {
  extern __shared__ float values[];
  emulator::cp_async<unsigned>(values + threadIdx.x, a.out);
}

extern "C" __global__ void copy_to_index(const Argument a) {
  extern __shared__ float values[];
  if (threadIdx.x == 3) emulator::cp_async<unsigned>(values + a.index, a.out);
  emulator::cp_async_wait();
}

extern "C" __global__ void copy_to_global(const Argument a) {
  emulator::cp_async<unsigned>(a.out + threadIdx.x, a.out);
  emulator::cp_async_wait();
}

extern "C" __global__ void copy_misaligned(const Argument a) {
  extern __shared__ float values[];
  emulator::cp_async<uint4>(values + 4 * threadIdx.x, a.out + a.index);
  emulator::cp_async_wait();
}

// One bulk copy with the bug that a.index selects: 0 is none.
extern "C" __global__ void bulk_copies(const Argument a) {
  extern __shared__ __align__(16) float values[];
  __shared__ unsigned long long arrived;
  const bool first = threadIdx.x == 0;
  if (first) emulator::mbarrier_init(&arrived);
  __syncthreads();
  if (first) {
    emulator::mbarrier_expect_tx(&arrived, 32);
    float* const to = a.index == 1 ? a.out + 512 : a.index == 2 ? values + 1020 : a.index == 3 ? values + 1 : values;
    void* const barrier = a.index == 6 ? static_cast<void*>(a.out) : &arrived;
    emulator::cp_async_bulk(to, a.out + (a.index == 4), a.index == 5 ? 24 : 32, barrier);
  }
  if (a.index != 7) emulator::mbarrier_wait(&arrived, 0);
  a.out[threadIdx.x] = threadIdx.x < 8 ? values[threadIdx.x] + 1.0f : 0.0f;
}

extern "C" __global__ void prefetch_l2_index(const Argument a) {
  if (threadIdx.x == 3) emulator::prefetch_l2(a.out + a.index);
}

extern "C" __global__ void missing_barrier(const Argument a) {
  __shared__ float values[THREADS];
  values[threadIdx.x] = 1.0f;
  a.out[blockIdx.x * blockDim.x + threadIdx.x] = values[(threadIdx.x + blockDim.x - 1) % blockDim.x];
}

// The barrier orders the read, but not the write of the next round.
extern "C" __global__ void missing_second_barrier(const Argument a) {
  __shared__ float values[THREADS];
  float sum = 0.0f;
  for (int round = 0; round < 2; ++round) {
    values[threadIdx.x] = float(round);
    __syncthreads();
    sum += values[(threadIdx.x + 1) % blockDim.x];
  }
  a.out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

extern "C" __global__ void missing_warp_barrier(const Argument a) {
  __shared__ float values[THREADS];
  values[threadIdx.x] = 1.0f;
  __shfl_sync(0xffffffffu, 0, 0);                                          // does not order memory
  a.out[blockIdx.x * blockDim.x + threadIdx.x] = values[threadIdx.x ^ 1];  // of another lane
}

// Every block owns out[0 … n-1].
extern "C" __global__ void blocks_race(const Argument a) { a.out[threadIdx.x] += 1.0f; }

extern "C" __global__ void write_at_index(const Argument a) {
  if (threadIdx.x == 3) a.out[a.index] = 1.0f;
}

extern "C" __global__ void read_at_index(const Argument a) {
  a.out[threadIdx.x] = a.out[threadIdx.x == 3 ? a.index : 0];
}

extern "C" __global__ void dynamic_at_index(const Argument a) {
  extern __shared__ float values[];
  if (threadIdx.x == 3) values[a.index] = 1.0f;  // dynamic
}

extern "C" __global__ void static_at_index(const Argument a) {
  __shared__ float values[8];
  if (threadIdx.x == 3) values[a.index] = 1.0f;
}

__device__ void write_through(float* values, long long index) { values[index] = 1.0f; }

extern "C" __global__ void static_pointer_at_index(const Argument a) {
  __shared__ float values[8];
  if (threadIdx.x == 3) write_through(values, a.index);
}

extern "C" __global__ void local_at_index(const Argument a) {
  float values[8] = {};
  values[a.index] = 1.0f;
  a.out[threadIdx.x] = values[threadIdx.x % 8];
}

extern "C" __global__ void misaligned_16(const Argument a) {
  const uint4 bits = *reinterpret_cast<const uint4*>(a.out + a.index);
  a.out[0] = __uint_as_float(bits.x);
}

extern "C" __global__ void misaligned_8(const Argument a) {
  *reinterpret_cast<uint2*>(a.out + a.index) = make_uint2(1, 2);
}

extern "C" __global__ void null_pointer(const Argument a) {
  float* address = blockIdx.x == 2 && threadIdx.x == 5 ? nullptr : a.out + threadIdx.x;
  *address = 1.0f;
}

extern "C" __global__ void divide_by(const Argument a) { a.out[0] = float(7 / a.index); }

extern "C" __global__ void shift_by(const Argument a) { a.out[0] = float(1 << a.index); }

extern "C" __global__ void overflow(const Argument a) { a.out[0] = float(int(a.index) + int(threadIdx.x) + 1); }

__device__ float deep(const Argument& a, long long depth) {
  volatile float frame[256];
  frame[depth % 256] = 1.0f;
  return depth == 0 ? a.out[0] : deep(a, depth - 1) + frame[depth % 256];
}

extern "C" __global__ void stack_overflow(const Argument a) { a.out[0] = deep(a, a.index); }

extern "C" __global__ void trap(const Argument) { __trap(); }

extern "C" __global__ void __launch_bounds__((THREADS) / 2) too_many_threads(const Argument) {}

extern "C" __global__ void too_much_static(const Argument a) {
  __shared__ float values[48 * 1024 / 4 + 1];
  values[threadIdx.x] = 1.0f;
  a.out[threadIdx.x] = values[threadIdx.x];
}
