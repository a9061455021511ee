// Names and arguments of operations on tiles of quantized weights.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(ls_strategy, m) {
  m.def("dequantize_(Tensor packed, Tensor(a!) out, int form) -> ()");
  m.def("quantize_(Tensor values, Tensor(a!) packed, Tensor(b!)? changes, int form) -> ()");
}
