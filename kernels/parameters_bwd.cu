// Parameter gradients, if rewrite_read_bwd has no room for their sums. For example, at D = 4096 the 22 vectors of a token
// read with M = 4, K = 4 are 352 KB, more than the shared memory of one block.
//
// Read per token:    X (M·D elements), k and dh (D each), x (D) if the read is a token read, and the per-token scalars.
// Written:           the block's sums in `partial`.
// Reduced over the block's tokens: SLOTS vectors of D numbers, by the thread that owns the feature.
// Moved per token: (M + 2)·D elements, on top of the (3M + 3)·D of rewrite_read_bwd.
//
// No sum over the features is left: dx = a − c·rstd·x̂ follows from the c·rstd that rewrite_read_bwd wrote. So a thread
// owns one packet of features, a block a slice of the features and its tokens, and no thread waits for another. The
// tokens are processed from the last to the first, as in rewrite_read_bwd.

#include "later_tokens.cuh"
#include "sums.cuh"

struct ParametersPass {
  const RewriteRead& args;
  const Gradients& gradients;
  const Chunk chunk;
  TokenInputs inputs;
  TokenScalars scalars;
  Config::LaterTokens later;
  Sums sums;

  __device__ ParametersPass(const Backward& all, unsigned char* shared)
      : args(all.forward),
        gradients(all.gradients),
        chunk(args),
        inputs(all, shared),
        scalars(args, gradients),
        later(args, reinterpret_cast<Real*>(shared)),
        sums(gradients.partial, reinterpret_cast<Real*>(shared) + Config::LaterTokens::SHARED) {}

  DEVICE void start(long long token) { prefetch(token, chunk.owns(token)); }
  DEVICE void prefetch(long long token, bool own) {
    scalars.prefetch(token);
    if (is_inside(0)) inputs.prefetch(token, 0, 0, own);
  }

  // Processes one token. A halo token (not own) only gives dx to the window.
  DEVICE void run(long long token, bool own) {
    const DerivedScalars s = derive_scalars(args, gradients, scalars);  // all lanes take part in the shuffles
    if (token > chunk.first) prefetch(token - chunk.step, own || chunk.owns(token - chunk.step));
    if (is_inside(0)) add(token, s, own);
    later.retreat();
  }

  DEVICE void add(long long token, const DerivedScalars& s, bool own) {
    inputs.load_read_inputs(token, 0);
    if (own) {
      inputs.load_rewrite_inputs(token, 0, false);
      if constexpr (KEEP_IN_REGISTERS) inputs.finish_state(token);
    }
    Config::State& new_state = inputs.state[0];  // becomes X', with the bits that the forward stored
    if constexpr (REWRITE) {
      if (own) new_state = rewritten(new_state, inputs.direction.vectors(0), s.rewrites);
    }
    Real x_hat[FEATURES], dh[FEATURES], dx[FEATURES];
    compress_normed(args, inputs, s, 0, new_state, x_hat);
    read_backward(args, inputs, s, 0, dh, dx);
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) dx[f] -= s.shift * x_hat[f];
    later.store(0, dx);
    if (!own) return;
    sums.add_token(s, later, 0, new_state, x_hat, dh, dx);
    sums.add_biases(s);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) parameters_bwd(const Backward all) {
  extern __shared__ __align__(16) unsigned char shared[];
  ParametersPass pass(all, shared);
  pass.later.walk(pass);
  pass.sums.store(all.gradients.partial);
}
