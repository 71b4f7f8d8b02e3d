// Fibers: stacks between which one OS thread switches. Every CUDA thread has its own, so it can wait
// in the middle of a kernel while the other threads of its block run.
#pragma once

#include <cstddef>

#include "sanitizers.h"

namespace emulator {

// A switch target: a fiber, or the OS thread's own stack.
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

  void of_this_thread();          // call before the first switch away from an OS thread's own stack
  static void arrived(Context&);  // a new fiber must call this first
};

// Switches from the running `from` to `to`; returns when something switches back to `from`.
void switch_context(Context& from, Context& to);

// A stack on which `entry` starts at the first switch. `entry` must never return.
class Fiber {
 public:
  Fiber(void (*entry)(), unsigned number);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  bool overflowed_at(const void* address) const;  // whether it is in the guard page

  Context context;

 private:
  char* memory_;
};

}  // namespace emulator
