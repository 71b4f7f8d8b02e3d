// What the kernels of the backward share: their arguments, the numbers that every thread knows of a token, the
// read's rows, and the walk over a block's tokens.
#pragma once

#define BACKWARD
#include "boundary.cuh"

struct Gradients {
  const STATE_T* grad_state;
  const CONTEXT_T* grad_context;
  const Real* grad_new_value;
  const Real* grad_new_gate;
  STATE_T* state;
  DIRECTION_T* direction;
  Real* value;
  Real* gate;
  Real* partial;
  Real* shift;  // c·rstd of every token, for parameters_bwd
};

struct Backward {
  Boundary b;
  Gradients g;
};

// c, then k̂ᵀ(G + w a), then k̂ᵀ(w x̂), where they are needed.
constexpr int ALONG_AT = NORM, NORMED_AT = NORM + M;
constexpr int BLOCK_SUMS = NORM + (REWRITE ? M + (NORM ? M : 0) : 0);

// What every thread knows of a token.
struct Scalars {
  Write write;
  Real gate;           // β
  Real rstd;
  Real logit;          // dβl
  Real linear[M];      // dvl
};

// What the rewrite's backward needs of g = k̂ᵀG.
struct Turn {
  Real g[M] = {};
  Real back[M] = {};      // β r g: what G loses along k
  Real scale = Real(0);   // dk = scale·(G e − X g) − along·k
  Real along = Real(0);
};

// From memory; what belongs to the rewrite of an own token alone.
__device__ __forceinline__ Scalars load_scalars(
    const Boundary& b, const Gradients& g, long long token, bool own) {
  Scalars s;
  if constexpr (REWRITE) {
    if (own) {
      Real value[M];
      s.gate = b.gate[token];
      s.write.r = b.stats[token * (1 + M)];
#pragma unroll
      for (int j = 0; j < M; ++j) {
        value[j] = b.value[token * M + j];
        s.write.readout[j] = b.stats[token * (1 + M) + 1 + j];
      }
      s.write.finish(value, s.gate);
    }
  }
  s.rstd = NORM ? b.rstd[token] : Real(1);
  s.logit = Real(0);
  if constexpr (GATE) {
    if (g.grad_new_gate) {
      const Real gate = b.new_gate[token];
      s.logit = g.grad_new_gate[token] * gate * (Real(1) - gate / Real(2));
    }
  }
#pragma unroll
  for (int j = 0; j < M; ++j) {
    s.linear[j] = Real(0);
    if constexpr (VALUE) {
      if (g.grad_new_value) s.linear[j] = g.grad_new_value[token * M + j];
      if constexpr (VALUE_SIGMOID) {
        const Real value = b.new_value[token * M + j];
        s.linear[j] *= value * (Real(1) - value / Real(b.value_scale));
      }
    }
  }
  return s;
}

// g = k̂ᵀG, and dv, dβ, each by one thread; k̂ᵀdk̂ follows without a sum of its own.
__device__ __forceinline__ Turn finish(
    const Gradients& g, const Scalars& s, const Real* totals, Real shift, long long token) {
  Turn turn;
  Real g_e = Real(0), g_p = Real(0);
  turn.scale = s.write.r * s.gate;
#pragma unroll
  for (int j = 0; j < M; ++j) {
    Real total = totals[ALONG_AT + j];
    if constexpr (NORM) total -= shift * totals[NORMED_AT + j];
    turn.g[j] = s.write.r * total;
    turn.back[j] = turn.scale * turn.g[j];
    g_e += turn.g[j] * s.write.error[j];
    g_p += turn.g[j] * s.write.readout[j];
    if (threadIdx.x == j % 32) g.value[token * M + j] = s.gate * turn.g[j];
  }
  if (threadIdx.x == 0) g.gate[token] = g_e;
  turn.along = s.write.r * turn.scale * (g_e - g_p);
  return turn;
}

// x̂ of a packet, from x as a token read saved it, else from X'.
__device__ __forceinline__ void compress(
    const Boundary& b, const Scalars& s, long long token, int feature,
    const Packet<STATE_T, ELEMENTS>& stored, Real (&normed)[FEATURES]) {
  Packet<STATE_T, FEATURES> saved;
  Compress compress;
  if constexpr (READ == TOKEN) saved.load(b.compressed + token * D + feature);
  else compress.load(b, feature);
#pragma unroll
  for (int f = 0; f < FEATURES; ++f) {
    Real x = Real(0);
    if constexpr (READ == TOKEN) {
      x = saved[f];
    } else {
#pragma unroll
      for (int j = 0; j < M; ++j) x += compress.at(f, j) * stored[f * M + j];
    }
    normed[f] = x * s.rstd;
  }
}

// dh' and a of a packet, from dh and what gate and values ask of the context.
__device__ __forceinline__ void read_back(
    const Boundary& b, const Gradients& g, const Scalars& s, long long token, int feature,
    Real (&dh)[FEATURES], Real (&a)[FEATURES]) {
  Parameters parameters;
  parameters.load(b, feature);
  Packet<CONTEXT_T, FEATURES> incoming;
  if (g.grad_context) incoming.load(g.grad_context + token * D + feature); else incoming.clear();
#pragma unroll
  for (int f = 0; f < FEATURES; ++f) {
    Real value = Real(0);
    if constexpr (VALUE) {
#pragma unroll
      for (int j = 0; j < M; ++j) value += s.linear[j] * parameters.value[j][f];
    }
    dh[f] = incoming[f];
    if constexpr (GATE) dh[f] += s.logit * parameters.gate[f];
    if constexpr (VALUE && !VALUE_FROM_COMPRESSED) dh[f] += value;
    a[f] = s.rstd * parameters.gamma(f) * dh[f] + (VALUE_FROM_COMPRESSED ? value : Real(0));
  }
}

// Runs `pass` on the block's `chunk` tokens from the last to the first, as its own. A token read is first given
// the K − 1 tokens behind them, which are not, and an empty window at the end of every sequence.
template <class Pass> __device__ __forceinline__ void walk(const Boundary& b, Real* shared, Pass& pass) {
  const long long first = blockIdx.x * b.chunk;
  const long long last = (first + b.chunk < b.tokens ? first + b.chunk : b.tokens) - 1;
  if constexpr (READ == TOKEN) {
    Window window(b, shared);
    window.clear();
    long long position = last % b.time;
    const long long behind = b.time - 1 - position;
    for (long long token = last + (behind < TAPS - 1 ? behind : TAPS - 1); token > last; --token) {
      pass.run(&window, token, false);
    }
    for (long long token = last; token >= first; --token) {
      pass.run(&window, token, true);
      if (--position >= 0) continue;
      position = b.time - 1;
      window.clear();
    }
  } else {
    for (long long token = last; token >= first; --token) pass.run(nullptr, token, true);
  }
}
