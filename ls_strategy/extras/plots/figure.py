"""Figures for loggers: colored rows in a frame with axes, units and a legend. Needs Pillow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Colour = tuple[int, int, int]

ROW_GAP = 4
"""Pixels above every row, and below the last one."""

_BACKGROUND, _INK, _LINE = (255, 255, 255), (40, 40, 40), (150, 150, 150)
_SIZE, _PAD, _TICK = 13, 8, 5
"""Pixels: font size, padding, and length of an axis tick."""

_LONGEST = 48
"""Maximum characters of a row's name."""

_SCALE_WIDTH = 160


@dataclass(frozen=True)
class Frame:
    """Title, axes and legend around rows."""

    title: str
    rows: Sequence[str]
    """The name of each row, from top to bottom."""

    x_label: str
    x_ticks: Sequence[tuple[float, str]]
    """Labels below the rows with their positions: 0 is the left edge, 1 the right edge."""

    legend: Sequence[tuple[Colour, str]]
    """The meaning of each color."""

    scale: tuple[str, Sequence[Colour], str] | None = None
    """A color scale: text for its lowest value, the colors, and text for its highest value."""

    y_ticks: Sequence[tuple[float, str]] = ()
    """Labels at the left with their positions, instead of rows: 0 is the bottom, 1 the top."""

    note: str = ""
    """A line of text under the axis."""


def framed(body: Tensor, frame: Frame) -> Tensor:
    """Draw a frame around rows.

    Args:
        body: ``(3, height, width)`` uint8: rows of equal height, `ROW_GAP` pixels above each and below the last.
        frame: title, axes and legend.

    Returns:
        ``(3, H, W)`` uint8, larger than ``body``, for TensorBoard's ``add_image``.
    """
    from PIL import Image, ImageDraw, ImageFont

    font: Any = ImageFont.load_default(_SIZE)
    height, width = body.shape[1:]
    names = [name if len(name) <= _LONGEST else "..." + name[3 - _LONGEST :] for name in frame.rows]
    line = _SIZE + _PAD
    labels = [*names, *(text for _, text in frame.y_ticks)]
    left = 2 * _PAD + max((math.ceil(font.getlength(name)) for name in labels), default=0)
    top = 2 * line + _PAD
    texts = (font.getlength(frame.title), font.getlength(frame.note))
    right = left + math.ceil(max(width, _legend_width(frame, font), *texts))
    below = _TICK + (3 if frame.note else 2) * line + _PAD
    image = Image.new("RGB", (right + 4 * _PAD, top + height + below), _BACKGROUND)
    image.paste(Image.fromarray(body.permute(1, 2, 0).contiguous().numpy()), (left, top))
    draw = ImageDraw.Draw(image)
    draw.text((left, _PAD), frame.title, _INK, font)
    _legend(draw, frame, (left, _PAD + line), font)
    draw.rectangle((left - 1, top - 1, left + width, top + height), outline=_LINE)
    for i, name in enumerate(names):
        middle = top + ROW_GAP / 2 + (height - ROW_GAP) * (i + 0.5) / len(names)
        draw.text((left - _PAD, middle), name, _INK, font, anchor="rm")
    for place, text in frame.y_ticks:
        y = top + (1 - place) * height
        draw.line((left - _TICK, y, left, y), _INK)
        draw.text((left - _PAD, y), text, _INK, font, anchor="rm")
    for place, text in frame.x_ticks:
        x = left + place * width
        draw.line((x, top + height, x, top + height + _TICK), _INK)
        draw.text((x, top + height + _TICK + 2), text, _INK, font, anchor="ma")
    draw.text((left + width / 2, top + height + _TICK + line), frame.x_label, _INK, font, anchor="ma")
    draw.text((left, top + height + _TICK + 2 * line), frame.note, _INK, font)
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, -1, 3).permute(2, 0, 1)


def _scale_width(frame: Frame, font: Any) -> int:
    if frame.scale is None:
        return 0
    return _SCALE_WIDTH + 4 * _PAD + math.ceil(font.getlength(frame.scale[0]) + font.getlength(frame.scale[2]))


def _legend_width(frame: Frame, font: Any) -> int:
    return _scale_width(frame, font) + sum(
        _SIZE + 3 * _PAD + math.ceil(font.getlength(text)) for _, text in frame.legend
    )


def _legend(draw: Any, frame: Frame, at: tuple[int, int], font: Any) -> None:
    """Draw the scale, then a box of each color with its meaning."""
    x, y = at
    if frame.scale is not None:
        least, colours, largest = frame.scale
        draw.text((x, y), least, _INK, font)
        start = x + math.ceil(font.getlength(least)) + _PAD
        for i in range(_SCALE_WIDTH):
            draw.line((start + i, y, start + i, y + _SIZE), colours[i * len(colours) // _SCALE_WIDTH])
        draw.text((start + _SCALE_WIDTH + _PAD, y), largest, _INK, font)
        x += _scale_width(frame, font)
    for colour, text in frame.legend:
        draw.rectangle((x, y, x + _SIZE, y + _SIZE), fill=colour, outline=_LINE)
        draw.text((x + _SIZE + _PAD, y), text, _INK, font)
        x += _SIZE + 3 * _PAD + math.ceil(font.getlength(text))


def ticks(length: float, most: int = 10) -> list[tuple[float, str]]:
    """Return evenly spaced round numbers from 0 to ``length`` for `Frame.x_ticks`; at most ``most`` besides 0."""
    if length <= 0:
        return [(0.0, "0")]
    power = 10.0 ** math.floor(math.log10(length / most))
    step = next(m * power for m in (1, 2, 5, 10, 20) if length / (m * power) <= most)
    return [(i * step / length, f"{i * step:.6g}") for i in range(int(length / step + 1e-9) + 1)]
