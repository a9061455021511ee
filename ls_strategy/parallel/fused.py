"""Matrices that make query, key and value at once: in which order their rows follow each other.

========  ========================  ===================================================================
layout    rows                      of
========  ========================  ===================================================================
sections  q q q q | k k k k | v...  GPT-2, MPT, GPT: sections, each divided over the heads
per head  q k v | q k v | ...       GPT-NeoX, BLOOM, Persimmon, Falcon-RW: all of one head, head by head
grouped   q q k v | q q k v | ...   Falcon-40B, -180B: all of one key head, group by group
shared    q q q q | k | v           Falcon-7B, GPTBigCode (multi query): every rank has the one key head
========  ========================  ===================================================================
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import nn

from ls_strategy.errors import PlanError
from ls_strategy.parallel import families
from ls_strategy.parallel.heads import Heads, head_size, refusal, width_out
from ls_strategy.parallel.styles import Column

Layout: TypeAlias = Literal["sections", "per head", "grouped", "shared"]


def fused_heads(name: str, attention: nn.Module, layer_name: str, layer: nn.Module, size: int) -> tuple[Heads, Column]:
    """Heads of an attention, and the style of the layer that makes query, key and value at once.

    Args:
        name: of the attention.
        attention: the module that reshapes what the layer makes.
        layer_name: of the layer.
        layer: it.
        size: ranks.

    Raises:
        PlanError: the layout is not known, or the heads do not divide.
    """
    layout = _layout(attention)
    if layout is None:
        raise refusal(
            layer_name,
            layer,
            "makes query, key and value in one matrix of a layout that is not known",
            f'{{"{layer_name}": Column(sections=(-1, -1, -1), granule=<head size>), ...}} (if they follow one another)',
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
            f"module {layer_name!r} ({type(attention).__name__}) makes {heads.key} groups of query heads with one key "
            f"and value head each, which stay together and do not divide by parallel.tensor={size}. Use a size "
            f"that shards {heads.key}."
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
