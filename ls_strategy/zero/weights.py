"""How much of the model states each rank holds, where ranks have unequal memory: by numbers, or by memory."""

from __future__ import annotations

import os
import socket
from collections import Counter
from fractions import Fraction
from typing import Literal

import torch

from ls_strategy.distributed.comm import Comm
from ls_strategy.distributed.mesh import MeshShape
from ls_strategy.errors import PlanError

_STEP = 1 << 28
"""Bytes to which memory is rounded, so that two devices of one kind count as the same."""


def refusal(weights: tuple[float, ...] | Literal["auto"] | None, shape: MeshShape) -> PlanError | None:
    """Why shards cannot be cut by ``weights`` on these ranks, or None if they can. Not collective."""
    if weights is None:
        return None
    divided = [axis for axis in ("tensor", "pipeline", "expert") if getattr(shape, axis) > 1]
    if divided:
        return PlanError(
            f"shard_weights={weights!r} with {divided[0]}_parallel_size={getattr(shape, divided[0])}: weights are of "
            "ranks that all hold the same layers. Leave shard_weights out, or divide the model by ZeRO alone."
        )
    if weights != "auto" and len(weights) != shape.world_size:
        return PlanError(
            f"shard_weights={weights!r} has {len(weights)} weights, but there are {shape.world_size} ranks. Give one "
            'positive number per rank, or "auto" for weights by memory.'
        )
    return None


def shard_weights(
    weights: tuple[float, ...] | Literal["auto"] | None, comm: Comm, device: torch.device
) -> tuple[Fraction, ...]:
    """Weights of the ranks' shards; none where all are the same. With ``"auto"`` collective: one exchange.

    Args:
        weights: as given; ``"auto"``: by the memory of each rank's device, or its share of its host's.
        comm: ranks over which states are divided.
        device: where this rank's buffers live.
    """
    if weights is None or comm.world_size == 1:
        return ()
    if weights != "auto":
        return tuple(Fraction(w) for w in weights)
    host = "" if device.type == "cuda" else socket.gethostname()
    found = comm.exchange_objects((host, memory_bytes(device)))
    ranks_of = Counter(name for name, _ in found)
    return tuple(Fraction(max(size // (ranks_of[name] if name else 1) // _STEP, 1)) for name, size in found)


def memory_bytes(device: torch.device) -> int:
    """Total memory of a GPU, or of the host."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
