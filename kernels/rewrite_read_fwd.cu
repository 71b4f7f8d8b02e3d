// rewrite, read and rewrite_read, forward: X, k, v, β → X', h, v', β'.
//
// Moved per token, in elements: X in M·D, k in D, X' out M·D, h out D; a token read also saves x, D.
// Saved for the backward beside that: r, p (1 + M numbers) and rstd. Parameters are read by every
// token and stay in L1/L2.
//
// A block takes `chunk` consecutive tokens, one after the other, its threads a token's features. A token that is
// too much for one block (of bf16, m = 4 beyond d = 4096 and m = 8 beyond 2048, half of that for a token read)
// has a cluster of them, from sm_90 on, with a slice of the features each. Two sums run over block or cluster:
// {|k|², kᵀX} before the rewrite and {Σx², w_β·γx, W_v·γx} after it, 1 + M and up to 2 + M numbers. Between them X
// stays in registers (KEEP_IN_REGISTERS), so it crosses memory once each way; without clusters what registers cannot hold is
// taken again after the first sum, from its stage in shared memory (token_stream.cuh), or without one from L2, (M + 1)·D.
// The next token's X and k are asked for ahead: through a stage as soon as it has room, else when X' is stored,
// so that they travel while this token's second sum and its context are worked on. Other blocks of the
// multiprocessor fill what is left.
//
// A token read adds X'_t to the K rows x_t … x_{t+K−1} of its window and emits the first. A chunk that
// starts within a sequence begins K − 1 tokens early: these are rewritten again, but not stored.

#include "token_stream.cuh"

constexpr int REWRITE_SUMS = 1 + M;
constexpr int GATE_AT = NORM, VALUE_AT = NORM + GATE, READ_SUMS = NORM + GATE + VALUE * M;
constexpr int MAX_SUMS = REWRITE_SUMS > READ_SUMS ? REWRITE_SUMS : READ_SUMS;

struct Forward {
  const RewriteRead& b;
  TokenStream<STATE_T, M> state;
  TokenStream<DIRECTION_T, 1, REWRITE> direction;
  BlockSum<MAX_SUMS> sum;
  FeatureRow x;
  int stage = 0;  // the stage of the token at hand

  __device__ Forward(const RewriteRead& b, BlockSum<MAX_SUMS>::Buffer& buffer, unsigned char*& shared)
      : b(b),
        state(b.state, shared),
        direction(b.direction, shared),
        sum(buffer),
        x(reinterpret_cast<Real*>(shared) + (READ == TOKEN && WINDOW == IN_SHARED ? TAPS * WIDTH : 0)) {}

  __device__ __forceinline__ void prefetch_row(long long token, int row, int stage) const {
    state.prefetch(token, row, stage);
    direction.prefetch(token, row, stage);
  }
  __device__ __forceinline__ void load_row(long long token, int row, bool again) {
    state.load(token, row, stage, again);
    direction.load(token, row, stage, again);
  }
  // Asks for all of a token: as token_stream.cuh says, else into registers.
  __device__ __forceinline__ void prefetch(long long token, int stage) {
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      if (!is_inside(row)) continue;
      if constexpr (PREFETCH) prefetch_row(token, row, stage);
      else load_row(token, row, false);
    }
  }
  // Takes all of a token that is held, then asks for the next.
  __device__ __forceinline__ void load(long long token, long long next) {
    if constexpr (!PREFETCH) return;  // it was loaded
    if constexpr (STAGES > 0) cp_async_wait();
    if constexpr (KEEP_IN_REGISTERS) {
#pragma unroll
      for (int row = 0; row < ROWS; ++row)
        if (is_inside(row)) load_row(token, row, false);
    }
    if (next < 0) return;
    if constexpr (PREFETCH_WHOLE_TOKEN) prefetch(next, STAGES == 2 ? stage ^ 1 : 0);
    if constexpr (REWRITE) {
      if (!writes(0)) return;
      prefetch_l2(b.value + next * M);
      prefetch_l2(b.gate + next);
    }
  }

  // r, p and the factors of k: the first sum.
  __device__ __forceinline__ RewriteFactors compare(long long token, bool own) {
    Real value[M];
#pragma unroll
    for (int j = 0; j < M; ++j) value[j] = b.value[token * M + j];
    const Real gate = b.gate[token];
    Real sums[1 + M] = {};
    UNROLL_ROWS
    for (int row = 0; row < ROWS; ++row) {
      if (!is_inside(row)) continue;
      if constexpr (!KEEP_IN_REGISTERS) load_row(token, row, true);
#pragma unroll
      for (int f = 0; f < FEATURES; ++f) {
        const Real k = direction[row][f];
        sums[0] += k * k;
#pragma unroll
        for (int j = 0; j < M; ++j) sums[1 + j] += k * state[row][f * M + j];
      }
    }
    sum(sums);
    RewriteFactors factors;
    factors.r = rsqrt(sums[0] + Real(b.eps_k) * Real(b.eps_k));
#pragma unroll
    for (int j = 0; j < M; ++j) factors.readout[j] = mul_rn(factors.r, sums[1 + j]);
    factors.finish(value, gate);
    if (own && writes(0)) {
      b.stats[token * (1 + M)] = factors.r;
#pragma unroll
      for (int j = 0; j < M; ++j) b.stats[token * (1 + M) + 1 + j] = factors.readout[j];
    }
    return factors;
  }

  // X → X' of a row, stored if it is the block's own.
  __device__ __forceinline__ void rewrite(long long token, int row, const RewriteFactors& factors, bool own) {
    state[row] = rewritten(state[row], direction[row], factors);
    if (own) state[row].store_streaming(packet_of<M>(b.new_state, token, row));
  }

  // Σ_j w_ij X'_ij with the weights of one tap.
  __device__ __forceinline__ void mix(int row, int tap, Real (&to)[FEATURES]) const {
    CompressWeight compress;
    compress.load(b, feature_of(row), tap);
#pragma unroll
    for (int f = 0; f < FEATURES; ++f)
#pragma unroll
      for (int j = 0; j < M; ++j) to[f] += compress.at(f, j) * state[row][f * M + j];
  }

  // x of a row that looks back: what the window has of it, and this token's share.
  __device__ __forceinline__ void compress_over_time(
      Window& window, long long token, int row, bool own, Real (&x)[FEATURES]) const {
    UNROLL_TAPS
    for (int tap = TAPS - 1; tap > 0; --tap) {
      Real later[FEATURES];
      window.load(tap, row, later);
      mix(row, tap, later);
      window.store(tap, row, later);
    }
    window.load(0, row, x);
    mix(row, 0, x);
    Packet<STATE_T, FEATURES> saved;  // the backward sees the stored x: let the forward see it too
    saved.set(x);
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) x[f] = saved[f];
    if (own) saved.store_streaming(packet_of(b.compressed, token, row));
  }

  // A row's shares of Σx², of the gate's logit and of the values, all linear in x but for rstd.
  __device__ __forceinline__ void add_read(
      int row, const Real (&x)[FEATURES], Real (&sums)[READ_SUMS > 0 ? READ_SUMS : 1]) const {
    Parameters parameters;
    parameters.load(b, feature_of(row));
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) {
      const Real normed = x[f] * parameters.gamma(f);
      if constexpr (NORM) sums[0] += x[f] * x[f];
      if constexpr (GATE) sums[GATE_AT] += normed * parameters.gate[f];
      if constexpr (VALUE) {
#pragma unroll
        for (int j = 0; j < M; ++j) {
          sums[VALUE_AT + j] += (VALUE_FROM_COMPRESSED ? x[f] : normed) * parameters.value[j][f];
        }
      }
    }
  }

  // β' and v', each by one thread; returns rstd.
  __device__ __forceinline__ Real finish_read(long long token, const Real* sums) const {
    const Real rstd = NORM ? rsqrt(sums[0] / Real(D) + Real(b.norm_eps)) : Real(1);
    if constexpr (NORM) {
      if (writes(0)) b.rstd[token] = rstd;
    }
    if constexpr (GATE) {
      const Real bias = GATE_BIAS ? widen(*b.gate_bias) : Real(0);
      if (writes(0)) b.new_gate[token] = Real(2) * sigmoid(rstd * sums[GATE_AT] + bias);
    }
    if constexpr (VALUE) {
#pragma unroll
      for (int j = 0; j < M; ++j) {
        if (!writes(j)) continue;
        const Real bias = VALUE_BIAS ? widen(b.value_bias[j]) : Real(0);
        const Real linear = (VALUE_FROM_COMPRESSED ? Real(1) : rstd) * sums[VALUE_AT + j] + bias;
        b.new_value[token * M + j] = VALUE_SIGMOID ? Real(b.value_scale) * sigmoid(linear) : linear;
      }
    }
    return rstd;
  }

  __device__ __forceinline__ void store_context(long long token, Real rstd) const {
    UNROLL_ROWS
    for (int row = 0; row < ROWS; ++row) {
      if (!is_inside(row)) continue;
      Parameters parameters;
      parameters.load_norm(b, feature_of(row));
      Real h[FEATURES];
      x.load(row, h);
#pragma unroll
      for (int f = 0; f < FEATURES; ++f) h[f] *= rstd * parameters.gamma(f);
      Packet<CONTEXT_T, FEATURES> context;
      context.set(h);
      context.store_cached(packet_of(b.context, token, row));  // the sublayer reads it next: keep it near
    }
  }

  // One token, whose X and k have been asked for; asks for those of `next`.
  __device__ __forceinline__ void run(Window* window, long long token, bool own, long long next) {
    load(token, next);
    RewriteFactors factors;
    if constexpr (REWRITE) factors = compare(token, own);
    Real sums[READ_SUMS > 0 ? READ_SUMS : 1] = {};
    UNROLL_ROWS
    for (int row = 0; row < ROWS; ++row) {
      if (!is_inside(row)) continue;
      if constexpr (!KEEP_IN_REGISTERS) load_row(token, row, false);
      if (!PREFETCH_WHOLE_TOKEN && next >= 0) prefetch_row(next, row, 0);
      if constexpr (REWRITE) rewrite(token, row, factors, own);
      if constexpr (READ == NONE) continue;
      Real x[FEATURES] = {};
      if constexpr (READ == TOKEN) compress_over_time(*window, token, row, own, x);
      else mix(row, 0, x);
      if constexpr (READ_SUMS > 0) add_read(row, x, sums);
      this->x.store(row, x);
    }
    if (!PREFETCH && next >= 0) prefetch(next, stage);
    if constexpr (STAGES == 2) stage ^= 1;
    if constexpr (READ == NONE) return;
    if constexpr (READ == TOKEN) window->advance();
    if (!own) return;  // the whole block alike
    if constexpr (READ_SUMS > 0) sum(sums);
    store_context(token, finish_read(token, sums));
  }
};

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, BLOCKS) rewrite_read_fwd(const RewriteRead b) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ __align__(16) BlockSum<MAX_SUMS>::Buffer buffer;
  const long long first = blockIdx.x * b.chunk;
  const long long last = first + b.chunk < b.tokens ? first + b.chunk : b.tokens;
  unsigned char* rest = shared;
  Forward forward(b, buffer, rest);
  if constexpr (READ == TOKEN) {
    Window window(b, reinterpret_cast<Real*>(rest));
    long long position = first % b.time;
    const long long halo = position < TAPS - 1 ? position : TAPS - 1;
    position -= halo;
    forward.prefetch(first - halo, 0);
    window.clear();
    for (long long token = first - halo; token < last; ++token) {
      if (position == b.time) {
        window.clear();
        position = 0;
      }
      ++position;
      forward.run(&window, token, token >= first, token + 1 < last ? token + 1 : -1);
    }
  } else {
    forward.prefetch(first, 0);
    for (long long token = first; token < last; ++token) {
      forward.run(nullptr, token, true, token + 1 < last ? token + 1 : -1);
    }
  }
}
