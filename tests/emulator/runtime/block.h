// What there is of a CUDA block: threads, what they wait for, shared memory.
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
constexpr size_t most_shared_bytes = 227 * 1024;  // on sm_90 and sm_100, which have the most

struct Grid {
  const Kernel* kernel;
  const void* arguments;
  dim3 blocks;
  dim3 threads;
  size_t shared_bytes;
};

std::string place(Site site);  // for messages
bool same(Site a, Site b);
inline bool contains(unsigned mask, unsigned lane) { return mask >> lane & 1; }

// What the lanes of a warp do together.
struct WarpOperation {
  enum class Kind { shuffle, ballot };

  Kind kind;
  unsigned mask;
  Bits value;
  int source_lane;
  Bits result;
};

// A write to shared memory that is not visible yet: of cp.async, or of st.async.
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
  Site site;                // where it waits
  WarpOperation operation;  // while in_warp_operation
  const void* awaited;      // while awaiting_mbarrier
  std::vector<Copy> copies;
};

struct Warp {
  unsigned lanes = 0;     // those that exist: fewer than 32 in a partial last warp
  unsigned waiting = 0;   // in a warp operation
  unsigned returned = 0;  // from the kernel
  // For __syncwarp by a group of lanes, which its lowest one stands for: how often they have
  // synchronised, and the moments of the present time and the one before.
  unsigned syncs[warp_lanes] = {};
  Moment synced[warp_lanes][2];
};

// Where threads wait for one another: `count` of them, from number `first` of their cluster on.
struct Barrier {
  unsigned first, count;
  unsigned live = count;  // threads that have not returned
  unsigned waiting = 0;
  int predicates = 0;  // not zero, among those waiting
  int counted = 0;     // predicates of the last time it opened
  unsigned openings = 0;
  Moment opened[2];  // the present time and the one before
};

// An mbarrier: it counts the bytes that st.async announces and brings, phase after phase.
struct MBarrier {
  bool is_all_there() const { return announced && bytes == 0; }

  bool announced = false;  // how many bytes there will be
  long bytes = 0;          // announced, less those that were sent: some may be sent before
  unsigned times = 0;      // that all of it arrived
  std::vector<Copy> sent;
  Moment arrived[2];  // the present time and the one before
};

// What the threads of a block share.
struct Block {
  // Where another block's memory is what `own` is in this one's, or null.
  void* counterpart(const Block& own, const void* address);
  bool overrun_at(const void* address) const;

  uint3 index;
  bool begun = false;  // some thread runs, or has run
  std::unique_ptr<Barrier> barrier;
  std::unique_ptr<SharedArray> dynamic;
  std::map<const void*, SharedArray> statics;  // by declaration
  size_t static_bytes = 0;
  std::map<const void*, MBarrier> mbarriers;  // by address
};

}  // namespace emulator
