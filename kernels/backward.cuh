// Shared by rewrite_read_bwd and parameters_bwd: arguments, per-token scalars, per-token inputs, the read's backward.
#pragma once

#include "chain.cuh"

// Gradients that come in, gradients to write, and what parameters_bwd and reduce need.
struct Gradients {
  const STATE_T* grad_new_state;
  const CONTEXT_T* grad_context;
  const Real* grad_new_value;
  const Real* grad_new_gate;
  STATE_T* grad_state;
  DIRECTION_T* grad_direction;
  Real* grad_value;
  Real* grad_gate;
  Real* partial;  // the blocks' sums, for reduce
  Real* shift;    // (tokens): c·rstd, written for parameters_bwd
};

struct Backward {
  RewriteRead forward;
  Gradients gradients;
  Chain chain;
};

// Layout of the backward's one sum over the features: D·c, then kᵀ(G + w a), then kᵀ(w x̂).
constexpr int K_GRAD_AT = NORM, X_HAT_AT = NORM + REWRITES * M;
constexpr int BLOCK_SUMS = NORM + (REWRITE ? (1 + NORM) * REWRITES * M : 0);
using Totals = Real[BLOCK_SUMS > 0 ? BLOCK_SUMS : 1];

// One token's scalars, the same in every thread.
struct DerivedScalars {
  Rewrite rewrites[REWRITES];
  Real product[REWRITES][REWRITES];  // k·k_i with the earlier k_i
  Real rstd;
  Real shift;                       // c·rstd; rewrite_read_bwd knows it after its sum
  Real grad_logit[NEXT] = {};       // δ_β, of the next gates' logits
  Real grad_linear[NEXT * M] = {};  // δ_v, of the next values' logits
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
  __device__ TokenScalars(const RewriteRead& args, const Gradients& gradients) {
    if constexpr (REWRITE) {
      assign(AT.gate, REWRITES, args.gate);
      assign(AT.stats, STATS, args.stats);
      assign(AT.value, REWRITES * M, args.value);
    }
    if constexpr (NORM) assign(AT.rstd, 1, args.rstd);
    if constexpr (NORM && FEATURE_SLICED) assign(AT.shift, 1, gradients.shift);
    if constexpr (GATE) {
      assign(AT.new_gate, GATES, args.new_gate);
      assign(AT.grad_gate, GATES, gradients.grad_new_gate);
    }
    if constexpr (VALUE) assign(AT.grad_value, VALUES, gradients.grad_new_value);
    if constexpr (VALUE_SIGMOID) assign(AT.new_value, VALUES, args.new_value);
  }
};

// Computes the scalars of one rewrite.
DEVICE void derive_rewrite(const TokenScalars& loaded, int n, DerivedScalars& s) {
  const int at = AT.stats + stats_before(n);
  Rewrite& rewrite = s.rewrites[n];
  Real value[M];
  const Real gate = loaded.broadcast(AT.gate + n);
  rewrite.r = loaded.broadcast(at);
#pragma unroll
  for (int j = 0; j < M; ++j) {
    value[j] = loaded.broadcast(AT.value + n * M + j);
    rewrite.readout[j] = loaded.broadcast(at + 1 + j);
  }
#pragma unroll
  for (int i = 0; i < n; ++i) s.product[n][i] = loaded.broadcast(at + 1 + M + i);
  rewrite.finish(value, gate);
}

// Computes the scalars of the token that was prefetched. All lanes must take part, because of the shuffles.
DEVICE DerivedScalars derive_scalars(const RewriteRead& args, const Gradients& gradients, const TokenScalars& loaded) {
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
    if (gradients.grad_new_gate) s.grad_logit[n] = grad * gate * (Real(1) - gate / Real(2));
  }
#pragma unroll
  for (int j = 0; j < VALUES; ++j) {
    s.grad_linear[j] = loaded.broadcast(AT.grad_value + j);
    if constexpr (VALUE_SIGMOID) {
      const Real value = loaded.broadcast(AT.new_value + j);
      if (gradients.grad_new_value) s.grad_linear[j] *= value * (Real(1) - value / Real(args.value_scale));
    }
  }
  return s;
}

// A token's inputs. parameters_bwd does not need G.
struct TokenInputs {
  Config::StateSource source;
  TokenStream<STATE_T, M> state;
  TokenStream<STATE_T, M, FEATURE_SLICED ? ABSENT : OPTIONAL> grad;
  TokenStream<DIRECTION_T, 1, REWRITE, REWRITES> direction;
  TokenStream<CONTEXT_T, 1, READ != NONE ? OPTIONAL : ABSENT> grad_context;
  TokenStream<STATE_T, 1, READ == TOKEN> compressed;
  int stage = 0;  // the stage of the current token

  __device__ TokenInputs(const Backward& all, unsigned char*& shared)
      : source(all.chain),
        state(all.forward.state, shared),
        grad(all.gradients.grad_new_state, shared),
        direction(all.forward.direction, shared),
        grad_context(all.gradients.grad_context, shared),
        compressed(all.forward.compressed, shared) {}

  // A halo token (not own) needs only dx, for which grad_context and compressed are enough.
  DEVICE void prefetch(long long token, int row, int stage, bool own) const {
    grad_context.prefetch(token, row, stage);
    compressed.prefetch(token, row, stage);
    if (!own) return;
    state.prefetch(token, row, stage);
    grad.prefetch(token, row, stage);
    direction.prefetch(token, row, stage);
    source.prefetch(token, row);
  }
  DEVICE void load_read_inputs(long long token, int row) {
    grad_context.load(token, row, stage, false);
    compressed.load(token, row, stage, false);
  }
  // If packets are kept in registers, X of all rows is made by `finish_state`, after the last.
  DEVICE void load_rewrite_inputs(long long token, int row, bool again) {
    state.load(token, row, stage, again);
    grad.load(token, row, stage, again);
    direction.load(token, row, stage, again);
    if constexpr (!KEEP_IN_REGISTERS) source.rewrite(state, token, row, again);
  }
  DEVICE void finish_state(long long token) { source.rewrite(state, token, 0, false); }
};

// x̂ of a packet: from the saved x of a token read, else from X'.
DEVICE void compress_normed(
    const RewriteRead& args, const TokenInputs& inputs, const DerivedScalars& s, int row,
    const Config::State& new_state, Real (&x_hat)[FEATURES]) {
  Real x[FEATURES] = {};
  if constexpr (READ != TOKEN) compress(args, new_state, row, 0, x);
#pragma unroll
  for (int f = 0; f < FEATURES; ++f) x_hat[f] = (READ == TOKEN ? inputs.compressed[row][f] : x[f]) * s.rstd;
}

// dh' and a of a packet, from dh and the gradients of gate and values (formulas in rewrite_read_bwd.cu).
DEVICE void read_backward(
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
    dh[f] = inputs.grad_context[row][f];
#pragma unroll
    for (int n = 0; n < GATES; ++n) dh[f] += s.grad_logit[n] * parameters.gate[n][f];
    if constexpr (VALUE && !VALUE_FROM_COMPRESSED) dh[f] += value;
    a[f] = s.rstd * parameters.gamma(f) * dh[f] + (VALUE_FROM_COMPRESSED ? value : Real(0));
  }
}
