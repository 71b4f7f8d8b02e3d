// Gradients of a boundary's parameters, where rewrite_read_bwd has no room for their sums: at d = 4096 the 22
// rows of a token read of four channels are 352 KB, more than the shared memory of one block, where there is no
// cluster of them.
//
// Moved per token, in elements: X in M·D, k and dh in D each; a token read also takes x, D. So these parameters
// cost the backward (M + 2)·D on top of its (3M + 3)·D.
//
// No sum runs over the features any more: dx = a − c·rstd·x̂ follows from the c·rstd that rewrite_read_bwd left
// of every token. So a thread owns one packet of features, a block a slice of them and `chunk` tokens, which it
// walks as rewrite_read_bwd does, from the last to the first, and threads never wait for one another.

#define FEATURE_SLICED 1
#include "sums.cuh"

struct BackwardPass {
  const RewriteRead& b;
  const Gradients& g;
  const Chunk chunk;
  TokenInputs inputs;
  TokenScalars scalars;
  Sums sums;

  __device__ BackwardPass(const Backward& all, unsigned char* shared)
      : b(all.b),
        g(all.g),
        chunk(b),
        inputs(b, g, shared),
        scalars(b, g),
        sums(g.partial, reinterpret_cast<Real*>(shared) + (READ == TOKEN && WINDOW == IN_SHARED ? TAPS * WIDTH : 0)) {}

  // Asks for a token.
  __device__ __forceinline__ void start(long long token) { prefetch(token, chunk.owns(token)); }
  __device__ __forceinline__ void prefetch(long long token, bool own) {
    scalars.prefetch(token);
    if (is_inside(0)) inputs.prefetch(token, 0, 0, own);
  }

  // One token; of a token behind the chunk (not its own) dx alone.
  __device__ __forceinline__ void run(Window* window, long long token, bool own) {
    const DerivedScalars s = derive(b, g, scalars);  // by all lanes, with features or without
    if (token > chunk.first) prefetch(token - 1, own || chunk.owns(token - 1));
    if (is_inside(0)) add(window, token, s, own);
    if constexpr (READ == TOKEN) window->retreat();
  }

  __device__ __forceinline__ void add(Window* window, long long token, const DerivedScalars& s, bool own) {
    inputs.load_read_inputs(token, 0);
    if (own) inputs.load_rewrite_inputs(token, 0, false);
    Packet<STATE_T, ELEMENTS>& stored = inputs.state[0];  // X', to the bits that the forward stored
    if constexpr (REWRITE) {
      if (own) stored = rewritten(stored, inputs.direction[0], s.factors);
    }
    Real normed[FEATURES], dh[FEATURES], dx[FEATURES];
    compress(b, inputs, s, 0, stored, normed);
    read_backward(b, inputs, s, 0, dh, dx);
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) dx[f] -= s.shift * normed[f];
    if constexpr (READ == TOKEN) window->store(0, 0, dx);
    if (!own) return;
    sums.add_token(s, window, 0, stored, normed, dh, dx);
    sums.add_biases(s);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) parameters_bwd(const Backward all) {
  extern __shared__ __align__(16) unsigned char shared[];
  BackwardPass pass(all, shared);
  walk_backward(all.b, reinterpret_cast<Real*>(shared), pass);
  pass.sums.store(all.g.partial);
}
