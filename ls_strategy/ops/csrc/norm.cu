// Sums of squares on a GPU: a warp takes kSumBlock numbers, a lane of the warp is a lane of the definition in norm.py.
#include "scalar.cuh"

#include "math.h"

namespace ls {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
static_assert(kSumLanes == kWarp, "a lane of the sum is a lane of a warp");

template <class T>
LS_INLINE T fold(T x) {
#pragma unroll
  for (int width = kWarp / 2; width > 0; width /= 2) x = x + __shfl_down_sync(0xFFFFFFFFu, x, width);
  return x;
}

LS_INLINE float load1(const void* from, Format format, int64_t i) {
  if (format == kFP32) return static_cast<const float*>(from)[i];
  const uint16_t x = static_cast<const uint16_t*>(from)[i];
  return format == kBF16 ? number(uint32_t(x) << 16) : from_fp16(x);
}

// sums: one per kSumBlock elements. count: elements that are not finite, whole numbers, so that their order is of no effect.
__global__ void __launch_bounds__(kThreads) square_sums_kernel(const Buffers b, double* sums, double* count) {
  const int64_t block = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  const int64_t start = block * kSumBlock + threadIdx.x % kWarp;
  if (block * kSumBlock >= b.n) return;  // the whole warp
  double sum = 0;
  int nonfinite = 0;
  if ((block + 1) * kSumBlock <= b.n) {
#pragma unroll 16
    for (int k = 0; k < kSumBlock; k += kWarp) {
      const float x = load1(b.grad, b.grad_format, start + k) * b.unscale;
      nonfinite += (bits(x) & 0x7FFFFFFFu) >= kInfinityBits;
      sum = sum + static_cast<double>(x) * static_cast<double>(x);
    }
  } else {
    for (int64_t i = start; i < b.n; i += kWarp) {
      const float x = load1(b.grad, b.grad_format, i) * b.unscale;
      nonfinite += (bits(x) & 0x7FFFFFFFu) >= kInfinityBits;
      sum = sum + static_cast<double>(x) * static_cast<double>(x);
    }
  }
  sum = fold(sum);
  nonfinite = fold(nonfinite);
  if (threadIdx.x % kWarp == 0) {
    sums[block] = sum;
    if (nonfinite) atomicAdd(count, static_cast<double>(nonfinite));
  }
}

__global__ void __launch_bounds__(kThreads) group_sums_kernel(const double* numbers, int64_t n, double* sums) {
  const int64_t group = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  if (group * kSumGroup >= n) return;  // the whole warp
  const int64_t end = (group + 1) * kSumGroup < n ? (group + 1) * kSumGroup : n;
  double sum = 0;
#pragma unroll 8
  for (int64_t i = group * kSumGroup + threadIdx.x % kWarp; i < end; i += kWarp) sum = sum + numbers[i];
  sum = fold(sum);
  if (threadIdx.x % kWarp == 0) sums[group] = sum;
}

}  // namespace ls
