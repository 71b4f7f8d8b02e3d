// Shared by all kernels: storage types, arithmetic, and packets (vectors of neighbouring elements).
//
// No CUDA header is included, so NVRTC compiles everything here without a toolkit's include folder. Macros fix a
// kernel's sizes, types and parts at compile time; README.md lists them. Arithmetic is in `Real`: float, or double if
// the state is float64.
#pragma once

#include "ptx.cuh"

using Real = REAL;

// Values of READ: how the read compresses X. These are macros because #if tests them.
#define NONE 0
#define IDENTITY 1
#define CHANNEL 2
#define TOKEN 3

// Values of WINDOW and SUMS: the memory in which they are kept from token to token.
#define IN_REGISTERS 0
#define IN_SHARED 1
#define IN_GLOBAL 2
#define SEPARATE_KERNEL 3  // SUMS only: parameters_bwd adds them

struct bf16 { unsigned short bits; };
struct f16 { unsigned short bits; };

// --- storage types ------------------------------------------------------------------------------

DEVICE Real widen(float x) { return static_cast<Real>(x); }
DEVICE Real widen(double x) { return static_cast<Real>(x); }
DEVICE Real widen(bf16 x) { return static_cast<Real>(__uint_as_float(static_cast<unsigned>(x.bits) << 16)); }
DEVICE Real widen(f16 x) { return static_cast<Real>(ptx::from_f16(x.bits)); }

// Rounds to nearest even.
DEVICE void narrow(Real x, float& to) { to = static_cast<float>(x); }
DEVICE void narrow(Real x, double& to) { to = static_cast<double>(x); }
DEVICE void narrow(Real x, bf16& to) { to.bits = ptx::to_bf16(static_cast<float>(x)); }
DEVICE void narrow(Real x, f16& to) { to.bits = ptx::to_f16(static_cast<float>(x)); }
DEVICE unsigned narrow_pair(Real low, Real high, bf16) {
  return ptx::to_bf16_pair(static_cast<float>(low), static_cast<float>(high));
}
DEVICE unsigned narrow_pair(Real low, Real high, f16) {
  return ptx::to_f16_pair(static_cast<float>(low), static_cast<float>(high));
}

// Widens one half of a word. For bf16 this is a shift or a mask.
DEVICE Real widen_half(unsigned pair, bool high, bf16) {
  return static_cast<Real>(__uint_as_float(high ? pair & 0xffff0000u : pair << 16));
}
DEVICE Real widen_half(unsigned pair, bool high, f16) {
  return widen(f16{static_cast<unsigned short>(high ? pair >> 16 : pair)});
}

// --- arithmetic with fixed rounding -------------------------------------------------------------
// The backward rebuilds X' and must get the bits that the forward stored. With plain operators the compiler might
// contract a product and a sum to an FMA in one kernel and not in the other.

DEVICE float mul_rn(float a, float b) { return __fmul_rn(a, b); }
DEVICE double mul_rn(double a, double b) { return __dmul_rn(a, b); }
DEVICE float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE double fma_rn(double a, double b, double c) { return __fma_rn(a, b, c); }
DEVICE Real sigmoid(Real x) { return Real(1) / (Real(1) + exp(-x)); }

// --- packets ------------------------------------------------------------------------------------

template <int BYTES> struct AccessWord;  // the built-in type of one memory access
template <> struct AccessWord<16> { using Type = uint4; };
template <> struct AccessWord<8> { using Type = uint2; };
template <> struct AccessWord<4> { using Type = unsigned; };
template <> struct AccessWord<2> { using Type = unsigned short; };

// Width of one memory access: the largest power of two that divides `bytes` and is at most ALIGN.
__host__ __device__ constexpr int access_bytes(int bytes, int element) {
  int width = element;
  while (2 * width <= ALIGN && bytes % (2 * width) == 0) width *= 2;
  return width;
}

// N neighbouring elements of T, loaded and stored in the fewest accesses.
template <class T, int N> struct alignas(access_bytes(N * sizeof(T), sizeof(T))) Packet {
  static constexpr int WIDTH = access_bytes(N * sizeof(T), sizeof(T));
  static constexpr int COUNT = N * sizeof(T) / WIDTH;
  static constexpr bool PAIRS = sizeof(T) == 2 && WIDTH >= 4;
  using Word = typename AccessWord<WIDTH>::Type;

  T element[N];

  DEVICE Real operator[](int i) const {
    if constexpr (PAIRS) return widen_half(pair(i / 2), i % 2, T{});
    else return widen(element[i]);
  }
  // Rounds N numbers to T.
  DEVICE void set(const Real (&x)[N]) {
    if constexpr (PAIRS) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) pair(i) = narrow_pair(x[2 * i], x[2 * i + 1], T{});
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) narrow(x[i], element[i]);
    }
  }
  DEVICE void get(Real (&x)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = (*this)[i];
  }
  DEVICE void clear() {
    const Real zeros[N] = {};
    set(zeros);
  }

  // For parameters, which every token reads: the non-coherent path, kept in L1.
  DEVICE void load_readonly(const T* from) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) word(i) = __ldg(reinterpret_cast<const Word*>(from) + i);
  }
  // For data of one token, which is used once: evict-first, so that it does not displace the parameters.
  DEVICE void load_streaming(const T* from) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) word(i) = __ldcs(reinterpret_cast<const Word*>(from) + i);
  }
  DEVICE void store_streaming(T* to) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) __stcs(reinterpret_cast<Word*>(to) + i, word(i));
  }
  // Streams into shared memory, from where this thread reads it with load_cached.
  static DEVICE void cp_async(T* shared, const T* from, bool valid) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      ptx::cp_async<Word>(reinterpret_cast<Word*>(shared) + i, reinterpret_cast<const Word*>(from) + i, valid);
    }
  }
  // No cache hint, for global memory that another kernel reads soon, so L2 should keep it.
  DEVICE void store_global(T* to) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) ptx::store_whole(reinterpret_cast<Word*>(to) + i, word(i));
  }
  // No cache hint: for shared memory, and for global memory that is read again soon.
  DEVICE void load_cached(const T* from) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) word(i) = reinterpret_cast<const Word*>(from)[i];
  }
  DEVICE void store_cached(T* to) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) reinterpret_cast<Word*>(to)[i] = word(i);
  }

 private:
  DEVICE unsigned& pair(int i) { return reinterpret_cast<unsigned*>(element)[i]; }
  DEVICE const unsigned& pair(int i) const { return reinterpret_cast<const unsigned*>(element)[i]; }
  DEVICE Word& word(int i) { return reinterpret_cast<Word*>(element)[i]; }
  DEVICE const Word& word(int i) const { return reinterpret_cast<const Word*>(element)[i]; }
};

template <class T, int N>
DEVICE void convert(Packet<T, N>& to, const Packet<T, N>& from) {
  to = from;
}
template <class A, class B, int N>
DEVICE void convert(Packet<A, N>& to, const Packet<B, N>& from) {
  Real x[N];
  from.get(x);
  to.set(x);
}
