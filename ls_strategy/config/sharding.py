"""``sharding``: which parameters are gathered and reduced together, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from ls_strategy.checked import above, at_least, check_fields
from ls_strategy.config.group import Group
from ls_strategy.errors import ConfigError
from ls_strategy.registry import EntryOf

SentAs: TypeAlias = Literal["int8", "int4"] | Annotated[str, EntryOf("wire formats")]


@dataclass(frozen=True, kw_only=True)
class ShardingConfig(Group):
    """Units, the modules whose parameters are gathered, reduced and updated together, and the sizes of their shards."""

    block_classes: tuple[str, ...] = ()
    """Classes of modules (``["Block"]``) that become units. Empty: the children of every ModuleList and Sequential."""

    min_unit_numel: int = 100_000
    """Blocks with fewer elements join the root unit, which stays gathered during a step at stage 3."""

    replicated_modules: tuple[str, ...] = ()
    """Stage 3: names of modules (``["teacher"]``) whose frozen parameters every rank holds in full, so their forwards
    send nothing. Parameters in an optimizer stay sharded."""

    prefetch_units: int = 1
    """Stage 3: units gathered ahead of the one that computes."""

    overlap_step: bool | Literal["backward"] = True
    """Overlap gathering new parameters (stages 1 and 2) and updating offloaded states with backward or the next
    forward. ``backward`` also updates states on the device during backward, unit by unit, which frees the gradients
    unless they are clipped or read. Same numbers."""

    rank_weights: tuple[float, ...] | Literal["auto"] | None = None
    """For unequal memory: ``[2, 1]`` stores two thirds of what the stage shards on rank 0; ``auto`` weights ranks by
    memory. Same numbers. None: equal shards."""

    shard_size: int | Literal["node"] | None = None
    """Ranks that shard states together; every such group holds a replica (HSDP, MiCS). Gathers stay in a group, with
    ``node`` in a node, for more memory per rank. Same numbers. None: all ranks."""

    hpz: int | Literal["node"] | None = None
    """Stage 3: ranks that share a second copy of the blocks' parameters (ZeRO++'s hpZ), with ``node`` those of a node.
    Backward gathers from the copy, which costs memory, and sends nothing between nodes. Same numbers. None: no copy."""

    quantized_gathers: SentAs | None = None
    """Stage 3: format in which parameters are gathered (ZeRO++'s qwZ). Forward and backward compute with rounded
    weights; masters and checkpoints stay exact. `strategy.gather_error()` measures the rounding. None: exact."""

    quantized_gradients: SentAs | None = None
    """Stages 1 to 3: format in which gradients are sent (ZeRO++'s qgZ), inside each node first, then their sums between
    nodes, always added in fp32. `strategy.gradient_error()` measures the rounding. None: exact."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            group="sharding",
            min_unit_numel=at_least(0),
            prefetch_units=at_least(0),
            rank_weights=above(0),
            shard_size=at_least(1),
            hpz=at_least(2),
        )
        if self.rank_weights == ():
            raise ConfigError(
                "Got sharding.rank_weights=[], but it must hold one number per rank. Set [2, 1], for example."
            )
