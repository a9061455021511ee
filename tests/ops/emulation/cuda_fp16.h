// Conversions to and from fp16, bit by bit.
#pragma once

#include "cuda_runtime.h"

struct __half {
  uint16_t bits;
};

inline uint16_t __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(uint16_t x) { return {x}; }

inline float __half2float(__half x) {
  const int exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  float magnitude = exponent ? std::ldexp(1024.0f + fraction, exponent - 25) : std::ldexp(float(fraction), -24);
  if (exponent == 31) magnitude = fraction ? NAN : INFINITY;
  return x.bits & 0x8000 ? -magnitude : magnitude;
}

inline __half __float2half_rn(float x) {
  const uint32_t b = __float_as_uint(x) & 0x7FFFFFFF, sign = __float_as_uint(x) >> 16 & 0x8000;
  uint32_t half = (b + 0xFFF + (b >> 13 & 1) - (112u << 23)) >> 13;
  // Next to 0.5 the spacing of fp32 is that of subnormal fp16: the addition rounds.
  if (b < 0x38800000) half = __float_as_uint(__uint_as_float(b) + 0.5f) - 0x3F000000;
  if (b >= 0x47800000) half = 0x7C00;
  if (b > 0x7F800000) half = 0x7FFF;
  return {static_cast<uint16_t>(sign | half)};
}
