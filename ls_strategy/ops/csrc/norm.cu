// Sums of squares on a GPU: a warp takes kSumBlock numbers, a lane of the warp is a lane of the definition in norm.py.
#include "scalar.cuh"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "math.h"

namespace ls {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
static_assert(kSumLanes == kWarp, "a lane of the sum is a lane of a warp");

LS_INLINE double fold(double x) {
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
  nonfinite = __reduce_add_sync(0xFFFFFFFFu, nonfinite);
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

unsigned int thread_blocks(int64_t warps) { return static_cast<unsigned int>((warps * kWarp + kThreads - 1) / kThreads); }

}  // namespace

void square_sums(const Buffers& b, const Tensor& grad, Tensor& result) {
  if (b.n == 0) return;
  torch::stable::accelerator::DeviceGuard guard(grad.get_device_index());
  void* stream_pointer = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(grad.get_device_index(), &stream_pointer));
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  double* const out = static_cast<double*>(result.mutable_data_ptr());
  int64_t blocks = (b.n + kSumBlock - 1) / kSumBlock;
  // Memory of torch's allocator may be given back before the kernels ran: it is reused on the same stream only.
  Tensor sums = torch::stable::new_empty(grad, {&blocks, 1}, ScalarType::Double);
  double* target = blocks == 1 ? out : static_cast<double*>(sums.mutable_data_ptr());
  square_sums_kernel<<<thread_blocks(blocks), kThreads, 0, stream>>>(b, target, out + 1);
  while (blocks > 1) {
    const double* source = target;
    const int64_t n = blocks;
    blocks = (n + kSumGroup - 1) / kSumGroup;
    Tensor next = torch::stable::new_empty(grad, {&blocks, 1}, ScalarType::Double);
    target = blocks == 1 ? out : static_cast<double*>(next.mutable_data_ptr());
    group_sums_kernel<<<thread_blocks(blocks), kThreads, 0, stream>>>(source, n, target);
    sums = next;
  }
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, "ls_strategy: ", cudaGetErrorString(error));
}

}  // namespace ls
