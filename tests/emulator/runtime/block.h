// One CUDA block: its threads, what they wait for, and its shared memory.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../device/runtime.h"
#include "fibers.h"
#include "order.h"
#include "sanitizers.h"
#include "shared_memory.h"

namespace emulator {

constexpr unsigned warp_lanes = 32;
constexpr unsigned most_block_threads = 1024;
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

// A copy to shared memory that its thread has not awaited.
struct Copy {
  Site site;
  void* to;
  Size bytes;
  char word[16];
};

struct Thread {
  enum class State { ready, at_barrier, in_warp_operation, returned };

  std::string whereabouts() const;

  Fiber* fiber;
  uint3 index;
  State state;
  Site site;                // where it waits
  WarpOperation operation;  // while in_warp_operation
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

struct Barrier {
  unsigned waiting = 0;
  int predicates = 0;   // not zero, among those waiting
  int counted = 0;      // predicates of the last time it opened
  unsigned openings = 0;
  Moment opened[2];     // the present time and the one before
};

// Runs the blocks of a grid one after the other, on the OS thread that calls it.
class Block {
 public:
  // The block whose threads this OS thread runs, or null.
  static Block* current();

  // Before a grid's blocks, and after them.
  void start_grid(const Grid& grid, const Order& order);
  void end_grid();

  // Runs one block. Returns "", or what its threads did wrong; the grid must end then.
  std::string run(uint3 block);

  // For the running thread. `fail` leaves the kernel for good.
  int barrier(Site site, int predicate);
  Bits warp_operation(Site site, WarpOperation operation);
  void sync_warp(Site site, unsigned mask);
  void copy_later(Site site, void* shared, const void* word, Size bytes);
  void await_copies();
  unsigned lane() const { return running_ % warp_lanes; }
  void* static_shared(const void* declaration, size_t bytes);
  void* dynamic_shared() { return dynamic_->start(); }
  [[noreturn]] void fail(const std::string& reason);

  bool is_running() const { return running_ != nobody; }
  std::string explain_fault(const void* address) const;

 private:
  static constexpr unsigned nobody = ~0u;

  static void thread_main();
  void thread_returned();
  void open_barrier();
  void check_lanes(unsigned first, unsigned mask);
  void complete_operation(unsigned first, unsigned mask);
  void wake(unsigned first, unsigned mask);
  void wake_all();
  void enqueue_woken();
  void resume_next();
  void resume(unsigned next);
  std::string whereabouts() const;

  const Grid* grid_ = nullptr;
  Order order_{nullptr, 0};
  std::string error_;

  // ThreadSanitizer takes a fiber for a thread, and its history for one of things that happened in
  // order. So it gets two sets of fibers that take turns, or it would not see races between blocks.
  static constexpr unsigned fiber_sets = tsan ? 2 : 1;

  std::vector<std::unique_ptr<Fiber>> fibers_;  // kept for the grids to come
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;           // this and the barrier are new for every block,
  std::unique_ptr<Barrier> barrier_;  // because their moments must not order two of them
  ReadyQueue ready_;
  std::vector<unsigned> woken_;  // empty except while threads are being woken
  Context launcher_;
  unsigned running_ = nobody;
  unsigned live_ = 0;        // threads that have not returned
  unsigned blocks_run_ = 0;  // of this grid
  Moment grid_started_, thread_ended_;

  std::unique_ptr<SharedArray> dynamic_;
  std::map<const void*, SharedArray> statics_;  // by declaration
  size_t static_bytes_ = 0;
};

}  // namespace emulator
