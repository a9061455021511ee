// Names and arguments of products with packed weights.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(ls_strategy, m) {
  m.def("linear_int8(Tensor x, Tensor weight, Tensor scales) -> Tensor");
  m.def("linear_int4(Tensor x, Tensor weight, Tensor scales_zeros) -> Tensor");
}
