"""The loss scale: where it halves after an overflow, and where it grows again."""

from __future__ import annotations

from typing import Any

from ls_strategy.config import LossScaleConfig
from ls_strategy.errors import StateError


class LossScaler:
    """Static or dynamic loss scale. All ranks decide in the same way, because `update` gets the agreed overflow.

    The dynamic rule has the settings of DeepSpeed's ``DynamicLossScaler``. An overflow uses up one unit of hysteresis,
    and halves the scale if none is left. ``window`` good steps in a row double it (counted as in
    ``torch.amp.GradScaler``; DeepSpeed doubles one step later).
    """

    def __init__(self, config: LossScaleConfig, *, is_shown: bool = True) -> None:
        """Start at the configured scale.

        Args:
            config: the settings.
            is_shown: between backward and step, user code sees gradients times the scale, as under torch's
                ``GradScaler``. Otherwise, as in a precision without one.
        """
        self.config, self.is_shown = config, is_shown
        self.scale = float(2**config.initial_power) if config.static is None else float(config.static)
        self.hysteresis_left = config.hysteresis
        self.good_steps = 0

    def update(self, overflow: bool) -> None:
        """Account for one optimizer step.

        Raises:
            StateError: overflow at the minimum scale: the unscaled gradients are infinite or NaN.
        """
        if self.config.static is not None:
            return
        if not overflow:
            self.good_steps += 1
            if self.config.consecutive_hysteresis:
                self.hysteresis_left = self.config.hysteresis
            if self.good_steps % self.config.window == 0:
                self.hysteresis_left = self.config.hysteresis
                self.scale *= 2.0
            return
        self.good_steps = 0
        if self.hysteresis_left > 1:
            self.hysteresis_left -= 1
            return
        if self.scale <= self.config.min_scale:
            raise StateError(
                f"gradients overflow although the loss scale is already at its minimum ({self.scale:g}): the unscaled "
                "loss or gradients are infinite or NaN. Find the first step with a logged loss that is not finite, "
                "lower the learning rate, clip gradients, or train with precision='bf16-true'."
            )
        self.scale = max(self.scale / 2.0, self.config.min_scale)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that `load_state_dict` needs to continue."""
        return {"scale": self.scale, "hysteresis_left": self.hysteresis_left, "good_steps": self.good_steps}

    def grad_scaler_state(self) -> dict[str, Any]:
        """Return the state with which a ``torch.amp.GradScaler`` continues, under another strategy."""
        fixed = self.config.static is not None
        return {
            "scale": self.scale,
            "growth_factor": 1.0 if fixed else 2.0,
            "backoff_factor": 1.0 if fixed else 0.5,
            "growth_interval": self.config.window,
            "_growth_tracker": self.good_steps % self.config.window,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state, also that of a ``torch.amp.GradScaler``, so that a run from DDP can continue."""
        self.scale = float(state["scale"])
        if "_growth_tracker" in state:  # torch.amp.GradScaler: good steps since the last change, no hysteresis
            self.good_steps = int(state["_growth_tracker"])
            self.hysteresis_left = self.config.hysteresis
        else:
            self.good_steps = int(state["good_steps"])
            self.hysteresis_left = int(state["hysteresis_left"])
