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
// stays in registers (HOLD), so it crosses memory once each way; without clusters what registers cannot hold is
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
constexpr int MOST_SUMS = REWRITE_SUMS > READ_SUMS ? REWRITE_SUMS : READ_SUMS;

struct Forward {
  const Boundary& b;
  Feed<STATE_T, M> state;
  Feed<DIRECTION_T, 1, REWRITE> direction;
  BlockSum<MOST_SUMS> sum;
  Columns x;
  int turn = 0;  // the stage of the token at hand

  __device__ Forward(const Boundary& b, BlockSum<MOST_SUMS>::Buffer& buffer, unsigned char*& shared)
      : b(b),
        state(b.state, shared),
        direction(b.direction, shared),
        sum(buffer),
        x(reinterpret_cast<Real*>(shared) + (READ == TOKEN && WINDOW == 1 ? TAPS * WIDTH : 0)) {}

  __device__ __forceinline__ void request_row(long long token, int row, int turn) const {
    state.request(token, row, turn);
    direction.request(token, row, turn);
  }
  __device__ __forceinline__ void take_row(long long token, int row, bool again) {
    state.take(token, row, turn, again);
    direction.take(token, row, turn, again);
  }
  // Asks for all of a token: as token_stream.cuh says, else into registers.
  __device__ __forceinline__ void request(long long token, int turn) {
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      if (!is_inside(row)) continue;
      if constexpr (AHEAD) request_row(token, row, turn);
      else take_row(token, row, false);
    }
  }
  // Takes all of a token that is held, then asks for the next.
  __device__ __forceinline__ void take(long long token, long long next) {
    if constexpr (!AHEAD) return;  // it was loaded
    if constexpr (STAGES > 0) await_copies();
    if constexpr (HOLD) {
#pragma unroll
      for (int row = 0; row < ROWS; ++row)
        if (is_inside(row)) take_row(token, row, false);
    }
    if (next < 0) return;
    if constexpr (EARLY) request(next, STAGES == 2 ? turn ^ 1 : 0);
    if constexpr (REWRITE) {
      if (!writes(0)) return;
      bring_near(b.value + next * M);
      bring_near(b.gate + next);
    }
  }

  // r, p and the factors of k: the first sum.
  __device__ __forceinline__ Write compare(long long token, bool own) {
    Real value[M];
#pragma unroll
    for (int j = 0; j < M; ++j) value[j] = b.value[token * M + j];
    const Real gate = b.gate[token];
    Real sums[1 + M] = {};
    UNROLL_ROWS
    for (int row = 0; row < ROWS; ++row) {
      if (!is_inside(row)) continue;
      if constexpr (!HOLD) take_row(token, row, true);
#pragma unroll
      for (int f = 0; f < FEATURES; ++f) {
        const Real k = direction[row][f];
        sums[0] += k * k;
#pragma unroll
        for (int j = 0; j < M; ++j) sums[1 + j] += k * state[row][f * M + j];
      }
    }
    sum(sums);
    Write write;
    write.r = inverse_root(sums[0] + Real(b.eps_k) * Real(b.eps_k));
#pragma unroll
    for (int j = 0; j < M; ++j) write.readout[j] = times(write.r, sums[1 + j]);
    write.finish(value, gate);
    if (own && writes(0)) {
      b.stats[token * (1 + M)] = write.r;
#pragma unroll
      for (int j = 0; j < M; ++j) b.stats[token * (1 + M) + 1 + j] = write.readout[j];
    }
    return write;
  }

  // X → X' of a row, stored if it is the block's own.
  __device__ __forceinline__ void rewrite(long long token, int row, const Write& write, bool own) {
    state[row] = rewritten(state[row], direction[row], write);
    if (own) state[row].store(packet_of<M>(b.new_state, token, row));
  }

  // Σ_j w_ij X'_ij with the weights of one tap.
  __device__ __forceinline__ void mix(int row, int tap, Real (&to)[FEATURES]) const {
    Compress compress;
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
      window.get(tap, row, later);
      mix(row, tap, later);
      window.put(tap, row, later);
    }
    window.get(0, row, x);
    mix(row, 0, x);
    Packet<STATE_T, FEATURES> saved;  // the backward sees the stored x: let the forward see it too
    saved.set(x);
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) x[f] = saved[f];
    if (own) saved.store(packet_of(b.compressed, token, row));
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
    const Real rstd = NORM ? inverse_root(sums[0] / Real(D) + Real(b.norm_eps)) : Real(1);
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
        b.new_value[token * M + j] =
            VALUE_SIGMOID ? Real(b.value_scale) * sigmoid(linear) : linear;
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
      x.get(row, h);
#pragma unroll
      for (int f = 0; f < FEATURES; ++f) h[f] *= rstd * parameters.gamma(f);
      Packet<CONTEXT_T, FEATURES> context;
      context.set(h);
      context.put(packet_of(b.context, token, row));  // the sublayer reads it next: keep it near
    }
  }

  // One token, whose X and k have been asked for; asks for those of `next`.
  __device__ __forceinline__ void run(Window* window, long long token, bool own, long long next) {
    take(token, next);
    Write write;
    if constexpr (REWRITE) write = compare(token, own);
    Real sums[READ_SUMS > 0 ? READ_SUMS : 1] = {};
    UNROLL_ROWS
    for (int row = 0; row < ROWS; ++row) {
      if (!is_inside(row)) continue;
      if constexpr (!HOLD) take_row(token, row, false);
      if (!EARLY && next >= 0) request_row(next, row, 0);
      if constexpr (REWRITE) rewrite(token, row, write, own);
      if constexpr (READ == NONE) continue;
      Real x[FEATURES] = {};
      if constexpr (READ == TOKEN) compress_over_time(*window, token, row, own, x);
      else mix(row, 0, x);
      if constexpr (READ_SUMS > 0) add_read(row, x, sums);
      this->x.put(row, x);
    }
    if (!AHEAD && next >= 0) request(next, turn);
    if constexpr (STAGES == 2) turn ^= 1;
    if constexpr (READ == NONE) return;
    if constexpr (READ == TOKEN) window->advance();
    if (!own) return;  // the whole block alike
    if constexpr (READ_SUMS > 0) sum(sums);
    store_context(token, finish_read(token, sums));
  }
};

extern "C" __global__ void TOGETHER __launch_bounds__(THREADS, BLOCKS) rewrite_read_fwd(const Boundary b) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ __align__(16) BlockSum<MOST_SUMS>::Buffer buffer;
  const long long first = blockIdx.x * b.chunk;
  const long long last = first + b.chunk < b.tokens ? first + b.chunk : b.tokens;
  unsigned char* rest = shared;
  Forward forward(b, buffer, rest);
  if constexpr (READ == TOKEN) {
    Window window(b, reinterpret_cast<Real*>(rest));
    long long position = first % b.time;
    const long long halo = position < TAPS - 1 ? position : TAPS - 1;
    position -= halo;
    forward.request(first - halo, 0);
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
    forward.request(first, 0);
    for (long long token = first; token < last; ++token) {
      forward.run(nullptr, token, true, token + 1 < last ? token + 1 : -1);
    }
  }
}
