// Bytes that kernels read and write of watched memory.
//
// The compiler puts a call before every access that ThreadSanitizer would look at; here these calls
// are answered by counting. Kernels run on one OS thread meanwhile.
#ifdef EMULATOR_TRAFFIC

#include <vector>

#include "block.h"

namespace {

struct Watched {
  const char* start;
  size_t bytes;
  size_t read, written;
};

std::vector<Watched> watched;

Watched* of(const void* address) {
  for (Watched& memory : watched) {
    if (address >= memory.start && address < memory.start + memory.bytes) return &memory;
  }
  return nullptr;
}

void reads(const void* address, size_t bytes) {
  if (Watched* memory = of(address)) memory->read += bytes;
}

void writes(const void* address, size_t bytes) {
  if (Watched* memory = of(address)) memory->written += bytes;
}

}  // namespace

#define EMULATOR_CALLED extern "C" __attribute__((visibility("default"))) void

EMULATOR_CALLED emulator_watch(const void* start, size_t bytes) {
  watched.push_back({static_cast<const char*>(start), bytes, 0, 0});
}

EMULATOR_CALLED emulator_traffic(size_t index, size_t* read, size_t* written) {
  *read = watched[index].read;
  *written = watched[index].written;
}

EMULATOR_CALLED emulator_watch_nothing() { watched.clear(); }

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
