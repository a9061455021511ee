"""What user code has written into parameters reaches masters and shards: no write is lost, at any stage and tier.

In-place changes count in a parameter's version; ``p.data = other`` moves its memory; who looked at ``.data`` and holds
it may have written without either. So a buffer that may have been written to is compared with what this rank holds of
it, bit by bit, and only elements that differ are taken: in 16 bit the others keep their fp32 master weights. Nothing is
sent: all ranks run the same code, and each takes its own shard. Optimizer states stay as they are, as in plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ls_strategy._compat import version_of
from ls_strategy.errors import StateError
from ls_strategy.zero.buffer import FlatBuffer
from ls_strategy.zero.parameters import point, unnoticed, values_of

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def take_writes(flat: FlatBuffer) -> bool:
    """Take what was written to the parameters of a buffer that is in memory. Not collective.

    Returns:
        Whether this rank's part of them has changed, or may have.

    Raises:
        StateError: ``p.data`` was given a tensor of another shape or dtype; something was written while an update of
            the same weights was running, or to what ``p.data`` gave before the last step (stage 3).
    """
    if flat.outdated:
        _check_outdated(flat)
    if flat.kept is not None:
        return _take_kept(flat)
    if not flat.is_gathered or flat.hidden or flat.gathering is not None:
        return False
    with unnoticed():
        moved = [i for i, p in enumerate(flat.params) if p.data_ptr() != flat.seen[i][1]]
        counted = any(p._version != version for p, (version, _) in zip(flat.params, flat.seen, strict=True))
    if not (moved or counted or flat.may_be_written):
        return False
    if flat.updated_early or flat.updating is not None:  # the masters are newer, and nothing can be compared
        if moved or counted:
            raise _too_late(flat)
        return False
    flat.was_written |= bool(moved) or counted
    for i in moved:
        _bring_back(flat, i)
    held = not flat.master_is_slice and flat.is_held
    changed = bool(moved) or counted if flat.master_is_slice else _take_shard(flat)
    flat.look()
    flat.may_be_written = held  # a view that somebody keeps can be written to at any time
    return changed


def _too_late(flat: FlatBuffer) -> StateError:
    return StateError(
        f"a parameter of {flat.name!r} and its neighbours was written to after its update had begun, which early and "
        "delayed updates do before the optimizer's step. Set sharding.overlap_step=False on the strategy, and leave "
        "offload.delay_after out."
    )


def _bring_back(flat: FlatBuffer, i: int) -> None:
    param, view = flat.params[i], flat.views[i]
    values = values_of(param)
    if values.shape != view.shape or values.dtype != view.dtype:
        raise StateError(
            f"{flat.layout.slots[i].name}.data was set to a {values.dtype} tensor of shape {tuple(values.shape)}, but "
            f"while the strategy holds the parameter it stays {view.dtype} of shape {tuple(view.shape)}. Change it "
            "before the fit."
        )
    _part_with(flat, i)
    view.copy_(values)
    with unnoticed():
        point(param, view)


def _part_with(flat: FlatBuffer, i: int) -> None:
    """Who kept ``param.data`` before it was set to another tensor has the old values: give him memory of his own."""
    handed = [values for reference in flat.handed_out.pop(i, ()) if (values := reference()) is not None]
    view = flat.views[i]
    for values in handed:
        if values.data_ptr() == view.data_ptr() and values.shape == view.shape:
            values.data = view.clone()


def _check_outdated(flat: FlatBuffer) -> None:
    for reference, version in flat.outdated:
        values = reference()
        if values is not None and version_of(values) != version:
            flat.outdated = []
            raise StateError(
                f"a view of {flat.name!r} or its neighbours (p.data) that was kept through a step was written to. At "
                "stage 3 and with offload it does not show the parameter then. Ask for p.data again in every hook."
            )


def _take_kept(flat: FlatBuffer) -> bool:
    """The buffer is released, but somebody has a view of its memory."""
    assert flat.kept is not None
    now = flat.full[slice(*flat.stepped)]
    if not bool((bits(now) != bits(flat.kept)).any()):
        return False
    if flat.updated_early or flat.updating is not None:
        raise _too_late(flat)
    take_elements(flat, 0, now, flat.kept)
    flat.kept = now.clone()
    flat.was_written = True
    return True


def take_elements(flat: FlatBuffer, start: int, now: Tensor, before: Tensor) -> bool:
    """Take what differs from ``before`` into this rank's masters from element ``start`` on, and their shard.

    Returns:
        Whether anything does.
    """
    differs = bits(now) != bits(before)
    if not bool(differs.any()):
        return False
    master = flat.read_master().detach()[start : start + now.numel()]
    new = torch.where(differs.to(master.device), now.to(device=master.device, dtype=master.dtype), master)
    flat.write_master(start, new)
    if flat.has_own_shard:
        flat.refresh()
    return True


def _take_shard(flat: FlatBuffer) -> bool:
    """Compare, and take the elements that differ into the masters, and where it is kept, the shard."""
    flat.wait_updated()
    now = flat.full[slice(*flat.stepped)]
    master = flat.read_master().detach()
    before = (master if flat.shard is None else flat.shard).to(device=now.device, dtype=now.dtype)
    differs = bits(now) != bits(before)
    if not bool(differs.any()):
        return False
    differs = differs.to(master.device)
    flat.write_master(0, torch.where(differs, now.to(device=master.device, dtype=master.dtype), master))
    if flat.shard is not None or flat.has_own_shard:
        flat.refresh()
    return True


def bits(values: Tensor) -> Tensor:
    """So that a NaN is equal to itself, and -0 is not 0."""
    return values.view(_BITS[values.element_size()])
