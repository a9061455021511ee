"""Dtypes of parameters, gradients and masters, and the loss scale of the fp16 modes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ls_strategy.config import LossScaleConfig, ReduceDtype
from ls_strategy.errors import ConfigError, StateError

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")


@dataclass(frozen=True)
class PrecisionPolicy:
    """What the words of ``Trainer(precision=...)`` mean for every tensor of the model state."""

    name: str
    compute: torch.dtype
    """Dtype of the parameters that the forward reads."""

    master: torch.dtype
    """Dtype of the weights that the optimizer updates."""

    autocast: torch.dtype | None
    """Dtype of ``torch.autocast`` around the steps, for the ``*-mixed`` modes."""

    loss_scaling: bool
    """Whether the loss is scaled so that fp16 gradients do not vanish."""

    reduce_in_fp32: bool = True
    """Sum gradients over ranks in fp32, also when they were computed in 16 bit."""

    @property
    def cast(self) -> torch.dtype | None:
        """Dtype that parameters, buffers and inputs are cast to; None: they stay as they are."""
        return None if self.compute == torch.float32 else self.compute

    @property
    def rounds(self) -> bool:
        """Whether weights are rounded to 16 bit for the forward."""
        return self.compute.itemsize == 2


def resolve_precision(name: str, *, master_weights: bool = True, reduce_dtype: ReduceDtype = "fp32") -> PrecisionPolicy:
    """Policy for a Lightning precision string.

    ====================  =========  =======================  ========  ==========
    ``Trainer.precision`` parameter  master                   autocast  loss scale
    ====================  =========  =======================  ========  ==========
    ``32-true``           fp32       the parameter itself     no        no
    ``bf16-mixed``        fp32       the parameter itself     bf16      no
    ``16-mixed``          fp32       the parameter itself     fp16      yes
    ``bf16-true``         bf16       fp32 (switchable)        no        no
    ``16-true``           fp16       fp32 (switchable)        no        yes
    ``64-true``           fp64       the parameter itself     no        no
    ====================  =========  =======================  ========  ==========

    Raises:
        ConfigError: ``name`` is none of the six.
    """
    low = {"bf16": torch.bfloat16, "16": torch.float16}
    kind, _, mode = name.partition("-")
    in_fp32 = reduce_dtype == "fp32"
    if name == "32-true":
        return PrecisionPolicy(name, torch.float32, torch.float32, None, False, in_fp32)
    if name == "64-true":
        return PrecisionPolicy(name, torch.float64, torch.float64, None, False, in_fp32)
    if name in PRECISIONS and mode == "mixed":
        return PrecisionPolicy(name, torch.float32, torch.float32, low[kind], kind == "16", in_fp32)
    if name in PRECISIONS:
        master = torch.float32 if master_weights else low[kind]
        return PrecisionPolicy(name, low[kind], master, None, kind == "16", in_fp32)
    raise ConfigError(f"precision={name!r}: ZeROStrategy supports {', '.join(PRECISIONS)}. Choose one of these.")


class LossScaler:
    """Static or dynamic loss scale; the same decisions on every rank, because every rank is told the same overflow.

    The dynamic rule has the knobs of DeepSpeed's ``DynamicLossScaler``: an overflow uses up one unit of hysteresis, and
    halves the scale when none is left; ``window`` good steps in a row double it (counted as ``torch.amp.GradScaler``
    does; DeepSpeed doubles one step later).
    """

    def __init__(self, config: LossScaleConfig) -> None:
        """Start at the configured scale."""
        self.config = config
        self.scale = float(2**config.initial_power) if config.static is None else float(config.static)
        self.hysteresis_left = config.hysteresis
        self.good_steps = 0

    def update(self, overflow: bool) -> None:
        """Account for one optimizer step.

        Raises:
            StateError: overflow at the smallest allowed scale: the gradients are infinite or NaN by themselves.
        """
        if self.config.static is not None:
            return
        if overflow:
            self._on_overflow()
            return
        self.good_steps += 1
        if self.config.consecutive_hysteresis:
            self.hysteresis_left = self.config.hysteresis
        if self.good_steps % self.config.window == 0:
            self.hysteresis_left = self.config.hysteresis
            self.scale *= 2.0

    def _on_overflow(self) -> None:
        self.good_steps = 0
        if self.hysteresis_left > 1:
            self.hysteresis_left -= 1
            return
        if self.scale <= self.config.min_scale:
            raise StateError(
                f"gradients overflow although the loss scale is already at its minimum ({self.scale:g}): the loss or "
                "the gradients are infinite or NaN by themselves. Look for the first step at which the logged loss is "
                "not finite, lower the learning rate, clip gradients, or train with precision='bf16-true'."
            )
        self.scale = max(self.scale / 2.0, self.config.min_scale)

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs to go on as if nothing had happened."""
        return {"scale": self.scale, "hysteresis_left": self.hysteresis_left, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore; also reads the state of ``torch.amp.GradScaler``, so that a run started under DDP goes on here."""
        self.scale = float(state["scale"])
        if "_growth_tracker" in state:  # torch.amp.GradScaler: good steps since the last change, no hysteresis
            self.good_steps = int(state["_growth_tracker"])
            self.hysteresis_left = self.config.hysteresis
        else:
            self.good_steps = int(state["good_steps"])
            self.hysteresis_left = int(state["hysteresis_left"])
