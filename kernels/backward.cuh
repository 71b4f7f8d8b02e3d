// Shared by rewrite_read_bwd and parameters_bwd: arguments, per-token scalars, per-token inputs, the read's backward,
// and the loop over a block's tokens.
#pragma once

#define BACKWARD
#include "token_stream.cuh"

struct Gradients {
  const STATE_T* grad_new_state;
  const CONTEXT_T* grad_context;
  const Real* grad_new_value;
  const Real* grad_new_gate;
  STATE_T* grad_state;
  DIRECTION_T* grad_direction;
  Real* grad_value;
  Real* grad_gate;
  Real* partial;
  Real* shift;  // (tokens): c·rstd, written for parameters_bwd
};

// A rewrite since the anchor: what its forward had and saved.
struct Link {
  const DIRECTION_T* direction;
  const Real* value;
  const Real* gate;
  const Real* stats;  // r, p

  __device__ __forceinline__ RewriteFactors factors(long long token) const {
    RewriteFactors factors;
    Real value[M];
    factors.r = stats[token * (1 + M)];
#pragma unroll
    for (int j = 0; j < M; ++j) {
      factors.readout[j] = stats[token * (1 + M) + 1 + j];
      value[j] = this->value[token * M + j];
    }
    factors.finish(value, gate[token]);
    return factors;
  }
};

// The rewrites that lead from the anchor, which is `state`, to X, if CHAIN; X itself was not stored.
struct Chain {
  static constexpr int MOST = 31;
  Link links[MOST];
  long long length;
};

struct Backward {
  RewriteRead forward;
  Gradients gradients;
  Chain chain;
};

// Layout of the backward's one sum over the features: c, then k̂ᵀ(G + w a), then k̂ᵀ(w x̂).
constexpr int ALONG_AT = NORM, NORMED_AT = NORM + M;
constexpr int BLOCK_SUMS = NORM + (REWRITE ? M + (NORM ? M : 0) : 0);

// One token's scalars, the same in every thread.
struct DerivedScalars {
  RewriteFactors factors;
  Real gate;  // β
  Real rstd;
  Real shift;           // c·rstd; rewrite_read_bwd knows it after its sum
  Real grad_logit;      // dβl, gradient of the next gate before the sigmoid
  Real grad_linear[M];  // dvl, gradient of the next values before the sigmoid
};

// The rewrite's backward as factors: dX = G − k backᵀ and dk = scale·(G e − X g) − along·k.
struct RewriteGrad {
  Real g[M] = {};
  Real back[M] = {};     // β r g
  Real scale = Real(0);  // β r
  Real along = Real(0);
};

// Numbers that each token's scalars are made of (LaneScalars).
constexpr int GATE_SCALAR = 0, STATS_SCALAR = REWRITE, VALUE_SCALAR = STATS_SCALAR + REWRITE * (1 + M);
constexpr int RSTD_SCALAR = VALUE_SCALAR + REWRITE * M, SHIFT_SCALAR = RSTD_SCALAR + NORM;
constexpr int NEW_GATE_SCALAR = SHIFT_SCALAR + FEATURE_SLICED * NORM, GRAD_GATE_SCALAR = NEW_GATE_SCALAR + GATE;
constexpr int GRAD_VALUE_SCALAR = GRAD_GATE_SCALAR + GATE, NEW_VALUE_SCALAR = GRAD_VALUE_SCALAR + VALUE * M;
constexpr int SCALARS = NEW_VALUE_SCALAR + VALUE_SIGMOID * M;

struct TokenScalars : LaneScalars<SCALARS> {
  __device__ TokenScalars(const RewriteRead& args, const Gradients& g) {
    if constexpr (REWRITE) {
      assign(GATE_SCALAR, 1, args.gate);
      assign(STATS_SCALAR, 1 + M, args.stats);
      assign(VALUE_SCALAR, M, args.value);
    }
    if constexpr (NORM) assign(RSTD_SCALAR, 1, args.rstd);
    if constexpr (NORM && FEATURE_SLICED) assign(SHIFT_SCALAR, 1, g.shift);
    if constexpr (GATE) {
      assign(NEW_GATE_SCALAR, 1, args.new_gate);
      assign(GRAD_GATE_SCALAR, 1, g.grad_new_gate);
    }
    if constexpr (VALUE) assign(GRAD_VALUE_SCALAR, M, g.grad_new_value);
    if constexpr (VALUE_SIGMOID) assign(NEW_VALUE_SCALAR, M, args.new_value);
  }
};

// Computes the scalars of the token that was prefetched. All lanes must take part, because of the shuffles.
__device__ __forceinline__ DerivedScalars
derive(const RewriteRead& args, const Gradients& g, const TokenScalars& loaded) {
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
  s.grad_logit = Real(0);
  if constexpr (GATE) {
    const Real gate = loaded.broadcast(NEW_GATE_SCALAR), grad = loaded.broadcast(GRAD_GATE_SCALAR);
    if (g.grad_new_gate) s.grad_logit = grad * gate * (Real(1) - gate / Real(2));
  }
#pragma unroll
  for (int j = 0; j < M; ++j) {
    s.grad_linear[j] = Real(0);
    if constexpr (VALUE) s.grad_linear[j] = loaded.broadcast(GRAD_VALUE_SCALAR + j);
    if constexpr (VALUE_SIGMOID) {
      const Real value = loaded.broadcast(NEW_VALUE_SCALAR + j);
      if (g.grad_new_value) s.grad_linear[j] *= value * (Real(1) - value / Real(args.value_scale));
    }
  }
  return s;
}

// A token's inputs. parameters_bwd does not need G.
struct TokenInputs {
  const Chain& chain;
  TokenStream<STATE_T, M> state;
  TokenStream<STATE_T, M, FEATURE_SLICED ? ABSENT : OPTIONAL> grad;
  TokenStream<DIRECTION_T, 1, REWRITE> direction;
  TokenStream<CONTEXT_T, 1, READ != NONE ? OPTIONAL : ABSENT> context;
  TokenStream<STATE_T, 1, READ == TOKEN> compressed;
  int stage = 0;  // the stage of the current token

  __device__ TokenInputs(const Backward& all, unsigned char*& shared)
      : chain(all.chain),
        state(all.forward.state, shared),
        grad(all.gradients.grad_new_state, shared),
        direction(all.forward.direction, shared),
        context(all.gradients.grad_context, shared),
        compressed(all.forward.compressed, shared) {}

  // A halo token (not own) needs only dx, for which context and compressed are enough.
  __device__ __forceinline__ void prefetch(long long token, int row, int stage, bool own) const {
    context.prefetch(token, row, stage);
    compressed.prefetch(token, row, stage);
    if (!own) return;
    state.prefetch(token, row, stage);
    grad.prefetch(token, row, stage);
    direction.prefetch(token, row, stage);
    if constexpr (CHAIN) {
      for (int link = 0; link < chain.length; ++link) prefetch_l2(packet_of(chain.links[link].direction, token, row));
    }
  }
  __device__ __forceinline__ void load_read_inputs(long long token, int row) {
    context.load(token, row, stage, false);
    compressed.load(token, row, stage, false);
  }
  __device__ __forceinline__ void load_rewrite_inputs(long long token, int row, bool again) {
    state.load(token, row, stage, again);
    grad.load(token, row, stage, again);
    direction.load(token, row, stage, again);
    if constexpr (CHAIN) apply_chain(token, row, again);
  }
  // Anchor → X of a row, rounded after each rewrite, as the forwards stored it.
  __device__ __forceinline__ void apply_chain(long long token, int row, bool again) {
    Packet<DIRECTION_T, FEATURES> k;
    for (int at = 0; at < chain.length; ++at) {
      const Link& link = chain.links[at];
      if (again) k.load_cached(packet_of(link.direction, token, row));
      else k.load_streaming(packet_of(link.direction, token, row));
      state[row] = rewritten(state[row], k, link.factors(token));
    }
  }
};

// Computes g = k̂ᵀG from the sum and writes dv and dβ, each number by one thread. k̂ᵀdk̂ = β(g·e − p·g) needs no sum of
// its own.
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
    if (writes(j)) g.grad_value[token * M + j] = s.gate * rewrite_grad.g[j];
  }
  if (writes(0)) g.grad_gate[token] = g_e;
  rewrite_grad.along = s.factors.r * rewrite_grad.scale * (g_e - g_p);
  return rewrite_grad;
}

// x̂ of a packet: from the saved x of a token read, else from X'.
__device__ __forceinline__ void compress(
    const RewriteRead& args, const TokenInputs& inputs, const DerivedScalars& s, int row,
    const Packet<STATE_T, ELEMENTS>& stored, Real (&normed)[FEATURES]) {
  CompressWeight compress;
  if constexpr (READ != TOKEN) compress.load(args, feature_of(row));
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

// dh' and a of a packet, from dh and the gradients of gate and values (formulas in rewrite_read_bwd.cu).
__device__ __forceinline__ void read_backward(
    const RewriteRead& args, const TokenInputs& inputs, const DerivedScalars& s, int row, Real (&dh)[FEATURES],
    Real (&a)[FEATURES]) {
  Parameters parameters;
  parameters.load(args, feature_of(row));
#pragma unroll
  for (int f = 0; f < FEATURES; ++f) {
    Real value = Real(0);
    if constexpr (VALUE) {
#pragma unroll
      for (int j = 0; j < M; ++j) value += s.grad_linear[j] * parameters.value[j][f];
    }
    dh[f] = inputs.context[row][f];
    if constexpr (GATE) dh[f] += s.grad_logit * parameters.gate[f];
    if constexpr (VALUE && !VALUE_FROM_COMPRESSED) dh[f] += value;
    a[f] = s.rstd * parameters.gamma(f) * dh[f] + (VALUE_FROM_COMPRESSED ? value : Real(0));
  }
}

// The block's tokens.
struct Chunk {
  long long first, last;

  __device__ explicit Chunk(const RewriteRead& args)
      : first(blockIdx.x * args.chunk),
        last((first + args.chunk < args.tokens ? first + args.chunk : args.tokens) - 1) {}
  __device__ __forceinline__ bool owns(long long token) const { return token <= last; }
};

// Runs `pass` on the block's tokens from the last to the first. A token read starts with the K − 1 halo tokens that
// follow the chunk, because dx_{t+s} adds to G_t, and it clears the window where a sequence or a document starts.
template <class Pass> __device__ __forceinline__ void walk_backward(
    const RewriteRead& args, Real* window_rows, Pass& pass) {
  const Chunk& chunk = pass.chunk;
  if constexpr (READ == TOKEN) {
    Window window(args, window_rows);
    window.clear();
    long long position = chunk.last % args.time;
    const long long behind = args.time - 1 - position;
    const long long halo = behind < TAPS - 1 ? behind : TAPS - 1;
    pass.start(chunk.last + halo);
    for (long long token = chunk.last + halo; token > chunk.last; --token) {
      const bool starts = starts_document(args, token);
      pass.run(&window, token, false);
      if (starts) window.clear();
    }
    for (long long token = chunk.last; token >= chunk.first; --token) {
      const bool starts = starts_document(args, token);
      pass.run(&window, token, true);
      if (starts) window.clear();
      if (--position >= 0) continue;
      position = args.time - 1;
      window.clear();
    }
  } else {
    pass.start(chunk.last);
    for (long long token = chunk.last; token >= chunk.first; --token) pass.run(nullptr, token, true);
  }
}
