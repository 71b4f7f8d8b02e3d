// Calls that AddressSanitizer and ThreadSanitizer need from a program that switches stacks itself.
//
// The runtime is never instrumented: fibers share its state without locks, because only one runs at a
// time, and that is no race between CUDA threads. Without a sanitizer all of this is empty.
#pragma once

#include <cstddef>

#if defined(EMULATOR_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(EMULATOR_TSAN)
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace emulator {

#if defined(EMULATOR_ASAN)
constexpr bool asan = true;
inline void accessible(void* memory, size_t bytes) { __asan_unpoison_memory_region(memory, bytes); }
#else
constexpr bool asan = false;
inline void accessible(void*, size_t) {}
#endif

#if defined(EMULATOR_TSAN)
constexpr bool tsan = true;
#else
constexpr bool tsan = false;
#endif

// A happens-before edge: everything before `reached` in one thread is ordered before everything after
// `after` in another. ThreadSanitizer reports accesses that no such pair, and no atomic, orders.
class alignas(8) Moment {
 public:
#if defined(EMULATOR_TSAN)
  void reached() { __tsan_release(this); }
  void after() { __tsan_acquire(this); }
#else
  void reached() {}
  void after() {}
#endif
 private:
  char address_[8] = {};
};

// During its lifetime ThreadSanitizer ignores this thread's accesses, and newly mapped memory has no
// history of accesses.
class Unwatched {
 public:
#if defined(EMULATOR_TSAN)
  Unwatched() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Unwatched() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
#else
  Unwatched() {}  // not defaulted: a variable of a trivial type would cause a warning
#endif
  Unwatched(const Unwatched&) = delete;
  Unwatched& operator=(const Unwatched&) = delete;
};

}  // namespace emulator
