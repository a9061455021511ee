// Names and arguments of the operations. Letters in parentheses mark what is changed in place.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(ls_strategy, m) {
  m.def(
      "adamw_(Tensor(a!) param, Tensor(b!) exp_avg, Tensor(c!)? exp_avg_scales, Tensor(d!) exp_avg_sq, "
      "Tensor(e!)? exp_avg_sq_scales, Tensor grad, Tensor(f!)? out, Tensor? clip, float unscale, float decay, float l2, "
      "float weight1, float rest1, float beta2, float weight2, float root2, float eps, float rate, int seed, int offset) -> ()");
  m.def(
      "lion_(Tensor(a!) param, Tensor(b!) exp_avg, Tensor(c!)? exp_avg_scales, Tensor grad, Tensor(f!)? out, Tensor? clip, "
      "float unscale, float decay, float beta1, float weight1, float beta2, float weight2, float rate, int seed, int offset) -> ()");
  m.def(
      "sgd_(Tensor(a!) param, Tensor(b!)? momentum_buffer, Tensor(c!)? momentum_buffer_scales, Tensor grad, Tensor(f!)? out, "
      "Tensor? clip, float unscale, float l2, float momentum, float weight, float rate, bool nesterov, bool first, int seed, "
      "int offset) -> ()");
  m.def(
      "adagrad_(Tensor(a!) param, Tensor(b!) sum, Tensor(c!)? sum_scales, Tensor grad, Tensor(f!)? out, Tensor? clip, "
      "float unscale, float l2, float eps, float rate, int seed, int offset) -> ()");
  m.def("sum_of_squares(Tensor grad, float unscale) -> Tensor");
  m.def("block_square_sums(Tensor grad, float unscale) -> Tensor");
}
