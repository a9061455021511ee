"""A faster matrix product for the few rows of a decoding step.

For fp32 on a CPU torch calls MKL, which takes up to twice as long as oneDNN for a few rows and a large weight. Torch
includes oneDNN and uses it for other dtypes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ls_strategy._torch import onednn_linear

MOST_ROWS = 64
LEAST_WEIGHTS = 2**21  # smaller weights stay in a core's cache, where MKL is as fast


def few_rows_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Compute ``functional.linear(x, weight)``, with oneDNN where it is faster; equal up to fp32 rounding.

    ``x`` is ``(..., in)``, ``weight`` ``(out, in)``, and the result ``(..., out)``. The oneDNN product has no gradient
    and is used only where gradients are disabled.
    """
    product = onednn_linear() if _suits(x, weight) else None
    return functional.linear(x, weight) if product is None else product(x, weight)


def _suits(x: Tensor, weight: Tensor) -> bool:
    plain = type(x) is Tensor and type(weight) in (Tensor, nn.Parameter)
    return (
        not torch.is_grad_enabled()
        and weight.numel() >= LEAST_WEIGHTS
        and plain
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and 0 < x.numel() <= MOST_ROWS * x.shape[-1]
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )
