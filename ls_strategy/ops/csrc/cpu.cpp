// The operations on the CPU: choice of the instruction set, threads.
#include <atomic>
#include <vector>

#include "instruction_set.h"
#include "kernels.h"
#include "ops.h"

namespace ls {
namespace {

// 32 Ki elements at least for each thread: 0.9 MB of AdamW's state, some 30 us, against some 5 us to start a thread's work.
constexpr int64_t kGrain = (1 << 15) / kScaleBlock;

std::atomic<int> in_use{best_instruction_set()};

const Kernels& kernels() {
#if defined(LS_X86)
  const int set = in_use.load(std::memory_order_relaxed);
  if (set == 2) return kAVX512;
  if (set == 1) return kAVX2;
#endif
  return kPortable;
}

template <class Numbers>
void run(UpdateRange<Numbers> range, const Numbers& numbers, const Buffers& b) {
  const int64_t blocks = (b.n + kScaleBlock - 1) / kScaleBlock;
  torch::stable::parallel_for(0, blocks, kGrain, [&](int64_t begin, int64_t end) {
    const int64_t stop = end * kScaleBlock;
    range(numbers, b, begin * kScaleBlock, stop < b.n ? stop : b.n);
  });
}

}  // namespace

void launch(const AdamWNumbers& numbers, const Buffers& b, const Tensor&) { run(kernels().adamw, numbers, b); }
void launch(const LionNumbers& numbers, const Buffers& b, const Tensor&) { run(kernels().lion, numbers, b); }
void launch(const SGDNumbers& numbers, const Buffers& b, const Tensor&) { run(kernels().sgd, numbers, b); }
void launch(const AdagradNumbers& numbers, const Buffers& b, const Tensor&) { run(kernels().adagrad, numbers, b); }

void square_sums(const Buffers& b, const Tensor&, Tensor& result) {
  int64_t blocks = (b.n + kSumBlock - 1) / kSumBlock;
  std::vector<double> sums(blocks);
  std::atomic<int64_t> nonfinite{0};
  torch::stable::parallel_for(0, blocks, 16, [&](int64_t begin, int64_t end) {
    int64_t count = 0;
    kernels().square_sums(b, begin, end, sums.data(), &count);
    nonfinite += count;
  });
  while (blocks > 1) {
    std::vector<double> next((blocks + kSumGroup - 1) / kSumGroup);
    kernels().group_sums(sums.data(), blocks, next.data());
    sums.swap(next);
    blocks = static_cast<int64_t>(sums.size());
  }
  double* out = static_cast<double*>(result.mutable_data_ptr());
  out[0] = blocks ? sums[0] : 0.0;
  out[1] = static_cast<double>(nonfinite.load());
}

namespace {

Tensor block_square_sums(Tensor grad, double unscale) {
  const Buffers b = gradient(grad, unscale);
  const int64_t blocks = (b.n + kExactBlock - 1) / kExactBlock;
  Tensor sums = torch::stable::new_empty(grad, {&blocks, 1}, ScalarType::Double);
  double* const out = static_cast<double*>(sums.mutable_data_ptr());
  torch::stable::parallel_for(0, blocks, 256, [&](int64_t begin, int64_t end) { kernels().block_square_sums(b, begin, end, out); });
  return sums;
}

}  // namespace
}  // namespace ls

// For tests: use no better instruction set than 0 portable, 1 AVX2, 2 AVX-512. Returns the one in use from now on.
extern "C" int ls_strategy_limit_isa(int limit) {
  const int best = ls::best_instruction_set();
  ls::in_use = limit < best ? limit : best;
  return ls::in_use;
}

LS_IMPLEMENT(CPU)

STABLE_TORCH_LIBRARY_IMPL(ls_strategy, CPU, m) { m.impl("block_square_sums", TORCH_BOX(&ls::block_square_sums)); }
