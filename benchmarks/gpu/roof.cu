// A walk over tokens without arithmetic: the most that a rewrite with a channel read can reach. A token has
// READS wide rows of WIDE vectors of 16 bytes (X, G) and as many narrow rows of NARROW vectors (k, dh), and
// writes one of each: the exclusive or of the rows. Each thread has its own vectors, so there is no barrier.
//
// CHUNK: contiguous tokens of a block; 0 to walk every gridDim-th token. STAGES: tokens that are on
// their way through shared memory by cp.async; 0 to load the next token into registers.

#define VECTORS (WIDE + NARROW)
#define ROWS ((VECTORS + THREADS - 1) / THREADS)
#define AHEAD (STAGES ? STAGES - 1 : 1)

struct Rows {
  uint4* wide;
  uint4* narrow;

  __device__ uint4* at(int token, int v) const {
    return v < WIDE ? wide + (size_t)token * WIDE + v : narrow + (size_t)token * NARROW + (v - WIDE);
  }
};

__device__ int token_of(int i) { return CHUNK ? blockIdx.x * CHUNK + i : blockIdx.x + i * gridDim.x; }

extern "C" __global__ void __launch_bounds__(THREADS)
    roof(uint4* wide, uint4* narrow, uint4* wide2, uint4* narrow2, uint4* wide_out, uint4* narrow_out, int tokens) {
  const Rows a = {wide, narrow}, b = {wide2, narrow2}, out = {wide_out, narrow_out};
  const int end = CHUNK ? min(tokens, (int)(blockIdx.x + 1) * CHUNK) : tokens;
  extern __shared__ uint4 stages[];  // [STAGES][READS][VECTORS]
  uint4 next[READS][ROWS];
  auto load = [&](int i) {
#pragma unroll
    for (int row = 0; row < ROWS * READS; ++row) {
      const int r = row / ROWS, v = threadIdx.x + row % ROWS * THREADS;
      if (v >= VECTORS || token_of(i) >= end) continue;
      const uint4* const from = (r ? b : a).at(token_of(i), v);
      if (STAGES) {
        const auto to = __cvta_generic_to_shared(stages + (i % (AHEAD + 1) * READS + r) * VECTORS + v);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)to), "l"(from) : "memory");
      } else {
        next[r][row % ROWS] = __ldcs(from);
      }
    }
    if (STAGES) asm volatile("cp.async.commit_group;" ::: "memory");
  };
  for (int i = 0; i < AHEAD; ++i) load(i);
  for (int i = 0; token_of(i) < end; ++i) {
    if (STAGES) asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD - 1) : "memory");
    uint4 token[ROWS];
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      const int v = threadIdx.x + row * THREADS;
      if (v >= VECTORS) continue;
      const uint4* const x = stages + i % (AHEAD + 1) * READS * VECTORS + v;
      token[row] = STAGES ? x[0] : next[0][row];
      if (READS > 1) {
        const uint4 y = STAGES ? x[VECTORS] : next[READS - 1][row];
        token[row] = make_uint4(token[row].x ^ y.x, token[row].y ^ y.y, token[row].z ^ y.z, token[row].w ^ y.w);
      }
    }
    load(i + AHEAD);
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      const int v = threadIdx.x + row * THREADS;
      if (v < VECTORS) __stcs(out.at(token_of(i), v), token[row]);
    }
  }
}
