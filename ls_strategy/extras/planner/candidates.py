"""Candidate strategies from the lightest to the heaviest: each addition costs more time than the one before.

=====================  ============================================================================================
addition               cost
=====================  ============================================================================================
stages 1, 2            none; stage 2 reduces in every micro-batch
stage 3                50 % more traffic, overlapped with computation
selective recompute    everything except matrix products and attention a second time
full recompute         a third more computation
offload to the host    traffic over the bus, and updates on the host
offload to NVMe        reads and writes of all states in every step
=====================  ============================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

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
    """One strategy."""

    stage: ZeroStage
    optimizer: TierConfig | None = None  # where master weights and optimizer states are stored; None: on the device
    parameters: TierConfig | None = None
    recompute: RecomputeConfig | None = None
    activation_offload: ActivationOffloadConfig | None = None
    by_node: Literal["shard_size", "hpz"] | None = None  # which option of ``sharding`` is ``node``

    @property
    def strategy(self) -> str:
        """Its alias, such as ``zero2_offload``."""
        tiers: set[TierName] = {o.tier for o in (self.optimizer, self.parameters) if o is not None}
        if not tiers:
            return f"zero{self.stage}"
        tier = "nvme" if "nvme" in tiers else "offload"
        part = "_optimizer" if self.stage == 3 and self.parameters is None else ""
        return f"zero{self.stage}_{tier}{part}"

    @property
    def name(self) -> str:
        """The alias and what is done with activations."""
        parts = [self.strategy]
        if self.by_node is not None:
            parts.append(f"{self.by_node}=node")
        if self.recompute is not None:
            parts.append(f"{self.recompute.policy} recompute")
        if self.activation_offload is not None:
            parts.append(f"activations on {'NVMe' if self.activation_offload.tier == 'nvme' else 'the host'}")
        return ", ".join(parts)

    def config(self, base: ZeROConfig) -> ZeROConfig:
        """Return ``base`` with this candidate's options."""
        sharding = replace(
            base.sharding,
            rank_weights=base.sharding.rank_weights if self.stage else None,
            hpz=base.sharding.hpz if self.stage == 3 else None,
            quantized_gathers=base.sharding.quantized_gathers if self.stage == 3 else None,
            quantized_gradients=base.sharding.quantized_gradients if self.stage else None,
        )
        if self.by_node is not None:
            sharding = replace(sharding, **{"shard_size": None, "hpz": None, self.by_node: "node"})
        return replace(
            base,
            stage=self.stage,
            sharding=sharding,
            offload=replace(
                base.offload, optimizer=self.optimizer, parameters=self.parameters, gradients=None, delay_after=None
            ),
            activations=ActivationsConfig(checkpointing=self.recompute, offload=self.activation_offload),
        )

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `ZeROStrategy` for this candidate."""
        chosen: dict[str, Any] = {"stage": self.stage}
        if self.by_node is not None:
            chosen["sharding"] = {self.by_node: "node"}
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
    *,
    ranks: int,
    recompute: RecomputeConfig | None = None,
    recomputable: bool = True,
    drive: bool = False,
    by_node: bool = False,
) -> Iterator[Candidate]:
    """Yield all candidates, the lightest first.

    Args:
        ranks: ranks that shard the states.
        recompute: the user's choice, which every candidate then uses.
        recomputable: whether there are blocks to recompute.
        drive: whether there is an NVMe device.
        by_node: whether to group ranks by node, too. Groups send less between nodes, for more memory.
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
            if by_node and stage:
                yield Candidate(stage, recompute=chosen, by_node="shard_size")
            if by_node and stage == 3:
                yield Candidate(stage, recompute=chosen, by_node="hpz")
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
