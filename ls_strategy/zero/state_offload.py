"""Give the device's memory of model states to something else for a while, and take it back with the same bits.

::

    offload     copy the storages to the host, then resize them to 0: every view of them stays what it was
    (others)    allocate the memory
    reload      resize the storages, and copy the values back

A storage is given if all kinds of states that it holds are. Meanwhile whatever reads or steps these states is refused:
their owners ask `FlatBuffer.require_here` first. Nothing is sent, but every rank has to do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from ls_strategy import device as dev
from ls_strategy._torch import storage_key
from ls_strategy.distributed.buffer_pool import BufferPool
from ls_strategy.errors import ConfigError
from ls_strategy.tiers.link import Link, host_empty
from ls_strategy.zero.events import StepEvents
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.flat_states import states_offloaded
from ls_strategy.zero.flat.parameters import grad_of, home_of, unnoticed
from ls_strategy.zero.passes.gather import Gatherer
from ls_strategy.zero.step.stepper import Stepper

StateKind = Literal["parameters", "masters", "optimizer", "gradients"]
"""The kinds of states that `StateOffload.offload` accepts, as `memory_bytes` names them."""

KINDS: tuple[StateKind, ...] = get_args(StateKind)


@dataclass(frozen=True)
class _Given:
    """A storage without memory, and its values in host memory."""

    view: Tensor
    """A view of all of it, ``(numel,)``."""

    host: Tensor
    nbytes: int


class StateOffload:
    """The states of one engine that are offloaded between two steps."""

    def __init__(
        self, flats: Sequence[FlatBuffer], stepper: Stepper, gatherer: Gatherer, link: Link, events: StepEvents
    ) -> None:
        """Give nothing yet."""
        self._flats = flats
        self._stepper = stepper
        self._gatherer = gatherer
        self._link = link
        self._events = events
        self._unsubscribe: Callable[[], None] | None = None
        self._given: dict[int, _Given] = {}
        self.kinds: frozenset[str] = frozenset()
        """What was given."""

    def offload(self, kinds: Collection[str], pools: Collection[BufferPool]) -> int:
        """Free the device memory of these kinds of states, and return its bytes. Call it when nothing is in flight.

        States that are stored in host memory or on NVMe stay there. Full parameters that were gathered are released,
        and free buffers of ``pools`` are freed, whatever the kinds.

        Raises:
            ConfigError: there is no such kind.
        """
        unknown = sorted(set(kinds) - set(KINDS))
        if unknown:
            raise ConfigError(
                f"Got {unknown[0]!r} for offload_states(), but states are of the kinds {', '.join(KINDS)}. Name some "
                "of these, or none for all."
            )
        for flat in self._flats:
            flat.before_change()
        self._stepper.gradients.let_go()
        for unit in self._gatherer.units:
            self._gatherer.release(unit)
        for pool in pools:
            pool.clear()
        self._mark(self.kinds | set(kinds))
        taken = [given for tensor in self._to_give() if (given := self._copy(tensor)) is not None]
        for given in taken:
            given.view.untyped_storage().resize_(0)
        self._given.update((storage_key(given.view), given) for given in taken)
        dev.free_cached(self._link.device)
        return sum(given.nbytes for given in taken)

    def require(self, *kinds: StateKind) -> None:
        """Refuse what needs states of these kinds (default: any) while they are away.

        Raises:
            StateError: with the cure.
        """
        away = self.kinds.intersection(kinds or KINDS)
        if away:
            raise states_offloaded(", ".join(sorted(away)))

    def _mark(self, kinds: Collection[str]) -> None:
        """Let the states' owners refuse every use of these kinds."""
        self.kinds = frozenset(kinds)
        if self._unsubscribe is None and self.kinds:
            self._unsubscribe = self._events.before_read.subscribe(self.require)
        elif self._unsubscribe is not None and not self.kinds:
            self._unsubscribe()
            self._unsubscribe = None
        for flat in self._flats:
            flat.offloaded = self.kinds
            if "parameters" in self.kinds and flat.is_gathered and not flat.policy.parameters:
                flat.hide()

    def reload(self) -> None:
        """Restore everything. Nothing happens if nothing was given."""
        if not self.kinds:
            return
        arrivals = []
        for given in self._given.values():
            given.view.untyped_storage().resize_(given.nbytes)
            arrivals.append(self._link.to_device(given.view, given.host))
        for arrival in arrivals:
            arrival.wait_on_host()
        self._given.clear()
        self._mark(())
        for flat in self._flats:
            if flat.hidden and not flat.is_arriving:
                flat.finish_gather()
                flat.writes.note_access()  # through a view of before

    def _to_give(self) -> Iterator[Tensor]:
        """Yield a tensor of every storage all kinds of which are given."""
        kept: set[int] = set()
        chosen: dict[int, Tensor] = {}
        for kind, tensor in self._tensors():
            if tensor.device != self._link.device or dev.is_host(tensor.device) or storage_key(tensor) in self._given:
                continue
            if kind in self.kinds:
                chosen.setdefault(storage_key(tensor), tensor)
            else:
                kept.add(storage_key(tensor))
        yield from (tensor for key, tensor in chosen.items() if key not in kept)

    def _tensors(self) -> Iterator[tuple[StateKind, Tensor]]:
        """Yield the states in memory, by kind."""
        for flat in self._flats:
            for tensor in _parameters_in_memory(flat):
                yield "parameters", tensor
            for tensor in flat.masters_in_memory():
                yield "masters", tensor
            for grad in (flat.local.buffer, flat.averages.values, *map(grad_of, flat.params)):
                if grad is not None:
                    yield "gradients", grad
        for state in self._stepper.optimizers:
            for tensor in state.sharded.state_tensors():
                yield "optimizer", tensor

    def _copy(self, tensor: Tensor) -> _Given | None:
        """Copy a storage to the host; None if it has no memory of its own."""
        with unnoticed():
            storage, tensor = tensor.untyped_storage(), tensor.detach()
            nbytes = storage.nbytes()
            if not nbytes or not storage.resizable() or nbytes % tensor.element_size():
                return None
            view = tensor.data.as_strided((nbytes // tensor.element_size(),), (1,), 0)
        host = host_empty(view.numel(), view.dtype, self._link.device)
        self._link.to_host(host, view).wait_on_host()
        return _Given(view, host, nbytes)


def _parameters_in_memory(flat: FlatBuffer) -> list[Tensor]:
    """Return the tensors from which the parameters are read."""
    if flat.plan.quantized is not None:
        return [flat.master]
    if flat.policy.parameters:
        sources = [flat.shard] if flat.has_own_shard else [flat.master]
        return [tensor for tensor in sources if tensor is not None]
    # The use of parameters of other libraries' classes is not refused, so theirs stay.
    return [flat.full] if all(home_of(p) is flat for p in flat.params) else []
