"""`StepFigures`: where the time and the memory of one step went, as images for TensorBoard.

::

    zero_time/step      a row per rank and kind over the milliseconds of the step: phases with waits, messages, copies
    zero_memory/step    bytes by kind, stacked, over the same milliseconds, on the rank that had the most
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ls_strategy.extras.callbacks.step_trace import RankTrace
from ls_strategy.extras.plots.charts import unit_for
from ls_strategy.extras.plots.figure import CURE, Band, Colour, add_legend, figure, missing, of, pixels, rows
from ls_strategy.host.pytorch import pl, rank_zero_info
from ls_strategy.spans import BACKWARD, COMMUNICATION, COPY, DATA, FORWARD, OPTIMIZER, OTHER, Span, SpanRecord

SHOWN_RANKS = 8  # ranks of the step's figure
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


@dataclass(frozen=True)
class RankStep:
    """Data of one rank that the figures need: its trace, and its peak memory."""

    trace: RankTrace  # without spans on ranks that the figure of the step does not show
    peak_bytes: int  # the most of all kinds together


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
        self._on = bool(trainer.strategy.broadcast(draws(trainer, "Monitor")))

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


def draws(trainer: pl.Trainer, callback: str) -> bool:
    """Return whether ``callback`` draws on this rank, and say what it would need where a logger takes images.

    Imports matplotlib, when the fit begins rather than within a step.
    """
    if not trainer.is_global_zero or not any(map(_takes_images, trainer.loggers)):
        return False
    if why := missing():
        rank_zero_info(f"{callback} logs no image, because {why}. {CURE}.")
    return not why


def _takes_images(logger: Any) -> bool:
    return hasattr(getattr(logger, "experiment", None), "add_image")


def states(held: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of the kinds that a figure stacks."""
    return {kind: held.get(kind, 0) for kind in KINDS}


# --- time -------------------------------------------------------------------------------------------------------------


def draw_time(ranks: Sequence[RankStep], step: int, *, width: int = 1200) -> Tensor:
    """Return the step of the first `SHOWN_RANKS` ranks as an image, ``(3, H, W)`` uint8."""
    shown = ranks[:SHOWN_RANKS]
    start = min(r.trace.record.start + r.trace.shift_s for r in shown)
    length = max(max(r.trace.record.end + r.trace.shift_s for r in shown) - start, 1e-9)
    moves = [c for c in _MOVES if any(s.category == c and s.moves for r in shown for s in r.trace.record.spans)]
    names: list[str] = []
    bands: list[Band] = []
    for number, rank in enumerate(shown):
        record, zero = rank.trace.record, start - rank.trace.shift_s
        for phase, (colour, _) in PHASES.items():
            bands.append(Band(len(names), colour, _ms((s for s in record.phases if s.name == phase), zero)))
        bands.append(Band(len(names), _WAIT, _ms((s for s in record.spans if s.waits), zero), top=2 / 3))
        names.append(f"rank {number}")
        for category in moves:
            spans = (s for s in record.spans if s.category == category and s.moves and s.name != "wait")
            bands.append(Band(len(names), _MOVES[category][0], _ms(spans, zero)))
            names.append("messages" if category == COMMUNICATION else "copies")
    kinds = {s.name for r in shown for s in r.trace.record.phases}
    waits = any(s.waits for r in shown for s in r.trace.record.spans)
    legend = [each for phase, each in PHASES.items() if phase in kinds]
    legend += [(_WAIT, "waiting")] if waits else []
    some = "" if len(shown) == len(ranks) else f"; the first {len(shown)} of {len(ranks)} ranks"
    title = f"optimizer step {step}: what each rank did{some}"
    legend += [_MOVES[c] for c in moves]
    return rows(title, names, bands, legend, "time since the step began, ms", 1e3 * length, width=width)


def _ms(spans: Iterable[Span], zero: float) -> list[tuple[float, float]]:
    """Return when spans begin and end, in ms since ``zero``."""
    return [(1e3 * (s.start - zero), 1e3 * (s.end - zero)) for s in spans]


# --- memory -----------------------------------------------------------------------------------------------------------


def draw_memory(ranks: Sequence[RankStep], step: int, *, width: int = 1200, height: int = 400) -> Tensor:
    """Return the memory over the step of the rank that had the most, as an image, ``(3, H, W)`` uint8."""
    number = max(range(len(ranks)), key=lambda i: ranks[i].peak_bytes)
    record = ranks[number].trace.record
    unit = unit_for(max(ranks[number].peak_bytes, 1))
    name = _unit(unit.nbytes)
    used = [kind for kind in KINDS if any(held.get(kind) for _, _, held in record.memory)]
    peaks = [rank.peak_bytes / unit.nbytes for rank in ranks]
    others = "" if len(ranks) == 1 else f", the most of {len(ranks)} ranks (least: {min(peaks):.3g} {name})"
    resident = max((held.get("process", 0) for _, _, held in record.memory), default=0)
    notes = [] if "activations" in used else ["activations are measured on CUDA only"]
    if resident:
        notes.append(f"the process had at most {resident / unit_for(resident).nbytes:.3g} {_unit(resident)} resident")
    with figure(width, height, layout="constrained") as drawn:
        axes = drawn.add_subplot(xlim=(0, 1e3 * record.seconds or 1), ylim=(0, 1.05 * max(peaks) or 1), ylabel=name)
        title = f"optimizer step {step}: memory of rank {number} by kind, peak {max(peaks):.3g} {name}{others}"
        axes.set_title(title, loc="left")
        axes.set_xlabel("\n".join(["time since the step began, ms", *notes]))
        if used:
            # What is in use between the beginning and the first reading is not known better than by that reading.
            times = [0.0, *(1e3 * (at - record.start) for at, _, _ in record.memory[1:]), 1e3 * record.seconds]
            held = [[held.get(kind, 0) / unit.nbytes for _, _, held in record.memory] for kind in used]
            colours = [of(KINDS[kind][0]) for kind in used]
            axes.stackplot(times, [[*row, row[-1]] for row in held], colors=colours, step="post", antialiased=False)
        axes.grid(axis="y", color="#6e6e6e", linestyle=":")
        axes.set_axisbelow(False)
        add_legend(drawn, [KINDS[kind] for kind in used])
        return pixels(drawn)


def _unit(nbytes: int) -> str:
    return f"{unit_for(nbytes).name[0].upper()}iB"
