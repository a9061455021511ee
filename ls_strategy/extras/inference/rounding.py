"""Data-free rounding of linear weights to 8 or 4 bits. For the formats see `ops.linear`.

int8 is symmetric, with one scale per output feature. int4 is asymmetric, with scale and zero per group of up to 128
adjacent input features. For each group several ranges are tried, and scale and zero are fitted to the levels by least
squares; the range with the smallest squared error is used. Rounding to nearest with a range search: section 3.1 of
Nagel et al., "A White Paper on Neural Network Quantization", arXiv:2106.08295.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUPS = (128, 64, 32)  # group sizes by preference: the first that divides the input features is used
_SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # ranges that are tried, as fractions of the range of a group's weights
_CHUNK_NUMEL = 1 << 22  # weights that are rounded at a time, to bound memory


def group_size(in_features: int) -> int | None:
    """Return the int4 group size for a layer with ``in_features``; None if no size divides them.

    >>> group_size(4096), group_size(2752), group_size(100)
    (128, 64, None)
    """
    return next((size for size in GROUPS if in_features % size == 0), None)


def round_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a floating (out, in) weight. Returns levels int8 (out, in), and scales fp32 (out,)."""
    scales = weight.detach().abs().amax(1).float().clamp(min=1e-30) / 127
    levels = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    for rows in _chunks(weight):
        levels[rows] = (weight[rows].detach().float() / scales[rows, None]).round_().clamp_(-127, 127).to(torch.int8)
    return levels, scales


def round_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Round a floating (out, in) weight in groups of ``group`` input features, which divides their number.

    Returns:
        Levels uint8 (out, in), 0 to 15, and scales and zeros fp32 (out, in / group, 2).
    """
    out, width = weight.shape
    levels = torch.empty(out, width, dtype=torch.uint8, device=weight.device)
    scales_zeros = torch.empty(out, width // group, 2, dtype=torch.float32, device=weight.device)
    for rows in _chunks(weight):
        groups = weight[rows].detach().float().unflatten(1, (-1, group))
        level, scale, low = _best_range(groups)
        levels[rows] = level.flatten(1).to(torch.uint8)
        scales_zeros[rows, :, 0] = scale.squeeze(-1)
        scales_zeros[rows, :, 1] = (low + 8 * scale).squeeze(-1)
    return levels, scales_zeros


def _chunks(weight: Tensor) -> list[slice]:
    rows = max(_CHUNK_NUMEL // weight.shape[1], 1)
    return [slice(first, first + rows) for first in range(0, weight.shape[0], rows)]


def _best_range(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return levels (rows, groups, group), scales and lows (rows, groups, 1) with the smallest squared error."""
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    smallest = torch.full_like(low, torch.inf)
    for shrink in _SHRINK:
        middle, half = (high + low) / 2, (high - low) / 2 * shrink
        scale = (2 * half / 15).clamp(min=1e-30)
        found = _fitted(groups, _levels(groups, scale, middle - half), scale, middle - half)
        error = (found[0] * found[1] + found[2] - groups).square_().sum(-1, keepdim=True)
        better = error < smallest
        smallest = torch.where(better, error, smallest)
        best = found if best is None else _where(better, found, best)
    assert best is not None
    return best


def _where(better: Tensor, found: tuple[Tensor, ...], best: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    level, scale, low = (torch.where(better, new, old) for new, old in zip(found, best, strict=True))
    return level, scale, low


def _levels(groups: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    return ((groups - low) / scale).round_().clamp_(0, 15)


def _fitted(groups: Tensor, level: Tensor, scale: Tensor, low: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Fit scale and low to the levels, and round again. Returns levels, scale and low."""
    mean_level, mean = level.mean(-1, keepdim=True), groups.mean(-1, keepdim=True)
    around = level - mean_level
    spread = around.square().sum(-1, keepdim=True)
    fitted = (around * groups).sum(-1, keepdim=True) / spread.clamp(min=1e-30)
    # A group of equal weights has one level and nothing to fit.
    scale = torch.where((spread > 0) & (fitted > 0), fitted, scale)
    low = torch.where(spread > 0, mean - scale * mean_level, low)
    return _levels(groups, scale, low), scale, low
