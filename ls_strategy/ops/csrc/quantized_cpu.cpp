// Tiles of quantized weights on the CPU: choice of the instruction set, and threads.
#include <atomic>

#include "instruction_set.h"
#include "quantized_ops.h"

namespace ls {
namespace {

// Tiles at least for each thread: some 10 us of work, against some 5 us to start it.
constexpr int64_t kGrain = 128;

std::atomic<int> in_use{best_instruction_set()};

const QuantizedKernels& kernels() {
#if defined(LS_X86)
  const int set = in_use.load(std::memory_order_relaxed);
  if (set == 2) return quantized::kAVX512;
  if (set == 1) return quantized::kAVX2;
#endif
  return quantized::kPortable;
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
