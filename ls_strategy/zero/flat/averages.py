"""Averaged gradients of one flat buffer, and the tier that stores them between backward and step.

On the device and in host memory they are a tensor. On the NVMe tier (`StoredAverages`) they are written once per
micro-batch, and the sum of squares is computed from the data before the write. If the update follows at once, they are
not written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ls_strategy import device as dev
from ls_strategy import spans
from ls_strategy.distributed.reduction import Reduction
from ls_strategy.distributed.tree_sum import TreeSum
from ls_strategy.errors import StateError
from ls_strategy.ops import exact_norm
from ls_strategy.ops.norm import sum_of_squares, sum_over_chunks
from ls_strategy.tiers import TIERS
from ls_strategy.zero.flat.flat_states import FlatStates
from ls_strategy.zero.flat.state_store import chunks
from ls_strategy.zero.flat.states import UpdateState


class Averages:
    """Averaged gradients of the range that this rank steps (stage 0: of the full buffer, in place)."""

    # More than 20 public members: every one of reducer, norm, clipping, user gradients and update reads or changes the
    # averages in a way of its own, and this is the one place that knows their tier, dtype and scale.

    def __init__(self, flat: FlatStates) -> None:
        """Begin without averages."""
        self._flat = flat
        self.in_place = not flat.policy.optimizer
        """Whether the averages are in ``flat.local``, and the step reads ``p.grad``, as under DDP (stage 0)."""

        self.values: Tensor | None = None
        """The averages, ``(stepped,)``; None on the NVMe tier and before the first reduction."""

        self.hold_values = False
        """Whether a gradient was averaged since the last `zero_grad`. If not, ``values`` are outdated."""

        self.folds_factors = False
        """Whether a fused update steps this buffer: it applies loss scale and clip factor, and reads 16 bit."""

        self.recorded_sums: list[Sequence[float] | Tensor] | None = None
        """`sum_of_squares` of averages no longer in memory, of all together or by chunks.

        Numbers and not tensors: small tensors that outlive the buffers around them kept the C library from returning
        the memory of those, 1.4 MB per block of a million parameters. Of an update on a device they are tensors there:
        a number would let the host wait for it.
        """

        self.gone = False
        """Whether an update has taken the averages before its step."""

        self.generation = 0
        """Number of changes by the engine, without those by user code."""

        self.edited = False
        """Whether they were clipped or changed by user code since they were averaged; the same on all ranks."""

        self.landing: Future[None] | None = None
        """A copy to host memory in flight."""

        self.tree: TreeSum | None = None
        """With virtual ranks: the sums of the rounds before the last one."""

        self._scale = 1.0

    @property
    def scale(self) -> float:
        """Return the factor in the gradients: the loss scale of their backward pass, or 1 once it was undone.

        Readers multiply by `unscale`. Before gradients of another scale are added, these are converted to it.
        """
        return self._flat.local.scale if self.in_place else self._scale

    @scale.setter
    def scale(self, scale: float) -> None:
        if self.in_place:
            self._flat.local.take_scale(scale)
        else:
            self._scale = scale

    @property
    def unscale(self) -> float:
        """Return the factor that readers still have to apply."""
        return 1.0 / (self._flat.local.scale if self.in_place else self._scale)

    def fold_factors(self, folds: bool) -> None:
        """Record whether a fused update steps all of the buffer, see `folds_factors`."""
        self.folds_factors = folds

    def note_values(self) -> None:
        """Record that the averages have values, which somebody has put there: `land` does it itself."""
        self.hold_values = True

    def note_edit(self) -> None:
        """Record that they were clipped, or changed by user code, on all ranks."""
        self.edited = True

    def end_edits(self) -> None:
        """Record that they are what was averaged again."""
        self.edited = False

    def forget(self) -> None:
        """Discard the averages so far."""
        self.hold_values = self.gone = self.edited = False
        if self.in_place:
            self._flat.local.take_scale(1.0)
        else:
            self._scale = 1.0
        if self.tree is not None:
            self.tree.forget()

    def tree_sum(self) -> TreeSum:
        """Return the sum over virtual ranks, which begins with its first use."""
        if self.tree is None:
            self.tree = TreeSum()
        return self.tree

    def tensor(self) -> Tensor:
        """Return the averages of the range that this rank steps, ``(stepped,)``. Stage 0: ``flat.local.buffer``.

        fp32, or 16 bit if that is exact and only the update reads them (see `land`).
        """
        if self.in_place:
            if self._flat.local.narrowed:
                self._flat.local.refuse_narrowed()
            self._flat.local.allocate(self._flat.average_dtype)
            assert self._flat.local.buffer is not None
            # Else `.grad` of pieces would be copies that nobody knows of, and clipping would not reach the optimizer.
            assert self._flat.local.buffer.dtype == self._flat.average_dtype
            return self._flat.local.buffer
        if self.landing is not None:
            self.wait()
        if self.values is None:
            self.values = self._new(self._flat.average_dtype)
        return self.values

    def in_memory(self) -> Tensor | None:
        """Return the averages as `tensor` does, without waiting for `landing`; None on the NVMe tier."""
        return self.tensor() if self.values is None else self.values

    @property
    def on_nvme(self) -> bool:
        """Return whether the averages are on the NVMe tier."""
        return False

    def _new(self, dtype: torch.dtype) -> Tensor:
        numel = self._flat.stepped_numel
        if self._flat.averages_on_device:
            return torch.zeros(numel, dtype=dtype, device=self._flat.full.device)
        return self._flat.store.ring.take(numel, dtype, torch.device("cpu"))

    def owned(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the averages of this rank's shard, or of a range of it, ``(shard,)``. Norms are sums over it.

        On the NVMe tier it is a copy, in full precision.
        """
        lo, hi = self._flat.owned
        stop = hi - lo if stop is None else stop
        first = lo if self.in_place else 0
        return self.stepped(first + start, first + stop)

    def stepped(self, start: int, stop: int) -> Tensor:
        """Return elements ``[start, stop)`` of the range that this rank steps: a view, or a copy from the NVMe tier."""
        return self.tensor()[start:stop]

    def edit(self, start: int, stop: int, change: Callable[[Tensor], Any]) -> None:
        """Let ``change`` change elements ``[start, stop)`` in place, on any tier. `renew_sums` has to follow."""
        self.widen()
        change(self.tensor()[start:stop])

    def put(self, start: int, values: Tensor, where: Tensor | None = None) -> None:
        """Replace elements from ``start`` on, those selected by ``where``. Others are zero if there were no averages.

        `renew_sums` has to follow.
        """
        if not self.hold_values:  # set by user code without a backward: on every rank, also one without elements
            self.note_values()
            self._begin_with_zeros()

        def replace(out: Tensor) -> None:
            new = values.to(out.device)
            out.copy_(new if where is None else torch.where(where.to(out.device), new, out))

        self.edit(start, start + values.numel(), replace)

    def renew_sums(self) -> None:
        """Sum again what `edit` and `put` have changed on the NVMe tier."""

    def _begin_with_zeros(self) -> None:
        self.tensor().zero_()

    def gather(self, out: Tensor | None = None) -> Tensor:
        """Gather the averages of all ranks, times their loss scale, ``(numel,)``. Collective."""
        flat = self._flat
        if not self.hold_values:
            return torch.zeros_like(flat.full, dtype=flat.average_dtype) if out is None else out.zero_()
        return flat.gather_shards(flat.average_dtype, self._shard(), out)

    def _shard(self) -> Tensor | Callable[[Tensor], Any]:
        """Return this rank's averages, or a function that reads them."""
        return self.owned()

    def land(self, reducing: Reduction, *, exact_16_bit: bool, stay_in_memory: bool = False) -> None:
        """Add the result of a reduce-scatter to the averages on their tier. Their scale becomes that of ``local``.

        Args:
            reducing: the reduce-scatter, in flight or done.
            exact_16_bit: keep 16-bit gradients of a single rank in 16 bit until a second micro-batch comes: the
                average of one value is the value.
            stay_in_memory: do not write to the NVMe tier, because the update follows at once. If it does not, call
                `spill`.
        """
        flat = self._flat
        if (flat.updating is not None or flat.arriving is not None) and (self.values is not None or self.on_nvme):
            flat.wait_updated()  # it may still read the old averages
        accumulate = self.hold_values
        self.recorded_sums = None
        self.generation += 1
        self.hold_values, self.gone = True, False
        factor = flat.local.scale / self._scale  # convert the old averages to the new scale
        self._scale = flat.local.scale
        if self.values is None and (accumulate or not stay_in_memory) and self.on_nvme:
            self._land_on_nvme(reducing, factor, accumulate=accumulate)
            return
        if self.landing is not None:
            self.wait()
        arrived = flat.average_dtype if flat.local.buffer is None else flat.local.buffer.dtype
        narrow = arrived.itemsize == 2 and exact_16_bit and self.folds_factors and reducing.single
        wanted = arrived if narrow and not accumulate else flat.average_dtype
        if self.values is None:
            self.values = self._new(wanted)
        elif accumulate or narrow:
            self._convert(wanted, keep=accumulate)
        if accumulate:
            _multiply_(self.values, factor)
        if self.values.device == flat.full.device:
            reducing.finish(self.values, accumulate=accumulate)
            return
        # Sum on the device, in the order and precision of a run without offload, then copy in the background.
        mine = flat.comm.pool.take(self.values.numel(), self.values.dtype, flat.full.device)
        if accumulate:
            flat.store.link.to_device(mine, self.values).wait_on_device()
        reducing.finish(mine, accumulate=accumulate)
        arrival = flat.store.link.to_host(self.values, mine)
        flat.comm.pool.give_late(mine, arrival)  # and not in the background, where updates may come first
        self.landing = flat.store.in_background(lambda: arrival.wait_on_host())

    def _land_on_nvme(self, reducing: Reduction, factor: float, *, accumulate: bool) -> None:
        raise NotImplementedError

    def widen(self) -> None:
        """Convert averages in 16 bit to full precision."""
        self._convert(self._flat.average_dtype, keep=True)

    def _convert(self, dtype: torch.dtype, *, keep: bool) -> None:
        """Replace ``values`` by a tensor of ``dtype``. ``keep``: copy the values."""
        if self.values is None or self.values.dtype == dtype:
            return
        before, self.values = self.values, self._new(dtype)
        if keep:
            self.values.copy_(before)
        if not self._flat.averages_on_device:
            self._flat.store.ring.give([before])

    def spill(self) -> None:
        """Write averages that `land` left in memory to the NVMe tier."""

    def require_here(self) -> None:
        """Raise a StateError if an update has taken the averages."""
        if self.gone:
            raise StateError(
                f"the gradients in the buffer of {self._flat.name!r} were freed: their update began while backward "
                "ran. Read them before the step, in on_before_optimizer_step, or set sharding.overlap_step=False on "
                "the strategy."
            )

    def undo_scale(self) -> None:
        """Divide by the scale, in place."""
        if self.scale != 1.0:
            self.change_unscaled(lambda _: None)

    def settle_scale(self, *, folded: bool) -> None:
        """Divide by the scale before the step, unless the update does it as it reads the averages.

        ``folded``: a fused update is to. From the NVMe tier every update does.
        """
        if not (folded and self.folds_factors):
            self.undo_scale()

    def change_unscaled(self, edit: Callable[[Tensor], Any]) -> None:
        """Divide by the scale, then call `change`."""
        factor = self.unscale
        self.scale = 1.0  # first: sums of squares are taken of what is written

        def both(grads: Tensor) -> None:
            _multiply_(grads, factor)
            edit(grads)

        self.change(both)

    def change(self, edit: Callable[[Tensor], Any]) -> None:
        """Change the averages in place on any tier, without regard to their scale."""
        self.generation += 1
        if not self._flat.trainable:
            return  # frozen: there are none
        edit(self.tensor())

    def sums(self) -> Tensor:
        """Return sum of squares and number of non-finite elements of this rank's averages, ``(2,)`` fp64.

        Bitwise the same on every tier, see `sum_over_chunks`.
        """
        if self._flat.plan.exact_norm:
            exact = self.exact_sums()
            return torch.stack([exact_norm.value_of(exact), exact_norm.nonfinite(exact)])
        recorded = self._recorded()
        if recorded is not None:
            return sum_over_chunks(recorded)
        return sum_of_squares(self.owned(), unscale=self.unscale)

    def exact_sums(self) -> Tensor:
        """Return the `exact_sum_of_squares` of this rank's averages, to be added to those of other ranks."""
        recorded = self._recorded()
        if recorded is None:
            return exact_norm.exact_sum_of_squares(self.owned(), unscale=self.unscale)
        together = torch.zeros(exact_norm.SIZE, dtype=torch.int64, device="cpu")
        for part in recorded:
            together += torch.tensor(part, dtype=torch.int64, device="cpu")
        return together

    def _recorded(self) -> list[Sequence[float]] | None:
        """Return the sums of averages no longer in memory, none if there are no averages; None if they are here."""
        if self._flat.update is UpdateState.UPDATED_EARLY or self.gone:
            self._flat.wait_updated()  # the update sums while it runs, and may run on after the step
        if not self.hold_values:
            return []
        if self.recorded_sums is not None and (self.gone or self.on_nvme):
            self.wait()
            return [s.tolist() if isinstance(s, Tensor) else s for s in self.recorded_sums]
        if self.gone:
            self.require_here()
        return None

    def _measure(self, grads: Tensor, unscale: float) -> Tensor:
        """Return what `recorded_sums` holds of a part of the averages."""
        exact = self._flat.plan.exact_norm
        return (exact_norm.exact_sum_of_squares if exact else sum_of_squares)(grads, unscale=unscale)

    def zero(self, start: int = 0, stop: int | None = None) -> None:
        """Set a range of the averages to zero, if there are any."""
        self._flat.require_here("gradients")
        self._flat.wait_updated()
        self.wait()
        if self.in_place:
            if self._flat.local.buffer is not None:
                self._flat.local.buffer[start:stop].zero_()
        elif self.values is not None:
            self.values[start:stop].zero_()

    def give_up(self) -> None:
        """Forget the copy in flight, which has failed."""
        self.landing = None

    def record_sums(self) -> list[Sequence[float] | Tensor]:
        """Return the list in which an update that takes the averages records their sums, see `recorded_sums`."""
        self.recorded_sums = sums = []
        return sums

    def wait(self) -> None:
        """Wait until the averages have reached their tier."""
        if self.landing is not None:
            with spans.waiting(spans.COPY), self._waiting():
                self.landing.result()
            self.landing = None

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for gradients in flight to or from their tier."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._flat.count_wait(time.perf_counter() - started)

    def hand_to_update(self) -> None:
        """Give the averages to an update in flight; backward fills new ones."""
        self.gone = True
        if self.values is not None:
            if not self._flat.averages_on_device:
                self._flat.lend(self.values)
            self.values = None


class StoredAverages(Averages):
    """Averages on the NVMe tier. They are in ``values`` only from their reduction to an update that follows at once."""

    def __init__(self, flat: FlatStates) -> None:
        """Begin without averages."""
        super().__init__(flat)
        self._sums_due = False
        """Whether `recorded_sums` are outdated."""

    @property
    @override
    def on_nvme(self) -> bool:
        return self.values is None

    @override
    def in_memory(self) -> Tensor | None:
        return self.values

    @override
    def stepped(self, start: int, stop: int) -> Tensor:
        if self.values is not None:
            return super().stepped(start, stop)
        self.wait()
        out = torch.empty(stop - start, dtype=self._flat.average_dtype)
        self._flat.store.read_into("grad", out, start)
        return out

    @override
    def edit(self, start: int, stop: int, change: Callable[[Tensor], Any]) -> None:
        if self.values is not None:
            super().edit(start, stop, change)
            return
        values = self.stepped(start, stop)
        change(values)
        self._flat.store.write("grad", start, values)
        self._sums_due = True

    @override
    def _begin_with_zeros(self) -> None:
        if self.values is not None:
            super()._begin_with_zeros()
            return
        self._flat.store.write("grad", 0, torch.zeros(self._flat.stepped_numel, dtype=self._flat.average_dtype))

    @override
    def renew_sums(self) -> None:
        if self._sums_due:
            self.change(lambda _: None)
            self._sums_due = False

    @override
    def _shard(self) -> Tensor | Callable[[Tensor], Any]:
        return partial(self._flat.store.read_into, "grad") if self.values is None else super()._shard()

    @override
    def _land_on_nvme(self, reducing: Reduction, factor: float, *, accumulate: bool) -> None:
        flat = self._flat
        mine = flat.comm.pool.take(flat.stepped_numel, flat.average_dtype, flat.full.device)
        if accumulate:
            with self._waiting():
                flat.store.read_into("grad", mine)
            _multiply_(mine, factor)
        reducing.finish(mine, accumulate=accumulate)
        if dev.is_host(mine.device):
            self._to_nvme(mine)
            flat.comm.pool.give([mine])
            return
        # Copy to the host beside the work of the device, and write; then ``mine`` is free. `wait` waits for it.
        unscale, after, sums = self.unscale, flat.store.link.mark(), self.record_sums()

        def write(put: Callable[[Tensor, int], None]) -> None:
            with flat.store.link.aside(after, work="gradients to NVMe", down=True):
                sums.append(self._measure(mine, unscale).tolist())
                for start, stop in chunks(0, mine.numel()):
                    put(mine[start:stop].float(), start)
            flat.comm.pool.give([mine])

        self.landing = flat.store.write_behind("grad", write)

    @override
    def spill(self) -> None:
        if self.values is not None:
            self.wait()
            mine, self.values = self.values, None
            self._to_nvme(mine)
            self._flat.store.ring.give([mine])

    def _to_nvme(self, mine: Tensor) -> None:
        """Compute the sum of squares, and write to the NVMe tier."""
        self.recorded_sums = [self._measure(mine, self.unscale).tolist()]
        for start, stop in chunks(0, mine.numel()):
            part = mine[start:stop]
            with self._waiting():
                self._flat.store.put("grad", part.float(), start)

    @override
    def settle_scale(self, *, folded: bool) -> None:
        if self.values is not None:
            super().settle_scale(folded=folded)

    @override
    def change(self, edit: Callable[[Tensor], Any]) -> None:
        if self.values is not None or not self._flat.trainable:
            super().change(edit)
            return
        self.generation += 1
        self.recorded_sums = []
        for lo, hi in chunks(0, self._flat.stepped_numel):
            lease = self._flat.store.get("grad", lo, hi)
            part = lease.wait()
            edit(part)
            self.recorded_sums.append(self._measure(part, self.unscale).tolist())
            self._flat.store.put("grad", lease, lo)

    @override
    def zero(self, start: int = 0, stop: int | None = None) -> None:
        super().zero(start, stop)
        if self.values is None and self.hold_values:
            stop = self._flat.stepped_numel if stop is None else stop
            self._flat.store.write("grad", start, torch.zeros(stop - start))
            self.change(lambda _: None)  # recomputes the sums


def averages_of(flat: FlatStates) -> Averages:
    """Return the averages of a buffer for the tier that its plan has for them, also if they come later."""
    tier = (flat.plan.unfrozen or flat.plan).gradient_tier
    return Averages(flat) if TIERS[tier].resident or not flat.policy.optimizer else StoredAverages(flat)


def _multiply_(grads: Tensor, factor: float) -> None:
    if factor != 1.0:
        grads.mul_(factor)
