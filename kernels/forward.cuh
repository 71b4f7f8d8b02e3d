// Shared by the forward's two passes: a packet's part of a token's sums over the features, and the scalars of the sums.
#pragma once

#include "rewrite_read.cuh"

// The first sum: |k|², kᵀX and the products of the k; of what erases nothing |k|² alone.
__host__ __device__ constexpr int sums_before(int rewrite) {
  return ERASE == ERASE_NONE ? rewrite : stats_before(rewrite);
}
constexpr int FIRST_SUMS = sums_before(REWRITES);
// The second sum: Σx², w_β·γx, W_v·γx.
constexpr int GATE_AT = NORM, VALUE_AT = NORM + GATES, READ_SUMS = NORM + GATES + VALUES;
using ReadSums = Real[READ_SUMS > 0 ? READ_SUMS : 1];
constexpr int MAX_SUMS = FIRST_SUMS > READ_SUMS ? FIRST_SUMS : READ_SUMS;

// --- the rewrite --------------------------------------------------------------------------------

// Adds a packet's share of |k|², kᵀX and k·k_i of the earlier k_i.
DEVICE void add_products(int n, const Config::State& state, const Config::Directions& k, Real (&sums)[FIRST_SUMS]) {
  const int at = sums_before(n);
#pragma unroll
  for (int f = 0; f < FEATURES; ++f) {
    sums[at] += k[n][f] * k[n][f];
    if constexpr (ERASE == ERASE_NONE) continue;
#pragma unroll
    for (int j = 0; j < M; ++j) sums[at + 1 + j] += k[n][f] * state[f * M + j];
#pragma unroll
    for (int i = 0; i < n; ++i) sums[at + 1 + M + i] += k[n][f] * k[i][f];
  }
}

// r and p, from the sums of k and the factors of the earlier rewrites.
DEVICE void measure(const RewriteRead& args, int n, const Real* sums, Rewrite (&rewrites)[REWRITES]) {
  Rewrite& rewrite = rewrites[n];
  // If |k|² has overflowed, 0·∞ makes r NaN; r = 0 would silently write nothing.
  rewrite.r = rsqrt(sums[0] + Real(args.eps_k) * Real(args.eps_k)) + Real(0) * sums[0];
#pragma unroll
  for (int j = 0; j < M; ++j) {
    rewrite.readout[j] = Real(0);
    if constexpr (ERASE == ERASE_NONE) continue;
    Real k_state = sums[1 + j];  // kᵀX
#pragma unroll
    for (int i = 0; i < n; ++i) k_state += sums[1 + M + i] * rewrites[i].factor[j];
    rewrite.readout[j] = mul_rn(rewrite.r, k_state);
  }
}

// Writes a token's stats.
DEVICE void save(const RewriteRead& args, long long token, const Rewrite (&rewrites)[REWRITES], const Real* sums) {
#pragma unroll
  for (int n = 0; n < REWRITES; ++n) {
    Real* const to = args.stats + token * STATS + stats_before(n);
    to[0] = rewrites[n].r;
#pragma unroll
    for (int j = 0; j < M; ++j) to[1 + j] = rewrites[n].readout[j];
#pragma unroll
    for (int i = 0; i < n; ++i) to[1 + M + i] = ERASE == ERASE_NONE ? Real(0) : sums[sums_before(n) + 1 + M + i];
  }
}

// --- the read -----------------------------------------------------------------------------------

// Adds a packet's share of the second sum. rstd is not known yet, so it multiplies the sums in finish_read.
DEVICE void add_read(const Parameters& parameters, const Real (&x)[FEATURES], ReadSums& sums) {
#pragma unroll
  for (int f = 0; f < FEATURES; ++f) {
    const Real normed = x[f] * parameters.gamma(f);
    if constexpr (NORM) sums[0] += x[f] * x[f];
#pragma unroll
    for (int n = 0; n < GATES; ++n) sums[GATE_AT + n] += normed * parameters.gate[n][f];
#pragma unroll
    for (int j = 0; j < VALUES; ++j) {
      sums[VALUE_AT + j] += (VALUE_FROM_COMPRESSED ? x[f] : normed) * parameters.value[j][f];
    }
  }
}

// Writes rstd, β' and v', each number by one thread. Returns rstd.
DEVICE Real finish_read(const RewriteRead& args, long long token, const Real* sums) {
  const Real rstd = NORM ? rsqrt(sums[0] / Real(D) + Real(args.norm_eps)) : Real(1);
  if constexpr (NORM) {
    if (SAVES && writes(0)) args.rstd[token] = rstd;
  }
#pragma unroll
  for (int n = 0; n < GATES; ++n) {
    if (!writes(n)) continue;
    const Real bias = GATE_BIAS ? widen(args.gate_bias[n]) : Real(0);
    args.new_gate[token * GATES + n] = Real(2) * sigmoid(rstd * sums[GATE_AT + n] + bias);
  }
#pragma unroll
  for (int j = 0; j < VALUES; ++j) {
    if (!writes(j)) continue;
    const Real bias = VALUE_BIAS ? widen(args.value_bias[j]) : Real(0);
    const Real linear = (VALUE_FROM_COMPRESSED ? Real(1) : rstd) * sums[VALUE_AT + j] + bias;
    args.new_value[token * VALUES + j] = VALUE_SIGMOID ? Real(args.value_scale) * sigmoid(linear) : linear;
  }
  return rstd;
}

// Writes a packet of h, from its x.
DEVICE void store_context(
    const RewriteRead& args, const Parameters& parameters, long long token, int row, Real rstd, Real (&x)[FEATURES]) {
#pragma unroll
  for (int f = 0; f < FEATURES; ++f) x[f] *= rstd * parameters.gamma(f);
  Config::Context context;
  context.set(x);
  context.store_global(packet_of(args.context, token, row));  // the sublayer reads h next
}
