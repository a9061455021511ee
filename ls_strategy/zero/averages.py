"""Averaged gradients of one flat buffer: where they rest between backward and step, and what is known of them there.

On the device and in host memory they are a tensor. On the NVMe tier they are written once per micro-batch, with the sum
of their squares taken on the way; where the update follows at once, they do not go to the drive at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ls_strategy import spans
from ls_strategy.distributed.comm import PendingReduce
from ls_strategy.errors import StateError
from ls_strategy.ops.norm import sum_of_squares
from ls_strategy.zero.buffer import FlatBuffer
from ls_strategy.zero.storage import chunks


class Averages:
    """Gradients averaged over ranks, of the range that this rank steps (stage 0: of the whole buffer, in place)."""

    def __init__(self, flat: FlatBuffer) -> None:
        """Nothing yet."""
        self._flat = flat
        self.values: Tensor | None = None
        """Where they are a tensor: ``(stepped,)``."""

        self.hold_values = False
        """Whether any gradient was averaged since the last `zero_grad`; what is left of before counts for nothing."""

        self.folds_factors = False
        """Whether a fused update steps this buffer: it multiplies loss scale and clip factor in, and reads 16 bit."""

        self.recorded_sums: Tensor | None = None
        """Sum of squares and number of non-finite elements of averages that are no longer at hand, ``(2,)`` fp64."""

        self.gone = False
        """Whether an update has taken them before its step."""

        self.generation = 0
        """How often they were added to or changed, but for what user code has written."""

        self.edited = False
        """Whether they were clipped, or changed by user code, since they were averaged; the same on all ranks."""

        self.landing: Future[None] | None = None
        """On their way to the host."""

        self._lent: Tensor | None = None
        self._scale = 1.0

    @property
    def scale(self) -> float:
        """What the gradients are multiplied by here: the loss scale of their backward pass, or 1 once it was undone.

        The only note of it. Who reads them multiplies by `unscale`; who adds gradients of another scale brings these
        to it first.
        """
        return self._flat.grad_scale if self.in_place else self._scale

    @property
    def unscale(self) -> float:
        """What they are still to be multiplied by."""
        return 1.0 / self.scale

    def _set_scale(self, scale: float) -> None:
        if not self.in_place:
            self._scale = scale
        else:
            self._flat.grad_scale = scale

    def forget(self) -> None:
        """What was averaged so far counts for nothing."""
        self.hold_values = self.gone = self.edited = False
        self._set_scale(1.0)

    def tensor(self) -> Tensor:
        """Averaged gradients of the range that this rank steps: ``(stepped,)``. Stage 0: ``grad`` itself.

        fp32, but 16 bit where that holds the average exactly and nobody but the update looks (see `land`).
        """
        if self.in_place:
            self._flat.hold_grad_buffer(self._flat.average_dtype)
            assert self._flat.grad is not None
            return self._flat.grad
        self.wait()
        if self.values is None:
            self.values = self._new(self._flat.average_dtype)
        return self.values

    def at_hand(self) -> Tensor:
        """As `tensor`, but perhaps still on their way: for who waits for `landing`."""
        return self.tensor() if self.values is None else self.values

    def _new(self, dtype: torch.dtype) -> Tensor:
        numel = self._flat.stepped_numel
        if self._flat.gradient_tier != "device":
            return self._flat.rest.ring.take(numel, dtype, torch.device("cpu"))
        return torch.zeros(numel, dtype=dtype, device=self._flat.full.device)

    def owned(self) -> Tensor:
        """Averaged gradients of this rank's shard, ``(shard,)``, at every stage: what norms are summed over."""
        reduced = self.tensor()
        return reduced[slice(*self._flat.owned)] if self.in_place else reduced

    def gather(self, out: Tensor | None = None) -> Tensor:
        """Gather the averaged gradients of all ranks, times their loss scale, ``(numel,)``. Collective."""
        flat = self._flat
        if not self.hold_values:
            return torch.zeros_like(flat.full, dtype=flat.average_dtype) if out is None else out.zero_()
        mine = partial(flat.rest.read_into, "grad") if self.on_nvme else self.owned()
        return flat.gather_shards(flat.average_dtype, mine, out)

    @property
    def in_place(self) -> bool:
        """Whether they are in ``grad``, and ``p.grad`` is what the step takes, as under DDP (stage 0)."""
        return not self._flat.policy.optimizer

    @property
    def on_nvme(self) -> bool:
        """Whether the averages rest on the NVMe tier, where nobody but the update reaches them."""
        return not self._flat.rest.is_resident("grad") and self.values is None

    def land(self, reducing: PendingReduce, *, exact_16_bit: bool, at_hand: bool = False) -> None:
        """Let the averages rest on their tier, added to what is there already. Their scale is that of ``grad``.

        Args:
            reducing: the reduce-scatter, under way or done.
            exact_16_bit: keep 16-bit gradients of a single rank as they are, until a second micro-batch comes: the
                average of one value is the value.
            at_hand: the update follows at once, so do not take them to the drive. `spill` does, if it does not follow.
        """
        if self.values is not None or self.on_nvme:
            self._flat.wait_updated()  # it may still read what would be overwritten
        accumulate = self.hold_values
        self.recorded_sums = None
        self.generation += 1
        self.hold_values, self.gone = True, False
        factor = self._flat.grad_scale / self._scale  # what is there takes on the scale of what comes
        self._scale = self._flat.grad_scale
        if self.on_nvme and (accumulate or not at_hand):
            mine = self._flat.comm.pool.take(self._flat.stepped_numel, self._flat.average_dtype, self._flat.full.device)
            if accumulate:
                with self._waiting():
                    self._flat.rest.read_into("grad", mine)
                _multiply_(mine, factor)
            reducing.finish(mine, accumulate=accumulate)
            self._to_nvme(mine)
            self._flat.comm.pool.give([mine])
            return
        self.wait()
        arrived = self._flat.average_dtype if self._flat.grad is None else self._flat.grad.dtype
        narrow = exact_16_bit and self.folds_factors and self._flat.comm.world_size == 1 and arrived.itemsize == 2
        wanted = arrived if narrow and not accumulate else self._flat.average_dtype
        if self.values is None:
            self.values = self._new(wanted)
        elif accumulate or narrow:
            self._convert(wanted, keep=accumulate)
        if accumulate:
            _multiply_(self.values, factor)
        if self.values.device == self._flat.full.device:
            reducing.finish(self.values, accumulate=accumulate)
            return
        self._land_on_host(reducing, self.values, accumulate=accumulate)

    def widen(self) -> None:
        """Hold them in full precision, also where 16 bit were exact so far."""
        if self.values is not None:
            self._convert(self._flat.average_dtype, keep=True)

    def _convert(self, dtype: torch.dtype, *, keep: bool) -> None:
        """Go on with a tensor of ``dtype``. ``keep``: that has the values."""
        if self.values is None or self.values.dtype == dtype:
            return
        before, self.values = self.values, self._new(dtype)
        if keep:
            self.values.copy_(before)
        if self._flat.gradient_tier != "device":
            self._flat.rest.ring.give([before])

    def _land_on_host(self, reducing: PendingReduce, out: Tensor, *, accumulate: bool) -> None:
        """Sum on the device, in the order and precision of a run without offload, then copy beside the computation."""
        mine = self._flat.comm.pool.take(out.numel(), out.dtype, self._flat.full.device)
        if accumulate:
            self._flat.rest.link.to_device(mine, out).wait_on_device()
        reducing.finish(mine, accumulate=accumulate)
        arrival = self._flat.rest.link.to_host(out, mine)

        def land() -> None:
            arrival.wait_on_host()
            self._flat.comm.pool.give([mine])

        self.landing = self._flat.rest.in_background(land)

    def spill(self) -> None:
        """Take averages that `land` left at hand to the drive after all."""
        if not self._flat.rest.is_resident("grad") and self.values is not None:
            self.wait()
            mine, self.values = self.values, None
            self._to_nvme(mine)
            self._flat.rest.ring.give([mine])

    def _to_nvme(self, mine: Tensor) -> None:
        """Sum squares while they are at hand, and write."""
        self.recorded_sums = torch.zeros(2, dtype=torch.float64)
        for start, stop in chunks(0, mine.numel()):
            part = mine[start:stop]
            self.recorded_sums += sum_of_squares(part, unscale=self.unscale).cpu()
            with self._waiting():
                self._flat.rest.put("grad", part.float(), start)

    def require_here(self) -> None:
        """Refuse to give averages that an update has taken.

        Raises:
            StateError: it has.
        """
        if self.gone:
            raise StateError(
                f"the gradients of {self._flat.name!r} and its neighbours are gone: their update began while backward "
                "ran. Read them before the step, in on_before_optimizer_step, or set sharding.overlap_step=False on "
                "the strategy."
            )

    def undo_scale(self) -> None:
        """Divide by the scale, in place."""
        if self.scale != 1.0:
            self.change_unscaled(lambda _: None)

    def change_unscaled(self, edit: Callable[[Tensor], Any]) -> None:
        """Divide by the scale, then as `change`."""
        factor = self.unscale
        self._set_scale(1.0)  # first: sums of squares are taken of what is written

        def both(grads: Tensor) -> None:
            _multiply_(grads, factor)
            edit(grads)

        self.change(both)

    def change(self, edit: Callable[[Tensor], Any]) -> None:
        """Change averaged gradients in place, wherever they rest and whatever their scale is."""
        self.generation += 1
        if not self.on_nvme:
            edit(self.tensor())
            return
        self.recorded_sums = torch.zeros(2, dtype=torch.float64)
        for lo, hi in chunks(0, self._flat.stepped_numel):
            lease = self._flat.rest.get("grad", lo, hi)
            part = lease.wait()
            edit(part)
            self.recorded_sums += sum_of_squares(part, unscale=self.unscale)
            self._flat.rest.put("grad", lease, lo)

    def sums(self) -> Tensor:
        """Sum of squares and number of non-finite elements of this rank's averages, ``(2,)`` fp64.

        Added up in portions of `DRIVE_CHUNK` elements, so that the bits are the same wherever the averages rest.
        """
        if self._flat.updated_early:
            self._flat.wait_updated()
        if not self.hold_values:
            return torch.zeros(2, dtype=torch.float64)
        if (self.gone or self.on_nvme) and self.recorded_sums is not None:
            return self.recorded_sums
        self.require_here()
        grads = self.owned()
        total = torch.zeros(2, dtype=torch.float64, device=grads.device)
        for lo, hi in chunks(0, grads.numel()):
            total += sum_of_squares(grads[lo:hi], unscale=self.unscale)
        return total

    def zero(self, start: int = 0, stop: int | None = None) -> None:
        """Set a range of the averages to zero, where there are any."""
        self._flat.wait_updated()
        self.wait()
        if self.in_place:
            if self._flat.grad is not None:
                self._flat.grad[start:stop].zero_()
        elif self.values is not None:
            self.values[start:stop].zero_()
        elif self.on_nvme and self.hold_values:
            stop = self._flat.stepped_numel if stop is None else stop
            self._flat.rest.write("grad", start, torch.zeros(stop - start))
            self.change(lambda _: None)  # takes the sums anew

    def wait(self) -> None:
        """Wait until the averages are where they rest."""
        if self.landing is not None:
            with spans.waiting(spans.COPY), self._waiting():
                self.landing.result()
            self.landing = None

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Inside, the training thread waits for gradients on their way to or from their tier."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._flat.waited_s += time.perf_counter() - started

    def let_go(self) -> None:
        """An update under way has them; backward may fill new ones meanwhile. `take_back` when the update is done."""
        self.gone = True
        if self.values is not None:
            self._lent, self.values = self.values, None

    def take_back(self) -> None:
        """The update is done: the buffer goes round again."""
        if self._lent is not None:
            self._flat.rest.ring.give([self._lent])
            self._lent = None


def _multiply_(grads: Tensor, factor: float) -> None:
    if factor != 1.0:
        grads.mul_(factor)
