"""Replay one rank of a pipeline: its row of the schedule's table, with the events of its stages.

Its units stay gathered and its gradients stay here until the last micro-batch, see `Engine.begin_micro_batches`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ls_strategy.extras.planner.buffers import Setting
from ls_strategy.extras.planner.pieces import Passes
from ls_strategy.extras.planner.replay import Peak, Replay
from ls_strategy.extras.planner.trace import Trace
from ls_strategy.parallel.pipeline.p2p import LOOKAHEAD
from ls_strategy.parallel.pipeline.schedules import Action
from ls_strategy.plan import Plan

_STEPS = 2


class StageReplay(Replay):
    """One replay."""

    def __init__(  # noqa: PLR0913  (one table, one by one)
        self,
        plan: Plan,
        setting: Setting,
        trained: set[str],
        *,
        row: Sequence[Action],
        stages: Mapping[int, Passes],
        boundary: int,
        last_stage: int,
        rank_of: Sequence[int],
    ) -> None:
        """Prepare.

        Args:
            plan: of the parameters of this rank.
            setting: see `Setting`.
            trained: names of the parameters with gradients.
            row: actions of this rank.
            stages: the stages of this rank.
            boundary: bytes that pass from one stage to the next.
            last_stage: number of the last stage.
            rank_of: rank of every stage.
        """
        super().__init__(Trace((), 0), plan, setting, trained)
        self._row, self._stages, self._boundary = row, stages, boundary
        self._last_stage, self._rank_of = last_stage, rank_of
        self._posted: set[int] = set()

    def run(self, names: Sequence[Sequence[str]]) -> Peak:
        """Return the peak of two steps."""
        states = self.begin()
        for _ in range(_STEPS):
            self.gatherer.fetch_root()
            self.reducer.holds = True
            for unit in self.units:
                unit.pinned = True
            for i in range(len(self._row)):
                self._act(i, names)
            self.reducer.send_held()
            self.reducer.holds = False
            for unit in self.units:
                unit.unpin()
                if not unit.is_root:
                    self.gatherer.release(unit)
            self._forget_activations()
            self._step()
        return self.end(states)

    def _receives(self, action: Action) -> bool:
        neighbour = action.stage - 1 if action.kind == "F" else action.stage + 1
        return 0 <= neighbour <= self._last_stage and self._rank_of[neighbour] != self._rank_of[action.stage]

    def _act(self, i: int, names: Sequence[Sequence[str]]) -> None:
        for ahead in range(i, min(i + LOOKAHEAD + 1, len(self._row))):
            if ahead not in self._posted and self._receives(self._row[ahead]):
                self._posted.add(ahead)
                self.ledger.add("communication", self._boundary)
        if i in self._posted:  # from here on, the stage's events count it
            self.ledger.add("communication", -self._boundary)
        action = self._row[i]
        passes = self._stages[action.stage]
        if action.kind == "F":
            for event in passes.forward(action.micro_batch):
                self._on(event, names, last=False)
            if i == 0:
                self.gatherer.end_forward()
            return
        last = all(later.stage != action.stage or later.kind == "F" for later in self._row[i + 1 :])
        self.reducer.begin_backward(eager=last and len(self._stages) == 1)
        for event in passes.backward(action.micro_batch):
            self._on(event, names, last=False)
        self.reducer.end_backward()

    def _forget_activations(self) -> None:
        super()._forget_activations()
        self._posted.clear()
