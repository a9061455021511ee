"""The Newton-Schulz iteration that orthogonalizes a matrix, or a batch of them.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024, https://kellerjordan.github.io/posts/muon.
"""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic polynomial, tuned for few steps: singular values end between 0.7 and 1.2 and not at 1."""


def orthogonalized(
    matrices: Tensor,
    *,
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Return matrices with the same singular vectors, and singular values near 1.

    Args:
        matrices: ``(m, n)``, with the bits of `torch.optim.Muon`; or a batch ``(b, m, n)``, each by itself.
        steps: of the iteration.
        coefficients: of its polynomial ``a x + b x^3 + c x^5``.
        eps: smallest norm that a matrix is divided by.
        dtype: of the iteration and of the result.
    """
    a, b, c = coefficients
    x = matrices.to(dtype, copy=True)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x.div_(torch.linalg.matrix_norm(x, keepdim=True).clamp(min=eps))  # the spectral norm is at most this one
    add = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def multiplications(shape: tuple[int, ...], steps: int) -> int:
    """Return the multiplications of `orthogonalized`: three products per step and matrix.

    >>> multiplications((2, 3), 1), multiplications((5, 3, 2), 1)
    (32, 160)
    """
    *batch, rows, columns = shape
    few, many = sorted((rows, columns))
    number = 1
    for size in batch:
        number *= size
    return number * steps * (2 * few * few * many + few**3)
