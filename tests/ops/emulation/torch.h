// Included before a kernel's source: torch's operators with device memory on the host.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "device.h"

namespace torch::stable {

inline Tensor on_device(Tensor x, bool filled) {
  void* const begin = x.mutable_data_ptr();
  const size_t bytes = x.numel() * x.element_size();
  if (!filled && bytes) __builtin_memset(begin, 0xAB, bytes);
  emulation::allow(begin, bytes, x.element_size(), true);
  return x;
}

inline Tensor emulated_new_empty(const Tensor& like, headeronly::IntHeaderOnlyArrayRef sizes,
                                 std::optional<headeronly::ScalarType> dtype = std::nullopt) {
  return on_device(new_empty(like, sizes, dtype), false);
}

inline Tensor emulated_new_zeros(const Tensor& like, headeronly::IntHeaderOnlyArrayRef sizes,
                                 std::optional<headeronly::ScalarType> dtype = std::nullopt) {
  return on_device(new_zeros(like, sizes, dtype), true);
}

namespace accelerator {
struct EmulatedGuard {
  explicit EmulatedGuard(int) {}
};
}  // namespace accelerator

}  // namespace torch::stable

inline int32_t emulated_current_stream(int, void** stream) {
  *stream = nullptr;
  return 0;
}

#define new_empty emulated_new_empty
#define new_zeros emulated_new_zeros
#define DeviceGuard EmulatedGuard
#define aoti_torch_get_current_cuda_stream emulated_current_stream
#define CUDA CPU  // the dispatch key
