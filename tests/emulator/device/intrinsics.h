// Arithmetic, bit casts, cached loads and stores, atomics. Only functions that kernels may need: any
// other name is a compile error, as a misspelt one is under NVRTC.
#pragma once

#include "runtime.h"

extern "C" {
float expf(float) noexcept;
float exp2f(float) noexcept;
float fabsf(float) noexcept;
float fmaf(float, float, float) noexcept;
float fmaxf(float, float) noexcept;
float fminf(float, float) noexcept;
float logf(float) noexcept;
float sqrtf(float) noexcept;
float tanhf(float) noexcept;
double exp(double) noexcept;
double fabs(double) noexcept;
double fma(double, double, double) noexcept;
double fmax(double, double) noexcept;
double fmin(double, double) noexcept;
double log(double) noexcept;
double sqrt(double) noexcept;
double tanh(double) noexcept;
void* memcpy(void*, const void*, unsigned long) noexcept;
}

// CUDA overloads the double names for float.
inline float exp(float x) { return expf(x); }
inline float fabs(float x) { return fabsf(x); }
inline float fma(float a, float b, float c) { return fmaf(a, b, c); }
inline float log(float x) { return logf(x); }
inline float sqrt(float x) { return sqrtf(x); }
inline float tanh(float x) { return tanhf(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }

template <class T>
bool isnan(T x) {
  return __builtin_isnan(x);
}
template <class T>
bool isfinite(T x) {
  return __builtin_isfinite(x);
}

// The approximations of a GPU's special function unit; exact here.
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }

// Rounded once each. The emulator compiles without contraction, so plain operators suffice.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }

#define EMULATOR_MIN_MAX(T)                        \
  inline T min(T a, T b) { return b < a ? b : a; } \
  inline T max(T a, T b) { return a < b ? b : a; }
EMULATOR_MIN_MAX(int)
EMULATOR_MIN_MAX(unsigned)
EMULATOR_MIN_MAX(long)
EMULATOR_MIN_MAX(unsigned long)
EMULATOR_MIN_MAX(long long)
EMULATOR_MIN_MAX(unsigned long long)
#undef EMULATOR_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }  // like CUDA's: if one is NaN, the other
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

namespace emulator {

template <class To, class From>
To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

// Real atomics, because blocks may run on several OS threads.
template <class T, class Change>
T change(T* address, Change new_value) {
  T old, wanted;
  __atomic_load(address, &old, __ATOMIC_RELAXED);
  do {
    wanted = new_value(old);
  } while (!__atomic_compare_exchange(address, &old, &wanted, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}

}  // namespace emulator

inline float __uint_as_float(unsigned x) { return emulator::bit_cast<float>(x); }
inline float __int_as_float(int x) { return emulator::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return emulator::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return emulator::bit_cast<int>(x); }
inline double __longlong_as_double(long long x) { return emulator::bit_cast<double>(x); }
inline long long __double_as_longlong(double x) { return emulator::bit_cast<long long>(x); }

template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
T __ldcs(const T* address) {
  return *address;
}
template <class T>
void __stcs(T* address, T value) {
  *address = value;
}

namespace emulator {

// The conversions of kernels/ptx.cuh.
inline float from_f16(unsigned short bits) { return float(bit_cast<_Float16>(bits)); }
inline unsigned short to_f16(float x) { return bit_cast<unsigned short>(_Float16(x)); }
inline unsigned short to_bf16(float x) {
  const unsigned bits = bit_cast<unsigned>(x), rounded = bits + 0x7fffu + (bits >> 16 & 1u);
  return static_cast<unsigned short>(x != x ? 0x7fffu : rounded >> 16);
}
inline unsigned to_f16_pair(float low, float high) { return to_f16(low) | unsigned(to_f16(high)) << 16; }
inline unsigned to_bf16_pair(float low, float high) { return to_bf16(low) | unsigned(to_bf16(high)) << 16; }

template <class Word>
void store_whole(Word* to, Word word) {
  *to = word;
}

// A prefetch reads its address, so that a wrong one faults. It does not count as traffic.
__attribute__((no_sanitize("thread"))) inline void prefetch_l2(const void* from) {
  (void)*static_cast<const volatile char*>(from);
}

}  // namespace emulator

template <class T>
T atomicAdd(T* address, T value) {
  return emulator::change(address, [=](T old) { return T(old + value); });
}
template <class T>
T atomicMax(T* address, T value) {
  return emulator::change(address, [=](T old) { return max(old, value); });
}
template <class T>
T atomicExch(T* address, T value) {
  return emulator::change(address, [=](T) { return value; });
}

inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __threadfence(); }
[[noreturn]] inline void __trap() { emulator::fail("__trap()"); }
