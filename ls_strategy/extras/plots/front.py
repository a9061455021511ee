"""Draw points in a frame with two axes: memory against time, say. Needs Pillow."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch

from ls_strategy.extras.plots.figure import Colour, Frame, framed, ticks

_WIDTH, _ROW, _ROWS, _RADIUS = 640, 28, 14, 4
_POINT, _LINE = (31, 119, 180), (200, 215, 230)


def draw_front(points: Sequence[tuple[float, float]], title: str, x_label: str, y_unit: str, path: Path) -> None:
    """Write a picture of points ``(x, y)``, both from 0 on, joined in their order as steps.

    Args:
        points: at least one.
        title: above the picture.
        x_label: name and unit of ``x``.
        y_unit: unit of ``y``, behind the numbers on the left.
        path: a file whose suffix names the format, such as ``.png``.
    """
    from PIL import Image

    height = _ROW * _ROWS
    x_end = max(x for x, _ in points) * 1.05 or 1.0
    y_end = max(y for _, y in points) * 1.1 or 1.0
    body = torch.full((3, height, _WIDTH), 255, dtype=torch.uint8)
    places = [(int(x / x_end * (_WIDTH - 1)), int((1 - y / y_end) * (height - 1))) for x, y in points]
    for (x0, y0), (x1, y1) in pairwise(places):
        _fill(body, (min(x0, x1), y0 - 1, max(x0, x1) + 1, y0 + 1), _LINE)
        _fill(body, (x1 - 1, min(y0, y1), x1 + 1, max(y0, y1) + 1), _LINE)
    for x, y in places:
        _fill(body, (x - _RADIUS, y - _RADIUS, x + _RADIUS + 1, y + _RADIUS + 1), _POINT)
    rows = [f"{y_end * (1 - (i + 0.5) / _ROWS):.3g} {y_unit}" for i in range(_ROWS)]
    frame = Frame(title, rows, x_label, ticks(x_end), [(_POINT, "nothing faster needs less")])
    picture = framed(body, frame)
    Image.fromarray(picture.permute(1, 2, 0).contiguous().numpy()).save(path)


def _fill(body: torch.Tensor, box: tuple[int, int, int, int], colour: Colour) -> None:
    left, top, right, bottom = box
    area = body[:, max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)]
    area.copy_(torch.tensor(colour, dtype=torch.uint8)[:, None, None].expand_as(area))
