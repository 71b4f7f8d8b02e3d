// What blocks of a cluster do with each other's shared memory, and the counts of what arrives there.
#include "cluster.h"

namespace emulator {

void* Cluster::in_block(Site site, void* shared, int rank) {
  if (rank < 0 || size_t(rank) >= blocks_.size()) {
    fail("the cluster has no block " + std::to_string(rank) + ", at " + place(site));
  }
  Block& to = blocks_[size_t(rank)];
  if (!to.begun || !to.barrier->live) {
    fail("block " + std::to_string(rank) + " of the cluster " +
         (to.begun ? "has returned from the kernel" : "has not begun") + ", at " + place(site));
  }
  void* const address = to.counterpart(block(), shared);
  if (!address) fail("no shared memory that both blocks have, at " + place(site));
  return address;
}

void Cluster::prepare_arrivals(Site site, void* address) {
  Unwatched unwatched;
  if (!block().counterpart(block(), address)) fail("no place in shared memory, at " + place(site));
  if (!block().arrivals.try_emplace(address).second) fail("it is ready already, at " + place(site));
}

Arrivals& Cluster::arrivals_at(Site site, const void* address) {
  for (Block& block : blocks_) {
    const auto found = block.arrivals.find(address);
    if (found != block.arrivals.end()) return found->second;
  }
  fail("nobody has made these arrivals ready, at " + place(site));
}

void Cluster::expect_arrivals(Site site, void* address, int bytes) {
  Arrivals& arrivals = arrivals_at(site, address);
  if (std::exchange(arrivals.announced, true)) fail("announced twice, at " + place(site));
  arrivals.bytes += bytes;
  arrivals.arrived[arrivals.times % 2].reached();
  if (arrivals.is_all_there()) arrive(arrivals);
}

void Cluster::send(const Copy& copy, void* address) {
  Unwatched unwatched;
  Arrivals& arrivals = arrivals_at(copy.site, address);
  arrivals.sent.push_back(copy);
  arrivals.bytes -= long(copy.bytes);
  arrivals.arrived[arrivals.times % 2].reached();
  if (arrivals.is_all_there()) arrive(arrivals);
}

void Cluster::arrive(Arrivals& arrivals) {
  Unwatched unwatched;
  for (const Copy& copy : arrivals.sent) copy.arrive();
  arrivals.sent.clear();
  arrivals.announced = false;
  ++arrivals.times;
  for (unsigned i = 0; i < threads_.size(); ++i) {
    const Thread& thread = threads_[i];
    const bool waits = thread.state == Thread::State::awaiting_arrivals;
    if (waits && thread.awaited == &arrivals) woken_.push_back(i);
  }
  enqueue_woken();
}

void Cluster::await_arrivals(Site site, void* address, unsigned parity) {
  Arrivals& arrivals = arrivals_at(site, address);
  if (arrivals.times % 2 == parity % 2) {
    threads_[running_].state = Thread::State::awaiting_arrivals;
    threads_[running_].site = site;
    threads_[running_].awaited = &arrivals;
    resume_next();
  }
  arrivals.arrived[1 - arrivals.times % 2].after();
}

// The functions that kernels call.

void prepare_arrivals(Site site, void* arrivals) { Cluster::current()->prepare_arrivals(site, arrivals); }
void expect_arrivals(Site site, void* arrivals, int bytes) {
  Cluster::current()->expect_arrivals(site, arrivals, bytes);
}
void send(Site site, void* to, const void* word, Size bytes, void* arrivals) {
  Copy copy{site, to, bytes, {}};
  memcpy(copy.word, word, bytes);
  Cluster::current()->send(copy, arrivals);
}
void await_arrivals(Site site, void* arrivals, unsigned parity) {
  Cluster::current()->await_arrivals(site, arrivals, parity);
}
void* in_block(Site site, void* shared, int rank) { return Cluster::current()->in_block(site, shared, rank); }

}  // namespace emulator
