// expand: x (tokens, D) → X (tokens, D, M), X_t,ij = Σ_s w_ijs x_{t−s,i}, or repetition (CONV == 0).
//
// Forward, per token:  reads x (D elements), writes X (M·D). Nothing is saved for the backward beside x. A cached step
// also reads x of the K − 1 tokens before each sequence, and copies that of its last K − 1 tokens for the next.
// Backward, per token: reads dX (M·D) and x (D), writes dx (D).
// Reduced over the block's tokens: dw, D·M·TAPS numbers, by the thread that owns the feature; then reduce.cu.
// Moved per token: forward (M + 1)·D elements, backward (M + 2)·D.
//
// Features are independent of each other, so a thread owns one packet of them and processes every gridDim.y-th chunk of
// the sequences, without shared memory or barriers. It loads TOKENS_AHEAD tokens before it uses the first. Weights, the
// last K values of x and the sums of dw are in registers (KEEP_IN_REGISTERS). The backward also goes forward in time:
// dX_t adds to the K sums dx_{t−K+1} … dx_t, and dx_{t−K+1} is then complete. It reads dX of the K − 1 tokens after its
// chunk; forward and backward read x of the K − 1 tokens before it.
//
// If a sequence holds several documents (DOCUMENTS), no token looks back beyond the start of its own; one byte per token
// says where one starts.
//
// If the weights do not fit in registers (KEEP_IN_REGISTERS == 0), expand_by_tap.cuh processes one tap at a time.

#include "common.cuh"

constexpr int ELEMENTS = FEATURES * M;
constexpr int BIAS_SUMS = (1 + M + 7) / 8 * 8;  // never written: `reduce` expects the sums of biases here
constexpr long long PARTIAL = static_cast<long long>(D) * M * TAPS + BIAS_SUMS;
static_assert(D % FEATURES == 0 && (CONV || TAPS == 1), "the plan keeps to these");

struct Expand {
  const X_T* x;
  const WEIGHT_T* weight;
  STATE_T* state;
  const X_T* before;                     // (sequences, TAPS − 1, D), or null for zeros
  X_T* new_before;                       // the same, or null
  const unsigned char* document_starts;  // (tokens): not 0 where a document starts; if DOCUMENTS
  long long chunks, time, chunk;
};

struct ExpandBackward {
  const X_T* x;
  const WEIGHT_T* weight;
  const STATE_T* grad_state;
  X_T* grad_x;
  Real* partial;
  const unsigned char* document_starts;
  long long chunks, time, chunk;
};

// Tokens first … last − 1 of a chunk, and their sequence with its start and end.
struct Chunk {
  long long sequence, start, first, last, end;

  __device__ Chunk(long long index, long long time, long long chunk) {
    const long long per_sequence = (time + chunk - 1) / chunk;
    sequence = index / per_sequence;
    start = sequence * time;
    end = start + time;
    first = start + index % per_sequence * chunk;
    last = first + chunk < end ? first + chunk : end;
  }
};

// True if a document starts with this token of the sequence, so that nothing looks back beyond it.
template <class Arguments>
DEVICE bool starts_document(const Arguments& e, const Chunk& c, long long token) {
  if constexpr (DOCUMENTS) return token >= c.start && token < c.end && e.document_starts[token] != 0;
  return false;
}

// Loads x of a token, or what is kept of one before its sequence, or zeros.
DEVICE void load_x(
    Packet<X_T, FEATURES>& packet, const X_T* x, const X_T* before, const Chunk& c, long long token, int feature) {
  const long long kept = token - c.start + TAPS - 1;
  if (token >= c.start) packet.load_streaming(x + token * D + feature);
  else if (before && kept >= 0) packet.load_streaming(before + (c.sequence * (TAPS - 1) + kept) * D + feature);
  else packet.clear();
}

// Leaves x of a sequence's last TAPS − 1 tokens to the next call.
DEVICE void leave(const Expand& e, const Chunk& c, int feature) {
  if (!e.new_before || c.last < c.end) return;
  bool visible = true;  // from the token after the sequence
#pragma unroll 1
  for (int kept = TAPS - 2; kept >= 0; --kept) {
    Packet<X_T, FEATURES> packet;
    const long long token = c.end - (TAPS - 1) + kept;
    load_x(packet, e.x, e.before, c, token, feature);
    if (starts_document(e, c, token + 1)) visible = false;
    if (!visible) packet.clear();
    packet.store_streaming(e.new_before + (c.sequence * (TAPS - 1) + kept) * D + feature);
  }
}

// Writes this thread's part of the block's sums to `partial`: dw of one tap, of its own features. Blocks along y take
// different chunks.
DEVICE void store_sums(const ExpandBackward& e, int feature, int tap, const Real (&sums)[ELEMENTS]) {
#pragma unroll
  for (int j = 0; j < M; ++j) {
    Packet<Real, FEATURES> sum;
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) sum.element[f] = sums[f * M + j];
    sum.store_cached(e.partial + blockIdx.y * PARTIAL + (static_cast<long long>(tap) * M + j) * D + feature);
  }
}

#if KEEP_IN_REGISTERS
// --- weights, past tokens and sums in registers --------------------------------------------------

constexpr int TOKENS_AHEAD = 4;

// Weights of a packet's features, of all channels and taps.
struct Weight {
  Packet<WEIGHT_T, ELEMENTS * TAPS> packet;

  __device__ Weight(const WEIGHT_T* weight, int feature) {
    if constexpr (CONV) packet.load_readonly(weight + static_cast<long long>(feature) * M * TAPS);
  }
  DEVICE Real at(int i, int tap) const { return CONV ? packet[i * TAPS + tap] : Real(1); }
};

// x_t, x_{t−1}, … x_{t−K+1} of a packet's features.
struct Past {
  Real x[TAPS][FEATURES] = {};

  // Loads the tokens before the chunk.
  template <class Arguments>
  __device__ Past(const Arguments& e, const X_T* before, const Chunk& c, int feature) {
    bool visible = true;
#pragma unroll
    for (int back = 1; back < TAPS; ++back) {
      Packet<X_T, FEATURES> packet;
      load_x(packet, e.x, before, c, c.first - back, feature);
      if (starts_document(e, c, c.first - back + 1)) visible = false;
      if (!visible) packet.clear();
      packet.get(x[back - 1]);
    }
  }
  DEVICE void clear() {
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap)
#pragma unroll
      for (int f = 0; f < FEATURES; ++f) x[tap][f] = Real(0);
  }
  DEVICE void push(const Packet<X_T, FEATURES>& packet) {
#pragma unroll
    for (int tap = TAPS - 1; tap > 0; --tap)
#pragma unroll
      for (int f = 0; f < FEATURES; ++f) x[tap][f] = x[tap - 1][f];
    packet.get(x[0]);
  }
};

DEVICE void forward(const Expand& e, const Chunk& c, const Weight& weight, int feature) {
  Past past(e, e.before, c, feature);
  for (long long token = c.first; token < c.last; token += TOKENS_AHEAD) {
    Packet<X_T, FEATURES> x[TOKENS_AHEAD];
    bool starts[TOKENS_AHEAD];
#pragma unroll
    for (int i = 0; i < TOKENS_AHEAD; ++i) {
      starts[i] = starts_document(e, c, token + i);
      if (token + i < c.last) x[i].load_streaming(e.x + (token + i) * D + feature);
    }
#pragma unroll
    for (int i = 0; i < TOKENS_AHEAD; ++i) {
      if (token + i >= c.last) break;
      if (starts[i]) past.clear();
      past.push(x[i]);
      Real channels[ELEMENTS];
#pragma unroll
      for (int i = 0; i < ELEMENTS; ++i) {
        Real sum = Real(0);
#pragma unroll
        for (int tap = 0; tap < TAPS; ++tap) sum += weight.at(i, tap) * past.x[tap][i / M];
        channels[i] = CONV ? sum : past.x[0][i / M];
      }
      Packet<STATE_T, ELEMENTS> state;
      state.set(channels);
      state.store_streaming(e.state + ((token + i) * D + feature) * M);
    }
  }
}

// Sums of dw.
struct Sums { Real tap[TAPS][ELEMENTS] = {}; };

struct BackwardPass {
  const ExpandBackward& e;
  const Chunk& c;
  const Weight& weight;
  Sums& sums;
  const int feature;
  Past past;
  Real dx[TAPS][FEATURES] = {};  // dx_t, dx_{t−1}, …
  // How many tokens back the current one may look. Too large until a document starts in the chunk, which affects only dx
  // of tokens before the chunk, and that is dropped.
  int reach = TAPS - 1;

  __device__ BackwardPass(const ExpandBackward& e, const Chunk& c, const Weight& weight, Sums& sums, int feature)
      : e(e), c(c), weight(weight), sums(sums), feature(feature), past(e, nullptr, c, feature) {}

  // Adds dX_t to dx and, unless the token lies after the chunk, dX_t x_{t−s} to the sums of dw. starts: a document
  // starts with it.
  DEVICE void run(long long token, const Packet<STATE_T, ELEMENTS>& grad, const Packet<X_T, FEATURES>& x, bool starts) {
    const bool own = token < c.last;
    if constexpr (DOCUMENTS) {
      reach = starts ? 0 : reach < TAPS - 1 ? reach + 1 : reach;
      if (starts) past.clear();
    }
    if (CONV && own) past.push(x);
#pragma unroll
    for (int tap = 0; tap < TAPS; ++tap)
#pragma unroll
      for (int i = 0; i < ELEMENTS; ++i) {
        if (!DOCUMENTS || tap <= reach) dx[tap][i / M] += weight.at(i, tap) * grad[i];
        if (CONV && own) sums.tap[tap][i] += grad[i] * past.x[tap][i / M];
      }
    if (token - (TAPS - 1) >= c.first) {
      Packet<X_T, FEATURES> complete;
      complete.set(dx[TAPS - 1]);
      complete.store_streaming(e.grad_x + (token - (TAPS - 1)) * D + feature);
    }
#pragma unroll
    for (int tap = TAPS - 1; tap >= 0; --tap)
#pragma unroll
      for (int f = 0; f < FEATURES; ++f) dx[tap][f] = tap > 0 ? dx[tap > 0 ? tap - 1 : 0][f] : Real(0);
  }
};

DEVICE void backward(const ExpandBackward& e, const Chunk& c, const Weight& weight, Sums& sums, int feature) {
  BackwardPass pass(e, c, weight, sums, feature);
  const long long behind = c.last + TAPS - 1;
  for (long long token = c.first; token < behind; token += TOKENS_AHEAD) {
    Packet<STATE_T, ELEMENTS> grad[TOKENS_AHEAD];
    Packet<X_T, FEATURES> x[TOKENS_AHEAD];
    bool starts[TOKENS_AHEAD];
#pragma unroll
    for (int i = 0; i < TOKENS_AHEAD; ++i) {
      starts[i] = starts_document(e, c, token + i);
      grad[i].clear();
      if (token + i < behind && token + i < c.end) {
        grad[i].load_streaming(e.grad_state + ((token + i) * D + feature) * M);
      }
      if (CONV && token + i < c.last) x[i].load_streaming(e.x + (token + i) * D + feature);
    }
#pragma unroll
    for (int i = 0; i < TOKENS_AHEAD; ++i)
      if (token + i < behind) pass.run(token + i, grad[i], x[i], starts[i]);
  }
}

DEVICE void forward(const Expand& e, int feature) {
  const Weight weight(e.weight, feature);
  for (long long index = blockIdx.y; index < e.chunks; index += gridDim.y) {
    const Chunk chunk(index, e.time, e.chunk);
    forward(e, chunk, weight, feature);
    leave(e, chunk, feature);
  }
}

DEVICE void backward(const ExpandBackward& e, int feature) {
  const Weight weight(e.weight, feature);
  Sums sums;
  for (long long index = blockIdx.y; index < e.chunks; index += gridDim.y) {
    backward(e, Chunk(index, e.time, e.chunk), weight, sums, feature);
  }
  if (!CONV || !e.partial) return;
#pragma unroll
  for (int tap = 0; tap < TAPS; ++tap) store_sums(e, feature, tap, sums.tap[tap]);
}

#else
#include "expand_by_tap.cuh"
#endif

DEVICE int own_feature() { return static_cast<int>(blockIdx.x * THREADS + threadIdx.x) * FEATURES; }

extern "C" __global__ void __launch_bounds__(THREADS) expand_fwd(const Expand e) {
  const int feature = own_feature();
  if (feature < D) forward(e, feature);
}

extern "C" __global__ void __launch_bounds__(THREADS) expand_bwd(const ExpandBackward e) {
  const int feature = own_feature();
  if (feature < D) backward(e, feature);
}
