"""Names and arguments of the operations, ``torch.ops.ls_strategy.*``.

Letters in parentheses mark what is changed in place. The implementations register separately: those for CPUs from the
libraries of ``csrc``, those for GPUs from `ls_strategy.ops.cuda`.
"""

from __future__ import annotations

import torch

SCHEMAS = (
    # Updates: see update.py. `low`, on CPUs: param is the upper part of split masters, of 24 bits without `ties`.
    "adamw_(Tensor(a!) param, Tensor(b!) exp_avg, Tensor(c!)? exp_avg_scales, Tensor(d!) exp_avg_sq, "
    "Tensor(e!)? exp_avg_sq_scales, Tensor grad, Tensor(f!)? out, Tensor? clip, float unscale, float decay, float l2, "
    "float weight1, float rest1, float beta2, float weight2, float root2, float eps, float rate, int seed, "
    "int offset, Tensor(y!)? low=None, Tensor(z!)? ties=None) -> ()",
    "lion_(Tensor(a!) param, Tensor(b!) exp_avg, Tensor(c!)? exp_avg_scales, Tensor grad, Tensor(f!)? out, "
    "Tensor? clip, float unscale, float decay, float beta1, float weight1, float beta2, float weight2, float rate, "
    "int seed, int offset, Tensor(y!)? low=None, Tensor(z!)? ties=None) -> ()",
    "sgd_(Tensor(a!) param, Tensor(b!)? momentum_buffer, Tensor(c!)? momentum_buffer_scales, Tensor grad, "
    "Tensor(f!)? out, Tensor? clip, float unscale, float l2, float momentum, float weight, float rate, bool nesterov, "
    "bool first, int seed, int offset, Tensor(y!)? low=None, Tensor(z!)? ties=None) -> ()",
    "adagrad_(Tensor(a!) param, Tensor(b!) sum, Tensor(c!)? sum_scales, Tensor grad, Tensor(f!)? out, Tensor? clip, "
    "float unscale, float l2, float eps, float rate, int seed, int offset, "
    "Tensor(y!)? low=None, Tensor(z!)? ties=None) -> ()",
    # Norms: see norm.py and exact_norm.py.
    "sum_of_squares(Tensor grad, float unscale) -> Tensor",
    "block_square_sums(Tensor grad, float unscale) -> Tensor",
    # Routing: see permute.py and topk.py.
    "sort_by_expert(Tensor indices, Tensor? kept, int num_experts) -> (Tensor, Tensor)",
    "permute(Tensor x, Tensor order, Tensor? weights, int k) -> Tensor",
    "combine(Tensor y, Tensor order, Tensor? weights, SymInt tokens, int k) -> Tensor",
    "pair_dots(Tensor x, Tensor y, Tensor order, int k) -> Tensor",
    "topk_indices(Tensor scores, int k) -> Tensor",
    # Quantized weights: see quantized.py and linear.py.
    "dequantize_(Tensor packed, Tensor(a!) out, int form) -> ()",
    "quantize_(Tensor values, Tensor(a!) packed, Tensor(b!)? changes, int form) -> ()",
    "linear_int8(Tensor x, Tensor weight, Tensor scales) -> Tensor",
    "linear_int4(Tensor x, Tensor weight, Tensor scales_zeros) -> Tensor",
)

LIBRARY = torch.library.Library("ls_strategy", "FRAGMENT")
"""Holds the operations: they end with it."""

for _schema in SCHEMAS:
    LIBRARY.define(_schema)
