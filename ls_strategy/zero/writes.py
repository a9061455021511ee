"""Copy user code's writes to parameters into masters and shards: no write is lost, at any stage and tier.

In-place changes count in a parameter's version, and ``p.data = other`` moves its memory. Code that has a view of the
memory can write without either. So a buffer that may have been written to is compared bit by bit with this rank's
masters or shard, and only elements that differ are taken: in 16 bit all others keep their fp32 master weights. Nothing
is sent: all ranks run the same code, and each takes its own shard. Optimizer states do not change, as in plain torch.
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
    """Take the writes to the parameters of a buffer that is in memory. Not collective.

    Returns:
        Whether this rank's shard has changed, or may have.

    Raises:
        StateError: ``p.data`` was set to a tensor of another shape or dtype; the write came while an update of the same
            weights was running; or it went to a tensor that ``p.data`` returned before the last step.
    """
    if flat.outdated_views:
        _check_outdated(flat)
    if flat.viewed_shard is not None:
        return _take_viewed(flat)
    if not flat.is_gathered or flat.hidden or flat.gathering is not None:
        return False
    with unnoticed():
        moved = [i for i, p in enumerate(flat.params) if p.data_ptr() != flat.recorded_versions[i][1]]
        counted = any(
            p._version != version for p, (version, _) in zip(flat.params, flat.recorded_versions, strict=True)
        )
    if not (moved or counted or flat.may_be_written):
        return False
    if flat.updated_early or flat.updating is not None:  # the masters are newer: comparing would show no write
        if moved or counted:
            raise _too_late(flat)
        return False
    flat.was_written |= bool(moved) or counted
    for i in moved:
        _restore(flat, i)
    held = not flat.master_is_slice and flat.has_other_views
    changed = bool(moved) or counted if flat.master_is_slice else _take_shard(flat)
    flat.record_versions()
    flat.may_be_written = held  # such a view can be written to at any time
    return changed


def _too_late(flat: FlatBuffer) -> StateError:
    return StateError(
        f"a parameter in the buffer of {flat.name!r} was written to after its update had begun. Early and delayed "
        "updates begin before the optimizer's step. Set sharding.overlap_step=False on the strategy, and leave "
        "offload.delay_after out."
    )


def _restore(flat: FlatBuffer, i: int) -> None:
    param, view = flat.params[i], flat.views[i]
    values = values_of(param)
    if values.shape != view.shape or values.dtype != view.dtype:
        raise StateError(
            f"{flat.layout.slots[i].name}.data was set to a {values.dtype} tensor of shape {tuple(values.shape)}, but "
            f"while the strategy holds the parameter it stays {view.dtype} of shape {tuple(view.shape)}. Change dtype "
            "and shape before the fit."
        )
    _detach_views(flat, i)
    view.copy_(values)
    with unnoticed():
        point(param, view)


def _detach_views(flat: FlatBuffer, i: int) -> None:
    """Give tensors that ``param.data`` returned memory of their own: they keep the old values, as in plain torch."""
    handed = [values for reference in flat.data_views.pop(i, ()) if (values := reference()) is not None]
    view = flat.views[i]
    for values in handed:
        if values.data_ptr() == view.data_ptr() and values.shape == view.shape:
            values.data = view.clone()


def _check_outdated(flat: FlatBuffer) -> None:
    for reference, version in flat.outdated_views:
        values = reference()
        if values is not None and version_of(values) != version:
            flat.outdated_views = []
            raise StateError(
                f"a view (p.data) of a parameter in the buffer of {flat.name!r} that was kept through a step was "
                "written to. At stage 3 and with offload it does not show the parameter any more. Read p.data again in "
                "every hook."
            )


def _take_viewed(flat: FlatBuffer) -> bool:
    """Take writes to a released buffer that user code has a view of."""
    assert flat.viewed_shard is not None
    now = flat.full[slice(*flat.stepped)]
    if not bool((bits(now) != bits(flat.viewed_shard)).any()):
        return False
    if flat.updated_early or flat.updating is not None:
        raise _too_late(flat)
    take_elements(flat, 0, now, flat.viewed_shard)
    flat.viewed_shard = now.clone()
    flat.was_written = True
    return True


def take_elements(flat: FlatBuffer, start: int, now: Tensor, before: Tensor) -> bool:
    """Copy elements that differ from ``before`` into this rank's masters and shard, from element ``start`` on.

    Returns:
        Whether any element differs.
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
    """Copy elements of ``full`` that differ from the shard into the masters, and into a shard of its own."""
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
    """View ``values`` as integers, so that a NaN is equal to itself and -0 is not 0."""
    return values.view(_BITS[values.element_size()])
