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

// --- quantize ----------------------------------------------------------------------------------------------------------

constexpr int kWide = kLanes / 2;  // fp64 numbers in a register
typedef double D __attribute__((vector_size(8 * kWide)));
typedef float HalfF __attribute__((vector_size(4 * kWide)));

constexpr int kRegisters = kSumLanes / kWide;

// Sum of squares in the lanes and the order of kernels.cpp, of one tile.
struct Squares {
  D lanes[kRegisters] = {};

  LS_INLINE void add(int i, F x) {  // of elements [i, i + kLanes)
    HalfF halves[2];
    __builtin_memcpy(halves, &x, sizeof x);
    const int j = i % kSumLanes / kWide;
    const D low = __builtin_convertvector(halves[0], D), high = __builtin_convertvector(halves[1], D);
    lanes[j] += low * low;
    lanes[j + 1] += high * high;
  }

  LS_INLINE double fold() const {
    double x[kSumLanes];
    __builtin_memcpy(x, lanes, sizeof x);
    for (int width = kSumLanes / 2; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) x[i] = x[i] + x[i + width];
    }
    return x[0];
  }
};

LS_INLINE uint32_t largest(U x) {
  uint32_t lanes[kLanes];
  __builtin_memcpy(lanes, &x, sizeof x);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i + width] > lanes[i] ? lanes[i + width] : lanes[i];
  }
  return lanes[0];
}

// The scale of a block, bf16: finite in the format of its numbers. NaN if one of them is.
template <Format kFormat>
LS_INLINE uint16_t scale_of_block(const void* values, int64_t first) {
  U top{};
  for (int i = 0; i < kBlock; i += kLanes) {
    const U x = bits(load(values, kFormat, first + i)) & 0x7FFFFFFFu;
    top = (I)x > (I)top ? x : top;
  }
  U16 scale = to_bf16(number(splat(largest(top))));
  if (kFormat == kFP16) {
    F x = from_bf16(scale);
    x = x > splat<F>(65280.0f) && bits(x) < 0x7F800000u ? splat<F>(65280.0f) : x;  // the largest that both formats have
    scale = to_bf16(from_fp16(to_fp16(x)));
  }
  return scale[0];
}

// Quotients of `kLanes` numbers and their scale, as the nearest level: its number, and its value before the scale.
struct Rounded {
  U number;
  F level;
};

template <LevelFormat kForm>
LS_INLINE Rounded nearest(F ratio, const Values& v, const Table& table) {
  if constexpr (kForm == kNF4) {
    I passed{};
    for (int i = 0; i < 15; ++i) passed += ratio <= splat<F>(v.borders[i]) ? I{} : I{} + 1;  // NaN passes all
    return {(U)passed, look_up(table, (U)passed)};
  } else {
    const F most = splat<F>(kForm == kLevels8 ? 127.0f : 7.0f), magic = splat<F>(12582912.0f);
    F x = ratio * most;
    x = x != x ? F{} : x;
    x = x < -most ? -most : x > most ? most : x;
    x = (x + magic) - magic;  // to the nearest whole number, ties to even: the sum has no more digits
    const U number = (U)__builtin_convertvector(x + (most + splat<F>(1.0f)), I);
    return {number, kForm == kLevels8 ? x / most : look_up(table, number)};
  }
}

template <Format kFormat, LevelFormat kForm, bool kMeasured>
void pack(const Values& v, int64_t begin, int64_t end) {
  constexpr int64_t kBytes = kForm == kLevels8 ? kTileBytes8 : kTileBytes4;
  const Table table = table_of(v.levels.value);
  for (int64_t n = begin; n < end; ++n) {
    uint8_t* const tile = v.packed + n * kBytes;
    Squares squares;
    for (int block = 0; block < kTile / kBlock; ++block) {
      const uint16_t half = scale_of_block<kFormat>(v.values, n * kTile + block * kBlock);
      __builtin_memcpy(tile + 2 * block, &half, sizeof half);
      const F scale = number(splat(uint32_t{half} << 16));
      const F divisor = scale == F{} ? splat<F>(1.0f) : scale;
      const auto round = [&](int i) __attribute__((always_inline)) {
        const F x = load(v.values, kFormat, n * kTile + i);
        const Rounded rounded = nearest<kForm>(x / divisor, v, table);
        if (kMeasured) squares.add(i, rounded.level * scale - x);
        return rounded.number;
      };
      const int first = block * kBlock;
      if constexpr (kForm == kLevels8) {
        for (int i = 0; i < kBlock; i += kLanes) store_as(tile + kScaleBytes + first + i, narrow8(round(first + i)));
      } else {
        for (int run = first; run < first + kBlock; run += kPackedRun) {
          for (int j = 0; j < kPackedRun / 2; j += kLanes) {
            const U low = round(run + j), high = round(run + kPackedRun / 2 + j);
            store_as(tile + kScaleBytes + run / 2 + j, narrow8(low | high << 4));
          }
        }
      }
    }
    if (kMeasured) v.changes[n] = squares.fold();
  }
}

template <Format kFormat, LevelFormat kForm>
LS_INLINE void pack_as(const Values& v, int64_t begin, int64_t end) {
  v.changes ? pack<kFormat, kForm, true>(v, begin, end) : pack<kFormat, kForm, false>(v, begin, end);
}

template <Format kFormat>
LS_INLINE void pack_from(const Values& v, int64_t begin, int64_t end) {
  if (v.form == kLevels8) return pack_as<kFormat, kLevels8>(v, begin, end);
  if (v.form == kLevels4) return pack_as<kFormat, kLevels4>(v, begin, end);
  pack_as<kFormat, kNF4>(v, begin, end);
}

void quantize(const Values& v, int64_t begin, int64_t end) {
  if (v.format == kFP32) return pack_from<kFP32>(v, begin, end);
  if (v.format == kBF16) return pack_from<kBF16>(v, begin, end);
  pack_from<kFP16>(v, begin, end);
}

}  // namespace

namespace quantized {
extern const QuantizedKernels LS_KERNELS;
const QuantizedKernels LS_KERNELS = {dequantize, quantize};
}  // namespace quantized
}  // namespace ls
