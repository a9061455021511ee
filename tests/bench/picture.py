"""Pictures from records, as SVG, without a library for it: axes to powers, lines, a legend."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

COLOURS = ("#444444", "#1f77b4", "#2ca02c", "#d62728", "#17becf", "#ff7f0e", "#9467bd")
_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 190, 40, 50


@dataclass(frozen=True)
class Axis:
    """Logarithmic, from ``low`` to ``high``, with ``ticks`` by label."""

    low: float
    high: float
    ticks: Mapping[str, float]
    name: str

    def share(self, value: float) -> float:
        """Where a value lies, 0 to 1."""
        return math.log(value / self.low) / math.log(self.high / self.low)


@dataclass(frozen=True)
class Line:
    """One series of ``(x, y)``."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


def chart(title: str, x: Axis, y: Axis, lines: Sequence[Line], limits: Mapping[str, float]) -> str:
    """Lines over logarithmic axes.

    Args:
        title: above.
        x: below.
        y: at the left.
        lines: with their names in a legend at the right.
        limits: horizontal lines at these values, by name.
    """
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def at(point: tuple[float, float]) -> tuple[float, float]:
        return (
            round(_LEFT + x.share(point[0]) * (right - _LEFT), 1),
            round(bottom - y.share(point[1]) * (bottom - _TOP), 1),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12" role="img" aria-label="{escape(title)}">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 18, title, size=14),
    ]
    for label, value in x.ticks.items():
        across, _ = at((value, y.low))
        parts += [_rule(across, _TOP, across, bottom), _text(across, bottom + 18, label, anchor="middle")]
    for label, value in y.ticks.items():
        _, down = at((x.low, value))
        parts += [_rule(_LEFT, down, right, down), _text(_LEFT - 8, down + 4, label, anchor="end")]
    parts.append(_text((_LEFT + right) / 2, _HEIGHT - 10, x.name, anchor="middle"))
    parts.append(_text(_LEFT - 60, _TOP - 9, y.name))
    for name, value in limits.items():
        _, down = at((x.low, value))
        parts.append(f'<path d="M{_LEFT} {down}H{right}" stroke="#888" stroke-dasharray="2 3" fill="none"/>')
        parts.append(_text(right - 4, down - 5, name, anchor="end", colour="#666"))
    for number, line in enumerate(lines):
        parts += _series(line, [at(point) for point in line.points], COLOURS[number % len(COLOURS)], number, right)
    return "\n".join([*parts, "</svg>", ""])


def _series(line: Line, points: list[tuple[float, float]], colour: str, number: int, right: float) -> list[str]:
    way = "M" + "L".join(f"{a:g} {b:g}" for a, b in points)
    dash = ' stroke-dasharray="6 4"' if line.dashed else ""
    level = _TOP + 12 + 22 * number
    return [
        f'<path d="{way}" stroke="{colour}" stroke-width="2" fill="none"{dash}/>',
        *(f'<circle cx="{a:g}" cy="{b:g}" r="3" fill="{colour}"/>' for a, b in points),
        f'<path d="M{right + 14} {level}h26" stroke="{colour}" stroke-width="2"{dash}/>',
        _text(right + 46, level + 4, line.name),
    ]


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12, colour: str = "#222") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{escape(words)}</text>'


def _rule(x0: float, y0: float, x1: float, y1: float) -> str:
    return f'<path d="M{x0:g} {y0:g}L{x1:g} {y1:g}" stroke="#ddd" fill="none"/>'


def scaling(record: Mapping[str, Any], model: str = "7B", kind: str = "device_bytes") -> str:
    """Bytes per GPU over the number of GPUs, a line per strategy, from the record of `tests.bench.scaling`."""
    ranks = record["ranks"]
    lines = [
        Line(name, [(n, by_ranks[str(n)][kind] / 1e9) for n in ranks], dashed="offload" in name)
        for name, by_ranks in record["results"][model].items()
    ]
    values = [gigabytes for line in lines for _, gigabytes in line.points]
    low, high = 10 ** math.floor(math.log10(min(values))), 2 * 10 ** math.ceil(math.log10(max(values) / 2))
    ticks = [step * 10.0**power for power in range(-1, 5) for step in (1, 2, 5)]
    return chart(
        f"{model} parameters: memory of each GPU, one sequence of 2,048 tokens",
        Axis(ranks[0], ranks[-1], {f"{n:,}": n for n in ranks}, "GPUs"),
        Axis(low, high, {f"{t:g}": t for t in ticks if low <= t <= high}, "GB per GPU"),
        lines,
        {"80 GB": 80.0} if low < 80 < high else {},
    )
