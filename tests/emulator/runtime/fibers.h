// Fibers: stacks that one OS thread switches between. Every CUDA thread runs on one, so it can
// wait in the middle of a kernel while the other threads of its block run.
#pragma once

#include <cstddef>

#include "sanitizers.h"

namespace emulator {

// A place to switch to: a fiber, or the stack that the OS thread came with.
struct Context {
  void* stack_pointer = nullptr;
#if defined(EMULATOR_ASAN)
  const void* stack_bottom = nullptr;
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;
  Context* came_from = nullptr;
#endif
#if defined(EMULATOR_TSAN)
  void* fiber = nullptr;
#endif

  void of_this_thread();          // before the first switch away from an OS thread's own stack
  static void arrived(Context&);  // what a new fiber does first
};

// Leaves `from`, which is running, for `to`; returns when something switches back to `from`.
void switch_context(Context& from, Context& to);

// A stack on which `entry` starts when it is first switched to. `entry` must never return.
class Fiber {
 public:
  Fiber(void (*entry)(), unsigned number);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  bool overflowed_at(const void* address) const;  // does it lie in the page below the stack?

  Context context;

 private:
  char* memory_;
};

}  // namespace emulator
