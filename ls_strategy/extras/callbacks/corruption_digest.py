"""Digests of gradients and weights, and weights that are restored from a good copy.

::

    backward            gradients of a buffer are sent           `GradientWatch`: digest of what this rank sends
                        its average arrives                      digest of the shard
    before the step     the optimizer would read the averages    digest of all this rank holds
    after a step        weights and states are new               `StoredWeights`: digests, and copies of shards
    before the next     they have not changed since              `StoredWeights.changed`, `repair`

A digest is the sum of the bits, read as 64-bit integers: one pass at the speed of the memory, and any flipped bit
changes it. The one invariant: reading changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ls_strategy._torch import storage_key
from ls_strategy.engine import Engine
from ls_strategy.extras.callbacks.corruption_verdict import elect_replica
from ls_strategy.extras.callbacks.rewind import HostCopies
from ls_strategy.transient import Method
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.passes.reduce import InTree, ReductionKind

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR = 0x9E3779B97F4A7C15  # odd, so that multiplying by it modulo 2**64 loses nothing
_MASK = (1 << 64) - 1
_SIGN = 1 << 63

Tables = tuple[dict[int, list[int]], list[int], list[int]]
"""`Repetition.sent` by virtual rank, and this rank's rows of `Repetition.averaged` and `Repetition.held`."""


def bits_of(tensor: Tensor) -> Tensor:
    """Return the digest of a tensor, ``()`` int64 on its device: the sum of its bits in words of 64, modulo 2**64."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.contiguous().reshape(-1)
    words = flat.view(_WORDS[flat.element_size()])
    per = 8 // words.element_size()
    head = min(-words.storage_offset() % per, words.numel())
    stop = head + (words.numel() - head) // per * per
    total = words[:0].sum(dtype=torch.int64)
    if stop > head:
        total = words[head:stop].view(torch.int64).sum()  # 25 times as fast as sums of narrower words
    for rest in (words[:head], words[max(stop, head) :]):
        if rest.numel():
            total = total + rest.sum(dtype=torch.int64)
    return total


def numbers(digests: Sequence[Tensor]) -> list[int]:
    """Return digests as numbers. Waits for the device once."""
    by_device: dict[torch.device, list[int]] = {}
    for i, each in enumerate(digests):
        by_device.setdefault(each.device, []).append(i)
    found = [0] * len(digests)
    for places in by_device.values():
        for i, value in zip(places, torch.stack([digests[i] for i in places]).tolist(), strict=True):
            found[i] = value
    return found


def fold(values: Sequence[int], start: int = 0) -> int:
    """Return one signed 64-bit number that depends on every value and on their order."""
    for value in values:
        start = ((start * _FACTOR) + value + 1) & _MASK
    return start - 2 * (start & _SIGN)


class GradientWatch:
    """Takes digests of what one engine sends and receives, from a step's first backward to `end`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._index = {id(flat): i for i, flat in enumerate(engine.flats)}
        self._sent: list[tuple[int, int, Tensor]] = []
        self._averaged: list[tuple[int, Tensor]] = []
        self._held: list[tuple[int, Tensor]] = []
        self._kinds = dict(engine.reducer.kinds)
        engine.reducer.kinds.update({name: _Watched(kind, self) for name, kind in self._kinds.items()})
        self._unsubscribe = engine.events.on_backward_begin.subscribe(self._watch_round)

    def _watch_round(self) -> None:
        now = self.engine.reducer.round
        if now is not None and not isinstance(now, _WatchedRound):
            self.engine.reducer.round = _WatchedRound(now, self)

    def end(self) -> None:
        """Leave the engine as it was."""
        self.engine.reducer.kinds.update(self._kinds)
        self._unsubscribe()

    def note_sent(self, leaf: int, flat: FlatBuffer, full: Tensor) -> None:
        """Take the digest of gradients of a virtual rank, or rank, as they are sent."""
        self._sent.append((leaf, self._index[id(flat)], bits_of(full)))

    def note_average(self, flat: FlatBuffer, out: Tensor) -> None:
        """Take the digest of an average that has arrived."""
        self._averaged.append((self._index[id(flat)], bits_of(out)))

    def note_held(self) -> None:
        """Take the digests of averages after a backward, where they have arrived by then (stages 0 and 1)."""
        for i, flat in enumerate(self.engine.flats):
            if not flat.policy.gradients and _in_memory(flat):
                self._held.append((i, bits_of(flat.averages.tensor())))

    def take(self, leaves: Sequence[int], buffers: int) -> Tables:
        """Return the digests since the last call, by buffer, and begin again.

        Args:
            leaves: the virtual ranks, or the rank, that this process has computed.
            buffers: the digest of the module's buffers, which comes last.
        """
        flats, rank = self.engine.flats, self.engine.mesh.world.rank
        self._held += [(i, bits_of(flat.averages.tensor())) for i, flat in enumerate(flats) if _in_memory(flat)]
        taken = [
            *self._sent,
            *(("averaged", *each) for each in self._averaged),
            *(("held", *each) for each in self._held),
        ]
        found: dict[int | str, list[int]] = {where: [0] * (len(flats) + 1) for where in (*leaves, "averaged", "held")}
        for (where, i, _), digest in zip(taken, numbers([digest for *_, digest in taken]), strict=True):
            found[where][i] = fold((found[where][i], digest))
        if rank in leaves:
            found[rank][-1] = buffers
        self._sent, self._averaged, self._held = [], [], []
        return {leaf: found[leaf] for leaf in leaves}, found["averaged"], found["held"]


def _in_memory(flat: FlatBuffer) -> bool:
    averages = flat.averages
    return flat.trainable and averages.hold_values and not averages.gone and not averages.on_nvme


class _Watched:
    """A way to average that takes digests. It is a `ReductionKind`."""

    def __init__(self, inner: ReductionKind, watch: GradientWatch) -> None:
        self._inner, self._watch = inner, watch

    def start(self, flat: FlatBuffer, full: Tensor) -> Any:
        self._watch.note_sent(flat.comm.everyone.rank, flat, full)
        return _Arriving(self._inner.start(flat, full), flat, self._watch)


class _WatchedRound(InTree):
    """The same for a round of virtual ranks."""

    def __init__(self, inner: InTree, watch: GradientWatch) -> None:
        super().__init__(inner.now)
        self._watch = watch

    @override
    def start(self, flat: FlatBuffer, full: Tensor) -> Any:
        leaf = self.now.leaves[flat.comm.everyone.rank]
        assert leaf is not None
        self._watch.note_sent(leaf, flat, full)
        return _Arriving(super().start(flat, full), flat, self._watch)


class _Arriving:
    """A reduction in flight that takes the digest of its result. It is a `Reduction`."""

    def __init__(self, inner: Any, flat: FlatBuffer, watch: GradientWatch) -> None:
        self._inner, self._flat, self._watch = inner, flat, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        self._inner.finish(out, accumulate=accumulate)
        self._watch.note_average(self._flat, out)


@dataclass
class WeightReport:
    """What a rank says of its weights when some rank has found that they differ."""

    # Digests of every shard of the buffers that all ranks hold in full; of the full buffer where it has one.
    replicas: dict[int, list[int]] = field(default_factory=dict)
    # Which of them this rank has written after the last step, and its digest then.
    when_new: dict[int, tuple[int, int]] = field(default_factory=dict)
    # Tensors that only this rank has, and that have changed: `_Own.buffer` by place in its own `StoredWeights.own`.
    changed: dict[int, int] = field(default_factory=dict)
    restorable: bool = True  # whether there are good copies of these


@dataclass
class _Own:
    """A tensor that only this rank has, as it was after the last step."""

    buffer: int  # index of the flat buffer; from one above those and the module's buffers on, of the optimizer
    tensor: Callable[[], Tensor | None]
    digest: int
    copy: Tensor | None


class StoredWeights:
    """The weights and optimizer states of one engine after a step, to be compared before the next one."""

    def __init__(self, engine: Engine, new: Mapping[int, Tensor], host: HostCopies | None) -> None:
        """Take digests of what this rank has written, and copies of what only this rank has. Collective.

        Args:
            engine: of the fit.
            new: digests that `when_written` has taken in the step. Empty: no step has run.
            host: copies the optimizer's states. None: they have digests alone.
        """
        self.engine = engine
        engine.wait()
        self.written: list[int] = []  # buffers that user code has written to since, in order
        self._states_written: list[int] = []  # optimizers whose states were written to since, as `_Own.buffer` has them
        self._undo = [_noting(flat, "write_master", i, self.written) for i, flat in enumerate(engine.flats)]
        self._shared = [i for i, flat in enumerate(engine.flats) if flat.resident and not flat.offloaded]
        mine = {i: bits_of(_own_slice(engine.flats[i])) for i in self._shared if i not in new} | dict(new)
        self._when_new = numbers([mine[i] for i in self._shared])
        tensors = [
            (i, source)
            for i, flat in enumerate(engine.flats)
            for source in _own_tensors(flat)
            if engine.mesh.world.world_size > 1
        ]
        copies = [(i, source, value.detach().clone()) for i, source in tensors if (value := source()) is not None]
        digests = numbers([bits_of(copy) for *_, copy in copies])
        self.own = [_Own(i, source, d, copy) for (i, source, copy), d in zip(copies, digests, strict=True)]
        if engine.mesh.world.world_size > 1:
            self._add_states(host)

    def _add_states(self, host: HostCopies | None) -> None:
        first = len(self.engine.flats) + 1
        for k, each in enumerate(self.engine.optimizers):
            for store in each.sharded.states.store:
                self._undo += [_noting(store, name, first + k, self._states_written) for name in ("write", "store")]
        found = _states(self.engine)
        copies = [None if host is None else host.of(tensor) for _, tensor in found]
        digests = numbers([bits_of(tensor) for _, tensor in found])
        for (k, tensor), copy, digest in zip(found, copies, digests, strict=True):
            self.own.append(_Own(first + k, lambda tensor=tensor: tensor, digest, copy))

    def end(self) -> None:
        """Stop noting what user code writes."""
        while self._undo:
            self._undo.pop().remove()

    def replicas(self) -> int:
        """Return a digest of all that every rank holds in full, the same on all ranks unless one is damaged."""
        flats = self.engine.flats
        return fold(numbers([bits_of(flats[i].full) for i in self._shared]))

    def changed(self) -> list[int]:
        """Return the places in `own` of what has changed, and nobody has written to."""
        written, optimizers = {*self.written, *self._states_written}, len(self.engine.flats)
        states = {id(tensor) for _, tensor in _states(self.engine)}  # a save may have moved some
        values = [(n, each, each.tensor()) for n, each in enumerate(self.own) if each.buffer not in written]
        kept = [
            (n, value)
            for n, each, value in values
            if value is not None and (each.buffer < optimizers or id(value) in states)
        ]
        found = numbers([bits_of(value) for _, value in kept])
        return [n for (n, _), digest in zip(kept, found, strict=True) if digest != self.own[n].digest]

    def report(self) -> WeightReport:
        """Return the details, which ranks exchange when something is wrong."""
        flats, found = self.engine.flats, WeightReport(changed={n: self.own[n].buffer for n in self.changed()})
        for i, new in zip(self._shared, self._when_new, strict=True):
            flat = flats[i]
            found.replicas[i] = numbers([bits_of(flat.full[lo:hi]) for lo, hi in ranges_of(flat)])
            found.when_new[i] = own_range(flat), new
        changed = [self.own[n] for n in found.changed]
        copies = [each.copy for each in changed if each.copy is not None]
        found.restorable = numbers([bits_of(copy) for copy in copies]) == [each.digest for each in changed]
        return found

    def repair(self, reports: Mapping[int, WeightReport]) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
        """Restore weights that are damaged on some ranks. Collective; equal on all ranks.

        Returns:
            Buffers that were wrong, by rank, where that is known, and buffers of which a good copy is not.
        """
        wrong: dict[int, set[int]] = {}
        lost: dict[int, set[int]] = {}
        world = self.engine.mesh.world
        for i in self._shared:
            flat = self.engine.flats[i]
            for n, (lo, hi) in enumerate(ranges_of(flat)):
                values = {rank: report.replicas[i][n] for rank, report in reports.items()}
                if len(set(values.values())) == 1:
                    continue
                new = [digest for place, digest in (r.when_new[i] for r in reports.values()) if place == n]
                good, ranks = elect_replica(values, new)
                source = next((rank for rank, value in values.items() if value == good), None)
                for rank in ranks:
                    (lost if source is None else wrong).setdefault(rank, set()).add(i)
                if source is not None:
                    world.broadcast_(flat.full[lo:hi], source)
        self._repair_own(reports, wrong, lost)
        return wrong, lost

    def _repair_own(
        self, reports: Mapping[int, WeightReport], wrong: dict[int, set[int]], lost: dict[int, set[int]]
    ) -> None:
        """Restore what only one rank has from its own copy. What has changed on all ranks was changed on purpose."""
        damaged = {rank: report for rank, report in reports.items() if report.changed}
        if len(damaged) == len(reports):
            return
        for rank, report in damaged.items():
            wrong.setdefault(rank, set()).update(report.changed.values())
            if not report.restorable:
                lost.setdefault(rank, set()).update(report.changed.values())
            if rank == self.engine.mesh.world.rank and report.restorable:
                for flat in self.engine.flats:
                    flat.before_change()
                for n in report.changed:
                    value, copy = self.own[n].tensor(), self.own[n].copy
                    if value is not None and copy is not None:
                        value.detach().copy_(copy)
        if damaged and self.engine.policy.parameters:
            self.engine.gatherer.release_all(stepped=True)  # they were gathered from what was wrong


def when_written(engine: Engine) -> dict[int, Tensor]:
    """Return digests of what this rank has written in a step, by buffer, before it is sent to the others.

    Masters that are updated in the background are not in memory yet; those of buffers at stage 3 are not sent.
    """
    found: dict[int, Tensor] = {}
    for i, flat in enumerate(engine.flats):
        if flat.resident and not flat.steps_in_background and flat.trainable:
            sent = _own_slice(flat) if flat.master_is_slice else flat.master.detach().to(flat.full.dtype)
            found[i] = bits_of(sent)
    return found


def digests_of_weights(engine: Engine) -> list[int]:
    """Return digests of the weights that this rank holds in memory."""
    held = [flat.full for flat in engine.flats if flat.resident and not flat.offloaded]
    own = [value for flat in engine.flats for source in _own_tensors(flat) if (value := source()) is not None]
    return numbers([bits_of(value) for value in (*held, *own)])


def _own_slice(flat: FlatBuffer) -> Tensor:
    return flat.full[slice(*ranges_of(flat)[own_range(flat)])]


def ranges_of(flat: FlatBuffer) -> list[tuple[int, int]]:
    """Return the parts of a full buffer that one rank each has written: shards, or all of it at stage 0."""
    if not flat.policy.optimizer:
        return [(0, flat.layout.numel)]
    return [flat.layout.shard_range(rank) for rank in range(flat.comm.world_size)]


def own_range(flat: FlatBuffer) -> int:
    """Return which of these this rank writes."""
    return flat.comm.rank if flat.policy.optimizer else 0


def _own_tensors(flat: FlatBuffer) -> list[Callable[[], Tensor | None]]:
    """Return what no other rank has, and what is in memory: masters that are not a slice of the parameters, and shards.

    Of split masters it is what the parameters lack. States on the NVMe tier are not read.
    """
    found: list[Callable[[], Tensor | None]] = []
    if flat.states_in_memory and not flat.offloaded and (flat.plan.split_masters or not flat.master_is_slice):
        count = len(flat.masters_in_memory())
        found += [lambda n=n: None if flat.offloaded else flat.masters_in_memory()[n] for n in range(count)]
    if flat.shard is not None:
        found.append(lambda: flat.shard)
    return found


def _states(engine: Engine) -> list[tuple[int, Tensor]]:
    """Return the optimizers' states in memory, with the optimizer's index.

    Those that are offloaded between two steps, and those of other libraries' classes, are not read. What an updater has
    as a view of the store's is there once.
    """
    if any(flat.offloaded for flat in engine.flats):
        return []
    found: list[tuple[int, Tensor]] = []
    for k, each in enumerate(engine.optimizers):
        stored = [tensor for store in each.sharded.states.store for tensor in store.tensors()]
        kept, storages = set(map(id, stored)), {storage_key(tensor) for tensor in stored}
        found += [
            (k, tensor)
            for tensor in each.sharded.state_tensors()
            if type(tensor) is Tensor and (id(tensor) in kept or storage_key(tensor) not in storages)
        ]
    return found


def _noting(owner: Any, name: str, index: int, written: list[int]) -> Method:
    def write(method: Method, *args: Any, **kwargs: Any) -> Any:
        written.append(index)
        return method.original(*args, **kwargs)

    return Method(owner, name, write)
