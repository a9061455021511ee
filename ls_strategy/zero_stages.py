"""The ZeRO stages: which model states each of them shards.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC'20,
arXiv:1910.02054: section 5 (the stages), section 7 (traffic), figure 1 (bytes).
"""

from __future__ import annotations

from dataclasses import dataclass

from ls_strategy.config import ZeROConfig, ZeroStage


@dataclass(frozen=True)
class StagePolicy:
    """Set of the model states that are sharded over the data-parallel ranks."""

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


def policy_of(config: ZeROConfig, ranks: int) -> StagePolicy:
    """Return what ``ranks`` data-parallel ranks shard with these options.

    One rank shards nothing, so it runs as stage 0, unless the stage decides what offload leaves on the device, or what
    updates in backward free. With virtual ranks every gradient is sent, so that its additions can be in one order, and
    stages 0 and 1 run as stage 2.
    """
    if config.parallel.virtual_ranks is not None:
        return POLICIES[3 if POLICIES[config.stage].parameters else 2]
    return POLICIES[config.stage if ranks > 1 or config.offload.any_state or config.updates_in_backward else 0]
