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
  RewriteRead b;
  Gradients g;
};

// c, then k̂ᵀ(G + w a), then k̂ᵀ(w x̂), where they are needed.
constexpr int ALONG_AT = NORM, NORMED_AT = NORM + M;
constexpr int BLOCK_SUMS = NORM + (REWRITE ? M + (NORM ? M : 0) : 0);

// What every thread knows of a token.
struct DerivedScalars {
  RewriteFactors factors;
  Real gate;  // β
  Real rstd;
  Real shift;      // c·rstd, once it is known
  Real logit;      // dβl
  Real linear[M];  // dvl
};

// What the rewrite's backward needs of g = k̂ᵀG.
struct RewriteGrad {
  Real g[M] = {};
  Real back[M] = {};     // β r g: what G loses along k
  Real scale = Real(0);  // dk = scale·(G e − X g) − along·k
  Real along = Real(0);
};

// Where the numbers stand that DerivedScalars are made of, one after the other.
constexpr int GATE_SCALAR = 0, STATS_SCALAR = REWRITE, VALUE_SCALAR = STATS_SCALAR + REWRITE * (1 + M);
constexpr int RSTD_SCALAR = VALUE_SCALAR + REWRITE * M, SHIFT_SCALAR = RSTD_SCALAR + NORM;
constexpr int NEW_GATE_SCALAR = SHIFT_SCALAR + FEATURE_SLICED * NORM, GRAD_GATE_SCALAR = NEW_GATE_SCALAR + GATE;
constexpr int GRAD_VALUE_SCALAR = GRAD_GATE_SCALAR + GATE, NEW_VALUE_SCALAR = GRAD_VALUE_SCALAR + VALUE * M;
constexpr int SCALARS = NEW_VALUE_SCALAR + VALUE_SIGMOID * M;

// A token's numbers in memory. Every lane asks for its own, a token ahead, and the warp deals them out: as they
// are needed before all else, a token that had to ask for its own would begin with a wait.
struct TokenScalars {
  static constexpr int ROUNDS = SCALARS > 0 ? (SCALARS + 31) / 32 : 1;

  const Real* from[ROUNDS] = {};
  int stride[ROUNDS] = {};
  Real lane_value[ROUNDS];

  __device__ TokenScalars(const RewriteRead& b, const Gradients& g) {
    if constexpr (REWRITE) {
      assign(GATE_SCALAR, 1, b.gate);
      assign(STATS_SCALAR, 1 + M, b.stats);
      assign(VALUE_SCALAR, M, b.value);
    }
    if constexpr (NORM) assign(RSTD_SCALAR, 1, b.rstd);
    if constexpr (NORM && FEATURE_SLICED) assign(SHIFT_SCALAR, 1, g.shift);
    if constexpr (GATE) {
      assign(NEW_GATE_SCALAR, 1, b.new_gate);
      assign(GRAD_GATE_SCALAR, 1, g.grad_new_gate);
    }
    if constexpr (VALUE) assign(GRAD_VALUE_SCALAR, M, g.grad_new_value);
    if constexpr (VALUE_SIGMOID) assign(NEW_VALUE_SCALAR, M, b.new_value);
  }
  __device__ __forceinline__ void assign(int first, int count, const Real* numbers) {
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
      const int i = round * 32 + static_cast<int>(threadIdx.x) % 32 - first;
      if (numbers && i >= 0 && i < count) {
        from[round] = numbers + i;
        stride[round] = count;
      }
    }
  }
  __device__ __forceinline__ void prefetch(long long token) {
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
      lane_value[round] = from[round] ? from[round][token * stride[round]] : Real(0);
    }
  }
  __device__ __forceinline__ Real broadcast(int i) const { return __shfl_sync(FULL_MASK, lane_value[i / 32], i % 32); }
};

// Of the token that was asked for; the whole warp alike.
__device__ __forceinline__ DerivedScalars derive(const RewriteRead& b, const Gradients& g, const TokenScalars& loaded) {
  DerivedScalars s;
  if constexpr (REWRITE) {
    Real value[M];
    s.gate = loaded.broadcast(GATE_SCALAR);
    s.factors.r = loaded.broadcast(STATS_SCALAR);
#pragma unroll
    for (int j = 0; j < M; ++j) {
      value[j] = loaded.broadcast(VALUE_SCALAR + j);
      s.factors.readout[j] = loaded.broadcast(STATS_SCALAR + 1 + j);
    }
    s.factors.finish(value, s.gate);
  }
  s.rstd = NORM ? loaded.broadcast(RSTD_SCALAR) : Real(1);
  s.shift = NORM && FEATURE_SLICED ? loaded.broadcast(SHIFT_SCALAR) : Real(0);
  s.logit = Real(0);
  if constexpr (GATE) {
    const Real gate = loaded.broadcast(NEW_GATE_SCALAR), grad = loaded.broadcast(GRAD_GATE_SCALAR);
    if (g.grad_new_gate) s.logit = grad * gate * (Real(1) - gate / Real(2));
  }
#pragma unroll
  for (int j = 0; j < M; ++j) {
    s.linear[j] = Real(0);
    if constexpr (VALUE) s.linear[j] = loaded.broadcast(GRAD_VALUE_SCALAR + j);
    if constexpr (VALUE_SIGMOID) {
      const Real value = loaded.broadcast(NEW_VALUE_SCALAR + j);
      if (g.grad_new_value) s.linear[j] *= value * (Real(1) - value / Real(b.value_scale));
    }
  }
  return s;
}

// A token's rows; G is not for parameters_bwd.
struct TokenInputs {
  TokenStream<STATE_T, M> state;
  TokenStream<STATE_T, M, FEATURE_SLICED ? ABSENT : OPTIONAL> grad;
  TokenStream<DIRECTION_T, 1, REWRITE> direction;
  TokenStream<CONTEXT_T, 1, READ != NONE ? OPTIONAL : ABSENT> context;
  TokenStream<STATE_T, 1, READ == TOKEN> compressed;
  int stage = 0;  // the stage of the token at hand

  __device__ TokenInputs(const RewriteRead& b, const Gradients& g, unsigned char*& shared)
      : state(b.state, shared),
        grad(g.grad_state, shared),
        direction(b.direction, shared),
        context(g.grad_context, shared),
        compressed(b.compressed, shared) {}

  // Of a token that is not the chunk's own dx alone is needed.
  __device__ __forceinline__ void prefetch(long long token, int row, int stage, bool own) const {
    context.prefetch(token, row, stage);
    compressed.prefetch(token, row, stage);
    if (!own) return;
    state.prefetch(token, row, stage);
    grad.prefetch(token, row, stage);
    direction.prefetch(token, row, stage);
  }
  __device__ __forceinline__ void load_read_inputs(long long token, int row) {
    context.load(token, row, stage, false);
    compressed.load(token, row, stage, false);
  }
  __device__ __forceinline__ void load_rewrite_inputs(long long token, int row, bool again) {
    state.load(token, row, stage, again);
    grad.load(token, row, stage, again);
    direction.load(token, row, stage, again);
  }
};

// g = k̂ᵀG, and dv, dβ, each by one thread; k̂ᵀdk̂ follows without a sum of its own.
__device__ __forceinline__ RewriteGrad
rewrite_backward(const Gradients& g, const DerivedScalars& s, const Real* totals, long long token) {
  RewriteGrad rewrite_grad;
  Real g_e = Real(0), g_p = Real(0);
  rewrite_grad.scale = s.factors.r * s.gate;
#pragma unroll
  for (int j = 0; j < M; ++j) {
    Real total = totals[ALONG_AT + j];
    if constexpr (NORM) total -= s.shift * totals[NORMED_AT + j];
    rewrite_grad.g[j] = s.factors.r * total;
    rewrite_grad.back[j] = rewrite_grad.scale * rewrite_grad.g[j];
    g_e += rewrite_grad.g[j] * s.factors.error[j];
    g_p += rewrite_grad.g[j] * s.factors.readout[j];
    if (writes(j)) g.value[token * M + j] = s.gate * rewrite_grad.g[j];
  }
  if (writes(0)) g.gate[token] = g_e;
  rewrite_grad.along = s.factors.r * rewrite_grad.scale * (g_e - g_p);
  return rewrite_grad;
}

// x̂ of a packet, from x as a token read saved it, else from X'.
__device__ __forceinline__ void compress(
    const RewriteRead& b, const TokenInputs& inputs, const DerivedScalars& s, int row,
    const Packet<STATE_T, ELEMENTS>& stored, Real (&normed)[FEATURES]) {
  CompressWeight compress;
  if constexpr (READ != TOKEN) compress.load(b, feature_of(row));
#pragma unroll
  for (int f = 0; f < FEATURES; ++f) {
    Real x = Real(0);
    if constexpr (READ == TOKEN) {
      x = inputs.compressed[row][f];
    } else {
#pragma unroll
      for (int j = 0; j < M; ++j) x += compress.at(f, j) * stored[f * M + j];
    }
    normed[f] = x * s.rstd;
  }
}

// dh' and a of a packet, from dh and what gate and values ask of the context.
__device__ __forceinline__ void read_backward(
    const RewriteRead& b, const TokenInputs& inputs, const DerivedScalars& s, int row, Real (&dh)[FEATURES],
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
    dh[f] = inputs.context[row][f];
    if constexpr (GATE) dh[f] += s.logit * parameters.gate[f];
    if constexpr (VALUE && !VALUE_FROM_COMPRESSED) dh[f] += value;
    a[f] = s.rstd * parameters.gamma(f) * dh[f] + (VALUE_FROM_COMPRESSED ? value : Real(0));
  }
}

// The block's tokens.
struct Chunk {
  long long first, last;

  __device__ explicit Chunk(const RewriteRead& b)
      : first(blockIdx.x * b.chunk), last((first + b.chunk < b.tokens ? first + b.chunk : b.tokens) - 1) {}
  __device__ __forceinline__ bool owns(long long token) const { return token <= last; }
};

// Runs `pass` on the block's tokens from the last to the first, as its own. A token read is first given the K − 1
// tokens behind them, which are not, and an empty window at the end of every sequence.
template <class BackwardPass> __device__ __forceinline__ void walk_backward(
    const RewriteRead& b, Real* window_rows, BackwardPass& pass) {
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
