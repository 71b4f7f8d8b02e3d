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

// A boundary since the anchor: what its forward had and saved.
struct Link {
  const DIRECTION_T* direction;
  const Real* value;
  const Real* gate;
  const Real* stats;

  __device__ __forceinline__ RewriteFactors factors(long long token) const {
    RewriteFactors factors;
#pragma unroll
    for (int n = 0; n < REWRITES; ++n) {
      const Real* const from = stats + token * STATS + stats_before(n);
      Real value[M];
      factors.r[n] = from[0];
#pragma unroll
      for (int j = 0; j < M; ++j) {
        factors.readout[n][j] = from[1 + j];
        value[j] = this->value[(token * REWRITES + n) * M + j];
      }
      factors.finish(n, value, gate[token * REWRITES + n]);
    }
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
constexpr int ALONG_AT = NORM, NORMED_AT = NORM + REWRITES * M;
constexpr int BLOCK_SUMS = NORM + (REWRITE ? (1 + NORM) * REWRITES * M : 0);

// One token's scalars, the same in every thread.
struct DerivedScalars {
  RewriteFactors factors;
  Real gate[REWRITES];               // β
  Real product[REWRITES][REWRITES];  // k·k_i with the earlier k_i
  Real rstd;
  Real shift;                       // c·rstd; rewrite_read_bwd knows it after its sum
  Real grad_logit[NEXT] = {};       // dβl, gradients of the next gates before the sigmoid
  Real grad_linear[NEXT * M] = {};  // dvl, gradients of the next values before the sigmoid
};

// The rewrites' backward as factors: dX = G − Σ k backᵀ and dk = scale·(G e − X g) + Σ_i on[i]·k_i over all k_i.
struct RewriteGrad {
  Real g[REWRITES][M] = {};
  Real back[REWRITES][M] = {};  // β r g
  Real scale[REWRITES] = {};    // β r
  Real on[REWRITES][REWRITES] = {};
};

// Where each of a token's scalars begins among the numbers that LaneScalars loads.
struct ScalarLayout {
  int count = 0;
  const int gate = place(REWRITE * REWRITES);
  const int stats = place(REWRITE * STATS);
  const int value = place(REWRITE * REWRITES * M);
  const int rstd = place(NORM);
  const int shift = place(NORM * FEATURE_SLICED);
  const int new_gate = place(GATES);
  const int grad_gate = place(GATES);
  const int grad_value = place(VALUES);
  const int new_value = place(VALUE_SIGMOID * VALUES);

 private:
  __device__ constexpr int place(int numbers) {
    const int at = count;
    count += numbers;
    return at;
  }
};
constexpr ScalarLayout AT;

struct TokenScalars : LaneScalars<AT.count> {
  __device__ TokenScalars(const RewriteRead& args, const Gradients& g) {
    if constexpr (REWRITE) {
      assign(AT.gate, REWRITES, args.gate);
      assign(AT.stats, STATS, args.stats);
      assign(AT.value, REWRITES * M, args.value);
    }
    if constexpr (NORM) assign(AT.rstd, 1, args.rstd);
    if constexpr (NORM && FEATURE_SLICED) assign(AT.shift, 1, g.shift);
    if constexpr (GATE) {
      assign(AT.new_gate, GATES, args.new_gate);
      assign(AT.grad_gate, GATES, g.grad_new_gate);
    }
    if constexpr (VALUE) assign(AT.grad_value, VALUES, g.grad_new_value);
    if constexpr (VALUE_SIGMOID) assign(AT.new_value, VALUES, args.new_value);
  }
};

// Computes the scalars of one rewrite.
__device__ __forceinline__ void derive_rewrite(const TokenScalars& loaded, int n, DerivedScalars& s) {
  const int at = AT.stats + stats_before(n);
  Real value[M];
  s.gate[n] = loaded.broadcast(AT.gate + n);
  s.factors.r[n] = loaded.broadcast(at);
#pragma unroll
  for (int j = 0; j < M; ++j) {
    value[j] = loaded.broadcast(AT.value + n * M + j);
    s.factors.readout[n][j] = loaded.broadcast(at + 1 + j);
  }
#pragma unroll
  for (int i = 0; i < n; ++i) s.product[n][i] = loaded.broadcast(at + 1 + M + i);
  s.factors.finish(n, value, s.gate[n]);
}

// Computes the scalars of the token that was prefetched. All lanes must take part, because of the shuffles.
__device__ __forceinline__ DerivedScalars
derive(const RewriteRead& args, const Gradients& g, const TokenScalars& loaded) {
  DerivedScalars s;
  if constexpr (REWRITE) {
#pragma unroll
    for (int n = 0; n < REWRITES; ++n) derive_rewrite(loaded, n, s);
  }
  s.rstd = NORM ? loaded.broadcast(AT.rstd) : Real(1);
  s.shift = NORM && FEATURE_SLICED ? loaded.broadcast(AT.shift) : Real(0);
#pragma unroll
  for (int n = 0; n < GATES; ++n) {
    const Real gate = loaded.broadcast(AT.new_gate + n), grad = loaded.broadcast(AT.grad_gate + n);
    if (g.grad_new_gate) s.grad_logit[n] = grad * gate * (Real(1) - gate / Real(2));
  }
#pragma unroll
  for (int j = 0; j < VALUES; ++j) {
    s.grad_linear[j] = loaded.broadcast(AT.grad_value + j);
    if constexpr (VALUE_SIGMOID) {
      const Real value = loaded.broadcast(AT.new_value + j);
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
  TokenStream<DIRECTION_T, 1, REWRITE, REWRITES> direction;
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
      for (int link = 0; link < chain.length; ++link)
#pragma unroll
        for (int n = 0; n < REWRITES; ++n) {
          prefetch_l2(packet_of(chain.links[link].direction, token * REWRITES + n, row));
        }
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
  // Anchor → X of a row, rounded after each link, as the forwards stored it.
  __device__ __forceinline__ void apply_chain(long long token, int row, bool again) {
    Directions k;
    for (int at = 0; at < chain.length; ++at) {
      const Link& link = chain.links[at];
#pragma unroll
      for (int n = 0; n < REWRITES; ++n) {
        const DIRECTION_T* const from = packet_of(link.direction, token * REWRITES + n, row);
        if (again) k[n].load_cached(from);
        else k[n].load_streaming(from);
      }
      state[row] = rewritten(state[row], k, link.factors(token));
    }
  }
};

// Computes g = k̂ᵀG of one rewrite from the sum and writes dv and dβ, each number by one thread. G is what the later
// rewrites, which are done, leave of it. k̂ᵀdk̂ = β(g·e − p·g) needs no sum of its own.
__device__ __forceinline__ void rewrite_backward(
    const Gradients& g, const DerivedScalars& s, const Real* totals, long long token, int n,
    RewriteGrad& rewrite_grad) {
  Real g_e = Real(0), g_p = Real(0);
  rewrite_grad.scale[n] = s.factors.r[n] * s.gate[n];
#pragma unroll
  for (int j = 0; j < M; ++j) {
    Real total = totals[ALONG_AT + n * M + j];
    if constexpr (NORM) total -= s.shift * totals[NORMED_AT + n * M + j];
#pragma unroll
    for (int later = n + 1; later < REWRITES; ++later) total -= s.product[later][n] * rewrite_grad.back[later][j];
    rewrite_grad.g[n][j] = s.factors.r[n] * total;
    rewrite_grad.back[n][j] = rewrite_grad.scale[n] * rewrite_grad.g[n][j];
    g_e += rewrite_grad.g[n][j] * s.factors.error[n][j];
    g_p += rewrite_grad.g[n][j] * s.factors.readout[n][j];
    const int number = n * M + j;
    if (writes(number)) g.grad_value[token * (REWRITES * M) + number] = s.gate[n] * rewrite_grad.g[n][j];
  }
  if (writes(n)) g.grad_gate[token * REWRITES + n] = g_e;
  rewrite_grad.on[n][n] = -(s.factors.r[n] * rewrite_grad.scale[n] * (g_e - g_p));
}

// All of them, from the last to the first. A rewrite's dk sees the G that the later ones leave, and the X that the earlier
// ones leave: both differ from G and X by multiples of k_i, so dk does, too.
__device__ __forceinline__ RewriteGrad
rewrites_backward(const Gradients& g, const DerivedScalars& s, const Real* totals, long long token) {
  RewriteGrad rewrite_grad;
#pragma unroll
  for (int n = REWRITES - 1; n >= 0; --n) {
    rewrite_backward(g, s, totals, token, n, rewrite_grad);
#pragma unroll
    for (int later = n + 1; later < REWRITES; ++later) {
      Real later_g_e = Real(0);  // of the later g and this e
#pragma unroll
      for (int j = 0; j < M; ++j) later_g_e += rewrite_grad.g[later][j] * s.factors.error[n][j];
      const Real shared = -(rewrite_grad.scale[n] * rewrite_grad.scale[later] * later_g_e);
      rewrite_grad.on[n][later] = rewrite_grad.on[later][n] = shared;
    }
  }
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
      for (int j = 0; j < VALUES; ++j) value += s.grad_linear[j] * parameters.value[j][f];
    }
    dh[f] = inputs.context[row][f];
#pragma unroll
    for (int n = 0; n < GATES; ++n) dh[f] += s.grad_logit[n] * parameters.gate[n][f];
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
