"""The fused update of one flat buffer, as jobs for a stream (`ls_strategy.tiers.stream.Job`).

States on the device or in host memory are updated in place, in one job. States on NVMe are updated in chunks: read,
update, write. The result is the same bit for bit.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ls_strategy import device as dev
from ls_strategy.layout import round_up
from ls_strategy.ops.moments import BLOCK, Moment
from ls_strategy.ops.norm import sum_of_squares
from ls_strategy.tiers.base import Lease
from ls_strategy.tiers.buffers import PAGE, AlignedBuffer
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.state_store import chunks
from ls_strategy.zero.step.elementwise_states import ElementwiseStates
from ls_strategy.zero.step.fused_optimizers import Kernel


@dataclass(frozen=True)
class UpdatePart:
    """A range of the flat buffer's shard with the same hyper-parameters and step count."""

    start: int
    stop: int
    step: int
    """Number of the current step, from 1."""

    names: tuple[str, ...]
    """Names of the element-wise states that the update uses."""

    settings: dict[str, Any]
    seed_step: int
    """Step number that seeds the stochastic rounding: `step`, or a separate count if the state has none."""


@dataclass(frozen=True)
class Update:
    """The update of one flat buffer."""

    flat: FlatBuffer
    states: ElementwiseStates
    kernel: Kernel
    parts: tuple[UpdatePart, ...]
    clip: Tensor | None
    """Factor for the gradients, ``()`` fp32."""

    unscale: float
    grads: Tensor | None
    """Averages, ``(stepped,)``; None if they are on NVMe."""

    landing: Future[None] | None
    """The copy of those averages to the host, in flight."""

    publish: bool
    """Write the new parameters, in compute dtype, to this rank's stored shard."""

    sums: list[Sequence[float]] | None = None
    """The update appends ``(2,)`` of each chunk: its sum of squares and number of non-finite elements."""

    after: Any = None
    """Mark in the device's work after which nothing reads the old parameters."""

    in_parts: bool = False
    """The parts leave most of the buffer to others: read no more of what is not in memory than they need."""

    streamed: bool = False
    """Copy states in host memory to the device, update them there and copy them back."""

    def seed(self, part: UpdatePart) -> int:
        """Return the seed of the stochastic rounding, unique per buffer and step, and equal after a resume.

        It is the same on all ranks: the random bits of an element depend on its position in the full buffer, so they
        stay what they are when the buffer is cut for another number of ranks, in groups, or by weights.
        """
        slots = self.flat.layout.slots
        # Derived from the name, so that both pipeline stages round a tied parameter in the same way.
        number = zlib.crc32(slots[0].name.encode()) if slots else 0
        return (number * 0x9E3779B1 + part.seed_step * 0xC2B2AE3D) & 0x7FFFFFFF

    def jobs(self) -> list[_ChunkUpdate]:
        """Return the update's jobs, in order."""
        numel = self.flat.stepped_numel
        if not self.states.resident or self.grads is None or self.streamed:
            return [_ChunkUpdate(self, *self._needed(lo, hi)) for lo, hi in chunks(0, numel) if self._needed(lo, hi)]
        return [_ChunkUpdate(self, 0, numel)]

    def _needed(self, lo: int, hi: int) -> tuple[int, ...]:
        """Return the range of a chunk that the update needs, from page to page; empty if it needs nothing."""
        if not self.in_parts:
            return lo, hi
        here = [(max(p.start, lo), min(p.stop, hi)) for p in self.parts if p.start < hi and p.stop > lo]
        if not here:
            return ()
        return min(first for first, _ in here) // PAGE * PAGE, min(round_up(max(last for _, last in here), PAGE), hi)

    def run(self) -> None:
        """Run the full update on the calling thread."""
        for job in self.jobs():
            job.read()
            job.update()
            job.write()


class CopyOut:
    """Copies masters that were updated while backward ran to the parameters on the device (stages 1 and 2)."""

    def __init__(self, flat: FlatBuffer, after: Any) -> None:
        """Wait for ``after``, a mark in the device's work, before the old parameters are overwritten."""
        self._flat = flat
        self._after = after

    def read(self) -> None:
        """Do nothing: the previous update may still be writing, so nothing can be read ahead."""

    def update(self) -> None:
        """Cast on the host, so that half the bytes cross the bus, and copy."""
        flat = self._flat
        target = flat.full[slice(*flat.stepped)]
        if dev.is_host(target.device):
            flat.store.read_into("master", target)
            return
        fill = partial(flat.store.read_into, "master")
        flat.begin_arrival(flat.store.link.staged_to_device(target, fill, self._after))

    def write(self) -> None:
        """Do nothing: `update` has already written."""


class _ChunkUpdate:
    """The job that updates elements ``[lo, hi)`` of the shard."""

    def __init__(self, update: Update, lo: int, hi: int) -> None:
        self._update = update
        self._lo, self._hi = lo, hi
        self._leases: dict[str, Lease] = {}
        self._out: Tensor | None = None
        self._staging: AlignedBuffer | None = None

    def _range(self, name: str) -> tuple[int, int]:
        scale = BLOCK if name.endswith(".scales") else 1
        return self._lo // scale, -(-self._hi // scale)

    def _leased_names(self) -> Iterator[str]:
        update = self._update
        if not update.states.resident:
            yield "master"
            for name in dict.fromkeys(n for part in update.parts for n in part.names):
                yield name
                if update.states.moment_format == "int8":
                    yield f"{name}.scales"
        if update.grads is None:
            yield "grad"

    def read(self) -> None:
        """Start loading every state that is not resident."""
        self._update.flat.before_change()
        store = self._update.flat.store
        self._leases = {n: store.get(n, *self._range(n)) for n in self._leased_names()}

    def update(self) -> None:
        """Wait for the reads, then run the fused operation on every part that overlaps this chunk."""
        update, flat = self._update, self._update.flat
        if update.landing is not None:
            update.landing.result()
        held = {name: lease.wait() for name, lease in self._leases.items()}
        master = held.get("master")
        if master is None:
            master = flat.master.detach()[self._lo : self._hi]
        grads = held["grad"] if update.grads is None else update.grads[self._lo : self._hi]
        if update.sums is not None:
            update.sums.append(sum_of_squares(grads, unscale=update.unscale).tolist())
        self._out = self._output(master)
        for part in update.parts:
            lo, hi = (max(part.start, self._lo) - self._lo, min(part.stop, self._hi) - self._lo)
            if lo < hi:
                self._update_part(part, slice(lo, hi), master, grads, held)

    def _output(self, master: Tensor) -> Tensor | None:
        """Return the tensor that receives the new parameters: their final place, if the operation can write to it."""
        flat = self._update.flat
        if not self._update.publish:
            return None
        stored = flat.has_own_shard and flat.shard is None
        if stored:
            out = torch.empty(self._hi - self._lo, dtype=flat.dtype)
        elif flat.shard is not None:
            out = flat.shard[self._lo : self._hi]
        elif flat.policy.parameters or flat.master_is_slice:
            return None  # gathered from the masters, or the masters themselves
        else:
            out = flat.full[slice(*flat.stepped)][self._lo : self._hi]
        on_the_way = out.device != master.device and not self._update.streamed
        if on_the_way:
            numel = self._hi - self._lo
            self._staging = flat.store.link.stock.take_idle(numel * flat.dtype.itemsize)
            out = self._staging.elements(numel, flat.dtype)
        if on_the_way or stored:
            for lo, hi in self._left_out():
                out[lo:hi].copy_(master[lo:hi])  # parameters that are not stepped keep their values
        return out

    def _left_out(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges of this chunk that no part updates."""
        position = self._lo
        for part in sorted(self._update.parts, key=lambda p: p.start):
            if part.start > position:
                yield position - self._lo, min(part.start, self._hi) - self._lo
            position = max(position, part.stop)
            if position >= self._hi:
                return
        yield position - self._lo, self._hi - self._lo

    def _update_part(
        self, part: UpdatePart, where: slice, master: Tensor, grads: Tensor, held: dict[str, Tensor]
    ) -> None:
        update = self._update
        lo, hi = self._lo + where.start, self._lo + where.stop
        moments: dict[str, Moment] = {}
        for name in part.names:
            if update.states.resident:
                moments[name] = update.states.moment(name, lo, hi)
            else:
                moment = Moment(held[name], held.get(f"{name}.scales"), update.states.moments[name])
                moments[name] = moment.narrow(where.start, where.stop)
        param, grad = master[where], grads[where]
        out = None if self._out is None else self._out[where]
        factors = {"unscale": update.unscale, "seed": update.seed(part), "offset": update.flat.stepped[0] + lo}
        if update.streamed:
            self._on_device(part, param, moments, grad, out, factors)
            return
        if grad.device != param.device:
            grad = grad.to(param.device)
        clip = update.clip if update.clip is None else update.clip.to(param.device)
        update.kernel.update(param, moments, grad, part.step, part.settings, clip=clip, out=out, **factors)

    def _on_device(
        self,
        part: UpdatePart,
        param: Tensor,
        moments: dict[str, Moment],
        grad: Tensor,
        out: Tensor | None,
        factors: dict[str, Any],
    ) -> None:
        """Run the same operation on the device: copy the states there and back."""
        update, device = self._update, self._update.flat.full.device
        with update.flat.store.link.aside(update.after):
            there = {
                name: Moment(_up(m.codes, device), None if m.scales is None else _up(m.scales, device), m.signed)
                for name, m in moments.items()
            }
            param_there = _up(param, device)
            clip = update.clip if update.clip is None else update.clip.to(device)
            out_there = None if out is None else torch.empty(out.numel(), dtype=out.dtype, device=device)
            update.kernel.update(
                param_there, there, _up(grad, device), part.step, part.settings, clip=clip, out=out_there, **factors
            )
            param.copy_(param_there, non_blocking=True)
            for name, m in moments.items():
                m.codes.copy_(there[name].codes, non_blocking=True)
                scales = there[name].scales
                if m.scales is not None and scales is not None:
                    m.scales.copy_(scales, non_blocking=True)
            if out is not None and out_there is not None:
                out.copy_(out_there, non_blocking=True)

    def write(self) -> None:
        """Start storing what changed, and copy the new parameters to the device."""
        flat, store = self._update.flat, self._update.flat.store
        for name, lease in self._leases.items():
            if name == "grad":
                lease.release()
            else:
                store.put(name, lease, self._range(name)[0])
        self._leases = {}
        if self._out is None:
            return
        if flat.has_own_shard and flat.shard is None:
            store.put("param", self._out, self._lo)
        else:
            target = (flat.full[slice(*flat.stepped)] if flat.shard is None else flat.shard)[self._lo : self._hi]
            if target.data_ptr() != self._out.data_ptr():
                arriving = store.link.to_device(target, self._out, self._update.after)
                flat.begin_arrival(arriving)
                if self._staging is not None:
                    store.link.stock.give(self._staging, arriving)
        self._out = self._staging = None


def _up(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, non_blocking=True)
