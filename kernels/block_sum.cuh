// Sums over the threads that share a token: those of a block, or of a cluster of blocks.
//
// A warp adds up its lanes' numbers by shuffles and leaves its share in shared memory, from where every thread adds
// the shares of all warps. Blocks of a cluster (from sm_90 on) send their shares into each other's shared memory.
// Sent numbers are counted where they arrive, and a thread waits for the count: a barrier of the cluster would have to
// order all that its threads ever wrote, and would empty the cache that the parameters are in.
#pragma once

#include "common.cuh"

constexpr int WARPS = THREADS / 32, ALL_WARPS = CLUSTER * WARPS;
constexpr unsigned ALL_LANES = 0xffffffffu;

// --- blocks that share a token ------------------------------------------------------------------
// They stand along the grid's second axis.

#if CLUSTER > 1
#define TOGETHER __cluster_dims__(1, CLUSTER, 1)
#else
#define TOGETHER
#endif

// Which of them this is.
__device__ __forceinline__ int rank() { return CLUSTER > 1 ? static_cast<int>(blockIdx.y) : 0; }

#if CLUSTER > 1
using Arrivals = unsigned long long;  // a count in shared memory (an mbarrier)

#ifndef CUDA_ON_CPU
__device__ __forceinline__ unsigned address_of(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}
__device__ __forceinline__ unsigned address_in_block(const void* shared, int block) {
  unsigned address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(address_of(shared)), "r"(block));
  return address;
}
#endif

// Makes counts ready, before the barrier of the cluster that all its kernels begin with.
template <int N> __device__ __forceinline__ void prepare(Arrivals (&arrivals)[N]) {
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
#ifdef CUDA_ON_CPU
      emulator::prepare_arrivals(&arrivals[i]);
#else
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address_of(&arrivals[i])) : "memory");
#endif
    }
  }
#ifdef CUDA_ON_CPU
  emulator::sync_cluster();
#else
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// Says how many bytes will arrive. One thread of the block does.
__device__ __forceinline__ void expect(Arrivals& arrivals, int bytes) {
#ifdef CUDA_ON_CPU
  emulator::expect_arrivals(&arrivals, bytes);
#else
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               ::"r"(address_of(&arrivals)), "r"(bytes) : "memory");
#endif
}

// Sends a number to where `shared` is in a block, and has it counted there.
template <class T>
__device__ __forceinline__ void send(T* shared, Arrivals& arrivals, int block, T x) {
#ifdef CUDA_ON_CPU
  emulator::send(shared, &arrivals, block, x);
#else
  const unsigned to = address_in_block(shared, block), count = address_in_block(&arrivals, block);
  if constexpr (sizeof(T) == 4) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];"
                 ::"r"(to), "f"(x), "r"(count) : "memory");
  } else {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f64 [%0], %1, [%2];"
                 ::"r"(to), "d"(x), "r"(count) : "memory");
  }
#endif
}

// Waits until all of it is there. That orders the shared memory of the block, which is all that is exchanged: an order
// of the cluster would empty the first-level cache here, too. `parity`: how often the count was waited for before,
// modulo two.
__device__ __forceinline__ void await_arrivals(Arrivals& arrivals, unsigned parity) {
#ifdef CUDA_ON_CPU
  emulator::await_arrivals(&arrivals, parity);
#else
  unsigned arrived;
  do {
    asm volatile(
        "{\n"
        ".reg .pred arrived;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 arrived, [%1], %2;\n"
        "selp.u32 %0, 1, 0, arrived;\n"
        "}"
        : "=r"(arrived) : "r"(address_of(&arrivals)), "r"(parity) : "memory");
  } while (!arrived);
#endif
}
#endif

// --- sums ---------------------------------------------------------------------------------------

// Sums P numbers (a power of two, at most 32) over the warp. While more than one number is left, the
// halves of the warp swap halves of the numbers, so that P numbers cost about P + log2(32/P) shuffles
// instead of 5·P. Lane l ends up with number l·P/32.
template <int P, int LANES = 16> __device__ __forceinline__ Real warp_sum(Real (&x)[P]) {
  constexpr int HALF = P / 2;
  if constexpr (HALF == 0) {
#pragma unroll
    for (int lanes = LANES; lanes > 0; lanes /= 2) {
      x[0] += __shfl_xor_sync(ALL_LANES, x[0], lanes);
    }
    return x[0];
  } else {
    Real half[HALF];  // of its own, not the front of x: that would be kept in memory
    const bool upper = threadIdx.x & LANES;
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
      const Real sent = upper ? x[i] : x[i + HALF];
      half[i] = (upper ? x[i + HALF] : x[i]) + __shfl_xor_sync(ALL_LANES, sent, LANES);
    }
    return warp_sum<HALF, LANES / 2>(half);
  }
}

// Sums of N numbers over the token's threads, the same bits in every one. Two buffers take turns, so that it is enough
// to wait once: whoever writes a buffer again has waited for the other one, and so for all who still read this.
template <int MOST> struct BlockSum {
  struct Buffer {
    Real shares[2][MOST > 0 ? MOST : 1][ALL_WARPS];
#if CLUSTER > 1
    Arrivals arrivals[2];
#endif
  };

  Buffer& buffer;
  unsigned turn = 0, parity = 0;

  __device__ explicit BlockSum(Buffer& buffer) : buffer(buffer) {
#if CLUSTER > 1
    prepare(buffer.arrivals);
#endif
  }

  template <int N> __device__ __forceinline__ void operator()(Real (&x)[N]) {
    static_assert(N <= MOST, "the buffer is made for the longest sum");
#if CLUSTER > 1
    if (threadIdx.x == 0) expect(buffer.arrivals[turn], N * ALL_WARPS * static_cast<int>(sizeof(Real)));
    gather<N, 0>(x);
    await_arrivals(buffer.arrivals[turn], parity);
    parity ^= turn;
#else
    gather<N, 0>(x);
    __syncthreads();
#endif
    add_warps(x);
    turn ^= 1;
  }

 private:
  // The warps' shares of each number. Of many warps a lane adds a few shares of one number, then lanes do; of few
  // every thread adds all by itself.
  template <int N> __device__ __forceinline__ void add_warps(Real (&x)[N]) const {
    if constexpr (ALL_WARPS < 5) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        x[n] = Real(0);
#pragma unroll
        for (int warp = 0; warp < ALL_WARPS; ++warp) x[n] += buffer.shares[turn][n][warp];
      }
    } else {
      constexpr int SHARES = ALL_WARPS % 4 == 0 ? 4 : ALL_WARPS % 2 == 0 ? 2 : 1, EACH = ALL_WARPS / SHARES;
      static_assert(EACH <= 32, "lanes enough for a number's shares");
      constexpr int LANES = EACH > 16 ? 32 : EACH > 8 ? 16 : EACH > 4 ? 8 : EACH > 2 ? 4 : 2;  // of a number
      constexpr int NUMBERS = 32 / LANES, ROUNDS = (N + NUMBERS - 1) / NUMBERS;
      const int lane = threadIdx.x % 32, first = lane % LANES * SHARES;
      Real sums[ROUNDS];
#pragma unroll
      for (int round = 0; round < ROUNDS; ++round) {
        const int n = round * NUMBERS + lane / LANES;
        sums[round] = Real(0);
        if (n < N && first < ALL_WARPS) {
          Packet<Real, SHARES> shares;
          shares.get(&buffer.shares[turn][n][first]);
#pragma unroll
          for (int share = 0; share < SHARES; ++share) sums[round] += shares[share];
        }
#pragma unroll
        for (int lanes = LANES / 2; lanes > 0; lanes /= 2) {
          sums[round] += __shfl_xor_sync(ALL_LANES, sums[round], lanes);
        }
      }
#pragma unroll
      for (int n = 0; n < N; ++n) {
        x[n] = __shfl_sync(ALL_LANES, sums[n / NUMBERS], n % NUMBERS * LANES);
      }
    }
  }

  // Numbers FIRST … N−1, the largest power of two of them at a time.
  template <int N, int FIRST> __device__ __forceinline__ void gather(const Real (&x)[N]) {
    constexpr int LEFT = N - FIRST;
    constexpr int P = LEFT >= 32 ? 32 : LEFT >= 16 ? 16 : LEFT >= 8 ? 8 : LEFT >= 4 ? 4 : LEFT >= 2 ? 2 : 1;
    Real group[P];
#pragma unroll
    for (int i = 0; i < P; ++i) group[i] = x[FIRST + i];
    const Real sum = warp_sum<P>(group);
    constexpr int LANES = 32 / P;  // that know the same sum
    const int lane = threadIdx.x % 32;
    Real* const share = &buffer.shares[turn][FIRST + lane / LANES][rank() * WARPS + threadIdx.x / 32];
#if CLUSTER > 1
#pragma unroll
    for (int block = lane % LANES; block < CLUSTER; block += LANES) {
      send(share, buffer.arrivals[turn], block, sum);
    }
#else
    if (lane % LANES == 0) *share = sum;
#endif
    if constexpr (FIRST + P < N) gather<N, FIRST + P>(x);
  }
};
