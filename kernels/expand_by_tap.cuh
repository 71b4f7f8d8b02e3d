// expand.cu for more taps than fit in registers: one tap at a time. SPAN tokens share a tap's weights, which are laid out
// (TAPS, D, M). dw is summed for GROUP taps at a time, and each group reads x and dX again.
//
// Bytes per token, in elements: the forward reads x, (TAPS + SPAN) / SPAN · D, and writes X, M·D. The backward reads dX,
// (TAPS + SPAN) / SPAN · M·D, and writes dx, D. For dw it reads x and dX, (1 + M)·D, once for each of the TAPS / GROUP
// groups. Neighbouring spans overlap, and caches serve most of these reads.
#pragma once

constexpr int SPAN = ELEMENTS <= 8 ? 8 : ELEMENTS <= 16 ? 4 : 1;
constexpr int GROUP = SPAN;

// Loads a token's packet, or zeros if the token lies outside the sequence.
template <class T, int N>
DEVICE void fetch(Packet<T, N>& packet, const T* from, const Chunk& c, long long token, long long feature) {
  if (token >= c.start && token < c.end) packet.load_cached(from + (token * D + feature) * (N / FEATURES));
  else packet.clear();
}

DEVICE Packet<WEIGHT_T, ELEMENTS> weights(const WEIGHT_T* weight, int tap, int feature) {
  Packet<WEIGHT_T, ELEMENTS> packet;
  packet.load_readonly(weight + (static_cast<long long>(tap) * D + feature) * M);
  return packet;
}

DEVICE void forward(const Expand& e, const Chunk& c, int feature) {
  for (long long token = c.first; token < c.last; token += SPAN) {
    Real sums[SPAN][ELEMENTS] = {};
    Packet<X_T, FEATURES> x[SPAN];  // x_{t−s} of the span's tokens t
    bool visible[SPAN];             // it is in the document of t
#pragma unroll
    for (int i = 0; i < SPAN; ++i) {
      fetch(x[i], e.x, c, token + i, feature);
      visible[i] = true;
    }
#pragma unroll 1
    for (int tap = 0; tap < TAPS; ++tap) {
      const auto weight = weights(e.weight, tap, feature);
#pragma unroll
      for (int i = 0; i < SPAN; ++i)
#pragma unroll
        for (int n = 0; n < ELEMENTS; ++n)
          if (!DOCUMENTS || visible[i]) sums[i][n] += weight[n] * x[i][n / M];
#pragma unroll
      for (int i = 0; i < SPAN; ++i)
        if (starts_document(e, c, token + i - tap)) visible[i] = false;
#pragma unroll
      for (int i = SPAN - 1; i > 0; --i) x[i] = x[i - 1];
      load_x(x[0], e.x, e.before, c, token - tap - 1, feature);
    }
#pragma unroll
    for (int i = 0; i < SPAN; ++i) {
      if (token + i >= c.last) break;
      Packet<STATE_T, ELEMENTS> state;
      state.set(sums[i]);
      state.store_streaming(e.state + ((token + i) * D + feature) * M);
    }
  }
}

DEVICE void backward_x(const ExpandBackward& e, const Chunk& c, int feature) {
  for (long long token = c.first; token < c.last; token += SPAN) {
    Real dx[SPAN][FEATURES] = {};
    Packet<STATE_T, ELEMENTS> grad[SPAN];  // dX_{t+s} of the span's tokens t
    bool visible[SPAN];                    // it is in the document of t
#pragma unroll
    for (int i = 0; i < SPAN; ++i) {
      fetch(grad[i], e.grad_state, c, token + i, feature);
      visible[i] = true;
    }
#pragma unroll 1
    for (int tap = 0; tap < TAPS; ++tap) {
      const auto weight = weights(e.weight, tap, feature);
#pragma unroll
      for (int i = 0; i < SPAN; ++i)
#pragma unroll
        for (int n = 0; n < ELEMENTS; ++n)
          if (!DOCUMENTS || visible[i]) dx[i][n / M] += weight[n] * grad[i][n];
#pragma unroll
      for (int i = 0; i < SPAN; ++i)
        if (starts_document(e, c, token + i + tap + 1)) visible[i] = false;
#pragma unroll
      for (int i = 0; i + 1 < SPAN; ++i) grad[i] = grad[i + 1];
      fetch(grad[SPAN - 1], e.grad_state, c, token + SPAN + tap, feature);
    }
#pragma unroll
    for (int i = 0; i < SPAN; ++i) {
      if (token + i >= c.last) break;
      Packet<X_T, FEATURES> grad_x;
      grad_x.set(dx[i]);
      grad_x.store_streaming(e.grad_x + (token + i) * D + feature);
    }
  }
}

DEVICE void add_group(const ExpandBackward& e, const Chunk& c, int group, int feature, Real (&sums)[GROUP][ELEMENTS]) {
  Packet<X_T, FEATURES> past[GROUP];  // x_{t−s} of the group's taps s
#pragma unroll
  for (int i = 0; i < GROUP; ++i) fetch(past[i], e.x, c, c.first - 1 - group - i, feature);
  int reach = 0;  // tokens that a token may look back, as far as taps reach
  if constexpr (DOCUMENTS) {
    while (reach < TAPS && !starts_document(e, c, c.first - reach)) ++reach;
  }
  for (long long token = c.first; token < c.last; ++token) {
    if (DOCUMENTS && token > c.first) reach = starts_document(e, c, token) ? 0 : reach < TAPS ? reach + 1 : reach;
#pragma unroll
    for (int i = GROUP - 1; i > 0; --i) past[i] = past[i - 1];
    fetch(past[0], e.x, c, token - group, feature);
    Packet<STATE_T, ELEMENTS> grad;
    fetch(grad, e.grad_state, c, token, feature);
#pragma unroll
    for (int i = 0; i < GROUP; ++i)
#pragma unroll
      for (int n = 0; n < ELEMENTS; ++n)
        if (!DOCUMENTS || group + i <= reach) sums[i][n] += grad[n] * past[i][n / M];
  }
}

DEVICE void forward(const Expand& e, int feature) {
  for (long long index = blockIdx.y; index < e.chunks; index += gridDim.y) {
    const Chunk chunk(index, e.time, e.chunk);
    forward(e, chunk, feature);
    leave(e, chunk, feature);
  }
}

DEVICE void backward(const ExpandBackward& e, int feature) {
  for (long long index = blockIdx.y; index < e.chunks; index += gridDim.y) {
    backward_x(e, Chunk(index, e.time, e.chunk), feature);
  }
  if (!e.partial) return;
#pragma unroll 1
  for (int group = 0; group < TAPS; group += GROUP) {
    Real sums[GROUP][ELEMENTS] = {};
    for (long long index = blockIdx.y; index < e.chunks; index += gridDim.y) {
      add_group(e, Chunk(index, e.time, e.chunk), group, feature, sums);
    }
#pragma unroll
    for (int i = 0; i < GROUP; ++i)
      if (group + i < TAPS) store_sums(e, feature, group + i, sums[i]);
  }
}
