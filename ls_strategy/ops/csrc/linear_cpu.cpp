// Products with packed weights on the CPU, as torch sees them: checks, choice of the instruction set, threads.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "instruction_set.h"
#include "linear.h"

namespace ls {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Bytes of weights at least for each thread: some 10 us of work, against some 5 us to start it.
constexpr int64_t kGrain = 1 << 17;

std::atomic<int> in_use{best_instruction_set()};

const LinearKernels& kernels() {
#if defined(LS_X86)
  const int set = in_use.load(std::memory_order_relaxed);
  if (set == 2) return linear::kAVX512;
  if (set == 1) return linear::kAVX2;
#endif
  return linear::kPortable;
}

void check(const Tensor& x, int64_t dims, ScalarType type, const char* what) {
  STD_TORCH_CHECK(!x.is_cuda() && x.dim() == dims && x.scalar_type() == type && x.is_contiguous(), "ls_strategy: ", what,
                  " must be contiguous, on the CPU, of ", dims, " dimensions and of its dtype");
}

Tensor multiply(const Tensor& x, Product& p, int64_t bytes_per_out,
                void (*kernel)(const Product&, int64_t begin, int64_t end)) {
  const int64_t sizes[2] = {p.rows, p.out};
  Tensor y = torch::stable::new_empty(x, {sizes, 2});
  p.x = static_cast<const float*>(x.const_data_ptr());
  p.y = static_cast<float*>(y.mutable_data_ptr());
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, bytes_per_out * p.rows));
  if (p.rows) torch::stable::parallel_for(0, p.out, grain, [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
  return y;
}

Tensor linear_int8(Tensor x, Tensor weight, Tensor scales) {
  check(x, 2, ScalarType::Float, "x");
  check(weight, 2, ScalarType::Char, "weight");
  check(scales, 1, ScalarType::Float, "scales");
  Product p{};
  p.rows = x.size(0), p.in = x.size(1), p.out = weight.size(0);
  STD_TORCH_CHECK(weight.size(1) == p.in && scales.size(0) == p.out, "ls_strategy: x (", p.rows, ", ", p.in, "), weight (", p.out,
                  ", ", weight.size(1), ") and scales (", scales.size(0), ",) do not fit");
  p.weight = weight.const_data_ptr();
  p.scales = static_cast<const float*>(scales.const_data_ptr());
  return multiply(x, p, p.in, kernels().int8);
}

Tensor linear_int4(Tensor x, Tensor weight, Tensor scales_zeros) {
  check(x, 2, ScalarType::Float, "x");
  check(weight, 2, ScalarType::Char, "weight");
  check(scales_zeros, 3, ScalarType::Float, "scales_zeros");
  Product p{};
  p.rows = x.size(0), p.in = x.size(1), p.out = weight.size(0);
  const int64_t groups = scales_zeros.size(1);
  STD_TORCH_CHECK(groups > 0 && p.in % groups == 0 && p.in / groups % kPacked == 0 && weight.size(1) * 2 == p.in &&
                      scales_zeros.size(0) == p.out && scales_zeros.size(2) == 2,
                  "ls_strategy: x (", p.rows, ", ", p.in, "), weight (", p.out, ", ", weight.size(1), ") and ", groups,
                  " groups do not fit");
  p.group = p.in / groups;
  const float* const from = static_cast<const float*>(x.const_data_ptr());
  std::vector<float> sums(p.rows * groups);
  for (int64_t i = 0; i < p.rows * groups; ++i) {
    float total = 0;
    for (int64_t j = 0; j < p.group; ++j) total += from[i * p.group + j];
    sums[i] = total;
  }
  p.sums = sums.data();
  p.weight = weight.const_data_ptr();
  p.scales = static_cast<const float*>(scales_zeros.const_data_ptr());
  return multiply(x, p, p.in / 2, kernels().int4);
}

}  // namespace
}  // namespace ls

// For tests: use no better instruction set than 0 portable, 1 AVX2, 2 AVX-512. Returns the one in use from now on.
extern "C" int ls_strategy_limit_linear_isa(int limit) {
  const int best = ls::best_instruction_set();
  ls::in_use = limit < best ? limit : best;
  return ls::in_use;
}

STABLE_TORCH_LIBRARY_IMPL(ls_strategy, CPU, m) {
  m.impl("linear_int8", TORCH_BOX(&ls::linear_int8));
  m.impl("linear_int4", TORCH_BOX(&ls::linear_int4));
}
