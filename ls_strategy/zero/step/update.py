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
from ls_strategy.ops.split_master import PER_BYTE, SplitMaster
from ls_strategy.tiers.base import Lease
from ls_strategy.tiers.buffers import PAGE, AlignedBuffer
from ls_strategy.tiers.stream import Job
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.state_store import chunks
from ls_strategy.zero.step.device_step import DeviceStep, Finish
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

    sums: list[Sequence[float] | Tensor] | None = None
    """The update appends ``(2,)`` of each chunk: its sum of squares and number of non-finite elements."""

    after: Any = None
    """Mark in the device's work after which nothing reads the old parameters."""

    in_parts: bool = False
    """The parts leave most of the buffer to others: read no more of what is not in memory than they need."""

    streamed: bool = False
    """Copy states in host memory to the device, update them there and copy them back."""

    @property
    def completes_stored(self) -> bool:
        """Whether the masters are completed by parameters on a tier that is not in memory."""
        flat = self.flat
        return flat.plan.split_masters is not None and flat.has_own_shard and flat.shard is None

    def seed(self, part: UpdatePart) -> int:
        """Return the seed of the stochastic rounding, unique per buffer and step, and equal after a resume.

        It is the same on all ranks: the random bits of an element depend on its position in the full buffer, so they
        stay what they are when the buffer is cut for another number of ranks, in groups, or by weights.
        """
        slots = self.flat.layout.slots
        # Derived from the name, so that both pipeline stages round a tied parameter in the same way.
        number = zlib.crc32(slots[0].name.encode()) if slots else 0
        return (number * 0x9E3779B1 + part.seed_step * 0xC2B2AE3D) & 0x7FFFFFFF

    def jobs(self) -> list[Job]:
        """Return the update's jobs, in order."""
        numel = self.flat.stepped_numel
        if self.states.resident and self.grads is not None and not (self.streamed or self.completes_stored):
            return [_ChunkUpdate(self, 0, numel)]
        step = DeviceStep(self.flat.store.link, self.after) if self.streamed else None
        needed = (self._needed(lo, hi) for lo, hi in chunks(0, numel))
        jobs: list[Job] = [_ChunkUpdate(self, *range_, step) for range_ in needed if range_ is not None]
        return jobs if step is None else [*jobs, Finish(step)]

    def _needed(self, lo: int, hi: int) -> tuple[int, int] | None:
        """Return the range of a chunk that the update needs, from page to page; None if it needs nothing."""
        if not self.in_parts:
            return lo, hi
        here = [(max(p.start, lo), min(p.stop, hi)) for p in self.parts if p.start < hi and p.stop > lo]
        if not here:
            return None
        return min(first for first, _ in here) // PAGE * PAGE, min(round_up(max(last for _, last in here), PAGE), hi)

    def run(self) -> None:
        """Run the full update on the calling thread."""
        for job in self.jobs():
            job.read()
            job.update()
            job.write()


@dataclass(frozen=True)
class _PartStates:
    """The states of a part in one chunk, where they are at home or were read to."""

    part: UpdatePart
    where: slice
    """In the chunk."""

    param: Tensor | SplitMaster
    moments: dict[str, Moment]


@dataclass(frozen=True)
class CopyOut(Job):
    """Copies masters that were updated while backward ran to the parameters on the device (stages 1 and 2)."""

    # Nothing is read ahead: the previous update may still be writing.

    flat: FlatBuffer
    after: Any
    """Mark in the device's work; then the old parameters may be overwritten."""

    def update(self) -> None:
        """Cast on the host, so that half the bytes cross the bus, and copy."""
        target, read = self.flat.full[slice(*self.flat.stepped)], self.flat.store.read_into
        if dev.is_host(target.device):
            read("master", target)
        else:
            arriving = self.flat.store.link.staged_to_device(target, partial(read, "master"), self.after)
            self.flat.begin_arrival(arriving)


class _ChunkUpdate(Job):
    """The job that updates elements ``[lo, hi)`` of the shard."""

    def __init__(self, update: Update, lo: int, hi: int, device_step: DeviceStep | None = None) -> None:
        """``device_step``: copy the states to the device, update them there and copy them back."""
        self._update = update
        self._lo, self._hi = lo, hi
        self._device_step = device_step
        self._sent: list[tuple[_PartStates, Tensor | SplitMaster, dict[str, Moment]]] = []
        self._leases: dict[str, Lease] = {}
        self._out: Tensor | None = None
        self._staging: AlignedBuffer | None = None

    def _range(self, name: str) -> tuple[int, int]:
        scale = BLOCK if name.endswith(".scales") else PER_BYTE if name == "master.ties" else 1
        return self._lo // scale, -(-self._hi // scale)

    def _leased_names(self) -> Iterator[str]:
        update = self._update
        if update.completes_stored:
            yield "param"
        if not update.states.resident:
            yield from update.flat.plan.master_states(0)
            for name in dict.fromkeys(n for part in update.parts for n in part.names):
                yield name
                if update.states.moment_format == "int8":
                    yield f"{name}.scales"
        if update.grads is None:
            yield "grad"

    def read(self) -> None:
        """Start loading every state that is not resident, or sending resident ones to the device."""
        update, store = self._update, self._update.flat.store
        update.flat.before_change()
        if update.grads is None or not update.states.resident or update.completes_stored:
            self._leases = {n: store.get(n, *self._range(n)) for n in self._leased_names()}
        if self._device_step is not None and not self._leases:
            self._send(self._device_step, {})

    def update(self) -> None:
        """Wait for the reads, then run the fused operation on every part that overlaps this chunk."""
        update = self._update
        if update.landing is not None:
            update.landing.result()
        held = {name: lease.wait() for name, lease in self._leases.items()} if self._leases else {}
        grads = held["grad"] if update.grads is None else update.grads[self._lo : self._hi]
        if update.publish:
            self._out = self._output(update.flat.masters_of(self._lo, self._hi, held))
        if self._device_step is not None:
            self._on_device(self._device_step, grads, held)
            return
        if update.sums is not None:
            sums = sum_of_squares(grads, unscale=update.unscale)
            update.sums.append(sums.tolist() if dev.is_host(sums.device) else sums)
        for states in self._host_states(held):
            self._run(states, states.param, states.moments, grads, update.clip, self._out)

    def _host_states(self, held: dict[str, Tensor]) -> Iterator[_PartStates]:
        """Yield the states of every part that overlaps this chunk; those that are not resident are ``held``."""
        update, master = self._update, self._update.flat.masters_of(self._lo, self._hi, held)
        for part in update.parts:
            lo, hi = max(part.start, self._lo), min(part.stop, self._hi)
            if lo >= hi:
                continue
            where = slice(lo - self._lo, hi - self._lo)
            moments: dict[str, Moment] = {}
            for name in part.names:
                if update.states.resident:
                    moments[name] = update.states.moment(name, lo, hi)
                else:
                    moment = Moment(held[name], held.get(f"{name}.scales"), update.states.moments[name])
                    moments[name] = moment.narrow(where.start, where.stop)
            yield _PartStates(part, where, master[where], moments)

    def _output(self, master: Tensor | SplitMaster) -> Tensor | None:
        """Return the tensor that receives the new parameters: their final place, if the operation can write to it."""
        flat = self._update.flat
        if isinstance(master, SplitMaster):  # the parameters are a part of such masters
            return None
        if self._is_stored:
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
        if on_the_way or self._is_stored:
            for lo, hi in self._left_out():
                out[lo:hi].copy_(master[lo:hi])  # parameters that are not stepped keep their values
        return out

    @property
    def _is_stored(self) -> bool:
        """Return whether new parameters go to a tier that is not in memory."""
        flat = self._update.flat
        return self._update.publish and flat.has_own_shard and flat.shard is None

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

    def _run(
        self,
        states: _PartStates,
        param: Tensor | SplitMaster,
        moments: dict[str, Moment],
        grads: Tensor,
        clip: Tensor | None,
        out: Tensor | None,
    ) -> None:
        """Run the operation on the states of a part, here or on the device; ``grads`` and ``out`` are the chunk's."""
        update, part, where = self._update, states.part, states.where
        update.kernel.update(
            param,
            moments,
            grads[where].to(param.device),
            part.step,
            part.settings,
            clip=clip if clip is None else clip.to(param.device),
            unscale=update.unscale,
            out=None if out is None else out[where],
            seed=update.seed(part) if update.states.moment_format != "fp32" else 0,  # nothing is rounded in fp32
            offset=update.flat.stepped[0] + self._lo + where.start,
        )

    def _send(self, step: DeviceStep, held: dict[str, Tensor]) -> None:
        with step.sending():
            for states in self._host_states(held):
                there = {name: step.send_state(moment) for name, moment in states.moments.items()}
                self._sent.append((states, step.send_state(states.param), there))

    def _on_device(self, step: DeviceStep, grads: Tensor, held: dict[str, Tensor]) -> None:
        """Run the same operation on the device, on what was sent ahead or is sent now, and bring the states back."""
        update, out = self._update, self._out
        if self._leases:
            self._send(step, held)
        with step.operation():
            there, clip = step.send(grads), step.send_clip(update.clip)
            if update.sums is not None:
                sums = sum_of_squares(there, unscale=update.unscale)
                step.bring_numbers(sums, update.sums.append)
            out_there = out
            if out is not None and out.device != there.device:
                out_there = torch.empty(out.numel(), dtype=out.dtype, device=there.device)
            for states, param, moments in self._sent:
                self._run(states, param, moments, there, clip, out_there)
                step.bring_state(states.param, param)
                for name, moment in states.moments.items():
                    step.bring_state(moment, moments[name])
                if out is not None and out_there is not None and out_there is not out:
                    step.bring(out[states.where], out_there[states.where])
        self._sent = []
        if self._leases or self._is_stored:
            step.finish()  # `write` hands the memory on

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
        if self._is_stored:
            store.put("param", self._out, self._lo)
        else:
            target = (flat.full[slice(*flat.stepped)] if flat.shard is None else flat.shard)[self._lo : self._hi]
            if target.data_ptr() != self._out.data_ptr():
                arriving = store.link.to_device(target, self._out, self._update.after)
                flat.begin_arrival(arriving)
                if self._staging is not None:
                    store.link.stock.give(self._staging, arriving)
        self._out = self._staging = None
