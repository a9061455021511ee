"""The values that a flat buffer starts from: in memory on rank 0, or in files of which every rank reads its own shard.

=====================  ==========================================  =================================================
value                  parameters are sharded                      every rank has the full parameters
=====================  ==========================================  =================================================
all in memory          rank 0 broadcasts the buffer                rank 0 broadcasts the buffer
lazy (in a file)       every rank reads its shard                  every rank reads one shard, and they are gathered
others next to those   rank 0 broadcasts each, one after another   rank 0 broadcasts each, one after another
=====================  ==========================================  =================================================
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ls_strategy import device as dev
from ls_strategy.meta_init.lazy import LazyTensor, parts_of
from ls_strategy.tiers.link import host_empty
from ls_strategy.zero.flat.flat_states import FlatStates

_HOST = torch.device("cpu")


def full_values(flat: FlatStates, values: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the full buffer in master precision, ``(numel,)``, with the same values on all ranks. Collective."""
    buffer = _zeros(flat, flat.layout.numel, device)
    if any(isinstance(v, LazyTensor) for v in values):
        lo, hi = flat.owned
        _read(flat, values, lo, buffer[lo:hi])
        flat.comm.all_gather(buffer, flat.name, flat.layout.sizes).wait()
        for view, value in zip(flat.split(buffer), values, strict=True):
            if not isinstance(value, LazyTensor):
                view.copy_(value.detach())
                wire = view.contiguous()
                flat.comm.broadcast_(wire.view(-1))
                if wire.data_ptr() != view.data_ptr():
                    view.copy_(wire)
        return buffer
    for view, value in zip(flat.split(buffer), values, strict=True):
        view.copy_(value.detach())
    flat.comm.broadcast_(buffer)
    return buffer


def shard_values(flat: FlatStates, values: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return this rank's shard of the buffer in master precision, ``(stepped,)``. Collective.

    If any value is lazy, no rank has more than its shard and one of the other values in memory, and a shard that is
    stored off the device is made in host memory.
    """
    lo, hi = flat.stepped
    if not any(isinstance(v, LazyTensor) for v in values):
        return full_values(flat, values, device)[lo:hi].clone()
    shard = _zeros(flat, hi - lo, _HOST if flat.steps_in_background else device)
    _read(flat, values, lo, shard)
    pieces = flat.layout.pieces(lo, hi)
    for value, piece in zip(values, pieces, strict=True):
        if isinstance(value, LazyTensor):
            continue
        wire = value.detach().to(device=device, dtype=flat.master_dtype, copy=True).contiguous().view(-1)
        flat.comm.broadcast_(wire)
        shard[piece.start : piece.stop].copy_(wire[piece.param_start : piece.param_start + piece.numel])
    return shard


def _read(flat: FlatStates, values: Sequence[Tensor], start: int, out: Tensor) -> None:
    """Fill ``out``, the buffer's elements from ``start`` on, with lazy values. Not collective."""
    for value, piece in zip(values, flat.layout.pieces(start, start + out.numel()), strict=True):
        if isinstance(value, LazyTensor):
            shift = piece.start - piece.param_start
            for at, part in parts_of(value, piece.param_start, piece.param_start + piece.numel):
                out[at + shift : at + shift + part.numel()].copy_(part)


def _zeros(flat: FlatStates, numel: int, device: torch.device) -> Tensor:
    if dev.is_host(device) and flat.store.tiers:
        return host_empty(numel, flat.master_dtype, device).zero_()
    return torch.zeros(numel, dtype=flat.master_dtype, device=device)
