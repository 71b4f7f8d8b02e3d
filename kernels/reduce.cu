// reduce: adds the blocks' sums in `partial` and writes the parameter gradients in the layout of their parameters.
//
// Read:    blocks · (SLOTS·D + BIASES) numbers once; most of them are still in L2.
// Written: SLOTS·D + BIASES numbers.
//
// A block takes 32 neighbouring columns. Each of its 8 warps adds the sums of every eighth block, then one warp adds the 8
// sums in order. Nothing depends on timing, so results repeat bit for bit. Few columns make few blocks, each of which waits
// for memory most of the time, so a thread requests the sums of IN_FLIGHT blocks before it adds the first of them.

#include "rewrite_read.cuh"

constexpr int COLUMNS = 32, STRIDES = THREADS / COLUMNS, IN_FLIGHT = 32;
// Columns in use. The sums of the biases follow the slots, if there are biases.
constexpr long long FILLED = static_cast<long long>(SLOTS) * D + (GATE_BIAS || VALUE_BIAS ? BIASES : 0);

struct Reduce {
  const Real* partial;
  long long blocks;
  const NORM_T* norm_weight;
  COMPRESS_T* grad_compress;
  NORM_T* grad_norm_weight;
  GATE_T* grad_gate_weight;
  GATE_BIAS_T* grad_gate_bias;
  VALUE_T* grad_value_weight;
  VALUE_BIAS_T* grad_value_bias;
};

template <class T> DEVICE void store(T* to, long long at, Real x) {
  if (to) narrow(x, to[at]);
}

// Writes the sum of one column to the gradient that it belongs to.
__device__ void store_column(const Reduce& r, long long column, Real sum) {
  const long long slot = column / D, i = column % D;
  if (slot >= SLOTS) {
    const long long j = column - static_cast<long long>(SLOTS) * D;
    if (j < NEXT && GATE_BIAS) store(r.grad_gate_bias, j, sum);
    if (j >= NEXT && j < BIASES && VALUE_BIAS) store(r.grad_value_bias, j - NEXT, sum);
  } else if (slot < COMPRESS_SLOTS) {
    const long long tap = slot / M, j = slot % M;
    store(r.grad_compress, (i * M + j) * TAPS + tap, sum);
  } else if (slot < GATE_SLOT) {
    store(r.grad_norm_weight, i, sum);
  } else {
    const bool gate = slot < VALUE_SLOT;
    const bool of_context = NORM_WEIGHT && (gate || !VALUE_FROM_COMPRESSED);
    if (of_context) sum *= widen(r.norm_weight[i]);
    if (gate) store(r.grad_gate_weight, (slot - GATE_SLOT) * D + i, sum);
    else store(r.grad_value_weight, (slot - VALUE_SLOT) * D + i, sum);
  }
}

// Adds the sums of every STRIDES-th of the next blocks to `sum`. Beyond the last block they are zeros, which leave a sum
// its bits: it begins with +0 and so is never −0.
DEVICE Real add_blocks(const Reduce& r, long long block, long long column, Real sum) {
  const Real* const from = r.partial + block * PARTIAL + column;
  const long long left = r.blocks - block;
  const int blocks = left < STRIDES * IN_FLIGHT ? static_cast<int>(left) : STRIDES * IN_FLIGHT;
  Real x[IN_FLIGHT];
#pragma unroll
  for (int i = 0; i < IN_FLIGHT; ++i) x[i] = i * STRIDES < blocks ? from[i * STRIDES * PARTIAL] : Real(0);
#pragma unroll
  for (int i = 0; i < IN_FLIGHT; ++i) sum += x[i];
  return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) reduce(const Reduce r) {
  __shared__ Real sums[STRIDES][COLUMNS];
  const int lane = threadIdx.x % COLUMNS, stride = threadIdx.x / COLUMNS;
  const long long column = blockIdx.x * static_cast<long long>(COLUMNS) + lane;
  const bool inside = column < FILLED;
  Real sum = Real(0);
  if (inside) {
    for (long long block = stride; block < r.blocks; block += STRIDES * IN_FLIGHT) {
      sum = add_blocks(r, block, column, sum);
    }
  }
  sums[stride][lane] = sum;
  __syncthreads();
  if (stride > 0 || !inside) return;
#pragma unroll
  for (int other = 1; other < STRIDES; ++other) sum += sums[other][lane];
  store_column(r, column, sum);
}
