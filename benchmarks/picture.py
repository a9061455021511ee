"""Figures from records, as SVG without a plotting library: lines over logarithmic axes, and panels of bars or dots."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from xml.sax.saxutils import escape, quoteattr

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

    parts = _begin(title, _HEIGHT, (_LEFT, 18))
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


def _begin(title: str, height: int, at: tuple[int, int] = (12, 20)) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12" role="img" aria-label={quoteattr(title)}>',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(*at, title, size=14),
    ]


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


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    low: float | None = None  # lower quartile, if the record has it
    high: float | None = None
    label: str = ""  # text to the right of the bar. Empty: the value with two digits after the point.


@dataclass(frozen=True)
class Panel:
    """Rows under one title. All panels of a figure have the same rows in the same order."""

    title: str
    bars: Sequence[Bar]
    # Value at the left edge. 0 draws bars; anything else draws dots, because a bar that is cut misleads.
    origin: float = 0.0
    line: tuple[str, float] | None = None  # a vertical line with its name, for example that of the baseline
    least_end: float = 0.0  # the axis ends here or later

    @property
    def end(self) -> float:
        """Value at the right edge."""
        values = [bar.value if bar.high is None else max(bar.high, bar.value) for bar in self.bars]
        return max([*values, self.least_end, self.line[1] if self.line else 0.0])


_ROW, _LABEL = 26, 96  # height of a row, and space for the label at the right of a panel, in pixels


def bars(title: str, panels: Sequence[Panel], *, own: str = "zero", one_scale: bool = True) -> str:
    """Draw panels side by side.

    Args:
        title: text above the figure.
        panels: at least one.
        own: rows whose name contains this text are drawn in colour, the others in grey.
        one_scale: whether a length means the same in every panel.
    """
    if one_scale:
        origin, end = min(panel.origin for panel in panels), max(panel.end for panel in panels)
        panels = [replace(panel, origin=origin, least_end=end) for panel in panels]
    names = [bar.name for bar in panels[0].bars]
    left = 24 + round(7.2 * max(len(name) for name in names))
    width = (_WIDTH - left) / len(panels)
    height = 66 + _ROW * len(names) + 14
    parts = [
        *_begin(title, height),
        *(_text(left - 10, 66 + _ROW * (i + 0.5) + 4, name, anchor="end") for i, name in enumerate(names)),
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, left + number * width, width - _LABEL, own, height)
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, left: float, width: float, own: str, height: int) -> list[str]:
    def at(value: float) -> float:
        return round(left + width * (value - panel.origin) / (panel.end - panel.origin), 1)

    parts = [_text(left, 46, panel.title, colour="#555")]
    if panel.line is not None:
        name, value = panel.line
        x = at(value)
        parts.append(f'<path d="M{x:g} 60V{height - 14}" stroke="#888" stroke-dasharray="3 3" fill="none"/>')
        parts.append(_text(x, height - 3, name, anchor="middle", colour="#666", size=11))
    for i, bar in enumerate(panel.bars):
        parts += _bar(bar, left, at, 66 + _ROW * (i + 0.5), "#1f77b4" if own in bar.name else "#9aa0a6", panel.origin)
    return parts


def _bar(bar: Bar, left: float, at: Callable[[float], float], y: float, colour: str, origin: float) -> list[str]:
    x = at(bar.value)
    mark = (
        f'<circle cx="{x:g}" cy="{y:g}" r="5" fill="{colour}"/>'
        if origin
        else f'<rect x="{left:g}" y="{y - 8:g}" width="{x - left:g}" height="16" fill="{colour}"/>'
    )
    parts, end = [mark], x
    if bar.low is not None and bar.high is not None:
        end = max(x, at(bar.high))
        parts.append(f'<path d="M{at(bar.low):g} {y:g}H{at(bar.high):g}" stroke="#222" stroke-width="1.5"/>')
    return [*parts, _text(end + 8, y + 4, bar.label or f"{bar.value:.2f}")]


Record = Mapping[str, Any]


def scaling(model: str) -> Callable[[Record], str]:
    """Memory per GPU over the number of GPUs, a line per strategy, for one model of `benchmarks.scaling`."""

    def made(record: Record) -> str:
        ranks = record["ranks"]
        lines = [
            Line(name, [(n, by_ranks[str(n)]["device_bytes"] / 1e9) for n in ranks], dashed="offload" in name)
            for name, by_ranks in record["results"][model].items()
        ]
        values = [gigabytes for line in lines for _, gigabytes in line.points]
        low, high = 10 ** math.floor(math.log10(min(values))), 2 * 10 ** math.ceil(math.log10(max(values) / 2))
        ticks = [step * 10.0**power for power in range(-1, 5) for step in (1, 2, 5)]
        return chart(
            f"{model} parameters: peak memory of each GPU, one sequence of 2,048 tokens",
            Axis(ranks[0], ranks[-1], {f"{n:,}": n for n in ranks}, "GPUs"),
            Axis(low, high, {f"{t:,g}": t for t in ticks if low <= t <= high}, "GB per GPU"),
            lines,
            {"80 GB": 80.0} if low < 80 < high else {},
        )

    return made


def _amounts(by_ranks: Mapping[str, Record], ranks: str, kind: str) -> list[Bar]:
    gigabytes = {name: each[ranks][kind] / 1e9 for name, each in by_ranks.items()}
    return [Bar(name, value, label=f"{value:.1f} GB" if value else "none") for name, value in gigabytes.items()]


def memory(record: Record, model: str = "7B", ranks: str = "8") -> str:
    """Memory per GPU, on the device and on the host, a bar per strategy."""
    by_strategy = record["results"][model]
    return bars(
        f"A model with {model} parameters on {ranks} GPUs: peak memory per GPU",
        [
            Panel("on the GPU", _amounts(by_strategy, ranks, "device_bytes"), line=("80 GB", 80.0)),
            Panel("in host memory", _amounts(by_strategy, ranks, "host_bytes")),
        ],
    )


def sent(record: Record, ranks: str = "64") -> str:
    """Bytes that a GPU sends per step, a panel per model."""
    panels = [Panel(model, _amounts(found, ranks, "sent_bytes")) for model, found in record["results"].items()]
    return bars(f"Sent by each of {ranks} GPUs per step", panels, one_scale=False)


def ratios(title: str, line: str) -> Callable[[Record], str]:
    """Step time over that of a baseline, a panel per size of the model."""

    def made(record: Record) -> str:
        panels = [
            Panel(f"{size} parameters", rows, _origin(rows), (line, 1.0))
            for size, found in record["results"].items()
            for rows in [[Bar(n, c["ratio"], c["ratio_q1"], c["ratio_q3"]) for n, c in found["contenders"].items()]]
        ]
        return bars(title, panels)

    return made


def _origin(rows: Sequence[Bar]) -> float:
    """A round number below every quartile."""
    return math.floor(10 * min(1.0, *(bar.low or bar.value for bar in rows)) - 0.5) / 10


def moe(record: Record) -> str:
    """Time of a layer over that of DeepSpeed's, a panel per number of ranks."""
    panels = [
        Panel(ranks, [Bar(name, r["time"][1], r["time"][0], r["time"][2]) for name, r in found.items()],
              line=("DeepSpeed", 1.0))
        for ranks, found in record["results"].items()
    ]  # fmt: skip
    return bars("Forward and backward of one MoE layer, time over DeepSpeed's (less is faster)", panels, own="")


def exposed(record: Record) -> str:
    """Share of a step that waits for updates, with overlap and without."""

    def share(found: Record, row: Record) -> Bar:
        clipping = ", clipping" if row["clip"] else ""
        value = 100 * found["exposed"]
        return Bar(f"{row['setting']}: {row['strategy']}{clipping}", value, label=f"{value:.1f} %")

    keys = ("setting", "strategy", "clip")
    blocking = {tuple(r[k] for k in keys): r for r in record["results"] if not r["overlap"]}
    rows = [r for r in record["results"] if r["overlap"] and tuple(r[k] for k in keys) in blocking]
    return bars(
        "Share of a step that training waits for updates",
        [
            Panel("overlapped (the default)", [share(r, r) for r in rows]),
            Panel("sharding.overlap_step=False", [share(blocking[tuple(r[k] for k in keys)], r) for r in rows]),
        ],
    )


def activations(record: Record) -> str:
    """Step time and kept bytes of every choice."""
    results = record["results"]
    times = [Bar(name, r["time"][1], r["time"][0], r["time"][2]) for name, r in results.items()]
    sizes = [(name, r["kept_bytes"] / 2**20) for name, r in results.items()]
    kept = [Bar(name, size, label=f"{size:.0f} MiB") for name, size in sizes]
    title = "What backward keeps, and what it costs"
    panels = [Panel("kept after forward", kept), Panel("step time over that of none", times, line=("none", 1.0))]
    return bars(title, panels, own="", one_scale=False)


def drive(record: Record) -> str:
    panels = [
        Panel(f"{way}, GB/s", [Bar(n, r[way]["gbs"], r[way]["gbs_q1"], r[way]["gbs_q3"]) for n, r in both])
        for both in [list(record["results"].items())]
        for way in ("read", "write")
    ]
    return bars("The NVMe tier, fio and DeepSpeed on one device", panels, own="ours", one_scale=False)


KINDS = {
    "parameters": ("parameters", "#0072b2"), "masters": ("master weights", "#56b4e9"),
    "optimizer": ("moments (optimizer)", "#e69f00"), "gradients": ("gradients", "#009e73"),
    "gathered": ("gathered parameters", "#f0e442"), "communication": ("communication buffers", "#cc79a7"),
    "activations": ("activations and other", "#d55e00"),
}  # fmt: skip
"""Names and colours of the kinds of memory, in the order in which they are stacked: those of `Monitor`'s image."""


def _kinds_legend(kinds: Sequence[str], left: float, top: float, per_row: int = 4) -> list[str]:
    parts = []
    for i, kind in enumerate(kinds):
        name, colour = KINDS[kind]
        x, y = left + (i % per_row) * 168, top + (i // per_row) * 20
        parts.append(f'<rect x="{x:g}" y="{y:g}" width="12" height="12" fill="{colour}" stroke="#666"/>')
        parts.append(_text(x + 18, y + 10, name))
    return parts


def memory_by_choice(record: Record) -> str:
    """Peak memory of a rank by kind, a stacked bar per choice of options."""
    results = record["results"]
    left, right, row, top = 310, 60, 28, 84
    width, height = _WIDTH - left - right, top + row * len(results) + 44
    largest = max(r["sum"] for r in results.values()) / 2**20
    end = 10 * math.ceil(largest / 10)
    title = f"Where the memory of a rank is at the peak of a step, {record['ranks']} ranks"
    parts = [
        *_begin(title, height),
        *_kinds_legend([k for k in KINDS if any(k in r["kinds"] for r in results.values())], 12, 34),
    ]
    for value in range(0, end + 1, 10):
        x = left + value / end * width
        parts += [_rule(x, top - 4, x, height - 42), _text(x, height - 26, str(value), anchor="middle")]
    parts.append(_text(left + width / 2, height - 8, "MiB", anchor="middle"))
    for i, (name, found) in enumerate(results.items()):
        x, y = float(left), top + row * i
        parts.append(_text(left - 8, y + 15, name, anchor="end"))
        for kind, (_, colour) in KINDS.items():
            wide = found["kinds"].get(kind, 0) / 2**20 / end * width
            if wide:
                place = f'x="{x:.1f}" y="{y + 2}" width="{wide:.1f}" height="{row - 8}"'
                parts.append(f'<rect {place} fill="{colour}" stroke="white" stroke-width="0.8"/>')
            x += wide
        parts.append(_text(x + 6, y + 15, f"{found['sum'] / 2**20:.1f}"))
    return "\n".join([*parts, "</svg>", ""])


def memory_timeline(record: Record) -> str:
    """Memory of rank 0 by kind over one step, as `Monitor` has read it, with the phases."""
    readings = record["timeline"]["readings"]
    left, right, top, bottom, height = 60, 20, 84, 66, 400
    width, low = _WIDTH - left - right, height - bottom
    end = 10 * math.ceil(max(sum(held.get(k, 0) for k in KINDS) for _, _, held in readings) / 2**20 / 10)

    def at(nbytes: float) -> float:
        return round(low - nbytes / 2**20 / end * (low - top), 1)

    title = f"Memory of rank 0 over one step of {record['timeline']['choice']}"
    parts = [
        *_begin(title, height),
        *_kinds_legend([k for k in KINDS if any(held.get(k) for _, _, held in readings)], 12, 34),
    ]
    each = width / len(readings)
    for i, (_, where, held) in enumerate(readings):
        bytes_below = 0.0
        for kind, (_, colour) in KINDS.items():
            nbytes = held.get(kind, 0)
            if nbytes:
                y, y_below = at(bytes_below + nbytes), at(bytes_below)
                place = f'x="{left + i * each:.1f}" y="{y}" width="{each:.1f}" height="{y_below - y:.1f}"'
                parts.append(f'<rect {place} fill="{colour}"/>')
            bytes_below += nbytes
        last = i + 1 == len(readings) or readings[i + 1][1] != where
        if last and where in ("data", "forward", "backward", "optimizer"):
            x = left + (i + 1) * each
            parts.append(f'<path d="M{x:.1f} {top - 6}V{low + 8}" stroke="#444" stroke-dasharray="4 3" fill="none"/>')
            lower = 16 if where == "optimizer" else 0
            parts.append(_text(x - 3, low + 18 + lower, f"end of {where}", anchor="end", size=11))
    for value in range(0, end + 1, 10):
        parts += [_rule(left, at(value * 2**20), left + width, at(value * 2**20))]
        parts.append(_text(left - 8, at(value * 2**20) + 4, str(value), anchor="end"))
    about = "readings of Monitor, in order: after each phase, and at each unit of the model"
    parts += [_text(left - 48, top - 4, "MiB"), _text(left + width / 2, height - 12, about, anchor="middle")]
    return "\n".join([*parts, "</svg>", ""])
