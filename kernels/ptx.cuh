// Instructions that CUDA C++ has no functions for. Compiled for a CPU, the emulator's stand in (tests/emulator/device).
#pragma once

#define DEVICE __device__ __forceinline__

#ifdef CUDA_ON_CPU
namespace ptx = emulator;
#else
namespace ptx {

// --- conversions, to nearest even; halves are bits ----------------------------------------------
DEVICE float from_f16(unsigned short x) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x));
  return wide;
}
DEVICE unsigned short to_f16(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
DEVICE unsigned short to_bf16(float x) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
// Two numbers with one instruction, so their halves need not be packed afterwards.
DEVICE unsigned to_f16_pair(float low, float high) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
DEVICE unsigned to_bf16_pair(float low, float high) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// --- memory -------------------------------------------------------------------------------------
DEVICE unsigned shared_address(const void* shared) { return static_cast<unsigned>(__cvta_generic_to_shared(shared)); }
// Starts a copy of a Word of 4, 8 or 16 bytes from global to shared memory, of zeros if `valid` is false. The copy is
// complete, for this thread only, after `cp_async_wait`.
template <class Word> DEVICE void cp_async(void* shared, const void* from, bool valid) {
  const unsigned bytes = valid ? sizeof(Word) : 0;
  if constexpr (sizeof(Word) == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(from), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)), "l"(from),
                 "n"(sizeof(Word)), "r"(bytes)
                 : "memory");
  }
}
DEVICE void cp_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
DEVICE void prefetch_l2(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// Stores a word to global memory with one instruction. The compiler may split an assignment of a vector into stores of
// four bytes, which are sixteen bytes apart in neighbouring lanes: four times the transactions.
template <class Word> DEVICE void store_whole(Word* to, Word x) {
  if constexpr (sizeof(Word) == 8) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(x.x), "r"(x.y) : "memory");
  } else if constexpr (sizeof(Word) == 16) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
  } else {
    *to = x;
  }
}

// --- clusters, mbarriers and bulk copies (sm_90 and newer) --------------------------------------
DEVICE void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
// The address of the same variable in another block of the cluster.
DEVICE unsigned mapa(const void* shared, int block) {
  unsigned address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(shared)), "r"(block));
  return address;
}
DEVICE void mbarrier_init(void* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}
DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void mbarrier_expect_tx(void* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
DEVICE void st_async(float* shared, void* barrier, int block, float x) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(mapa(shared, block)),
      "f"(x), "r"(mapa(barrier, block))
      : "memory");
}
DEVICE void st_async(double* shared, void* barrier, int block, double x) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f64 [%0], %1, [%2];" ::"r"(mapa(shared, block)),
      "d"(x), "r"(mapa(barrier, block))
      : "memory");
}
// The wait orders the block's own shared memory only. Cluster scope would also invalidate the first-level cache, which
// holds the parameters.
DEVICE void mbarrier_wait(void* barrier, unsigned parity) {
  unsigned arrived;
  do {
    asm volatile(
        "{\n"
        ".reg .pred arrived;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 arrived, [%1], %2;\n"
        "selp.u32 %0, 1, 0, arrived;\n"
        "}"
        : "=r"(arrived)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (!arrived);
}
// Starts a copy of neighbouring bytes, a multiple of 16, from global to shared memory. It is complete, for every thread
// that waits for `barrier`, when its bytes have been counted there.
DEVICE void cp_async_bulk(void* shared, const void* from, int bytes, void* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

}  // namespace ptx
#endif
