// A block's sums of parameter gradients: SLOTS rows of D, every column owned by one thread, so that
// adding needs neither atomics nor barriers. SUMS says where they are kept until the block ends:
// registers, shared memory, or straight in the block's row of `partial`.
#pragma once

#include "boundary.cuh"

// Registers can be indexed by constants only.
#if SUMS == 0
#define UNROLL_SLOTS _Pragma("unroll")
#else
#define UNROLL_SLOTS _Pragma("unroll 1")
#endif
#if SUMS == 0 || WINDOW == 0 || TAPS <= 8
#define UNROLL_SUMS _Pragma("unroll")
#else
#define UNROLL_SUMS _Pragma("unroll 1")
#endif

struct Sums {
#if SUMS == 0
  Real held[SLOTS > 0 ? SLOTS : 1][ROWS][FEATURES] = {};

  __device__ Sums(Real*, Real*) {}
  __device__ __forceinline__ void add(int slot, int row, const Real (&x)[FEATURES]) {
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) held[slot][row][f] += x[f];
  }
  __device__ __forceinline__ void get(int slot, int row, Features& packet) const {
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) packet.element[f] = held[slot][row][f];
  }
#else
  Real* rows;

  __device__ Sums(Real* partial, Real* shared)
      : rows(SUMS == 1 ? shared : partial + blockIdx.x * PARTIAL) {
    Features zeros;
    zeros.clear();
    UNROLL_SLOTS
    for (int slot = 0; slot < SLOTS; ++slot)
#pragma unroll
      for (int row = 0; row < ROWS; ++row)
        if (is_inside(row)) zeros.put(at(slot, row));
  }
  __device__ __forceinline__ Real* at(int slot, int row) const {
    return rows + static_cast<long long>(slot) * D + feature_of(row);
  }
  __device__ __forceinline__ void add(int slot, int row, const Real (&x)[FEATURES]) {
    Features packet;
    packet.get(at(slot, row));
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) packet.element[f] += x[f];
    packet.put(at(slot, row));
  }
  __device__ __forceinline__ void get(int slot, int row, Features& packet) const {
    packet.get(at(slot, row));
  }
#endif

  // The block's row of `partial`, with the biases' sums at its end.
  __device__ __forceinline__ void store(Real* partial, const Real (&tail)[1 + M]) const {
    if (READ == NONE) return;
    Real* const to = partial + blockIdx.x * PARTIAL;
    if constexpr (SUMS != 2) {
      UNROLL_SLOTS
      for (int slot = 0; slot < SLOTS; ++slot)
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
          if (!is_inside(row)) continue;
          Features packet;
          get(slot, row, packet);
          packet.put(to + static_cast<long long>(slot) * D + feature_of(row));
        }
    }
    if (threadIdx.x == 0) {
#pragma unroll
      for (int j = 0; j <= M; ++j) to[static_cast<long long>(SLOTS) * D + j] = tail[j];
    }
  }
};
