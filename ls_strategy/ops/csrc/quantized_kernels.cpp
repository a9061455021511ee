// The CPU kernels of quantized weights, compiled once per instruction set like kernels.cpp, whose rule holds here too: no
// inline function of the standard library.
#include "lanes.h"
#include "quantized.h"

namespace ls {
namespace {

struct Table {
#if defined(__AVX512F__)
  __m512 all;
#elif defined(__AVX2__)
  __m256 low, high;
#else
  const float* all;
#endif
};

LS_INLINE Table table_of(const float* values) {
#if defined(__AVX512F__)
  return {_mm512_loadu_ps(values)};
#elif defined(__AVX2__)
  return {_mm256_loadu_ps(values), _mm256_loadu_ps(values + 8)};
#else
  return {values};
#endif
}

// Values of numbers from 0 to 15.
LS_INLINE F look_up(const Table& table, U numbers) {
#if defined(__AVX512F__)
  return (F)_mm512_permutexvar_ps((__m512i)numbers, table.all);
#elif defined(__AVX2__)
  const __m256 low = _mm256_permutevar8x32_ps(table.low, (__m256i)numbers);
  const __m256 high = _mm256_permutevar8x32_ps(table.high, (__m256i)numbers);
  return (F)_mm256_blendv_ps(low, high, (__m256)(numbers << 28));  // by the sign: bit 3
#else
  F result;
  for (int i = 0; i < kLanes; ++i) result[i] = table.all[numbers[i]];
  return result;
#endif
}

LS_INLINE void store(void* to, Format format, int64_t i, F x) {
  if (format == kFP32) {
    store_as(static_cast<float*>(to) + i, x);
  } else {
    store_as(static_cast<uint16_t*>(to) + i, format == kBF16 ? to_bf16(x) : to_fp16(x));
  }
}

LS_INLINE F scale_of(const uint8_t* tile, int block) {
  uint16_t half;
  __builtin_memcpy(&half, tile + 2 * block, sizeof half);
  return number(splat(uint32_t{half} << 16));
}

template <Format kFormat>
void tiles_of_4_bits(const Tiles& t, int64_t begin, int64_t end) {
  const Table table = table_of(t.levels.value);
  for (int64_t n = begin; n < end; ++n) {
    const uint8_t* const tile = t.packed + n * kTileBytes4;
    for (int run = 0; run < kTile / kPackedRun; ++run) {
      const F scale = scale_of(tile, run * kPackedRun / kBlock);
      const uint8_t* const codes = tile + kScaleBytes + run * kPackedRun / 2;
      const int64_t first = n * kTile + run * kPackedRun;
      for (int j = 0; j < kPackedRun / 2; j += kLanes) {
        const U both = widen(load_as<U8>(codes + j));
        store(t.out, kFormat, first + j, look_up(table, both & 15) * scale);
        store(t.out, kFormat, first + kPackedRun / 2 + j, look_up(table, both >> 4) * scale);
      }
    }
  }
}

template <Format kFormat>
void tiles_of_8_bits(const Tiles& t, int64_t begin, int64_t end) {
  for (int64_t n = begin; n < end; ++n) {
    const uint8_t* const tile = t.packed + n * kTileBytes8;
    for (int i = 0; i < kTile; i += kLanes) {
      const F scale = scale_of(tile, i / kBlock);
      const F level = __builtin_convertvector((I)widen(load_as<U8>(tile + kScaleBytes + i)), F) - splat<F>(128.0f);
      store(t.out, kFormat, n * kTile + i, level / splat<F>(127.0f) * scale);
    }
  }
}

template <Format kFormat>
LS_INLINE void tiles(const Tiles& t, int64_t begin, int64_t end) {
  if (t.form == kLevels8) {
    tiles_of_8_bits<kFormat>(t, begin, end);
  } else {
    tiles_of_4_bits<kFormat>(t, begin, end);
  }
}

void dequantize(const Tiles& t, int64_t begin, int64_t end) {
  if (t.format == kFP32) return tiles<kFP32>(t, begin, end);
  if (t.format == kBF16) return tiles<kBF16>(t, begin, end);
  tiles<kFP16>(t, begin, end);
}

}  // namespace

namespace quantized {
extern const QuantizedKernels LS_KERNELS;
const QuantizedKernels LS_KERNELS = {dequantize};
}  // namespace quantized
}  // namespace ls
