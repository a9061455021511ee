// What the kernels use of CUDA: the words that its compiler knows.
#pragma once

#include <cmath>

#include "device.h"

#undef assert  // a failed one ends the launch, as on a GPU, and not the process
#define assert(condition) ((condition) ? void() : emulation::fail("%s:%d: assertion %s", __FILE__, __LINE__, #condition))

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)

#define threadIdx (emulation::place.thread)
#define blockIdx (emulation::place.block)
#define blockDim (emulation::place.threads)
#define gridDim (emulation::place.blocks)

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

// --- numbers ------------------------------------------------------------------------------------------------------------

template <class To, class From>
inline To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline uint32_t __float_as_uint(float x) { return same_bits<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return same_bits<float>(x); }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fdiv_rn(float x, float y) { return x / y; }

// Conversions to and from fp16, bit by bit.
inline float float_of_half(uint16_t x) {
  const int exponent = x >> 10 & 31, fraction = x & 1023;
  float magnitude = exponent ? std::ldexp(1024.0f + fraction, exponent - 25) : std::ldexp(float(fraction), -24);
  if (exponent == 31) magnitude = fraction ? NAN : INFINITY;
  return x & 0x8000 ? -magnitude : magnitude;
}

inline uint16_t half_of_float(float x) {
  const uint32_t b = __float_as_uint(x) & 0x7FFFFFFF, sign = __float_as_uint(x) >> 16 & 0x8000;
  uint32_t half = (b + 0xFFF + (b >> 13 & 1) - (112u << 23)) >> 13;
  // Next to 0.5 the spacing of fp32 is that of subnormal fp16: the addition rounds.
  if (b < 0x38800000) half = __float_as_uint(__uint_as_float(b) + 0.5f) - 0x3F000000;
  if (b >= 0x47800000) half = 0x7C00;
  if (b > 0x7F800000) half = 0x7FFF;
  return static_cast<uint16_t>(sign | half);
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned max(unsigned x, unsigned y) { return x > y ? x : y; }

// --- threads ------------------------------------------------------------------------------------------------------------

inline void __syncthreads() { emulation::meet(emulation::Meeting::kThreads, 0xFFFFFFFFu, 0, 0); }
inline void __syncwarp() { emulation::meet(emulation::Meeting::kWarp, 0xFFFFFFFFu, 0, 0); }

template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta) {
  return emulation::meet_with(emulation::Meeting::kDown, mask, value, delta);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta) {
  return emulation::meet_with(emulation::Meeting::kUp, mask, value, delta);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, unsigned lanes) {
  return emulation::meet_with(emulation::Meeting::kXor, mask, value, lanes);
}
template <class T>
inline unsigned __match_any_sync(unsigned mask, T value) {
  return static_cast<unsigned>(emulation::meet(emulation::Meeting::kMatch, mask, static_cast<uint64_t>(value), 0));
}
inline void atomicAdd(int* to, int value) { emulation::add(to, value); }
inline void atomicAdd(double* to, double value) { emulation::add(to, value); }
