"""What a run will do, resolved before anything is moved: its buffers, bytes per rank, and elements sent.

Pure integers over shapes; the engine builds exactly what the plan says, and tests hold it against counted bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ls_strategy.layout import FlatLayout
from ls_strategy.zero_stages import StagePolicy

FROZEN = -1
"""Optimizer number of parameters that no optimizer updates."""


@dataclass(frozen=True)
class ParamFacts:
    """What a plan needs to know of one parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Dtype that the forward reads."""

    optimizer: int = FROZEN
    group: int = 0


@dataclass(frozen=True)
class FlatPlan:
    """One flat buffer: parameters of a unit with the same optimizer and dtype."""

    layout: FlatLayout
    dtype: torch.dtype
    master_dtype: torch.dtype
    optimizer: int

    @property
    def trainable(self) -> bool:
        """Whether an optimizer updates it."""
        return self.optimizer != FROZEN


@dataclass(frozen=True)
class UnitPlan:
    """One unit."""

    name: str
    is_root: bool
    flats: tuple[FlatPlan, ...]

    @property
    def numel(self) -> int:
        """Parameters, without padding."""
        return sum(f.layout.param_numel for f in self.flats)

    @property
    def padded_numel(self) -> int:
        """Elements of all buffers, padding included."""
        return sum(f.layout.numel for f in self.flats)

    @property
    def trainable_padded_numel(self) -> int:
        """Elements of the buffers that have gradients, padding included."""
        return sum(f.layout.numel for f in self.flats if f.trainable)


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before the first collective of training."""

    policy: StagePolicy
    world_size: int
    units: tuple[UnitPlan, ...]

    @property
    def numel(self) -> int:
        """Parameters of the model, shared ones once."""
        return sum(u.numel for u in self.units)

    def elements_sent(self, micro_batches: int = 1) -> int:
        """Elements that one rank sends in one optimizer step, padding included, agreements of a few bytes not.

        ZeRO section 7, less what stage 3 need not gather again: root units stay from their first use until the step,
        and the unit whose backward comes first stays from forward to backward.
        """
        trainable = sum(u.trainable_padded_numel for u in self.units)
        if not self.policy.parameters:
            volume = trainable * (1 + (micro_batches if self.policy.gradients else 1))
        else:
            blocks = [u.padded_numel for u in self.units if not u.is_root]
            roots = sum(u.padded_numel for u in self.units if u.is_root)
            again = 2 * sum(blocks) - (blocks[-1] if blocks else 0)
            volume = roots + micro_batches * (again + trainable)
        return volume * (self.world_size - 1) // self.world_size

    def state_bytes(self) -> dict[str, int]:
        """Bytes of model state on one rank between two steps, by kind, with AdamW's two moments. Padding included.

        ``gradients`` are the fp32 averages, and for stages 0 and 1 this rank's own gradients in the parameters' dtype
        (in fp32 once they are accumulated over micro-batches; stage 0 averages in place).
        """
        result: dict[str, int] = {"parameters": 0, "masters": 0, "gradients": 0, "optimizer": 0}
        for flat in (f for u in self.units for f in u.flats):
            whole, shard = flat.layout.numel, flat.layout.shard
            stepped = shard if self.policy.optimizer else whole
            if not self.policy.parameters:
                result["parameters"] += whole * flat.dtype.itemsize
            if self.policy.parameters or (flat.trainable and flat.master_dtype != flat.dtype):
                result["masters"] += stepped * flat.master_dtype.itemsize
            if flat.trainable:
                result["optimizer"] += 2 * stepped * flat.master_dtype.itemsize
                result["gradients"] += stepped * 4
                if self.policy.optimizer and not self.policy.gradients:
                    result["gradients"] += whole * flat.dtype.itemsize
        return result

    def describe(self) -> str:
        """The plan as a table, for the log."""
        mib = 1 << 20
        sharded = [k for k in ("optimizer", "gradients", "parameters") if getattr(self.policy, k)]
        lines = [
            f"{self.numel:,} parameters in {len(self.units)} units over {self.world_size} ranks; "
            f"sharded: {', '.join(sharded) or 'nothing'}",
        ]
        runs: list[tuple[str, str, int, bool, int]] = []
        for unit in self.units:
            if runs and runs[-1][2] == unit.numel and runs[-1][3] == unit.is_root:
                first, _, numel, root, count = runs[-1]
                runs[-1] = (first, unit.name, numel, root, count + 1)
            else:
                runs.append((unit.name, unit.name, unit.numel, unit.is_root, 1))
        for first, last, numel, root, count in runs:
            name = first if count == 1 else f"{first} ... {last}"
            times = f"{count} x " if count > 1 else ""
            lines.append(f"  {name:<40} {times}{numel:,} parameters{', gathered for the whole step' if root else ''}")
        states = self.state_bytes()
        lines.append(
            "  per rank: " + ", ".join(f"{k} {v / mib:,.1f} MiB" for k, v in states.items())
            + f", together {sum(states.values()) / mib:,.1f} MiB"
        )  # fmt: skip
        lines.append(f"  sent per step: {self.elements_sent():,} elements")
        return "\n".join(lines)


def resolve_plan(
    units: Iterable[tuple[str, bool, Sequence[ParamFacts]]],
    *,
    policy: StagePolicy,
    world_size: int,
    master_dtype: torch.dtype,
    compute_dtype: torch.dtype,
) -> Plan:
    """Lay out every unit's buffers.

    Args:
        units: name, whether it is a root unit, and its parameters, in order of registration.
        policy: what is sharded.
        world_size: data-parallel ranks.
        master_dtype: of the weights the optimizer updates, for parameters in ``compute_dtype``; others are their own.
        compute_dtype: of the parameters that the forward reads, as a rule.
    """
    plans: list[UnitPlan] = []
    for name, is_root, params in units:
        classes: defaultdict[tuple[int, torch.dtype], list[ParamFacts]] = defaultdict(list)
        for p in params:
            classes[p.optimizer, p.dtype].append(p)
        flats: list[FlatPlan] = []
        for (optimizer, dtype), members in classes.items():
            # Groups side by side: decay and no-decay make two runs per unit instead of one per parameter.
            members.sort(key=lambda p: p.group)
            layout = FlatLayout.pack(((p.name, p.shape) for p in members), world_size)
            own = optimizer == FROZEN or dtype != compute_dtype
            flats.append(FlatPlan(layout, dtype, dtype if own else master_dtype, optimizer))
        plans.append(UnitPlan(name, is_root, tuple(flats)))
    return Plan(policy, world_size, tuple(plans))
