"""Record which run a checkpoint belongs to, and its place there, to find the newest one although clocks differ.

::

    fit from the beginning      a new run, generation 0
    fit from a checkpoint       the checkpoint's run, one generation later
    a checkpoint                run, generation, fit, step: see `latest`

Times alone do not decide: if a node whose clock is an hour fast is replaced, later checkpoints would look older.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

HISTORY = "history"
"""Key of a checkpoint's `History`."""


@dataclass(frozen=True)
class History:
    """Position of a fit in the chain of fits that continue each other."""

    run: str
    """The same for a fit and for those that continue from its checkpoints."""

    fit: str
    generation: int
    """How many fits came before."""

    @classmethod
    def begin(cls) -> History:
        """Return that of a fit from the beginning."""
        return cls(uuid.uuid4().hex, uuid.uuid4().hex, 0)

    @classmethod
    def of(cls, saved: Any) -> History | None:
        """Return what `to_dict` returned; None if it is something else."""
        try:
            found = cls(**saved)
        except TypeError:
            return None
        right = isinstance(found.run, str) and isinstance(found.fit, str) and isinstance(found.generation, int)
        return found if right else None

    def goes_on(self) -> History:
        """Return that of a fit that continues from this one."""
        return History(self.run, uuid.uuid4().hex, self.generation + 1)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        return asdict(self)


@dataclass(frozen=True)
class Saved:
    """A checkpoint, as far as its age is concerned."""

    path: str
    saved_at: float
    """Seconds since 1970, by the clock of the node that saved it."""

    step: int = 0
    history: History | None = None


def latest(saves: Sequence[Saved]) -> Saved | None:
    """Return the checkpoint that was saved last.

    Clocks only decide between runs, between fits that continue from the same checkpoint, and at the same step. A step
    says nothing about another run. Checkpoints without a history are runs of their own.
    """
    runs: dict[str, list[Saved]] = {}
    for each in saves:
        runs.setdefault(each.history.run if each.history else f"path {each.path}", []).append(each)
    if not runs:
        return None
    of_run = max(runs.values(), key=lambda found: max(each.saved_at for each in found))
    ended: dict[str, float] = {}
    for each in of_run:
        fit = each.history.fit if each.history else ""
        ended[fit] = max(each.saved_at, ended.get(fit, 0.0))

    def age(each: Saved) -> tuple[Any, ...]:
        history = each.history
        place = (0, 0.0) if history is None else (history.generation, ended[history.fit])
        return (*place, each.step, each.saved_at, each.path)

    return max(of_run, key=age)
