"""Charts of a report, drawn by matplotlib as SVG: lines and stacked areas over steps, and stacked bars.

Colors become variables of ``style.css``, so that a chart follows light, dark and print. Lines differ in their dashes as
well, and every number of a stacked bar is in the table next to it, so that no meaning is in the color alone.
"""

from __future__ import annotations

import html
import math
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ls_strategy.extras.plots.figure import INK, RULE, SOFT, figure, svg
from ls_strategy.extras.report.numbers import allowed, number, short
from ls_strategy.extras.report.series import Columns, Series, columns_of

WIDTH, HEIGHT = 420, 250
_RIGHT, _TOP, _BOTTOM = 20, 30, 42
_TICK_WIDTH = 6.8  # pixels of a character at the axis, at most
LINES = ("#0072b2", "#d55e00", "#007a5a", "#a8508a", "#2f86c0", "#9a6a00", "#555555", "#7a3fb0")
DARK_LINES = ("#56b4e9", "#ff8a3d", "#2fc79a", "#e59ac6", "#8fd0ff", "#f0c24b", "#bbbbbb", "#c09cf0")
"""Colors of Okabe and Ito ("Color Universal Design", 2008), darker or lighter where contrast needs it."""

FILLS = ("#56b4e9", "#0072b1", "#e69f00", "#cc79a7", "#c8c8c8", "#009e73", "#d55e01", "#f0e442")
DASHES = ((), (7, 3), (2, 3), (9, 3, 2, 3), (12, 3), (4, 2, 1, 2, 1, 2), (1, 2), (6, 2, 6, 5))
_BAD, _CARD = "#c0000c", "#fefefe"
_COLOURS = {INK: "ink", SOFT: "soft", RULE: "rule", _BAD: "bad", _CARD: "card"}
_COLOURS |= {colour: f"line{i}" for i, colour in enumerate(LINES)} | {c: f"fill{i}" for i, c in enumerate(FILLS)}
_VARIABLES = {colour: f"var(--{name})" for colour, name in _COLOURS.items()}
"""Variables of ``style.css``, by the color that matplotlib draws. No color is in both `LINES` and `FILLS`."""

_COLUMNS = 180  # points of a line; more are shown as minimum, mean and maximum of as many ranges of steps
_DOTS = 24  # lines of at most this many points show them
_LOG_FROM = 50.0  # a chart is logarithmic if its largest value is this many times the smallest, and all are above 0
_EQUAL = 5e-5
"""Values are equal for an axis if they differ by a smaller share: its six digits could not tell its numbers apart."""

_LARGEST = 1e290  # values beyond are drawn here: the length of an axis has to be a number


Lines = Sequence[tuple[str, Series]]


@dataclass(frozen=True)
class Chart:
    """Lines over steps, by name. ``unit`` says what the numbers at the axis are."""

    title: str
    unit: str
    may_be_log: bool = False
    from_zero: bool = False
    note: str = ""
    lines: Lines = ()
    restarts: Sequence[int] = ()  # steps at which the run was started again


@dataclass(frozen=True)
class Figure:
    """A chart with what stands around it: legend, notes and a table of values."""

    title: str
    svg: str
    # Kind (line, area or restart), color in ``style.css``, dashes and name of each entry of the legend.
    keys: Sequence[tuple[str, str, str, str]]
    notes: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()  # name, first, minimum, maximum and last value


def draw(chart: Chart) -> Figure:
    """Draw lines. NaN and infinite values are gaps, with a mark at the axis."""
    columns = [columns_of(series, _COLUMNS) for _, series in chart.lines]
    with figure(WIDTH, HEIGHT, chart.title) as drawn:
        values = np.concatenate([v for each in columns for v in (each.low, each.high)])
        axes = _axes(drawn, chart, np.concatenate([each.step for each in columns]), values)
        for i, each in enumerate(columns):
            _line(axes, each, i)
        notes = []
        if any((each.points > 1).any() for each in columns):
            most = max(len(series) for _, series in chart.lines)
            notes.append(f"{most:,} points: the line is the mean of each range of steps, the band reaches from its "
                         "minimum to its maximum.")  # fmt: skip
        if bad := sum(int(each.not_finite.sum()) for each in columns):
            notes.append(f"NaN or infinite values: {bad:,}. They are gaps in the line, marked "
                         "\N{MULTIPLICATION SIGN} at the axis.")  # fmt: skip
        keys = [("line", f"line{i}", " ".join(map(str, dashes))) for i, dashes in enumerate(DASHES)]
        return _finished(axes, chart, keys, notes, chart.lines)


def draw_stacked(chart: Chart, total: str, colours: Sequence[int]) -> Figure:
    """Draw the lines' values stacked, the first at the bottom.

    Args:
        chart: its lines have values at the same steps; where one has none, it counts as 0.
        total: what the sum is called.
        colours: places in `FILLS`.
    """
    steps = np.unique(np.concatenate([np.array(series.steps) for _, series in chart.lines]))
    table = np.zeros((len(chart.lines), len(steps)))
    for row, (_, series) in zip(table, chart.lines, strict=True):
        row[np.searchsorted(steps, series.steps)] = np.nan_to_num(series.values, posinf=0.0, neginf=0.0)
    sums = Series(array("q", steps), array("d", table.sum(0)))
    chosen = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _COLUMNS)).astype(int))
    x, y = steps[chosen].astype(float), np.clip(table[:, chosen], -_LARGEST, _LARGEST)
    with figure(WIDTH, HEIGHT, chart.title) as drawn:
        axes = _axes(drawn, chart, x, np.array(sums.values))
        if len(x) == 1:
            x, y = np.array([x[0] - 1, x[0] + 1]), y.repeat(2, axis=1)
        areas = axes.stackplot(x, y, colors=[FILLS[c] for c in colours], edgecolor=_CARD, linewidth=0.8)
        for i, area in enumerate(areas):
            area.set_gid(f"name{i}")
        some = f"{len(chosen)} of {len(steps):,} steps are shown; the table has the extremes of all."
        keys = [("area", f"fill{colour}", "") for colour in colours]
        notes = [some] if len(steps) > len(chosen) else []
        return _finished(axes, chart, keys, notes, [*chart.lines, (total, sums)])


def _finished(
    axes: Any, chart: Chart, keys: Sequence[tuple[str, str, str]], notes: Sequence[str], summed_up: Lines
) -> Figure:
    """Return a figure of lines or areas whose legend begins with ``keys``."""
    names = [name for name, _ in chart.lines]
    legend = [(*key, name) for key, name in zip(keys, names, strict=False)]
    if any(line.get_gid() == "restart" for line in axes.lines):
        legend.append(("restart", "soft", "2 2", "restart"))
    label = f"{chart.title}: {chart.unit} over optimizer steps. Lines: {', '.join(names)}"
    text = _svg(axes.figure, label, names)
    return Figure(chart.title, text, legend, [*filter(None, [chart.note]), *notes],
                  [(name, *_summary(series)) for name, series in summed_up])  # fmt: skip


def draw_bars(title: str, unit: str, names: Sequence[str], bars: Sequence[tuple[str, Sequence[float]]]) -> Figure:
    """Draw a stacked bar per row, with an axis from 0. ``bars``: their names, and a value per name of the stack."""
    height = 66 + 50 * len(bars)
    longest = max((sum(parts) for _, parts in bars), default=0.0)
    ticks = _ticks(0.0, min(longest, _LARGEST) if longest > 0 else 1.0, 5)
    wide = WIDTH - 34
    with figure(WIDTH, height, title) as drawn:
        axes = drawn.add_axes((12 / WIDTH, 46 / height, wide / WIDTH, 1 - 58 / height))
        axes.set(xlim=(0, ticks[-1]), ylim=(len(bars), 0), xticks=ticks, xticklabels=map(short, ticks), yticks=[])
        axes.spines[:].set_visible(False)
        axes.grid(axis="x")
        for row, (name, parts) in enumerate(bars):
            shown = name if len(name) < 60 else name[:57] + "..."
            axes.text(0, row + 0.16, allowed(shown), va="center", color=SOFT, gid="label")
            lengths = np.clip(parts, 0, _LARGEST)
            for i, (value, end) in enumerate(zip(lengths, np.cumsum(lengths), strict=True)):
                bar = axes.barh(row + 0.56, value, 0.5, end - value, color=FILLS[i], edgecolor=_CARD, linewidth=0.8)
                bar[0].set_gid(f"name{i}")
                if value / ticks[-1] * wide > 34:
                    text = axes.text(end - value / 2, row + 0.58, number(value, 3), ha="center", va="center")
                    text.set(color="#ffffff" if i == 1 else "#000000", gid="inside")
        label = f"{title}, {unit}. " + "; ".join(
            f"{name}: {', '.join(f'{n} {number(v, 3)}' for n, v in zip(names, parts, strict=True))}"
            for name, parts in bars
        )
        drawn.text(0.5, 6 / height, unit, ha="center", color=SOFT, gid="label")
        return Figure(
            title, _svg(drawn, label, names), [("area", f"fill{i}", "", name) for i, name in enumerate(names)]
        )


# --- axes -------------------------------------------------------------------------------------------------------------


def _axes(drawn: Any, chart: Chart, steps: Any, values: Any) -> Any:
    """Make axes for values over steps, with grid, units and marks of restarts."""
    low, high, ticks, log = _range(chart, values[np.isfinite(values)])
    first, last = (steps.min(), steps.max()) if len(steps) else (0.0, 1.0)
    if first == last:
        first, last = first - 1, last + 1
    left = 14 + _TICK_WIDTH * max(len(short(value)) for value in ticks)
    axes = drawn.add_axes((left / WIDTH, _BOTTOM / HEIGHT, 1 - (left + _RIGHT) / WIDTH, 1 - (_TOP + _BOTTOM) / HEIGHT))
    if log:
        axes.set_yscale("log")
    at = [step for step in _ticks(first, last, 4) if first <= step <= last and step == round(step)]
    axes.set(xlim=(first, last), ylim=(low, high), xticks=at, xticklabels=map(short, at))
    axes.set_yticks(ticks, map(short, ticks))
    axes.minorticks_off()
    axes.grid(axis="y")
    axes.spines["left"].set_visible(False)
    for step in dict.fromkeys(chart.restarts):
        if first <= step <= last:
            axes.axvline(step, color=SOFT, linewidth=1.4, linestyle=(0, (2, 2)), gid="restart")
    unit = f"{chart.unit} (log scale)" if log else chart.unit
    drawn.text(4 / WIDTH, 1 - 16 / HEIGHT, allowed(unit), color=SOFT, gid="unit")
    drawn.text((left + WIDTH - _RIGHT) / 2 / WIDTH, 6 / HEIGHT, "optimizer step", ha="center", color=SOFT, gid="label")
    return axes


def _range(chart: Chart, values: Any) -> tuple[float, float, list[float], bool]:
    """Return the ends of the axis of finite values, its ticks, and whether it is logarithmic."""
    low, high = np.clip((values.min(), values.max()) if len(values) else (0.0, 1.0), -_LARGEST, _LARGEST).tolist()
    if chart.may_be_log and low > 1 / _LARGEST and high / low >= _LOG_FROM:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        return 10.0 ** powers[0], 10.0 ** powers[-1], [10.0**p for p in powers[:: -(-len(powers) // 6)]], True
    low = min(low, 0.0) if chart.from_zero else low
    if low == high == 0:
        high = 1.0
    elif high - low < _EQUAL * max(abs(low), abs(high)):
        around = max(abs(low), abs(high)) / 10
        low, high = (float(f"{end:.6g}") for end in (low - around, high + around))
    ticks = _ticks(low, high, 5)
    return min(low, ticks[0]), max(high, ticks[-1]), ticks, False


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Return round numbers that reach from ``low`` or below to ``high`` or above, with at most ``most`` steps."""
    from matplotlib.ticker import MaxNLocator

    found = MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    return [0.0 if abs(tick) < 1e-9 * (high - low) else float(tick) for tick in found]


def _line(axes: Any, columns: Columns, place: int) -> None:
    colour, dashes = LINES[place], DASHES[place]
    low, mean, high = (np.clip(values, -_LARGEST, _LARGEST) for values in (columns.low, columns.mean, columns.high))
    if (high > low).any():
        axes.fill_between(columns.step, low, high, color=colour, alpha=0.28, linewidth=0, gid="band")
    shown = np.isfinite(mean)
    alone = shown & ~np.append(shown[1:], False) & ~np.append(False, shown[:-1])
    dots = np.flatnonzero(shown if shown.sum() <= _DOTS else alone)
    style = {"dashes": dashes} if dashes else {}
    axes.plot(columns.step, mean, color=colour, linewidth=1.8, gid=f"name{place}", clip_on=False, **style)
    axes.plot(columns.step[dots], mean[dots], "o", color=colour, markersize=5, clip_on=False)
    bad = columns.step[columns.not_finite > 0]
    if len(bad):
        way = axes.get_xaxis_transform()
        axes.plot(bad, np.full(len(bad), 0.03), "x", color=_BAD, transform=way, clip_on=False, mew=2, gid="bad")


def _svg(drawn: Any, label: str, names: Sequence[str]) -> str:
    """Return the SVG with the page's colors, the names of its parts, and a label for who cannot see it."""
    text = svg(drawn, transparent=True)
    text = re.sub("(?<=fill: |roke: )#[0-9a-f]{6}", lambda colour: _VARIABLES.get(colour[0], colour[0]), text)
    titles = [f'<g class="named"><title>{html.escape(name)}</title>' for name in names]
    text = re.sub(r'<g id="name(\d+)">', lambda part: titles[int(part[1])], text)
    text = re.sub(r'<g id="([a-z]+)">', r'<g class="\1">', text)
    size = f'viewBox="0 0 {WIDTH} {drawn.get_figheight() * 72:g}" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<svg {size} role="img" aria-label="{html.escape(label)}">' + text[text.index(">") + 1 :]


def _summary(series: Series) -> tuple[str, str, str, str]:
    finite = series.finite()
    low, high = (finite.min(), finite.max()) if len(finite) else (None, None)
    return number(series.values[0]), number(low), number(high), number(series.values[-1])
