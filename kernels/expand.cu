// expand: x (tokens, D) → X (tokens, D, M), X_t,ij = Σ_s w_ijs x_{t−s,i}, or repetition (CONV = 0).
//
// Moved per token, in elements: forward x in D, X out M·D; backward dX in M·D, x in and dx out D each.
//
// Features do not meet, so a thread owns one packet of them and walks a chunk of one sequence, with
// weights, the last K values of x and the sums of dw in registers: no shared memory, no barriers. The
// backward walks forward too: dX_t adds to the K sums dx_{t−K+1} … dx_t, of which the first is then
// complete. It looks K − 1 tokens behind its chunk for dX, and both look K − 1 tokens ahead of it for x.

#include "common.cuh"

constexpr int ELEMENTS = FEATURES * M;
constexpr int TAIL = (1 + M + 7) / 8 * 8;  // `reduce` expects room for biases behind the sums
constexpr long long PARTIAL = static_cast<long long>(D) * M * TAPS + TAIL;
static_assert(D % FEATURES == 0 && (CONV || TAPS == 1), "the plan's promises");

struct Expand {
  const X_T* x;
  const WEIGHT_T* weight;
  STATE_T* state;
  long long sequences, time, chunk;
};

struct ExpandBackward {
  const X_T* x;
  const WEIGHT_T* weight;
  const STATE_T* grad_state;
  X_T* grad_x;
  Real* partial;
  long long sequences, time, chunk;
};

// The tokens of a chunk, and where their sequence begins and ends.
struct Chunk {
  long long start, first, last, end;

  __device__ Chunk(long long time, long long chunk) {
    const long long per_sequence = (time + chunk - 1) / chunk;
    start = blockIdx.y / per_sequence * time;
    end = start + time;
    first = start + blockIdx.y % per_sequence * chunk;
    last = first + chunk < end ? first + chunk : end;
  }
};

// Kernels of usual length live in registers. Longer ones work, from local memory and slowly.
constexpr bool SHORT = TAPS <= 8;
#if TAPS <= 8
#define UNROLL_TAPS _Pragma("unroll")
#else
#define UNROLL_TAPS _Pragma("unroll 1")
#endif

// w of a packet's features, all channels and taps.
struct Weight {
  Packet<WEIGHT_T, SHORT ? ELEMENTS * TAPS : 1> packet;
  const WEIGHT_T* from;

  __device__ __forceinline__ void load(const WEIGHT_T* weight, int feature) {
    from = weight + static_cast<long long>(feature) * M * TAPS;
    if constexpr (CONV && SHORT) packet.load_shared(from);
  }
  __device__ __forceinline__ Real at(int f, int j, int tap) const {
    if constexpr (!CONV) return Real(1);
    const int i = (f * M + j) * TAPS + tap;
    return SHORT ? packet[SHORT ? i : 0] : widen(from[i]);
  }
};

// x_t, x_{t−1}, … x_{t−K+1} of a packet's features.
struct Past {
  Real x[TAPS][FEATURES] = {};

  __device__ __forceinline__ void push(const X_T* from) {
    Packet<X_T, FEATURES> packet;
    packet.load(from);
    UNROLL_TAPS
    for (int tap = TAPS - 1; tap > 0; --tap)
#pragma unroll
      for (int f = 0; f < FEATURES; ++f) x[tap][f] = x[tap - 1][f];
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) x[0][f] = packet[f];
  }
  // What the tokens before the chunk leave for it.
  __device__ __forceinline__ void begin(const X_T* x, const Chunk& c, int feature) {
    const long long before = c.first - c.start < TAPS - 1 ? c.first - c.start : TAPS - 1;
    for (long long token = c.first - before; token < c.first; ++token) push(x + token * D + feature);
  }
};

__device__ __forceinline__ int own_feature() {
  return static_cast<int>(blockIdx.x * THREADS + threadIdx.x) * FEATURES;
}

extern "C" __global__ void __launch_bounds__(THREADS) expand_fwd(const Expand e) {
  const int feature = own_feature();
  if (feature >= D) return;
  const Chunk c(e.time, e.chunk);
  Weight weight;
  weight.load(e.weight, feature);
  Past past;
  past.begin(e.x, c, feature);
  for (long long token = c.first; token < c.last; ++token) {
    past.push(e.x + token * D + feature);
    Real channels[ELEMENTS];
#pragma unroll
    for (int f = 0; f < FEATURES; ++f)
#pragma unroll
      for (int j = 0; j < M; ++j) {
        Real sum = Real(0);
        UNROLL_TAPS
        for (int tap = 0; tap < TAPS; ++tap) sum += weight.at(f, j, tap) * past.x[tap][f];
        channels[f * M + j] = CONV ? sum : past.x[0][f];
      }
    Packet<STATE_T, ELEMENTS> state;
    state.set(channels);
    state.store(e.state + (token * D + feature) * M);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) expand_bwd(const ExpandBackward e) {
  const int feature = own_feature();
  if (feature >= D) return;
  const Chunk c(e.time, e.chunk);
  Weight weight;
  weight.load(e.weight, feature);
  Past past;
  if constexpr (CONV) past.begin(e.x, c, feature);
  Real sums[TAPS][ELEMENTS] = {};  // dw
  Real dx[TAPS][FEATURES] = {};    // dx_t, dx_{t−1}, …
  for (long long token = c.first; token < c.last + TAPS - 1; ++token) {
    Packet<STATE_T, ELEMENTS> grad;
    grad.clear();
    if (token < c.end) grad.load(e.grad_state + (token * D + feature) * M);
    const bool own = token < c.last;
    if constexpr (CONV) {
      if (own) past.push(e.x + token * D + feature);
    }
    UNROLL_TAPS
    for (int tap = 0; tap < TAPS; ++tap)
#pragma unroll
      for (int f = 0; f < FEATURES; ++f)
#pragma unroll
        for (int j = 0; j < M; ++j) {
          dx[tap][f] += weight.at(f, j, tap) * grad[f * M + j];
          if constexpr (CONV) {
            if (own) sums[tap][f * M + j] += grad[f * M + j] * past.x[tap][f];
          }
        }
    if (token - (TAPS - 1) >= c.first) {
      Packet<X_T, FEATURES> complete;
      complete.set(dx[TAPS - 1]);
      complete.store(e.grad_x + (token - (TAPS - 1)) * D + feature);
    }
    UNROLL_TAPS
    for (int tap = TAPS - 1; tap >= 0; --tap)
#pragma unroll
      for (int f = 0; f < FEATURES; ++f) dx[tap][f] = tap > 0 ? dx[tap > 0 ? tap - 1 : 0][f] : Real(0);
  }
  if constexpr (!CONV) return;
  if (!e.partial) return;
  UNROLL_TAPS
  for (int tap = 0; tap < TAPS; ++tap)
#pragma unroll
    for (int j = 0; j < M; ++j) {
      Packet<Real, FEATURES> sum;
#pragma unroll
      for (int f = 0; f < FEATURES; ++f) sum.element[f] = sums[tap][f * M + j];
      sum.put(e.partial + blockIdx.y * PARTIAL + static_cast<long long>(tap * M + j) * D + feature);
    }
}
