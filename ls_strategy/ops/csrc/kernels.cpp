// The CPU kernels, compiled once per instruction set: -DLS_KERNELS=<name> and the flags of that set. Nothing here may be an
// inline function of the standard library: the linker would keep one copy of it, perhaps that of a set which the CPU lacks.
#include "kernels.h"

#include "lanes.h"
#include "math.h"

namespace ls {
namespace {

LS_INLINE int64_t bytes_of(Format format) { return format == kFP32 ? 4 : format == kInt8 ? 1 : 2; }

LS_INLINE void store_out(void* out, Format format, int64_t i, F x) {
  if (format == kFP32) {
    store_as(static_cast<float*>(out) + i, x);
  } else {
    store_as(static_cast<uint16_t*>(out) + i, format == kBF16 ? to_bf16(x) : to_fp16(x));
  }
}

// Bits of kLanes elements from element i on, a multiple of kLanes.
LS_INLINE uint32_t load_bits(const uint8_t* from, int64_t i) {
  if (kLanes == 16) return from[i / 8] | from[i / 8 + 1] << 8;
  return kLanes == 8 ? from[i / 8] : from[i / 8] >> i % 8 & 0xF;
}
LS_INLINE void store_bits(uint8_t* to, int64_t i, uint32_t mask) {
  if (kLanes == 4) {
    const int shift = i % 8;
    to[i / 8] = (to[i / 8] & ~(0xF << shift)) | mask << shift;
    return;
  }
  to[i / 8] = mask;
  if (kLanes == 16) to[i / 8 + 1] = mask >> 8;
}

// Master weights, in fp32 or split; those of 24 bits have no bits for ties, and a signed byte.
LS_INLINE F load_master(const Buffers& b, int64_t i) {
  if (!b.high) return load_as<F>(b.param + i);
  const U high = widen(load_as<U16>(static_cast<const uint16_t*>(b.high) + i));
  if (!b.ties) return join_master<F>(high, widen(load_as<U8>(static_cast<const uint8_t*>(b.low) + i)) << 8, splat(1u));
  const U low = widen(load_as<U16>(static_cast<const uint16_t*>(b.low) + i));
  const uint32_t mask = load_bits(b.ties, i);
  return join_master<F>(high, low, mask ? splat(mask) >> iota() & 1u : U{});
}
LS_INLINE void store_master(const Buffers& b, int64_t i, F p) {
  if (!b.high) return store_as(b.param + i, p);
  const U x = bits(p);
  const U16 high = to_bf16(p);
  store_as(static_cast<uint16_t*>(b.high) + i, high);
  if (!b.ties) {
    const U y = p != p ? splat(kNaNBits) : x, upper = widen(high);
    U distance = ((y + 0x7Fu + (y >> 8 & 1u)) >> 8) - (upper << 8) + 128u;  // 0 to 256; an odd number has no 0, none has 256
    distance = distance - (distance >> 8) + ((U)(distance == 0u) & upper & 1u);
    return store_as(static_cast<uint8_t*>(b.low) + i, narrow8(distance ^ 0x80u));
  }
  store_as(static_cast<uint16_t*>(b.low) + i, narrow16(x & 0xFFFFu));
  store_bits(b.ties, i, mask_of((U)((x & 0x1FFFFu) == 0x18000u)));
}

// A moment stored in fp32 or bf16.
template <Format kFormat>
LS_INLINE F load_moment(const void* from, int64_t i) {
  return load(from, kFormat, i);
}
template <Format kFormat, bool kSigned>
LS_INLINE void store_moment(void* to, int64_t i, F x, U random) {
  if (kFormat == kFP32) {
    store_as(static_cast<float*>(to) + i, x);
  } else {
    store_as(static_cast<uint16_t*>(to) + i, upper_halves(stochastic_bf16(x, rounding_of<kSigned, F>(random))));
  }
}

// Asks for the cache line that element i begins, some elements ahead.
LS_INLINE void prefetch(const void* from, int64_t i, int64_t bytes) {
  constexpr int64_t kAhead = 1024;
  if (i * bytes % 64 == 0) __builtin_prefetch(static_cast<const char*>(from) + (i + kAhead) * bytes, 1);
}

LS_INLINE void prefetch_all(const Buffers& b, int64_t moment_bytes, int64_t i) {
  if (!b.high) prefetch(b.param, i, 4);
  if (b.high) prefetch(b.high, i, 2);
  if (b.high) prefetch(b.low, i, b.ties ? 2 : 1);
  prefetch(b.grad, i, bytes_of(b.grad_format));
  if (b.first) prefetch(b.first, i, moment_bytes);
  if (b.second) prefetch(b.second, i, moment_bytes);
  if (b.out) prefetch(b.out, i, bytes_of(b.out_format));
}

// Elements [begin, end), whole registers, moments in fp32 or bf16.
template <class Rule, Format kFormat>
LS_INLINE void update_lanes(const Rule& rule, const Buffers& b, int64_t begin, int64_t end) {
  const F unscale = splat<F>(b.unscale), clip = splat<F>(b.clip ? *b.clip : 1.0f);
  const bool scaled = b.unscale != 1.0f || b.clip;
  U key = (iota() + static_cast<uint32_t>(b.offset + begin)) * kWeyl + b.seed;
  const U stride = splat(kWeyl * kLanes);
  for (int64_t i = begin; i < end; i += kLanes, key += stride) {
    // With fp32 moments the loop waits for memory whatever is asked for; with int8 (below), for its arithmetic.
    if (kFormat == kBF16) prefetch_all(b, bytes_of(kFormat), i);
    F p = load_master(b, i), m{}, v{};
    F g = load(b.grad, b.grad_format, i);
    if (scaled) g = g * unscale * clip;
    if (Rule::kFirst) m = load_moment<kFormat>(b.first, i);
    if (Rule::kSecond) v = load_moment<kFormat>(b.second, i);
    rule(p, g, m, v);
    store_master(b, i, p);
    const U random = kFormat == kFP32 ? key : random_bits<F>(key);
    if (Rule::kFirst) store_moment<kFormat, true>(b.first, i, m, random);
    if (Rule::kSecond) store_moment<kFormat, false>(b.second, i, v, random);
    if (b.out) store_out(b.out, b.out_format, i, p);
  }
}

LS_INLINE uint32_t largest(U x) {
  uint32_t result = 0;
  for (int i = 0; i < kLanes; ++i) result = x[i] > result ? x[i] : result;
  return result;
}

// Scale of a block from the largest of its bit patterns, and the inverse.
struct Scale {
  bool finite;
  F inverse;

  LS_INLINE Scale(U magnitudes, float* scale) {
    const uint32_t top = largest(magnitudes), pattern = top < kInfinityBits ? scale_bits(top) : kNaNBits;
    __builtin_memcpy(scale, &pattern, 4);
    finite = top < kInfinityBits;
    inverse = splat<F>(finite && top ? 1.0f / *scale : 0.0f);
  }
};

// Codes are decoded and encoded two registers of numbers at a time, which are one of words.
constexpr int kPair = 2 * kLanes;

// First moments, or roots of second ones.
template <bool kSigned>
LS_INLINE void load_codes(const uint8_t* from, F scale, F* x) {
  from_upper_halves(Code<kSigned>::decode(widen(load_as<W8>(from))), x);
  for (int k = 0; k < 2; ++k) x[k] = x[k] * scale;
}

template <bool kSigned>
LS_INLINE void store_codes(uint8_t* to, const float* values, F inverse_scale, const U* random) {
  U rounded[2], own[2];
  for (int k = 0; k < 2; ++k) {
    const F x = load_as<F>(values + k * kLanes);
    own[k] = bits(x);
    rounded[k] = Code<kSigned>::round(x, inverse_scale, random[k]);
  }
  store_as(to, narrow8(Code<kSigned>::encode(upper_halves(rounded[0], rounded[1]), upper_halves(own[0], own[1]))));
}

// A block with 8-bit moments, from element `begin` on.
template <class Rule>
LS_INLINE void update_block(const Rule& rule, const Buffers& b, int64_t begin) {
  alignas(64) float first[kScaleBlock], second[kScaleBlock];
  uint8_t *const first_codes = static_cast<uint8_t*>(b.first) + begin, *const second_codes = static_cast<uint8_t*>(b.second) + begin;
  float *const first_scale = b.first_scales + begin / kScaleBlock, *const second_scale = b.second_scales + begin / kScaleBlock;
  const F unscale = splat<F>(b.unscale), clip = splat<F>(b.clip ? *b.clip : 1.0f);
  const F scale1 = splat<F>(Rule::kFirst ? *first_scale : 0.0f), scale2 = splat<F>(Rule::kSecond ? *second_scale : 0.0f);
  U largest1{}, largest2{};
  for (int j = 0; j < kScaleBlock; j += kPair) {
    F m[2]{}, s[2]{};
    if (Rule::kFirst) load_codes<true>(first_codes + j, scale1, m);
    if (Rule::kSecond) load_codes<false>(second_codes + j, scale2, s);
    for (int k = 0; k < 2; ++k) {
      const int at = j + k * kLanes;
      F p = load_master(b, begin + at), v = s[k] * s[k];
      const F g = load(b.grad, b.grad_format, begin + at) * unscale * clip;
      rule(p, g, m[k], v);
      store_master(b, begin + at, p);
      if (Rule::kFirst) {
        store_as(first + at, m[k]);
        largest1 = larger(largest1, bits(m[k]) & 0x7FFFFFFFu);
      }
      if (Rule::kSecond) {
        const F r = root(v);
        store_as(second + at, r);
        largest2 = larger(largest2, bits(r) & 0x7FFFFFFFu);
      }
      if (b.out) store_out(b.out, b.out_format, begin + at, p);
    }
  }
  const Scale new1(largest1, Rule::kFirst ? first_scale : first), new2(largest2, Rule::kSecond ? second_scale : second);
  U key = (iota() + static_cast<uint32_t>(b.offset + begin)) * kWeyl + b.seed;
  for (int j = 0; j < kScaleBlock; j += kPair) {
    U random[2];
    for (int k = 0; k < 2; ++k, key += splat(kWeyl * kLanes)) random[k] = random_bits<F>(key);
    if (Rule::kFirst) store_codes<true>(first_codes + j, first + j, new1.inverse, random);
    if (Rule::kSecond) store_codes<false>(second_codes + j, second + j, new2.inverse, random);
  }
  if (!new1.finite) __builtin_memset(first_codes, Code<true>::kTop, kScaleBlock);
  if (!new2.finite) __builtin_memset(second_codes, Code<false>::kTop, kScaleBlock);
}

// Calls `loop` with a copy of the buffers that no store can change, so that it stays in registers. The formats of a
// mixed-precision step are constants there, of which the compiler makes loops of their own: in the general one, what only some
// branches need is loaded again and again.
template <class Loop>
LS_INLINE void specialized(const Buffers& buffers, const Loop& loop) {
  Buffers b = buffers;
  if (b.grad_format == kBF16 && b.high) {
    b.grad_format = kBF16;
    b.out = nullptr;
    if (b.high) loop(b);
  } else if (b.grad_format == kBF16 && b.out && b.out_format == kBF16) {
    b.grad_format = b.out_format = kBF16;
    b.high = nullptr;
    if (b.out) loop(b);
  } else {
    loop(b);
  }
}

template <class Rule, Format kFormat>
void update_whole(const typename Rule::Numbers& numbers, const Buffers& buffers, int64_t begin, int64_t end) {
  const Rule rule(numbers);
  specialized(buffers, [&](const Buffers& b) __attribute__((always_inline)) {
    if constexpr (kFormat == kInt8) {
      for (int64_t i = begin; i < end; i += kScaleBlock) update_block(rule, b, i);
    } else {
      update_lanes<Rule, kFormat>(rule, b, begin, end);
    }
  });
}

// The elements past the last whole block, brought to memory where they can be followed by zeros.
template <class Rule, Format kFormat>
void update_tail(const typename Rule::Numbers& numbers, const Buffers& b, int64_t begin) {
  alignas(64) char param[4 * kScaleBlock] = {}, first[4 * kScaleBlock] = {}, second[4 * kScaleBlock] = {};
  alignas(64) char grad[4 * kScaleBlock] = {}, out[4 * kScaleBlock] = {};
  alignas(64) char high[2 * kScaleBlock] = {}, low[2 * kScaleBlock] = {};
  uint8_t ties[kScaleBlock / 8] = {};
  const int64_t n = b.n - begin, moment_bytes = bytes_of(kFormat);
  const int64_t grad_bytes = bytes_of(b.grad_format), out_bytes = bytes_of(b.out_format), low_bytes = b.ties ? 2 : 1;
  char *const from_first = static_cast<char*>(b.first) + begin * moment_bytes;
  char *const from_second = static_cast<char*>(b.second) + begin * moment_bytes;
  Buffers tail = b;
  tail.n = kFormat == kInt8 ? kScaleBlock : (n + kLanes - 1) / kLanes * kLanes;
  tail.offset = b.offset + static_cast<uint32_t>(begin);
  tail.param = reinterpret_cast<float*>(param);
  tail.grad = grad;
  tail.first = first;
  tail.second = second;
  tail.first_scales = b.first_scales + begin / kScaleBlock;
  tail.second_scales = b.second_scales + begin / kScaleBlock;
  if (b.out) tail.out = out;
  if (b.high) {
    tail.high = high;
    tail.low = low;
    if (b.ties) tail.ties = ties;
    __builtin_memcpy(high, static_cast<char*>(b.high) + begin * 2, n * 2);
    __builtin_memcpy(low, static_cast<char*>(b.low) + begin * low_bytes, n * low_bytes);
    if (b.ties) __builtin_memcpy(ties, b.ties + begin / 8, (n + 7) / 8);
  } else {
    __builtin_memcpy(param, b.param + begin, n * 4);
  }
  __builtin_memcpy(grad, static_cast<const char*>(b.grad) + begin * grad_bytes, n * grad_bytes);
  if (Rule::kFirst) __builtin_memcpy(first, from_first, n * moment_bytes);
  if (Rule::kSecond) __builtin_memcpy(second, from_second, n * moment_bytes);
  update_whole<Rule, kFormat>(numbers, tail, 0, tail.n);
  if (b.high) {
    __builtin_memcpy(static_cast<char*>(b.high) + begin * 2, high, n * 2);
    __builtin_memcpy(static_cast<char*>(b.low) + begin * low_bytes, low, n * low_bytes);
    if (b.ties) __builtin_memcpy(b.ties + begin / 8, ties, (n + 7) / 8);
  } else {
    __builtin_memcpy(b.param + begin, param, n * 4);
  }
  if (Rule::kFirst) __builtin_memcpy(from_first, first, n * moment_bytes);
  if (Rule::kSecond) __builtin_memcpy(from_second, second, n * moment_bytes);
  if (b.out) __builtin_memcpy(static_cast<char*>(b.out) + begin * out_bytes, out, n * out_bytes);
}

template <class Rule, Format kFormat>
void update_range(const typename Rule::Numbers& numbers, const Buffers& b, int64_t begin, int64_t end) {
  const int64_t whole = end - end % kScaleBlock;
  update_whole<Rule, kFormat>(numbers, b, begin, whole);
  if (whole < end) update_tail<Rule, kFormat>(numbers, b, whole);
}

template <class Rule>
void update(const typename Rule::Numbers& numbers, const Buffers& b, int64_t begin, int64_t end) {
  if constexpr (Rule::kFirst || Rule::kSecond) {
    if (b.moment_format == kBF16) return update_range<Rule, kBF16>(numbers, b, begin, end);
    if (b.moment_format == kInt8) return update_range<Rule, kInt8>(numbers, b, begin, end);
  }
  update_range<Rule, kFP32>(numbers, b, begin, end);
}

void sgd(const SGDNumbers& numbers, const Buffers& b, int64_t begin, int64_t end) {
  b.first ? update<MomentumSGD<F>>(numbers, b, begin, end) : update<PlainSGD<F>>(numbers, b, begin, end);
}

// --- sums --------------------------------------------------------------------------------------------------------------

constexpr int kWide = kLanes / 2;  // fp64 numbers in a register
constexpr int kRegisters = kSumLanes / kWide;
typedef double D __attribute__((vector_size(8 * kWide)));
typedef float HalfF __attribute__((vector_size(4 * kWide)));

LS_INLINE double fold(const D* lanes) {
  double x[kSumLanes];
  __builtin_memcpy(x, lanes, sizeof x);
  for (int width = kSumLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) x[i] = x[i] + x[i + width];
  }
  return x[0];
}

// kBlock elements of the gradient, in fp32 or of two bytes each.
template <int kBlock>
LS_INLINE double square_sum(const void* grad, Format format, F unscale, I* nonfinite) {
  D lanes[kRegisters] = {};
  for (int i = 0; i < kBlock; i += kSumLanes) {
    for (int j = 0; j < kRegisters; j += 2) {
      const F x = load(grad, format, i + j * kWide) * unscale;
      *nonfinite += (I)((bits(x) & 0x7FFFFFFFu) >= kInfinityBits);
      HalfF halves[2];
      __builtin_memcpy(halves, &x, sizeof x);
      const D low = __builtin_convertvector(halves[0], D), high = __builtin_convertvector(halves[1], D);
      lanes[j] += low * low;
      lanes[j + 1] += high * high;
    }
  }
  return fold(lanes);
}

// Blocks [begin, end), the last one of the gradient padded with zeros. Adds -1 to nonfinite per element that is not finite.
template <int kBlock>
LS_INLINE void sums_of_blocks(const Buffers& b, int64_t begin, int64_t end, double* sums, I* nonfinite) {
  const F unscale = splat<F>(b.unscale);
  const int64_t bytes = bytes_of(b.grad_format);
  for (int64_t block = begin; block < end; ++block) {
    const char* grad = static_cast<const char*>(b.grad) + block * kBlock * bytes;
    const int64_t n = b.n - block * kBlock;
    alignas(64) char padded[4 * kBlock];
    if (n < kBlock) {
      __builtin_memset(padded, 0, sizeof padded);
      __builtin_memcpy(padded, grad, n * bytes);
      grad = padded;
    }
    sums[block] = square_sum<kBlock>(grad, b.grad_format, unscale, nonfinite);
  }
}

void square_sums(const Buffers& b, int64_t begin, int64_t end, double* sums, int64_t* count) {
  for (int64_t block = begin; block < end; ++block) {  // one by one, so that no lane of the counts overflows
    I nonfinite{};
    sums_of_blocks<kSumBlock>(b, block, block + 1, sums, &nonfinite);
    for (int i = 0; i < kLanes; ++i) *count -= nonfinite[i];
  }
}

void block_square_sums(const Buffers& b, int64_t begin, int64_t end, double* sums) {
  I nonfinite{};  // the sum of its block says it
  sums_of_blocks<kExactBlock>(b, begin, end, sums, &nonfinite);
}

void group_sums(const double* numbers, int64_t n, double* sums) {
  for (int64_t begin = 0; begin < n; begin += kSumGroup) {
    D lanes[kRegisters] = {};
    for (int64_t i = begin; i < begin + kSumGroup && i < n; i += kSumLanes) {
      double row[kSumLanes] = {};
      __builtin_memcpy(row, numbers + i, (n - i < kSumLanes ? n - i : kSumLanes) * sizeof(double));
      for (int j = 0; j < kRegisters; ++j) lanes[j] += load_as<D>(row + j * kWide);
    }
    sums[begin / kSumGroup] = fold(lanes);
  }
}

}  // namespace

const Kernels LS_KERNELS = {update<AdamW<F>>, update<Lion<F>>, sgd, update<Adagrad<F>>, square_sums, block_square_sums, group_sums};

}  // namespace ls
