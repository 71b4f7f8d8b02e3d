// rewrite_read: its arguments, and the arithmetic that forward and backward share.
//
// Names follow the reference (python/ddl/reference.py): state X (tokens, D, M), direction k, value v, gate β, compressed
// x, context h. A kernel is compiled for rewrite_read, rewrite alone (READ == NONE) or read alone (REWRITE == 0). It applies
// REWRITES rewrites one after the other, and reads values and gates of the NEXT to come; nearly always both are 1.
#pragma once

#include "block_sum.cuh"
#include "config.cuh"

// Arguments of the forward. The backward takes the same structure and Gradients; of the forward's outputs it reads stats,
// rstd, new_gate, new_value and, for a token read, compressed. Pointers of absent parts are null.
struct RewriteRead {
  const STATE_T* state;  // X; if CHAIN, an anchor
  const DIRECTION_T* direction;
  const Real* value;
  const Real* gate;            // (tokens, REWRITES)
  const COMPRESS_T* compress;  // (D, M), or tap-major (TAPS, D, M)
  const NORM_T* norm_weight;
  const GATE_T* gate_weight;
  const GATE_BIAS_T* gate_bias;
  const VALUE_T* value_weight;
  const VALUE_BIAS_T* value_bias;
  STATE_T* new_state;
  Real* stats;  // (tokens, STATS)
  CONTEXT_T* context;
  Real* new_value;
  Real* new_gate;
  STATE_T* compressed;  // x of a token read
  Real* rstd;
  const Real* pending;  // (sequences, TAPS − 1, D), or null for zeros; if PENDING
  Real* new_pending;
  const unsigned char* document_starts;  // (tokens): not 0 where a document starts; if DOCUMENTS
  Real* scratch;                         // the window, if IN_GLOBAL
  double eps_k, norm_eps, value_scale;
  long long tokens, time, chunk;  // of all sequences, of one sequence, of one block at most
  long long step;                 // from a token of a block to its next one: 1, or the number of blocks
};

// The block's tokens: first, first + step, …, last. A token read needs neighbours, so its step is 1. Otherwise blocks take
// turns, so that all of them work near each other in memory.
struct Chunk {
  long long first, last;
  int step;  // 64 bits would cost registers

  __device__ explicit Chunk(const RewriteRead& args) : step(READ == TOKEN ? 1 : static_cast<int>(args.step)) {
    first = step == 1 ? blockIdx.x * args.chunk : blockIdx.x;
    const long long steps = (args.tokens - 1 - first) / step;
    last = first + (steps < args.chunk ? steps : args.chunk - 1) * step;
  }
  DEVICE bool owns(long long token) const { return token <= last; }
};

// The thread's packet in row `row`, and its first feature, counted within the block (column) and within the token (feature).
// The last row may be incomplete: a thread without a packet there is not inside.
DEVICE int packet_index(int row) { return static_cast<int>(threadIdx.x) + row * THREADS; }
DEVICE int column_of(int row) { return packet_index(row) * FEATURES; }
DEVICE int first_feature() { return SLICES > 1 ? static_cast<int>(blockIdx.y) * WIDTH : 0; }
DEVICE int feature_of(int row) { return column_of(row) + first_feature(); }
DEVICE bool is_inside(int row) {
  if constexpr (FEATURE_SLICED && D % WIDTH > 0) return feature_of(row) < D;
  return (row + 1) * THREADS <= PACKETS || column_of(row) < WIDTH;
}
// Per-token results are known to every thread; in a tile, those of token t to every lane l with l % TILE == t. True for the
// one thread that writes result number n of a token.
DEVICE bool writes(int n) {
  constexpr int TOKENS = TILE > 0 ? TILE : 1;
  return threadIdx.x / TOKENS == n % (32 / TOKENS) && block_rank() == 0;
}
// The packet's address in an array of COUNT numbers per token and feature. Rows are a constant distance apart, which
// loads take as an immediate offset: with feature_of(row) here the kernels need 5 % more instructions.
template <int COUNT = 1, class T>
DEVICE T* packet_of(T* numbers, long long token, int row) {
  return numbers + (token * D + feature_of(0)) * COUNT + row * (THREADS * FEATURES * COUNT);
}

// True if a document starts with this token, so that no read looks back beyond it.
DEVICE bool starts_document(const RewriteRead& args, long long token) {
  if constexpr (DOCUMENTS) return args.document_starts[token] != 0;
  return false;
}

// --- the rewrite --------------------------------------------------------------------------------

// One rewrite of a token: X' = X + k factorᵀ, where k is not normalised. Target and factor are e = v − p and β r e if
// ERASE_TIED; β v and β r v if ERASE_NONE.
struct Rewrite {
  Real gate;        // β
  Real r;           // 1/√(|k|² + ε²), so k̂ = r k
  Real value[M];    // v
  Real readout[M];  // p = k̂ᵀX, of the X that the earlier rewrites leave; 0 if nothing is erased
  Real target[M];
  Real factor[M];

  // Computes target and factor from r, p, v and β.
  DEVICE void finish(const Real (&value)[M], Real gate) {
    this->gate = gate;
#pragma unroll
    for (int j = 0; j < M; ++j) {
      this->value[j] = value[j];
      target[j] = ERASE == ERASE_TIED ? value[j] - readout[j] : mul_rn(gate, value[j]);
      factor[j] = mul_rn(scale(), target[j]);
    }
  }
  // Returns the factor of the target: β r, or r.
  DEVICE Real scale() const { return ERASE == ERASE_TIED ? mul_rn(gate, r) : r; }
  // β r, or 0
  DEVICE Real erasure() const { return ERASE == ERASE_TIED ? scale() : Real(0); }
};

// X' before rounding. If the factor is 0, X must keep its bits, even if X is −0 or k is NaN.
DEVICE Real rewritten(Real x, Real factor, Real k) { return factor == Real(0) ? x : fma_rn(factor, k, x); }

// X' of a packet, rounded to the storage type after the last rewrite.
DEVICE Config::State rewritten(
    const Config::State& state, const Config::Directions& k, const Rewrite (&rewrites)[REWRITES]) {
  Real x[ELEMENTS];
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) {
    x[i] = state[i];
#pragma unroll
    for (int n = 0; n < REWRITES; ++n) x[i] = rewritten(x[i], rewrites[n].factor[i % M], k[n][i / M]);
  }
  Config::State new_state;
  new_state.set(x);
  return new_state;
}

// --- the read -----------------------------------------------------------------------------------

using Features = Packet<Real, FEATURES>;
using Elements = Packet<Real, ELEMENTS>;

// Compression weights w_s of a packet's features: FEATURES × M numbers of one tap.
struct CompressWeight {
  Config::Compress weight;

  DEVICE void load(const RewriteRead& args, int feature, int tap = 0) {
    if constexpr (READ == CHANNEL || READ == TOKEN) {
      weight.load_readonly(args.compress + (static_cast<long long>(tap) * D + feature) * M);
    }
  }
  DEVICE Real at(int i) const { return READ == IDENTITY ? Real(1) : weight[i]; }
};

// Adds Σ_j w_ij X'_ij of a packet with the weights of one tap.
DEVICE void compress(const CompressWeight& weight, const Config::State& state, Real (&x)[FEATURES]) {
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) x[i / M] += weight.at(i) * state[i];
}
DEVICE void compress(const RewriteRead& args, const Config::State& state, int row, int tap, Real (&x)[FEATURES]) {
  CompressWeight weight;
  weight.load(args, feature_of(row), tap);
  compress(weight, state, x);
}

// γ, w_β and W_v of a packet's features.
struct Parameters {
  Packet<NORM_T, FEATURES> norm;
  Packet<GATE_T, FEATURES> gate[GATE ? GATES : 1];
  Packet<VALUE_T, FEATURES> value[VALUE ? VALUES : 1];

  DEVICE void load_norm(const RewriteRead& args, int feature) {
    if constexpr (NORM_WEIGHT) norm.load_readonly(args.norm_weight + feature);
  }
  DEVICE void load(const RewriteRead& args, int feature) {
    load_norm(args, feature);
#pragma unroll
    for (int n = 0; n < GATES; ++n) {
      gate[n].load_readonly(args.gate_weight + static_cast<long long>(n) * D + feature);
    }
#pragma unroll
    for (int j = 0; j < VALUES; ++j) {
      value[j].load_readonly(args.value_weight + static_cast<long long>(j) * D + feature);
    }
  }
  DEVICE Real gamma(int f) const { return NORM_WEIGHT ? norm[f] : Real(1); }
};

// COUNT vectors over the block's features, which wait for a later pass over the token or for a later token. A thread
// accesses its own features only, so no barrier is needed. They are in registers or in memory: in the order of the features
// among those of other blocks (IN_ORDER), or private to the block. Private packets are split into pieces of one access, and the
// pieces of neighbouring threads are adjacent: with whole packets of 32 bytes, two lanes would use the same bank.
template <int COUNT, bool REGISTERS, bool IN_ORDER = false> struct FeatureVectors {
  Features values[COUNT > 0 ? COUNT : 1][ROWS];

  __device__ explicit FeatureVectors(Real*) {}
  DEVICE void load(int vector, int row, Real (&x)[FEATURES]) const { values[vector][row].get(x); }
  DEVICE void store(int vector, int row, const Real (&x)[FEATURES]) { values[vector][row].set(x); }
};
template <int COUNT, bool IN_ORDER> struct FeatureVectors<COUNT, false, IN_ORDER> {
  static constexpr int PIECE = Features::WIDTH / static_cast<int>(sizeof(Real));

  Real* numbers;

  __device__ explicit FeatureVectors(Real* numbers) : numbers(numbers) {}
  DEVICE Real* at(int vector, int row, int piece) const {
    if constexpr (IN_ORDER) return numbers + static_cast<long long>(vector) * D + column_of(row) + piece * PIECE;
    return numbers + static_cast<long long>(vector) * WIDTH + (piece * PACKETS + packet_index(row)) * PIECE;
  }
  DEVICE void load(int vector, int row, Real (&x)[FEATURES]) const {
#pragma unroll
    for (int piece = 0; piece < FEATURES / PIECE; ++piece) {
      Packet<Real, PIECE> packet;
      packet.load_cached(at(vector, row, piece));
#pragma unroll
      for (int i = 0; i < PIECE; ++i) x[piece * PIECE + i] = packet[i];
    }
  }
  DEVICE void store(int vector, int row, const Real (&x)[FEATURES]) {
#pragma unroll
    for (int piece = 0; piece < FEATURES / PIECE; ++piece) {
      Packet<Real, PIECE> packet;
#pragma unroll
      for (int i = 0; i < PIECE; ++i) packet.element[i] = x[piece * PIECE + i];
      packet.store_cached(at(vector, row, piece));
    }
  }
};
template <int COUNT, bool REGISTERS, bool IN_ORDER>
DEVICE void clear(FeatureVectors<COUNT, REGISTERS, IN_ORDER>& vectors, int vector) {
  const Real zeros[FEATURES] = {};
#pragma unroll
  for (int row = 0; row < ROWS; ++row)
    if (REGISTERS || is_inside(row)) vectors.store(vector, row, zeros);
}

// The window of a token read: TAPS vectors. Vector 0 belongs to the current token, vector s to the token s steps later.
// The forward accumulates x in it, the backward remembers dx. WINDOW says which memory holds it; IN_GLOBAL is `scratch`.
struct Window {
  static constexpr bool REGISTERS = WINDOW == IN_REGISTERS;
  static constexpr int SHARED = WINDOW == IN_SHARED ? TAPS * WIDTH : 0;  // numbers in shared memory

  FeatureVectors<TAPS, REGISTERS> vectors;
  int head = 0;  // in memory, the position of vector 0 in the ring of TAPS

  __device__ Window(const RewriteRead& args, Real* shared) : vectors(memory(args, shared)) {}
  static __device__ Real* memory(const RewriteRead& args, Real* shared) {
    if constexpr (WINDOW != IN_GLOBAL) return shared;
    return args.scratch + (static_cast<long long>(blockIdx.x) * SLICES + blockIdx.y) * TAPS * WIDTH;
  }
  DEVICE int position(int s) const {
    if constexpr (REGISTERS) return s;
    return head + s < TAPS ? head + s : head + s - TAPS;
  }
  DEVICE void load(int s, int row, Real (&x)[FEATURES]) const { vectors.load(position(s), row, x); }
  DEVICE void store(int s, int row, const Real (&x)[FEATURES]) { vectors.store(position(s), row, x); }
  DEVICE void clear() {
    UNROLL_TAPS
    for (int s = 0; s < TAPS; ++s) ::clear(vectors, position(s));
  }
  // Forward, to the next token: vector s becomes s − 1, and the last one starts at zero.
  DEVICE void advance() {
    if constexpr (REGISTERS) {
#pragma unroll
      for (int s = 1; s < TAPS; ++s) move(s, s - 1);
      ::clear(vectors, TAPS - 1);
    } else {
      ::clear(vectors, position(0));
      head = head + 1 < TAPS ? head + 1 : 0;
    }
  }
  // Backward, to the previous token: vector s becomes s + 1.
  DEVICE void retreat() {
    if constexpr (REGISTERS) {
#pragma unroll
      for (int s = TAPS - 1; s > 0; --s) move(s - 1, s);
    } else {
      head = head > 0 ? head - 1 : TAPS - 1;
    }
  }
  DEVICE void move(int from, int to) {
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      Real x[FEATURES];
      vectors.load(from, row, x);
      vectors.store(to, row, x);
    }
  }
};
