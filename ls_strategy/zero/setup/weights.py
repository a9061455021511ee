"""Weights of the ranks' shards, for ranks with unequal memory: given as numbers, or derived from memory."""

from __future__ import annotations

import os
import socket
from collections import Counter
from fractions import Fraction
from typing import Literal

import torch

from ls_strategy import device as dev
from ls_strategy.distributed.comm import Comm
from ls_strategy.distributed.mesh import MeshShape
from ls_strategy.errors import PlanError

_STEP = 1 << 28
"""Bytes to which memory is rounded, so that two devices of one kind have the same weight."""


def refusal(weights: tuple[float, ...] | Literal["auto"] | None, shape: MeshShape) -> PlanError | None:
    """Return why ``weights`` cannot be used on these ranks, or None if they can. Not collective."""
    if weights is None:
        return None
    axes = [axis for axis in ("tensor", "pipeline", "expert") if getattr(shape, axis) > 1]
    if axes:
        return PlanError(
            f"Got sharding.rank_weights={weights!r} with parallel.{axes[0]}={getattr(shape, axes[0])}, but weights "
            "require ranks that all hold the same layers. Leave rank_weights out, or shard the model by ZeRO alone."
        )
    if weights != "auto" and len(weights) != shape.world_size:
        return PlanError(
            f"Got sharding.rank_weights={weights!r} with {len(weights)} weights, but there are {shape.world_size} "
            'ranks. Set one positive number per rank, or "auto" for weights by memory.'
        )
    return None


def rank_weights(
    weights: tuple[float, ...] | Literal["auto"] | None, comm: Comm, device: torch.device
) -> tuple[Fraction, ...]:
    """Return the weights of the ranks' shards; empty if all are the same. Collective with ``"auto"``: one exchange.

    Args:
        weights: one per rank; ``"auto"``: by the memory of each rank's GPU, or its part of the host's memory.
        comm: ranks over which states are sharded.
        device: device of this rank's buffers.
    """
    if weights is None or comm.world_size == 1:
        return ()
    if weights != "auto":
        return tuple(Fraction(w) for w in weights)
    host = "" if dev.is_accelerator(device) else socket.gethostname()
    found = comm.exchange_objects((host, memory_bytes(device)))
    ranks_of = Counter(name for name, _ in found)
    return tuple(Fraction(max(size // (ranks_of[name] if name else 1) // _STEP, 1)) for name, size in found)


def memory_bytes(device: torch.device) -> int:
    """Return the total memory of a GPU, or of the host."""
    if dev.is_accelerator(device):
        return dev.total_bytes(device)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
