// A block's sums of parameter gradients over its tokens: SLOTS vectors.
//
// Every thread owns the sums of its features, so adding needs neither atomics nor barriers. SUMS says which memory
// holds the sums until the block ends: registers, shared memory, or the block's part of `partial` in global memory.
// `reduce` then adds the blocks' sums in a fixed order. dw_β is summed without its factor γ, and so is dW_v if the values
// read h: `reduce` multiplies once at the end.
#pragma once

#include "later_tokens.cuh"

#if SUMS == IN_REGISTERS
#define UNROLL_SLOTS _Pragma("unroll")
#define UNROLL_SUMS _Pragma("unroll")
#else
#define UNROLL_SLOTS _Pragma("unroll 1")
#define UNROLL_SUMS UNROLL_TAPS
#endif

struct Sums {
  FeatureVectors<SLOTS, SUMS == IN_REGISTERS, SUMS == IN_GLOBAL> slots;
  Real biases[BIASES] = {};

  __device__ Sums(Real* partial, Real* shared) : slots(SUMS == IN_GLOBAL ? of_block(partial) : shared) {
    if constexpr (SUMS == SEPARATE_KERNEL) return;
    UNROLL_SLOTS
    for (int slot = 0; slot < SLOTS; ++slot) clear(slots, slot);
  }
  // The block's sums in global memory.
  static __device__ Real* of_block(Real* partial) { return partial + blockIdx.x * PARTIAL + first_feature(); }
  DEVICE void add(int slot, int row, const Real (&x)[FEATURES]) {
    Real sum[FEATURES];
    slots.load(slot, row, sum);
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) sum[f] += x[f];
    slots.store(slot, row, sum);
  }

  // Adds one token's share for the features of a row, from its X', x̂, dh' and dx. A token read takes dx of the later
  // tokens from its window.
  DEVICE void add_token(
      const DerivedScalars& s, const Config::LaterTokens& tokens, int row, const Config::State& new_state,
      const Real (&x_hat)[FEATURES], const Real (&dh)[FEATURES], const Real (&dx)[FEATURES]) {
    Real share[FEATURES];
    if constexpr (COMPRESS_SLOTS > 0) {
      UNROLL_SUMS
      for (int tap = 0; tap < TAPS; ++tap) {
        Real later[FEATURES];
        tokens.load(tap, row, dx, later);
#pragma unroll
        for (int j = 0; j < M; ++j) {
#pragma unroll
          for (int f = 0; f < FEATURES; ++f) share[f] = later[f] * new_state[f * M + j];
          add(tap * M + j, row, share);
        }
      }
    }
    if constexpr (SUM_NORM) {
#pragma unroll
      for (int f = 0; f < FEATURES; ++f) share[f] = dh[f] * x_hat[f];
      add(NORM_SLOT, row, share);
    }
    if constexpr (SUM_GATE) {
#pragma unroll
      for (int n = 0; n < GATES; ++n) {
#pragma unroll
        for (int f = 0; f < FEATURES; ++f) share[f] = s.grad_logit[n] * x_hat[f];
        add(GATE_SLOT + n, row, share);
      }
    }
    if constexpr (SUM_VALUE) {
#pragma unroll
      for (int j = 0; j < VALUES; ++j) {
        const Real scale = VALUE_FROM_COMPRESSED ? s.grad_linear[j] / s.rstd : s.grad_linear[j];
#pragma unroll
        for (int f = 0; f < FEATURES; ++f) share[f] = scale * x_hat[f];
        add(VALUE_SLOT + j, row, share);
      }
    }
  }

  // Adds one token's share to the sums of the biases.
  DEVICE void add_biases(const DerivedScalars& s) {
#pragma unroll
    for (int n = 0; n < NEXT; ++n) biases[n] += s.grad_logit[n];
#pragma unroll
    for (int j = 0; j < NEXT * M; ++j) biases[NEXT + j] += s.grad_linear[j];
  }

  // Writes the block's sums to `partial`, those of the biases at the end.
  DEVICE void store(Real* partial) const {
    if constexpr (SUMS != IN_GLOBAL) {
      FeatureVectors<SLOTS, false, true> to(of_block(partial));
      UNROLL_SLOTS
      for (int slot = 0; slot < SLOTS; ++slot)
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
          if (!is_inside(row)) continue;
          Real sum[FEATURES];
          slots.load(slot, row, sum);
          to.store(slot, row, sum);
        }
    }
    if (feature_of(0) == 0) {
#pragma unroll
      for (int j = 0; j < BIASES; ++j) partial[(blockIdx.x + 1) * PARTIAL - BIAS_SUMS + j] = biases[j];
    }
  }
};
