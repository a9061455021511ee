// The operations of routing on the CPU: choice of the instruction set, threads, and the counting sort.
#include <algorithm>
#include <atomic>
#include <vector>

#include "instruction_set.h"
#include "routing_ops.h"

namespace ls {
namespace {

// Elements at least for each thread: some 10 us of work, against some 5 us to start it.
constexpr int64_t kGrain = 1 << 15;

std::atomic<int> in_use{best_instruction_set()};

const RoutingKernels& kernels() {
#if defined(LS_X86)
  const int set = in_use.load(std::memory_order_relaxed);
  if (set == 2) return routing::kAVX512;
  if (set == 1) return routing::kAVX2;
#endif
  return routing::kPortable;
}

int64_t rows_at_least(int64_t width) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width)); }

void check_order(const Rows& r) {
  for (int64_t p = 0; p < r.pairs; ++p) {
    STD_TORCH_CHECK(0 <= r.order[p] && r.order[p] < r.tokens * r.choices, "ls_strategy: order names pair ", r.order[p], " of ",
                    r.tokens * r.choices);
  }
}

// A part of the pairs, and how many of them go to each expert; later, where its next one goes.
struct Part {
  int64_t begin, end;
  std::vector<int64_t> places;
};

}  // namespace

std::tuple<Tensor, Tensor> run_sort(const Tensor& indices, const bool* kept, int64_t experts) {
  const int64_t pairs = indices.numel();
  const int64_t* const of = static_cast<const int64_t*>(indices.const_data_ptr());
  const int64_t count = std::clamp<int64_t>(pairs / kGrain, 1, torch::stable::get_num_threads());
  std::vector<Part> parts(count);
  std::atomic<bool> valid{true};
  torch::stable::parallel_for(0, count, 1, [&](int64_t first, int64_t last) {
    for (int64_t c = first; c < last; ++c) {
      parts[c] = {pairs * c / count, pairs * (c + 1) / count, std::vector<int64_t>(experts)};
      for (int64_t i = parts[c].begin; i < parts[c].end; ++i) {
        if (kept && !kept[i]) continue;
        if (of[i] < 0 || of[i] >= experts) {
          valid = false;
          return;
        }
        ++parts[c].places[of[i]];
      }
    }
  });
  STD_TORCH_CHECK(valid, "ls_strategy: indices must be below the number of experts, ", experts, ", and not negative");
  Tensor counts = torch::stable::new_empty(indices, {&experts, 1});
  int64_t* const totals = static_cast<int64_t*>(counts.mutable_data_ptr());
  int64_t rows = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t before = rows;
    for (Part& part : parts) {
      const int64_t of_part = part.places[e];
      part.places[e] = rows;
      rows += of_part;
    }
    totals[e] = rows - before;
  }
  Tensor order = torch::stable::new_empty(indices, {&rows, 1});
  int64_t* const out = static_cast<int64_t*>(order.mutable_data_ptr());
  torch::stable::parallel_for(0, count, 1, [&](int64_t first, int64_t last) {
    for (int64_t c = first; c < last; ++c) {
      for (int64_t i = parts[c].begin; i < parts[c].end; ++i) {
        if (!kept || kept[i]) out[parts[c].places[of[i]]++] = i;
      }
    }
  });
  return {order, counts};
}

void run_permute(const Rows& r, const Tensor&) {
  check_order(r);
  torch::stable::parallel_for(0, r.pairs, rows_at_least(r.width),
                              [&](int64_t begin, int64_t end) { kernels().permute(r, begin, end); });
}

void run_combine(const Rows& r, int64_t* position, const Tensor&) {
  check_order(r);
  std::fill(position, position + r.tokens * r.choices, -1);
  for (int64_t p = 0; p < r.pairs; ++p) {
    STD_TORCH_CHECK(position[r.order[p]] < 0, "ls_strategy: order names pair ", r.order[p], " twice");
    position[r.order[p]] = p;
  }
  torch::stable::parallel_for(0, r.tokens, rows_at_least(r.width * r.choices),
                              [&](int64_t begin, int64_t end) { kernels().combine(r, begin, end); });
}

void run_dot(const Rows& r, const Tensor&) {
  check_order(r);
  torch::stable::parallel_for(0, r.pairs, rows_at_least(r.width),
                              [&](int64_t begin, int64_t end) { kernels().dot(r, begin, end); });
}

void run_topk(const Scores& scores, const Tensor&) {
  torch::stable::parallel_for(0, scores.rows, rows_at_least(scores.experts), [&](int64_t begin, int64_t end) {
    std::vector<int32_t> keys(scores.experts + kMostLanes);
    kernels().topk(scores, keys.data(), begin, end);
  });
}

}  // namespace ls

// For tests: use no better instruction set than 0 portable, 1 AVX2, 2 AVX-512. Returns the one in use from now on.
extern "C" int ls_strategy_limit_routing_isa(int limit) {
  const int best = ls::best_instruction_set();
  ls::in_use = limit < best ? limit : best;
  return ls::in_use;
}

LS_IMPLEMENT_ROUTING(CPU)
