// Stands before a kernel's text and makes it C++17. source.py writes the rest of the translation
// unit: the specialisation's macros, the text with its __shared__ declarations rewritten, and one
// EMULATOR_EXPORT for each kernel.
#pragma once

#define CUDA_ON_CPU 1

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ A_SHARED_DECLARATION_THAT_THE_EMULATOR_DOES_NOT_UNDERSTAND

#include "intrinsics.h"
#include "runtime.h"
#include "synchronization.h"
#include "vectors.h"

static constexpr int warpSize = 32;

namespace emulator {

// The array of one __shared__ declaration. `Declaration` is the type of a lambda written there: a
// type of its own for every declaration in every instance of a template, as the arrays are.
template <class Array, class Declaration>
Array& shared_array(Declaration) {
  static_assert(alignof(Array) <= 16, "CUDA aligns shared memory to 16 bytes");
  static char declaration;
  return *static_cast<Array*>(static_shared(&declaration, sizeof(Array)));
}

// Axes that __cluster_dims__ leaves out are one block long.
constexpr dim3 cluster_of(dim3 dims) { return {dims.x ? dims.x : 1, dims.y ? dims.y : 1, dims.z ? dims.z : 1}; }

template <class>
struct ArgumentOf;
template <class Argument>
struct ArgumentOf<void(Argument)> {
  using Type = Argument;
};

template <class Signature, Signature* kernel>
void call(const void* arguments) {
  kernel(*static_cast<const typename ArgumentOf<Signature>::Type*>(arguments));
}

}  // namespace emulator

#define EMULATOR_FIRST(FIRST, ...) FIRST  // of what __launch_bounds__ lists
#define EMULATOR_EXPORTED extern "C" __attribute__((visibility("default")))
// Of the words before a kernel's name, which __cluster_dims__ may be behind, the blocks of a cluster. By then
// source.py has made it a name for its arguments.
#define EMULATOR_CLUSTER(...) emulator::cluster_of(dim3{__VA_ARGS__})
#define EMULATOR_EXPORT(NAME, MOST_THREADS, CLUSTER_SIZE)                                                          \
  EMULATOR_EXPORTED unsigned long ddl_emulated_##NAME##_argument_bytes() {                                         \
    return sizeof(emulator::ArgumentOf<decltype(NAME)>::Type);                                                     \
  }                                                                                                                \
  EMULATOR_EXPORTED int ddl_emulated_##NAME(                                                                       \
      const unsigned grid[3], const unsigned block[3], unsigned long shared_bytes, void** parameters, char* error, \
      unsigned long error_bytes) {                                                                                 \
    const emulator::Kernel kernel{                                                                                 \
        #NAME, ddl_emulated_##NAME##_argument_bytes(), MOST_THREADS, CLUSTER_SIZE,                                 \
        emulator::call<decltype(NAME), NAME>};                                                                     \
    return emulator::launch(kernel, grid, block, shared_bytes, parameters, error, error_bytes);                    \
  }
