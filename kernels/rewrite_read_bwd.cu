// rewrite, read and rewrite_read, backward: gradients of X', h, v', β' → of X, k, v, β and parameters.
//
// Read per token:    G = ∂L/∂X' and X (M·D elements each), k and dh (D each), x (D) if the read is a token read, and the
//                    saved r, p, rstd with v, β, v', β' and the gradients of v' and β'. Parameters stay in L1 and L2.
// Written per token: dX (M·D), dk (D), dv (M), dβ.
// Reduced over the features: D·c, kᵀ(G + w a) and kᵀ(w x̂), 1 + 2M numbers, once; of n rewrites 1 + 2nM.
// Reduced over the block's tokens (sums.cuh), and over the blocks by reduce.cu: the parameters' gradients.
// Moved per token: (3M + 3)·D elements, 15·D for M = 4; a token read (3M + 4)·D.
//
// X' is not read. It is rebuilt from X, k, r and p, to the bits that the forward stored. If one block cannot hold a
// token, a cluster of blocks shares it (sm_90 and newer; for bf16, M = 4 beyond D = 2048, M = 8 beyond 1024, and half of
// that for a token read). Without clusters, X, G and k that do not fit in registers are loaded again after the sum: from
// their stage in shared memory (token_stream.cuh), or from L2, (2M + 1)·D more.
//
// With k̂ = r·k, e = v − p, x̂ = rstd·x:
//
//     dh' = dh + δ_β·w_β + δ_v·W_v      a = rstd·γ·dh'      c = mean(γ·dh'·x̂)      dx = a − c·rstd·x̂
//     G  += dx ⊗ w      g = k̂ᵀG         dX = G − β k̂ gᵀ      dv = β g      dβ = g·e
//     dk  = r (dk̂ − k̂·β(g·e − p·g))     dk̂ = β (G e − X g)
//
// With ERASE_NONE: dX = G, dβ = g·v and dk = r β (G v − k̂ g·v).
//
// dv and dβ are of this rewrite; δ_β and δ_v are of the logits of the next, β' and v'. If the values read x, δ_v·W_v adds
// to a instead of dh'. g need not wait for c, because g_j = Σ k̂ (G_j + w_j a) − c·rstd·Σ k̂ w_j x̂. So one sum is enough.
//
// A block processes its tokens from the last to the first. Several rewrites (rewrites_bwd.cuh), a token read
// (later_tokens.cuh) and an anchor (chain.cuh) are policies of Config. Here only READ == TOKEN is tested: its x was saved.
//
// If a block has no room for the sums of parameter gradients (SUMS == SEPARATE_KERNEL), this kernel writes every token's
// c·rstd instead, and parameters_bwd.cu computes them.

#include "later_tokens.cuh"
#include "rewrites_bwd.cuh"
#include "sums.cuh"

struct BackwardPass {
  // Vectors that wait between the two passes over a token: x̂, a and, for the sums, dh'.
  static constexpr int X_HAT = 0, A = 1, DH = 2, KEPT = SUMS == SEPARATE_KERNEL ? 2 : 3;

  const RewriteRead& args;
  const Gradients& gradients;
  const Chunk chunk;
  TokenInputs inputs;
  TokenScalars scalars;
  Config::LaterTokens later;
  Config::Rewrites policy;
  BlockSum<BLOCK_SUMS> sum;
  FeatureVectors<KEPT, KEEP_IN_REGISTERS> kept;
  Sums sums;
  Packet<Config::LaterTokens::Grad, ELEMENTS> grad[KEPT_ROWS];  // G, with what later tokens add
  Config::State new_state[KEPT_ROWS];                           // X'

  // Dynamic shared memory holds, in this order: stages, window, kept vectors, sums of parameter gradients.
  __device__ BackwardPass(const Backward& all, BlockSum<BLOCK_SUMS>::Buffer& buffer, unsigned char* shared)
      : args(all.forward),
        gradients(all.gradients),
        chunk(args),
        inputs(all, shared),
        scalars(args, gradients),
        later(args, reinterpret_cast<Real*>(shared)),
        sum(buffer),
        kept(after_window(shared)),
        sums(gradients.partial, after_window(shared) + (KEEP_IN_REGISTERS ? 0 : KEPT * WIDTH)) {}

  static __device__ Real* after_window(unsigned char* rest) {
    return reinterpret_cast<Real*>(rest) + Config::LaterTokens::SHARED;
  }

  // Prefetches a token, if this plan prefetches at all; of a chain the directions in every plan.
  DEVICE void prefetch(long long token, int stage, bool own) const {
    if constexpr (!PREFETCH && !CHAIN) return;
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
      if (is_inside(row)) inputs.prefetch(token, row, stage, own);
  }
  DEVICE void start(long long token) {
    scalars.prefetch(token);
    prefetch(token, inputs.stage, chunk.owns(token));
  }

  // Loads the whole token if it is kept in registers, then prefetches the next one.
  DEVICE void load(long long token, bool own) {
    if constexpr (STAGES > 0) ptx::cp_async_wait();
    if constexpr (KEEP_IN_REGISTERS) {
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
        if (!is_inside(row)) continue;
        inputs.load_read_inputs(token, row);
        if (own) inputs.load_rewrite_inputs(token, row, false);
      }
      if (own) inputs.finish_state(token);
    }
    if (token == chunk.first) return;
    const long long next = token - chunk.step;
    scalars.prefetch(next);
    if constexpr (PREFETCH_WHOLE_TOKEN) prefetch(next, STAGES == 2 ? inputs.stage ^ 1 : 0, own || chunk.owns(next));
  }

  // G of a row.
  DEVICE void load_grad(int row) {
    convert(grad[row % KEPT_ROWS], inputs.grad[row]);
    later.add(row, grad[row % KEPT_ROWS]);
  }

  // X' of a row.
  DEVICE void rebuild(const DerivedScalars& s, int row) {
    auto& to = new_state[row % KEPT_ROWS];
    if constexpr (REWRITE) to = rewritten(inputs.state[row], inputs.direction.vectors(row), s.rewrites);
    else to = inputs.state[row];
  }

  // Adds a row's share of D·c and, unless the token is in the halo, of kᵀ(G + w a) and kᵀ(w x̂).
  DEVICE void add_row(
      int row, bool own, const Real (&x_hat)[FEATURES], const Real (&dh)[FEATURES], const Real (&a)[FEATURES],
      Totals& totals) const {
    if constexpr (NORM) {
      Parameters parameters;
      parameters.load_norm(args, feature_of(row));
#pragma unroll
      for (int f = 0; f < FEATURES; ++f) totals[0] += parameters.gamma(f) * dh[f] * x_hat[f];
    }
    if (!REWRITE || !own) return;
    CompressWeight weight;
    if constexpr (READ != NONE) weight.load(args, feature_of(row));
#pragma unroll
    for (int n = 0; n < REWRITES; ++n)
#pragma unroll
      for (int i = 0; i < ELEMENTS; ++i) {
        const int f = i / M, number = n * M + i % M;
        const Real k = inputs.direction.vectors(row)[n][f];
        totals[K_GRAD_AT + number] += k * grad[row % KEPT_ROWS][i];
        if constexpr (READ != NONE) totals[K_GRAD_AT + number] += k * a[f] * weight.at(i);
        if constexpr (NORM) totals[X_HAT_AT + number] += k * x_hat[f] * weight.at(i);
      }
  }

  // First pass, before the sum: adds a row's share to it and keeps x̂, dh' and a for the second pass.
  DEVICE void before_sum(const DerivedScalars& s, long long token, bool own, int row, Totals& totals) {
    Real x_hat[FEATURES] = {}, dh[FEATURES] = {}, a[FEATURES] = {};
    if constexpr (!KEEP_IN_REGISTERS) {
      inputs.load_read_inputs(token, row);
      if (own) inputs.load_rewrite_inputs(token, row, true);
    }
    if (own) load_grad(row);
    if constexpr (READ != NONE) {
      if constexpr (READ != TOKEN) rebuild(s, row);
      compress_normed(args, inputs, s, row, new_state[row % KEPT_ROWS], x_hat);
      read_backward(args, inputs, s, row, dh, a);
      kept.store(X_HAT, row, x_hat);
      kept.store(A, row, a);
      if constexpr (SUMS != SEPARATE_KERNEL) kept.store(DH, row, dh);
    }
    add_row(row, own, x_hat, dh, a, totals);
  }

  // Second pass, after the sum: dx, the parameter gradients, dX and dk.
  DEVICE void after_sum(const DerivedScalars& s, long long token, bool own, int row) {
    Real x_hat[FEATURES] = {}, dx[FEATURES] = {};
    if constexpr (READ != NONE) {
      kept.load(X_HAT, row, x_hat);
      kept.load(A, row, dx);
#pragma unroll
      for (int f = 0; f < FEATURES; ++f) dx[f] -= s.shift * x_hat[f];
    }
    later.store(row, dx);
    if (own) {
      if constexpr (!KEEP_IN_REGISTERS) {
        inputs.load_rewrite_inputs(token, row, false);
        load_grad(row);
      }
      if constexpr (SUMS != SEPARATE_KERNEL) {
        if constexpr (COMPRESS_SLOTS > 0 && (!KEEP_IN_REGISTERS || READ == TOKEN)) rebuild(s, row);
        Real dh[FEATURES] = {};
        if constexpr (SUM_NORM) kept.load(DH, row, dh);
        sums.add_token(s, later, row, new_state[row % KEPT_ROWS], x_hat, dh, dx);
      }
      store_row(s, token, row, dx);
    }
    if constexpr (!PREFETCH_WHOLE_TOKEN) {
      const long long next = token - chunk.step;
      if (token > chunk.first) inputs.prefetch(next, row, 0, own || chunk.owns(next));
    }
  }

  // G += dx ⊗ w, then dX and dk of a row.
  DEVICE void store_row(const DerivedScalars& s, long long token, int row, const Real (&dx)[FEATURES]) const {
    CompressWeight weight;
    if constexpr (READ != NONE) weight.load(args, feature_of(row));
    Elements whole;
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
      const Real total = grad[row % KEPT_ROWS][i];
      whole.element[i] = READ != NONE ? total + weight.at(i) * dx[i / M] : total;
    }
    policy.store_row(s, inputs, whole, gradients, token, row);
  }

  // Processes one token, which has been prefetched. A halo token (not own) only gives dx to the window.
  DEVICE void run(long long token, bool own) {
    DerivedScalars s = derive_scalars(args, gradients, scalars);
    load(token, own);
    Totals totals = {};
    UNROLL_ROWS
    for (int row = 0; row < ROWS; ++row)
      if (is_inside(row)) before_sum(s, token, own, row, totals);
    if constexpr (BLOCK_SUMS > 0) sum(totals);
    if constexpr (NORM) s.shift = totals[0] / Real(D) * s.rstd;
    if (own) policy.derive(s, totals, gradients, token);
    UNROLL_ROWS
    for (int row = 0; row < ROWS; ++row)
      if (is_inside(row)) after_sum(s, token, own, row);
    if constexpr (STAGES == 2) inputs.stage ^= 1;
    later.retreat();
    if (!own) return;
    if constexpr (SUMS != SEPARATE_KERNEL) {
      sums.add_biases(s);
    } else if constexpr (NORM) {
      if (writes(0)) gradients.shift[token] = s.shift;
    }
  }
};

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, BLOCKS) rewrite_read_bwd(const Backward all) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ __align__(16) BlockSum<BLOCK_SUMS>::Buffer buffer;
  BackwardPass pass(all, buffer, shared);
  pass.later.walk(pass);
  if constexpr (READ != NONE && SUMS != SEPARATE_KERNEL) pass.sums.store(all.gradients.partial);
}
