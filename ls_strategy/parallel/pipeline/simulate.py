"""Simulates a table: whether it is complete and ends, its bubble, and its peak of saved activations.

Sends are asynchronous and receives block, as in `runner`. Integers and floats only: no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ls_strategy.errors import PlanError
from ls_strategy.parallel.pipeline.schedules import Action, Table

Span = tuple[Action, float, float]
"""An action, its start and its end."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Durations of the actions of one stage, in any unit."""

    forward: float = 1.0
    inputs: float = 1.0
    weights: float = 1.0
    message: float = 0.0
    """From the end of an action until another rank can use its result."""

    def of(self, action: Action) -> float:
        """Return the duration of one action."""
        return {"F": self.forward, "I": self.inputs, "W": self.weights, "B": self.inputs + self.weights}[action.kind]


@dataclass(frozen=True)
class Simulation:
    """Result of `simulate`."""

    spans: tuple[tuple[Span, ...], ...]
    """For every rank, each action with its start and end."""

    length: float
    """From the first start to the last end."""

    bubble: float
    """Fraction of ``ranks * length`` in which ranks are idle."""

    alive: tuple[int, ...]
    """Peak number of saved activations (of one stage and one micro-batch) on each rank."""


def check(table: Table) -> None:
    """Check that every forward and every backward, in one or two parts, occurs once, on the rank of its stage.

    Raises:
        PlanError: An action is missing, repeated or on the wrong rank.
    """
    forward_only = table.schedule == "forward"
    seen: Counter[Action] = Counter()
    for rank, row in enumerate(table.rows):
        for action in row:
            if table.rank_of[action.stage] != rank:
                raise PlanError(f"{table.schedule}: {action} is on rank {rank}, but stage {action.stage} is not.")
            seen[action] += 1
    for stage in range(table.stages):
        for m in range(table.micro_batches):
            counts = tuple(seen.pop(Action(kind, stage, m), 0) for kind in ("F", "B", "I", "W"))
            if counts not in ({(1, 0, 0, 0)} if forward_only else {(1, 1, 0, 0), (1, 0, 1, 1)}):
                raise PlanError(
                    f"{table.schedule}: stage {stage}, micro-batch {m}: F, B, I and W occur {counts} times, but F must "
                    "occur once, and either B or both I and W."
                )
    if seen:
        raise PlanError(f"{table.schedule}: {next(iter(seen))} belongs to no stage or micro-batch.")


class _Run:
    def __init__(self, table: Table, costs: Costs) -> None:
        self.table, self.costs = table, costs
        self.ended: dict[tuple[str, int, int], float] = {}
        """End by kind (B counts as I, for the gradients of its inputs), stage and micro-batch."""

    def needs(self, action: Action) -> list[tuple[str, int, int]]:
        kind, s, m = action
        if kind == "F":
            return [("F", s - 1, m)] if s else []
        if kind == "W":
            return [("I", s, m)]
        return [("F", s, m)] + ([("I", s + 1, m)] if s < self.table.stages - 1 else [])

    def ready_at(self, rank: int, action: Action) -> float | None:
        """Return when all inputs of ``action`` are available, or None if that is not known yet."""
        times = [0.0]
        for need in self.needs(action):
            if need not in self.ended:
                return None
            message = 0.0 if self.table.rank_of[need[1]] == rank else self.costs.message
            times.append(self.ended[need] + message)
        return max(times)

    def run(self) -> list[list[Span]]:
        rows = self.table.rows
        spans: list[list[Span]] = [[] for _ in rows]
        progressed = True
        while progressed:
            progressed = False
            for rank, row in enumerate(rows):
                while len(spans[rank]) < len(row):
                    action = row[len(spans[rank])]
                    ready = self.ready_at(rank, action)
                    if ready is None:
                        break
                    start = max(ready, spans[rank][-1][2] if spans[rank] else 0.0)
                    end = start + self.costs.of(action)
                    spans[rank].append((action, start, end))
                    self.ended["I" if action.kind == "B" else action.kind, action.stage, action.micro_batch] = end
                    progressed = True
        stuck = [str(row[len(s)]) for row, s in zip(rows, spans, strict=True) if len(s) < len(row)]
        if stuck:
            raise PlanError(f"{self.table.schedule} never ends: {', '.join(stuck)} wait for each other.")
        return spans


def simulate(table: Table, costs: Costs | None = None) -> Simulation:
    """Check the table and compute its timing.

    Raises:
        PlanError: The table is incomplete, or ranks would wait for each other forever.
    """
    check(table)
    costs = costs or Costs()
    spans = _Run(table, costs).run()
    length = max(row[-1][2] for row in spans) - min(row[0][1] for row in spans)
    return Simulation(tuple(map(tuple, spans)), length, bubble(spans), tuple(map(most_alive, table.rows)))


def bubble(spans: Sequence[Sequence[Span]]) -> float:
    """Return the fraction of time from the first start to the last end in which ranks are idle. ``spans``: by rank."""
    busy = sum(end - start for row in spans for _, start, end in row)
    start = min(start for row in spans for _, start, _ in row)
    end = max(end for row in spans for _, _, end in row)
    return 1 - busy / (len(spans) * (end - start))


def most_alive(row: tuple[Action, ...]) -> int:
    """Return the peak number of activations that a rank with these actions holds: from F to B, or from F to W."""
    alive = most = 0
    for action in row:
        alive += {"F": 1, "B": -1, "W": -1, "I": 0}[action.kind]
        most = max(most, alive)
    return most
