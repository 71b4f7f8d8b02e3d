// The backward's policies for the rewrites of a token: one, several one after the other, or none (a read alone).
//
// Formulas and names are those of rewrite_read_bwd.cu. A policy takes the sum, and stores dX and dk of a row.
#pragma once

#include "backward.cuh"

// One rewrite's backward, as factors, with its target t: dX = G − k backᵀ and dk = scale·(G t − X g) + on_k·k,
// without −X g if nothing is erased.
struct RewriteGrad {
  Real g[M];     // k̂ᵀG
  Real back[M];  // β r g, or 0
  Real scale;    // β r, or r
  Real on_k;     // −r² k̂ᵀdk̂, where k̂ᵀdk̂ = β(g·e − p·g), or g·t, needs no sum of its own

  // Takes kᵀG, of the G that the later rewrites leave, and writes dv and dβ of rewrite n, each number by one thread.
  DEVICE void derive(
      const Rewrite& rewrite, const Real (&k_grad)[M], const Gradients& gradients, long long token, int n) {
    Real g_t = Real(0), g_p = Real(0), g_v = Real(0);
    scale = rewrite.scale();
#pragma unroll
    for (int j = 0; j < M; ++j) {
      g[j] = rewrite.r * k_grad[j];
      back[j] = rewrite.erasure() * g[j];
      g_t += g[j] * rewrite.target[j];
      g_p += g[j] * rewrite.readout[j];
      g_v += g[j] * rewrite.value[j];
      const int number = n * M + j;
      if (writes(number)) gradients.grad_value[token * (REWRITES * M) + number] = rewrite.gate * g[j];
    }
    if (writes(n)) gradients.grad_gate[token * REWRITES + n] = ERASE == ERASE_TIED ? g_t : g_v;
    on_k = -(rewrite.r * scale * (ERASE == ERASE_TIED ? g_t - g_p : g_t));
  }

  // Subtracts k backᵀ from dX of a row, and computes dk without its multiples of the k_i.
  DEVICE void add_row(
      const Rewrite& rewrite, const Config::Direction& k, const Config::State& state, const Elements& whole,
      Elements& grad_state, Real (&dk)[FEATURES]) const {
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) {
      Real unit = Real(0);  // G t − X g
#pragma unroll
      for (int j = 0; j < M; ++j) {
        unit += whole[f * M + j] * rewrite.target[j];
        if constexpr (ERASE == ERASE_NONE) continue;
        unit -= state[f * M + j] * g[j];
        grad_state.element[f * M + j] -= back[j] * k[f];
      }
      dk[f] = scale * unit;
    }
  }
};

// kᵀG of rewrite n, of the G that the token receives.
DEVICE void k_grad_of(const DerivedScalars& s, const Totals& totals, int n, Real (&k_grad)[M]) {
#pragma unroll
  for (int j = 0; j < M; ++j) {
    k_grad[j] = totals[K_GRAD_AT + n * M + j];
    if constexpr (NORM) k_grad[j] -= s.shift * totals[X_HAT_AT + n * M + j];
  }
}

DEVICE void store_state(const Gradients& gradients, long long token, int row, const Elements& grad) {
  Config::State packet;
  packet.set(grad.element);
  packet.store_streaming(packet_of<M>(gradients.grad_state, token, row));
}
// `number` counts the rewrites of all tokens.
DEVICE void store_direction(const Gradients& gradients, long long number, int row, const Real (&grad)[FEATURES]) {
  Config::Direction packet;
  packet.set(grad);
  packet.store_global(packet_of(gradients.grad_direction, number, row));  // the sublayer's backward reads dk next
}

template <> struct RewritesBackward<1> {
  RewriteGrad grad;

  DEVICE void derive(const DerivedScalars& s, const Totals& totals, const Gradients& gradients, long long token) {
    Real k_grad[M];
    k_grad_of(s, totals, 0, k_grad);
    grad.derive(s.rewrites[0], k_grad, gradients, token, 0);
  }
  // Stores dX and dk of a row from its whole G.
  DEVICE void store_row(
      const DerivedScalars& s, const TokenInputs& inputs, const Elements& whole, const Gradients& gradients,
      long long token, int row) const {
    const Config::Direction& k = inputs.direction[row];
    Elements grad_state = whole;
    Real dk[FEATURES];
    grad.add_row(s.rewrites[0], k, inputs.state[row], whole, grad_state, dk);
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) dk[f] += grad.on_k * k[f];
    store_state(gradients, token, row, grad_state);
    store_direction(gradients, token, row, dk);
  }
};

// A rewrite needs the G that the later ones leave and the X that the earlier ones leave. They differ from the token's G
// and X by multiples of the k_i, whose products the forward saved. So there is still one sum, the backward runs from the
// last rewrite to the first, and each dk has a multiple of every k_i. 2(COUNT − 1)·D elements more move.
template <int COUNT> struct RewritesBackward {
  RewriteGrad grads[COUNT];
  Real on[COUNT][COUNT];  // the coefficient of k_i in dk_n

  DEVICE void derive(const DerivedScalars& s, const Totals& totals, const Gradients& gradients, long long token) {
#pragma unroll
    for (int n = COUNT - 1; n >= 0; --n) {
      Real k_grad[M];
      k_grad_of(s, totals, n, k_grad);
#pragma unroll
      for (int j = 0; j < M; ++j)
#pragma unroll
        for (int later = n + 1; later < COUNT; ++later) k_grad[j] -= s.product[later][n] * grads[later].back[j];
      grads[n].derive(s.rewrites[n], k_grad, gradients, token, n);
      on[n][n] = grads[n].on_k;
#pragma unroll
      for (int later = n + 1; later < COUNT; ++later) {
        Real later_g_t = Real(0);  // of the later g and this target
#pragma unroll
        for (int j = 0; j < M; ++j) later_g_t += grads[later].g[j] * s.rewrites[n].target[j];
        on[n][later] = on[later][n] = -(grads[n].scale * s.rewrites[later].erasure() * later_g_t);
      }
    }
  }
  DEVICE void store_row(
      const DerivedScalars& s, const TokenInputs& inputs, const Elements& whole, const Gradients& gradients,
      long long token, int row) const {
    const Config::Directions& k = inputs.direction.vectors(row);
    Elements grad_state = whole;
    Real dk[COUNT][FEATURES];
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
      grads[n].add_row(s.rewrites[n], k[n], inputs.state[row], whole, grad_state, dk[n]);
#pragma unroll
      for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int f = 0; f < FEATURES; ++f) dk[n][f] += on[n][i] * k[i][f];
    }
    store_state(gradients, token, row, grad_state);
#pragma unroll
    for (int n = 0; n < COUNT; ++n) store_direction(gradients, token * COUNT + n, row, dk[n]);
  }
};

// A read alone: dX is G.
template <> struct RewritesBackward<0> {
  template <class... Arguments> DEVICE void derive(Arguments&&...) {}
  DEVICE void store_row(
      const DerivedScalars&, const TokenInputs&, const Elements& whole, const Gradients& gradients, long long token,
      int row) const {
    store_state(gradients, token, row, whole);
  }
};
