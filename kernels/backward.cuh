// What the kernels of the backward share: their arguments, the numbers that every thread knows of a token, the
// read's rows, and the walk over a block's tokens.
#pragma once

#define BACKWARD
#include "token_stream.cuh"

struct Gradients {
  const STATE_T* grad_state;
  const CONTEXT_T* grad_context;
  const Real* grad_new_value;
  const Real* grad_new_gate;
  STATE_T* state;
  DIRECTION_T* direction;
  Real* value;
  Real* gate;
  Real* partial;
  Real* shift;  // c·rstd of every token, for parameters_bwd
};

struct Backward {
  Boundary b;
  Gradients g;
};

// c, then k̂ᵀ(G + w a), then k̂ᵀ(w x̂), where they are needed.
constexpr int ALONG_AT = NORM, NORMED_AT = NORM + M;
constexpr int BLOCK_SUMS = NORM + (REWRITE ? M + (NORM ? M : 0) : 0);

// What every thread knows of a token.
struct Scalars {
  Write write;
  Real gate;           // β
  Real rstd;
  Real shift;          // c·rstd, once it is known
  Real logit;          // dβl
  Real linear[M];      // dvl
};

// What the rewrite's backward needs of g = k̂ᵀG.
struct Turn {
  Real g[M] = {};
  Real back[M] = {};      // β r g: what G loses along k
  Real scale = Real(0);   // dk = scale·(G e − X g) − along·k
  Real along = Real(0);
};

// Where the numbers stand that Scalars are made of, one after the other.
constexpr int GATE_IN = 0, STATS_IN = REWRITE, VALUE_IN = STATS_IN + REWRITE * (1 + M);
constexpr int RSTD_IN = VALUE_IN + REWRITE * M, SHIFT_IN = RSTD_IN + NORM;
constexpr int NEW_GATE_IN = SHIFT_IN + SLICED * NORM, GRAD_GATE_IN = NEW_GATE_IN + GATE;
constexpr int GRAD_VALUE_IN = GRAD_GATE_IN + GATE, NEW_VALUE_IN = GRAD_VALUE_IN + VALUE * M;
constexpr int NUMBERS = NEW_VALUE_IN + VALUE_SIGMOID * M;

// A token's numbers in memory. Every lane asks for its own, a token ahead, and the warp deals them out: as they
// are needed before all else, a token that had to ask for its own would begin with a wait.
struct Record {
  static constexpr int ROUNDS = NUMBERS > 0 ? (NUMBERS + 31) / 32 : 1;

  const Real* from[ROUNDS] = {};
  int stride[ROUNDS] = {};
  Real number[ROUNDS];

  __device__ Record(const Boundary& b, const Gradients& g) {
    if constexpr (REWRITE) {
      place(GATE_IN, 1, b.gate);
      place(STATS_IN, 1 + M, b.stats);
      place(VALUE_IN, M, b.value);
    }
    if constexpr (NORM) place(RSTD_IN, 1, b.rstd);
    if constexpr (NORM && SLICED) place(SHIFT_IN, 1, g.shift);
    if constexpr (GATE) {
      place(NEW_GATE_IN, 1, b.new_gate);
      place(GRAD_GATE_IN, 1, g.grad_new_gate);
    }
    if constexpr (VALUE) place(GRAD_VALUE_IN, M, g.grad_new_value);
    if constexpr (VALUE_SIGMOID) place(NEW_VALUE_IN, M, b.new_value);
  }
  __device__ __forceinline__ void place(int first, int count, const Real* numbers) {
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
      const int i = round * 32 + static_cast<int>(threadIdx.x) % 32 - first;
      if (numbers && i >= 0 && i < count) {
        from[round] = numbers + i;
        stride[round] = count;
      }
    }
  }
  __device__ __forceinline__ void request(long long token) {
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
      number[round] = from[round] ? from[round][token * stride[round]] : Real(0);
    }
  }
  __device__ __forceinline__ Real at(int i) const {
    return __shfl_sync(ALL_LANES, number[i / 32], i % 32);
  }
};

// Of the token that was asked for; the whole warp alike.
__device__ __forceinline__ Scalars scalars(const Boundary& b, const Gradients& g, const Record& record) {
  Scalars s;
  if constexpr (REWRITE) {
    Real value[M];
    s.gate = record.at(GATE_IN);
    s.write.r = record.at(STATS_IN);
#pragma unroll
    for (int j = 0; j < M; ++j) {
      value[j] = record.at(VALUE_IN + j);
      s.write.readout[j] = record.at(STATS_IN + 1 + j);
    }
    s.write.finish(value, s.gate);
  }
  s.rstd = NORM ? record.at(RSTD_IN) : Real(1);
  s.shift = NORM && SLICED ? record.at(SHIFT_IN) : Real(0);
  s.logit = Real(0);
  if constexpr (GATE) {
    const Real gate = record.at(NEW_GATE_IN), grad = record.at(GRAD_GATE_IN);
    if (g.grad_new_gate) s.logit = grad * gate * (Real(1) - gate / Real(2));
  }
#pragma unroll
  for (int j = 0; j < M; ++j) {
    s.linear[j] = Real(0);
    if constexpr (VALUE) s.linear[j] = record.at(GRAD_VALUE_IN + j);
    if constexpr (VALUE_SIGMOID) {
      const Real value = record.at(NEW_VALUE_IN + j);
      if (g.grad_new_value) s.linear[j] *= value * (Real(1) - value / Real(b.value_scale));
    }
  }
  return s;
}

// A token's rows; G is not for parameters_bwd.
struct Feeds {
  Feed<STATE_T, M> state;
  Feed<STATE_T, M, SLICED ? NEVER : SOMETIMES> grad;
  Feed<DIRECTION_T, 1, REWRITE> direction;
  Feed<CONTEXT_T, 1, READ != NONE ? SOMETIMES : NEVER> context;
  Feed<STATE_T, 1, READ == TOKEN> compressed;
  int turn = 0;  // the stage of the token at hand

  __device__ Feeds(const Boundary& b, const Gradients& g, unsigned char*& shared)
      : state(b.state, shared),
        grad(g.grad_state, shared),
        direction(b.direction, shared),
        context(g.grad_context, shared),
        compressed(b.compressed, shared) {}

  // Of a token that is not the chunk's own dx alone is needed.
  __device__ __forceinline__ void request(long long token, int row, int turn, bool own) const {
    context.request(token, row, turn);
    compressed.request(token, row, turn);
    if (!own) return;
    state.request(token, row, turn);
    grad.request(token, row, turn);
    direction.request(token, row, turn);
  }
  __device__ __forceinline__ void take_read(long long token, int row) {
    context.take(token, row, turn, false);
    compressed.take(token, row, turn, false);
  }
  __device__ __forceinline__ void take_own(long long token, int row, bool again) {
    state.take(token, row, turn, again);
    grad.take(token, row, turn, again);
    direction.take(token, row, turn, again);
  }
};

// g = k̂ᵀG, and dv, dβ, each by one thread; k̂ᵀdk̂ follows without a sum of its own.
__device__ __forceinline__ Turn finish(
    const Gradients& g, const Scalars& s, const Real* totals, long long token) {
  Turn turn;
  Real g_e = Real(0), g_p = Real(0);
  turn.scale = s.write.r * s.gate;
#pragma unroll
  for (int j = 0; j < M; ++j) {
    Real total = totals[ALONG_AT + j];
    if constexpr (NORM) total -= s.shift * totals[NORMED_AT + j];
    turn.g[j] = s.write.r * total;
    turn.back[j] = turn.scale * turn.g[j];
    g_e += turn.g[j] * s.write.error[j];
    g_p += turn.g[j] * s.write.readout[j];
    if (writes(j)) g.value[token * M + j] = s.gate * turn.g[j];
  }
  if (writes(0)) g.gate[token] = g_e;
  turn.along = s.write.r * turn.scale * (g_e - g_p);
  return turn;
}

// x̂ of a packet, from x as a token read saved it, else from X'.
__device__ __forceinline__ void compress(
    const Boundary& b, const Feeds& feeds, const Scalars& s, int row,
    const Packet<STATE_T, ELEMENTS>& stored, Real (&normed)[FEATURES]) {
  Compress compress;
  if constexpr (READ != TOKEN) compress.load(b, feature_of(row));
#pragma unroll
  for (int f = 0; f < FEATURES; ++f) {
    Real x = Real(0);
    if constexpr (READ == TOKEN) {
      x = feeds.compressed[row][f];
    } else {
#pragma unroll
      for (int j = 0; j < M; ++j) x += compress.at(f, j) * stored[f * M + j];
    }
    normed[f] = x * s.rstd;
  }
}

// dh' and a of a packet, from dh and what gate and values ask of the context.
__device__ __forceinline__ void read_back(
    const Boundary& b, const Feeds& feeds, const Scalars& s, int row, Real (&dh)[FEATURES],
    Real (&a)[FEATURES]) {
  Parameters parameters;
  parameters.load(b, feature_of(row));
#pragma unroll
  for (int f = 0; f < FEATURES; ++f) {
    Real value = Real(0);
    if constexpr (VALUE) {
#pragma unroll
      for (int j = 0; j < M; ++j) value += s.linear[j] * parameters.value[j][f];
    }
    dh[f] = feeds.context[row][f];
    if constexpr (GATE) dh[f] += s.logit * parameters.gate[f];
    if constexpr (VALUE && !VALUE_FROM_COMPRESSED) dh[f] += value;
    a[f] = s.rstd * parameters.gamma(f) * dh[f] + (VALUE_FROM_COMPRESSED ? value : Real(0));
  }
}

// The block's tokens.
struct Chunk {
  long long first, last;

  __device__ explicit Chunk(const Boundary& b)
      : first(blockIdx.x * b.chunk), last((first + b.chunk < b.tokens ? first + b.chunk : b.tokens) - 1) {}
  __device__ __forceinline__ bool owns(long long token) const { return token <= last; }
};

// Runs `pass` on the block's tokens from the last to the first, as its own. A token read is first given the K − 1
// tokens behind them, which are not, and an empty window at the end of every sequence.
template <class Pass> __device__ __forceinline__ void walk(const Boundary& b, Real* window_rows, Pass& pass) {
  const Chunk& chunk = pass.chunk;
  if constexpr (READ == TOKEN) {
    Window window(b, window_rows);
    window.clear();
    long long position = chunk.last % b.time;
    const long long behind = b.time - 1 - position;
    const long long halo = behind < TAPS - 1 ? behind : TAPS - 1;
    pass.start(chunk.last + halo);
    for (long long token = chunk.last + halo; token > chunk.last; --token) pass.run(&window, token, false);
    for (long long token = chunk.last; token >= chunk.first; --token) {
      pass.run(&window, token, true);
      if (--position >= 0) continue;
      position = b.time - 1;
      window.clear();
    }
  } else {
    pass.start(chunk.last);
    for (long long token = chunk.last; token >= chunk.first; --token) pass.run(nullptr, token, true);
  }
}
