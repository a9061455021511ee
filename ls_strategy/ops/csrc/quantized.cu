// Tiles of quantized weights on a GPU. A thread takes four bytes of codes: eight elements of 4 bits, or four of 8 bits.
#include "scalar.cuh"

#include "quantized.h"

namespace ls {

constexpr int kThreads = 256;
constexpr int kCodes = 4;                     // bytes of a thread
constexpr int kPerTile4 = kTile / 2 / kCodes;  // threads of a tile
constexpr int kPerTile8 = kTile / kCodes;

LS_INLINE float scale_of(const uint8_t* tile, int block) {
  return number(static_cast<uint32_t>(tile[2 * block] | tile[2 * block + 1] << 8) << 16);
}

template <bool kWide>
__global__ void __launch_bounds__(kThreads) dequantize4_kernel(const Tiles t) {
  __shared__ float table[16];
  if (threadIdx.x < 16) table[threadIdx.x] = t.levels.value[threadIdx.x];
  __syncthreads();
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, n = thread / kPerTile4;
  if (n >= t.count) return;
  const int byte = static_cast<int>(thread % kPerTile4) * kCodes;
  const int run = byte / (kPackedRun / 2), first = run * kPackedRun + byte % (kPackedRun / 2);
  const uint8_t* const tile = t.packed + n * kTileBytes4;
  const float scale = scale_of(tile, first / kBlock);
  const Vector<uint8_t> codes = load4<kWide, uint8_t>(tile + kScaleBytes, byte, kTile / 2);
  Vector<float> low, high;
#pragma unroll
  for (int k = 0; k < kVector; ++k) {
    low.x[k] = table[codes.x[k] & 15] * scale;
    high.x[k] = table[codes.x[k] >> 4] * scale;
  }
  const int64_t all = t.count * kTile;
  store4<kWide>(t.out, t.format, n * kTile + first, all, low);
  store4<kWide>(t.out, t.format, n * kTile + first + kPackedRun / 2, all, high);
}

template <bool kWide>
__global__ void __launch_bounds__(kThreads) dequantize8_kernel(const Tiles t) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, n = thread / kPerTile8;
  if (n >= t.count) return;
  const int first = static_cast<int>(thread % kPerTile8) * kCodes;
  const uint8_t* const tile = t.packed + n * kTileBytes8;
  const float scale = scale_of(tile, first / kBlock);
  const Vector<uint8_t> codes = load4<kWide, uint8_t>(tile + kScaleBytes, first, kTile);
  Vector<float> values;
#pragma unroll
  for (int k = 0; k < kVector; ++k) values.x[k] = (static_cast<float>(codes.x[k]) - 128.0f) / 127.0f * scale;
  store4<kWide>(t.out, t.format, n * kTile + first, t.count * kTile, values);
}

}  // namespace ls
