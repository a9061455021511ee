// Numbers side by side: `F` and `U` hold one fp32 or uint32 per lane, as many as a register of the instruction set that this
// file is compiled for. Vector types of GCC and Clang, so that the arithmetic is written with plain operators; intrinsics only
// where the compilers have no operator. Compiled with -ffp-contract=off: no operation is fused with another.
#pragma once

#include <cstdint>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "buffers.h"

#define LS_INLINE inline __attribute__((always_inline))

namespace ls {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float F __attribute__((vector_size(4 * kLanes)));
typedef uint32_t U __attribute__((vector_size(4 * kLanes)));
typedef int32_t I __attribute__((vector_size(4 * kLanes)));
typedef uint16_t U16 __attribute__((vector_size(2 * kLanes)));
typedef uint8_t U8 __attribute__((vector_size(kLanes)));

// Two registers of numbers, as long as their halves or bytes suffice: words of 16 bits that fill one, and their bytes.
typedef int16_t W __attribute__((vector_size(4 * kLanes)));
typedef uint8_t W8 __attribute__((vector_size(2 * kLanes)));

template <class N>
struct BitsOf;
template <>
struct BitsOf<F> {
  using type = U;
  using signed_type = I;
};

LS_INLINE U bits(F x) { return (U)x; }
LS_INLINE F number(U x) { return (F)x; }

template <class N>
LS_INLINE N splat(float x);
template <>
LS_INLINE F splat<F>(float x) {
  return x - F{};
}
LS_INLINE U splat(uint32_t x) { return x - U{}; }

LS_INLINE U iota() {
  U result;
  for (int i = 0; i < kLanes; ++i) result[i] = i;
  return result;
}

template <class V>
LS_INLINE V load_as(const void* from) {
  V x;
  __builtin_memcpy(&x, from, sizeof x);
  return x;
}
template <class V>
LS_INLINE void store_as(void* to, V x) {
  __builtin_memcpy(to, &x, sizeof x);
}

// One bit per lane of a comparison's result.
LS_INLINE uint32_t mask_of(U x) {
#if defined(__AVX512DQ__)
  return _mm512_movepi32_mask((__m512i)x);
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)x);
#else
  uint32_t mask = 0;
  for (int i = 0; i < kLanes; ++i) mask |= (x[i] & 1u) << i;
  return mask;
#endif
}

// Both below 2**31.
LS_INLINE U larger(U a, U b) {
#if defined(__AVX512F__)
  return (U)_mm512_max_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (U)_mm256_max_epu32((__m256i)a, (__m256i)b);
#else
  return (I)a > (I)b ? a : b;
#endif
}

LS_INLINE F root(F x) {
#if defined(__AVX512F__)
  return (F)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
  return (F)_mm256_sqrt_ps((__m256)x);
#else
  for (int i = 0; i < kLanes; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}

LS_INLINE U16 narrow16(U x) {
#if defined(__AVX512F__)
  return (U16)_mm512_cvtepi32_epi16((__m512i)x);
#elif defined(__AVX2__)
  const __m256i packed = _mm256_packus_epi32((__m256i)x, (__m256i)x);  // all values are below 2**16
  return (U16)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0xD8));
#else
  return __builtin_convertvector(x, U16);
#endif
}

// Upper halves. The word permutation does in one step what a shift and a narrowing do in three.
LS_INLINE U16 upper_halves(U x) {
#if defined(__AVX512BW__)
  const __m512i odd = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 31, 29, 27, 25, 23, 21, 19,
                                       17, 15, 13, 11, 9, 7, 5, 3, 1);
  return (U16)_mm512_castsi512_si256(_mm512_permutexvar_epi16(odd, (__m512i)x));
#else
  return narrow16(x >> 16);
#endif
}

LS_INLINE U8 narrow8(U x) {
#if defined(__AVX512F__)
  return (U8)_mm512_cvtepi32_epi8((__m512i)x);
#elif defined(__AVX2__)
  const __m128i packed = (__m128i)narrow16(x);
  const __m128i twice = _mm_packus_epi16(packed, packed);
  return load_as<U8>(&twice);
#else
  return __builtin_convertvector(x, U8);
#endif
}

// The compilers widen these lane by lane.
LS_INLINE U widen(U16 x) {
#if defined(__AVX512F__)
  return (U)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined(__AVX2__)
  return (U)_mm256_cvtepu16_epi32((__m128i)x);
#else
  return __builtin_convertvector(x, U);
#endif
}

LS_INLINE U widen(U8 x) {
#if defined(__AVX512F__)
  return (U)_mm512_cvtepu8_epi32((__m128i)x);
#elif defined(__AVX2__)
  return (U)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(&x)));
#else
  return __builtin_convertvector(x, U);
#endif
}

LS_INLINE F from_bf16(U16 x) {
#if defined(__AVX512BW__)
  const __m512i twice = _mm512_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8, 7, 7, 6, 6, 5, 5, 4, 4, 3,
                                         3, 2, 2, 1, 1, 0, 0);
  return (F)_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, twice, _mm512_castsi256_si512((__m256i)x));
#else
  return number(widen(x) << 16);
#endif
}

LS_INLINE W widen(W8 x) {
#if defined(__AVX512BW__)
  return (W)_mm512_cvtepu8_epi16((__m256i)x);
#elif defined(__AVX2__)
  return (W)_mm256_cvtepu8_epi16((__m128i)x);
#elif defined(__SSE2__)
  return (W)_mm_unpacklo_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(&x)), _mm_setzero_si128());
#else
  return __builtin_convertvector(x, W);
#endif
}

LS_INLINE W8 narrow8(W x) {
#if defined(__AVX512BW__)
  return (W8)_mm512_cvtepi16_epi8((__m512i)x);
#elif defined(__AVX2__)
  return (W8)_mm_packus_epi16(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));  // all are below 2**8
#elif defined(__SSE2__)
  const __m128i packed = _mm_packus_epi16((__m128i)x, (__m128i)x);
  return load_as<W8>(&packed);
#else
  return __builtin_convertvector(x, W8);
#endif
}

LS_INLINE W upper_halves(U a, U b) {
#if defined(__AVX512BW__)
  const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23, 21, 19,
                                       17, 15, 13, 11, 9, 7, 5, 3, 1);
  return (W)_mm512_permutex2var_epi16((__m512i)a, odd, (__m512i)b);
#elif defined(__AVX2__)
  const __m256i packed = _mm256_packs_epi32((__m256i)((I)a >> 16), (__m256i)((I)b >> 16));
  return (W)_mm256_permute4x64_epi64(packed, 0xD8);
#elif defined(__SSE2__)
  return (W)_mm_packs_epi32((__m128i)((I)a >> 16), (__m128i)((I)b >> 16));
#else
  const U16 halves[2] = {narrow16(a >> 16), narrow16(b >> 16)};
  return load_as<W>(halves);
#endif
}

// Two registers of numbers whose upper halves are x and whose lower halves are zero.
LS_INLINE void from_upper_halves(W x, F* numbers) {
#if defined(__AVX512BW__)
  numbers[0] = from_bf16((U16)_mm512_castsi512_si256((__m512i)x));
  numbers[1] = from_bf16((U16)_mm512_extracti64x4_epi64((__m512i)x, 1));
#elif defined(__AVX2__)
  const __m256i spread = _mm256_permute4x64_epi64((__m256i)x, 0xD8), zero = _mm256_setzero_si256();
  numbers[0] = (F)_mm256_unpacklo_epi16(zero, spread);
  numbers[1] = (F)_mm256_unpackhi_epi16(zero, spread);
#elif defined(__SSE2__)
  numbers[0] = (F)_mm_unpacklo_epi16(_mm_setzero_si128(), (__m128i)x);
  numbers[1] = (F)_mm_unpackhi_epi16(_mm_setzero_si128(), (__m128i)x);
#else
  U16 halves[2];
  __builtin_memcpy(halves, &x, sizeof x);
  for (int k = 0; k < 2; ++k) numbers[k] = from_bf16(halves[k]);
#endif
}

LS_INLINE F from_fp16(U16 x) {
#if defined(__AVX512F__)
  return (F)_mm512_cvtph_ps((__m256i)x);
#elif defined(__AVX2__) && defined(__F16C__)
  return (F)_mm256_cvtph_ps((__m128i)x);
#else
  const U u = widen(x);
  const U magnitude = u & 0x7FFF;
  const U normal = (magnitude << 13) + (112u << 23);
  const U infinite = (magnitude << 13) + (224u << 23);
  const F subnormal = __builtin_convertvector((I)magnitude, F) * splat<F>(0x1p-24f);
  const U result = magnitude >= 0x7C00 ? infinite : magnitude >= 0x0400 ? normal : bits(subnormal);
  return number(result | (u & 0x8000) << 16);
#endif
}

LS_INLINE U16 to_fp16(F x) {
#if defined(__AVX512F__)
  return (U16)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__) && defined(__F16C__)
  return (U16)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#else
  const U b = bits(x) & 0x7FFFFFFF;
  const U normal = (b + 0xFFF + (b >> 13 & 1) - (112u << 23)) >> 13;
  // Next to 0.5 the spacing of fp32 is that of subnormal fp16: the addition rounds.
  const U subnormal = bits(number(b) + splat<F>(0.5f)) - 0x3F000000;
  const U special = b > 0x7F800000 ? splat(0x7E00u) : splat(0x7C00u);
  const U result = b >= 0x47800000 ? special : b >= 0x38800000 ? normal : subnormal;
  return narrow16(result | (bits(x) >> 16 & 0x8000));
#endif
}

LS_INLINE U16 to_bf16(F x) {
  const U b = bits(x);
  const U rounded = b + 0x7FFF + (b >> 16 & 1);
  return upper_halves(x != x ? splat(0x7FC00000u) : rounded);
}

// Elements [i, i + kLanes) of a gradient.
LS_INLINE F load(const void* from, Format format, int64_t i) {
  if (format == kFP32) return load_as<F>(static_cast<const float*>(from) + i);
  const U16 x = load_as<U16>(static_cast<const uint16_t*>(from) + i);
  return format == kBF16 ? from_bf16(x) : from_fp16(x);
}

}  // namespace
}  // namespace ls
