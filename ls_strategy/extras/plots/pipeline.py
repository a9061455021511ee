"""The timeline of a pipeline: a figure for TensorBoard, and a Chrome trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ls_strategy.extras.plots.figure import Band, rows
from ls_strategy.parallel.pipeline.simulate import Span, bubble
from ls_strategy.spans.chrome_trace import ChromeTrace

if TYPE_CHECKING:
    from torch import Tensor

_COLOURS = {"F": (66, 133, 244), "B": (52, 168, 83), "I": (120, 200, 120), "W": (251, 188, 4)}
_NAMES = {
    "F": "F: forward", "B": "B: backward", "I": "I: backward, gradients of inputs", "W": "W: backward, of weights"
}  # fmt: skip
_BACKGROUND, _SEPARATOR = (245, 245, 245), (90, 90, 90)


def chrome_trace(spans: Sequence[Sequence[Span]]) -> str:
    """Return JSON for chrome://tracing or ui.perfetto.dev: one row per rank, microseconds from the first start."""
    trace = ChromeTrace(min((start for row in spans for _, start, _ in row), default=0.0))
    for rank, row in enumerate(spans):
        trace.name_row((0, rank), f"stage rank {rank}")
        for action, start, end in row:
            place = {"stage": action.stage, "micro_batch": action.micro_batch}
            trace.slice((0, rank), str(action), action.kind, start, end, **place)
    return trace.json()


def draw(spans: Sequence[Sequence[Span]], *, width: int = 1200) -> Tensor:
    """Return the figure as an image, ``(3, H, W)`` uint8, for TensorBoard's ``add_image``.

    One row per rank: F blue, B green, I light green, W yellow, lighter for later stages of the rank; bubbles gray.
    """
    kinds = {action.kind for row in spans for action, _, _ in row}
    legend = [(_COLOURS[kind], name) for kind, name in _NAMES.items() if kind in kinds]
    stages = max((len({action.stage for action, _, _ in row}) for row in spans), default=1)
    several = f"; lighter: later of a rank's {stages} stages" if stages > 1 else ""
    zero, length = _extent(spans)
    return rows(
        f"one optimizer step by pipeline rank: {100 * bubble(spans):.1f} % of the time is bubble{several}",
        [f"pipeline rank {rank}" for rank in range(len(spans))],
        [band for rank, row in enumerate(spans) for band in _bands(rank, row, zero)],
        [*legend, (_BACKGROUND, "bubble (no work)")],
        "time since the first action, ms",
        1e3 * length,
        width=width,
    )


def _bands(rank: int, row: Sequence[Span], zero: float) -> Iterator[Band]:
    """Yield the bars of each stage and kind of action, and thin lines where an action begins."""
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for action, start, end in row:
        bars.setdefault((action.stage, action.kind), []).append((1e3 * (start - zero), 1e3 * (end - zero)))
    stages = sorted({stage for stage, _ in bars})
    for (stage, kind), them in bars.items():
        light = stages.index(stage) / (2 * len(stages))
        red, green, blue = (round(c + (255 - c) * light) for c in _COLOURS[kind])
        yield Band(rank, (red, green, blue), them)
    yield Band(rank, _SEPARATOR, [(at, at) for at in (1e3 * (start - zero) for _, start, _ in row)])


def _extent(spans: Sequence[Sequence[Span]]) -> tuple[float, float]:
    """Return the first start, and the seconds from there to the last end."""
    start = min((start for row in spans for _, start, _ in row), default=0.0)
    return start, max((end for row in spans for _, _, end in row), default=1.0) - start
