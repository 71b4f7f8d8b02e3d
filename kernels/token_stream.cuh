// What a token brings along: rows of numbers that every thread takes its own packets of.
//
// With STAGES the packets travel ahead through shared memory (copy_ahead), so that a token's are on their way
// while the one before is worked on, whatever a block's registers have room for. Every packet is asked for and
// taken by one thread: no barrier is needed. One stage is refilled as soon as a packet was taken for the last
// time; of two, one is filled while the other is in use. Where there is no room for a stage either, the packets
// are asked for as far as L2, unless a multiprocessor has other blocks to work on while one waits.
#pragma once

#include "rewrite_read.cuh"

#ifdef BACKWARD
constexpr bool AHEAD = STAGES > 0 || !HOLD || SLICED || BLOCKS < 3;
#else
constexpr bool AHEAD = STAGES > 0 || !HOLD;  // held packets are asked for ahead, into registers
#endif
// Whether the next token is asked for when work on this one begins, or packet by packet as room is made.
constexpr bool EARLY = HOLD || STAGES != 1;

constexpr int HELD = HOLD ? ROWS : 1;

// Whether a feed is there: not in this specialisation, always, or, a gradient that may be null for zeros, sometimes.
constexpr int NEVER = 0, ALWAYS = 1, SOMETIMES = 2;

// An input of C numbers per feature and token, and the thread's packets of it.
template <class T, int C, int THERE = ALWAYS> struct Feed {
  using Row = Packet<T, FEATURES * C>;
  static constexpr int SLOT = (WIDTH * C * static_cast<int>(sizeof(T)) + 15) / 16 * 16;

  const T* from;
  unsigned char* slots;
  Row held[HELD];

  // Takes its slots from the front of `shared`.
  __device__ Feed(const T* from, unsigned char*& shared) : from(from), slots(shared) {
    if constexpr (THERE) shared += STAGES * SLOT;
  }
  __device__ __forceinline__ Row& operator[](int row) { return held[row % HELD]; }
  __device__ __forceinline__ const Row& operator[](int row) const { return held[row % HELD]; }
  __device__ __forceinline__ T* slot(int row, int turn) const {
    T* const first = reinterpret_cast<T*>(slots + (STAGES == 2 ? turn * SLOT : 0));
    return first + column_of(0) * C + row * (THREADS * FEATURES * C);
  }
  __device__ __forceinline__ void request(long long token, int row, int turn) const {
    static_assert(!THERE || STAGES == 0 || Row::WIDTH >= 4, "copies ahead take four bytes at least");
    if constexpr (!AHEAD || THERE == NEVER) return;
    const bool there = THERE == ALWAYS || from;
    const T* const at = packet_of<C>(from, token, row);
    if constexpr (STAGES > 0) Row::request(slot(row, turn), at, there);
    else if (there) bring_near(at);
  }
  // `again`: it will be taken once more, so it should stay near.
  __device__ __forceinline__ void take(long long token, int row, int turn, bool again) {
    if constexpr (!THERE) return;
    Row& to = (*this)[row];
    if (STAGES > 0) to.get(slot(row, turn));
    else if (THERE == SOMETIMES && !from) to.clear();
    else if (again) to.get(packet_of<C>(from, token, row));
    else to.load(packet_of<C>(from, token, row));
  }
};
