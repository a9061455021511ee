"""Pipeline schedules as data: for every rank, the order of its actions.

============================  ================  =========  =============================================================
name                          stages per rank   backward   source
============================  ================  =========  =============================================================
gpipe                         1                 B          Huang et al., arXiv:1811.06965
1f1b                          1                 B          Narayanan et al. (PipeDream-Flush), arXiv:2006.09503
interleaved_1f1b              2 or more         B          Narayanan et al. (Megatron-LM), arXiv:2104.04473
zero_bubble                   1 or more         I, W       after Qi et al. (ZB-H1), arXiv:2401.10241
zbv                           2, V-shaped       I, W       after Qi et al. (ZB-V), arXiv:2405.15362
dualpipe_v                    2, V-shaped       B, I, W    DeepSeek-AI, arXiv:2412.19437, cut in half: DualPipeV
============================  ================  =========  =============================================================

Stages are placed round-robin (``loop``: stage ``s`` on rank ``s % ranks``) or V-shaped (``v``: the first and the last
stage on rank 0). Integers only: no torch. A table is the same on every rank, and `simulate` checks it. Another schedule
is an entry of `SCHEDULES`, and its name a value of `PipelineConfig.schedule`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ls_strategy.errors import PlanError
from ls_strategy.registry import Registry

Kind = Literal["F", "B", "I", "W"]
Placement = Literal["loop", "v"]


class Action(NamedTuple):
    """One action of a rank."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Table:
    """The actions of all ranks and their order."""

    schedule: str
    micro_batches: int
    rank_of: tuple[int, ...]
    """Rank of every stage."""

    rows: tuple[tuple[Action, ...], ...]
    """Actions of every rank."""

    @property
    def ranks(self) -> int:
        """Number of ranks of the pipeline."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """Number of stages on all ranks."""
        return len(self.rank_of)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of ``rank``, ascending."""
        return tuple(s for s, r in enumerate(self.rank_of) if r == rank)

    def __str__(self) -> str:
        """One line per rank."""
        return "\n".join(f"rank {r}: " + " ".join(map(str, row)) for r, row in enumerate(self.rows))


def place(ranks: int, stages_per_rank: int, placement: Placement) -> tuple[int, ...]:
    """Return the rank of every stage.

    >>> place(2, 2, "loop"), place(2, 2, "v")
    ((0, 1, 0, 1), (0, 1, 1, 0))
    """
    if placement == "v":
        return (*range(ranks), *reversed(range(ranks)))
    return tuple(s % ranks for s in range(ranks * stages_per_rank))


def stages_per_rank_of(schedule: str, stages_per_rank: int | None = None) -> int:
    """Return the number of stages per rank.

    Raises:
        PlanError: The schedule is unknown, or does not support this number.
    """
    if schedule not in SCHEDULES:
        raise PlanError(f"Got schedule={schedule!r}, but it must be one of {', '.join(SCHEDULES)}.")
    least, most, usual = SCHEDULES[schedule].stages_per_rank
    chosen = usual if stages_per_rank is None else stages_per_rank
    if not least <= chosen <= most:
        rule = str(least) if least == most else f"{least} or more"
        raise PlanError(
            f"Got stages_per_rank={chosen}, but {schedule} requires {rule}. Remove it, or choose another schedule."
        )
    return chosen


def placement_of(schedule: str) -> Placement:
    """Return how a schedule places its stages on the ranks."""
    return SCHEDULES[schedule].placement


def least_micro_batches(schedule: str, ranks: int) -> int:
    """Return the smallest number of micro-batches that a schedule supports."""
    return max(SCHEDULES[schedule].micro_batches_per_rank * ranks, 1)


def make_table(schedule: str, ranks: int, micro_batches: int, stages_per_rank: int | None = None) -> Table:
    """Return the table of one step.

    Args:
        schedule: One of `SCHEDULES`.
        ranks: Number of ranks of the pipeline.
        micro_batches: Number of micro-batches.
        stages_per_rank: None: what the schedule requires, or two for interleaved_1f1b and one for zero_bubble.

    Raises:
        PlanError: The schedule does not support this.
    """
    held = stages_per_rank_of(schedule, stages_per_rank)
    if ranks < 1 or micro_batches < 1:
        raise PlanError(f"Got {micro_batches} micro-batches on {ranks} ranks, but both must be at least 1.")
    if micro_batches < least_micro_batches(schedule, ranks):
        raise PlanError(
            f"Got {micro_batches} micro-batches on {ranks} ranks, but {schedule} requires at least "
            f"{SCHEDULES[schedule].micro_batches_per_rank} per rank. Use more micro-batches, or schedule zbv."
        )
    rank_of = place(ranks, held, placement_of(schedule))
    rows = SCHEDULES[schedule].rows(rank_of, ranks, micro_batches)
    return Table(schedule, micro_batches, rank_of, tuple(map(tuple, rows)))


def forward_table(rank_of: tuple[int, ...], micro_batches: int) -> Table:
    """Return a table of forwards only, for evaluation: as soon as possible, later stages first."""
    rows = _greedy(rank_of, max(rank_of) + 1, micro_batches, forward_only=True)
    return Table("forward", micro_batches, rank_of, tuple(map(tuple, rows)))


# --- in order --------------------------------------------------------------------------------------------------------


def _passes(
    rank_of: tuple[int, ...], ranks: int, micro_batches: int
) -> Iterator[tuple[int, list[Action], list[Action], int]]:
    """Yield for every rank its forwards and its backwards, and how many more forwards interleaving starts with."""
    rounds = list(_rounds(ranks, micro_batches))
    for rank in range(ranks):
        stages = range(rank, len(rank_of), ranks)
        forwards = [Action("F", s, m) for each in rounds for s in stages for m in each]
        backwards = [Action("B", s, m) for each in rounds for s in reversed(stages) for m in each]
        yield rank, forwards, backwards, (len(stages) - 1) * len(rounds[0])


def _rounds(ranks: int, micro_batches: int) -> Iterator[range]:
    """Yield micro-batches in rounds of ``ranks`` or a few more, the larger ones first."""
    count = max(1, micro_batches // ranks)
    size, larger = divmod(micro_batches, count)
    start = 0
    for i in range(count):
        stop = start + size + (i < larger)
        yield range(start, stop)
        start = stop


def _merge(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """Return ``warmup`` forwards, then one forward and one backward in turn, then the remaining backwards."""
    row = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        row += [forward, backward]
    return row + backwards[len(forwards[warmup:]) :]


def _gpipe(rank_of: tuple[int, ...], ranks: int, micro_batches: int) -> list[list[Action]]:
    return [forwards + backwards for _, forwards, backwards, _ in _passes(rank_of, ranks, micro_batches)]


def _1f1b(rank_of: tuple[int, ...], ranks: int, micro_batches: int) -> list[list[Action]]:
    passes = _passes(rank_of, ranks, micro_batches)
    return [_merge(forwards, backwards, ranks - rank - 1) for rank, forwards, backwards, _ in passes]


def _interleaved_1f1b(rank_of: tuple[int, ...], ranks: int, micro_batches: int) -> list[list[Action]]:
    passes = _passes(rank_of, ranks, micro_batches)
    return [_merge(forwards, backwards, 2 * (ranks - rank - 1) + more) for rank, forwards, backwards, more in passes]


def _zero_bubble(rank_of: tuple[int, ...], ranks: int, micro_batches: int) -> list[list[Action]]:
    """Return interleaved_1f1b with split backward and half the forwards before the first backward.

    Weight gradients are ``rank`` backwards late and fill the bubble at the end. For equal F, I and W the bubble is
    ``(p - 1) / (3 m v + p - 1)``.
    """
    rows: list[list[Action]] = []
    for rank, forwards, backwards, more in _passes(rank_of, ranks, micro_batches):
        inputs = [action._replace(kind="I") for action in backwards]
        weights = [action._replace(kind="W") for action in backwards]
        warmup = ranks - rank - 1 + more
        row = forwards[:warmup]
        for i, action in enumerate(inputs):
            row += [*forwards[warmup + i : warmup + i + 1], action, *weights[i - rank : i - rank + 1][: i >= rank]]
        rows.append(row + weights[max(len(inputs) - rank, 0) :])
    return rows


# --- as soon as possible ---------------------------------------------------------------------------------------------


class _Greedy:
    """Runs, whenever a rank is free, its most urgent action that is possible.

    Input gradients come first, because other ranks wait for them; then forwards, of later stages first. Weight
    gradients fill what would be a bubble. A stage has at most as many forwards in flight as under 1f1b in a pipeline
    with one rank per stage. A rank that holds as many activations as there are stages computes weight gradients first.

    Time is counted in actions: F, I and W take 1 each. All ranks compute the same table.
    """

    def __init__(self, rank_of: tuple[int, ...], ranks: int, micro_batches: int, *, forward_only: bool) -> None:
        self.rank_of, self.ranks, self.micro_batches = rank_of, ranks, micro_batches
        self.last = len(rank_of) - 1
        self.forward_only = forward_only
        self.done: dict[Action, int] = {}
        """Time at which each action ended."""

        self.next_F = [0] * len(rank_of)
        self.next_I = [0] * len(rank_of)
        self.next_W = [0] * len(rank_of)

    def ready(self, action: Action, now: int) -> bool:
        """Return whether the inputs of ``action`` exist."""
        kind, s, m = action
        if m >= self.micro_batches:
            return False
        needs = Action("F", s, m) if kind == "I" else Action("F", s - 1, m)
        if kind == "I" and s < self.last:
            return self._ended(needs, now) and self._ended(Action("I", s + 1, m), now)
        return needs.stage < 0 or self._ended(needs, now)

    def _ended(self, action: Action, now: int) -> bool:
        return action in self.done and self.done[action] <= now

    def choose(self, rank: int, now: int) -> Action | None:
        stages = [s for s, r in enumerate(self.rank_of) if r == rank]
        for s in reversed(stages) if not self.forward_only else ():
            action = Action("I", s, self.next_I[s])
            if self.ready(action, now):
                return action
        owed = [(self.next_W[s], -s) for s in stages if self.next_W[s] < self.next_I[s]]
        alive = sum(self.next_F[s] - self.next_W[s] for s in stages)
        weight = Action("W", -min(owed)[1], min(owed)[0]) if owed else None
        if weight is not None and alive >= len(self.rank_of):
            return weight
        for s in reversed(stages):
            action = Action("F", s, self.next_F[s])
            room = self.forward_only or self.next_F[s] - self.next_I[s] <= self.last - s
            if room and self.ready(action, now):
                return action
        return weight

    def rows(self) -> list[list[Action]]:
        """Return the full table."""
        rows: list[list[Action]] = [[] for _ in range(self.ranks)]
        total = len(self.rank_of) * self.micro_batches * (1 if self.forward_only else 3)
        now = 0
        while len(self.done) < total:
            chosen = [self.choose(rank, now) for rank in range(self.ranks)]
            for rank, action in enumerate(chosen):
                if action is not None:
                    getattr(self, f"next_{action.kind}")[action.stage] += 1
                    self.done[action] = now + 1
                    rows[rank].append(action)
            now += 1
        return rows


def _greedy(
    rank_of: tuple[int, ...], ranks: int, micro_batches: int, *, forward_only: bool = False
) -> list[list[Action]]:
    return _Greedy(rank_of, ranks, micro_batches, forward_only=forward_only).rows()


# --- DualPipeV -------------------------------------------------------------------------------------------------------


class _DualPipeVRow:
    """The actions of one rank, in the order of DeepSeek's ``dualpipe/dualpipev.py`` (MIT license).

    Comments in `row` give the numbers of its steps. A forward and a backward that it overlaps follow one another here.
    """

    def __init__(self, first: int, second: int) -> None:
        self.stage = (first, second)
        self.forwards = [0, 0]
        self.backwards = [0, 0]
        self.owed: list[tuple[int, int]] = []
        self.actions: list[Action] = []

    def forward(self, half: int) -> None:
        self.actions.append(Action("F", self.stage[half], self.forwards[half]))
        self.forwards[half] += 1

    def backward(self, half: int, *, split: bool = False) -> None:
        m = self.backwards[half]
        self.actions.append(Action("I" if split else "B", self.stage[half], m))
        self.backwards[half] += 1
        if split:
            self.owed.append((self.stage[half], m))

    def weight(self) -> None:
        self.actions.append(Action("W", *self.owed.pop(0)))

    def row(self, rank: int, ranks: int, micro_batches: int) -> list[Action]:
        later_ranks = ranks - rank - 1
        for _ in range(2 * later_ranks):  # 1
            self.forward(0)
        for _ in range(rank + 1):  # 2
            self.forward(0)
            self.forward(1)
        for _ in range(later_ranks):  # 3
            self.backward(1, split=True)
            self.weight()
            self.forward(1)
        for _ in range(micro_batches - 2 * ranks + rank + 1):  # 4
            self.forward(0)
            self.backward(1)
            self.forward(1)
            self.backward(0)
        for _ in range(later_ranks):  # 5
            self.backward(1)
            self.forward(1)
            self.backward(0)
        self._end(rank, later_ranks)
        return self.actions

    def _end(self, rank: int, later_ranks: int) -> None:
        split = False
        half = (rank + 1) // 2
        for i in range(rank + 1):  # 6
            split = split or (i == half and rank % 2 == 1)
            self.backward(1, split=split)
            split = split or (i == half and rank % 2 == 0)
            self.backward(0, split=split)
        for _ in range(later_ranks):  # 7
            self.weight()
            self.backward(0, split=split)
        while self.owed:  # 8
            self.weight()


def _dualpipe_v(rank_of: tuple[int, ...], ranks: int, micro_batches: int) -> list[list[Action]]:
    last = len(rank_of) - 1
    return [_DualPipeVRow(rank, last - rank).row(rank, ranks, micro_batches) for rank in range(ranks)]


@dataclass(frozen=True)
class ScheduleKind:
    """One schedule."""

    rows: Callable[[tuple[int, ...], int, int], list[list[Action]]]
    """Returns the actions of every rank, given the rank of every stage, and the numbers of ranks and micro-batches."""

    stages_per_rank: tuple[int, int, int] = (1, 1, 1)
    """Minimum, maximum and default."""

    placement: Placement = "loop"
    """How stages are placed on the ranks."""

    micro_batches_per_rank: int = 0
    """Minimum. There is always one micro-batch."""


_MANY = 1 << 30

SCHEDULES: Registry[ScheduleKind] = Registry(
    "schedules",
    {
        "gpipe": ScheduleKind(_gpipe),
        "1f1b": ScheduleKind(_1f1b),
        "interleaved_1f1b": ScheduleKind(_interleaved_1f1b, (2, _MANY, 2)),
        "zero_bubble": ScheduleKind(_zero_bubble, (1, _MANY, 1)),
        "zbv": ScheduleKind(_greedy, (2, 2, 2), "v"),
        "dualpipe_v": ScheduleKind(_dualpipe_v, (2, 2, 2), "v", micro_batches_per_rank=2),
    },
)
"""By name."""
