// rewrite, read and rewrite_read, forward: X, k, v, β → X', h, v', β'.
//
// Read per token:    X (M·D elements), k (D), v (M), β. Parameters are read for every token and stay in L1 and L2.
// Written per token: X' (M·D), h (D), v' (M), β'.
// Saved for the backward: r and p (1 + M numbers), rstd (1), and x (D) if the read is a token read; β' and v', too.
// Reduced over the features: {|k|², kᵀX} before the rewrite, {Σx², w_β·γx, W_v·γx} after it. A rewrite that erases nothing
// reduces |k|² alone.
// Moved per token: (2M + 2)·D elements, 10·D for M = 4; a token read (2M + 3)·D.
//
// Several rewrites one after the other (REWRITES = n) move (n − 1)·D elements more, and X' but once. None of them waits for
// what the one before it leaves: k_jᵀ(X + Σ_i k_i factor_iᵀ) = k_jᵀX + Σ_i (k_j·k_i) factor_iᵀ over i < j, so that the first
// sum has n·(1 + M) + n·(n − 1)/2 numbers, and there is still one.
//
// A block processes its tokens one after the other: every gridDim.x-th, or in a token read `chunk` neighbours. Its threads
// share a token's features. If one block cannot hold a token, a cluster of blocks shares it, with a slice of the features
// each (sm_90 and newer; for bf16, M = 4 beyond D = 4096, M = 8 beyond 2048, and half of that for a token read).
//
// X stays in registers from the first sum to the second (KEEP_IN_REGISTERS), so it crosses memory once each way. If it
// does not fit and there are no clusters, X and k are loaded again after the first sum: from their stage in shared memory
// or from L2, (M + 1)·D more. The next token's X and k are requested early (token_stream.cuh).
//
// A token read is a policy of Config (earlier_tokens.cuh). If its states are narrow enough, it has tiles of tokens (tile.cuh,
// sm_90 and newer). A cached step saves nothing for a backward (SAVES == 0).

#include "earlier_tokens.cuh"
#include "forward.cuh"
#if TILE
#include "tile.cuh"
#endif

// Values of LOAD_AHEAD (README.md).
constexpr int IN_SUM = 1, SCALARS_TOO = 2;
static_assert(LOAD_AHEAD == 0 || !PREFETCH, "only without a stage");

struct ForwardPass {
  const RewriteRead& args;
  const Chunk chunk;
  TokenStream<STATE_T, M> state;
  TokenStream<DIRECTION_T, 1, REWRITE, REWRITES> direction;
  LaneScalars<REWRITE * REWRITES * (1 + M)> scalars;  // β and v; if LOAD_AHEAD has them
  Config::EarlierTokens earlier;
  BlockSum<MAX_SUMS> sum;
  FeatureVectors<1, KEEP_IN_REGISTERS> x;
  int stage = 0;  // the stage of the current token

  // Dynamic shared memory holds, in this order: stages, window, x.
  __device__ ForwardPass(const RewriteRead& args, BlockSum<MAX_SUMS>::Buffer& buffer, unsigned char* shared)
      : args(args),
        chunk(args),
        state(args.state, shared),
        direction(args.direction, shared),
        earlier(args, reinterpret_cast<Real*>(shared)),
        sum(buffer),
        x(reinterpret_cast<Real*>(shared) + Config::EarlierTokens::SHARED) {
    if constexpr (!REWRITE || LOAD_AHEAD < SCALARS_TOO) return;
    scalars.assign(0, REWRITES, args.gate);
    scalars.assign(REWRITES, REWRITES * M, args.value);
  }

  DEVICE void prefetch_row(long long token, int row, int stage) const {
    state.prefetch(token, row, stage);
    direction.prefetch(token, row, stage);
  }
  DEVICE void load_row(long long token, int row, bool again) {
    state.load(token, row, stage, again);
    direction.load(token, row, stage, again);
  }
  // Requests a whole token: into a stage or L2 (token_stream.cuh), else into registers.
  DEVICE void request(long long token, int stage) {
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      if (!is_inside(row)) continue;
      if constexpr (PREFETCH) prefetch_row(token, row, stage);
      else load_row(token, row, false);
    }
  }
  // Requests a whole token, and its β and v if they are loaded ahead.
  DEVICE void load_ahead(long long token) {
    if constexpr (REWRITE && LOAD_AHEAD == SCALARS_TOO) scalars.prefetch(token);
    request(token, stage);
  }
  DEVICE void start(long long token) { load_ahead(token); }
  // Loads the whole token if it is kept in registers, then requests the next one.
  DEVICE void load(long long token, long long next) {
    if constexpr (!PREFETCH) return;  // request() has loaded it already
    if constexpr (STAGES > 0) ptx::cp_async_wait();
    if constexpr (KEEP_IN_REGISTERS) {
#pragma unroll
      for (int row = 0; row < ROWS; ++row)
        if (is_inside(row)) load_row(token, row, false);
    }
    if (next < 0) return;
    if constexpr (PREFETCH_WHOLE_TOKEN) request(next, STAGES == 2 ? stage ^ 1 : 0);
    if constexpr (REWRITE) {
      if (!writes(0)) return;
      ptx::prefetch_l2(args.value + next * (REWRITES * M));
      ptx::prefetch_l2(args.gate + next * REWRITES);
    }
  }

  // v and β: those that were loaded ahead, or from memory.
  DEVICE void load_operands(long long token, Real (&value)[REWRITES][M], Real (&gate)[REWRITES]) const {
    constexpr bool AHEAD = LOAD_AHEAD == SCALARS_TOO;
#pragma unroll
    for (int n = 0; n < REWRITES; ++n) {
#pragma unroll
      for (int j = 0; j < M; ++j)
        value[n][j] = AHEAD ? scalars.broadcast(REWRITES + n * M + j) : args.value[(token * REWRITES + n) * M + j];
    }
#pragma unroll
    for (int n = 0; n < REWRITES; ++n) gate[n] = AHEAD ? scalars.broadcast(n) : args.gate[token * REWRITES + n];
  }

  // The first sum, and from it r, p and the factors of k.
  DEVICE void compare(long long token, bool own, Rewrite (&rewrites)[REWRITES]) {
    Real value[REWRITES][M], gate[REWRITES];
    if constexpr (LOAD_AHEAD < SCALARS_TOO) load_operands(token, value, gate);
    Real sums[FIRST_SUMS] = {};
    UNROLL_ROWS
    for (int row = 0; row < ROWS; ++row) {
      if (!is_inside(row)) continue;
      if constexpr (!KEEP_IN_REGISTERS) load_row(token, row, true);
#pragma unroll
      for (int n = 0; n < REWRITES; ++n) add_products(n, state[row], direction.vectors(row), sums);
    }
    sum(sums);
    if constexpr (LOAD_AHEAD == SCALARS_TOO) load_operands(token, value, gate);
#pragma unroll
    for (int n = 0; n < REWRITES; ++n) {
      measure(args, n, sums + sums_before(n), rewrites);
      rewrites[n].finish(value[n], gate[n]);
    }
    if (SAVES && own && writes(0)) save(args, token, rewrites, sums);
  }

  // X → X' of a row. Halo tokens (not own) are not stored: another block stores them.
  DEVICE void rewrite(long long token, int row, const Rewrite (&rewrites)[REWRITES], bool own) {
    state[row] = rewritten(state[row], direction.vectors(row), rewrites);
    if (own) state[row].store_streaming(packet_of<M>(args.new_state, token, row));
  }

  DEVICE void store_context(long long token, Real rstd) const {
    UNROLL_ROWS
    for (int row = 0; row < ROWS; ++row) {
      if (!is_inside(row)) continue;
      Parameters parameters;
      parameters.load_norm(args, feature_of(row));
      Real x[FEATURES];
      this->x.load(0, row, x);
      ::store_context(args, parameters, token, row, rstd, x);
    }
  }

  // Processes one token, which has been requested, and requests the next one.
  DEVICE void run(long long token, bool own) {
    const long long next = token < chunk.last ? token + chunk.step : -1;
    load(token, next);
    Rewrite rewrites[REWRITES];
    if constexpr (REWRITE) compare(token, own, rewrites);
    ReadSums sums = {};
    UNROLL_ROWS
    for (int row = 0; row < ROWS; ++row) {
      if (!is_inside(row)) continue;
      if constexpr (!KEEP_IN_REGISTERS) load_row(token, row, false);
      if (!PREFETCH_WHOLE_TOKEN && next >= 0) prefetch_row(next, row, 0);
      if constexpr (REWRITE) rewrite(token, row, rewrites, own);
      if constexpr (READ == NONE) continue;
      Real x[FEATURES] = {};
      earlier.compress(state[row], token, row, own, x);
      if constexpr (READ_SUMS > 0) {
        Parameters parameters;
        parameters.load(args, feature_of(row));
        add_read(parameters, x, sums);
      }
      this->x.store(0, row, x);
    }
    if (!PREFETCH && LOAD_AHEAD < IN_SUM && next >= 0) load_ahead(next);
    if constexpr (STAGES == 2) stage ^= 1;
    earlier.advance();
    // A halo token (not own) has no second sum: uniform over the block, so no barrier is skipped by a part of it.
    if constexpr (READ_SUMS > 0) {
      if (own) sum.start(sums);
    }
    // After all uses of the weights, so that waiting for those does not wait for these loads.
    if (!PREFETCH && LOAD_AHEAD >= IN_SUM && next >= 0) load_ahead(next);
    if (READ == NONE || !own) return;
    if constexpr (READ_SUMS > 0) sum.finish(sums);
    store_context(token, finish_read(args, token, sums));
  }
};

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, BLOCKS) rewrite_read_fwd(const RewriteRead args) {
  extern __shared__ __align__(16) unsigned char shared[];
#if TILE
  __shared__ __align__(16) TilePass::Buffer buffer;
  TilePass(args, buffer, shared).walk();
#else
  __shared__ __align__(16) BlockSum<MAX_SUMS>::Buffer buffer;
  ForwardPass pass(args, buffer, shared);
  pass.earlier.walk(pass);
#endif
}
