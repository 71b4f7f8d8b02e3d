// Gradients of a boundary's parameters, where rewrite_read_bwd has no room for their sums: at d = 4096 the 22
// rows of a token read of four channels are 352 KB, more than a block's shared memory.
//
// Moved per token, in elements: X in M·D, k and dh in D each; a token read also takes x, D. So these parameters
// cost the backward (M + 2)·D on top of its (3M + 3)·D.
//
// No sum runs over the features any more: dx = a − c·rstd·x̂ follows from the c·rstd that rewrite_read_bwd left
// of every token. So a thread owns one packet of features, a block a slice of them and `chunk` tokens, which it
// walks as rewrite_read_bwd does, from the last to the first, and threads never wait for one another.

#define SLICED 1
#include "sums.cuh"

struct Pass {
  const Boundary& b;
  const Gradients& g;
  Sums sums;

  __device__ Pass(const Backward& all, Real* shared) : b(all.b), g(all.g), sums(all.g.partial, shared) {}

  // X' of an own token, to the bits that the forward stored.
  __device__ __forceinline__ void rebuild(
      const Scalars& s, long long token, Packet<STATE_T, ELEMENTS>& stored) const {
    stored.load(b.state + (token * D + feature_of(0)) * M);
    if constexpr (REWRITE) {
      Packet<DIRECTION_T, FEATURES> k;
      k.load(b.direction + token * D + feature_of(0));
      stored = rewritten(stored, k, s.write);
    }
  }

  // One token; of a token behind the chunk (not its own) dx alone.
  __device__ __forceinline__ void run(Window* window, long long token, bool own) {
    const Scalars s = load_scalars(b, g, token, own);
    Packet<STATE_T, ELEMENTS> stored;
    if (own) rebuild(s, token, stored);
    Real normed[FEATURES], dh[FEATURES], dx[FEATURES];
    compress(b, s, token, feature_of(0), stored, normed);
    read_back(b, g, s, token, feature_of(0), dh, dx);
    const Real shift = NORM ? g.shift[token] : Real(0);
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) dx[f] -= shift * normed[f];
    if constexpr (READ == TOKEN) window->put(0, 0, dx);
    if (own) {
      sums.take(s, window, 0, stored, normed, dh, dx);
      sums.take_biases(s);
    }
    if constexpr (READ == TOKEN) window->retreat();
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) parameters_bwd(const Backward all) {
  extern __shared__ __align__(16) unsigned char shared[];
  if (!is_inside(0)) return;
  Real* const window = reinterpret_cast<Real*>(shared);
  Pass pass(all, window + (READ == TOKEN && WINDOW == 1 ? TAPS * WIDTH : 0));
  walk(all.b, window, pass);
  pass.sums.store(all.g.partial);
}
