// Barriers, votes and shuffles. Each passes on its caller's line: default arguments are evaluated at
// the call.
#pragma once

#include "runtime.h"

#define EMULATOR_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define EMULATOR_SITE(operation) (emulator::Site{operation, file, line})

inline void __syncthreads(EMULATOR_CALLER) { emulator::barrier(EMULATOR_SITE("__syncthreads"), 0); }

inline int __syncthreads_count(int predicate, EMULATOR_CALLER) {
  return emulator::barrier(EMULATOR_SITE("__syncthreads_count"), predicate);
}

inline int __syncthreads_or(int predicate, EMULATOR_CALLER) {
  return emulator::barrier(EMULATOR_SITE("__syncthreads_or"), predicate) != 0;
}

inline int __syncthreads_and(int predicate, EMULATOR_CALLER) {
  return emulator::barrier(EMULATOR_SITE("__syncthreads_and"), !predicate) == 0;
}

inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATOR_CALLER) {
  emulator::sync_warp(EMULATOR_SITE("__syncwarp"), mask);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATOR_CALLER) {
  return emulator::ballot(EMULATOR_SITE("__ballot_sync"), mask, predicate);
}

inline int __any_sync(unsigned mask, int predicate, EMULATOR_CALLER) {
  return emulator::ballot(EMULATOR_SITE("__any_sync"), mask, predicate) != 0;
}

inline int __all_sync(unsigned mask, int predicate, EMULATOR_CALLER) {
  return emulator::ballot(EMULATOR_SITE("__all_sync"), mask, !predicate) == 0;
}

namespace emulator {

// The barrier of all threads of a cluster (barrier.cluster.arrive and .wait).
inline void sync_cluster(EMULATOR_CALLER) { sync_cluster(EMULATOR_SITE("sync_cluster")); }

// The address of `shared` in another block of the cluster (mapa).
template <class T>
T* mapa(T* shared, int rank, EMULATOR_CALLER) {
  return static_cast<T*>(mapa(EMULATOR_SITE("mapa"), static_cast<void*>(shared), rank));
}

// Initialises an mbarrier with an arrival count of one (mbarrier.init).
inline void mbarrier_init(void* barrier, EMULATOR_CALLER) { mbarrier_init(EMULATOR_SITE("mbarrier_init"), barrier); }

inline void mbarrier_init_fence() {}  // blocks of a cluster share one OS thread

// Arrives, and sets the bytes to expect in this phase (mbarrier.arrive.expect_tx).
inline void mbarrier_expect_tx(void* barrier, int bytes, EMULATOR_CALLER) {
  mbarrier_expect_tx(EMULATOR_SITE("mbarrier_expect_tx"), barrier, bytes);
}

// Stores a value at `shared` in another block, counted by that block's `barrier` (st.async). The
// memory holds NaN until the phase is complete.
template <class T>
void st_async(T* shared, void* barrier, int rank, T value, EMULATOR_CALLER) {
  const Site site = EMULATOR_SITE("st_async");
  void* const to = mapa(site, static_cast<void*>(shared), rank);
  __builtin_memset(to, 0xFF, sizeof(T));  // here, because sanitizers see this code but not the runtime
  st_async(site, to, &value, sizeof(T), mapa(site, barrier, rank));
}

// Waits for the phase with this parity to complete (mbarrier.try_wait.parity).
inline void mbarrier_wait(void* barrier, unsigned parity, EMULATOR_CALLER) {
  mbarrier_wait(EMULATOR_SITE("mbarrier_wait"), barrier, parity);
}

// Copies neighbouring bytes, counted by `barrier` (cp.async.bulk). The shared memory holds NaN until a thread has waited.
inline void cp_async_bulk(void* shared, const void* from, int bytes, void* barrier, EMULATOR_CALLER) {
  if (bytes <= 0 || bytes % int(sizeof(uint4))) fail("cp.async.bulk copies a multiple of 16 bytes");
  for (int i = 0; i < bytes / int(sizeof(uint4)); ++i) {
    const uint4 word = static_cast<const uint4*>(from)[i];  // here, because sanitizers see this code
    uint4* const to = static_cast<uint4*>(shared) + i;
    *to = {~0u, ~0u, ~0u, ~0u};
    cp_async_bulk_later(EMULATOR_SITE("cp_async_bulk"), to, &word, sizeof(word), barrier);
  }
}

// Copies one Word, or zeros (cp.async). The shared memory holds NaN until cp_async_wait.
template <class Word>
void cp_async(void* shared, const void* from, bool there = true, EMULATOR_CALLER) {
  Word word{};
  if (there) word = *static_cast<const Word*>(from);  // here, because sanitizers see this code
  Word* const to = static_cast<Word*>(shared);
  __builtin_memset(to, 0xFF, sizeof(Word));
  cp_async_later(EMULATOR_SITE("cp_async"), to, &word, sizeof(Word));
}

template <class T>
T shuffle_value(Site site, unsigned mask, T value, int source_lane) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "CUDA shuffles values of 4 or 8 bytes");
  Bits bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = shuffle(site, mask, bits, source_lane);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}

// The first lane of the calling lane's group of `width` lanes; shuffles stay within a group.
inline int group_start(int width) { return lane() & ~(width - 1); }

}  // namespace emulator

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMULATOR_CALLER) {
  const int from = emulator::group_start(width) + (source & (width - 1));
  return emulator::shuffle_value(EMULATOR_SITE("__shfl_sync"), mask, value, from);
}

// In the next three, a lane whose source is outside its group keeps its own value.

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, EMULATOR_CALLER) {
  const int lane = emulator::lane(), source = lane ^ lane_mask;
  const bool inside = source < emulator::group_start(width) + width;
  return emulator::shuffle_value(EMULATOR_SITE("__shfl_xor_sync"), mask, value, inside ? source : lane);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_CALLER) {
  const int lane = emulator::lane(), source = lane + int(delta);
  const bool inside = source < emulator::group_start(width) + width;
  return emulator::shuffle_value(EMULATOR_SITE("__shfl_down_sync"), mask, value, inside ? source : lane);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_CALLER) {
  const int lane = emulator::lane(), source = lane - int(delta);
  const bool inside = source >= emulator::group_start(width);
  return emulator::shuffle_value(EMULATOR_SITE("__shfl_up_sync"), mask, value, inside ? source : lane);
}
