// The backward's policies for the read: what later tokens' dx add to a token's gradients, and the walk over a block's tokens
// from the last to the first.
#pragma once

#include "backward.cuh"

// A read within a token: later tokens add nothing, and a token's gradients follow from its own dx.
template <> struct LaterTokens<false> {
  static constexpr int SHARED = 0;
  using Grad = STATE_T;  // G

  __device__ LaterTokens(const RewriteRead&, Real*) {}
  DEVICE void add(int, Packet<Grad, ELEMENTS>&) const {}
  DEVICE void store(int, const Real (&)[FEATURES]) {}
  DEVICE void retreat() {}
  DEVICE void load(int, int, const Real (&dx)[FEATURES], Real (&later)[FEATURES]) const {
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) later[f] = dx[f];
  }
  template <class Pass> DEVICE void walk(Pass& pass) {
    const Chunk& chunk = pass.chunk;
    pass.start(chunk.last);
    for (long long token = chunk.last; token >= chunk.first; token -= chunk.step) pass.run(token, true);
  }
};

// A token read: G takes dx_{t+s} of later tokens from the window. Of the K − 1 halo tokens after the chunk only dx is
// needed, so their dh, x and rstd are read, but not their X or G.
template <> struct LaterTokens<true> {
  static constexpr int SHARED = Window::SHARED;
  using Grad = Real;  // G with what later tokens add, unrounded

  const RewriteRead& args;
  Window window;

  __device__ LaterTokens(const RewriteRead& args, Real* shared) : args(args), window(args, shared) {}

  // G_t += Σ_{s ≥ 1} w_s dx_{t+s}
  DEVICE void add(int row, Packet<Grad, ELEMENTS>& grad) const {
    Real total[ELEMENTS];
    grad.get(total);
    UNROLL_TAPS
    for (int tap = 1; tap < TAPS; ++tap) {
      Real later[FEATURES];
      window.load(tap, row, later);
      CompressWeight weight;
      weight.load(args, feature_of(row), tap);
#pragma unroll
      for (int i = 0; i < ELEMENTS; ++i) total[i] += weight.at(i) * later[i / M];
    }
    grad.set(total);
  }
  DEVICE void store(int row, const Real (&dx)[FEATURES]) { window.store(0, row, dx); }
  DEVICE void retreat() { window.retreat(); }
  DEVICE void load(int tap, int row, const Real (&)[FEATURES], Real (&later)[FEATURES]) const {
    window.load(tap, row, later);
  }

  // Starts with the K − 1 halo tokens that follow the chunk, because dx_{t+s} adds to G_t, and clears the window where a
  // sequence or a document starts.
  template <class Pass> DEVICE void walk(Pass& pass) {
    const Chunk& chunk = pass.chunk;
    window.clear();
    long long position = chunk.last % args.time;
    const long long behind = args.time - 1 - position;
    const long long halo = behind < TAPS - 1 ? behind : TAPS - 1;
    pass.start(chunk.last + halo);
    for (long long token = chunk.last + halo; token > chunk.last; --token) {
      const bool starts = starts_document(args, token);
      pass.run(token, false);
      if (starts) window.clear();
    }
    for (long long token = chunk.last; token >= chunk.first; --token) {
      const bool starts = starts_document(args, token);
      pass.run(token, true);
      if (starts) window.clear();
      if (--position >= 0) continue;
      position = args.time - 1;
      window.clear();
    }
  }
};
