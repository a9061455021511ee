"""A copy in host memory of all that the steps of a fit change, and the way back to it.

::

    before a batch is fetched    `Copy`: this rank's masters and optimizer states, loss scale, schedulers, callbacks,
                                 buffers, random numbers, attributes of the module, and what the loop has counted
    some steps later             `Copy.put_back`, on all ranks: the next step begins from these bits

What a rank copies is its own shards, so nothing is sent, and any stage, tier and number format comes back as it was
stored. Where the training data stand is not a part of it: whoever goes back says which batches follow.

The one invariant: a copy is of the moment between two steps, the same one on all ranks.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ls_strategy._torch import tree_map
from ls_strategy.access.average import write_masters
from ls_strategy.errors import PlanError, StateError
from ls_strategy.extras._lightning import (
    averages,
    callbacks_of_steps,
    forget_saves,
    loop_progress,
    saved_paths,
)
from ls_strategy.extras.callbacks.before_step import Attributes, BeforeStep
from ls_strategy.host.pytorch import Callback, pl, rank_zero_info
from ls_strategy.host_memory import free_host_memory
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.tiers.link import host_empty
from ls_strategy.zero.step.optimizer import ShardedOptimizer

_MIB = 2**20

_STATE_BYTES = 8.0  # per element, of an optimizer whose states are not known before its first step: two moments in fp32


@runtime_checkable
class Rewinds(Protocol):
    """A callback that goes back in its own way, and not by its ``state_dict``."""

    def copy_for_rewind(self, trainer: pl.Trainer) -> Callable[[bool], None]:
        """Return a function that puts back what the callback has now. Not collective.

        It takes whether the same batches follow again, and is called before the loop's own counts go back.
        """
        ...


class HostCopies:
    """Copies of tensors in host memory, in the memory of earlier copies where these have the same shapes."""

    def __init__(self, device: torch.device, earlier: Iterable[Tensor] = ()) -> None:
        """``device``: where most tensors are, so that the memory is pinned for it."""
        self._device = device
        self._earlier = deque(earlier)
        self.tensors: list[Tensor] = []

    def of(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor."""
        found = self._earlier.popleft() if self._earlier else None
        if found is None or found.shape != tensor.shape or found.dtype != tensor.dtype:
            self._earlier.clear()  # from here on all are others
            found = host_empty(tensor.numel(), tensor.dtype, self._device).view(tensor.shape)
        self.tensors.append(found.copy_(tensor.detach()))
        return found

    @property
    def nbytes(self) -> int:
        """Return their bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)


class Copy:
    """All that steps change, as it was before one of them."""

    def __init__(
        self,
        trainer: pl.Trainer,
        strategy: ZeROStrategy,
        owner: Callback,
        *,
        batches: bool,
        earlier: Copy | None = None,
    ) -> None:
        """Take it, between two steps, before the batch is fetched. Collective.

        Args:
            trainer: of the fit.
            strategy: its strategy.
            owner: the callback that may go back, whose own states stay.
            batches: the loop counts the batches since as if they had not been, because they follow again.
            earlier: a copy that is not needed any more: this one takes its memory.

        Raises:
            StateError: host memory does not suffice. Raised on every rank.
        """
        module = trainer.lightning_module
        self._trainer, self._strategy, self._batches = trainer, strategy, batches
        self.engine = strategy.require_engine()
        self.step, self.epoch = trainer.global_step, trainer.current_epoch
        self.engine.check_complete()
        self.engine.wait()
        for each in self.engine.optimizers:
            each.sharded.states.collect()
        self._flats = list(self.engine.stepper.flats_that_train)
        self.host = HostCopies(self.engine.device, earlier.host.tensors if earlier is not None else ())
        if earlier is None:
            _require_memory(self)
        self._masters = [self.host.of(flat.read_master()) for flat in self._flats]
        self._optimizers = [_States(each.sharded, self.host) for each in self.engine.optimizers]
        scaler = self.engine.scaler
        self._scale = None if scaler is None else scaler.state_dict()
        self._overflows = self.engine.skipped_steps
        self._schedulers = [copy.deepcopy(each.scheduler.state_dict()) for each in trainer.lr_scheduler_configs]
        others = [each for each in callbacks_of_steps(trainer) if each is not owner]
        self._callbacks = [back for each in others if (back := _copied(each, trainer)) is not None]
        self._saved = saved_paths(trainer)
        self._progress = loop_progress(trainer, batches=batches)
        self.before = BeforeStep(strategy, module)
        self._attributes = Attributes(module)

    @property
    def fits(self) -> bool:
        """Return whether the same parameters train as then: others can have been added or unfrozen since."""
        return self._strategy.engine is self.engine and list(self.engine.stepper.flats_that_train) == self._flats

    @torch.no_grad()
    def put_back(self) -> list[str]:
        """Go back. Collective. Gradients are dropped.

        Returns:
            The checkpoints that were saved since. They are kept.
        """
        trainer, engine = self._trainer, self.engine
        engine.wait()
        for index, states in enumerate(self._optimizers):
            engine.zero_grad(index)
            states.put_back()
        write_masters(engine, self._flats, self._masters)
        if engine.scaler is not None and self._scale is not None:
            engine.scaler.load_state_dict(self._scale)
        engine.stepper.skipped_steps = self._overflows
        for config, state in zip(trainer.lr_scheduler_configs, self._schedulers, strict=True):
            config.scheduler.load_state_dict(copy.deepcopy(state))
        for put_back in self._callbacks:
            put_back(self._batches)
        self._attributes.put_back()
        self.before.put_back()
        self._progress()
        since = {path for path, _ in saved_paths(trainer) - self._saved}
        forget_saves(trainer, self.step)
        return sorted(since)


def report_copy(name: str, taken: Copy, reported: int) -> int:
    """Log the memory of a copy if it is more than was reported, and return the bytes that are now."""
    if taken.host.nbytes <= reported:
        return reported
    rank_zero_info(
        f"{name}: each rank's host memory has a copy of what trains ({taken.host.nbytes / _MIB:,.1f} MiB on rank 0), "
        f"of step {taken.step}. Later ones take its place."
    )
    return taken.host.nbytes


def refuse_rewind(given: str, strategy: ZeROStrategy) -> None:
    """Refuse what a copy would not hold, before anything is sharded.

    Args:
        given: the option, as the user has set it.
        strategy: of the fit.

    Raises:
        PlanError: with the cure.
    """
    delay = strategy.config.offload.delay_after
    if delay is not None:
        raise PlanError(
            f"Got {given} with offload.delay_after={delay}, but a copy of the states waits for the late update, so the "
            "run would have other bits than without copies. Leave one of the two out."
        )


def refuse_own_states(given: str, strategy: ZeROStrategy) -> None:
    """Refuse optimizers whose states are not all where a copy looks for them.

    Raises:
        PlanError: with the cure. Equal on all ranks.
    """
    for each in strategy.require_engine().optimizers:
        if each.sharded.states.protocol.is_own:
            name = type(each.sharded.optimizer).__name__
            raise PlanError(
                f"Got {given} with {name}, whose state_dict has code of its own: what it keeps besides state and "
                f"param_groups could not go back. Use an optimizer without, or leave {given} out."
            )


def _require_memory(taken: Copy) -> None:
    """Refuse a copy for which host memory does not suffice. Collective."""
    need = sum(flat.stepped_numel * flat.master.element_size() for flat in taken._flats)
    for each in taken.engine.optimizers:  # the first step creates the states
        bytes_each = each.sharded.bytes_per_element
        need += sum(flat.stepped_numel for flat in each.flats) * (_STATE_BYTES if bytes_each is None else bytes_each)
    free = free_host_memory()
    lacks = torch.tensor([free is not None and need > free], dtype=torch.uint8)
    if bool(taken.engine.mesh.world.agree(lacks).item()):
        raise StateError(
            f"a copy of what trains needs {need / _MIB:,.0f} MiB of host memory on this rank, where "
            f"{(free or 0) / _MIB:,.0f} MiB are free, and on some rank that is not enough. Use more ranks or a higher "
            "stage, so that each holds less, or go on without copies."
        )


@dataclass(frozen=True)
class _Kept:
    """A copy of a tensor, and where it belongs."""

    values: Tensor
    device: torch.device


class _States:
    """The states of one optimizer on this rank."""

    def __init__(self, sharded: ShardedOptimizer, host: HostCopies) -> None:
        def kept(value: Any) -> Any:
            return _Kept(host.of(value), value.device) if type(value) is Tensor else copy.deepcopy(value)

        states, self._sharded = sharded.states, sharded
        self._stored = [{n: [host.of(t) for t in each.stored(n)] for n in each.dtypes()} for each in states.store]
        self._others = tree_map(kept, (states.entries, states.others))
        self._counts = states.begun, states.steps_taken
        self._groups = [
            copy.deepcopy({key: value for key, value in group.items() if key != "params"})
            for group in sharded.optimizer.param_groups
        ]

    def put_back(self) -> None:
        """Give the optimizer these states. Collective."""

        def given(value: Any) -> Any:
            return value.values.to(value.device, copy=True) if isinstance(value, _Kept) else copy.deepcopy(value)

        states = self._sharded.states
        states.reset()
        for store, kept in zip(states.store, self._stored, strict=True):
            for name, values in kept.items():
                store.store(name, values)
        entries, states.others = tree_map(given, self._others)
        states.entries.update(entries)
        states.begun, states.steps_taken = self._counts
        for group, kept in zip(self._sharded.optimizer.param_groups, self._groups, strict=True):
            group.update(copy.deepcopy(kept))


def _copied(callback: Callback, trainer: pl.Trainer) -> Callable[[bool], None] | None:
    """Return a function that puts back what a callback has now; None if it has nothing."""
    if isinstance(callback, Rewinds):
        return callback.copy_for_rewind(trainer)
    state = copy.deepcopy(callback.state_dict())
    tensors = averages(callback)
    kept = [tensor.detach().clone() for tensor in tensors]
    if not state:
        return None

    def put_back(_: bool) -> None:
        if not _equal(callback.state_dict(), state):  # BaseFinetuning takes a load for the begin of another fit
            callback.load_state_dict(copy.deepcopy(state))
        with torch.no_grad():
            for tensor, value in zip(tensors, kept, strict=True):
                tensor.copy_(value)

    return put_back


def _equal(one: Any, other: Any) -> bool:
    """Return whether two states of a callback are equal; False if that cannot be said."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_equal(a, b) for a, b in zip(one, other, strict=True))
    return isinstance(one, (bool, int, float, complex, str, bytes, type(None))) and one == other
