// A CUDA block: its threads, barriers and shared memory.
#pragma once

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../device/runtime.h"
#include "fibers.h"
#include "sanitizers.h"
#include "shared_memory.h"

namespace emulator {

constexpr unsigned warp_lanes = 32;
constexpr unsigned most_block_threads = 1024;
constexpr unsigned most_cluster_blocks = 8;
constexpr size_t most_static_shared_bytes = 48 * 1024;
constexpr size_t most_shared_bytes = 227 * 1024;  // of sm_90 and sm_100, the largest

struct Grid {
  const Kernel* kernel;
  const void* arguments;
  dim3 blocks;
  dim3 threads;
  size_t shared_bytes;
};

std::string describe(Site site);  // for messages
bool same(Site a, Site b);
inline bool contains(unsigned mask, unsigned lane) { return mask >> lane & 1; }

// A shuffle or vote by the lanes of a warp.
struct WarpOperation {
  enum class Kind { shuffle, ballot };

  Kind kind;
  unsigned mask;
  Bits value;
  int source_lane;
  Bits result;
};

// A write to shared memory that is not visible yet: of cp.async, st.async, or a piece of cp.async.bulk.
struct Copy {
  void arrive() const { memcpy(to, word, bytes); }

  Site site;
  void* to;
  Size bytes;
  char word[16];
};

struct Thread {
  enum class State { ready, at_barrier, in_warp_operation, awaiting_mbarrier, returned };

  std::string whereabouts() const;

  Fiber* fiber;
  uint3 index;
  State state;
  Site site;                // of the call in which it waits
  WarpOperation operation;  // while in_warp_operation
  const void* awaited;      // while awaiting_mbarrier
  std::vector<Copy> copies;
};

struct Warp {
  unsigned lanes = 0;     // mask of existing lanes: fewer than 32 in a partial last warp
  unsigned waiting = 0;   // mask of lanes in a warp operation
  unsigned returned = 0;  // mask of lanes that returned from the kernel
  // For __syncwarp, by the lowest lane of its mask: the number of synchronisations, and the moments
  // of the current and the previous one.
  unsigned syncs[warp_lanes] = {};
  Moment synced[warp_lanes][2];
};

// A barrier of `count` threads, from number `first` of their cluster on.
struct Barrier {
  unsigned first, count;
  unsigned live = count;  // threads that have not returned
  unsigned waiting = 0;
  int predicates = 0;  // number that are not zero, among the waiting threads
  int counted = 0;     // `predicates` when it last opened
  unsigned openings = 0;
  Moment opened[2];  // current and previous opening
};

// An mbarrier: in each phase it counts the bytes that were expected and the bytes that were sent. These arrive as late as they
// may: when a thread waits for the phase, or when the next one begins.
struct MBarrier {
  bool is_complete() const { return announced && bytes == 0; }

  bool announced = false;  // whether expect_tx was called in this phase
  bool waiting = false;    // whether a thread waits for this phase
  long bytes = 0;          // expected minus sent; negative if they are sent before expect_tx
  unsigned phase = 0;      // number of completed phases
  std::vector<Copy> sent;
  Moment arrived[2];  // current and previous phase
};

// The state that the threads of a block share.
struct Block {
  // The address in this block's shared memory that corresponds to `address` in that of `own`, or null.
  void* counterpart(const Block& own, const void* address);
  bool overrun_at(const void* address) const;

  uint3 index;
  bool begun = false;  // whether any thread has run
  std::unique_ptr<Barrier> barrier;
  std::unique_ptr<SharedArray> dynamic;
  std::map<const void*, SharedArray> statics;  // by declaration
  size_t static_bytes = 0;
  std::map<const void*, MBarrier> mbarriers;  // by address
};

}  // namespace emulator
