"""Draw ranks by phases: how much longer each takes than others with the same work. Needs Pillow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ls_strategy.extras.plots.figure import ROW_GAP, Colour, Frame, framed

SHOWN_RANKS = 32
"""If there are more, the slowest ones are shown."""

_MOST = 1.5
"""Ratio of the darkest color."""

_CELL, _ROW = 130, 20
_EQUAL, _DARK = (240, 240, 240), (213, 94, 0)


def draw_ranks(ratios: Tensor, columns: Sequence[str], title: str) -> Tensor:
    """Return a heat map as an image, ``(3, H, W)`` uint8.

    Args:
        ratios: time over the median of the others, ``(ranks, len(columns))``; the first column orders the ranks.
        columns: names.
        title: above the map.
    """
    shown = sorted(ratios[:, 0].topk(min(SHOWN_RANKS, len(ratios))).indices.tolist())
    image = torch.full((3, len(shown) * (_ROW + ROW_GAP) + ROW_GAP, len(columns) * _CELL), 255, dtype=torch.uint8)
    for row, rank in enumerate(shown):
        top = ROW_GAP + row * (_ROW + ROW_GAP)
        for column in range(len(columns)):
            left = column * _CELL
            colour = torch.tensor(_colour(float(ratios[rank, column])), dtype=torch.uint8)
            image[:, top : top + _ROW, left + 1 : left + _CELL - 1] = colour[:, None, None]
    some = "" if len(shown) == len(ratios) else f"; the slowest {len(shown)} of {len(ratios)} ranks"
    scale = [_colour(1 + (_MOST - 1) * i / 15) for i in range(16)]
    return framed(
        image,
        Frame(
            title=f"{title}{some}",
            rows=[f"rank {rank}: {float(ratios[rank, 0]):.2f} x" for rank in shown],
            x_label="own time, over the median of the other ranks with the same work",
            x_ticks=[((i + 0.5) / len(columns), name) for i, name in enumerate(columns)],
            legend=[],
            scale=("1 x or less", scale, f"{_MOST} x or more"),
        ),
    )


def _colour(ratio: float) -> Colour:
    part = min(max((ratio - 1) / (_MOST - 1), 0.0), 1.0)
    red, green, blue = (round(low + part * (high - low)) for low, high in zip(_EQUAL, _DARK, strict=True))
    return red, green, blue
