// arrange: transposes the compression weight of a token read, or the weight of a long expansion, from (D, M, TAPS) to
// (TAPS, D, M). Neighbouring threads of the other kernels then load neighbouring weights.
//
// Read and written: the weight, D·M·TAPS elements each, once per call.

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
