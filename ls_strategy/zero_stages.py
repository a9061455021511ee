"""What each ZeRO stage shards.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC'20,
arXiv:1910.02054: section 5 (the stages), section 7 (traffic), figure 1 (bytes).
"""

from __future__ import annotations

from dataclasses import dataclass

from ls_strategy.config import ZeroStage


@dataclass(frozen=True)
class StagePolicy:
    """Which of the three kinds of model state are sharded over the data-parallel ranks."""

    optimizer: bool
    gradients: bool
    parameters: bool


REPLICATED = StagePolicy(optimizer=False, gradients=False, parameters=False)

POLICIES: dict[ZeroStage, StagePolicy] = {
    0: REPLICATED,
    1: StagePolicy(optimizer=True, gradients=False, parameters=False),
    2: StagePolicy(optimizer=True, gradients=True, parameters=False),
    3: StagePolicy(optimizer=True, gradients=True, parameters=True),
}
