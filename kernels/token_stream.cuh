// Per-token inputs, loaded packet by packet. The next token is requested early in one of three ways:
//
// - Into a stage in shared memory (STAGES > 0), by cp.async. A packet's place in one stage is refilled after its last use;
//   of two, one is filled while the other is in use. The thread that starts a copy reads it, so no barrier is needed.
// - To L2, if packets are loaded again, or in a backward with few blocks per multiprocessor. With more, other blocks keep
//   memory busy while this one waits, so nothing is requested.
// - Into registers, in a forward that keeps its packets (LOAD_AHEAD).
#pragma once

#include "rewrite_read.cuh"

constexpr bool PREFETCH = STAGES > 0 || !KEEP_IN_REGISTERS || (BACKWARD && (FEATURE_SLICED || BLOCKS < 3));
// True if the whole next token is prefetched when work on this one begins, false if packet by packet as places free up.
constexpr bool PREFETCH_WHOLE_TOKEN = KEEP_IN_REGISTERS || STAGES != 1;

// An OPTIONAL input is an incoming gradient whose pointer may be null, which stands for zeros.
constexpr int ABSENT = 0, PRESENT = 1, OPTIONAL = 2;

// One input of VECTORS vectors of C numbers per token and feature: its `stages`, and the thread's packets of it.
template <class T, int C, int PRESENCE = PRESENT, int VECTORS = 1> struct TokenStream {
  using Row = Packet<T, FEATURES * C>;
  static constexpr int STAGE_BYTES = (VECTORS * WIDTH * C * static_cast<int>(sizeof(T)) + 15) / 16 * 16;

  const T* from;
  unsigned char* stages;
  Row packets[KEPT_ROWS][VECTORS];

  // Reserves its stages at the front of `shared`.
  __device__ TokenStream(const T* from, unsigned char*& shared) : from(from), stages(shared) {
    if constexpr (PRESENCE) shared += STAGES * STAGE_BYTES;
  }
  DEVICE Row& operator[](int row) { return packets[row % KEPT_ROWS][0]; }
  DEVICE const Row& operator[](int row) const { return packets[row % KEPT_ROWS][0]; }
  DEVICE const Row (&vectors(int row) const)[VECTORS] { return packets[row % KEPT_ROWS]; }
  DEVICE T* staged(int vector, int row, int stage) const {
    T* const first = reinterpret_cast<T*>(stages + (STAGES == 2 ? stage * STAGE_BYTES : 0));
    return first + (vector * WIDTH + column_of(0)) * C + row * (THREADS * FEATURES * C);
  }
  DEVICE const T* packet_at(long long token, int vector, int row) const {
    return packet_of<C>(from, token * VECTORS + vector, row);
  }
  DEVICE void prefetch(long long token, int row, int stage) const {
    static_assert(!PRESENCE || STAGES == 0 || Row::WIDTH >= 4, "cp.async copies at least four bytes");
    if constexpr (!PREFETCH || PRESENCE == ABSENT) return;
    const bool valid = PRESENCE == PRESENT || from;
#pragma unroll
    for (int vector = 0; vector < VECTORS; ++vector) {
      const T* const at = packet_at(token, vector, row);
      if constexpr (STAGES > 0) Row::cp_async(staged(vector, row, stage), at, valid);
      else if (valid) ptx::prefetch_l2(at);
    }
  }
  // `again`: the packet will be loaded once more, so it should stay in the cache.
  DEVICE void load(long long token, int row, int stage, bool again) {
    if constexpr (!PRESENCE) return;
#pragma unroll
    for (int vector = 0; vector < VECTORS; ++vector) {
      Row& to = packets[row % KEPT_ROWS][vector];
      if (STAGES > 0) to.load_cached(staged(vector, row, stage));
      else if (PRESENCE == OPTIONAL && !from) to.clear();
      else if (again) to.load_cached(packet_at(token, vector, row));
      else to.load_streaming(packet_at(token, vector, row));
    }
  }
};

// COUNT numbers per token that every thread needs, such as β: lane i loads number i one token ahead, and a shuffle
// broadcasts it when it is needed. Loading them with their own token would add a memory latency to it.
template <int COUNT> struct LaneScalars {
  static constexpr int ROUNDS = COUNT > 0 ? (COUNT + 31) / 32 : 1;

  const Real* from[ROUNDS] = {};
  int stride[ROUNDS] = {};
  Real lane_value[ROUNDS];

  // Assigns numbers first … first + count − 1 to an array with `count` numbers per token. Null stands for zeros.
  DEVICE void assign(int first, int count, const Real* numbers) {
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
      const int i = round * 32 + static_cast<int>(threadIdx.x) % 32 - first;
      if (numbers && i >= 0 && i < count) {
        from[round] = numbers + i;
        stride[round] = count;
      }
    }
  }
  DEVICE void prefetch(long long token) {
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
      lane_value[round] = from[round] ? from[round][token * stride[round]] : Real(0);
    }
  }
  // All lanes must take part.
  DEVICE Real broadcast(int i) const { return __shfl_sync(FULL_MASK, lane_value[i / 32], i % 32); }
};
