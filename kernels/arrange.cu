// arrange: the weight of a token read, (D, M, TAPS) → (TAPS, D, M). It is a parameter's size, once per
// call; with taps outermost, neighbouring threads of the boundary kernels load neighbouring weights.

#include "common.cuh"

struct Arrange {
  const COMPRESS_T* from;
  COMPRESS_T* to;
};

extern "C" __global__ void __launch_bounds__(256) arrange(const Arrange a) {
  constexpr long long ROW = static_cast<long long>(D) * M;
  const long long at = blockIdx.x * 256ll + threadIdx.x;
  if (at < ROW * TAPS) a.to[at] = a.from[at % ROW * TAPS + at / ROW];
}
