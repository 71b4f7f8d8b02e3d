// The blocks of a cluster, which run concurrently; one block without __cluster_dims__.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "block.h"
#include "order.h"

namespace emulator {

// Runs the clusters of a grid one after another, on the calling OS thread.
class Cluster {
 public:
  // The cluster whose threads this OS thread runs, or null.
  static Cluster* current();

  // To be called before and after a grid's clusters.
  void start_grid(const Grid& grid, const Order& order);
  void end_grid();

  // Runs one cluster. Returns "", or the error of a thread; the grid must end then.
  std::string run(uint3 cluster);

  // Calls of the running thread. `fail` never returns to the kernel.
  int barrier(Site site, int predicate);
  void sync(Site site);
  Bits warp_operation(Site site, WarpOperation operation);
  void sync_warp(Site site, unsigned mask);
  void cp_async_later(Site site, void* shared, const void* word, Size bytes);
  void cp_async_wait();
  unsigned lane() const { return running_ % block_threads_ % warp_lanes; }
  void* static_shared(const void* declaration, size_t bytes);
  void* dynamic_shared() { return block().dynamic->start(); }
  void* mapa(Site site, void* shared, int rank);
  void mbarrier_init(Site site, void* address);
  void mbarrier_expect_tx(Site site, void* address, int bytes);
  void send(const Copy& copy, void* address);
  void cp_async_bulk(const Copy& copy, void* address);
  void mbarrier_wait(Site site, void* address, unsigned parity);
  [[noreturn]] void fail(const std::string& reason);

  bool is_running() const { return running_ != nobody; }
  std::string explain_fault(const void* address) const;

 private:
  static constexpr unsigned nobody = ~0u;

  static void thread_main();
  void start_block(unsigned rank, uint3 cluster);
  void thread_returned();
  int wait_at(Barrier& barrier, Site site, int predicate);
  void open(Barrier& barrier);
  MBarrier& mbarrier_at(Site site, const void* address);
  void complete_phase(MBarrier& barrier);
  void check_lanes(unsigned first, unsigned mask);
  void complete_operation(unsigned first, unsigned mask);
  void wake(unsigned first, unsigned mask);
  void wake_all(unsigned first, unsigned count);
  void enqueue_woken();
  void resume_next();
  void resume(unsigned next);
  std::string whereabouts() const;

  Block& block_of(unsigned thread) { return blocks_[thread / block_threads_]; }
  Block& block() { return block_of(running_); }
  Warp& warp_of(unsigned thread) {
    const unsigned warps = (block_threads_ + warp_lanes - 1) / warp_lanes;
    return warps_[thread / block_threads_ * warps + thread % block_threads_ / warp_lanes];
  }

  const Grid* grid_ = nullptr;
  Order order_{nullptr, 0};
  std::string error_;

  // ThreadSanitizer treats a fiber as a thread, so it considers everything that one fiber runs to be
  // ordered. Two alternating sets of fibers let it see races between blocks.
  static constexpr unsigned fiber_sets = tsan ? 2 : 1;

  std::vector<std::unique_ptr<Fiber>> fibers_;  // reused by later grids
  std::vector<Block> blocks_;                   // by rank
  unsigned block_threads_ = 1;                  // of each
  std::vector<Thread> threads_;                 // block by block
  std::vector<Warp> warps_;                     // warps and barriers are new for every cluster:
  std::unique_ptr<Barrier> barrier_;            // their moments must not order two clusters
  ReadyQueue ready_;
  std::vector<unsigned> woken_;  // empty except while threads are being woken
  Context launcher_;
  unsigned running_ = nobody;
  unsigned clusters_run_ = 0;  // of this grid
  Moment grid_started_, thread_ended_;
};

}  // namespace emulator
