"""Copy user code's writes to parameters into masters and shards: no write is lost, at any stage and tier.

In-place changes count in a parameter's version, and ``p.data = other`` moves its memory. Code that has a view of the
memory can write without either. So a buffer that may have been written to is compared bit by bit with this rank's
masters or shard, and only elements that differ are taken: in 16 bit all others keep their fp32 master weights. Nothing
is sent: all ranks run the same code, and each takes its own shard. Optimizer states do not change, as in plain torch.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from ls_strategy._torch import saved_by_hooks_of_others, storage_users, version_of
from ls_strategy.errors import StateError
from ls_strategy.zero.flat.flat_states import FlatStates
from ls_strategy.zero.flat.parameters import point, unnoticed, values_of
from ls_strategy.zero.flat.states import UpdateState

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class UserWrites:
    """User code's views of the memory of one flat buffer, and its writes to the parameters."""

    def __init__(self, flat: FlatStates) -> None:
        """Begin without views. Call `record` once the parameters point at their slots."""
        self._flat = flat
        self.possible = False
        """Whether user code has accessed the parameters' memory since `record`, so that versions may miss writes."""
        self.detected = False
        """Whether a write to a parameter was detected by version or address since the last step."""
        self._versions: list[int] = []
        """Version of every parameter at the last `record`."""
        self._addresses: list[int] = []
        """Address of every parameter then: that of its slot."""
        self._data_views: dict[int, list[weakref.ref[Tensor]]] = {}
        """Tensors that ``param.data`` returned, by parameter: views of its slot."""
        self._views: list[weakref.ref[Tensor]] = []
        """Tensors that ``param.detach()`` returned, which share the version of the parameter."""
        self._outdated: list[tuple[weakref.ref[Tensor], int]] = []
        """Those of them that have shown outdated values since the step, with their versions at that time."""
        self._own_references = 0
        """References to the memory of ``full`` while user code has no view of it."""
        self._may_be_shared = False
        """Whether such a tensor may have left other views when it was freed, as ``p.detach().numpy()`` does."""
        self.keeps_memory = False
        """Stage 3: whether user code has, or had, a view of a buffer: the memory is kept until all views are freed."""
        self._viewed_shard: Tensor | None = None
        """Stage 3: a copy of this rank's shard of a released buffer that keeps its memory, because it is viewed."""
        self._is_outdated = False
        """Stage 3: whether that memory has shown NaN since the step: gathers in 16 bits do not fill it."""

    def note_access(self) -> None:
        """Record that user code has accessed the memory, and may write there without another trace."""
        self.possible = True
        self._flat.watch()

    @property
    def has_versions_of_writes(self) -> bool:
        """Return whether a version tells of a write since `record`, which nobody has taken. Not collective."""
        with unnoticed():
            return [p._version for p in self._flat.params] != self._versions

    def take_detected(self) -> bool:
        """Return whether a write was detected since the last call."""
        detected, self.detected = self.detected, False
        return detected

    def record(self, versions: list[int] | None = None) -> None:
        """Record versions and addresses of parameters that point at their slots: `take` detects later writes by them.

        ``versions``: those that the parameters have just got.
        """
        if versions is None:
            with unnoticed():
                versions = [p._version for p in self._flat.params]
        self._versions, self._addresses = versions, [slot.data_ptr() for slot in self._flat.views]
        self.possible = self._is_outdated = False

    # views -----------------------------------------------------------------------------------------------------------

    def note_data_view(self, index: int, values: Tensor) -> None:
        """Record a tensor that ``param.data`` returned."""
        alive = [r for r in self._data_views.get(index, ()) if r() is not None]
        self._data_views[index] = [*alive, self._noting_end(values)]

    def note_view(self, values: Tensor) -> None:
        """Record a tensor that ``param.detach()`` returned."""
        self._views = [*(r for r in self._views if r() is not None), self._noting_end(values)]

    def _noting_end(self, values: Tensor) -> weakref.ref[Tensor]:
        """Refer to a view. If its memory has more users when it is freed than now, it may have been passed on."""
        before, writes = storage_users(values), weakref.ref(self)

        def end(_: weakref.ref[Tensor]) -> None:
            noted = writes()
            if noted is not None and storage_users(noted._flat.full) > before:
                noted._may_be_shared = True

        return weakref.ref(values, end)

    def _alive_data_views(self) -> list[tuple[weakref.ref[Tensor], Tensor]]:
        every = [r for references in self._data_views.values() for r in references]
        return [(r, values) for r in every if (values := r()) is not None]

    @property
    def _is_kept(self) -> bool:
        return any(r() is not None for r in self._views) or bool(self._alive_data_views())

    def mark_outdated(self) -> None:
        """Record that the tensors which ``param.data`` returned do not show the current parameters.

        At stages 0 to 2, nor do those of ``param.detach()``. At stage 3 their version changes with every release.
        """
        if not (self._views or self._data_views):
            self._outdated = []
            return
        detached = [] if self._flat.policy.parameters else [(r, v) for r in self._views if (v := r()) is not None]
        self._outdated = [(r, version_of(values)) for r, values in (*self._alive_data_views(), *detached)]

    def end_outdated(self) -> None:
        """Record that they show the current parameters again, after taking writes."""
        if self._outdated:
            self.take()
            self._outdated = []

    def count_references(self, *, bound: bool) -> None:
        """Count the references to the memory of ``full``. ``bound``: the parameters point at it."""
        flat = self._flat
        self._own_references = storage_users(flat.full) + (0 if bound else len(flat.params))

    @property
    def has_memory_views(self) -> bool:
        """Return whether user code has a view of ``full``. Only valid if the masters are not a slice of it."""
        flat = self._flat
        own = self._own_references if flat.is_gathered else self._own_references - len(flat.params)
        return storage_users(flat.full) > own

    @property
    def may_be_written(self) -> bool:
        """Return whether user code has a view of ``full``, through which it can write without another trace."""
        flat = self._flat
        return (flat.plan.split_masters or not flat.master_is_slice) and self.has_memory_views

    @property
    def is_viewed(self) -> bool:
        """Stages 0 to 2: return whether user code has a view of ``full``, as far as that can be told."""
        return (bool(self._views or self._data_views) and self._is_kept) or self.may_be_written

    # memory of a released buffer, stage 3 ----------------------------------------------------------------------------

    def note_memory_views(self) -> None:
        """Record whether user code has a view of a buffer that it gathered on demand."""
        self.keeps_memory |= self.has_memory_views

    def begin_release(self) -> bool:
        """Return whether the buffer has to keep its memory, because user code has a view of it."""
        flat = self._flat
        # Autograd has views, too, and checks whether their memory was gathered again. So in a module's own forward only
        # those count that user code has asked for, or that its hooks on saved tensors may have kept. In inference mode
        # autograd has none.
        inference = torch.is_inference_mode_enabled()
        hooked = inference or (torch.is_grad_enabled() and saved_by_hooks_of_others())
        is_kept = self._may_be_shared or (bool(self._views or self._data_views) and self._is_kept)
        may_be_viewed = flat.gathered_on_demand or self.keeps_memory or is_kept or hooked
        self.keeps_memory, self._may_be_shared = may_be_viewed and self.has_memory_views, False
        if self.keeps_memory:
            self._viewed_shard = flat.full[slice(*flat.stepped)].clone()
        return self.keeps_memory

    def begin_gather(self) -> None:
        """Take writes to a buffer that kept its memory, before it is overwritten."""
        self.take()
        if self._viewed_shard is not None and not self._is_outdated:  # a view can be written to without another trace
            self._flat.update_secondary()
        self._viewed_shard, self._outdated = None, []

    def outdate_memory(self) -> None:
        """Fill a released buffer that is viewed with NaN: the masters are newer."""
        if self._viewed_shard is not None:
            self._viewed_shard, self._is_outdated = None, True
            self._flat.full.fill_(float("nan"))
            self.mark_outdated()

    def forget_memory(self) -> bool:
        """Return whether a released buffer kept its memory for views that do not exist any more."""
        flat = self._flat
        if not self.keeps_memory or flat.is_gathered or flat.gathering is not None or self.has_memory_views:
            return False
        self._viewed_shard, self.keeps_memory = None, False
        return True

    # writes ----------------------------------------------------------------------------------------------------------

    def take(self) -> bool:
        """Take the writes to the parameters. Return whether this rank's shard may have changed. Not collective.

        Raises:
            StateError: ``p.data`` was set to a tensor of another shape or dtype; the write came while an update of the
                same weights was running; it went to a tensor that ``p.data`` returned before the last step; or it was
                not announced and the masters are split.
        """
        flat = self._flat
        if self._outdated:
            self._check_outdated()
        if self._viewed_shard is not None:
            return self._take_viewed(self._viewed_shard)
        if not flat.is_gathered or flat.hidden or flat.gathering is not None:
            return False
        with unnoticed():
            versions, addresses = [p._version for p in flat.params], [p.data_ptr() for p in flat.params]
            # By an optimizer of the user's own: the updates of torch's fused ones do not count in ``_version``.
            by_hand = not flat.has_optimizer and any(p.requires_grad for p in flat.params)
        detected = versions != self._versions or addresses != self._addresses
        if not (detected or self.possible or by_hand):
            return False
        if flat.update in (UpdateState.UPDATED_EARLY, UpdateState.DELAYED) or flat.updating is not None:
            # The masters are newer: what differs from them need not be a write.
            if detected:
                raise self._too_late()
            return False
        self.detected |= detected
        moved = [i for i, address in enumerate(addresses) if address != self._addresses[i]]
        written = [i for i, version in enumerate(versions) if version != self._versions[i] or i in moved]
        for i in moved:
            self._restore(i)
        viewed = self.may_be_written
        changed = flat.take_in_place(detected=detected) if flat.master_is_slice else self._take_shard()
        if flat.plan.cast_to is not None:
            flat.written(written if detected else range(len(flat.params)) if changed else ())
        flat.show_stored()
        flat.update_secondary()
        self.record()
        if viewed:
            self.note_access()
        return changed

    def _too_late(self) -> StateError:
        return StateError(
            f"a parameter in the buffer of {self._flat.name!r} was written to after its update had begun. Early and "
            "delayed updates begin before the optimizer's step. Set sharding.overlap_step=False on the strategy, and "
            "leave offload.delay_after out."
        )

    def _restore(self, i: int) -> None:
        """Copy the values of a parameter that user code has moved to other memory into its slot."""
        flat = self._flat
        param, view = flat.params[i], flat.views[i]
        values = values_of(param)
        if values.shape != view.shape or values.dtype != view.dtype:
            raise StateError(
                f"{flat.layout.slots[i].name}.data was set to a {values.dtype} tensor of shape {tuple(values.shape)}, "
                f"but while the strategy holds the parameter it stays {view.dtype} of shape {tuple(view.shape)}. "
                "Change dtype and shape before the fit."
            )
        # Tensors that ``param.data`` returned keep the old values, as in plain torch.
        for old in (r() for r in self._data_views.pop(i, ())):
            if old is not None and old.data_ptr() == view.data_ptr() and old.shape == view.shape:
                old.data = view.clone()
        view.copy_(values)
        with unnoticed():
            point(param, view)

    def _check_outdated(self) -> None:
        for reference, version in self._outdated:
            values = reference()
            if values is not None and version_of(values) != version:
                self._outdated = []
                raise StateError(
                    f"a view (p.data, p.detach()) of a parameter in the buffer of {self._flat.name!r} that was kept "
                    "through a step was written to. At stage 3 and with offload it does not show the parameter any "
                    "more. Read p.data again in every hook."
                )

    def _take_viewed(self, before: Tensor) -> bool:
        """Take writes to a released buffer that user code has a view of."""
        flat = self._flat
        now = flat.full[slice(*flat.stepped)]
        if not bool(differing(now, before).any()):
            return False
        if flat.update is UpdateState.UPDATED_EARLY or flat.updating is not None:
            raise self._too_late()
        take_elements(flat, 0, now, before)
        self._viewed_shard = now.clone()
        flat.written(range(len(flat.params)))
        return True

    def _take_shard(self) -> bool:
        """Take elements of ``full`` that differ from this rank's shard."""
        flat = self._flat
        master = flat.read_master().detach()
        now = flat.full[slice(*flat.stepped)]
        return take_elements(flat, 0, now, flat.gathered_shard(master), master)


def take_elements(flat: FlatStates, start: int, now: Tensor, before: Tensor, master: Tensor | None = None) -> bool:
    """Copy elements of ``now`` that differ from ``before`` into this rank's masters and shard.

    ``start`` is the first element in this rank's range. ``master`` has the masters of these elements, if the caller has
    read them. Returns whether any element differs.
    """
    differs = differing(now, before)
    if not bool(differs.any()):
        return False
    if master is None:
        master = flat.read_master().detach()[start : start + now.numel()]
    new = torch.where(differs.to(master.device), now.to(device=master.device, dtype=master.dtype), master)
    flat.write_master(start, new)
    if flat.has_own_shard:
        flat.refresh()
    return True


def bits(values: Tensor) -> Tensor:
    """View ``values`` as integers, so that a NaN is equal to itself and -0 is not 0; two for a ``complex128``."""
    if values.dtype == torch.complex128:
        values = torch.view_as_real(values)
    return values.view(_BITS[values.element_size()])


def differing(values: Tensor, others: Tensor) -> Tensor:
    """Return whether an element has other bits, a boolean for each."""
    found = bits(values) != bits(others)
    return found if found.dim() == values.dim() else found.any(-1)
