#include "cluster.h"

#include <cstdlib>
#include <cstring>
#include <utility>

__thread uint3 threadIdx;
__thread uint3 blockIdx;
__thread dim3 blockDim;
__thread dim3 gridDim;

namespace emulator {
namespace {

thread_local Cluster* current_cluster = nullptr;

}  // namespace

Cluster* Cluster::current() { return current_cluster; }

void Cluster::start_grid(const Grid& grid, const Order& order) {
  grid_ = &grid;
  order_ = order;
  blockDim = grid.threads;
  gridDim = grid.blocks;
  const dim3 size = grid.threads, ranks = grid.kernel->cluster;
  block_threads_ = size.x * size.y * size.z;
  blocks_ = std::vector<Block>(ranks.x * ranks.y * ranks.z);
  for (Block& block : blocks_) block.dynamic = std::make_unique<SharedArray>(grid.shared_bytes);
  const unsigned count = unsigned(blocks_.size()) * block_threads_;
  threads_.assign(count, Thread{});
  for (unsigned i = 0; i < count; ++i) {
    const unsigned j = i % block_threads_;
    threads_[i].index = {j % size.x, j / size.x % size.y, j / (size.x * size.y)};
  }
  while (fibers_.size() < count * fiber_sets) {
    fibers_.push_back(std::make_unique<Fiber>(thread_main, unsigned(fibers_.size())));
  }
  clusters_run_ = 0;
  error_.clear();
  current_cluster = this;
  launcher_.of_this_thread();
  grid_started_.reached();
}

void Cluster::end_grid() {
  thread_ended_.after();
  current_cluster = nullptr;
  blocks_.clear();
  if (!error_.empty()) fibers_.clear();  // they stopped inside the kernel and cannot be reused
}

void Cluster::start_block(unsigned rank, uint3 cluster) {
  Block& block = blocks_[rank];
  const dim3 ranks = grid_->kernel->cluster;
  block.index = {
      cluster.x * ranks.x + rank % ranks.x, cluster.y * ranks.y + rank / ranks.x % ranks.y,
      cluster.z * ranks.z + rank / (ranks.x * ranks.y)};
  block.begun = false;
  block.mbarriers.clear();
  if (clusters_run_) {
    block.dynamic->poison();
    for (auto& entry : block.statics) entry.second.poison();
  }
  block.barrier = std::make_unique<Barrier>(Barrier{rank * block_threads_, block_threads_});
}

std::string Cluster::run(uint3 cluster) {
  for (unsigned rank = 0; rank < blocks_.size(); ++rank) start_block(rank, cluster);
  const unsigned count = unsigned(threads_.size());
  for (unsigned i = 0; i < count; ++i) {
    threads_[i].fiber = fibers_[clusters_run_ % fiber_sets * count + i].get();
  }
  ++clusters_run_;
  barrier_ = std::make_unique<Barrier>(Barrier{0, count});
  warps_ = std::vector<Warp>(blocks_.size() * ((block_threads_ + warp_lanes - 1) / warp_lanes));
  for (unsigned i = 0; i < count; ++i) warp_of(i).lanes |= 1u << i % block_threads_ % warp_lanes;
  ready_.reset(count);
  woken_.reserve(count);
  wake_all(0, count);
  resume_next();
  if (running_ == nobody) return "";
  running_ = nobody;
  thread_ended_.after();  // the thread that failed wrote the error
  return error_;
}

// The entry of every fiber. Each iteration runs one CUDA thread.
void Cluster::thread_main() {
  Cluster& cluster = *current_cluster;
  Context::arrived(cluster.threads_[cluster.running_].fiber->context);
  for (;;) {
    cluster.grid_started_.after();
    cluster.grid_->kernel->call(cluster.grid_->arguments);
    cluster.thread_ended_.reached();
    cluster.thread_returned();
  }
}

void Cluster::thread_returned() {
  const std::vector<Copy>& copies = threads_[running_].copies;
  if (!copies.empty()) fail("returned before awaiting the copy of " + describe(copies[0].site));
  threads_[running_].state = Thread::State::returned;
  warp_of(running_).returned |= 1u << lane();
  for (Barrier* barrier : {block().barrier.get(), barrier_.get()}) {
    if (--barrier->live && barrier->waiting == barrier->live) {
      fail("divergent barrier: threads returned from the kernel while others wait" + whereabouts());
    }
  }
  for (const auto& [address, barrier] : block().mbarriers) {
    if (block().barrier->live || barrier.sent.empty()) continue;
    fail("the block returned before the arrival of what was sent to it at " + describe(barrier.sent[0].site));
  }
  resume_next();
}

void Cluster::cp_async_later(Site site, void* shared, const void* word, Size bytes) {
  const char* const to = static_cast<char*>(shared);
  const SharedArray& dynamic = *block().dynamic;
  if (to < dynamic.start() || to + bytes > dynamic.start() + dynamic.bytes()) {
    fail("the copy goes past dynamic shared memory, at " + describe(site));
  }
  Unwatched unwatched;
  Copy& copy = threads_[running_].copies.emplace_back(Copy{site, shared, bytes, {}});
  memcpy(copy.word, word, bytes);
}

void Cluster::cp_async_wait() {
  Unwatched unwatched;
  std::vector<Copy>& copies = threads_[running_].copies;
  for (const Copy& copy : copies) copy.arrive();
  copies.clear();
}

int Cluster::barrier(Site site, int predicate) { return wait_at(*block().barrier, site, predicate); }

void Cluster::sync(Site site) { wait_at(*barrier_, site, 0); }

int Cluster::wait_at(Barrier& barrier, Site site, int predicate) {
  // Two moments suffice: no thread leaves the next barrier before all have left this one.
  Moment& opened = barrier.opened[barrier.openings % 2];
  opened.reached();
  threads_[running_].state = Thread::State::at_barrier;
  threads_[running_].site = site;
  barrier.predicates += predicate != 0;
  if (++barrier.waiting == barrier.live) open(barrier);
  resume_next();
  opened.after();
  return barrier.counted;
}

void Cluster::open(Barrier& barrier) {
  const Site site = threads_[running_].site;
  for (unsigned i = barrier.first; i < barrier.first + barrier.count; ++i) {
    if (threads_[i].state != Thread::State::at_barrier || !same(threads_[i].site, site)) {
      fail(
          "divergent barrier: not all threads of the " + std::string(&barrier == barrier_.get() ? "cluster" : "block") +
          " reached the same " + std::string(site.operation) + whereabouts());
    }
  }
  barrier.counted = std::exchange(barrier.predicates, 0);
  barrier.waiting = 0;
  ++barrier.openings;
  wake_all(barrier.first, barrier.count);
}

void Cluster::wake(unsigned first, unsigned mask) {
  for (unsigned i = 0; i < warp_lanes; ++i) {
    if (contains(mask, i)) woken_.push_back(first + i);
  }
  enqueue_woken();
}

void Cluster::wake_all(unsigned first, unsigned count) {
  for (unsigned i = first; i < first + count; ++i) woken_.push_back(i);
  enqueue_woken();
}

void Cluster::enqueue_woken() {
  order_.arrange(woken_);
  for (unsigned i : woken_) threads_[i].state = Thread::State::ready;
  if (order_.newest_first()) {
    for (size_t i = woken_.size(); i-- > 0;) ready_.push_front(woken_[i]);
  } else {
    for (unsigned i : woken_) ready_.push_back(i);
  }
  woken_.clear();
}

// Switches from the running thread, which now waits or has returned, to one that can run.
void Cluster::resume_next() {
  if (!ready_.empty()) {
    resume(ready_.pop_front());
  } else if (barrier_->live) {
    fail("deadlock: no thread of the block can go on" + whereabouts());
  } else {
    resume(nobody);
  }
}

void Cluster::resume(unsigned next) {
  const unsigned last = std::exchange(running_, next);
  if (next == last) return;
  if (next != nobody) {
    threadIdx = threads_[next].index;
    blockIdx = block_of(next).index;
    block_of(next).begun = true;
  }
  switch_context(
      last == nobody ? launcher_ : threads_[last].fiber->context,
      next == nobody ? launcher_ : threads_[next].fiber->context);
}

void Cluster::fail(const std::string& reason) {
  const auto text = [](uint3 index) {
    return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z) + ")";
  };
  error_ =
      std::string(grid_->kernel->name) + ", block " + text(blockIdx) + ", thread " + text(threadIdx) + ": " + reason;
  thread_ended_.reached();
  // running_ keeps its value, which tells run() that the cluster failed.
  switch_context(threads_[running_].fiber->context, launcher_);
  abort();  // nothing resumes a thread that failed
}

// One line for each place where threads wait, with the threads' numbers.
std::string Cluster::whereabouts() const {
  constexpr size_t named = 6;
  std::map<std::string, std::vector<unsigned>> places;
  for (unsigned i = 0; i < threads_.size(); ++i) {
    const std::string rank = "block " + std::to_string(i / block_threads_) + " of the cluster, ";
    const std::string where = (blocks_.size() > 1 ? rank : "") + threads_[i].whereabouts();
    places[where].push_back(i % block_threads_);
  }
  std::string text;
  for (const auto& [where, numbers] : places) {
    text += "\n    " + where + ": " + std::to_string(numbers.size()) + " threads (";
    for (size_t i = 0; i < numbers.size() && i < named; ++i) {
      text += (i ? ", " : "") + std::to_string(numbers[i]);
    }
    text += numbers.size() > named ? ", …)" : ")";
  }
  return text;
}

void* Cluster::static_shared(const void* declaration, size_t bytes) {
  Block& block = this->block();
  auto found = block.statics.find(declaration);
  if (found == block.statics.end()) {
    block.static_bytes += bytes;
    if (block.static_bytes > most_static_shared_bytes) {
      fail("more than 48 KiB of shared memory declared with a size");
    }
    if (block.static_bytes + block.dynamic->bytes() > most_shared_bytes) {
      fail("more than 227 KiB of shared memory");
    }
    Unwatched unwatched;
    found = block.statics.try_emplace(declaration, bytes).first;
  }
  return found->second.start();
}

std::string Cluster::explain_fault(const void* address) const {
  if (threads_[running_].fiber->overflowed_at(address)) return "stack overflow";
  for (const Block& block : blocks_) {
    if (block.overrun_at(address)) return "access past the end of shared memory";
  }
  char text[64];
  snprintf(text, sizeof text, "illegal memory access at %p", address);
  return text;
}

// The functions that kernels call.

void sync_cluster(Site site) { current_cluster->sync(site); }
int barrier(Site site, int predicate) { return current_cluster->barrier(site, predicate); }

unsigned ballot(Site site, unsigned mask, int predicate) {
  const Bits vote = predicate != 0;
  return unsigned(current_cluster->warp_operation(site, {WarpOperation::Kind::ballot, mask, vote, 0, 0}));
}

Bits shuffle(Site site, unsigned mask, Bits value, int source_lane) {
  return current_cluster->warp_operation(site, {WarpOperation::Kind::shuffle, mask, value, source_lane, 0});
}

void cp_async_later(Site site, void* shared, const void* word, Size bytes) {
  current_cluster->cp_async_later(site, shared, word, bytes);
}
void cp_async_wait() { current_cluster->cp_async_wait(); }
void sync_warp(Site site, unsigned mask) { current_cluster->sync_warp(site, mask); }
int lane() { return int(current_cluster->lane()); }

void* static_shared(const void* declaration, Size bytes) { return current_cluster->static_shared(declaration, bytes); }

void* dynamic_shared() { return current_cluster->dynamic_shared(); }
void fail(const char* reason) { current_cluster->fail(reason); }

}  // namespace emulator
