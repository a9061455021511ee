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
    ActivationsConfig,
    RecomputeConfig,
    TierConfig,
    TierName,
    ZeROConfig,
    ZeroStage,
)

_CPU, _NVME = TierConfig(tier="cpu"), TierConfig(tier="nvme")


@dataclass(frozen=True)
class Candidate:
    """One way to run."""

    stage: ZeroStage
    optimizer: TierConfig | None = None
    """Where master weights and the optimizer's states are stored; None: on the device."""

    parameters: TierConfig | None = None
    recompute: RecomputeConfig | None = None
    activation_offload: ActivationOffloadConfig | None = None

    @property
    def strategy(self) -> str:
        """Its alias: ``zero2_offload``."""
        tiers: set[TierName] = {o.tier for o in (self.optimizer, self.parameters) if o is not None}
        if not tiers:
            return f"zero{self.stage}"
        tier = "nvme" if "nvme" in tiers else "offload"
        part = "_optimizer" if self.stage == 3 and self.parameters is None else ""
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
        weights = base.sharding.rank_weights if self.stage else None
        return replace(
            base,
            stage=self.stage,
            sharding=replace(base.sharding, rank_weights=weights),
            offload=replace(
                base.offload, optimizer=self.optimizer, parameters=self.parameters, gradients=None, delay_after=None
            ),
            activations=ActivationsConfig(checkpointing=self.recompute, offload=self.activation_offload),
        )

    def arguments(self) -> dict[str, Any]:
        """What to give `ZeROStrategy` for it."""
        chosen: dict[str, Any] = {"stage": self.stage}
        tiers = {"optimizer": self.optimizer, "parameters": self.parameters}
        offload = {name: option.tier for name, option in tiers.items() if option is not None}
        if offload:
            everything = len(offload) == (2 if self.stage == 3 else 1) and len(set(offload.values())) == 1
            chosen["offload"] = offload["optimizer"] if everything else offload
        if self.activation_offload is not None:
            activations: dict[str, Any] = {"offload": self.activation_offload.tier}
            if self.recompute is not None:
                activations = {"checkpointing": self.recompute.policy, **activations}
            chosen["activations"] = activations
        elif self.recompute is not None:
            chosen["activations"] = self.recompute.policy
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
        choices = [None]
        if recomputable:
            choices += [RecomputeConfig(policy="selective"), RecomputeConfig(policy="full")]
    stages: tuple[ZeroStage, ...] = (0, 1, 2, 3) if ranks > 1 else (0,)
    for chosen in choices:
        for stage in stages:
            yield Candidate(stage, recompute=chosen)
    sharded: tuple[ZeroStage, ...] = (2, 3) if ranks > 1 else (2,)
    for chosen in choices[:1] if len(choices) == 1 else (choices[0], choices[-1]):
        for stage in sharded:
            yield Candidate(stage, _CPU, recompute=chosen)
        yield Candidate(3, _CPU, _CPU, recompute=chosen)
    yield Candidate(3, _CPU, _CPU, choices[-1], ActivationOffloadConfig(tier="cpu"))
    if drive:
        yield Candidate(3, _NVME, None, choices[-1])
        yield Candidate(3, _NVME, _NVME, choices[-1])
        yield Candidate(3, _NVME, _NVME, choices[-1], ActivationOffloadConfig(tier="cpu"))
