// What math.h needs to know about numbers on a GPU, and memory four elements at a time. NVRTC, which compiles the kernels,
// has no headers: what is used here are its built-in functions, and two instructions.
#pragma once

#include "buffers.h"

#define LS_INLINE __device__ __forceinline__

namespace ls {
namespace {

template <class N>
struct BitsOf;
template <>
struct BitsOf<float> {
  using type = uint32_t;
  using signed_type = int32_t;
};

LS_INLINE uint32_t bits(float x) { return __float_as_uint(x); }
LS_INLINE float number(uint32_t x) { return __uint_as_float(x); }
LS_INLINE float root(float x) { return __fsqrt_rn(x); }

template <class N>
LS_INLINE N splat(float x) {
  return x;
}

LS_INLINE uint16_t to_bf16(float x) {
  const uint32_t b = bits(x);
  return x != x ? 0x7FC0u : (b + 0x7FFF + (b >> 16 & 1)) >> 16;
}
#if defined(__CUDACC__)  // elsewhere the emulation has these two instructions
LS_INLINE uint16_t half_of_float(float x) {
  uint16_t half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
  return half;
}
LS_INLINE float float_of_half(uint16_t half) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
  return x;
}
#endif
LS_INLINE uint16_t to_fp16(float x) { return x != x ? 0x7E00u : half_of_float(x); }
LS_INLINE float from_fp16(uint16_t x) { return float_of_half(x); }

constexpr int kVector = 4;  // elements of a thread: 16 bytes of fp32

template <class T>
struct alignas(kVector * sizeof(T)) Vector {
  T x[kVector];
};

// Elements [i, i + 4); those past n are zero, or not written. kWide: the pointer allows one access for all four.
template <bool kWide, class T>
LS_INLINE Vector<T> load4(const void* from, int64_t i, int64_t n) {
  const T* p = static_cast<const T*>(from) + i;
  if (kWide && i + kVector <= n) return *reinterpret_cast<const Vector<T>*>(p);
  Vector<T> v;
#pragma unroll
  for (int k = 0; k < kVector; ++k) v.x[k] = i + k < n ? p[k] : T(0);
  return v;
}

template <bool kWide, class T>
LS_INLINE void store4(void* to, int64_t i, int64_t n, const Vector<T>& v) {
  T* p = static_cast<T*>(to) + i;
  if (kWide && i + kVector <= n) {
    *reinterpret_cast<Vector<T>*>(p) = v;
    return;
  }
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    if (i + k < n) p[k] = v.x[k];
  }
}

template <bool kWide>
LS_INLINE Vector<float> load4(const void* from, Format format, int64_t i, int64_t n) {
  if (format == kFP32) return load4<kWide, float>(from, i, n);
  const Vector<uint16_t> raw = load4<kWide, uint16_t>(from, i, n);
  Vector<float> v;
#pragma unroll
  for (int k = 0; k < kVector; ++k) v.x[k] = format == kBF16 ? number(uint32_t(raw.x[k]) << 16) : from_fp16(raw.x[k]);
  return v;
}

template <bool kWide>
LS_INLINE void store4(void* to, Format format, int64_t i, int64_t n, const Vector<float>& v) {
  if (format == kFP32) return store4<kWide, float>(to, i, n, v);
  Vector<uint16_t> raw;
#pragma unroll
  for (int k = 0; k < kVector; ++k) raw.x[k] = format == kBF16 ? to_bf16(v.x[k]) : to_fp16(v.x[k]);
  store4<kWide, uint16_t>(to, i, n, raw);
}

}  // namespace
}  // namespace ls
