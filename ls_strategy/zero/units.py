"""A unit's flat buffers: where parameters, masters and gradients of its parameters live.

::

    full    | a | b | c      |....|     compute dtype, what the forward reads; at stage 3 only while gathered
    master      | b | c  |              master dtype, this rank's shard (stage 0: everything); the optimizer's view
    grad    | a | b | c      |....|     this rank's gradients: resident (stages 0, 1) or only during backward (2, 3)
    reduced     | b | c  |              fp32, averaged over ranks, this rank's shard; stage 0 averages ``grad`` in place

In fp32, ``master`` is a slice of ``full`` wherever ``full`` is resident: there is no second copy.
A parameter keeps its identity and its shape. While its unit is released it reads as NaN, so that a use outside the
module that owns it shows at once instead of reading freed memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ls_strategy.comm import Comm, PendingGather, PendingReduce
from ls_strategy.layout import Piece
from ls_strategy.plan import FlatPlan
from ls_strategy.zero_stages import StagePolicy


class Flat:
    """One flat buffer: the parameters of a unit that share an optimizer and a dtype."""

    def __init__(self, plan: FlatPlan, params: list[nn.Parameter], *, policy: StagePolicy, comm: Comm) -> None:
        """Only records; `load` moves the values in."""
        layout = plan.layout
        self.layout = layout
        self.dtype = plan.dtype
        self.master_dtype = plan.master_dtype
        self.params = params
        self.optimizer_index = plan.optimizer
        self.policy = policy
        self.comm = comm
        self.trainable = plan.trainable
        self.owned = layout.shard_range(comm.rank)
        """Range of the buffer whose gradients this rank averages, and from stage 1 on steps."""
        self.stepped = self.owned if policy.optimizer else (0, layout.numel)
        self.pieces: tuple[Piece, ...] = layout.pieces(*self.stepped)
        self.full: Tensor
        self.views: list[Tensor]
        self.master: Tensor
        self.is_gathered = True
        self.gathering: PendingGather | None = None
        # gradients
        self.grad: Tensor | None = None
        self.grad_views: list[Tensor] = []
        self.reduced: Tensor | None = None
        self.reduced_holds_values = False
        self.unscaled = False
        """Whether the averages were divided by the loss scale already."""
        self.reducing: PendingReduce | None = None
        self.gathering_grads: PendingGather | None = None
        self.filled = [False] * len(params)
        """Stages 2 and 3: which slots of ``grad`` hold something."""
        self.held_here = [False] * len(params)
        """Stages 0 and 1: which parameters had a gradient when the buffer was sent."""
        self.used_here = [False] * len(params)
        """Whether this rank produced a gradient of each parameter since the last `zero_grad`."""
        self.dirty = False
        """Whether this rank has gradients that no reduction has seen yet."""

    def load(self, values: list[Tensor], device: torch.device) -> None:
        """Take the parameters' original values; rank 0's are taken by all. Collective.

        Args:
            values: one tensor per parameter, its shape, any dtype and device: masters come from these.
            device: where the buffers live.
        """
        layout, dtype, master_dtype = self.layout, self.dtype, self.master_dtype
        whole = torch.zeros(layout.numel, dtype=master_dtype, device=device)
        for slot, value in zip(layout.slots, values, strict=True):
            whole[slot.offset : slot.end].copy_(value.detach().reshape(-1))
        self.comm.broadcast_(whole)
        lo, hi = self.stepped
        if self.policy.parameters:
            self.master = whole[lo:hi].clone()
            self.full = torch.empty(layout.numel, dtype=dtype, device=device)
        elif dtype == master_dtype:
            self.full = whole
            self.master = whole[lo:hi]
        else:
            self.full = whole.to(dtype)
            self.master = whole[lo:hi].clone() if self.policy.optimizer else whole
        self.average_dtype = torch.promote_types(torch.float32, master_dtype) if self.trainable else torch.float32
        self.views = [self.full[s.offset : s.end].view(s.shape) for s in layout.slots]
        # One element per parameter, so that its address still tells which parameter it is (checkpoint.py asks).
        nothing = float("nan") if dtype.is_floating_point else 0
        self._released = torch.full((len(self.params),), nothing, device=device, dtype=dtype)
        self.bind()
        if self.trainable and not self.policy.optimizer and dtype != torch.float32:
            for p in self.params:  # stage 0 averages in place, and averages in fp32
                p.grad_dtype = torch.float32  # type: ignore[attr-defined]
        if self.policy.parameters:
            self.release()

    def full_master(self) -> Tensor:
        """Master weights of all ranks, ``(numel,)``; read-only where this rank has them all anyway. Collective."""
        if not self.policy.optimizer:
            return self.master
        whole = torch.zeros(self.layout.numel, dtype=self.master.dtype, device=self.master.device)
        whole[slice(*self.owned)].copy_(self.master)
        self.comm.all_gather(whole).wait()
        return whole

    @property
    def master_is_slice(self) -> bool:
        """Whether the master weights are a slice of ``full`` and need no copy into it."""
        return self.master.untyped_storage().data_ptr() == self.full.untyped_storage().data_ptr() != 0

    def bind(self) -> None:
        """Point every parameter at its slot."""
        for p, view in zip(self.params, self.views, strict=True):
            p.data = view
        self.is_gathered = True

    # parameters ------------------------------------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Bring the newest masters of all ranks into ``full``; `finish_gather` waits. Collective."""
        lo, hi = self.stepped
        if self.policy.parameters and self.full.untyped_storage().size() == 0:
            self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
        if not self.master_is_slice:
            self.full[lo:hi].copy_(self.master)
        if self.policy.optimizer:
            self.gathering = self.comm.all_gather(self.full)

    def finish_gather(self) -> None:
        """Wait until the parameters may be read."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
        if not self.is_gathered:
            self.bind()

    def release(self) -> None:
        """Stage 3: give the full buffer's memory back. Parameters keep shape and read as NaN."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
        for i, (p, slot) in enumerate(zip(self.params, self.layout.slots, strict=True)):
            p.data = self._released[i].expand(slot.shape)
        self.full.untyped_storage().resize_(0)
        self.is_gathered = False

    # gradients -------------------------------------------------------------------------------------------------------

    def hold_grad_buffer(self, dtype: torch.dtype) -> None:
        """Make sure there is a buffer for this rank's gradients, with zeros between the slots."""
        if self.grad is not None:
            return
        device = self.full.device
        if self.policy.gradients:
            self.grad = self.comm.pool.take(self.layout.numel, dtype, device)
            for lo, hi in self.layout.gaps():
                self.grad[lo:hi].zero_()
        else:
            self.grad = torch.zeros(self.layout.numel, dtype=dtype, device=device)
        self.grad_views = [self.grad[s.offset : s.end].view(s.shape) for s in self.layout.slots]

    def drop_grad_buffer(self) -> None:
        """Stages 2 and 3: the gradients were reduced, their buffer serves the next unit."""
        assert self.grad is not None
        self.comm.pool.give([self.grad])
        self.grad = None
        self.grad_views = []

    def widen_grads(self) -> None:
        """Stages 0 and 1: go on accumulating in fp32. Exact: fp32 holds every 16-bit value.

        The first backward fills a buffer in the parameters' dtype; only runs that accumulate pay for the wide one.
        """
        if self.grad is None or self.grad.dtype == torch.float32:
            return
        wide = self.grad.float()
        views = [wide[s.offset : s.end].view(s.shape) for s in self.layout.slots]
        for p, old, new in zip(self.params, self.grad_views, views, strict=True):
            held = p.grad
            p.grad = None
            p.grad_dtype = torch.float32  # type: ignore[attr-defined]
            if held is old:
                p.grad = new
            elif held is not None:
                p.grad = held.float()
        self.grad, self.grad_views = wide, views

    def stepped_grads(self) -> Tensor:
        """Averaged fp32 gradients of the range that this rank steps: ``(stepped,)``. Stage 0: ``grad`` itself."""
        if not self.policy.optimizer:
            self.hold_grad_buffer(self.average_dtype)
            assert self.grad is not None
            return self.grad
        if self.reduced is None:
            lo, hi = self.stepped
            self.reduced = torch.zeros(hi - lo, dtype=self.average_dtype, device=self.full.device)
        return self.reduced

    def owned_grads(self) -> Tensor:
        """Averaged fp32 gradients of this rank's shard, ``(shard,)``, at every stage: what norms are summed over."""
        reduced = self.stepped_grads()
        return reduced if self.policy.optimizer else reduced[slice(*self.owned)]


class Unit:
    """Flat buffers that are gathered and reduced together."""

    def __init__(self, name: str, modules: list[nn.Module], flats: list[Flat], *, is_root: bool) -> None:
        """Group ``flats``."""
        self.name = name
        self.modules = modules
        self.flats = flats
        self.is_root = is_root
        self.trainable_flats = [f for f in flats if f.trainable]
        self.waiting_for = 0
        """Gradients still to come in this backward pass."""
        self.launched = False
        self.open_backwards = 0
        """Calls of the unit's modules whose backward has begun and not ended."""
        self.unclosable_backwards = 0
        """Those among them whose end no input's gradient will tell."""
        self.pinned = False
        """Stay gathered until the backward pass is over: nothing tells earlier that it is safe to let go."""
