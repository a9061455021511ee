// The updates on a GPU: a thread takes four neighbouring elements at a time; with 8-bit moments, a warp takes a block that
// shares a scale, eight elements per lane, which stay in registers until the scale is known.
#include "scalar.cuh"

#include "math.h"

namespace ls {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kPerLane = kScaleBlock / kWarp / kVector;  // groups of four elements

LS_INLINE uint32_t key_of(const Buffers& b, int64_t i) { return (b.offset + static_cast<uint32_t>(i)) * kWeyl + b.seed; }

// A moment in fp32 or bf16.
template <bool kWide, bool kSigned>
LS_INLINE void store_moment(void* to, Format format, int64_t i, int64_t n, const Vector<float>& v, uint32_t key) {
  if (format == kFP32) return store4<kWide, float>(to, i, n, v);
  Vector<uint16_t> raw;
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    raw.x[k] = stochastic_bf16(v.x[k], rounding_of<kSigned, float>(random_bits<float>(key + k * kWeyl))) >> 16;
  }
  store4<kWide, uint16_t>(to, i, n, raw);
}

template <class Rule, bool kWide>
__global__ void __launch_bounds__(kThreads) update_kernel(const typename Rule::Numbers numbers, const Buffers b) {
  const Rule rule(numbers);
  const float clip = b.clip ? *b.clip : 1.0f;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kVector;
  if (i >= b.n) return;
  Vector<float> p = load4<kWide, float>(b.param, i, b.n), m{}, v{};
  const Vector<float> g = load4<kWide>(b.grad, b.grad_format, i, b.n);
  if (Rule::kFirst) m = load4<kWide>(b.first, b.moment_format, i, b.n);
  if (Rule::kSecond) v = load4<kWide>(b.second, b.moment_format, i, b.n);
#pragma unroll
  for (int k = 0; k < kVector; ++k) rule(p.x[k], g.x[k] * b.unscale * clip, m.x[k], v.x[k]);
  store4<kWide, float>(b.param, i, b.n, p);
  const uint32_t key = key_of(b, i);
  if (Rule::kFirst) store_moment<kWide, true>(b.first, b.moment_format, i, b.n, m, key);
  if (Rule::kSecond) store_moment<kWide, false>(b.second, b.moment_format, i, b.n, v, key);
  if (b.out) store4<kWide>(b.out, b.out_format, i, b.n, p);
}

// The value of a code, which is the root of a second moment.
template <bool kSigned>
LS_INLINE float decode(int code, float scale) {
  return number(static_cast<uint32_t>(Code<kSigned>::decode(code)) << 16) * scale;
}

// Codes of one block from the values of all lanes of a warp.
template <bool kSigned, bool kWide>
LS_INLINE void store_codes(void* to, float* scale, int64_t start, int64_t n, const Vector<float>* values, const Buffers& b) {
  const int lane = threadIdx.x % kWarp;
  uint32_t largest = 0;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) largest = max(largest, bits(values[j].x[k]) & 0x7FFFFFFFu);
  }
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, step));
  const bool finite = largest < kInfinityBits;
  const float new_scale = number(finite ? scale_bits(largest) : kNaNBits);
  const float inverse = finite && largest ? __fdiv_rn(1.0f, new_scale) : 0.0f;
  if (lane == 0) *scale = new_scale;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int64_t i = start + (j * kWarp + lane) * kVector;
    const uint32_t key = key_of(b, i);
    Vector<uint8_t> codes;
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const float x = values[j].x[k];
      const uint32_t rounded = Code<kSigned>::round(x, inverse, random_bits<float>(key + k * kWeyl));
      const int code = Code<kSigned>::encode(static_cast<int>(rounded >> 16), static_cast<int>(bits(x) >> 16));
      codes.x[k] = finite ? code : Code<kSigned>::kTop;
    }
    store4<kWide, uint8_t>(to, i, n, codes);
  }
}

template <class Rule, bool kWide>
__global__ void __launch_bounds__(kThreads) update_8bit_kernel(const typename Rule::Numbers numbers, const Buffers b) {
  const Rule rule(numbers);
  const float clip = b.clip ? *b.clip : 1.0f;
  const int64_t block = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  const int64_t start = block * kScaleBlock;
  if (start >= b.n) return;  // the whole warp
  const int lane = threadIdx.x % kWarp;
  const float scale1 = Rule::kFirst ? b.first_scales[block] : 0.0f, scale2 = Rule::kSecond ? b.second_scales[block] : 0.0f;
  Vector<float> first[kPerLane], second[kPerLane];
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int64_t i = start + (j * kWarp + lane) * kVector;
    Vector<float> p = load4<kWide, float>(b.param, i, b.n);
    const Vector<float> g = load4<kWide>(b.grad, b.grad_format, i, b.n);
    Vector<uint8_t> codes1{}, codes2{};
    if (Rule::kFirst) codes1 = load4<kWide, uint8_t>(b.first, i, b.n);
    if (Rule::kSecond) codes2 = load4<kWide, uint8_t>(b.second, i, b.n);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      float m = Rule::kFirst ? decode<true>(codes1.x[k], scale1) : 0.0f;
      float v = Rule::kSecond ? decode<false>(codes2.x[k], scale2) : 0.0f;
      v = v * v;
      rule(p.x[k], g.x[k] * b.unscale * clip, m, v);
      // Past the end everything is zero, the new moments as well.
      first[j].x[k] = m;
      second[j].x[k] = root(v);
    }
    store4<kWide, float>(b.param, i, b.n, p);
    if (b.out) store4<kWide>(b.out, b.out_format, i, b.n, p);
  }
  __syncwarp();  // all lanes have read the scales that one of them now overwrites: no reduction orders memory
  if (Rule::kFirst) store_codes<true, kWide>(b.first, b.first_scales + block, start, b.n, first, b);
  if (Rule::kSecond) store_codes<false, kWide>(b.second, b.second_scales + block, start, b.n, second, b);
}

}  // namespace ls
