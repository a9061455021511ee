"""``sharding``: which parameters are gathered and reduced together, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ls_strategy.checked import above, at_least, check_fields
from ls_strategy.config.group import Group
from ls_strategy.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ShardingConfig(Group):
    """Units of the model, which are gathered, reduced and updated together, and how ranks share their states."""

    block_classes: tuple[str, ...] = ()
    """Class names (``["Block"]``) of the modules that become units. Empty: the children of every ModuleList and
    Sequential."""

    min_unit_numel: int = 100_000
    """Blocks with fewer parameters join the root unit, which stays gathered during a step at stage 3. Elements."""

    prefetch_units: int = 1
    """Stage 3: how many units are gathered ahead of the one that computes."""

    overlap_step: bool = True
    """Gather new parameters (stages 1 and 2), and update offloaded states, while backward or the next forward runs.
    The numbers are the same either way."""

    rank_weights: tuple[float, ...] | Literal["auto"] | None = None
    """For ranks of unequal memory: ``[2, 1]`` gives rank 0 two thirds of what the stage shards; ``auto`` weighs by each
    rank's memory. The numbers are the same. None: all ranks hold the same."""

    def __post_init__(self) -> None:
        """Refuse values outside their sets."""
        check_fields(
            self,
            group="sharding",
            min_unit_numel=at_least(0),
            prefetch_units=at_least(0),
            rank_weights=above(0),
        )
        if self.rank_weights == ():
            raise ConfigError(
                "Got sharding.rank_weights=[], but it must hold one number per rank. Set [2, 1], for example."
            )
