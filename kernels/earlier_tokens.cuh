// The forward's policies for the read: within a token, or over the tokens before it (a token read). A policy compresses a
// row of X' to x, and walks over a block's tokens from the first to the last.
#pragma once

#include "token_stream.cuh"

// x follows from X' of the same token.
template <> struct EarlierTokens<false> {
  static constexpr int SHARED = 0;

  const RewriteRead& args;

  __device__ EarlierTokens(const RewriteRead& args, Real*) : args(args) {}
  DEVICE void compress(const Config::State& state, long long, int row, bool, Real (&x)[FEATURES]) const {
    ::compress(args, state, row, 0, x);
  }
  DEVICE void advance() {}
  template <class Pass> DEVICE void walk(Pass& pass) {
    const Chunk& chunk = pass.chunk;
    pass.start(chunk.first);
    for (long long token = chunk.first; token <= chunk.last; token += chunk.step) pass.run(token, true);
  }
};

// A token read adds w_s X'_t to x_{t+s} for s = 0 … K − 1 in its window, and emits x_t. A chunk that starts within a
// sequence begins K − 1 tokens early. These halo tokens are rewritten again, but not stored. Where a document starts
// (DOCUMENTS) the window is cleared. In a cached step (PENDING) it starts each sequence with what earlier calls left, and
// what it holds after the last token is left for the next: (K − 1)·D numbers in and out.
template <> struct EarlierTokens<true> {
  static constexpr int SHARED = Window::SHARED;

  const RewriteRead& args;
  Window window;
  CompressWeight kept[TILE > 0 ? TAPS : 1];  // the thread's weights, for the whole walk over tiles

  __device__ EarlierTokens(const RewriteRead& args, Real* shared) : args(args), window(args, shared) {
#pragma unroll
    for (int tap = 0; TILE > 0 && tap < TAPS; ++tap) kept[tap].load(args, feature_of(0), tap);
  }

  DEVICE void add_tap(const Config::State& state, int row, int tap, Real (&x)[FEATURES]) const {
    if constexpr (TILE > 0) ::compress(kept[tap], state, x);
    else ::compress(args, state, row, tap, x);
  }

  // x_t: the sum that the window holds from earlier tokens, plus this token's share.
  DEVICE void compress(const Config::State& state, long long token, int row, bool own, Real (&x)[FEATURES]) {
    UNROLL_TAPS
    for (int tap = TAPS - 1; tap > 0; --tap) {
      Real later[FEATURES];
      window.load(tap, row, later);
      add_tap(state, row, tap, later);
      window.store(tap, row, later);
    }
    window.load(0, row, x);
    add_tap(state, row, 0, x);
    Config::Compressed saved;  // rounds x, because the backward reads the stored x
    saved.set(x);
    saved.get(x);
    if (SAVES && own) saved.store_streaming(packet_of(args.compressed, token, row));
  }
  DEVICE void advance() { window.advance(); }

  // Starts a sequence's window with what earlier calls left; the last vector is zero.
  DEVICE void take_pending(long long sequence) {
    if (!PENDING || !args.pending) return;
    UNROLL_ROWS
    for (int row = 0; row < ROWS; ++row) {
      if (!is_inside(row)) continue;
      UNROLL_TAPS
      for (int tap = 0; tap < TAPS - 1; ++tap) {
        Features sums;
        sums.load_streaming(packet_of(args.pending, sequence * (TAPS - 1) + tap, row));
        window.store(tap, row, sums.element);
      }
    }
  }

  // Leaves the window after a sequence's last token to the next call.
  DEVICE void leave_pending(long long sequence) const {
    UNROLL_ROWS
    for (int row = 0; row < ROWS; ++row) {
      if (!is_inside(row)) continue;
      UNROLL_TAPS
      for (int tap = 0; tap < TAPS - 1; ++tap) {
        Features sums;
        window.load(tap, row, sums.element);
        sums.store_streaming(packet_of(args.new_pending, sequence * (TAPS - 1) + tap, row));
      }
    }
  }

  // Starts with the K − 1 halo tokens before the chunk, as far as they are of the same sequence.
  template <class Pass> DEVICE void walk(Pass& pass) {
    const Chunk& chunk = pass.chunk;
    long long position = chunk.first % args.time;
    const long long halo = position < TAPS - 1 ? position : TAPS - 1;
    position -= halo;
    pass.start(chunk.first - halo);
    window.clear();
    if (position == 0) take_pending((chunk.first - halo) / args.time);
    bool starts = starts_document(args, chunk.first - halo);  // loaded a token ahead, to hide its latency
    for (long long token = chunk.first - halo; token <= chunk.last; ++token) {
      if (position == args.time) {
        window.clear();
        take_pending(token / args.time);
        position = 0;
      }
      ++position;
      if constexpr (DOCUMENTS) {
        if (starts) window.clear();
        if (token < chunk.last) starts = starts_document(args, token + 1);
      }
      pass.run(token, token >= chunk.first);
      if constexpr (PENDING) {
        if (position == args.time) leave_pending(token / args.time);
      }
    }
  }
};
