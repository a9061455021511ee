"""Outer optimization: global weights, pseudo-gradients and the outer step (DiLoCo, arXiv:2311.08105, algorithm 1).

::

    delta      = global - local                               of this island: `Outer.pseudo_gradient`
    mean       = (delta_0 + delta_1 + ...) / islands          in the order of islands, in fp32
    momentum   = mu * momentum + mean                         Nesterov, as torch.optim.SGD(nesterov=True)
    global    -= lr * (mean + mu * momentum)                  `Outer.step`
    local      = a * local + (1 - a) * global                 `Outer.merge`; a = 0 without delay

Each rank holds the elements of its shards, at stage 0 too, in host memory: two numbers per element. The one invariant:
all islands that were in the same rounds have bitwise equal global weights and momentum.

A fragment (Streaming DiLoCo, arXiv:2501.18512) is every n-th unit; fragments take turns.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ls_strategy.access.average import write_masters
from ls_strategy.engine import Engine
from ls_strategy.errors import PlanError
from ls_strategy.extras.islands import wire
from ls_strategy.zero.flat.flat_buffer import FlatBuffer

Place: TypeAlias = tuple[int, int]
"""Where a buffer is in the engine: the number of its unit, and its number in the unit."""


_MOST = 1e4
"""How many times the largest weight (at least 1) an island may change a weight by in one round before it counts as
diverged."""


@dataclass
class Shard:
    """Global weights and momentum of one buffer, the elements that this rank owns."""

    weights: Tensor
    momentum: Tensor
    counts: bool  # whether norms count it here: of replicas along the tensor-parallel axis, the first one's do


class Outer:
    """Global weights and momentum of the parameters that train, as shards of this rank."""

    def __init__(self, engine: Engine, *, lr: float, momentum: float, fragments: int, form: wire.WireFormat) -> None:
        """Start from the weights, with a momentum of 0. Not collective.

        Raises:
            PlanError: the model has fewer units than fragments, or 16-bit masters. Equal on all ranks.
        """
        self._lr, self._mu, self._fragments = lr, momentum, fragments
        self._form: wire.WireFormat = form
        self.shards: dict[Place, Shard] = {}  # of every buffer that trains, in order of the units
        self.admit(engine)
        units = sum(any(flat.has_optimizer for flat in unit.flats) for unit in engine.units)
        if units < fragments:
            raise PlanError(
                f"Got fragments={fragments} for a model with {units} units in its optimizers, but a fragment has at "
                f"least one. Set DiLoCo(fragments={max(units, 1)}), or make more units by sharding.units and "
                "sharding.min_unit_numel."
            )

    def admit(self, engine: Engine) -> list[Place]:
        """Take in buffers that begin to train: their global weights are their values. Not collective.

        Returns:
            the new ones.

        Raises:
            PlanError: their masters have 16 bits.
        """
        flats, before = flats_of(engine), self.shards
        for flat in flats.values():
            if flat.master_dtype not in (torch.float32, torch.float64):
                raise PlanError(
                    f"Got DiLoCo with master weights in {flat.master_dtype}, in which small outer steps are lost. Set "
                    "precision.master_weights=True."
                )
        self.shards = {place: before.get(place) or _start(flat) for place, flat in flats.items()}
        return [place for place in flats if place not in before]

    def check(self, engine: Engine) -> None:
        """Refuse an engine with other buffers. Not collective.

        Raises:
            PlanError: parameters were added to the optimizers.
        """
        sizes = {place: flat.owned[1] - flat.owned[0] for place, flat in flats_of(engine).items()}
        if sizes != {place: shard.weights.numel() for place, shard in self.shards.items()}:
            raise PlanError(
                "DiLoCo exchanges the parameters that were in the optimizers when the fit began, but parameters were "
                "added since (add_param_group, or a fine-tuning callback). Give all parameters to the optimizer in "
                "configure_optimizers, and freeze those that train later by requires_grad_(False)."
            )

    def fragment(self, number: int) -> list[Place]:
        """Return which buffers the exchange ``number`` is about."""
        return [place for place in self.shards if place[0] % self._fragments == number % self._fragments]

    def nbytes(self, places: Sequence[Place]) -> int:
        """Return the bytes of the pseudo-gradients of these buffers on this rank."""
        return wire.nbytes(self._numel(places), self._form, self._dtype)

    def _numel(self, places: Sequence[Place]) -> int:
        return sum(self.shards[place].weights.numel() for place in places)

    @property
    def _dtype(self) -> torch.dtype:
        return next((shard.weights.dtype for shard in self.shards.values()), torch.float32)

    # a round ---------------------------------------------------------------------------------------------------------

    def pseudo_gradient(self, engine: Engine, places: Sequence[Place]) -> bytes:
        """Return this rank's part of global minus local weights, in the wire format. Not collective."""
        flats = flats_of(engine)
        deltas = [self.shards[place].weights - _local(flats[place]) for place in places]
        return wire.encode(torch.cat(deltas), self._form) if deltas else b""

    def problem(self, places: Sequence[Place], data: bytes | bytearray) -> str | None:
        """Return what is wrong with an island's pseudo-gradient, None if nothing is. Not collective; any thread.

        All islands have the same global weights and bytes, so all of them return the same.
        """
        if len(data) != self.nbytes(places):
            return f"{len(data)} bytes instead of {self.nbytes(places)}"
        largest = wire.decode(data, self._numel(places), self._form, self._dtype).abs().amax() if data else None
        if largest is None:
            return None
        if not bool(largest.isfinite()):
            return "values that are not finite"
        shards = [self.shards[place].weights for place in places]
        weights = max((float(each.abs().amax()) for each in shards if each.numel()), default=0.0)
        if float(largest) > _MOST * max(weights, 1.0):
            return f"a change of {float(largest):.3g}, but the largest weight is {weights:.3g}"
        return None

    def step(self, places: Sequence[Place], received: Sequence[bytes | bytearray]) -> float:
        """Take the outer step with the pseudo-gradients of the islands, in their order. Not collective; any thread.

        Returns:
            the sum of squares of this rank's part of the mean.
        """
        numel, square = self._numel(places), 0.0
        mean = wire.decode(received[0], numel, self._form, self._dtype)
        for data in received[1:]:
            mean.add_(wire.decode(data, numel, self._form, self._dtype))
        mean.div_(len(received))
        shards = [self.shards[place] for place in places]
        for shard, gradient in zip(shards, mean.split([s.weights.numel() for s in shards]), strict=True):
            if shard.counts:
                square += float(gradient.double().square().sum())
            step = gradient
            if self._mu:
                shard.momentum.mul_(self._mu).add_(gradient)
                step = gradient.add(shard.momentum, alpha=self._mu)
            shard.weights.add_(step, alpha=-self._lr)
        return square

    def merge(self, engine: Engine, places: Sequence[Place], mixing: float) -> None:
        """Let the local weights follow the global ones; ``mixing`` is the share that they keep. Collective."""
        engine.wait()
        flats, values = [flats_of(engine)[place] for place in places], []
        for place, flat in zip(places, flats, strict=True):
            new = self.shards[place].weights
            values.append(full_range(flat, new if not mixing else mixing * _local(flat) + (1 - mixing) * new))
        write_masters(engine, flats, values)

    # state -----------------------------------------------------------------------------------------------------------

    def packed(self) -> bytes:
        """Return this rank's global weights and momentum as bytes."""
        return b"".join(wire.encode(t, "exact") for s in list(self.shards.values()) for t in (s.weights, s.momentum))

    def unpack(self, data: bytes | bytearray) -> None:
        """Take them over.

        Raises:
            ValueError: they are those of another model, or not finite.
        """
        mine = [t for s in self.shards.values() for t in (s.weights, s.momentum)]
        sizes = [wire.nbytes(target.numel(), "exact", target.dtype) for target in mine]
        if len(data) != sum(sizes):
            raise ValueError(f"{len(data)} bytes of weights and momentum instead of {sum(sizes)}")
        at, values = 0, []
        for target, size in zip(mine, sizes, strict=True):
            values.append(wire.decode(data[at : at + size], target.numel(), "exact", target.dtype))
            at += size
        if not all(bool(each.isfinite().all()) for each in values):
            raise ValueError("weights or momentum that are not finite")
        for target, value in zip(mine, values, strict=True):
            target.copy_(value)

    def fingerprint(self, engine: Engine) -> dict[str, str]:
        """Return what has to be equal on all islands: names, shapes and shards of what trains, values of what does not.

        Not collective.
        """
        names = {id(p): n for n, p in engine.model.named_parameters()}
        flats = list(flats_of(engine).values())
        layout = [[(names[id(p)], s.full_shape) for p, s in zip(f.params, f.layout.slots, strict=True)] for f in flats]
        shards = [(place, flat.owned, str(flat.master_dtype)) for place, flat in flats_of(engine).items()]
        count = sum(len(each) for each in layout)
        frozen = [
            flat
            for flat in engine.flats
            if all(flat is not each for each in flats) and any(p.numel() for p in flat.params)
        ]
        code = 0
        for flat in frozen:
            value = flat.read_master().detach().to("cpu").contiguous()
            value = value if flat.policy.optimizer else value[slice(*flat.owned)]
            code = zlib.crc32(value.view(torch.uint8).numpy().tobytes(), code)
        return {
            "parameters that train": f"{count} with digest {zlib.crc32(repr(layout).encode()):08x}",
            "shards": f"{self._numel(list(self.shards))} elements with digest {zlib.crc32(repr(shards).encode()):08x}",
            "frozen parameters": f"{sum(len(f.params) for f in frozen)} with digest {code:08x}",
        }

    def trains(self) -> str:
        """Return a short text that is equal on islands with the same buffers that train."""
        return f"{len(self.shards)} buffers with digest {zlib.crc32(repr(list(self.shards)).encode()):08x}"


def flats_of(engine: Engine) -> dict[Place, FlatBuffer]:
    """Return the buffers that train, by place."""
    return {(u, f): flat for u, unit in enumerate(engine.units) for f, flat in enumerate(unit.flats)
            if any(flat is each for each in unit.trainable_flats)}  # fmt: skip


def _start(flat: FlatBuffer) -> Shard:
    weights = _local(flat)
    return Shard(weights, torch.zeros_like(weights), flat.counted)


def _local(flat: FlatBuffer) -> Tensor:
    """Return a copy of this rank's master weights in host memory, the elements that only it owns."""
    mine = flat.read_master().detach()
    return (mine if flat.policy.optimizer else mine[slice(*flat.owned)]).to("cpu", copy=True)


def full_range(flat: FlatBuffer, owned: Tensor) -> Tensor:
    """Return values of the range that this rank steps, from those that it owns. Collective at stage 0."""
    return owned if flat.policy.optimizer else flat.gather_shards(owned.dtype, owned)
