// What a token brings along: rows of numbers that every thread takes its own packets of.
//
// With STAGES the packets travel ahead through shared memory (cp_async), so that a token's are on their way
// while the one before is worked on, whatever a block's registers have room for. Every packet is asked for and
// taken by one thread: no barrier is needed. One stage is refilled as soon as a packet was taken for the last
// time; of two, one is filled while the other is in use. Where there is no room for a stage either, the packets
// are asked for as far as L2, unless a multiprocessor has other blocks to work on while one waits.
#pragma once

#include "rewrite_read.cuh"

#ifdef BACKWARD
constexpr bool PREFETCH = STAGES > 0 || !KEEP_IN_REGISTERS || FEATURE_SLICED || BLOCKS < 3;
#else
constexpr bool PREFETCH = STAGES > 0 || !KEEP_IN_REGISTERS;  // held packets are asked for ahead, into registers
#endif
// Whether the next token is asked for when work on this one begins, or packet by packet as room is made.
constexpr bool PREFETCH_WHOLE_TOKEN = KEEP_IN_REGISTERS || STAGES != 1;

constexpr int KEPT_ROWS = KEEP_IN_REGISTERS ? ROWS : 1;

// Whether a feed is there: not in this specialisation, always, or, a gradient that may be null for zeros, sometimes.
constexpr int ABSENT = 0, PRESENT = 1, OPTIONAL = 2;

// An input of C numbers per feature and token, and the thread's packets of it.
template <class T, int C, int PRESENCE = PRESENT> struct TokenStream {
  using Row = Packet<T, FEATURES * C>;
  static constexpr int SLOT = (WIDTH * C * static_cast<int>(sizeof(T)) + 15) / 16 * 16;

  const T* from;
  unsigned char* slots;
  Row held[KEPT_ROWS];

  // Takes its slots from the front of `shared`.
  __device__ TokenStream(const T* from, unsigned char*& shared) : from(from), slots(shared) {
    if constexpr (PRESENCE) shared += STAGES * SLOT;
  }
  __device__ __forceinline__ Row& operator[](int row) { return held[row % KEPT_ROWS]; }
  __device__ __forceinline__ const Row& operator[](int row) const { return held[row % KEPT_ROWS]; }
  __device__ __forceinline__ T* slot(int row, int stage) const {
    T* const first = reinterpret_cast<T*>(slots + (STAGES == 2 ? stage * SLOT : 0));
    return first + column_of(0) * C + row * (THREADS * FEATURES * C);
  }
  __device__ __forceinline__ void prefetch(long long token, int row, int stage) const {
    static_assert(!PRESENCE || STAGES == 0 || Row::WIDTH >= 4, "copies ahead take four bytes at least");
    if constexpr (!PREFETCH || PRESENCE == ABSENT) return;
    const bool there = PRESENCE == PRESENT || from;
    const T* const at = packet_of<C>(from, token, row);
    if constexpr (STAGES > 0) Row::cp_async(slot(row, stage), at, there);
    else if (there) prefetch_l2(at);
  }
  // `again`: it will be taken once more, so it should stay near.
  __device__ __forceinline__ void load(long long token, int row, int stage, bool again) {
    if constexpr (!PRESENCE) return;
    Row& to = (*this)[row];
    if (STAGES > 0) to.load_cached(slot(row, stage));
    else if (PRESENCE == OPTIONAL && !from) to.clear();
    else if (again) to.load_cached(packet_of<C>(from, token, row));
    else to.load_streaming(packet_of<C>(from, token, row));
  }
};
