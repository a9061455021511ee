"""Random crops and flips of a batch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def augment(images_NCHW: Tensor, *, padding: int = 4, generator: torch.Generator | None = None) -> Tensor:
    """Reflect each image at its borders, shift it by up to ``padding`` pixels each way, and mirror it randomly.

    Uses a single gather: output pixel (h, w) of image n is input pixel ``(rows[n, h], columns[n, w])``.

    Shapes:
        images: (N, C, H, W), any dtype, H and W above ``padding``.   returns: the same shape and dtype.
    """
    num, _, height, width = images_NCHW.shape
    device = images_NCHW.device
    shift_2N = torch.randint(-padding, padding + 1, (2, num, 1), generator=generator, device=device)
    mirrored_N = torch.rand(num, 1, generator=generator, device=device) < 0.5
    rows_NH = _reflect(torch.arange(height, device=device) + shift_2N[0], height)
    columns_NW = _reflect(torch.arange(width, device=device) + shift_2N[1], width)
    columns_NW = torch.where(mirrored_N, columns_NW.flip(1), columns_NW)
    image_N = torch.arange(num, device=device)[:, None, None]
    # Channels last, so that the gather copies contiguous pixels.
    return images_NCHW.permute(0, 2, 3, 1)[image_N, rows_NH[:, :, None], columns_NW[:, None, :]].permute(0, 3, 1, 2)


def _reflect(position: Tensor, size: int) -> Tensor:
    """Reflect positions outside ``[0, size)`` at the border pixel: -1 becomes 1, ``size`` becomes ``size - 2``."""
    return (size - 1) - (size - 1 - position.abs()).abs()
