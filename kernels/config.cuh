// What a kernel of rewrite_read is compiled for: its sizes, the layout of its sums, its packets, and a policy for each case
// of a pass. All of it follows from the macros of README.md.
#pragma once

#include "common.cuh"

// A thread owns ROWS packets of FEATURES neighbouring features; row r of all threads together is a contiguous run of
// THREADS packets. A block works on WIDTH features of a token: on all of them, on its cluster's 1/CLUSTER, or, in a
// kernel without sums over the features (FEATURE_SLICED), on one packet per thread. Slices lie along the grid's y axis.
constexpr int SLICES = FEATURE_SLICED ? (D / FEATURES + THREADS - 1) / THREADS : CLUSTER;
constexpr int WIDTH = FEATURE_SLICED ? THREADS * FEATURES : D / CLUSTER;  // features per block
constexpr int PACKETS = WIDTH / FEATURES;
constexpr int ROWS = (PACKETS + THREADS - 1) / THREADS;
constexpr int KEPT_ROWS = KEEP_IN_REGISTERS ? ROWS : 1;
constexpr int ELEMENTS = FEATURES * M;  // state elements per packet
static_assert(D % FEATURES == 0 && THREADS % 32 == 0 && TAPS >= 1, "the plan keeps to these");
static_assert(D % (CLUSTER * FEATURES) == 0 && (CLUSTER == 1 || !FEATURE_SLICED), "a cluster's blocks are alike");
static_assert(READ != IDENTITY || M == 1, "an identity read has one channel");
static_assert(READ == TOKEN || TAPS == 1, "only token reads look back");
static_assert(REWRITES >= 1 && NEXT >= 1, "absent ones count as one");

// Arrays stay in registers only if every index is a compile-time constant, so the loops over them are unrolled. If all data
// are in memory, one row at a time needs the fewest registers. (Unrolled by a count, the kernels would spill.)
#if KEEP_IN_REGISTERS || (READ == TOKEN && WINDOW == IN_REGISTERS) || (BACKWARD && SUMS == IN_REGISTERS)
#define UNROLL_ROWS _Pragma("unroll")
#else
#define UNROLL_ROWS _Pragma("unroll 1")
#endif
#if WINDOW == IN_REGISTERS || TAPS <= 8  // loads of few taps overlap
#define UNROLL_TAPS _Pragma("unroll")
#else
#define UNROLL_TAPS _Pragma("unroll 1")
#endif

// Gates and values of the rewrites to come.
constexpr int GATES = GATE * NEXT, VALUES = VALUE * NEXT * M;

// ERASE is numbered as in src/records.rs: a rewrite erases as much as it writes, or nothing.
constexpr int ERASE_TIED = 0, ERASE_NONE = 1;

// A token's forward saves of its rewrites: of each r, p and its k·k_i with every earlier k_i.
__host__ __device__ constexpr int stats_before(int rewrite) { return rewrite * (1 + M) + rewrite * (rewrite - 1) / 2; }
constexpr int STATS = stats_before(REWRITES);

// Layout of one block's sums of the wanted parameter gradients: SLOTS vectors of D numbers, then the sums of the biases.
constexpr int COMPRESS_SLOTS = SUM_COMPRESS * M * TAPS;
constexpr int NORM_SLOT = COMPRESS_SLOTS;
constexpr int GATE_SLOT = NORM_SLOT + SUM_NORM;
constexpr int VALUE_SLOT = GATE_SLOT + SUM_GATE * NEXT;
constexpr int SLOTS = VALUE_SLOT + SUM_VALUE * NEXT * M;
constexpr int BIASES = NEXT + NEXT * M;          // db_β, then db_v
constexpr int BIAS_SUMS = (BIASES + 7) / 8 * 8;  // padded so that every block's sums are aligned
constexpr long long PARTIAL = static_cast<long long>(SLOTS) * D + BIAS_SUMS;

template <bool TOKEN_READ> struct EarlierTokens;  // earlier_tokens.cuh
template <bool CHAINED> struct StateSource;       // chain.cuh
template <bool TOKEN_READ> struct LaterTokens;    // later_tokens.cuh
template <int COUNT> struct RewritesBackward;     // rewrites_bwd.cuh

struct Config {
  // A thread's packets: FEATURES neighbouring features of one token.
  using State = Packet<STATE_T, ELEMENTS>;
  using Direction = Packet<DIRECTION_T, FEATURES>;
  using Directions = Direction[REWRITES];  // k of every rewrite
  using Context = Packet<CONTEXT_T, FEATURES>;
  using Compressed = Packet<STATE_T, FEATURES>;  // x of a token read
  using Compress = Packet<COMPRESS_T, ELEMENTS>;

  // The policies. The plain path is the first case of each.
  using EarlierTokens = ::EarlierTokens<READ == TOKEN>;       // forward: the read is within a token, or over time
  using StateSource = ::StateSource<CHAIN>;                   // X is stored, or made from an anchor
  using LaterTokens = ::LaterTokens<READ == TOKEN>;           // the read is within a token, or over time
  using Rewrites = RewritesBackward<REWRITE ? REWRITES : 0>;  // one rewrite, several, or none
};
