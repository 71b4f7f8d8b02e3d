// What a kernel's translation unit and the emulator's runtime know of each other.
//
// The runtime is compiled once; a translation unit like this one is compiled for every
// specialisation of a kernel. So this folder includes no standard header: parsing <cmath> alone
// would triple the time an average kernel takes to compile.
#pragma once

#include "vectors.h"

namespace emulator {

using Size = unsigned long;
using Bits = unsigned long long;

// Where in a kernel's text an operation stands: error messages name it, and threads that should
// do something together must agree on it.
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

// What a running thread asks of the runtime. Barriers and what a warp does together let other
// threads run.
void sync_cluster(Site site);
int barrier(Site site, int predicate);  // for how many threads the predicate was not zero
unsigned ballot(Site site, unsigned mask, int predicate);
Bits shuffle(Site site, unsigned mask, Bits value, int source_lane);
void sync_warp(Site site, unsigned mask);
int lane();

// A copy to shared memory that is under way until the thread awaits it; `word` is what will arrive.
void cp_async_later(Site site, void* shared, const void* word, Size bytes);
void cp_async_wait();

// Shared memory of the block that runs: `declaration` is the address of anything that is unique
// to one __shared__ declaration.
void* static_shared(const void* declaration, Size bytes);
void* dynamic_shared();

// The same place in the shared memory of a block of this cluster.
void* mapa(Site site, void* shared, int rank);

// An mbarrier in shared memory: one thread announces how many bytes will arrive, others wait for them. Values that were
// sent become visible when the last of them has been sent. `word` points at the value for `to`.
void mbarrier_init(Site site, void* barrier);
void mbarrier_expect_tx(Site site, void* barrier, int bytes);
void st_async(Site site, void* to, const void* word, Size bytes, void* barrier);
void mbarrier_wait(Site site, void* barrier, unsigned parity);

[[noreturn]] void fail(const char* reason);

// Runs a grid. `parameters` is what cuLaunchKernel takes: one pointer per kernel argument, here
// always one. Returns 0, or 1 with the reason in `error`.
int launch(
    const Kernel& kernel, const unsigned grid[3], const unsigned block[3], Size shared_bytes, void** parameters,
    char* error, Size error_bytes);

}  // namespace emulator

// Kept in thread-local storage (grids may run on several OS threads) and set whenever a CUDA
// thread starts to run. `__thread` and this model make an access one instruction, not a call.
#define EMULATOR_THREAD_LOCAL extern __thread __attribute__((tls_model("initial-exec")))
EMULATOR_THREAD_LOCAL uint3 threadIdx;
EMULATOR_THREAD_LOCAL uint3 blockIdx;
EMULATOR_THREAD_LOCAL dim3 blockDim;
EMULATOR_THREAD_LOCAL dim3 gridDim;
#undef EMULATOR_THREAD_LOCAL
