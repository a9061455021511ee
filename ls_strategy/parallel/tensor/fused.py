"""Layouts of fused matrices that compute query, key and value at once.

========  ========================  ===========================================================================
layout    order of the rows         models
========  ========================  ===========================================================================
sections  q q q q | k k k k | v...  GPT-2, MPT, GPT: three sections, each sharded by heads
per head  q k v | q k v | ...       GPT-NeoX, BLOOM, Persimmon, Falcon-RW: head by head
grouped   q q k v | q q k v | ...   Falcon-40B, -180B: one group of query heads per key head, group by group
shared    q q q q | k | v           Falcon-7B, GPTBigCode (multi-query): every rank holds the single key head
========  ========================  ===========================================================================
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import nn

from ls_strategy.errors import PlanError
from ls_strategy.parallel.styles import Column
from ls_strategy.parallel.tensor import families
from ls_strategy.parallel.tensor.heads import Heads, head_size, refusal, width_out

Layout: TypeAlias = Literal["sections", "per head", "grouped", "shared"]


def fused_heads(name: str, attention: nn.Module, layer_name: str, layer: nn.Module, size: int) -> tuple[Heads, Column]:
    """Return the heads of an attention, and the style of its fused layer on ``size`` ranks.

    Raises:
        PlanError: The layout is unknown, or the heads cannot be sharded over the ranks.
    """
    layout = _layout(attention)
    if layout is None:
        raise refusal(
            layer_name,
            layer,
            "computes query, key and value by one matrix of unknown layout",
            f'{{"{layer_name}": Column(sections=(-1, -1, -1), granule=<head size>), ...}} (if all queries come first, '
            "then all keys, then all values)",
        )
    width = width_out(layer)
    if layout in ("sections", "per head"):
        heads = Heads.of(name, attention, width // 3, width // 3)
        heads.check(name, attention, size)
        granule = heads.size if layout == "sections" else 3 * heads.size
        return heads, Column(sections=(-1, -1, -1) if layout == "sections" else (), granule=granule)
    key = (head_size(attention) or 0) * (1 if layout == "shared" else _groups(attention))
    heads = Heads.of(name, attention, width - 2 * key, key)
    heads.check(name, attention, size)
    if layout == "shared":
        return heads, Column(sections=(-1, key, key), granule=heads.size, copies=(1, size, size))
    if heads.key % size:
        raise PlanError(
            f"module {layer_name!r} ({type(attention).__name__}) has {heads.key} groups of query heads with one key "
            f"and value head each. Groups stay together, and their number is not divisible by parallel.tensor={size}. "
            f"Use a size that divides {heads.key}."
        )
    return heads, Column(granule=(heads.query // heads.key + 2) * heads.size)


def _layout(attention: nn.Module) -> Layout | None:
    cls = type(attention)
    if cls.__name__ in families.FUSED_BY_FLAGS:
        if getattr(attention, "new_decoder_architecture", False):
            return "grouped"
        return "shared" if getattr(attention, "multi_query", False) else "per head"
    if cls.__name__ in families.FUSED_PER_HEAD:
        return "per head"
    known = {cls.__name__, f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}"}
    return "sections" if known & families.FUSED_SECTIONS else None


def _groups(attention: nn.Module) -> int:
    return int(attention.num_kv_heads)  # type: ignore[arg-type]
