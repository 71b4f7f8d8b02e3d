// Kernels for ../test_emulator_clusters.py, of blocks that run side by side. Those above the line are correct; each of
// those below has one bug, which must be reported or show in some order.
#include "faults.cuh"

// Of a cluster along the grid's second axis.
__device__ __forceinline__ int place_of_block() { return blockIdx.x * gridDim.y + blockIdx.y; }

// out[i]: the sum of what the i-th threads of all blocks gave, twice, with another number each time.
extern "C" __global__ void __cluster_dims__(1, 4, 1) __launch_bounds__(THREADS, 1) sum_of_cluster(const Argument a) {
  __shared__ float given[2][4][THREADS];
  emulator::sync_cluster();
  float sum = 0.0f;
  for (int round = 0; round < 2; ++round) {
    for (int block = 0; block < 4; ++block) {
      float* const place = &given[round][blockIdx.y % 4][threadIdx.x];
      *emulator::mapa(place, block) = float((round + 1) * (1000 * int(blockIdx.y) + int(threadIdx.x)));
    }
    emulator::sync_cluster();
    for (int block = 0; block < 4; ++block) sum += given[round][block][threadIdx.x];
  }
  a.out[place_of_block() * blockDim.x + threadIdx.x] = sum;
}

// Every thread reads the dynamic shared memory of the next block, along the grid's first axis.
extern "C" __global__ void __cluster_dims__(3) neighbour(const Argument a) {
  extern __shared__ __align__(16) float values[];
  values[threadIdx.x] = float(100 * blockIdx.x + threadIdx.x);
  emulator::sync_cluster();
  a.out[blockIdx.x * blockDim.x + threadIdx.x] = *emulator::mapa(values + threadIdx.x, (blockIdx.x + 1) % 3);
  emulator::sync_cluster();  // a block's shared memory is there as long as the block is
}

// out[i]: the sum of the values that the i-th threads of both blocks sent, over rounds that alternate between two buffers.
extern "C" __global__ void __cluster_dims__(1, 2, 1) sum_by_st_async(const Argument a) {
  __shared__ __align__(16) double sent[2][2][THREADS];
  __shared__ unsigned long long barrier[2];
  for (int i = 0; i < 2 && threadIdx.x == 0; ++i) emulator::mbarrier_init(&barrier[i]);
  emulator::sync_cluster();
  double sum = 0.0;
  for (unsigned round = 0; round < 5; ++round) {
    const unsigned stage = round % 2;
    if (threadIdx.x == 0) emulator::mbarrier_expect_tx(&barrier[stage], 2 * 8 * int(blockDim.x));
    for (int block = 0; block < 2; ++block) {
      emulator::st_async(
          &sent[stage][blockIdx.y % 2][threadIdx.x], &barrier[stage], block, double(round + 10 * blockIdx.y));
    }
    emulator::mbarrier_wait(&barrier[stage], round / 2 % 2);
    sum += sent[stage][0][threadIdx.x] + sent[stage][1][threadIdx.x];
  }
  a.out[place_of_block() * blockDim.x + threadIdx.x] = float(sum);
}

// A block's barrier is its own: the blocks of a cluster pass different numbers of them.
extern "C" __global__ void __cluster_dims__(1, 2, 1) own_barriers(const Argument a) {
  int count = 0;
  for (unsigned round = 0; round <= 2 * blockIdx.y; ++round) count += __syncthreads_count(threadIdx.x < 3);
  a.out[place_of_block() * blockDim.x + threadIdx.x] = float(count);
}

// ------------------------------------------------------------------------------------------------

extern "C" __global__ void __cluster_dims__(1, 2, 1) gives_too_early(const Argument a) {
  __shared__ float given[THREADS];
  *emulator::mapa(&given[threadIdx.x], 1 - int(blockIdx.y)) = 1.0f;  // too early
  emulator::sync_cluster();
  a.out[place_of_block() * blockDim.x + threadIdx.x] = given[threadIdx.x];
}

extern "C" __global__ void __cluster_dims__(1, 2, 1) gives_too_late(const Argument a) {
  __shared__ float given[THREADS];
  given[threadIdx.x] = 0.0f;
  emulator::sync_cluster();
  a.out[place_of_block() * blockDim.x + threadIdx.x] = given[threadIdx.x];
  if (blockIdx.y == 0) return;
  for (int round = 0; round < 3; ++round) __syncthreads();
  *emulator::mapa(&given[threadIdx.x], 0) = 1.0f;  // too late
}

extern "C" __global__ void __cluster_dims__(1, 2, 1) gives_to_nobody(const Argument a) {
  __shared__ float given[THREADS];
  emulator::sync_cluster();
  *emulator::mapa(&given[threadIdx.x], int(a.index)) = 1.0f;  // to nobody
}

extern "C" __global__ void __cluster_dims__(1, 2, 1) gives_global_memory(const Argument a) {
  emulator::sync_cluster();
  *emulator::mapa(a.out, 0) = 1.0f;  // global memory
}

extern "C" __global__ void __cluster_dims__(1, 2, 1) block_stays_away(const Argument) {
  if (blockIdx.y == 1) return;
  emulator::sync_cluster();  // without block 1
}

extern "C" __global__ void __cluster_dims__(1, 2, 1) blocks_at_two_barriers(const Argument) {
  if (blockIdx.y == 1) emulator::sync_cluster();  // the one
  else emulator::sync_cluster();                  // the other
}

extern "C" __global__ void __cluster_dims__(1, 2, 1) half_a_block_waits(const Argument) {
  if (threadIdx.x % 2) __syncthreads();  // for the rest of the block
  else emulator::sync_cluster();         // for the cluster
}

extern "C" __global__ void __cluster_dims__(1, 2, 1) missing_cluster_barrier(const Argument a) {
  __shared__ float given[THREADS];
  emulator::sync_cluster();
  *emulator::mapa(&given[threadIdx.x], 1 - int(blockIdx.y)) = 1.0f;
  __syncthreads();  // where the cluster should wait
  a.out[place_of_block() * blockDim.x + threadIdx.x] = given[threadIdx.x];
  emulator::sync_cluster();
}

// One number is sent to the other block, with what a.index says gone wrong.
extern "C" __global__ void __cluster_dims__(1, 2, 1) wrong_mbarriers(const Argument a) {
  __shared__ float sent;
  __shared__ unsigned long long barrier;
  const bool first = threadIdx.x == 0;
  if (first && a.index != 1) emulator::mbarrier_init(&barrier);
  if (first && a.index == 2) emulator::mbarrier_init(&barrier);  // again
  emulator::sync_cluster();
  if (first) emulator::st_async(&sent, &barrier, 1 - int(blockIdx.y), 1.0f);
  if (first && a.index != 3) emulator::mbarrier_expect_tx(&barrier, a.index == 4 ? 8 : 4);
  if (a.index != 5 && a.index != 6) emulator::mbarrier_wait(&barrier, a.index == 7);
  if (first && a.index == 5) emulator::mbarrier_expect_tx(&barrier, 4);  // the second time before the first is over
  a.out[place_of_block() * blockDim.x + threadIdx.x] = sent;
}

extern "C" __global__ void __cluster_dims__(1, 2, 1) sends_to_who_left(const Argument a) {
  __shared__ float sent;
  __shared__ unsigned long long barrier;
  if (threadIdx.x == 0) emulator::mbarrier_init(&barrier);
  emulator::sync_cluster();
  if (threadIdx.x == 0 && blockIdx.y == 1) emulator::st_async(&sent, &barrier, 0, 1.0f);
  emulator::sync_cluster();
  a.out[place_of_block() * blockDim.x + threadIdx.x] = 0.0f;  // nobody waited
}

extern "C" __global__ void __cluster_dims__(1, 9, 1) nine_blocks(const Argument) {}
