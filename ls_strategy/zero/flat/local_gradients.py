"""This rank's own gradients of one flat buffer, from autograd until they are averaged over ranks.

Stages 0 and 1 keep them in ``p.grad``, which are views of the buffer. Stages 2 and 3 take the buffer from a pool for
the backward pass, and return it when it was sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ls_strategy._torch import storage_key
from ls_strategy.distributed.buffer_pool import BufferPool
from ls_strategy.distributed.comm import Comm, PendingGather
from ls_strategy.distributed.reduction import Reduction
from ls_strategy.errors import StateError
from ls_strategy.layout import FlatLayout
from ls_strategy.precision import at_least_fp32
from ls_strategy.zero.flat.parameters import grad_of, set_grad
from ls_strategy.zero_stages import StagePolicy


def slot_views(layout: FlatLayout, buffer: Tensor) -> list[Tensor]:
    """Return one view per parameter of a buffer with this layout."""
    return [buffer[s.offset : s.end].view(s.shape) for s in layout.slots]


class LocalGradients:
    """The buffer of this rank's gradients, and the state of each of them."""

    # More than 20 public members: the attributes are the state that reducer, averages and user gradients share.

    def __init__(
        self,
        params: list[nn.Parameter],
        layout: FlatLayout,
        *,
        policy: StagePolicy,
        pool: BufferPool,
        device: torch.device,
        average_dtype: torch.dtype,
    ) -> None:
        """Begin without gradients of ``params``, which are in the order of the layout's slots."""
        self._params = params
        self._layout = layout
        self._policy = policy
        self._pool = pool
        self._device = device
        self._average_dtype = average_dtype
        self._gaps = layout.gaps()
        strides = [tuple(math.prod(s.shape[d + 1 :]) for d in range(len(s.shape))) for s in layout.slots]
        self._places = [(s.shape, stride, s.offset) for s, stride in zip(layout.slots, strides, strict=True)]
        """Shape, stride and offset of every slot."""
        self.scale = 1.0
        """Factor in the gradients: the loss scale of their backward pass. See `Averages.scale`."""
        self.buffer: Tensor | None = None
        """The gradients, ``(numel,)``."""
        self.views: list[Tensor] = []
        """One view of the buffer per parameter."""
        self._views_are_shown = False
        """Stages 2 and 3: whether user code has got one of them."""
        self._addresses: list[int] = []
        """Stages 0 and 1: where each view is, unless user code moves it."""
        self.reducing: Reduction | None = None
        self.gathering: PendingGather | None = None
        """Stage 0: the all-gather of averages into the buffer in flight."""
        self._adopted: dict[int, Tensor] = {}
        """Stage 0: tensors that user code assigned to ``p.grad``, by parameter; they use the memory of the slot."""
        self.rows: dict[int, Tensor] = {}
        """Stage 0, of parameters whose optimizer gets sparse gradients: whether one was dense, and whether each row was
        in a sparse one, ``(1 + rows,)`` uint8; of this rank, and since `agree_on_rows` of all."""
        self.narrowed = False
        """Whether the fit is over, and the buffer has the gradients in the parameters' 16 bits."""
        self.ended = False
        """Whether the fit is over, so that ``p.grad`` is the user's, and says nothing about the last step."""
        self.forget()

    def forget(self) -> None:
        """Record that no parameter has a gradient."""
        count = len(self._params)
        self.filled = [False] * count
        """Stages 2 and 3: which slots of the buffer hold a gradient."""
        self.sent_mask = [False] * count
        """Stages 0 and 1: which parameters had a gradient when the buffer was sent."""
        self.mask = [False] * count
        """Which parameters got a gradient on this rank since the last `zero_grad`."""
        self.dirty = False
        """Whether there are gradients that were not sent yet."""
        for rows in self.rows.values():
            rows.zero_()

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Drop or zero all gradients, and ``p.grad`` with them."""
        if set_to_none:
            if self._adopted:
                self.give_back(range(len(self._params)))
            self.forget()
            if self._policy.gradients and self.buffer is not None:
                self.free()
        else:
            for rows in self.rows.values():
                rows[1:].zero_()
        for param in self._params:
            grad = grad_of(param)
            if grad is None:
                continue
            if set_to_none:
                set_grad(param, None)
                if param.grad_dtype != param.dtype:  # type: ignore[attr-defined]
                    param.grad_dtype = param.dtype  # type: ignore[attr-defined]
            else:
                grad.zero_()

    def drop(self, index: int) -> None:
        """Record that a parameter has no gradient, but leave its ``p.grad``."""
        self.give_back([index])
        self.mask[index] = self.filled[index] = False

    def note_late(self, index: int) -> None:
        """Record a gradient that stays in ``p.grad``, because the buffer is being sent."""
        self.mask[index] = self.dirty = True

    def match_grads(self) -> None:
        """Let `mask` follow ``p.grad``, which user code may have set (stages 0 and 1)."""
        if not self.ended:
            self.mask = [grad_of(p) is not None for p in self._params]

    def match_used(self, used: Sequence[bool]) -> None:
        """Let `mask` be what user code has left after it has set ``p.grad``."""
        self.mask = list(used)

    def note_rows(self, index: int, grad: Tensor) -> None:
        """Note the rows of a gradient, if `rows` has the parameter."""
        if not grad.is_sparse:
            self.rows[index][0] = 1
        else:
            self.rows[index][1:].index_fill_(0, grad._indices()[0], 1)

    def agree_on_rows(self, comm: Comm) -> None:
        """Let `rows` be those of all ranks. Collective if there are any."""
        if self.rows:
            noted = list(self.rows.values())
            agreed = comm.agree(torch.cat(noted).cpu())
            for rows, found in zip(noted, agreed.split([len(rows) for rows in noted]), strict=True):
                rows.copy_(found)

    def as_stepped(self, index: int, grad: Tensor) -> Tensor:
        """Return a parameter's averaged gradient as its optimizer expects it: sparse, if all ranks' were."""
        noted = self.rows.get(index)
        if noted is None or noted[0]:
            return grad
        rows = noted[1:].nonzero().squeeze(1)
        return torch.sparse_coo_tensor(rows.unsqueeze(0), grad[rows], grad.shape, is_coalesced=True)

    def allocate(self, dtype: torch.dtype) -> None:
        """Allocate the buffer if there is none, with zeros between the slots."""
        if self.buffer is not None:
            return
        numel = self._layout.numel
        if self._policy.gradients:
            self.buffer, self.views = self._pool.take_cut(numel, dtype, self._device, self._places)
            for lo, hi in self._gaps:
                self.buffer[lo:hi].zero_()
        else:
            resident = torch.zeros(numel, dtype=dtype, device=self._device)
            self._use(resident, slot_views(self._layout, resident))

    def _use(self, buffer: Tensor, views: list[Tensor]) -> None:
        """Make ``views`` of ``buffer`` the resident gradients."""
        self.buffer, self.views = buffer, views
        self._addresses = [view.data_ptr() for view in views]

    def take_held(self, scales: Mapping[int, float]) -> None:
        """Take over gradients in ``p.grad`` from an earlier engine (stages 0 and 1). The step averages them again.

        ``scales`` has the loss scale of each gradient, by ``id`` of the parameter.
        """
        grads = [grad_of(p) for p in self._params]
        held = [(p, g) for p, g in zip(self._params, grads, strict=True) if g is not None]
        if not held:
            return
        param, grad = held[0]
        self.scale = scales[id(param)]
        self.allocate(grad.dtype if self._policy.optimizer else self._average_dtype)
        self.mask = [g is not None for g in grads]
        for i, used in enumerate(self.mask):
            if used:
                self.take_replaced(i)
        self.dirty = True

    def take_scale(self, scale: float) -> None:
        """Record the factor in gradients that are still to come, or that have been multiplied by it."""
        self.scale = scale

    def rescale(self, scale: float) -> None:
        """Multiply the gradients so far such that their loss scale is ``scale``, as that of the next ones."""
        factor, self.scale = scale / self.scale, scale
        if factor == 1.0:
            return
        filled = [view for view, has in zip(self.views, self.filled, strict=False) if has]
        for grad in [*filled, *map(grad_of, self._params)]:
            if grad is not None:
                grad.detach().mul_(factor)

    def has_others(self, than: int) -> bool:
        """Return whether this rank has gradients other than the one that parameter ``than`` has just got."""
        others = any(grad_of(p) is not None for i, p in enumerate(self._params) if i != than)
        added = bool(self.views) and grad_of(self._params[than]) is self.views[than]
        return others or added or any(self.filled) or self.reducing is not None

    # sending ---------------------------------------------------------------------------------------------------------

    def complete(self) -> None:
        """Let the buffer hold what is sent, of all parameters: also late gradients, and zeros for those without one."""
        self.dirty = False
        if not self._policy.gradients:
            self.sent_mask = self.take_all_replaced()
            return
        for i, (param, view) in enumerate(zip(self._params, self.views, strict=True)):
            late = grad_of(param)
            if late is not None:
                view.add_(late) if self.filled[i] else view.copy_(late)
                set_grad(param, None)
            elif not self.filled[i]:
                view.zero_()
        self.filled = [False] * len(self._params)

    def begin_reducing(self, reducing: Reduction) -> None:
        """Record that the buffer is being averaged."""
        self.reducing = reducing

    def end_reducing(self) -> None:
        """Record that it is averaged; stage 1 shows this rank's gradients again."""
        self.reducing = None
        if self._policy.optimizer and not self._policy.gradients:
            self.show_sent()

    def begin_gathering(self, gathering: PendingGather) -> None:
        """Record that the averages are being gathered into the buffer (stage 0)."""
        self.gathering = gathering

    def end_gathering(self) -> None:
        """Wait for them, and show them."""
        assert self.gathering is not None
        self.gathering.wait()
        self.gathering = None
        self.show_sent()

    def abandon(self) -> Any:
        """Forget what is in flight, which will not arrive. Return what has to stay referenced."""
        left = (self.reducing, self.gathering, self.buffer)
        self.reducing = self.gathering = None
        return left

    def note_sent(self, used: list[bool]) -> None:
        """Record which parameters had a gradient on any rank when the buffer was sent (stages 0 and 1)."""
        self.sent_mask = used

    def drop_sent(self, index: int) -> None:
        """Drop ``p.grad`` of a parameter, and what was sent of it."""
        set_grad(self._params[index], None)
        self.sent_mask[index] = False

    # transient buffer, stages 2 and 3 --------------------------------------------------------------------------------

    def add(self, index: int, grad: Tensor, dtype: torch.dtype) -> None:
        """Move a gradient from ``p.grad`` to the buffer, of ``dtype`` if it is new."""
        self.mask[index] = self.dirty = True
        if self.buffer is None:
            self.allocate(dtype)
        view = self.views[index]
        if self.filled[index]:
            view.add_(grad)
        else:
            view.copy_(grad)
            self.filled[index] = True
        set_grad(self._params[index], None)

    def free(self) -> None:
        """Return the buffer to the pool."""
        assert self.buffer is not None
        self._pool.give([self.buffer], None if self._views_are_shown else (self._places, self.views))
        self.buffer = None
        self.views = []
        self._views_are_shown = False

    def shown_view(self, index: int) -> Tensor:
        """Return a gradient in the buffer, which user code may keep, and move to other memory."""
        self._views_are_shown = True
        return self.views[index]

    # resident buffer, stages 0 and 1 ---------------------------------------------------------------------------------

    def collect(self, index: int, grad: Tensor, dtype: torch.dtype) -> None:
        """Copy ``p.grad`` to the buffer, of ``dtype`` if it is new, and make it a view of the slot."""
        self.mask[index] = self.dirty = True
        if self.buffer is None:
            self.allocate(dtype)
        view = self.views[index]
        if grad is not view and not (self._adopted and self._has_adopted(index, grad)):
            view.copy_(grad)
            self.show(index)

    def take_all_replaced(self) -> list[bool]:
        """Copy every ``p.grad``, which user code may have changed, into its slot. Return which parameters have one."""
        have = []
        for i, view in enumerate(self.views):
            missing = self.take_replaced(i)
            if missing:
                view.zero_()
            have.append(not missing)
        return have

    def show_sent(self) -> None:
        """Put the gradients back into ``p.grad``, and add those that came while they were in flight."""
        for i, (param, view, held) in enumerate(zip(self._params, self.views, self.sent_mask, strict=True)):
            late = grad_of(param)
            if late is not None and late is not view:
                view.add_(late) if held else view.copy_(late)
                self.dirty = True
            if held or late is not None:
                self.show(i)

    def show(self, index: int) -> None:
        """Make the slot the parameter's ``grad``, which may be fp32 where the parameter is not.

        Call it after autograd has produced the gradient: within one backward pass autograd accumulates (tied weights)
        in the parameter's dtype, as at the stages that keep no ``p.grad``.
        """
        param, view = self._params[index], self.views[index]
        if param.grad_dtype != view.dtype:  # type: ignore[attr-defined]
            set_grad(param, None)
            param.grad_dtype = view.dtype  # type: ignore[attr-defined]
        set_grad(param, self._adopted.get(index, view))

    def end_run(self, *, keep: bool) -> None:
        """Leave gradients in ``p.grad``, in the dtype of the parameter, or none. Not collective.

        ``keep``: whether they are what DDP leaves there. This rank's own look like them and have other values.
        """
        self.ended = not keep
        if self.ended and self.dirty:
            self.forget()  # no step has averaged them
        for param in self._params:
            grad = grad_of(param)
            kept = self._narrowed(grad, param.dtype) if keep and grad is not None else None
            other = param.grad_dtype not in (None, param.dtype)  # type: ignore[attr-defined]
            if kept is grad and not other:
                continue
            set_grad(param, None)
            if other:  # `show` has set it, and the user's own training would accumulate in it
                param.grad_dtype = param.dtype  # type: ignore[attr-defined]
            set_grad(param, kept)

    def _narrowed(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a gradient in a parameter's dtype. One in the buffer is converted in place: no memory is added."""
        own = self.buffer is not None and storage_key(grad) == storage_key(self.buffer) and grad.is_contiguous()
        if not own or self.buffer is None or grad.dtype == dtype or grad.dtype.itemsize <= dtype.itemsize:
            return grad.to(dtype)
        self.narrowed = True
        wide = grad.reshape(-1)
        narrow = wide.view(dtype)[: wide.numel()]
        portion = min(max(self.buffer.numel() // 64, 1 << 12), 1 << 20)
        for start in range(0, wide.numel(), portion):  # what a portion overwrites was read with it or before
            narrow[start : start + portion] = wide[start : start + portion].to(dtype)
        return narrow.view(grad.shape)

    @staticmethod
    def refuse_narrowed() -> NoReturn:
        """Refuse to read the buffer after a fit that has `narrowed` it.

        Raises:
            StateError: always.
        """
        raise StateError(
            "gradients were asked for after the fit, which leaves them in p.grad, in the parameters' 16 bits. Read "
            "p.grad, or ask for them until on_train_end."
        )

    def widen(self) -> None:
        """Convert 16 bit to fp32, to accumulate further micro-batches.

        The first backward fills a buffer in the parameters' dtype, so only runs that accumulate allocate fp32.
        """
        if self.buffer is None:
            return
        dtype = at_least_fp32(self.buffer.dtype)
        if self.buffer.dtype == dtype:
            return
        self.give_back(list(self._adopted))
        wide = self.buffer.to(dtype)
        views = slot_views(self._layout, wide)
        for p, old, new in zip(self._params, self.views, views, strict=True):
            held = grad_of(p)
            set_grad(p, None)
            p.grad_dtype = dtype  # type: ignore[attr-defined]
            if held is old:
                set_grad(p, new)
            elif held is not None:
                set_grad(p, held.to(dtype))
        self._use(wide, views)

    def take_replaced(self, index: int) -> bool:
        """Copy a tensor that user code assigned to ``p.grad`` into its slot. Return whether ``p.grad`` is None.

        At stage 0 the tensor stays ``p.grad``, as in plain torch, and uses the slot's memory until `give_back`.
        """
        if self.narrowed:
            self.refuse_narrowed()
        grad, view = grad_of(self._params[index]), self.views[index]
        if view.data_ptr() != self._addresses[index]:  # every step asks several times for each parameter
            # User code has moved them to other memory (``p.grad.data = other``).
            assert self.buffer is not None
            slot = self._layout.slots[index]
            here = self.buffer[slot.offset : slot.end].view(slot.shape)
            here.copy_(view)
            view.data = here
        if grad is None:
            self.give_back([index])
            return True
        if grad is view or (self._adopted and self._has_adopted(index, grad)):
            return False
        view.copy_(grad)
        same_kind = type(grad) is Tensor and grad.dtype == view.dtype and grad.device == view.device
        # It cannot use the slot's memory if it is in the same buffer already.
        adopts = not self._policy.optimizer and same_kind and not grad.requires_grad
        if adopts and storage_key(grad) != storage_key(view):
            grad.data = view
            self._adopted[index] = grad
        self.show(index)
        return False

    def _has_adopted(self, index: int, grad: Tensor) -> bool:
        """Return whether ``grad`` uses the slot's memory.

        If another tensor uses it, that tensor is moved to memory of its own.
        """
        adopted = self._adopted.get(index)
        if adopted is None:
            return False
        if adopted is grad and grad.data_ptr() == self.views[index].data_ptr():
            return True
        self.give_back([index])
        return False

    def give_back(self, indices: Iterable[int]) -> None:
        """Move adopted tensors out of their slots, with their current values."""
        for i in indices if self._adopted else ():
            grad = self._adopted.pop(i, None)
            if grad is not None and grad.data_ptr() == self.views[i].data_ptr():
                grad.data = grad.detach().clone()
