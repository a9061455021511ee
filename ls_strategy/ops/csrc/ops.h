// The operations as torch sees them. Only the stable part of libtorch's interface is used, so that one library serves all
// releases from 2.11 on. `launch` and `square_sums` are in cpu.cpp.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "buffers.h"

namespace ls {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

void launch(const AdamWNumbers&, const Buffers&, const Tensor& param);
void launch(const LionNumbers&, const Buffers&, const Tensor& param);
void launch(const SGDNumbers&, const Buffers&, const Tensor& param);
void launch(const AdagradNumbers&, const Buffers&, const Tensor& param);
// Into result, (2,) fp64.
void square_sums(const Buffers&, const Tensor& grad, Tensor& result);

namespace {

Format format_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return kFP32;
    case ScalarType::BFloat16:
      return kBF16;
    case ScalarType::Half:
      return kFP16;
    case ScalarType::Byte:
      return kInt8;
    default:
      STD_TORCH_CHECK(false, "ls_strategy: dtype must be fp32, bf16, fp16 or uint8");
  }
  return kFP32;
}

void check(const Tensor& x, int64_t n, const Tensor& like, const char* name) {
  STD_TORCH_CHECK(x.dim() == 1 && x.numel() == n && x.is_contiguous(), "ls_strategy: ", name, " must be contiguous, (", n, ",)");
  STD_TORCH_CHECK(x.is_cuda() == like.is_cuda() && x.get_device_index() == like.get_device_index(), "ls_strategy: ", name,
                  " must be on the device of the others");
}

float* scales_of(const MaybeTensor& scales, const Tensor& codes) {
  STD_TORCH_CHECK(scales.has_value() == (format_of(codes) == kInt8), "ls_strategy: scales go with uint8 codes");
  if (!scales) return nullptr;
  check(*scales, (codes.numel() + kScaleBlock - 1) / kScaleBlock, codes, "scales");
  return static_cast<float*>(scales->mutable_data_ptr());
}

// What all updates have in common; moments are added by `with_first` and `with_second`.
Buffers buffers(Tensor& param, const Tensor& grad, const MaybeTensor& out, const MaybeTensor& clip, double unscale, int64_t seed,
                int64_t offset, const MaybeTensor& low, const MaybeTensor& ties) {
  Buffers b{};
  b.n = param.numel();
  check(param, b.n, param, "param");
  check(grad, b.n, param, "grad");
  STD_TORCH_CHECK(low.has_value() || !ties, "ls_strategy: ties go with low");
  if (low) {
    STD_TORCH_CHECK(format_of(param) == kBF16 && !out, "ls_strategy: with low, param must be bf16, and is what out would be");
    STD_TORCH_CHECK(low->scalar_type() == (ties ? ScalarType::Short : ScalarType::Char),
                    "ls_strategy: low must be int16 with ties, int8 without");
    check(*low, b.n, param, "low");
    b.high = param.mutable_data_ptr();
    b.low = const_cast<Tensor&>(*low).mutable_data_ptr();
    if (ties) {
      STD_TORCH_CHECK(ties->scalar_type() == ScalarType::Byte, "ls_strategy: ties must be uint8");
      check(*ties, (b.n + 7) / 8, param, "ties");
      b.ties = static_cast<uint8_t*>(const_cast<Tensor&>(*ties).mutable_data_ptr());
    }
  } else {
    STD_TORCH_CHECK(format_of(param) == kFP32, "ls_strategy: param must be fp32");
    b.param = static_cast<float*>(param.mutable_data_ptr());
  }
  b.grad = grad.const_data_ptr();
  b.grad_format = format_of(grad);
  STD_TORCH_CHECK(b.grad_format != kInt8, "ls_strategy: grad must be fp32, bf16 or fp16");
  if (out) {
    check(*out, b.n, param, "out");
    b.out = const_cast<Tensor&>(*out).mutable_data_ptr();
    b.out_format = format_of(*out);
    STD_TORCH_CHECK(b.out_format != kInt8, "ls_strategy: out must be fp32, bf16 or fp16");
  }
  if (clip) {
    STD_TORCH_CHECK(clip->numel() == 1 && format_of(*clip) == kFP32 && clip->is_cuda() == param.is_cuda(),
                    "ls_strategy: clip must be one fp32 number on the device of the others");
    b.clip = static_cast<const float*>(clip->const_data_ptr());
  }
  b.unscale = static_cast<float>(unscale);
  b.seed = static_cast<uint32_t>(seed);
  b.offset = static_cast<uint32_t>(offset);
  return b;
}

void with_first(Buffers& b, Tensor& codes, const MaybeTensor& scales, const Tensor& param) {
  check(codes, b.n, param, "a moment");
  b.moment_format = format_of(codes);
  STD_TORCH_CHECK(b.moment_format != kFP16, "ls_strategy: a moment must be fp32, bf16 or uint8");
  b.first = codes.mutable_data_ptr();
  b.first_scales = scales_of(scales, codes);
}

void with_second(Buffers& b, Tensor& codes, const MaybeTensor& scales, const Tensor& param) {
  check(codes, b.n, param, "a moment");
  STD_TORCH_CHECK(!b.first || b.moment_format == format_of(codes), "ls_strategy: moments must have one format");
  b.moment_format = format_of(codes);
  STD_TORCH_CHECK(b.moment_format != kFP16, "ls_strategy: a moment must be fp32, bf16 or uint8");
  b.second = codes.mutable_data_ptr();
  b.second_scales = scales_of(scales, codes);
}

float fp32(double x) { return static_cast<float>(x); }

void adamw_(Tensor param, Tensor exp_avg, MaybeTensor exp_avg_scales, Tensor exp_avg_sq, MaybeTensor exp_avg_sq_scales, Tensor grad,
            MaybeTensor out, MaybeTensor clip, double unscale, double decay, double l2, double weight1, double rest1, double beta2,
            double weight2, double root2, double eps, double rate, int64_t seed, int64_t offset, MaybeTensor low, MaybeTensor ties) {
  Buffers b = buffers(param, grad, out, clip, unscale, seed, offset, low, ties);
  with_first(b, exp_avg, exp_avg_scales, param);
  with_second(b, exp_avg_sq, exp_avg_sq_scales, param);
  launch(AdamWNumbers{fp32(decay), fp32(l2), fp32(weight1), fp32(rest1), fp32(beta2), fp32(weight2), fp32(root2), fp32(eps), fp32(rate)},
         b, param);
}

void lion_(Tensor param, Tensor exp_avg, MaybeTensor exp_avg_scales, Tensor grad, MaybeTensor out, MaybeTensor clip, double unscale,
           double decay, double beta1, double weight1, double beta2, double weight2, double rate, int64_t seed, int64_t offset,
           MaybeTensor low, MaybeTensor ties) {
  Buffers b = buffers(param, grad, out, clip, unscale, seed, offset, low, ties);
  with_first(b, exp_avg, exp_avg_scales, param);
  launch(LionNumbers{fp32(decay), fp32(beta1), fp32(weight1), fp32(beta2), fp32(weight2), fp32(rate)}, b, param);
}

void sgd_(Tensor param, MaybeTensor momentum_buffer, MaybeTensor momentum_buffer_scales, Tensor grad, MaybeTensor out, MaybeTensor clip,
          double unscale, double l2, double momentum, double weight, double rate, bool nesterov, bool first, int64_t seed,
          int64_t offset, MaybeTensor low, MaybeTensor ties) {
  Buffers b = buffers(param, grad, out, clip, unscale, seed, offset, low, ties);
  if (momentum_buffer) with_first(b, *momentum_buffer, momentum_buffer_scales, param);
  launch(SGDNumbers{fp32(l2), fp32(momentum), fp32(weight), fp32(rate), nesterov, first}, b, param);
}

void adagrad_(Tensor param, Tensor sum, MaybeTensor sum_scales, Tensor grad, MaybeTensor out, MaybeTensor clip, double unscale,
              double l2, double eps, double rate, int64_t seed, int64_t offset, MaybeTensor low, MaybeTensor ties) {
  Buffers b = buffers(param, grad, out, clip, unscale, seed, offset, low, ties);
  with_second(b, sum, sum_scales, param);
  launch(AdagradNumbers{fp32(l2), fp32(eps), fp32(rate)}, b, param);
}

Buffers gradient(const Tensor& grad, double unscale) {
  Buffers b{};
  b.n = grad.numel();
  check(grad, b.n, grad, "grad");
  b.grad = grad.const_data_ptr();
  b.grad_format = format_of(grad);
  STD_TORCH_CHECK(b.grad_format != kInt8, "ls_strategy: grad must be fp32, bf16 or fp16");
  b.unscale = static_cast<float>(unscale);
  return b;
}

Tensor sum_of_squares(Tensor grad, double unscale) {
  const Buffers b = gradient(grad, unscale);
  const int64_t size = 2;
  Tensor result = torch::stable::new_zeros(grad, {&size, 1}, ScalarType::Double);
  square_sums(b, grad, result);
  return result;
}

}  // namespace
}  // namespace ls

#define LS_IMPLEMENT(device)                               \
  STABLE_TORCH_LIBRARY_IMPL(ls_strategy, device, m) {      \
    m.impl("adamw_", TORCH_BOX(&ls::adamw_));              \
    m.impl("lion_", TORCH_BOX(&ls::lion_));                \
    m.impl("sgd_", TORCH_BOX(&ls::sgd_));                  \
    m.impl("adagrad_", TORCH_BOX(&ls::adagrad_));          \
    m.impl("sum_of_squares", TORCH_BOX(&ls::sum_of_squares)); \
  }
