"""Parameters gathered in the dtype to which autocast casts them (stage 3 with ``bf16-mixed`` and ``16-mixed``).

Under autocast, a linear layer casts its fp32 weight to 16 bits and multiplies with that. So its shards are cast before
they are gathered, and the product reads what has arrived: the same bits as casting after an fp32 gather, with half of
the bytes on the wire and in memory, and autograd saves no copy of the weight.

::

    master          | b | c  |              fp32, this rank's shard
    wire.values | a | b | c      |....|     16 bits, while the unit computes; `CastWire.views` has one per parameter
    full        | a | b | c      |....|     fp32, only while other code uses a parameter

The parameter stays a `ShardedParameter` in fp32. Where autocast would cast it, its torch function takes the view
instead, and autograd adds the view's gradient to that of the parameter in fp32, as that of autocast's cast. Any other
use gathers it in fp32, on demand; once that happens while its module or the step uses it, the buffer is always gathered
in fp32. A forward finds it in one of the two forms, and so does its backward.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from typing_extensions import override

from ls_strategy._torch import (
    current_backward_pass,
    current_transform,
    saved_by_hooks_of_others,
    set_versions,
    version_of,
    without_dispatch_modes,
)
from ls_strategy.distributed.buffer_pool import BufferPool
from ls_strategy.distributed.wire_format import CastWireFormat
from ls_strategy.layout import FlatLayout
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.parameters import values_of
from ls_strategy.zero.flat.states import ParameterState
from ls_strategy.zero.wire import Wire

_log = logging.getLogger("ls_strategy.zero")

FIRST_VERSION = 1 << 28
"""Of the views. By it one recognizes them in autograd's error about a tensor that has changed since it was saved."""

AWAY = 1 << 29
"""What is added to it while they are not here."""


class CastWire(Wire):
    """The memory of gathers in 16 bits. It is read as it is, and not decoded."""

    keeps = True

    def __init__(
        self,
        dtype: torch.dtype,
        layout: FlatLayout,
        shard: tuple[int, int],
        *,
        stored: torch.dtype,
        device: torch.device,
        pool: BufferPool,
    ) -> None:
        """Describe the wire, see `Wire`. ``stored``: the dtype of the parameters."""
        super().__init__(CastWireFormat(dtype), layout, shard, dtype=stored, device=device, pool=pool, encodes=True)
        self.cast_to = dtype
        self._pool.allocate(self.values)
        # `.data` has a version of its own, which a gather does not change: autograd finds the values that it has saved.
        self.views = [self.values[s.offset : s.end].view(dtype).view(s.shape).data for s in layout.slots]
        """One view of ``values`` per parameter."""
        self._slots = layout.slots
        set_versions(tuple(self.views), (FIRST_VERSION,) * len(self.views))
        self.always_exact = False
        """Whether code under autocast uses the parameters otherwise, so that they are gathered in fp32."""
        self._exact_next = False
        """Whether they will be, from the next step on."""
        self.is_saved = False
        """Whether autograd may have saved a view since `outdate`."""
        self._is_away = False
        """Whether autograd would refuse what it has saved: there is no memory, or a gather is in flight into it."""
        self.free()

    @property
    def is_here(self) -> bool:
        """Return whether ``values`` has memory."""
        return self.values.untyped_storage().size() > 0

    def view_for(self, index: int, param: nn.Parameter, of: Tensor | None = None) -> Tensor:
        """Return a parameter in 16 bits, whose gradient autograd adds to the parameter's. Inside of `unnoticed`.

        ``of``: its values, if they may be others than those of the view.
        """
        if of is None:
            view = self.read(index)
        else:
            with torch.no_grad(), without_dispatch_modes():
                view = of.to(self.cast_to)
        apply = torch.is_grad_enabled() and param.requires_grad
        return _Cast.apply(param, view) if apply else view  # type: ignore[no-any-return]

    def read(self, index: int) -> Tensor:
        """Return a view that autograd may save."""
        view = self.views[index]
        if not torch.is_grad_enabled():
            return view
        self.is_saved = True
        # Which would not notice new values: they get a copy, as autocast would make one.
        return view.clone() if saved_by_hooks_of_others() else view

    def casts_now(self) -> bool:
        """Return whether autocast is on here, with this dtype, and casts a parameter again for each use.

        A cast that autocast keeps (``cache_enabled=True``) would sum the gradients of all its uses in 16 bits.
        """
        kind = self.values.device.type
        casts = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == self.cast_to
        return casts and not (torch.is_grad_enabled() and torch.is_autocast_cache_enabled())

    def fill(self, full: Tensor) -> None:
        """Let ``values`` be those of ``full``."""
        self._pool.allocate(self.values)
        self.form.encode(full, self.values)
        self.arrived()

    def arrived(self) -> None:
        """Let autograd read what it has saved: ``values`` are here."""
        if self._is_away:
            self._move_versions(-AWAY)

    def free(self) -> None:
        """Free the memory of ``values``. Autograd refuses what it has saved until they have `arrived` again."""
        super().free()
        if self.is_saved and not self._is_away:  # a gather in flight has memory again, but not yet the values
            self._move_versions(AWAY)

    def _move_versions(self, by: int) -> None:
        self._is_away = by > 0
        set_versions(tuple(self.views), tuple(version_of(view) + by for view in self.views))

    def outdate(self) -> None:
        """Let autograd refuse a backward pass through what it has saved: the parameters are stepped."""
        if self.is_saved:
            self.is_saved = False
            increment_version(self.views)
        if self._exact_next:
            self.always_exact = self.exact = True

    def written(self, indices: Iterable[int], full: Tensor | None = None) -> None:
        """Let it refuse one through parameters that user code has written to.

        ``full``: the new values, ``(numel,)``. Parameters whose views have these already are as they were.
        """
        for i in indices if self.is_saved else ():
            if full is None or not self.is_here or self._differs(i, full):
                increment_version(self.views[i])

    def _differs(self, index: int, full: Tensor) -> bool:
        """Return whether a parameter in ``full`` is cast to other values than those of its view."""
        slot, view = self._slots[index], self.views[index]
        return not torch.equal(full[slot.offset : slot.end].to(self.cast_to), view.flatten())

    def end_casts(self) -> None:
        """Gather in fp32 from now on, or from the next step on, if a forward has used the views.

        Backward may run such a forward again, and has to find what the first one has found.
        """
        if self.is_saved:
            self._exact_next = True
        else:
            self.always_exact = True

    def end_exact(self) -> None:
        """Let the next gather be in 16 bits again."""
        self.exact = self.always_exact

    def release(self) -> None:
        """Free all memory."""
        super().release()
        self.end_exact()


class _Cast(torch.autograd.Function):
    """A cast whose result exists already."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, cast: Tensor) -> Tensor:  # type: ignore[override]
        return cast.detach()  # of the same version: see `CastWire.outdate`

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad.float(), None


class CastFlat(FlatBuffer):
    """A flat buffer that is gathered in 16 bits while only autocast uses it."""

    _casts: CastWire

    @override
    def _make_wire(self, device: torch.device) -> Wire:
        assert self.plan.cast_to is not None
        self._casts = CastWire(
            self.plan.cast_to, self.layout, self.stepped, stored=self.dtype, device=device, pool=self.comm.pool
        )
        return self._casts

    @override
    def cast_of(self, param: nn.Parameter) -> Tensor | None:
        if self.reports_uses and self.on_demand is not None:
            self.on_demand.take_copies_early(self)
        # A forward that ran in this step has used the views, and recomputation compares the operations of its two runs.
        held = self.gathered_on_demand and self._casts.is_saved
        if not (held or self.state is ParameterState.CAST) or not self._casts.casts_now():
            return None
        if current_transform() is not None or torch.jit.is_tracing():
            return None
        index = self._index[id(param)]
        return self._casts.view_for(index, param, of=values_of(param) if held else None)

    # gathers ---------------------------------------------------------------------------------------------------------

    @property
    @override
    def gathers_exactly(self) -> bool:
        return self._casts.always_exact

    @override
    def gather_exactly(self) -> None:
        """End a gather in 16 bits, or a read for one, before one in fp32. On all ranks."""
        wire = self._casts
        if wire.exact:
            return
        # Reading without gradients and outside of autocast is what callbacks do now and then.
        if self.state is ParameterState.CAST and (wire.casts_now() or torch.is_grad_enabled()):
            if self.comm.rank == 0:
                _log.info(
                    "%s",
                    f"a parameter in the buffer of {self.name!r} is used in {self.dtype}, too, so the buffer will be "
                    f"gathered in that and not in {wire.cast_to} (precision.gather)",
                )
            wire.end_casts()
        if self.gathering is not None:
            self.finish_gather()
        if self.reading is not None:
            self._end_read()
        wire.exact = True

    @override
    def finish_gather(self, *, on_demand: bool = False) -> None:
        if self.offloaded:
            self.require_here("parameters")
        if self._end_gather() and self.secondary is not None and not self._casts.exact:
            self.secondary.arrived(self._casts.values)
        if not self._is_cast(on_demand=on_demand):
            super().finish_gather(on_demand=on_demand)

    def _is_cast(self, *, on_demand: bool) -> bool:
        """End a gather of a buffer that may be gathered in 16 bits; return whether it was."""
        wire = self._casts
        if not wire.exact and not self.is_gathered:
            wire.arrived()
            self._move(ParameterState.CAST)
            return True
        wire.end_exact()
        if self.gathered_on_demand and not on_demand:  # by user code; now its own module needs it
            if self.users and wire.is_saved:  # by a forward that backward may run again
                wire.end_casts()
                if current_backward_pass() >= 0:
                    wire.fill(self.full)
                return True  # see `cast_of`
            if self.users and torch.is_grad_enabled():
                wire.always_exact = wire.exact = True  # user code holds it, and autograd may save it
            if not self.users and not wire.always_exact:
                self.take_writes()
                wire.fill(self.full)
                self.release(ParameterState.CAST)
                return True
        if wire.is_saved and not on_demand and current_backward_pass() >= 0:
            wire.fill(self.full)
        return False

    @override
    def release_on_demand(self) -> None:
        """Release what was gathered on demand. What its own module has gathered in 16 bits stays."""
        if self._casts.is_here and not self._casts.always_exact:
            self._casts.fill(self.full)  # user code may have written to the parameters
            self.release(ParameterState.CAST)
        else:
            self.release()

    @override
    def release_cast(self) -> None:
        if self.is_gathered:
            self._casts.free()

    # new values ------------------------------------------------------------------------------------------------------

    @override
    def outdate_casts(self) -> None:
        self._casts.outdate()

    @override
    def written(self, indices: Iterable[int]) -> None:
        self._casts.written(indices, self.full if self.is_gathered else None)

    @override
    def write_fetched(self, start: int, values: Tensor) -> None:
        super().write_fetched(start, values)
        if self._casts.is_here:
            self._casts.values[start : start + values.numel()].copy_(values)
