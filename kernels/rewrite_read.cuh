// rewrite_read: its arguments, its sizes, and the arithmetic that forward and backward share.
//
// Names follow the reference (python/ddl/reference.py): state X (tokens, D, M), direction k, value v, gate β, compressed
// x, context h. A kernel is compiled for rewrite_read, rewrite alone (READ == NONE) or read alone (REWRITE == 0). It applies
// REWRITES rewrites one after the other, and reads values and gates of the NEXT to come; nearly always both are 1.
#pragma once

#include "block_sum.cuh"

// --- sizes --------------------------------------------------------------------------------------
// A thread owns ROWS packets of FEATURES neighbouring features; row r of all threads together is a contiguous run of
// THREADS packets. A block works on WIDTH features of a token: on all of them, on its cluster's 1/CLUSTER, or, in a
// kernel without sums over the features (FEATURE_SLICED), on one packet per thread. Slices lie along the grid's y axis.
#ifndef FEATURE_SLICED
#define FEATURE_SLICED 0
#endif
constexpr int SLICES = FEATURE_SLICED ? (D / FEATURES + THREADS - 1) / THREADS : CLUSTER;
constexpr int WIDTH = FEATURE_SLICED ? THREADS * FEATURES : D / CLUSTER;  // features per block
constexpr int PACKETS = WIDTH / FEATURES;
constexpr int ROWS = (PACKETS + THREADS - 1) / THREADS;
constexpr int ELEMENTS = FEATURES * M;  // state elements per packet
static_assert(D % FEATURES == 0 && THREADS % 32 == 0 && TAPS >= 1, "the plan keeps to these");
static_assert(D % (CLUSTER * FEATURES) == 0 && (CLUSTER == 1 || !FEATURE_SLICED), "a cluster's blocks are alike");
static_assert(READ != IDENTITY || M == 1, "an identity read has one channel");
static_assert(READ == TOKEN || TAPS == 1, "only token reads look back");
static_assert(REWRITES >= 1 && NEXT >= 1, "absent ones count as one");

// Values and gates of the rewrites to come.
constexpr int GATES = GATE * NEXT, VALUES = VALUE * NEXT * M;

// A token's forward saves of its rewrites: of each r, p and its k·k_i with every earlier k_i.
__host__ __device__ constexpr int stats_before(int rewrite) { return rewrite * (1 + M) + rewrite * (rewrite - 1) / 2; }
constexpr int STATS = stats_before(REWRITES);

// Layout of one block's sums of the wanted parameter gradients: SLOTS rows of D numbers, then the sums of the biases.
constexpr int COMPRESS_SLOTS = SUM_COMPRESS * M * TAPS;
constexpr int NORM_SLOT = COMPRESS_SLOTS;
constexpr int GATE_SLOT = NORM_SLOT + SUM_NORM;
constexpr int VALUE_SLOT = GATE_SLOT + SUM_GATE * NEXT;
constexpr int SLOTS = VALUE_SLOT + SUM_VALUE * NEXT * M;
constexpr int BIASES = NEXT * (1 + M);           // db_β, then db_v
constexpr int BIAS_SUMS = (BIASES + 7) / 8 * 8;  // padded so that every block's sums are aligned
constexpr long long PARTIAL = static_cast<long long>(SLOTS) * D + BIAS_SUMS;

// Arguments of the forward. The backward takes the same structure and Gradients; of the forward's outputs it reads stats,
// rstd, new_gate, new_value and, for a token read, compressed. Pointers of absent parts are null.
struct RewriteRead {
  const STATE_T* state;
  const DIRECTION_T* direction;
  const Real* value;
  const Real* gate;
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
  long long tokens, time, chunk;  // of all sequences, of one sequence, of one block
};

// First feature of the thread's packet in row `row`, counted within the block (column) and within the token (feature).
// The last row may be incomplete: a thread without a packet there is not inside.
__device__ __forceinline__ int column_of(int row) { return (static_cast<int>(threadIdx.x) + row * THREADS) * FEATURES; }
__device__ __forceinline__ int feature_of(int row) {
  return column_of(row) + (SLICES > 1 ? static_cast<int>(blockIdx.y) * WIDTH : 0);
}
__device__ __forceinline__ bool is_inside(int row) {
  if constexpr (FEATURE_SLICED && D % WIDTH > 0) return feature_of(row) < D;
  return (row + 1) * THREADS <= PACKETS || column_of(row) < WIDTH;
}
// Per-token results are known to every thread. True for the one thread that writes result number n.
__device__ __forceinline__ bool writes(int n) { return threadIdx.x == n % 32 && block_rank() == 0; }
// The packet's address in an array of COUNT numbers per token and feature. Rows are a constant distance apart, which
// loads take as an immediate offset: with feature_of(row) here the kernels need 5 % more instructions.
template <int COUNT = 1, class T>
__device__ __forceinline__ T* packet_of(T* numbers, long long token, int row) {
  return numbers + (token * D + feature_of(0)) * COUNT + row * (THREADS * FEATURES * COUNT);
}

// True if a document starts with this token, so that no read looks back beyond it.
__device__ __forceinline__ bool starts_document(const RewriteRead& args, long long token) {
  if constexpr (DOCUMENTS) return args.document_starts[token] != 0;
  return false;
}

// --- the rewrite --------------------------------------------------------------------------------

// One token's rewrites: X' = X + Σ k factorᵀ over them, where factor = β r e and k is not normalised.
struct RewriteFactors {
  Real r[REWRITES];           // 1/√(|k|² + ε²), so k̂ = r k
  Real readout[REWRITES][M];  // p = k̂ᵀX, of the X that the earlier rewrites leave
  Real error[REWRITES][M];    // e = v − p
  Real factor[REWRITES][M];   // β r e

  __device__ __forceinline__ void finish(int rewrite, const Real (&value)[M], Real gate) {
#pragma unroll
    for (int j = 0; j < M; ++j) {
      error[rewrite][j] = value[j] - readout[rewrite][j];
      factor[rewrite][j] = mul_rn(mul_rn(gate, r[rewrite]), error[rewrite][j]);
    }
  }
};

using Directions = Packet<DIRECTION_T, FEATURES>[REWRITES];  // k of every rewrite

// X' before rounding. If the factor is 0, X must keep its bits, even if X is −0 or k is NaN.
__device__ __forceinline__ Real rewritten(Real x, Real factor, Real k) {
  return factor == Real(0) ? x : fma_rn(factor, k, x);
}

// X' of a packet, rounded to the storage type after the last rewrite.
__device__ __forceinline__ Packet<STATE_T, ELEMENTS> rewritten(
    const Packet<STATE_T, ELEMENTS>& state, const Directions& k, const RewriteFactors& factors) {
  Real x[ELEMENTS];
#pragma unroll
  for (int f = 0; f < FEATURES; ++f)
#pragma unroll
    for (int j = 0; j < M; ++j) {
      x[f * M + j] = state[f * M + j];
#pragma unroll
      for (int n = 0; n < REWRITES; ++n) {
        x[f * M + j] = rewritten(x[f * M + j], factors.factor[n][j], k[n][f]);
      }
    }
  Packet<STATE_T, ELEMENTS> stored;
  stored.set(x);
  return stored;
}

// --- the read -----------------------------------------------------------------------------------

using Features = Packet<Real, FEATURES>;

// Compression weights w_s of a packet's features: FEATURES × M numbers of one tap.
struct CompressWeight {
  Packet<COMPRESS_T, ELEMENTS> weight;

  __device__ __forceinline__ void load(const RewriteRead& args, int feature, int tap = 0) {
    if constexpr (READ == CHANNEL || READ == TOKEN) {
      weight.load_readonly(args.compress + (static_cast<long long>(tap) * D + feature) * M);
    }
  }
  __device__ __forceinline__ Real at(int f, int j) const { return READ == IDENTITY ? Real(1) : weight[f * M + j]; }
};

// γ, w_β and W_v of a packet's features.
struct Parameters {
  Packet<NORM_T, FEATURES> norm;
  Packet<GATE_T, FEATURES> gate[GATE ? GATES : 1];
  Packet<VALUE_T, FEATURES> value[VALUE ? VALUES : 1];

  __device__ __forceinline__ void load_norm(const RewriteRead& args, int feature) {
    if constexpr (NORM_WEIGHT) norm.load_readonly(args.norm_weight + feature);
  }
  __device__ __forceinline__ void load(const RewriteRead& args, int feature) {
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
  __device__ __forceinline__ Real gamma(int f) const { return NORM_WEIGHT ? norm[f] : Real(1); }
};

// One number per feature that a token's second pass needs from its first, such as x. Each thread reads back only what it
// wrote, so no barrier is needed. Kept where the packets are: in registers, else in shared memory.
struct FeatureRow {
#if KEEP_IN_REGISTERS
  Real values[ROWS][FEATURES];

  __device__ explicit FeatureRow(Real*) {}
  __device__ __forceinline__ void load(int row, Real (&x)[FEATURES]) const {
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) x[f] = values[row][f];
  }
  __device__ __forceinline__ void store(int row, const Real (&x)[FEATURES]) {
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) values[row][f] = x[f];
  }
#else
  Real* columns;

  __device__ explicit FeatureRow(Real* shared) : columns(shared) {}
  __device__ __forceinline__ void load(int row, Real (&x)[FEATURES]) const {
    Features packet;
    packet.load_cached(columns + column_of(row));
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) x[f] = packet.element[f];
  }
  __device__ __forceinline__ void store(int row, const Real (&x)[FEATURES]) {
    Features packet;
    packet.set(x);
    packet.store_cached(columns + column_of(row));
  }
#endif
};

// Arrays stay in registers only if every index is a compile-time constant, so their loops must be unrolled. If all data
// are in memory, the loop over rows is not unrolled: it needs the registers of one row only.
#if KEEP_IN_REGISTERS || (READ == TOKEN && WINDOW == IN_REGISTERS) || (defined(BACKWARD) && SUMS == IN_REGISTERS)
#define UNROLL_ROWS _Pragma("unroll")
#else
#define UNROLL_ROWS _Pragma("unroll 1")
#endif

// The window of a token read: TAPS vectors over the block's features. Vector 0 belongs to the current token, vector s to
// the token s steps later. The forward accumulates x in it, the backward remembers dx. Each thread accesses only its own
// features, so no barrier is needed. WINDOW says which memory holds it; IN_GLOBAL is `scratch`.
struct Window {
#if WINDOW == IN_REGISTERS
  Real values[TAPS][ROWS][FEATURES];

  __device__ Window(const RewriteRead&, Real*) {}
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int s = 0; s < TAPS; ++s)
#pragma unroll
      for (int row = 0; row < ROWS; ++row)
#pragma unroll
        for (int f = 0; f < FEATURES; ++f) values[s][row][f] = Real(0);
  }
  __device__ __forceinline__ void load(int s, int row, Real (&x)[FEATURES]) const {
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) x[f] = values[s][row][f];
  }
  __device__ __forceinline__ void store(int s, int row, const Real (&x)[FEATURES]) {
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) values[s][row][f] = x[f];
  }
  // Forward, to the next token: vector s becomes s − 1, and the last one starts at zero.
  __device__ __forceinline__ void advance() {
#pragma unroll
    for (int s = 0; s < TAPS; ++s)
#pragma unroll
      for (int row = 0; row < ROWS; ++row)
#pragma unroll
        for (int f = 0; f < FEATURES; ++f) {
          values[s][row][f] = s + 1 < TAPS ? values[s + 1 < TAPS ? s + 1 : s][row][f] : Real(0);
        }
  }
  // Backward, to the previous token: vector s becomes s + 1.
  __device__ __forceinline__ void retreat() {
#pragma unroll
    for (int s = TAPS - 1; s > 0; --s)
#pragma unroll
      for (int row = 0; row < ROWS; ++row)
#pragma unroll
        for (int f = 0; f < FEATURES; ++f) values[s][row][f] = values[s - 1][row][f];
  }
#else
  Real* rows;
  int head = 0;  // position of vector 0 in the ring of TAPS

  __device__ Window(const RewriteRead& args, Real* shared) {
    const long long block = static_cast<long long>(blockIdx.x) * SLICES + blockIdx.y;
    rows = WINDOW == IN_SHARED ? shared : args.scratch + block * TAPS * WIDTH;
  }
  __device__ __forceinline__ void clear() {
    for (int s = 0; s < TAPS; ++s) clear_row(s);
  }
  __device__ __forceinline__ void clear_row(int s) {
    const Real zeros[FEATURES] = {};
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
      if (is_inside(row)) store(s, row, zeros);
  }
  __device__ __forceinline__ Real* at(int s, int row) const {
    const int slot = head + s;
    return rows + static_cast<long long>(slot < TAPS ? slot : slot - TAPS) * WIDTH + column_of(row);
  }
  __device__ __forceinline__ void load(int s, int row, Real (&x)[FEATURES]) const {
    Features packet;
    packet.load_cached(at(s, row));
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) x[f] = packet.element[f];
  }
  __device__ __forceinline__ void store(int s, int row, const Real (&x)[FEATURES]) {
    Features packet;
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) packet.element[f] = x[f];
    packet.store_cached(at(s, row));
  }
  __device__ __forceinline__ void advance() {
    clear_row(0);
    head = head + 1 < TAPS ? head + 1 : 0;
  }
  __device__ __forceinline__ void retreat() { head = head > 0 ? head - 1 : TAPS - 1; }
#endif
};

// Unrolled if the window is in registers (see UNROLL_ROWS), and for few taps, whose loads then overlap.
#if WINDOW == IN_REGISTERS || TAPS <= 8
#define UNROLL_TAPS _Pragma("unroll")
#else
#define UNROLL_TAPS _Pragma("unroll 1")
#endif
