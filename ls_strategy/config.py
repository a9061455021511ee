"""Every option of the engine: frozen dataclasses, checked when they are made, standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ls_strategy.errors import ConfigError

ZeroStage = Literal[0, 1, 2, 3]
ReduceDtype = Literal["fp32", "compute"]


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Loss scale of the fp16 modes. The knobs and their defaults are DeepSpeed's (its ``fp16`` section)."""

    static: float | None = None
    """A constant scale. ``None``: the scale is dynamic and the other fields apply."""

    initial_power: int = 16
    """The first dynamic scale is ``2 ** initial_power``."""

    window: int = 1000
    """The scale doubles after this many steps in a row without an overflow."""

    hysteresis: int = 2
    """Overflows that are tolerated before the scale is halved; the step is skipped each time."""

    consecutive_hysteresis: bool = False
    """Refill the tolerance after every good step instead of only when the scale doubles."""

    min_scale: float = 1.0
    """The scale never falls below this; an overflow at this scale ends the run with an error."""

    def __post_init__(self) -> None:
        """Refuse values that cannot scale a loss."""
        if self.static is not None and not self.static > 0:
            raise ConfigError(
                f"loss_scale.static={self.static}: a loss scale must be > 0. Use None for a dynamic scale."
            )
        if self.window < 1 or self.hysteresis < 1 or not self.min_scale > 0:
            raise ConfigError(
                f"loss_scale window={self.window}, hysteresis={self.hysteresis}, min_scale={self.min_scale}: "
                "window and hysteresis must be at least 1 and min_scale above 0."
            )


@dataclass(frozen=True, kw_only=True)
class ZeROConfig:
    """What the engine needs to know beside the model and the optimizers."""

    stage: ZeroStage = 3
    """0 replicates everything, 1 shards optimizer states, 2 also gradients, 3 also parameters."""

    unit_classes: tuple[str, ...] = ()
    """Class names whose instances become units. Empty: the children of every ModuleList and Sequential."""

    min_unit_numel: int = 100_000
    """Blocks with fewer parameters join the root unit, which stays gathered during a step. Elements."""

    prefetch_units: int = 1
    """Stage 3: how many units are gathered ahead of the one that computes."""

    master_weights: bool = True
    """Keep fp32 master weights in the ``*-true`` 16-bit modes. False: the optimizer works in 16 bit."""

    reduce_dtype: ReduceDtype = "fp32"
    """NCCL: sum gradients over ranks in fp32, or in the dtype they were computed in. gloo always sums in fp32."""

    fp32_modules: tuple[str, ...] = ()
    """Class names of modules that stay in fp32 in the ``*-true`` 16-bit modes (a router, say).

    Their inputs are cast to fp32 and their outputs back. Batch norms always keep fp32 parameters and statistics.
    """

    def __post_init__(self) -> None:
        """Refuse values outside their sets."""
        if self.stage not in get_args(ZeroStage):
            raise ConfigError(
                f"stage={self.stage!r}: the ZeRO stages are 0 (plain data parallel), 1, 2 and 3. "
                "Offload and NVMe are separate options, not stages."
            )
        if self.reduce_dtype not in get_args(ReduceDtype):
            raise ConfigError(f"reduce_dtype={self.reduce_dtype!r}: use one of {get_args(ReduceDtype)}.")
        if self.prefetch_units < 0 or self.min_unit_numel < 0:
            raise ConfigError(
                f"prefetch_units={self.prefetch_units}, min_unit_numel={self.min_unit_numel}: neither may be negative."
            )
        for name in ("unit_classes", "fp32_modules"):
            if isinstance(getattr(self, name), str):
                raise ConfigError(f"{name}={getattr(self, name)!r}: give a list of class names, not one string.")
