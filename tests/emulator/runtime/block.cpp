#include "block.h"

#include <cstdlib>
#include <cstring>
#include <utility>

__thread uint3 threadIdx;
__thread uint3 blockIdx;
__thread dim3 blockDim;
__thread dim3 gridDim;

namespace emulator {
namespace {

thread_local Block* current_block = nullptr;

}  // namespace

std::string place(Site site) {
  return std::string(site.operation) + " (" + site.file + ":" + std::to_string(site.line) + ")";
}

// The compiler keeps equal literals of a translation unit once.
bool same(Site a, Site b) {
  return a.line == b.line && a.operation == b.operation && a.file == b.file;
}

Block* Block::current() { return current_block; }

void Block::start_grid(const Grid& grid, const Order& order) {
  grid_ = &grid;
  order_ = order;
  blockDim = grid.threads;
  gridDim = grid.blocks;
  const dim3 size = grid.threads;
  const unsigned count = size.x * size.y * size.z;
  threads_.assign(count, Thread{});
  for (unsigned i = 0; i < count; ++i) {
    threads_[i].index = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
  }
  while (fibers_.size() < count * fiber_sets) {
    fibers_.push_back(std::make_unique<Fiber>(thread_main, unsigned(fibers_.size())));
  }
  dynamic_ = std::make_unique<SharedArray>(grid.shared_bytes);
  blocks_run_ = 0;
  error_.clear();
  current_block = this;
  launcher_.of_this_thread();
  grid_started_.reached();
}

void Block::end_grid() {
  thread_ended_.after();
  current_block = nullptr;
  statics_.clear();
  static_bytes_ = 0;
  if (!error_.empty()) fibers_.clear();  // they are somewhere inside the kernel
}

std::string Block::run(uint3 block) {
  blockIdx = block;
  if (blocks_run_) {
    dynamic_->poison();
    for (auto& entry : statics_) entry.second.poison();
  }
  const unsigned count = unsigned(threads_.size());
  for (unsigned i = 0; i < count; ++i) {
    threads_[i].fiber = fibers_[blocks_run_ % fiber_sets * count + i].get();
  }
  ++blocks_run_;
  live_ = count;
  barrier_ = std::make_unique<Barrier>();
  warps_ = std::vector<Warp>((count + warp_lanes - 1) / warp_lanes);
  for (unsigned i = 0; i < count; ++i) warps_[i / warp_lanes].lanes |= 1u << i % warp_lanes;
  ready_.reset(count);
  woken_.reserve(count);
  wake_all();
  resume_next();
  if (running_ == nobody) return "";
  running_ = nobody;
  thread_ended_.after();  // the thread that failed wrote the error
  return error_;
}

// What every fiber runs: one turn of the loop for each thread of a block.
void Block::thread_main() {
  Block& block = *current_block;
  Context::arrived(block.threads_[block.running_].fiber->context);
  for (;;) {
    block.grid_started_.after();
    block.grid_->kernel->call(block.grid_->arguments);
    block.thread_ended_.reached();
    block.thread_returned();
  }
}

void Block::thread_returned() {
  const std::vector<Copy>& copies = threads_[running_].copies;
  if (!copies.empty()) fail("returned before awaiting the copy of " + place(copies[0].site));
  threads_[running_].state = Thread::State::returned;
  warps_[running_ / warp_lanes].returned |= 1u << lane();
  --live_;
  if (live_ && barrier_->waiting == live_) {
    fail("divergent barrier: threads returned from the kernel while others wait" + whereabouts());
  }
  resume_next();
}

void Block::copy_later(Site site, void* shared, const void* word, Size bytes) {
  const char* const to = static_cast<char*>(shared);
  if (to < dynamic_->start() || to + bytes > dynamic_->start() + dynamic_->bytes()) {
    fail("the copy goes past dynamic shared memory, at " + place(site));
  }
  Unwatched unwatched;
  Copy& copy = threads_[running_].copies.emplace_back(Copy{site, shared, bytes, {}});
  memcpy(copy.word, word, bytes);
}

void Block::await_copies() {
  Unwatched unwatched;
  std::vector<Copy>& copies = threads_[running_].copies;
  for (const Copy& copy : copies) memcpy(copy.to, copy.word, copy.bytes);
  copies.clear();
}

int Block::barrier(Site site, int predicate) {
  // Two moments suffice: no thread passes the next barrier before all have passed this one.
  Moment& opened = barrier_->opened[barrier_->openings % 2];
  opened.reached();
  threads_[running_].state = Thread::State::at_barrier;
  threads_[running_].site = site;
  barrier_->predicates += predicate != 0;
  if (++barrier_->waiting == live_) open_barrier();
  resume_next();
  opened.after();
  return barrier_->counted;
}

void Block::open_barrier() {
  const Site site = threads_[running_].site;
  for (const Thread& thread : threads_) {
    if (thread.state != Thread::State::at_barrier || !same(thread.site, site)) {
      fail("divergent barrier: not all threads of the block reached the same " +
           std::string(site.operation) + whereabouts());
    }
  }
  barrier_->counted = std::exchange(barrier_->predicates, 0);
  barrier_->waiting = 0;
  ++barrier_->openings;
  wake_all();
}

void Block::wake(unsigned first, unsigned mask) {
  for (unsigned i = 0; i < warp_lanes; ++i) {
    if (contains(mask, i)) woken_.push_back(first + i);
  }
  enqueue_woken();
}

void Block::wake_all() {
  for (unsigned i = 0; i < threads_.size(); ++i) woken_.push_back(i);
  enqueue_woken();
}

void Block::enqueue_woken() {
  order_.arrange(woken_);
  for (unsigned i : woken_) threads_[i].state = Thread::State::ready;
  if (order_.newest_first()) {
    for (size_t i = woken_.size(); i-- > 0;) ready_.push_front(woken_[i]);
  } else {
    for (unsigned i : woken_) ready_.push_back(i);
  }
  woken_.clear();
}

// Leaves the running thread, which has just begun to wait or returned, for one that can run.
void Block::resume_next() {
  if (!ready_.empty()) {
    resume(ready_.pop_front());
  } else if (live_) {
    fail("deadlock: no thread of the block can go on" + whereabouts());
  } else {
    resume(nobody);
  }
}

void Block::resume(unsigned next) {
  const unsigned last = std::exchange(running_, next);
  if (next == last) return;
  if (next != nobody) threadIdx = threads_[next].index;
  switch_context(last == nobody ? launcher_ : threads_[last].fiber->context,
                 next == nobody ? launcher_ : threads_[next].fiber->context);
}

void Block::fail(const std::string& reason) {
  const auto text = [](uint3 index) {
    return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " +
           std::to_string(index.z) + ")";
  };
  error_ = std::string(grid_->kernel->name) + ", block " + text(blockIdx) + ", thread " +
           text(threadIdx) + ": " + reason;
  thread_ended_.reached();
  // running_ stays as it is: it tells run() that the block did not end.
  switch_context(threads_[running_].fiber->context, launcher_);
  abort();  // nothing resumes a thread that failed
}

std::string Thread::whereabouts() const {
  if (state == State::returned) return "returned from the kernel";
  if (state == State::ready) return "can run";
  return "waiting at " + place(site);
}

// Which threads are where, one line for each place.
std::string Block::whereabouts() const {
  constexpr size_t named = 6;
  std::map<std::string, std::vector<unsigned>> places;
  for (unsigned i = 0; i < threads_.size(); ++i) places[threads_[i].whereabouts()].push_back(i);
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

void* Block::static_shared(const void* declaration, size_t bytes) {
  auto found = statics_.find(declaration);
  if (found == statics_.end()) {
    static_bytes_ += bytes;
    if (static_bytes_ > most_static_shared_bytes) {
      fail("more than 48 KiB of shared memory declared with a size");
    }
    if (static_bytes_ + dynamic_->bytes() > most_shared_bytes) {
      fail("more than 227 KiB of shared memory");
    }
    Unwatched unwatched;
    found = statics_.try_emplace(declaration, bytes).first;
  }
  return found->second.start();
}

std::string Block::explain_fault(const void* address) const {
  if (threads_[running_].fiber->overflowed_at(address)) return "stack overflow";
  bool shared = dynamic_->overrun_at(address);
  for (const auto& entry : statics_) shared |= entry.second.overrun_at(address);
  if (shared) return "access past the end of shared memory";
  char text[64];
  snprintf(text, sizeof text, "illegal memory access at %p", address);
  return text;
}

// The functions that kernels call.

int barrier(Site site, int predicate) { return current_block->barrier(site, predicate); }

unsigned ballot(Site site, unsigned mask, int predicate) {
  const Bits vote = predicate != 0;
  return unsigned(current_block->warp_operation(
      site, {WarpOperation::Kind::ballot, mask, vote, 0, 0}));
}

Bits shuffle(Site site, unsigned mask, Bits value, int source_lane) {
  return current_block->warp_operation(
      site, {WarpOperation::Kind::shuffle, mask, value, source_lane, 0});
}

void copy_later(Site site, void* shared, const void* word, Size bytes) {
  current_block->copy_later(site, shared, word, bytes);
}
void await_copies() { current_block->await_copies(); }
void sync_warp(Site site, unsigned mask) { current_block->sync_warp(site, mask); }
int lane() { return int(current_block->lane()); }

void* static_shared(const void* declaration, Size bytes) {
  return current_block->static_shared(declaration, bytes);
}

void* dynamic_shared() { return current_block->dynamic_shared(); }
void fail(const char* reason) { current_block->fail(reason); }

}  // namespace emulator
