// Where FeatureVectors keeps the pieces of each thread's packets in shared memory, for test_pieces.py: out[(row · pieces +
// piece) · THREADS + thread] is the number of the piece's first word, or what it was before where the thread has no packet.
#include "../../kernels/rewrite_read.cuh"

struct Places {
  long long* out;
};

extern "C" __global__ void __launch_bounds__(THREADS) places(const Places p) {
  const FeatureVectors<1, false> vectors(nullptr);
  constexpr int PIECES = FEATURES / vectors.PIECE;
  for (int row = 0; row < ROWS; ++row)
    for (int piece = 0; piece < PIECES; ++piece) {
      if (is_inside(row)) p.out[(row * PIECES + piece) * THREADS + threadIdx.x] = vectors.at(0, row, piece) - vectors.numbers;
    }
}
