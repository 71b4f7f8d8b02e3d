// rewrite, read and rewrite_read, backward: gradients of X', h, v', β' → of X, k, v, β and parameters.
//
// Read per token:    G = ∂L/∂X' and X (M·D elements each), k and dh (D each), x (D) if the read is a token read, and the
//                    saved r, p, rstd with v, β, v', β' and the gradients of v' and β'. Parameters stay in L1 and L2.
// Written per token: dX (M·D), dk (D), dv (M), dβ.
// Reduced over the features: c, k̂ᵀ(G + w a) and k̂ᵀ(w x̂), 1 + 2M numbers, once; of n rewrites 1 + 2nM.
// Reduced over the block's tokens (sums.cuh), and over the blocks by reduce.cu: the parameters' gradients.
// Moved per token: (3M + 3)·D elements, 15·D for M = 4; a token read (3M + 4)·D.
//
// X need not have been stored (CHAIN). An anchor is read in its place, and of each rewrite since then k (D) and 2 + 2M
// numbers, which L1 serves to all but one warp; X gets the bits that it had.
//
// X' is not read. It is rebuilt from X, k, r and p, to the bits that the forward stored. If one block cannot hold a
// token, a cluster of blocks shares it (sm_90 and newer; for bf16, M = 4 beyond D = 2048, M = 8 beyond 1024, and half of
// that for a token read). Without clusters, X, G and k that do not fit in registers are loaded again after the sum: from
// their stage in shared memory (token_stream.cuh), or from L2, (2M + 1)·D more.
//
// With k̂ = r·k, e = v − p, u = γ·dh', x̂ = rstd·x:
//
//     dh' = dh + dβl·w_β + dvl·W_v      a = rstd·u      c = mean(u·x̂)      dx = a − c·rstd·x̂
//     G  += dx ⊗ w      g = k̂ᵀG         dX = G − β k̂ gᵀ      dv = β g      dβ = g·e
//     dk  = r (dk̂ − k̂·β(g·e − p·g))     dk̂ = β (G e − X g)
//
// dβl and dvl are the gradients before the sigmoids of the next gate and values. If the values read x, dvl·W_v adds to a
// instead of dh'. g need not wait for c, because g_j = Σ k̂ (G_j + w_j a) − c·rstd·Σ k̂ w_j x̂. So one sum is enough.
//
// Of n rewrites one after the other, each sees the G that the later ones leave and the X that the earlier ones leave. Both
// are G and X but for multiples of the k_i, whose products with each other the forward saved. So there is still one sum, and
// 2(n − 1)·D elements more move.
//
// A block processes its `chunk` tokens from the last to the first. A token read keeps dx of K tokens in its window. Of
// the K − 1 halo tokens after the chunk it needs only dx, so it reads their dh, x and rstd, but not their X or G.
//
// If a block has no room for the sums of parameter gradients (SUMS == SEPARATE_KERNEL), this kernel writes every token's
// c·rstd instead, and parameters_bwd.cu computes them.

#include "sums.cuh"

struct BackwardPass {
  // Rows of D numbers between the two passes over a token, if they wait in shared memory: x̂, a, and dh' for the sums.
  static constexpr int FEATURE_ROWS = KEEP_IN_REGISTERS ? 0 : SUMS == SEPARATE_KERNEL ? 2 : 3;

  const RewriteRead& args;
  const Gradients& g;
  const Chunk chunk;
  TokenInputs inputs;
  TokenScalars scalars;
  LaterTokens later;
  BlockSum<BLOCK_SUMS> sum;
  FeatureRow normed;   // x̂
  FeatureRow read;     // a, from which dx = a − c·rstd·x̂
  FeatureRow context;  // dh', for the sums
  Sums sums;
  Packet<LaterTokens::Grad, ELEMENTS> grad[KEPT_ROWS];  // G, with what later tokens add
  Packet<STATE_T, ELEMENTS> stored[KEPT_ROWS];  // X'

  // Dynamic shared memory holds, in this order: stages, window, feature rows, sums of parameter gradients.
  __device__ BackwardPass(const Backward& all, BlockSum<BLOCK_SUMS>::Buffer& buffer, unsigned char* shared)
      : args(all.forward),
        g(all.gradients),
        chunk(args),
        inputs(all, shared),
        scalars(args, g),
        later(args, reinterpret_cast<Real*>(shared)),
        sum(buffer),
        normed(after_window(shared)),
        read(after_window(shared) + WIDTH),
        context(after_window(shared) + 2 * WIDTH),
        sums(g.partial, after_window(shared) + FEATURE_ROWS * WIDTH) {}

  static __device__ Real* after_window(unsigned char* rest) {
    return reinterpret_cast<Real*>(rest) + LaterTokens::SHARED;
  }

  // Prefetches a token, if this plan prefetches at all.
  __device__ __forceinline__ void prefetch(long long token, int stage, bool own) const {
    if constexpr (!PREFETCH) return;
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
      if (is_inside(row)) inputs.prefetch(token, row, stage, own);
  }
  __device__ __forceinline__ void start(long long token) {
    scalars.prefetch(token);
    prefetch(token, inputs.stage, chunk.owns(token));
  }

  // Loads the whole token if it is kept in registers, then prefetches the next one.
  __device__ __forceinline__ void load(long long token, bool own) {
    if constexpr (STAGES > 0) cp_async_wait();
    if constexpr (KEEP_IN_REGISTERS) {
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
        if (!is_inside(row)) continue;
        inputs.load_read_inputs(token, row);
        if (own) inputs.load_rewrite_inputs(token, row, false);
      }
    }
    if (token == chunk.first) return;
    scalars.prefetch(token - 1);
    if constexpr (PREFETCH_WHOLE_TOKEN)
      prefetch(token - 1, STAGES == 2 ? inputs.stage ^ 1 : 0, own || chunk.owns(token - 1));
  }

  // G of a row.
  __device__ __forceinline__ void load_grad(int row) {
    convert(grad[row % KEPT_ROWS], inputs.grad[row]);
    later.add(row, grad[row % KEPT_ROWS]);
  }

  // X' of a row.
  __device__ __forceinline__ void rebuild(const DerivedScalars& s, int row) {
    auto& to = stored[row % KEPT_ROWS];
    if constexpr (REWRITE) to = rewritten(inputs.state[row], inputs.direction.vectors(row), s.factors);
    else to = inputs.state[row];
  }

  // Adds a row's share of c and, unless the token is in the halo, of kᵀ(G + w a) and kᵀ(w x̂). rewrite_backward multiplies
  // by r.
  __device__ __forceinline__ void add_row(
      int row, bool own, const Real (&normed)[FEATURES], const Real (&dh)[FEATURES], const Real (&a)[FEATURES],
      Real (&totals)[BLOCK_SUMS > 0 ? BLOCK_SUMS : 1]) const {
    if constexpr (NORM) {
      Parameters parameters;
      parameters.load_norm(args, feature_of(row));
#pragma unroll
      for (int f = 0; f < FEATURES; ++f) {
        totals[0] += parameters.gamma(f) * dh[f] * normed[f];
      }
    }
    if constexpr (!REWRITE) return;
    if (!own) return;
    CompressWeight compress;
    if constexpr (READ != NONE) compress.load(args, feature_of(row));
    const auto& directions = inputs.direction.vectors(row);
#pragma unroll
    for (int n = 0; n < REWRITES; ++n)
#pragma unroll
      for (int f = 0; f < FEATURES; ++f) {
        const Real k = directions[n][f];
        const Real k_a = READ != NONE ? k * a[f] : Real(0);
        const Real k_normed = NORM ? k * normed[f] : Real(0);
#pragma unroll
        for (int j = 0; j < M; ++j) {
          const int number = n * M + j;
          totals[ALONG_AT + number] += k * grad[row % KEPT_ROWS][f * M + j];
          if constexpr (READ != NONE) totals[ALONG_AT + number] += k_a * compress.at(f, j);
          if constexpr (NORM) totals[NORMED_AT + number] += k_normed * compress.at(f, j);
        }
      }
  }

  // G += dx ⊗ w, then dX and dk of a row.
  __device__ __forceinline__ void store_row(
      const DerivedScalars& s, const RewriteGrad& rewrite_grad, long long token, int row, const Real (&dx)[FEATURES]) {
    CompressWeight compress;
    if constexpr (READ != NONE) compress.load(args, feature_of(row));
    Real outgoing[ELEMENTS], dk[REWRITES][FEATURES];
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) {
      Real k[REWRITES] = {}, unit[REWRITES] = {};  // unit: dk̂/β, but for multiples of the k
#pragma unroll
      for (int n = 0; n < REWRITES * REWRITE; ++n) k[n] = inputs.direction.vectors(row)[n][f];
#pragma unroll
      for (int j = 0; j < M; ++j) {
        const Real total = this->grad[row % KEPT_ROWS][f * M + j];
        const Real grad = READ != NONE ? total + compress.at(f, j) * dx[f] : total;
        outgoing[f * M + j] = grad;
#pragma unroll
        for (int n = 0; n < REWRITES * REWRITE; ++n) {
          unit[n] += grad * s.factors.error[n][j];
          unit[n] -= inputs.state[row][f * M + j] * rewrite_grad.g[n][j];
          outgoing[f * M + j] -= rewrite_grad.back[n][j] * k[n];
        }
      }
#pragma unroll
      for (int n = 0; n < REWRITES; ++n) {
        dk[n][f] = rewrite_grad.scale[n] * unit[n];
#pragma unroll
        for (int i = 0; i < REWRITES; ++i) dk[n][f] += rewrite_grad.on[n][i] * k[i];
      }
    }
    Packet<STATE_T, ELEMENTS> grad_state;
    grad_state.set(outgoing);
    grad_state.store_streaming(packet_of<M>(g.grad_state, token, row));
#pragma unroll
    for (int n = 0; n < REWRITES * REWRITE; ++n) {
      Packet<DIRECTION_T, FEATURES> grad_direction;
      grad_direction.set(dk[n]);
      // The sublayer's backward reads dk next.
      grad_direction.store_global(packet_of(g.grad_direction, token * REWRITES + n, row));
    }
  }

  // First pass, before the sum: adds a row's share to it and keeps x̂, dh' and a for the second pass.
  __device__ __forceinline__ void before_sum(
      const DerivedScalars& s, long long token, bool own, int row,
      Real (&totals)[BLOCK_SUMS > 0 ? BLOCK_SUMS : 1]) {
    Real normed[FEATURES] = {}, dh[FEATURES] = {}, a[FEATURES] = {};
    if constexpr (!KEEP_IN_REGISTERS) {
      inputs.load_read_inputs(token, row);
      if (own) inputs.load_rewrite_inputs(token, row, true);
    }
    if (own) load_grad(row);
    if constexpr (READ != NONE) {
      if constexpr (READ != TOKEN) rebuild(s, row);
      compress(args, inputs, s, row, stored[row % KEPT_ROWS], normed);
      read_backward(args, inputs, s, row, dh, a);
      this->normed.store(row, normed);
      read.store(row, a);
      if constexpr (SUMS != SEPARATE_KERNEL) context.store(row, dh);
    }
    add_row(row, own, normed, dh, a, totals);
  }

  // Second pass, after the sum: dx, the parameter gradients, dX and dk.
  __device__ __forceinline__ void after_sum(
      const DerivedScalars& s, const RewriteGrad& rewrite_grad, long long token, bool own, int row) {
    Real normed[FEATURES] = {}, dx[FEATURES] = {};
    if constexpr (READ != NONE) {
      this->normed.load(row, normed);
      read.load(row, dx);
#pragma unroll
      for (int f = 0; f < FEATURES; ++f) dx[f] -= s.shift * normed[f];
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
        if constexpr (SUM_NORM) context.load(row, dh);
        sums.add_token(s, later, row, stored[row % KEPT_ROWS], normed, dh, dx);
      }
      store_row(s, rewrite_grad, token, row, dx);
    }
    if constexpr (!PREFETCH_WHOLE_TOKEN) {
      if (token > chunk.first) inputs.prefetch(token - 1, row, 0, own || chunk.owns(token - 1));
    }
  }

  // Processes one token, which has been prefetched. A halo token (not own) only gives dx to the window.
  __device__ __forceinline__ void run(long long token, bool own) {
    DerivedScalars s = derive(args, g, scalars);
    load(token, own);
    Real totals[BLOCK_SUMS > 0 ? BLOCK_SUMS : 1] = {};
    UNROLL_ROWS
    for (int row = 0; row < ROWS; ++row)
      if (is_inside(row)) before_sum(s, token, own, row, totals);
    if constexpr (BLOCK_SUMS > 0) sum(totals);
    if constexpr (NORM) s.shift = totals[0] / Real(D) * s.rstd;
    RewriteGrad rewrite_grad;
    if constexpr (REWRITE) {
      if (own) rewrite_grad = rewrites_backward(g, s, totals, token);
    }
    UNROLL_ROWS
    for (int row = 0; row < ROWS; ++row)
      if (is_inside(row)) after_sum(s, rewrite_grad, token, own, row);
    if constexpr (STAGES == 2) inputs.stage ^= 1;
    later.retreat();
    if (!own) return;
    if constexpr (SUMS != SEPARATE_KERNEL) {
      sums.add_biases(s);
    } else if constexpr (NORM) {
      if (writes(0)) g.shift[token] = s.shift;
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
