// Sums over the threads that share a token: the threads of a block, or of a cluster of blocks.
//
// A warp reduces its lanes' numbers by shuffles and writes the partial sum to shared memory. Every thread then adds the
// partial sums of all warps. The blocks of a cluster (sm_90 and newer) write their partial sums into each other's shared
// memory with st.async, and an mbarrier in the receiving block counts the bytes. A barrier of the whole cluster would be
// simpler, but it orders all earlier writes of the threads and invalidates L1, which holds the parameters.
#pragma once

#include "common.cuh"

constexpr int WARPS = THREADS / 32, CLUSTER_WARPS = CLUSTER * WARPS;
constexpr unsigned FULL_MASK = 0xffffffffu;

// --- clusters -----------------------------------------------------------------------------------
// The blocks of a cluster share a token. They lie along the grid's y axis.

#if CLUSTER > 1
#define CLUSTER_DIMS __cluster_dims__(1, CLUSTER, 1)
#else
#define CLUSTER_DIMS
#endif

// This block's rank in its cluster.
DEVICE int block_rank() { return CLUSTER > 1 ? static_cast<int>(blockIdx.y) : 0; }

// An mbarrier in shared memory. It counts the bytes that the cluster's blocks send into this block, or those of bulk copies.
struct MBarrier {
  unsigned long long state;

  // Ends with a barrier of the cluster, or of a block by itself: nothing may be sent before every barrier is initialised.
  template <int N> static DEVICE void init(MBarrier (&barriers)[N]) {
    if (threadIdx.x == 0) {
#pragma unroll
      for (int i = 0; i < N; ++i) ptx::mbarrier_init(&barriers[i]);
    }
    ptx::mbarrier_init_fence();
    if constexpr (CLUSTER > 1) ptx::sync_cluster();
    else __syncthreads();
  }
  // Announces how many bytes will arrive in this phase. One thread of the block calls it.
  DEVICE void expect_tx(int bytes) { ptx::mbarrier_expect_tx(this, bytes); }
  // Stores x at the address `shared` of another block, whose own copy of this barrier counts it.
  template <class T> DEVICE void st_async(T* shared, int block, T x) { ptx::st_async(shared, this, block, x); }
  // Starts a copy of neighbouring bytes to this block's shared memory. One thread of the block calls it.
  DEVICE void cp_async_bulk(void* shared, const void* from, int bytes) {
    ptx::cp_async_bulk(shared, from, bytes, this);
  }
  // Waits until all announced bytes of the phase with this parity have arrived.
  DEVICE void wait(unsigned parity) { ptx::mbarrier_wait(this, parity); }
};

// --- sums ---------------------------------------------------------------------------------------

// Sums P numbers (a power of two, at most 32) over the warp. While more than one number is left, the two halves of the
// warp exchange halves of the numbers, so P numbers cost about P + log2(32/P) shuffles instead of 5·P. Lane l ends up
// with the sum of number l·P/32.
template <int P, int LANES = 16> DEVICE Real warp_sum(Real (&x)[P]) {
  constexpr int HALF = P / 2;
  if constexpr (HALF == 0) {
#pragma unroll
    for (int lanes = LANES; lanes > 0; lanes /= 2) {
      x[0] += __shfl_xor_sync(FULL_MASK, x[0], lanes);
    }
    return x[0];
  } else {
    Real half[HALF];  // an array of its own: the front of x would be put into local memory
    const bool upper = threadIdx.x & LANES;
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
      const Real sent = upper ? x[i] : x[i + HALF];
      half[i] = (upper ? x[i + HALF] : x[i]) + __shfl_xor_sync(FULL_MASK, sent, LANES);
    }
    return warp_sum<HALF, LANES / 2>(half);
  }
}

// Sums N numbers over the token's threads. Every thread gets the same bits.
//
// Two buffers alternate, so one barrier per sum is enough: a thread writes a buffer again only after the next sum's
// barrier, and by then every thread has read it.
template <int MAX_SUMS> struct BlockSum {
  struct Buffer {
    Real partials[2][MAX_SUMS > 0 ? MAX_SUMS : 1][CLUSTER_WARPS];
#if CLUSTER > 1
    MBarrier barriers[2];
#endif
  };

  Buffer& buffer;
  unsigned current = 0, parity = 0;  // the buffer in use, the phase of its mbarrier

  __device__ explicit BlockSum(Buffer& buffer) : buffer(buffer) {
#if CLUSTER > 1
    MBarrier::init(buffer.barriers);
#endif
  }

  template <int N> DEVICE void operator()(Real (&x)[N]) {
    start(x);
    finish(x);
  }

  // The two halves of a sum, for work between them: the warps' partial sums, then the barrier and the addition.
  template <int N> DEVICE void start(const Real (&x)[N]) {
    static_assert(N <= MAX_SUMS, "the buffer is made for the longest sum");
#if CLUSTER > 1
    if (threadIdx.x == 0) buffer.barriers[current].expect_tx(N * CLUSTER_WARPS * static_cast<int>(sizeof(Real)));
#endif
    write_partials<N, 0>(x);
  }
  template <int N> DEVICE void finish(Real (&x)[N]) {
#if CLUSTER > 1
    buffer.barriers[current].wait(parity);
    // The parity of both barriers flips after the second one has been used.
    parity ^= current;
#else
    __syncthreads();
#endif
    sum_partials(x);
    current ^= 1;
  }
  // As `finish`, but lane l gets the sum of number l alone, in the same bits.
  template <int N> DEVICE Real finish_one_per_lane() {
    static_assert(N <= 32 && CLUSTER == 1, "a number per lane, of a block by itself");
    __syncthreads();
    const int lane = threadIdx.x % 32;
    const Real sum = total(lane < N ? lane : N - 1);
    current ^= 1;
    return sum;
  }

 private:
  static constexpr bool FEW_WARPS = CLUSTER_WARPS < 5;  // every thread adds the partial sums of them all
  static constexpr int PARTIALS = FEW_WARPS                ? CLUSTER_WARPS
                                  : CLUSTER_WARPS % 4 == 0 ? 4
                                  : CLUSTER_WARPS % 2 == 0 ? 2
                                                           : 1;
  static constexpr int EACH = CLUSTER_WARPS / PARTIALS;
  static_assert(EACH <= 32, "one warp adds the partial sums of a number");
  static constexpr int LANES = FEW_WARPS   ? 1
                               : EACH > 16 ? 32
                               : EACH > 8  ? 16
                               : EACH > 4  ? 8
                               : EACH > 2  ? 4
                                           : 2;  // per number

  // Adds PARTIALS of all warps' partial sums of number n, from number `first` on.
  DEVICE Real sum_of_few(int n, int first) const {
    Packet<Real, PARTIALS> partials;
    partials.load_cached(&buffer.partials[current][n][first]);
    Real sum = Real(0);
#pragma unroll
    for (int partial = 0; partial < PARTIALS; ++partial) sum += partials[partial];
    return sum;
  }

  // Adds all partial sums of number n by one thread, in the order in which sum_partials adds its lanes.
  template <int STEP = 1> DEVICE Real total(int n, int lane = 0) const {
    if constexpr (STEP < LANES) return total<2 * STEP>(n, lane) + total<2 * STEP>(n, lane + STEP);
    else return lane < EACH ? sum_of_few(n, lane * PARTIALS) : Real(0);
  }

  // Adds the partial sums of all warps. If there are few warps, every thread adds them all. Otherwise a lane adds a few
  // partial sums of one number, and shuffles add up the lanes.
  template <int N> DEVICE void sum_partials(Real (&x)[N]) const {
    if constexpr (FEW_WARPS) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        x[n] = Real(0);
#pragma unroll
        for (int warp = 0; warp < CLUSTER_WARPS; ++warp) x[n] += buffer.partials[current][n][warp];
      }
    } else {
      constexpr int NUMBERS = 32 / LANES, ROUNDS = (N + NUMBERS - 1) / NUMBERS;
      const int lane = threadIdx.x % 32, first = lane % LANES * PARTIALS;
      Real sums[ROUNDS];
#pragma unroll
      for (int round = 0; round < ROUNDS; ++round) {
        const int n = round * NUMBERS + lane / LANES;
        sums[round] = Real(0);
        if (n < N && first < CLUSTER_WARPS) sums[round] = sum_of_few(n, first);
#pragma unroll
        for (int lanes = LANES / 2; lanes > 0; lanes /= 2) {
          sums[round] += __shfl_xor_sync(FULL_MASK, sums[round], lanes);
        }
      }
#pragma unroll
      for (int n = 0; n < N; ++n) {
        x[n] = __shfl_sync(FULL_MASK, sums[n / NUMBERS], n % NUMBERS * LANES);
      }
    }
  }

  // Reduces numbers FIRST … N−1 over the warp, the largest power of two of them at a time, and writes the results to
  // this block or, in a cluster, to every block.
  template <int N, int FIRST> DEVICE void write_partials(const Real (&x)[N]) {
    constexpr int LEFT = N - FIRST;
    constexpr int P = LEFT >= 32 ? 32 : LEFT >= 16 ? 16 : LEFT >= 8 ? 8 : LEFT >= 4 ? 4 : LEFT >= 2 ? 2 : 1;
    Real group[P];
#pragma unroll
    for (int i = 0; i < P; ++i) group[i] = x[FIRST + i];
    const Real sum = warp_sum<P>(group);
    constexpr int LANES = 32 / P;  // lanes that hold the same sum
    const int lane = threadIdx.x % 32;
    Real* const partial = &buffer.partials[current][FIRST + lane / LANES][block_rank() * WARPS + threadIdx.x / 32];
#if CLUSTER > 1
#pragma unroll
    for (int block = lane % LANES; block < CLUSTER; block += LANES) {
      buffer.barriers[current].st_async(partial, block, sum);
    }
#else
    if (lane % LANES == 0) *partial = sum;
#endif
    if constexpr (FIRST + P < N) write_partials<N, FIRST + P>(x);
  }
};
