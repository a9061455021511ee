"""The timeline of a pipeline: a figure for TensorBoard, and a Chrome trace."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ls_strategy.extras.plots.figure import ROW_GAP, Frame, framed, ticks
from ls_strategy.parallel.pipeline.simulate import Span, bubble
from ls_strategy.spans.chrome_trace import ChromeTrace

_COLOURS = {"F": (66, 133, 244), "B": (52, 168, 83), "I": (120, 200, 120), "W": (251, 188, 4)}
_NAMES = {
    "F": "F: forward", "B": "B: backward", "I": "I: backward, gradients of inputs", "W": "W: backward, of weights"
}  # fmt: skip
_BACKGROUND = 240


def chrome_trace(spans: Sequence[Sequence[Span]]) -> str:
    """Return JSON for chrome://tracing or ui.perfetto.dev: one row per rank, microseconds from the first start."""
    trace = ChromeTrace(min((start for row in spans for _, start, _ in row), default=0.0))
    for rank, row in enumerate(spans):
        trace.name_row((0, rank), f"stage rank {rank}")
        for action, start, end in row:
            place = {"stage": action.stage, "micro_batch": action.micro_batch}
            trace.slice((0, rank), str(action), action.kind, start, end, **place)
    return trace.json()


def draw(spans: Sequence[Sequence[Span]], *, width: int = 1200, height: int = 24) -> Tensor:
    """Return the figure as an image, ``(3, H, W)`` uint8, for TensorBoard's ``add_image``: `bars`, axes, legend."""
    kinds = {action.kind for row in spans for action, _, _ in row}
    legend = [(_COLOURS[kind], name) for kind, name in _NAMES.items() if kind in kinds]
    stages = max((len({action.stage for action, _, _ in row}) for row in spans), default=1)
    several = f"; lighter: later of a rank's {stages} stages" if stages > 1 else ""
    return framed(
        bars(spans, width=width, height=height),
        Frame(
            title=f"one optimizer step by pipeline rank: {100 * bubble(spans):.1f} % of the time is bubble{several}",
            rows=[f"pipeline rank {rank}" for rank in range(len(spans))],
            x_label="time since the first action, ms",
            x_ticks=ticks(1e3 * _extent(spans)[1]),
            legend=[*legend, ((_BACKGROUND, _BACKGROUND, _BACKGROUND), "bubble (no work)")],
        ),
    )


def bars(spans: Sequence[Sequence[Span]], *, width: int = 1200, height: int = 24) -> Tensor:
    """Return the actions as an image, ``(3, ranks * (height + 4) + 4, width)`` uint8.

    One row per rank: F blue, B green, I light green, W yellow, lighter for later stages of the rank; bubbles gray.
    """
    image = torch.full((3, len(spans) * (height + ROW_GAP) + ROW_GAP, width), _BACKGROUND, dtype=torch.uint8)
    zero, length = _extent(spans)
    for rank, row in enumerate(spans):
        top = ROW_GAP + rank * (height + ROW_GAP)
        stages = sorted({action.stage for action, _, _ in row})
        for action, start, end in row:
            left = int((start - zero) / length * width)
            right = max(int((end - zero) / length * width), left + 1)
            light = stages.index(action.stage) / (2 * len(stages))
            colour = torch.tensor([round(c + (255 - c) * light) for c in _COLOURS[action.kind]], dtype=torch.uint8)
            image[:, top : top + height, left:right] = colour[:, None, None]
            image[:, top : top + height, left] = 90  # separates actions
    return image


def _extent(spans: Sequence[Sequence[Span]]) -> tuple[float, float]:
    """Return the first start, and the seconds from there to the last end."""
    start = min((start for row in spans for _, start, _ in row), default=0.0)
    return start, max((end for row in spans for _, _, end in row), default=1.0) - start
