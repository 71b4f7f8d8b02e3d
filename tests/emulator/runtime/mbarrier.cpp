// Distributed shared memory (mapa, st.async), bulk copies, and the mbarriers that count the bytes of both.
#include "cluster.h"

namespace emulator {

void* Cluster::mapa(Site site, void* shared, int rank) {
  if (rank < 0 || size_t(rank) >= blocks_.size()) {
    fail("the cluster has no block " + std::to_string(rank) + ", at " + describe(site));
  }
  Block& to = blocks_[size_t(rank)];
  if (!to.begun || !to.barrier->live) {
    fail(
        "block " + std::to_string(rank) + " of the cluster " +
        (to.begun ? "has returned from the kernel" : "has not begun") + ", at " + describe(site));
  }
  void* const address = to.counterpart(block(), shared);
  if (!address) fail("no shared memory that both blocks have, at " + describe(site));
  return address;
}

void Cluster::mbarrier_init(Site site, void* address) {
  Unwatched unwatched;
  if (!block().counterpart(block(), address)) fail("no place in shared memory, at " + describe(site));
  if (!block().mbarriers.try_emplace(address).second) fail("this mbarrier was initialised twice, at " + describe(site));
}

MBarrier& Cluster::mbarrier_at(Site site, const void* address) {
  for (Block& block : blocks_) {
    const auto found = block.mbarriers.find(address);
    if (found != block.mbarriers.end()) return found->second;
  }
  fail("this mbarrier was not initialised, at " + describe(site));
}

void Cluster::mbarrier_expect_tx(Site site, void* address, int bytes) {
  MBarrier& barrier = mbarrier_at(site, address);
  if (barrier.is_complete()) complete_phase(barrier);
  if (std::exchange(barrier.announced, true)) fail("announced twice, at " + describe(site));
  barrier.bytes += bytes;
  barrier.arrived[barrier.phase % 2].reached();
  if (barrier.is_complete() && barrier.waiting) complete_phase(barrier);
}

void Cluster::send(const Copy& copy, void* address) {
  Unwatched unwatched;
  MBarrier& barrier = mbarrier_at(copy.site, address);
  if (barrier.is_complete()) complete_phase(barrier);
  barrier.sent.push_back(copy);
  barrier.bytes -= long(copy.bytes);
  barrier.arrived[barrier.phase % 2].reached();
  if (barrier.is_complete() && barrier.waiting) complete_phase(barrier);
}

void Cluster::cp_async_bulk(const Copy& copy, void* address) {
  for (const void* own : {copy.to, address}) {
    if (!block().counterpart(block(), own)) fail("no place in the block's shared memory, at " + describe(copy.site));
  }
  send(copy, address);
}

void Cluster::complete_phase(MBarrier& barrier) {
  Unwatched unwatched;
  for (const Copy& copy : barrier.sent) copy.arrive();
  barrier.sent.clear();
  barrier.announced = barrier.waiting = false;
  ++barrier.phase;
  for (unsigned i = 0; i < threads_.size(); ++i) {
    const Thread& thread = threads_[i];
    const bool waits = thread.state == Thread::State::awaiting_mbarrier;
    if (waits && thread.awaited == &barrier) woken_.push_back(i);
  }
  enqueue_woken();
}

void Cluster::mbarrier_wait(Site site, void* address, unsigned parity) {
  MBarrier& barrier = mbarrier_at(site, address);
  const unsigned awaited = parity % 2;
  if (barrier.phase % 2 == awaited && barrier.is_complete()) complete_phase(barrier);
  if (barrier.phase % 2 == awaited) {
    barrier.waiting = true;
    threads_[running_].state = Thread::State::awaiting_mbarrier;
    threads_[running_].site = site;
    threads_[running_].awaited = &barrier;
    resume_next();
  }
  barrier.arrived[1 - barrier.phase % 2].after();
}

// The functions that kernels call.

void mbarrier_init(Site site, void* barrier) { Cluster::current()->mbarrier_init(site, barrier); }
void mbarrier_expect_tx(Site site, void* barrier, int bytes) {
  Cluster::current()->mbarrier_expect_tx(site, barrier, bytes);
}
void st_async(Site site, void* to, const void* word, Size bytes, void* barrier) {
  Copy copy{site, to, bytes, {}};
  memcpy(copy.word, word, bytes);
  Cluster::current()->send(copy, barrier);
}
void cp_async_bulk_later(Site site, void* shared, const void* word, Size bytes, void* barrier) {
  Copy copy{site, shared, bytes, {}};
  memcpy(copy.word, word, bytes);
  Cluster::current()->cp_async_bulk(copy, barrier);
}
void mbarrier_wait(Site site, void* barrier, unsigned parity) {
  Cluster::current()->mbarrier_wait(site, barrier, parity);
}
void* mapa(Site site, void* shared, int rank) { return Cluster::current()->mapa(site, shared, rank); }

}  // namespace emulator
