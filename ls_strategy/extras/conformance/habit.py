"""Habits: what people do with a Trainer, each with the right answer, and what marks a function as one.

    @habit(right="the outputs of one process")
    def load_on_one(case):                   # the first phase, on all ranks; its docstring is what `does` says
        ...

    @load_on_one.then(ranks="one", strategy="none")
    def _(case):                             # a later one, in new processes that share the folder
        ...

The one invariant: the code of a habit never asks which strategy it runs under.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ls_strategy.extras.conformance.case import Case

Code = Callable[["Case"], None]


@dataclass(frozen=True)
class Phase:
    """A part of a habit that runs in processes of its own."""

    code: Code

    ranks: Literal["all", "one"] = "all"  # how many processes: as many as ``--devices`` says, or one
    strategy: Literal["own", "ddp", "none"] = "own"  # the one under test, Lightning's DDP, or a plain Trainer
    # This rank gets SIGKILL as soon as something under ``case.saves`` changes after ``case.arm``.
    killed_rank: int | None = None
    loses_data: bool = False  # whether an error here means that something that was saved is gone


@dataclass
class Habit:
    """One thing people do, and the right answer."""

    name: str
    does: str  # one sentence: what the program does
    right: str  # what is right, as the end of a sentence that begins with "right:"
    # The run whose numbers are right: one process with the same global batches, or DDP. ``nobody``: the habit itself
    # says what is right, with ``case.claim``.
    trusted: Literal["one", "ddp", "nobody"]
    # Whether the trusted run repeats all phases, or shows in the first alone what all of them have to give.
    trusted_phases: Literal["all", "first"]
    ends: Literal["well", "in an error"]

    # A regular expression. Where ranks have written it to their output, another answer than the right one is not
    # silent.
    warning: str | None
    phases: list[Phase] = field(default_factory=list)

    def then(
        self,
        *,
        ranks: Literal["all", "one"] = "all",
        strategy: Literal["own", "ddp", "none"] = "own",
        loses_data: bool = False,
    ) -> Callable[[Code], None]:
        """Add a phase. It starts when all processes of the one before have ended."""

        def add(code: Code) -> None:
            self.phases.append(Phase(code, ranks, strategy, None, loses_data))

        return add


def habit(
    *,
    right: str = "the losses of one process with the same global batches",
    trusted: Literal["one", "ddp", "nobody"] = "one",
    trusted_phases: Literal["all", "first"] = "all",
    ends: Literal["well", "in an error"] = "well",
    warning: str | None = None,
    strategy: Literal["own", "ddp", "none"] = "own",
    killed_rank: int | None = None,
) -> Callable[[Code], Habit]:
    """Make a function the first phase of a habit of its name; see `Habit` and `Phase` for the arguments."""

    def make(code: Code) -> Habit:
        first = Phase(code, "all", strategy, killed_rank)
        return Habit(
            code.__name__, (code.__doc__ or "").strip(), right, trusted, trusted_phases, ends, warning, [first]
        )

    return make
