"""Strategies from the lightest to the heaviest: what each adds costs more time than what the one before adds.

=====================  ============================================================================================
what is added          what it costs
=====================  ============================================================================================
stages 1, 2            nothing; stage 2 reduces in every micro-batch
stage 3                half as much traffic again, beside the computation
selective recompute    everything but matrix products and attention a second time
full recompute         a third of the computation again
offload to the host    traffic over the bus, and updates by the host
offload to a drive     reading and writing all states in every step
=====================  ============================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ls_strategy.config import (
    ActivationOffloadConfig,
    OffloadConfig,
    RecomputeConfig,
    TierName,
    ZeROConfig,
    ZeroStage,
)

_CPU, _NVME = OffloadConfig(tier="cpu"), OffloadConfig(tier="nvme")


@dataclass(frozen=True)
class Candidate:
    """One way to run."""

    stage: ZeroStage
    offload_optimizer: OffloadConfig | None = None
    offload_param: OffloadConfig | None = None
    recompute: RecomputeConfig | None = None
    activation_offload: ActivationOffloadConfig | None = None

    @property
    def strategy(self) -> str:
        """Its alias: ``zero2_offload``."""
        tiers: set[TierName] = {o.tier for o in (self.offload_optimizer, self.offload_param) if o is not None}
        if not tiers:
            return f"zero{self.stage}"
        tier = "nvme" if "nvme" in tiers else "offload"
        part = "_optimizer" if self.stage == 3 and self.offload_param is None else ""
        return f"zero{self.stage}_{tier}{part}"

    @property
    def name(self) -> str:
        """With what is done about activations."""
        words = [self.strategy]
        if self.recompute is not None:
            words.append(f"{self.recompute.policy} recompute")
        if self.activation_offload is not None:
            words.append(f"activations on {'NVMe' if self.activation_offload.tier == 'nvme' else 'the host'}")
        return ", ".join(words)

    def config(self, base: ZeROConfig) -> ZeROConfig:
        """``base``, with what this chooses."""
        return replace(
            base,
            stage=self.stage,
            offload_optimizer=self.offload_optimizer,
            offload_param=self.offload_param,
            offload_gradient=None,
            delayed_update_after=None,
        )

    def arguments(self) -> dict[str, Any]:
        """What to give `ZeROStrategy` for it."""
        chosen: dict[str, Any] = {"stage": self.stage}
        for name, option in (("offload_optimizer", self.offload_optimizer), ("offload_param", self.offload_param)):
            if option is not None:
                chosen[name] = option.tier
        if self.recompute is not None:
            chosen["activation_checkpointing"] = self.recompute.policy
        if self.activation_offload is not None:
            chosen["activation_offload"] = self.activation_offload.tier
        return chosen


def ladder(
    *, ranks: int, recompute: RecomputeConfig | None = None, recomputable: bool = True, drive: bool = False
) -> Iterator[Candidate]:
    """All candidates, the lightest first.

    Args:
        ranks: over which states are divided. One rank has nothing to divide.
        recompute: what the user has chosen; then every candidate does that.
        recomputable: there are blocks to recompute.
        drive: there is an NVMe drive.
    """
    if recompute is not None:
        choices: list[RecomputeConfig | None] = [recompute]
    else:
        choices = [None, *([RecomputeConfig(policy="selective"), RecomputeConfig()] if recomputable else [])]
    stages: tuple[ZeroStage, ...] = (0, 1, 2, 3) if ranks > 1 else (0,)
    for chosen in choices:
        for stage in stages:
            yield Candidate(stage, recompute=chosen)
    sharded: tuple[ZeroStage, ...] = (2, 3) if ranks > 1 else (2,)
    for chosen in choices[:1] if len(choices) == 1 else (choices[0], choices[-1]):
        for stage in sharded:
            yield Candidate(stage, _CPU, recompute=chosen)
        yield Candidate(3, _CPU, _CPU, recompute=chosen)
    yield Candidate(3, _CPU, _CPU, choices[-1], ActivationOffloadConfig())
    if drive:
        yield Candidate(3, _NVME, None, choices[-1])
        yield Candidate(3, _NVME, _NVME, choices[-1])
        yield Candidate(3, _NVME, _NVME, choices[-1], ActivationOffloadConfig())
