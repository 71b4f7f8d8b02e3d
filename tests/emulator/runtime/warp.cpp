// What the lanes of a warp do together: shuffles, votes, __syncwarp.
#include "cluster.h"

namespace emulator {

Bits Cluster::warp_operation(Site site, WarpOperation operation) {
  Thread& thread = threads_[running_];
  Warp& warp = warp_of(running_);
  operation.mask &= warp.lanes;  // lanes that a partial warp lacks need not be left out
  const unsigned mask = operation.mask;
  thread.state = Thread::State::in_warp_operation;
  thread.site = site;
  thread.operation = operation;
  if (!contains(mask, lane())) {
    fail("the calling lane is not in its own mask at " + place(site));
  }
  if (warp.returned & mask) {
    fail("the mask names lanes that returned from the kernel, at " + place(site) + whereabouts());
  }
  warp.waiting |= 1u << lane();
  if ((warp.waiting & mask) == mask) {
    const unsigned first = running_ - lane();
    check_lanes(first, mask);
    complete_operation(first, mask);
    warp.waiting &= ~mask;
    wake(first, mask);
  }
  resume_next();
  return thread.operation.result;
}

void Cluster::check_lanes(unsigned first, unsigned mask) {
  const Thread& last = threads_[running_];
  for (unsigned i = 0; i < warp_lanes; ++i) {
    if (!contains(mask, i)) continue;
    const Thread& thread = threads_[first + i];
    if (thread.operation.mask != mask || !same(thread.site, last.site)) {
      fail("divergent warp: lanes of one mask are in different warp operations" + whereabouts());
    }
    const int source = thread.operation.source_lane;
    if (thread.operation.kind == WarpOperation::Kind::shuffle && (source < 0 || !contains(mask, unsigned(source)))) {
      fail(
          "lane " + std::to_string(i) + " reads lane " + std::to_string(source) + ", which does not take part, at " +
          place(last.site));
    }
  }
}

void Cluster::complete_operation(unsigned first, unsigned mask) {
  unsigned ballot = 0;
  for (unsigned i = 0; i < warp_lanes; ++i) {
    if (contains(mask, i) && threads_[first + i].operation.value) ballot |= 1u << i;
  }
  for (unsigned i = 0; i < warp_lanes; ++i) {
    if (!contains(mask, i)) continue;
    WarpOperation& operation = threads_[first + i].operation;
    operation.result = operation.kind == WarpOperation::Kind::ballot
                           ? ballot
                           : threads_[first + unsigned(operation.source_lane)].operation.value;
  }
}

// A shuffle or a vote exchanges values but promises nothing about memory; this promises that.
void Cluster::sync_warp(Site site, unsigned mask) {
  Warp& warp = warp_of(running_);
  const unsigned group = mask & warp.lanes ? unsigned(__builtin_ctz(mask & warp.lanes)) : 0;
  const unsigned sync = warp.syncs[group];
  Moment& synced = warp.synced[group][sync % 2];
  synced.reached();
  warp_operation(site, {WarpOperation::Kind::ballot, mask, 0, 0, 0});
  warp.syncs[group] = sync + 1;
  synced.after();
}

}  // namespace emulator
