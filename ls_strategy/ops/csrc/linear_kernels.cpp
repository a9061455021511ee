// The CPU kernels of products with packed weights, compiled once per instruction set like kernels.cpp, whose rule holds here
// too: no inline function of the standard library. A weight becomes fp32 in a register, and meets some rows there.
#include "lanes.h"
#include "linear.h"

namespace ls {
namespace {

// Output features and rows of a tile: as many sums as there are registers for.
constexpr int kOut = 4;
#if defined(__AVX512F__)
constexpr int kRows = 4;
#else
constexpr int kRows = 2;
#endif

// Bytes of a cache line. Weights of the next tile are fetched ahead: rows are shorter than what the hardware foresees.
constexpr int kLine = 64;

LS_INLINE F fused(F a, F b, F c) {
#if defined(__AVX512F__)
  return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}

LS_INLINE F from_int8(const int8_t* from) {
#if defined(__AVX512F__)
  return (F)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return (F)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  F x;
  for (int i = 0; i < kLanes; ++i) x[i] = from[i];
  return x;
#endif
}

LS_INLINE F from_levels(U x) { return __builtin_convertvector((I)x, F); }

LS_INLINE float sum(F x) {
  for (int width = kLanes / 2; width; width /= 2) {
    for (int i = 0; i < width; ++i) x[i] += x[i + width];
  }
  return x[0];
}

template <int kN, int kM>
void int8_tile(const Product& p, int64_t n, int64_t m) {
  const int8_t* weight = static_cast<const int8_t*>(p.weight) + n * p.in;
  const float* x = p.x + m * p.in;
  F sums[kN][kM] = {};
  int64_t i = 0;
  for (; i + kLanes <= p.in; i += kLanes) {
    F rows[kM];
    for (int b = 0; b < kM; ++b) rows[b] = load_as<F>(x + b * p.in + i);
    for (int a = 0; a < kN; ++a) {
      if (i % kLine == 0) __builtin_prefetch(weight + (a + kN) * p.in + i, 0, 2);
      const F w = from_int8(weight + a * p.in + i);
      for (int b = 0; b < kM; ++b) sums[a][b] = fused(w, rows[b], sums[a][b]);
    }
  }
  for (int a = 0; a < kN; ++a) {
    for (int b = 0; b < kM; ++b) {
      float total = sum(sums[a][b]);
      for (int64_t j = i; j < p.in; ++j) total += weight[a * p.in + j] * x[b * p.in + j];
      p.y[(m + b) * p.out + n + a] = total * p.scales[n + a];
    }
  }
}

template <int kN, int kM>
void int4_tile(const Product& p, int64_t n, int64_t m) {
  constexpr int kHalf = kPacked / 2;
  const int64_t row_bytes = p.in / 2, groups = p.in / p.group;
  const uint8_t* weight = static_cast<const uint8_t*>(p.weight) + n * row_bytes;
  const float* x = p.x + m * p.in;
  const float* scales = p.scales + n * groups * 2;
  F sums[kN][kM] = {};
  float rest[kN][kM] = {};
  for (int64_t g = 0; g < groups; ++g) {
    F part[kN][kM] = {};
    for (int64_t i = g * p.group; i < (g + 1) * p.group; i += kPacked) {
      if (i / 2 % kLine == 0) {
        for (int a = 0; a < kN; ++a) __builtin_prefetch(weight + (a + kN) * row_bytes + i / 2, 0, 2);
      }
      for (int j = 0; j < kHalf; j += kLanes) {
        F low[kM], high[kM];
        for (int b = 0; b < kM; ++b) {
          low[b] = load_as<F>(x + b * p.in + i + j);
          high[b] = load_as<F>(x + b * p.in + i + kHalf + j);
        }
        for (int a = 0; a < kN; ++a) {
          const U both = widen(load_as<U8>(weight + a * row_bytes + i / 2 + j));
          const F first = from_levels(both & 15), second = from_levels(both >> 4);
          for (int b = 0; b < kM; ++b) part[a][b] = fused(second, high[b], fused(first, low[b], part[a][b]));
        }
      }
    }
    for (int a = 0; a < kN; ++a) {
      const float scale = scales[(a * groups + g) * 2], zero = scales[(a * groups + g) * 2 + 1];
      for (int b = 0; b < kM; ++b) {
        sums[a][b] = fused(splat<F>(scale), part[a][b], sums[a][b]);
        rest[a][b] += (zero - 8 * scale) * p.sums[(m + b) * groups + g];
      }
    }
  }
  for (int a = 0; a < kN; ++a) {
    for (int b = 0; b < kM; ++b) p.y[(m + b) * p.out + n + a] = sum(sums[a][b]) + rest[a][b];
  }
}

// The weights of a tile's output features stay in the nearest cache while all rows meet them.
template <int kN, void (*kMany)(const Product&, int64_t, int64_t), void (*kOne)(const Product&, int64_t, int64_t)>
LS_INLINE void all_rows(const Product& p, int64_t n) {
  int64_t m = 0;
  for (; m + kRows <= p.rows; m += kRows) kMany(p, n, m);
  for (; m < p.rows; ++m) kOne(p, n, m);
}

void int8_product(const Product& p, int64_t begin, int64_t end) {
  int64_t n = begin;
  for (; n + kOut <= end; n += kOut) all_rows<kOut, int8_tile<kOut, kRows>, int8_tile<kOut, 1>>(p, n);
  for (; n < end; ++n) all_rows<1, int8_tile<1, kRows>, int8_tile<1, 1>>(p, n);
}

void int4_product(const Product& p, int64_t begin, int64_t end) {
  int64_t n = begin;
  for (; n + kOut <= end; n += kOut) all_rows<kOut, int4_tile<kOut, kRows>, int4_tile<kOut, 1>>(p, n);
  for (; n < end; ++n) all_rows<1, int4_tile<1, kRows>, int4_tile<1, 1>>(p, n);
}

}  // namespace

namespace linear {
extern const LinearKernels LS_KERNELS;
const LinearKernels LS_KERNELS = {int8_product, int4_product};
}  // namespace linear
}  // namespace ls
