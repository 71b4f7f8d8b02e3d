// The interface between a kernel's translation unit and the emulator's runtime.
//
// The runtime is compiled once, a kernel's translation unit for every specialisation. So this folder
// includes no standard header: parsing <cmath> alone would triple an average kernel's compile time.
#pragma once

#include "vectors.h"

namespace emulator {

using Size = unsigned long;
using Bits = unsigned long long;

// The source line of an operation. Error messages name it, and threads that meet in a collective
// operation must have the same one.
struct Site {
  const char* operation;
  const char* file;
  int line;
};

struct Kernel {
  const char* name;
  Size argument_bytes;
  unsigned most_threads;  // __launch_bounds__, or CUDA's limit
  dim3 cluster;           // __cluster_dims__, or one block
  void (*call)(const void* arguments);
};

// Calls of a running thread into the runtime. Barriers and warp operations switch to other threads.
void sync_cluster(Site site);
int barrier(Site site, int predicate);  // returns the number of threads with a predicate that is not zero
unsigned ballot(Site site, unsigned mask, int predicate);
Bits shuffle(Site site, unsigned mask, Bits value, int source_lane);
void sync_warp(Site site, unsigned mask);
int lane();

// Starts a copy of `word` to shared memory. It arrives when the thread calls cp_async_wait.
void cp_async_later(Site site, void* shared, const void* word, Size bytes);
void cp_async_wait();

// Shared memory of the running block. `declaration` is an address unique to one __shared__
// declaration.
void* static_shared(const void* declaration, Size bytes);
void* dynamic_shared();

// The address of `shared` in the shared memory of another block of the cluster.
void* mapa(Site site, void* shared, int rank);

// An mbarrier in shared memory: one thread calls expect_tx with the number of bytes, others wait for them. The values
// of a phase become visible together, when a thread waits for it. `word` points at the value for `to`.
void mbarrier_init(Site site, void* barrier);
void mbarrier_expect_tx(Site site, void* barrier, int bytes);
void st_async(Site site, void* to, const void* word, Size bytes, void* barrier);
void mbarrier_wait(Site site, void* barrier, unsigned parity);

// Starts one piece of a bulk copy to the block's own shared memory, counted by its `barrier`.
void cp_async_bulk_later(Site site, void* shared, const void* word, Size bytes, void* barrier);

[[noreturn]] void fail(const char* reason);

// Runs a grid. `parameters` is as for cuLaunchKernel: one pointer per kernel argument, here always
// one. Returns 0, or 1 with the reason in `error`.
int launch(
    const Kernel& kernel, const unsigned grid[3], const unsigned block[3], Size shared_bytes, void** parameters,
    char* error, Size error_bytes);

}  // namespace emulator

// Thread-local, because a grid may run on several OS threads; set whenever a CUDA thread resumes.
// `__thread` and this model make an access one instruction, not a call.
#define EMULATOR_THREAD_LOCAL extern __thread __attribute__((tls_model("initial-exec")))
EMULATOR_THREAD_LOCAL uint3 threadIdx;
EMULATOR_THREAD_LOCAL uint3 blockIdx;
EMULATOR_THREAD_LOCAL dim3 blockDim;
EMULATOR_THREAD_LOCAL dim3 gridDim;
#undef EMULATOR_THREAD_LOCAL
