// Memory for one array in shared memory, laid out to catch a kernel that leaves it.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>

#include "sanitizers.h"

namespace emulator {

// Aligned to 16 bytes. Under AddressSanitizer it lies on the heap, which is watched to the byte on
// both sides; otherwise a page that faults follows it, after at most 15 bytes.
class SharedArray {
 public:
  explicit SharedArray(size_t bytes) : bytes_(bytes) {
    Unwatched unwatched;
    if (asan) {
      void* memory;
      if (posix_memalign(&memory, 16, bytes)) throw std::bad_alloc();
      memory_ = start_ = static_cast<char*>(memory);
    } else {
      memory_ = map(nullptr, body() + page, 0);
      mprotect(memory_ + body(), page, PROT_NONE);
      start_ = memory_ + body() - (bytes + 15) / 16 * 16;
    }
    poison();
  }

  ~SharedArray() {
    if (asan) {
      free(memory_);
    } else {
      munmap(memory_, body() + page);
    }
  }

  SharedArray(const SharedArray&) = delete;
  SharedArray& operator=(const SharedArray&) = delete;

  // A GPU's shared memory holds what the last block left there. Bytes of 0xFF are NaN in every
  // floating-point type and -1 in integers: what is used unwritten shows in the result.
  void poison() {
    Unwatched unwatched;
    // To ThreadSanitizer the next block's array is another one: the two blocks may run at once.
    if (tsan && bytes_) map(memory_, body(), MAP_FIXED);
    memset(start_, 0xFF, bytes_);
  }

  char* start() const { return start_; }
  size_t bytes() const { return bytes_; }
  bool overrun_at(const void* address) const {
    return !asan && address >= memory_ + body() && address < memory_ + body() + page;
  }

 private:
  static constexpr size_t page = 4096;

  size_t body() const { return (bytes_ + page - 1) / page * page; }

  static char* map(char* address, size_t bytes, int flags) {
    void* memory = mmap(address, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    return static_cast<char*>(memory);
  }

  const size_t bytes_;
  char* memory_;
  char* start_;
};

}  // namespace emulator
