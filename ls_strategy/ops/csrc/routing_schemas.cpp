// Names and arguments of the operations of routing.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(ls_strategy, m) {
  m.def("sort_by_expert(Tensor indices, Tensor? kept, int num_experts) -> (Tensor, Tensor)");
  m.def("permute(Tensor x, Tensor order, Tensor? weights, int k) -> Tensor");
  m.def("combine(Tensor y, Tensor order, Tensor? weights, SymInt tokens, int k) -> Tensor");
  m.def("pair_dots(Tensor x, Tensor y, Tensor order, int k) -> Tensor");
  m.def("topk_indices(Tensor scores, int k) -> Tensor");
}
