#include "fibers.h"

#include <sys/mman.h>

#include <new>

#if !defined(__x86_64__) || !defined(__linux__)
#error "the emulator switches stacks with x86-64 code for Linux"
#endif

// void emulator_switch_stacks(void** save_stack_pointer, void* new_stack_pointer): pushes the
// registers that a function must preserve, changes stacks, pops what was pushed there, and returns
// to whoever called it there.
asm(R"(
    .text
    .type emulator_switch_stacks, @function
emulator_switch_stacks:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
    .size emulator_switch_stacks, . - emulator_switch_stacks
)");
extern "C" void emulator_switch_stacks(void**, void*);

namespace emulator {
namespace {

constexpr size_t page = 4096;
constexpr size_t saved_registers = 6;
#if defined(EMULATOR_ASAN) || defined(EMULATOR_TSAN)
constexpr size_t stack_bytes = 256 * 1024;  // their frames are larger
#else
constexpr size_t stack_bytes = 64 * 1024;
#endif

}  // namespace

void Context::of_this_thread() {
#if defined(EMULATOR_TSAN)
  fiber = __tsan_get_current_fiber();
#endif
}

void Context::arrived([[maybe_unused]] Context& here) {
#if defined(EMULATOR_ASAN)
  // Also tells where the stack lies that was left: nothing else knows for an OS thread's own.
  Context& left = *here.came_from;
  __sanitizer_finish_switch_fiber(here.fake_stack, &left.stack_bottom, &left.stack_bytes);
#endif
}

void switch_context(Context& from, Context& to) {
#if defined(EMULATOR_ASAN)
  to.came_from = &from;
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack_bottom, to.stack_bytes);
#endif
#if defined(EMULATOR_TSAN)
  __tsan_switch_to_fiber(to.fiber, __tsan_switch_to_fiber_no_sync);
#endif
  emulator_switch_stacks(&from.stack_pointer, to.stack_pointer);
  Context::arrived(from);
}

Fiber::Fiber(void (*entry)(), unsigned number) {
  void* memory =
      mmap(nullptr, page + stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, page, PROT_NONE);
  memory_ = static_cast<char*>(memory);

  // The first switch pops registers and returns into `entry`. Stacks that all started at the same
  // offset in a page would compete for the same few cache lines.
  const size_t stagger = number % 29 * 128;
  void** top = reinterpret_cast<void**>(memory_ + page + stack_bytes - 64 - stagger);
  *top = reinterpret_cast<void*>(entry);
  context.stack_pointer = top - saved_registers;
#if defined(EMULATOR_ASAN)
  context.stack_bottom = memory_ + page;
  context.stack_bytes = stack_bytes;
#endif
#if defined(EMULATOR_TSAN)
  context.fiber = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
#if defined(EMULATOR_TSAN)
  __tsan_destroy_fiber(context.fiber);
#endif
  accessible(memory_ + page, stack_bytes);  // frames of a kernel that failed were never left
  munmap(memory_, page + stack_bytes);
}

bool Fiber::overflowed_at(const void* address) const { return address >= memory_ && address < memory_ + page; }

}  // namespace emulator
