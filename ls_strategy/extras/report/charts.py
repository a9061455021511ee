"""Charts as SVG: lines over steps, stacked areas over steps, and stacked bars.

Colors are classes of `style`, so that a chart follows light, dark and print. Lines differ in their dashes as well, and
every number of a stacked bar is in the table next to it, so that no meaning is in the color alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

from ls_strategy.extras.report.markup import attribute, number, short, text
from ls_strategy.extras.report.series import Column, Series, columns_of

WIDTH, HEIGHT = 420, 250
_RIGHT, _TOP, _BOTTOM = 12, 30, 40
_TICK_WIDTH = 6.8
"""Pixels of a character at the axis, at most."""

COLOURS = 8
"""Of lines and areas, in `style`."""

_COLUMNS = 180
"""Points of a line; more are shown as minimum, mean and maximum of as many ranges of steps."""

_DOTS = 24
"""Lines of at most this many points show them."""

_LOG_FROM = 50.0
"""A chart is logarithmic if its largest value is this many times the smallest, and all are above 0."""

_EQUAL = 5e-5
"""Values are equal for an axis if they differ by a smaller share: its six digits could not tell its numbers apart."""


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    name: str
    series: Series
    colour: int | None = None
    """One of `COLOURS`. None: by its place."""


@dataclass(frozen=True)
class Chart:
    """Lines over steps."""

    title: str
    unit: str
    """What the numbers at the axis are."""

    lines: Sequence[Line]
    may_be_log: bool = False
    from_zero: bool = False
    """Whether the axis begins at 0."""

    restarts: Sequence[int] = ()
    """Steps at which the run was started again."""

    note: str = ""


@dataclass
class _Scale:
    """Maps steps and values to the plane."""

    steps: tuple[float, float]
    values: tuple[float, float]
    log: bool
    ticks: list[float] = field(default_factory=list)

    @property
    def left(self) -> float:
        """Horizontal position of the axis, which is right of its numbers."""
        return 14 + _TICK_WIDTH * max((len(short(value)) for value in self.ticks), default=1)

    def x(self, step: float) -> float:
        first, last = self.steps
        return self.left + (step - first) / ((last - first) or 1) * (WIDTH - self.left - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.values
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return HEIGHT - _BOTTOM - (value - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM)


def draw(chart: Chart) -> str:
    """Return a figure with lines, axes, a legend and a table of values."""
    columns = [columns_of(line.series, _COLUMNS) for line in chart.lines]
    scale = _scale(chart, columns)
    body = [_mark(scale, step) for step in dict.fromkeys(chart.restarts) if scale.steps[0] <= step <= scale.steps[1]]
    for i, each in enumerate(columns):
        body += _line(each, scale, i)
    reduced = any(c.points > 1 for each in columns for c in each)
    bad = sum(c.not_finite for each in columns for c in each)
    notes = [chart.note] if chart.note else []
    if reduced:
        most = max(len(line.series) for line in chart.lines)
        notes.append(f"{most:,} points: the line is the mean of each range of steps, the band reaches from its "
                     "minimum to its maximum.")  # fmt: skip
    if bad:
        notes.append(
            f"NaN or infinite values: {bad:,}. They are gaps in the line, marked \N{MULTIPLICATION SIGN} at the axis."
        )
    keys = [_key(i, line.name) for i, line in enumerate(chart.lines)]
    keys += [_restart_key()] if "restart" in "".join(body) else []
    rows = [(line.name, *_summary(line.series)) for line in chart.lines]
    return _figure(chart.title, _unit(chart.unit, scale.log), scale, body, keys, notes, rows)


def draw_stacked(chart: Chart, total: str) -> str:
    """Return a figure with the lines' values stacked, the first at the bottom.

    Args:
        chart: its lines have values at the same steps; where one has none, it counts as 0.
        total: what the sum is called.
    """
    steps = sorted({step for line in chart.lines for step in line.series.steps})
    chosen = (
        steps if len(steps) <= _COLUMNS else [steps[i * (len(steps) - 1) // (_COLUMNS - 1)] for i in range(_COLUMNS)]
    )
    tables = [dict(line.series.points()) for line in chart.lines]
    bottoms, edges = [0.0] * len(chosen), [[0.0] * len(chosen)]
    for each in tables:
        values = (each.get(step, 0.0) for step in chosen)
        bottoms = [low + (v if math.isfinite(v) else 0.0) for low, v in zip(bottoms, values, strict=True)]
        edges.append(bottoms)
    sums = Series()
    for step in steps:
        sums.add(step, sum(v for each in tables if math.isfinite(v := each.get(step, 0.0))))
    scale = _scale(Chart(chart.title, chart.unit, (), from_zero=True), [columns_of(sums, len(sums) or 1)])
    scale = (
        scale if len(chosen) > 1 else _Scale((scale.steps[0] - 1, scale.steps[1] + 1), scale.values, False, scale.ticks)
    )
    if len(chosen) == 1:
        chosen, edges = [chosen[0] - 1, chosen[0] + 1], [[e[0], e[0]] for e in edges]
    body = []
    colours = [i % COLOURS if line.colour is None else line.colour for i, line in enumerate(chart.lines)]
    for colour, (low, high) in zip(colours, pairwise(edges), strict=True):
        way = [f"{scale.x(s):.1f} {scale.y(v):.1f}" for s, v in zip(chosen, high, strict=True)]
        back = [f"{scale.x(s):.1f} {scale.y(v):.1f}" for s, v in zip(chosen, low, strict=True)]
        body.append(f'<path class="area fill{colour}" d="M{"L".join(way)}L{"L".join(reversed(back))}Z"/>')
    body += [_mark(scale, s) for s in dict.fromkeys(chart.restarts) if scale.steps[0] <= s <= scale.steps[1]]
    keys = [_key(i, line.name, area=True) for i, line in zip(colours, chart.lines, strict=True)]
    keys += [_restart_key()] if "restart" in "".join(body) else []
    notes = [chart.note] if chart.note else []
    if len(steps) > len(chosen):
        notes.append(f"{len(chosen)} of {len(steps):,} steps are shown; the table has the extremes of all.")
    rows = [(line.name, *_summary(line.series)) for line in chart.lines] + [(total, *_summary(sums))]
    return _figure(chart.title, chart.unit, scale, body, keys, notes, rows)


# --- axes -------------------------------------------------------------------------------------------------------------


def _scale(chart: Chart, columns: Sequence[Sequence[Column]]) -> _Scale:
    steps = [c.step for each in columns for c in each]
    values = [v for each in columns for c in each for v in (c.low, c.high) if math.isfinite(v)]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    low = min(low, 0.0) if chart.from_zero else low
    log = chart.may_be_log and low > 0 and high / low >= _LOG_FROM
    span = (min(steps), max(steps)) if steps else (0.0, 1.0)
    if log:
        low, high = 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high))
        powers = range(round(math.log10(low)), round(math.log10(high)) + 1)
        every = -(-len(powers) // 6)
        return _Scale(span, (low, high), True, [10.0**p for p in powers[::every]])
    if low == high == 0:
        high = 1.0
    elif high - low < _EQUAL * max(abs(low), abs(high)):
        around = max(abs(low), abs(high)) / 10
        low, high = low - around, high + around
    found = round_ticks(low, high, 6)
    return _Scale(span, (min(low, found[0]), max(high, found[-1])), False, found)


def round_ticks(low: float, high: float, most: int) -> list[float]:
    """Return round numbers that reach from ``low`` or below to ``high`` or above."""
    raw = (high - low) / (most - 1)
    if not raw > 0 or not math.isfinite(raw):
        return [low, high] if high > low else [low, low + 1]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10, 20) if m * power >= raw * (1 - 1e-9))
    first = math.floor(low / step + 1e-9)
    count = math.ceil(high / step - 1e-9) - first
    return [(first + i) * step for i in range(count + 1)]


def _step_ticks(first: float, last: float) -> list[float]:
    if last <= first:
        return [first]
    found = [t for t in round_ticks(first, last, 5) if first <= t <= last]
    return sorted({round(t) for t in found}) or [first, last]


def _unit(unit: str, log: bool) -> str:
    return f"{unit} (log scale)" if log else unit


def _figure(
    title: str, unit: str, scale: _Scale, body: Sequence[str], keys: Sequence[str], notes: Sequence[str],
    rows: Sequence[Sequence[object]],
) -> str:  # fmt: skip
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    names = ", ".join(str(row[0]) for row in rows)
    label = f"{title}: {unit} over optimizer steps. Lines: {names}"
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{attribute(label)}">',
        f'<text class="unit" x="4" y="16">{text(unit)}</text>',
    ]
    for value in scale.ticks:
        y = scale.y(value)
        parts.append(f'<path class="grid" d="M{scale.left:.1f} {y:.1f}H{right}"/>')
        parts.append(
            f'<text class="tick" x="{scale.left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{text(short(value))}</text>'
        )
    for value in _step_ticks(*scale.steps):
        x = scale.x(value)
        anchor = "end" if x > right - 10 else "middle"
        parts.append(f'<path class="axis" d="M{x:.1f} {bottom}v5"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 18}" text-anchor="{anchor}">{short(value)}</text>')
    parts.append(f'<path class="axis" d="M{scale.left:.1f} {bottom}H{right}"/>')
    middle = (scale.left + right) / 2
    parts.append(f'<text class="label" x="{middle:g}" y="{HEIGHT - 5}" text-anchor="middle">optimizer step</text>')
    parts += [*body, "</svg>"]
    head = "".join(f"<th scope='col'>{h}</th>" for h in ("", "first", "minimum", "maximum", "last"))
    lines = "".join(
        f'<tr><th scope="row">{text(name)}</th>{"".join(f"<td>{text(cell)}</td>" for cell in cells)}</tr>'
        for name, *cells in rows
    )
    return "\n".join(
        [
            "<figure>", f"<figcaption>{text(title)}</figcaption>", *parts, f'<ul class="legend">{"".join(keys)}</ul>',
            *(f'<p class="note">{text(note)}</p>' for note in notes),
            f'<details><summary>Values<span class="hidden"> of {text(title)}</span></summary>'
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div></details>',
            "</figure>",
        ]
    )  # fmt: skip


def _summary(series: Series) -> tuple[str, str, str, str]:
    finite = series.finite()
    low, high = (min(finite), max(finite)) if finite else (None, None)
    return number(series.values[0]), number(low), number(high), number(series.values[-1])


# --- lines ------------------------------------------------------------------------------------------------------------


def _line(columns: Sequence[Column], scale: _Scale, place: int) -> list[str]:
    colour = f"line{place % COLOURS}"
    parts: list[str] = []
    for is_number, group in groupby(columns, key=lambda c: math.isfinite(c.mean)):
        if is_number:
            parts += _piece(list(group), scale, colour)
    marks = [c for c in columns if c.not_finite]
    bottom = HEIGHT - _BOTTOM
    way = "".join(f"M{scale.x(c.step) - 3:.1f} {bottom - 8}l6 6m0 -6l-6 6" for c in marks)
    return [*parts, f'<path class="bad" d="{way}"/>'] if marks else parts


def _piece(columns: Sequence[Column], scale: _Scale, colour: str) -> list[str]:
    """Draw neighbors without a gap."""
    points = [(scale.x(c.step), scale.y(c.mean)) for c in columns]
    parts = []
    if any(c.high > c.low for c in columns):
        top = [f"{scale.x(c.step):.1f} {scale.y(c.high):.1f}" for c in columns]
        back = [f"{scale.x(c.step):.1f} {scale.y(c.low):.1f}" for c in reversed(columns)]
        parts.append(f'<path class="band {colour}" d="M{"L".join(top)}L{"L".join(back)}Z"/>')
    way = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    parts.append(f'<path class="line {colour}" d="M{way}"/>')
    if len(points) <= _DOTS:
        parts += [f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in points]
    return parts


def _mark(scale: _Scale, step: int) -> str:
    return f'<path class="restart" d="M{scale.x(step):.1f} {_TOP - 6}V{HEIGHT - _BOTTOM}"/>'


def _key(place: int, name: str, *, area: bool = False) -> str:
    colour = place % COLOURS
    mark = (
        f'<rect class="fill{colour}" x="3" y="2" width="18" height="10"/>'
        if area
        else f'<path class="line line{colour}" d="M1 7H25"/>'
    )
    return f'<li><svg class="key" viewBox="0 0 26 14" aria-hidden="true">{mark}</svg>{text(name)}</li>'


def _restart_key() -> str:
    mark = '<path class="restart" d="M13 0V14"/>'
    return f'<li><svg class="key" viewBox="0 0 26 14" aria-hidden="true">{mark}</svg>restart</li>'


# --- bars -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """One stacked bar."""

    name: str
    parts: Sequence[float]
    """One value per name of the stack."""


def draw_bars(title: str, unit: str, names: Sequence[str], bars: Sequence[Bar]) -> str:
    """Return a figure of stacked bars, one per row, with an axis from 0."""
    row, width, left, right = 50, WIDTH, 12, 22
    longest = max((sum(bar.parts) for bar in bars), default=0.0) or 1.0
    found = round_ticks(0.0, longest, 6)
    bottom = 20 + row * len(bars)
    height = bottom + 46

    def at(value: float) -> float:
        return left + value / found[-1] * (width - left - right)

    values = "; ".join(
        f"{b.name}: {', '.join(f'{n} {number(v, 3)}' for n, v in zip(names, b.parts, strict=True))}" for b in bars
    )
    parts = [
        f'<svg viewBox="0 0 {width} {height:g}" role="img" aria-label="{attribute(f"{title}, {unit}. {values}")}">'
    ]
    for value in found:
        parts.append(f'<path class="grid" d="M{at(value):.1f} 12V{bottom:g}"/>')
        parts.append(
            f'<text class="tick" x="{at(value):.1f}" y="{bottom + 18:g}" text-anchor="middle">{short(value)}</text>'
        )
    parts.append(f'<text class="label" x="{width / 2:g}" y="{height - 4:g}" text-anchor="middle">{text(unit)}</text>')
    for i, bar in enumerate(bars):
        y, start = 20 + row * i, 0.0
        parts.append(f'<text class="label" x="{left}" y="{y + 8:g}">{text(bar.name)}</text>')
        for j, value in enumerate(bar.parts):
            wide = at(start + value) - at(start)
            place = f'x="{at(start):.1f}" y="{y + 15:g}" width="{wide:.1f}" height="26"'
            parts.append(f'<rect class="area fill{j % COLOURS}" {place}/>')
            if wide > 34:
                place = f'x="{at(start) + wide / 2:.1f}" y="{y + 33:g}" text-anchor="middle"'
                parts.append(f'<text class="inside" {place}>{number(value, 3)}</text>')
            start += value
    keys = [_key(j, name, area=True) for j, name in enumerate(names)]
    return "\n".join(
        ['<figure>', f"<figcaption>{text(title)}</figcaption>", *parts, "</svg>",
         f'<ul class="legend">{"".join(keys)}</ul>', "</figure>"]
    )  # fmt: skip
