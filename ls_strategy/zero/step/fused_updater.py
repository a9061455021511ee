"""Runs that a fused operation updates in one pass over memory, on any tier, see `fused_optimizers.py`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ls_strategy.config import MomentFormat
from ls_strategy.errors import PlanError
from ls_strategy.layout import round_up
from ls_strategy.ops.native import available as native_available
from ls_strategy.plan import MOMENT_BYTES
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.states import UpdateState
from ls_strategy.zero.step.elementwise_states import ElementwiseStates
from ls_strategy.zero.step.fused_optimizers import kernels_of
from ls_strategy.zero.step.optimizer_state import ELEMENTWISE, OptimizerStates
from ls_strategy.zero.step.runs import Run
from ls_strategy.zero.step.split_step import streamed_states
from ls_strategy.zero.step.update import Update, UpdatePart
from ls_strategy.zero.step.updater import StepArguments, Updater


@dataclass
class _CountedRun:
    """A run, and its states that are not element-wise."""

    run: Run
    steps: int
    """Steps so far; of states that do not count them, whether there were any."""

    others: dict[str, Any]
    """What the parameters' states have besides: kept as it is."""


class FusedUpdater(Updater):
    """Updates the buffers and groups of one optimizer that have a fused operation."""

    def __init__(self, optimizer: Optimizer, flats: Sequence[FlatBuffer], moment_format: MomentFormat) -> None:
        """Find out what it can step. Its states come with `bind`."""
        self._optimizer = optimizer
        self._flats = flats
        self._moment_format: MomentFormat = moment_format
        self.kernels = kernels_of(optimizer)
        """The fused operation of every group, or None."""
        self.is_mixed = len(set(map(bool, self.kernels))) > 1
        """Whether it steps some groups only. Then masters are published after all updaters have stepped."""
        self._group_of = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self.steps_flat = [self._can_step(flat) for flat in flats]
        """Whether it can step a buffer's parameters, if their group has an operation; by number of the buffer."""
        self._runs: list[_CountedRun] = []

    def bind(self, states: OptimizerStates) -> None:
        """Use these states, of which the element-wise ones are those of `states_of`."""
        self._states = states

    def follow(self, flat_number: int) -> None:
        """Find out again whether it can step a buffer, which has got other masters."""
        self.steps_flat[flat_number] = self._can_step(self._flats[flat_number])

    def _can_step(self, flat: FlatBuffer) -> bool:
        """Return whether a fused update steps this buffer: it is faster, or a tier or a format needs it."""
        if not any(self.kernels) or flat.master_dtype != torch.float32 or flat.plan.shared_by:
            return False
        if flat.steps_in_background or self._moment_format != "fp32" or flat.plan.split_masters:
            return True
        if any(group.get("fused") for group in self._optimizer.param_groups):
            return False  # the user selected torch's kernel
        device = flat.full.device.type
        return device == "cpu" or native_available(device)

    # states ----------------------------------------------------------------------------------------------------------

    def states_of(self, flat_number: int) -> ElementwiseStates:
        """Return the store of a buffer's element-wise states, with those of the fused update and of split steps."""
        flat = self._flats[flat_number]
        moments: dict[str, bool] = {}
        spans: dict[str, list[tuple[int, int]]] = {}
        for g, (group, kernel) in enumerate(zip(self._optimizer.param_groups, self.kernels, strict=True)):
            if not self.steps_flat[flat_number] or kernel is None:
                continue
            moments |= kernel.moments(group)
            # This rank's ranges of the group's parameters, with what a run takes of the padding behind them.
            ranges = [
                (piece.start, round_up(piece.stop, flat.layout.align))
                for param, piece in zip(flat.params, flat.pieces, strict=True)
                if piece.numel and self._group_of.get(id(param)) == g
            ]
            for name in kernel.moments(group):
                spans.setdefault(name, []).extend(ranges)
        resident = flat.states_in_memory
        if not resident and flat.master_dtype == torch.float32:
            moments |= streamed_states(self._optimizer)
        return ElementwiseStates(flat, moments, self._moment_format, spans if self.is_mixed and resident else None)

    @property
    def bytes_per_element(self) -> float | None:
        """Return the bytes of state per element; None if the optimizer's own step creates some."""
        if not all(self.kernels) or not all(self.steps_flat):
            return None
        groups = zip(self._optimizer.param_groups, self.kernels, strict=True)
        names = {name for group, kernel in groups if kernel is not None for name in kernel.moments(group)}
        return MOMENT_BYTES[self._moment_format] * len(names)

    # the step --------------------------------------------------------------------------------------------------------

    @override
    def takes(self, number: int) -> bool:
        n, i = self._states.locate(number)
        return self.steps_flat[n] and self.kernels[self._group_of[id(self._flats[n].params[i])]] is not None

    @override
    def prepare(self, runs: Sequence[Run]) -> None:
        self._runs = [self._counted(run) for run in runs]

    def _counted(self, run: Run) -> _CountedRun:
        kernel = self.kernels[run.group]
        assert kernel is not None
        state = self._states.entries.get(run.members[0], {})
        others = {k: v for k, v in state.items() if v is not ELEMENTWISE and k != "step"}
        if kernel.counts_steps:
            return _CountedRun(run, int(state["step"]) if "step" in state else 0, others)
        return _CountedRun(run, 1 if state else 0, others)

    @override
    def begin(self, step: StepArguments, dropped: frozenset[int], others: Callable[[], None]) -> None:
        updates = self.updates(step.clip)
        if step.submit is None:
            for update in updates:
                update.run()
        elif updates:
            step.submit(updates)
        others()

    def updates(self, clip: Tensor | None) -> list[Update]:
        """Return the updates of this step, except those that began while backward ran. Count the step."""
        by_flat: defaultdict[int, list[UpdatePart]] = defaultdict(list)
        for counted in self._runs:
            if counted.run.flat.update is not UpdateState.UPDATED_EARLY:
                by_flat[counted.run.flat_number].append(self._part_of(counted, self._states.steps_taken))
        return [self._update_of(n, parts, clip) for n, parts in by_flat.items()]

    def early_update(self, flat: FlatBuffer) -> Update | None:
        """Return the update of one buffer before the others' gradients are known; None if it has to wait.

        The runs have to be those of the coming step.
        """
        if not flat.averages.folds_factors:  # else it does not step all of the buffer
            return None
        n = self._flats.index(flat)
        parts = [self._part_of(c, self._states.steps_taken + 1) for c in self._runs if c.run.flat_number == n]
        update = self._update_of(n, parts, None)
        sums: list[Sequence[float] | Tensor] | None = None
        if update.grads is not None:
            sums = flat.averages.record_sums()
        return replace(update, publish=flat.policy.parameters, sums=sums)

    def _part_of(self, counted: _CountedRun, taken: int) -> UpdatePart:
        """Return the part for one run. ``taken`` is the number of this step, for states that do not count steps."""
        run = counted.run
        group, kernel = self._optimizer.param_groups[run.group], self.kernels[run.group]
        assert kernel is not None
        names = tuple(kernel.moments(group))
        store = self._states.store[run.flat_number]
        for name in names:
            if not store.resident and name not in store.moments:
                raise _without_room(self._optimizer, name)
            store.ensure(name, torch.float32)
        counted.steps += 1
        seed_step = counted.steps if kernel.counts_steps else taken
        return UpdatePart(run.start, run.stop, counted.steps, names, kernel.settings(group), seed_step)

    def _update_of(self, n: int, parts: list[UpdatePart], clip: Tensor | None) -> Update:
        kernel = next(kernel for kernel in self.kernels if kernel is not None)  # the same for all groups with one
        flat = self._flats[n]
        averages = flat.averages
        return Update(
            flat=flat,
            states=self._states.store[n],
            kernel=kernel,
            parts=tuple(parts),
            clip=clip,
            unscale=averages.unscale,
            grads=averages.in_memory(),
            landing=averages.landing,
            publish=flat.steps_in_background and not self.is_mixed,
            in_parts=self.is_mixed,
        )

    @override
    def collect(self) -> None:
        """Store the step counts with the parameters, with torch's names. Not collective."""
        for counted in self._runs:
            kernel = self.kernels[counted.run.group]
            assert kernel is not None
            if counted.steps == 0:
                continue
            group = self._optimizer.param_groups[counted.run.group]
            state: dict[str, Any] = dict.fromkeys(kernel.moments(group), ELEMENTWISE)
            if kernel.counts_steps:
                state["step"] = torch.tensor(float(counted.steps))
            for number in counted.run.members:
                self._states.entries[number] = {**counted.others, **state}
        self._runs = []

    @override
    def tensors(self) -> list[Tensor]:
        return []


def _without_room(optimizer: Optimizer, name: str) -> PlanError:
    """Return the error for a state on NVMe that no group had when the files were made."""
    return PlanError(
        f"Got a parameter group of {type(optimizer).__name__} that needs {name!r} from now on, but offload.optimizer="
        "'nvme' makes room for states when the fit begins, and then no group needed it (momentum was 0). Set the "
        "momentum in configure_optimizers, or offload to 'cpu'."
    )
