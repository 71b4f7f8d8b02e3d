// What -fsanitize=undefined calls when a kernel does something undefined. The compiler's own
// library would print a message and end the process; here it is an error of the launch.
#include <cstdint>
#include <string>

#include "cluster.h"

namespace {

// How the data of every check begins.
struct SourceLocation {
  const char* file;
  uint32_t line;
  uint32_t column;
};

struct TypeMismatch {
  SourceLocation location;
  const void* type;
  unsigned char log2_alignment;
  unsigned char check;
};

[[noreturn]] void fail(const SourceLocation& location, const std::string& what) {
  emulator::Cluster::current()->fail(what + " (" + location.file + ":" + std::to_string(location.line) + ")");
}

}  // namespace

// Handlers take the check's data first, then what the check saw.
#define EMULATOR_UNDEFINED(check) extern "C" [[noreturn]] void __ubsan_handle_##check##_abort

EMULATOR_UNDEFINED(type_mismatch_v1)(TypeMismatch* data, uintptr_t address) {
  const uintptr_t alignment = uintptr_t(1) << data->log2_alignment;
  if (address == 0) fail(data->location, "access through a null pointer");
  fail(data->location, "misaligned access: the address must be a multiple of " + std::to_string(alignment));
}

EMULATOR_UNDEFINED(out_of_bounds)(SourceLocation* data, intptr_t index) {
  fail(*data, "index " + std::to_string(index) + " outside of its array");
}

EMULATOR_UNDEFINED(shift_out_of_bounds)(SourceLocation* data, uintptr_t, uintptr_t) {
  fail(*data, "shift of a negative number, or by a negative number or too many bits");
}

EMULATOR_UNDEFINED(divrem_overflow)(SourceLocation* data, uintptr_t, uintptr_t) {
  fail(*data, "integer division by zero, or with a result that overflows");
}

EMULATOR_UNDEFINED(pointer_overflow)(SourceLocation* data, uintptr_t, uintptr_t) {
  fail(*data, "pointer arithmetic overflows");
}

EMULATOR_UNDEFINED(load_invalid_value)(SourceLocation* data, uintptr_t) {
  fail(*data, "a bool that is neither true nor false");
}

EMULATOR_UNDEFINED(add_overflow)(SourceLocation* data, uintptr_t, uintptr_t) { fail(*data, "signed integer overflow"); }

EMULATOR_UNDEFINED(sub_overflow)(SourceLocation* data, uintptr_t, uintptr_t) { fail(*data, "signed integer overflow"); }

EMULATOR_UNDEFINED(mul_overflow)(SourceLocation* data, uintptr_t, uintptr_t) { fail(*data, "signed integer overflow"); }

EMULATOR_UNDEFINED(negate_overflow)(SourceLocation* data, uintptr_t) { fail(*data, "signed integer overflow"); }
