"""`StepFigures`: where the time and the memory of one step went, as images for TensorBoard.

::

    zero_time/step      a row per rank and kind over the milliseconds of the step: phases with waits, messages, copies
    zero_memory/step    bytes by kind, stacked, over the same milliseconds, on the rank that had the most
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ls_strategy.extras.callbacks.step_trace import RankTrace
from ls_strategy.extras.plots.charts import unit_for
from ls_strategy.extras.plots.figure import ROW_GAP, Colour, Frame, framed, ticks
from ls_strategy.host.pytorch import pl, rank_zero_info
from ls_strategy.spans import BACKWARD, COMMUNICATION, COPY, DATA, FORWARD, OPTIMIZER, OTHER, Span, SpanRecord

SHOWN_RANKS = 8
"""Ranks of the step's figure."""

PHASES: dict[str, tuple[Colour, str]] = {
    FORWARD: ((86, 180, 233), "forward"),
    BACKWARD: ((0, 114, 178), "backward"),
    OPTIMIZER: ((230, 159, 0), "update (optimizer)"),
    DATA: ((204, 121, 167), "data"),
    OTHER: ((200, 200, 200), "other"),
}
"""Colors that colour-blind readers tell apart (Okabe and Ito, "Color Universal Design", 2008), by phase."""

_MOVES: dict[str, tuple[Colour, str]] = {
    COMMUNICATION: ((213, 94, 0), "messages in flight"),
    COPY: ((0, 158, 115), "copies in flight"),
}
_WAIT: Colour = (40, 40, 40)

KINDS: dict[str, tuple[Colour, str]] = {
    "parameters": ((0, 114, 178), "parameters"),
    "masters": ((86, 180, 233), "master weights"),
    "optimizer": ((230, 159, 0), "moments (optimizer)"),
    "gradients": ((0, 158, 115), "gradients"),
    "gathered": ((240, 228, 66), "gathered parameters"),
    "communication": ((204, 121, 167), "communication buffers"),
    "activations": ((213, 94, 0), "activations and other"),
}
"""Color and name of each kind of memory, from the bottom of the figure."""

_EMPTY = 245


@dataclass(frozen=True)
class RankStep:
    """Data of one rank that the figures need: its trace, and its peak memory."""

    trace: RankTrace
    """Without spans on ranks that the figure of the step does not show."""

    peak_bytes: int
    """The most of all kinds together."""


class StepFigures:
    """The figures of one fit: decides which steps are drawn, and draws them."""

    def __init__(self, every_n_steps: int) -> None:
        """``every_n_steps``: the least number of optimizer steps between two drawn steps."""
        self._every = every_n_steps
        self._last: int | None = None
        self._on = False

    def start(self, trainer: pl.Trainer) -> None:
        """Begin a fit: find out whether a logger takes images. Collective."""
        self._last = None
        takes = trainer.is_global_zero and any(map(_takes_images, trainer.loggers))
        if takes and importlib.util.find_spec("PIL") is None:
            rank_zero_info("Monitor: no image of a step is logged, because Pillow is missing. Run pip install pillow.")
            takes = False
        self._on = bool(trainer.strategy.broadcast(takes))

    @property
    def on(self) -> bool:
        """Whether a logger takes images."""
        return self._on

    def due(self, step: int) -> bool:
        """Return whether the step that begins when ``global_step`` is ``step`` is drawn."""
        return self._on and (self._last is None or step >= self._last + self._every)

    def taken(self, step: int) -> None:
        """Count the step that began at ``step`` as drawn."""
        self._last = step

    @staticmethod
    def of_rank(record: SpanRecord, rank: int) -> RankStep:
        """Return what rank 0 needs of this rank."""
        peak = max((sum(states(held).values()) for _, _, held in record.memory), default=0)
        kept = record if rank < SHOWN_RANKS else replace(record, spans=[], phases=[])
        return RankStep(RankTrace.of(kept), peak)

    @staticmethod
    def show(trainer: pl.Trainer, ranks: Sequence[RankStep], step: int) -> None:
        """Draw, and give the images to the loggers. Rank 0 only."""
        images = {"zero_time/step": draw_time(ranks, step)}
        if any(rank.peak_bytes for rank in ranks):
            images["zero_memory/step"] = draw_memory(ranks, step)
        log_images(trainer, images, step)


def log_images(trainer: pl.Trainer, images: Mapping[str, Tensor], step: int) -> None:
    """Give images to the loggers that take any."""
    for logger in trainer.loggers:
        if _takes_images(logger):
            for tag, image in images.items():
                logger.experiment.add_image(tag, image, step)  # type: ignore[attr-defined]


def _takes_images(logger: Any) -> bool:
    return hasattr(getattr(logger, "experiment", None), "add_image")


def states(held: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of the kinds that a figure stacks."""
    return {kind: held.get(kind, 0) for kind in KINDS}


# --- time -------------------------------------------------------------------------------------------------------------


def draw_time(ranks: Sequence[RankStep], step: int, *, width: int = 1200, height: int = 20) -> Tensor:
    """Return the step of the first `SHOWN_RANKS` ranks as an image, ``(3, H, W)`` uint8."""
    shown = ranks[:SHOWN_RANKS]
    start = min(r.trace.record.start + r.trace.shift_s for r in shown)
    length = max(max(r.trace.record.end + r.trace.shift_s for r in shown) - start, 1e-9)
    moves = [c for c in _MOVES if any(s.category == c and s.moves for r in shown for s in r.trace.record.spans)]
    names: list[str] = []
    image = torch.full(
        (3, len(shown) * (1 + len(moves)) * (height + ROW_GAP) + ROW_GAP, width), _EMPTY, dtype=torch.uint8
    )

    def fill(spans: Sequence[Span], shift: float, colour: Colour, top: int, rows: int) -> None:
        for span in spans:
            left = int((span.start + shift - start) / length * width)
            right = max(int((span.end + shift - start) / length * width), left + 1)
            image[:, top : top + rows, left:right] = torch.tensor(colour, dtype=torch.uint8)[:, None, None]

    for number, rank in enumerate(shown):
        record, shift = rank.trace.record, rank.trace.shift_s
        top = ROW_GAP + len(names) * (height + ROW_GAP)
        names.append(f"rank {number}")
        for phase, (colour, _) in PHASES.items():
            fill([s for s in record.phases if s.name == phase], shift, colour, top, height)
        fill([s for s in record.spans if s.waits], shift, _WAIT, top + 2 * height // 3, height - 2 * height // 3)
        for category in moves:
            top += height + ROW_GAP
            names.append("messages" if category == COMMUNICATION else "copies")
            spans = [s for s in record.spans if s.category == category and s.moves and s.name != "wait"]
            fill(spans, shift, _MOVES[category][0], top, height)
    kinds = {s.name for r in shown for s in r.trace.record.phases}
    waits = any(s.waits for r in shown for s in r.trace.record.spans)
    legend = [each for phase, each in PHASES.items() if phase in kinds]
    legend += [(_WAIT, "waiting")] if waits else []
    some = "" if len(shown) == len(ranks) else f"; the first {len(shown)} of {len(ranks)} ranks"
    return framed(
        image,
        Frame(
            title=f"optimizer step {step}: what each rank did{some}",
            rows=names,
            x_label="time since the step began, ms",
            x_ticks=ticks(1e3 * length),
            legend=[*legend, *(_MOVES[c] for c in moves)],
        ),
    )


# --- memory -----------------------------------------------------------------------------------------------------------


def draw_memory(ranks: Sequence[RankStep], step: int, *, width: int = 1200, height: int = 300) -> Tensor:
    """Return the memory over the step of the rank that had the most, as an image, ``(3, H, W)`` uint8."""
    number = max(range(len(ranks)), key=lambda i: ranks[i].peak_bytes)
    record = ranks[number].trace.record
    peak = max(ranks[number].peak_bytes, 1)
    unit = unit_for(peak)
    y_ticks = ticks(1.05 * peak / unit.nbytes, most=6)
    image = torch.full((3, height, width), 255, dtype=torch.uint8)
    begins = [max(int((at - record.start) / max(record.seconds, 1e-9) * width), 0) for at, _, _ in record.memory]
    if begins:
        begins[0] = 0  # what is in use between the beginning and the first reading is not known better
    for (_, _, held), left, right in zip(record.memory, begins, [*begins, width][1:], strict=True):
        bottom = 0
        for kind, nbytes in states(held).items():
            top = bottom + nbytes
            rows = slice(height - int(top / (1.05 * peak) * height), height - int(bottom / (1.05 * peak) * height))
            image[:, rows, left : max(right, left + 1)] = torch.tensor(KINDS[kind][0], dtype=torch.uint8)[:, None, None]
            bottom = top
    for place, _ in y_ticks[1:]:
        image[:, height - int(place * height), ::6] = 110
    used = {kind for _, _, held in record.memory for kind, nbytes in states(held).items() if nbytes}
    name = f"{unit.name[0].upper()}iB"
    peaks = [rank.peak_bytes / unit.nbytes for rank in ranks]
    others = "" if len(ranks) == 1 else f", the most of {len(ranks)} ranks (least: {min(peaks):.3g} {name})"
    resident = max((held.get("process", 0) for _, _, held in record.memory), default=0)
    notes = [] if "activations" in used else ["activations are measured on CUDA only"]
    if resident:
        notes.append(f"the process had at most {resident / unit_for(resident).nbytes:.3g} {_unit(resident)} resident")
    return framed(
        image,
        Frame(
            title=f"optimizer step {step}: memory of rank {number} by kind, peak {max(peaks):.3g} {name}{others}",
            rows=[],
            x_label="time since the step began, ms",
            x_ticks=ticks(1e3 * record.seconds),
            legend=[each for kind, each in KINDS.items() if kind in used],
            y_ticks=[(place, f"{text} {name}") for place, text in y_ticks],
            note="; ".join(notes),
        ),
    )


def _unit(nbytes: int) -> str:
    return f"{unit_for(nbytes).name[0].upper()}iB"
