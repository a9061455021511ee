// The operations of routing as torch sees them; built like ops.h. The functions declared here are in routing_cpu.cpp.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

#include "routing.h"

namespace ls {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// Order of the kept pairs by expert, and pairs of each expert. kept may be null.
std::tuple<Tensor, Tensor> run_sort(const Tensor& indices, const bool* kept, int64_t experts);
void run_permute(const Rows&, const Tensor& like);
// Fills position, (tokens * choices,), from order first.
void run_combine(const Rows&, int64_t* position, const Tensor& like);
void run_dot(const Rows&, const Tensor& like);
void run_topk(const Scores&, const Tensor& like);

namespace {

Format row_format(const Tensor& x) {
  const ScalarType type = x.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half,
                  "ls_strategy: rows must be fp32, bf16 or fp16");
  return type == ScalarType::Float ? kFP32 : type == ScalarType::BFloat16 ? kBF16 : kFP16;
}

void check_like(const Tensor& x, const Tensor& like, const char* name) {
  STD_TORCH_CHECK(x.is_cuda() == like.is_cuda() && x.get_device_index() == like.get_device_index(), "ls_strategy: ", name,
                  " must be on the device of the others");
}

int64_t product(const Tensor& x, int64_t first, int64_t second, ScalarType type, const Tensor& like, const char* name) {
  check_like(x, like, name);
  STD_TORCH_CHECK(x.dim() == 2 && x.size(0) == first && x.size(1) == second && x.scalar_type() == type, "ls_strategy: ", name,
                  " must be (", first, ", ", second, ") and of its dtype");
  return first * second;
}

// Rows without operands; `weights` and `order` are contiguous.
Rows rows_of(const Tensor& like, const Tensor& order, const MaybeTensor& weights, int64_t tokens, int64_t k) {
  STD_TORCH_CHECK(like.dim() == 2, "ls_strategy: rows must be a matrix, not of ", like.dim(), " dimensions");
  STD_TORCH_CHECK(k > 0 && tokens >= 0, "ls_strategy: ", tokens, " tokens of ", k, " choices each");
  STD_TORCH_CHECK(order.dim() == 1 && order.scalar_type() == ScalarType::Long && order.numel() <= tokens * k,
                  "ls_strategy: order must be int64, (P,), P at most ", tokens, " * ", k);
  check_like(order, like, "order");
  Rows r{};
  r.tokens = tokens;
  r.choices = k;
  r.pairs = order.numel();
  r.width = like.size(1);
  r.order = static_cast<const int64_t*>(order.const_data_ptr());
  r.format = row_format(like);
  if (weights) {
    product(*weights, tokens, k, ScalarType::Float, like, "weights");
    r.weights = static_cast<const float*>(weights->const_data_ptr());
  }
  return r;
}

MaybeTensor contiguous(const MaybeTensor& x) { return x ? MaybeTensor(torch::stable::contiguous(*x)) : x; }

Tensor new_matrix(const Tensor& like, int64_t first, int64_t second) {
  const int64_t sizes[2] = {first, second};
  return torch::stable::new_empty(like, {sizes, 2});
}

std::tuple<Tensor, Tensor> sort_by_expert(Tensor indices, MaybeTensor kept, int64_t num_experts) {
  STD_TORCH_CHECK(indices.dim() == 2 && indices.scalar_type() == ScalarType::Long, "ls_strategy: indices must be int64, (S, k)");
  STD_TORCH_CHECK(num_experts > 0, "ls_strategy: ", num_experts, " experts");
  if (kept) product(*kept, indices.size(0), indices.size(1), ScalarType::Bool, indices, "kept");
  indices = torch::stable::contiguous(indices);
  kept = contiguous(kept);
  return run_sort(indices, kept ? static_cast<const bool*>(kept->const_data_ptr()) : nullptr, num_experts);
}

Tensor permute(Tensor x, Tensor order, MaybeTensor weights, int64_t k) {
  x = torch::stable::contiguous(x);
  order = torch::stable::contiguous(order);
  weights = contiguous(weights);
  Rows r = rows_of(x, order, weights, x.dim() ? x.size(0) : 0, k);
  Tensor out = new_matrix(x, r.pairs, r.width);
  r.by_token = x.const_data_ptr();
  r.out = out.mutable_data_ptr();
  if (out.numel()) run_permute(r, x);
  return out;
}

Tensor combine(Tensor y, Tensor order, MaybeTensor weights, int64_t tokens, int64_t k) {
  y = torch::stable::contiguous(y);
  order = torch::stable::contiguous(order);
  weights = contiguous(weights);
  Rows r = rows_of(y, order, weights, tokens, k);
  product(y, r.pairs, r.width, y.scalar_type(), y, "y");
  Tensor out = new_matrix(y, r.tokens, r.width);
  if (!out.numel()) return out;
  const int64_t size = tokens * k;
  Tensor position = torch::stable::new_empty(order, {&size, 1});
  int64_t* const filled = static_cast<int64_t*>(position.mutable_data_ptr());
  r.position = filled;
  r.by_pair = y.const_data_ptr();
  r.out = out.mutable_data_ptr();
  run_combine(r, filled, y);
  return out;
}

Tensor pair_dots(Tensor x, Tensor y, Tensor order, int64_t k) {
  x = torch::stable::contiguous(x);
  y = torch::stable::contiguous(y);
  order = torch::stable::contiguous(order);
  Rows r = rows_of(x, order, {}, x.dim() ? x.size(0) : 0, k);
  product(y, r.pairs, r.width, x.scalar_type(), x, "y");
  const int64_t sizes[2] = {r.tokens, k};
  Tensor out = torch::stable::new_zeros(x, {sizes, 2}, ScalarType::Float);
  r.by_token = x.const_data_ptr();
  r.by_pair = y.const_data_ptr();
  r.out = out.mutable_data_ptr();
  if (r.pairs) run_dot(r, x);
  return out;
}

Tensor topk_indices(Tensor scores, int64_t k) {
  STD_TORCH_CHECK(scores.dim() == 2 && scores.scalar_type() == ScalarType::Float, "ls_strategy: scores must be fp32, (S, E)");
  STD_TORCH_CHECK(0 < k && k <= scores.size(1) && scores.size(1) < 0x7FFFFFFF, "ls_strategy: the best ", k, " of ", scores.size(1));
  scores = torch::stable::contiguous(scores);
  const int64_t sizes[2] = {scores.size(0), k};
  Tensor out = torch::stable::new_empty(scores, {sizes, 2}, ScalarType::Long);
  const Scores all{scores.size(0), scores.size(1), k, static_cast<const float*>(scores.const_data_ptr()),
                   static_cast<int64_t*>(out.mutable_data_ptr())};
  if (out.numel()) run_topk(all, scores);
  return out;
}

}  // namespace
}  // namespace ls

#define LS_IMPLEMENT_ROUTING(device)                          \
  STABLE_TORCH_LIBRARY_IMPL(ls_strategy, device, m) {         \
    m.impl("sort_by_expert", TORCH_BOX(&ls::sort_by_expert)); \
    m.impl("permute", TORCH_BOX(&ls::permute));               \
    m.impl("combine", TORCH_BOX(&ls::combine));               \
    m.impl("pair_dots", TORCH_BOX(&ls::pair_dots));           \
    m.impl("topk_indices", TORCH_BOX(&ls::topk_indices));     \
  }
