"""The QK clip of `ls_strategy.Muon` on shards: every rank scales its ranges of the query and key weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from ls_strategy.errors import PlanError
from ls_strategy.optimizers.muon import Muon
from ls_strategy.optimizers.qk_clip import Scaling
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.parameters import unnoticed


def clip_logits(optimizer: Optimizer, flats: Sequence[FlatBuffer]) -> None:
    """Scale the weights of heads with too large logits. Collective, if `Muon.clip_logits` was called.

    Args:
        optimizer: has stepped.
        flats: its buffers.

    Raises:
        PlanError: a rank has other heads than those whose weights it has, or copies of keys of other ranks.
    """
    clip = optimizer.logit_clip if isinstance(optimizer, Muon) else None
    if clip is None or not flats:
        return
    with unnoticed(), torch.no_grad():
        place = {id(p): (flat, i) for flat in flats for i, p in enumerate(flat.params)}
        for each in clip.scalings(lambda p: id(p) in place, flats[0].comm.agree):
            _scale(*place[id(each.param)], each)


def _scale(flat: FlatBuffer, index: int, scaling: Scaling) -> None:
    slot, piece = flat.layout.slots[index], flat.pieces[index]
    if slot.part is not None and slot.part.copies > 1:
        raise PlanError(
            f"Got copies of {slot.name!r} on several tensor-parallel ranks, whose heads have other logits. Set "
            "parallel.tensor to at most the number of key heads, or do not call Muon.clip_logits."
        )
    width = slot.numel // slot.shape[0]
    first, last = scaling.first * width, (scaling.first + len(scaling.factors)) * width
    start, stop = max(first, piece.param_start), min(last, piece.param_start + piece.numel)
    if start >= stop:
        return
    factors = scaling.factors.repeat_interleave(width)[start - first : stop - first]
    at = piece.start + start - piece.param_start
    flat.wait_updated()
    flat.before_change()
    values = flat.master_range(at, at + stop - start)
    values.mul_(factors.to(values.device, values.dtype))
    flat.store.write("master", at, values)
