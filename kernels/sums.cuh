// A block's sums of parameter gradients over its tokens: SLOTS rows of its features.
//
// Every thread owns the columns of its features, so adding needs neither atomics nor barriers. SUMS says which memory
// holds the sums until the block ends: registers, shared memory, or the block's row of `partial` in global memory.
// `reduce` then adds the blocks' rows in a fixed order. dw_β is summed without its factor γ, and so is dW_v if the values
// read h: `reduce` multiplies once at the end.
#pragma once

#include "later_tokens.cuh"

// Unrolled if the sums or the window are in registers (see UNROLL_ROWS).
#if SUMS == IN_REGISTERS
#define UNROLL_SLOTS _Pragma("unroll")
#else
#define UNROLL_SLOTS _Pragma("unroll 1")
#endif
#if SUMS == IN_REGISTERS || WINDOW == IN_REGISTERS || TAPS <= 8
#define UNROLL_SUMS _Pragma("unroll")
#else
#define UNROLL_SUMS _Pragma("unroll 1")
#endif

struct Sums {
  Real biases[BIASES] = {};
#if SUMS == IN_REGISTERS
  Real values[SLOTS > 0 ? SLOTS : 1][ROWS][FEATURES] = {};

  __device__ Sums(Real*, Real*) {}
  __device__ __forceinline__ void add(int slot, int row, const Real (&x)[FEATURES]) {
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) values[slot][row][f] += x[f];
  }
  __device__ __forceinline__ void load(int slot, int row, Features& packet) const {
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) packet.element[f] = values[slot][row][f];
  }
#else
  Real* rows;

  __device__ Sums(Real* partial, Real* shared) : rows(SUMS == IN_SHARED ? shared : partial + blockIdx.x * PARTIAL) {
    if constexpr (SUMS == SEPARATE_KERNEL) return;
    Features zeros;
    zeros.clear();
    UNROLL_SLOTS
    for (int slot = 0; slot < SLOTS; ++slot)
#pragma unroll
      for (int row = 0; row < ROWS; ++row)
        if (is_inside(row)) zeros.store_cached(at(slot, row));
  }
  __device__ __forceinline__ Real* at(int slot, int row) const {
    return SUMS == IN_SHARED ? rows + slot * WIDTH + column_of(row)
                             : rows + static_cast<long long>(slot) * D + feature_of(row);
  }
  __device__ __forceinline__ void add(int slot, int row, const Real (&x)[FEATURES]) {
    Features packet;
    packet.load_cached(at(slot, row));
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) packet.element[f] += x[f];
    packet.store_cached(at(slot, row));
  }
  __device__ __forceinline__ void load(int slot, int row, Features& packet) const { packet.load_cached(at(slot, row)); }
#endif

  // Adds one token's share for the features of a row, from its X', x̂, dh' and dx. A token read takes dx of the later
  // tokens from its window.
  __device__ __forceinline__ void add_token(
      const DerivedScalars& s, const LaterTokens& tokens, int row, const Packet<STATE_T, ELEMENTS>& stored,
      const Real (&normed)[FEATURES], const Real (&dh)[FEATURES], const Real (&dx)[FEATURES]) {
    Real share[FEATURES];
    if constexpr (COMPRESS_SLOTS > 0) {
      UNROLL_SUMS
      for (int tap = 0; tap < TAPS; ++tap) {
        Real later[FEATURES];
        tokens.load(tap, row, dx, later);
#pragma unroll
        for (int j = 0; j < M; ++j) {
#pragma unroll
          for (int f = 0; f < FEATURES; ++f) share[f] = later[f] * stored[f * M + j];
          add(tap * M + j, row, share);
        }
      }
    }
    if constexpr (SUM_NORM) {
#pragma unroll
      for (int f = 0; f < FEATURES; ++f) share[f] = dh[f] * normed[f];
      add(NORM_SLOT, row, share);
    }
    if constexpr (SUM_GATE) {
#pragma unroll
      for (int n = 0; n < GATES; ++n) {
#pragma unroll
        for (int f = 0; f < FEATURES; ++f) share[f] = s.grad_logit[n] * normed[f];
        add(GATE_SLOT + n, row, share);
      }
    }
    if constexpr (SUM_VALUE) {
#pragma unroll
      for (int j = 0; j < VALUES; ++j) {
        const Real scale = VALUE_FROM_COMPRESSED ? s.grad_linear[j] / s.rstd : s.grad_linear[j];
#pragma unroll
        for (int f = 0; f < FEATURES; ++f) share[f] = scale * normed[f];
        add(VALUE_SLOT + j, row, share);
      }
    }
  }

  // Adds one token's share to the sums of the biases.
  __device__ __forceinline__ void add_biases(const DerivedScalars& s) {
#pragma unroll
    for (int n = 0; n < NEXT; ++n) biases[n] += s.grad_logit[n];
#pragma unroll
    for (int j = 0; j < NEXT * M; ++j) biases[NEXT + j] += s.grad_linear[j];
  }

  // Writes the block's row of `partial`, with the sums of the biases at its end.
  __device__ __forceinline__ void store(Real* partial) const {
    Real* const to = partial + blockIdx.x * PARTIAL;
    if constexpr (SUMS != IN_GLOBAL) {
      UNROLL_SLOTS
      for (int slot = 0; slot < SLOTS; ++slot)
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
          if (!is_inside(row)) continue;
          Features packet;
          load(slot, row, packet);
          packet.store_cached(to + static_cast<long long>(slot) * D + feature_of(row));
        }
    }
    if (feature_of(0) == 0) {
#pragma unroll
      for (int j = 0; j < BIASES; ++j) to[static_cast<long long>(SLOTS) * D + j] = biases[j];
    }
  }
};
