// The operation on tiles as torch sees it. `run_tiles` is in quantized_cpu.cpp.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "quantized.h"

namespace ls {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void run_tiles(const Tiles&, const Tensor& like);

namespace {

Levels levels_of(LevelFormat form) {
  if (form == kNF4) {
    return {{-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
             -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
             0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f}};
  }
  Levels result{};
  for (int i = 0; i < 16; ++i) result.value[i] = (i - 8) / 7.0f;
  return result;
}

LevelFormat form_of(int64_t form) {
  STD_TORCH_CHECK(0 <= form && form <= kLevels8, "ls_strategy: format ", form);
  return static_cast<LevelFormat>(form);
}

Format format_of(const Tensor& x, const char* name) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return kFP32;
    case ScalarType::BFloat16:
      return kBF16;
    case ScalarType::Half:
      return kFP16;
    default:
      STD_TORCH_CHECK(false, "ls_strategy: ", name, " must be fp32, bf16 or fp16");
  }
  return kFP32;
}

// The number of tiles in n elements.
int64_t tiles_of(int64_t n, const Tensor& packed, LevelFormat form) {
  const int64_t count = n / kTile, bytes = form == kLevels8 ? kTileBytes8 : kTileBytes4;
  STD_TORCH_CHECK(count * kTile == n && count * bytes == packed.numel(), "ls_strategy: ", packed.numel(), " bytes are not ",
                  n, " elements");
  return count;
}

void dequantize_(Tensor packed, Tensor out, int64_t form) {
  STD_TORCH_CHECK(packed.dim() == 1 && out.dim() == 1 && packed.is_contiguous() && out.is_contiguous(),
                  "ls_strategy: packed and out must be contiguous, of one dimension");
  STD_TORCH_CHECK(packed.scalar_type() == ScalarType::Byte, "ls_strategy: packed must be uint8");
  STD_TORCH_CHECK(packed.is_cuda() == out.is_cuda() && packed.get_device_index() == out.get_device_index(),
                  "ls_strategy: packed and out must be on one device");
  Tiles t{};
  t.form = form_of(form);
  t.count = tiles_of(out.numel(), packed, t.form);
  t.format = format_of(out, "out");
  t.packed = static_cast<const uint8_t*>(packed.const_data_ptr());
  t.out = out.mutable_data_ptr();
  t.levels = levels_of(t.form);
  if (t.count) run_tiles(t, out);
}

}  // namespace
}  // namespace ls

#define LS_IMPLEMENT_QUANTIZED(device)                \
  STABLE_TORCH_LIBRARY_IMPL(ls_strategy, device, m) { \
    m.impl("dequantize_", TORCH_BOX(&ls::dequantize_)); \
  }
