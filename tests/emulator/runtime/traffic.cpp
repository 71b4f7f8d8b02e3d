// Counts the bytes that kernels read and write, by line of memory.
//
// With -fsanitize=thread the compiler inserts a call before every access; these functions replace
// ThreadSanitizer's and count. They are not thread-safe: kernels must run on one OS thread.
#ifdef EMULATOR_TRAFFIC

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <unordered_map>

#include "block.h"

namespace {

constexpr uintptr_t line_bytes = 64, page_lines = 64;

struct Traffic { size_t read = 0, written = 0; };

struct Page { Traffic lines[page_lines]; };

std::unordered_map<uintptr_t, Page> pages;  // by the number of the page

// Pointers to entries of `pages`, which stay where they are: most accesses are to a recent page.
struct Recent {
  uintptr_t number = 0;  // no access is to page 0
  Page* page = nullptr;
};

constexpr int recent_bits = 12;
Recent recent[1 << recent_bits];

Page& page_of(uintptr_t number) {
  // Fibonacci hashing, because the stacks of threads lie a power of two apart.
  Recent& known = recent[number * 0x9e3779b97f4a7c15u >> (64 - recent_bits)];
  if (known.number != number) known = {number, &pages[number]};
  return *known.page;
}

void count(const void* address, size_t bytes, size_t Traffic::* kind) {
  uintptr_t at = reinterpret_cast<uintptr_t>(address);
  while (bytes > 0) {
    const size_t here = std::min<size_t>(bytes, line_bytes - at % line_bytes);
    const uintptr_t line = at / line_bytes;
    page_of(line / page_lines).lines[line % page_lines].*kind += here;
    at += here;
    bytes -= here;
  }
}

void reads(const void* address, size_t bytes) { count(address, bytes, &Traffic::read); }
void writes(const void* address, size_t bytes) { count(address, bytes, &Traffic::written); }

}  // namespace

#define EMULATOR_CALLED extern "C" __attribute__((visibility("default"))) void

// Sums over the lines of a tensor; it has to begin and end where lines do.
EMULATOR_CALLED emulator_traffic(const void* start, size_t bytes, size_t* read, size_t* written) {
  const uintptr_t first = reinterpret_cast<uintptr_t>(start) / line_bytes;
  Traffic sum;
  for (uintptr_t line = first; line < first + bytes / line_bytes; ++line) {
    const auto found = pages.find(line / page_lines);
    if (found == pages.end()) continue;
    sum.read += found->second.lines[line % page_lines].read;
    sum.written += found->second.lines[line % page_lines].written;
  }
  *read = sum.read;
  *written = sum.written;
}

EMULATOR_CALLED emulator_forget_traffic() {
  pages.clear();
  std::fill(std::begin(recent), std::end(recent), Recent{});
}

#define EMULATOR_COUNTED(bytes)                                                          \
  EMULATOR_CALLED __tsan_read##bytes(void* address) { reads(address, bytes); }           \
  EMULATOR_CALLED __tsan_write##bytes(void* address) { writes(address, bytes); }         \
  EMULATOR_CALLED __tsan_unaligned_read##bytes(void* address) { reads(address, bytes); } \
  EMULATOR_CALLED __tsan_unaligned_write##bytes(void* address) { writes(address, bytes); }
EMULATOR_COUNTED(1)
EMULATOR_COUNTED(2)
EMULATOR_COUNTED(4)
EMULATOR_COUNTED(8)
EMULATOR_COUNTED(16)
#undef EMULATOR_COUNTED

EMULATOR_CALLED __tsan_read_range(void* address, size_t bytes) { reads(address, bytes); }
EMULATOR_CALLED __tsan_write_range(void* address, size_t bytes) { writes(address, bytes); }
EMULATOR_CALLED __tsan_init() {}
EMULATOR_CALLED __tsan_func_entry(void*) {}
EMULATOR_CALLED __tsan_func_exit() {}

#endif
