// Tiles of quantized weights on the CPU: choice of the instruction set, and threads.
#include <atomic>
#include <optional>

#include "instruction_set.h"
#include "quantized_ops.h"

namespace ls {
namespace {

// Tiles at least for each thread: some 10 us of work, against some 5 us to start it.
constexpr int64_t kGrain = 128, kQuantizeGrain = 32;

std::atomic<int> in_use{best_instruction_set()};

const QuantizedKernels& kernels() {
#if defined(LS_X86)
  const int set = in_use.load(std::memory_order_relaxed);
  if (set == 2) return quantized::kAVX512;
  if (set == 1) return quantized::kAVX2;
#endif
  return quantized::kPortable;
}

bool is_row(const Tensor& x, ScalarType type) {
  return x.dim() == 1 && x.is_contiguous() && !x.is_cuda() && x.scalar_type() == type;
}

void quantize_(Tensor values, Tensor packed, std::optional<Tensor> changes, int64_t form) {
  STD_TORCH_CHECK(is_row(values, values.scalar_type()), "ls_strategy: values must be contiguous, of one dimension");
  STD_TORCH_CHECK(is_row(packed, ScalarType::Byte), "ls_strategy: packed must be contiguous uint8, of one dimension");
  Values v{};
  v.form = form_of(form);
  v.count = tiles_of(values.numel(), packed, v.form);
  v.format = format_of(values, "values");
  v.values = values.const_data_ptr();
  v.packed = static_cast<uint8_t*>(packed.mutable_data_ptr());
  if (changes) {
    STD_TORCH_CHECK(is_row(*changes, ScalarType::Double) && changes->numel() == v.count,
                    "ls_strategy: changes must be fp64, one number per tile");
    v.changes = static_cast<double*>(changes->mutable_data_ptr());
  }
  v.levels = levels_of(v.form);
  for (int i = 0; i < 15; ++i) v.borders[i] = (v.levels.value[i + 1] + v.levels.value[i]) / 2.0f;
  if (!v.count) return;
  const auto kernel = kernels().quantize;
  torch::stable::parallel_for(0, v.count, kQuantizeGrain, [&](int64_t begin, int64_t end) { kernel(v, begin, end); });
}

}  // namespace

void run_tiles(const Tiles& t, const Tensor&) {
  const auto kernel = kernels().dequantize;
  torch::stable::parallel_for(0, t.count, kGrain, [&](int64_t begin, int64_t end) { kernel(t, begin, end); });
}

}  // namespace ls

// For tests: use no better instruction set than 0 portable, 1 AVX2, 2 AVX-512. Returns the one in use from now on.
extern "C" int ls_strategy_limit_quantized_isa(int limit) {
  const int best = ls::best_instruction_set();
  ls::in_use = limit < best ? limit : best;
  return ls::in_use;
}

LS_IMPLEMENT_QUANTIZED(CPU)

STABLE_TORCH_LIBRARY_IMPL(ls_strategy, CPU, m) { m.impl("quantize_", TORCH_BOX(&ls::quantize_)); }
