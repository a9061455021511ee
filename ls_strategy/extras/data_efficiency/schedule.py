"""An integer that grows during training: linearly, with a root, or in steps.

The formulas are those of DeepSpeed's ``fixed_linear``, ``fixed_root`` and ``fixed_discrete``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from typing_extensions import override

from ls_strategy.errors import ConfigError
from ls_strategy.host.pytorch import Callback, pl, rank_zero_info, rank_zero_warn

Kind = Literal["linear", "root", "discrete"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Values by position, which is a number of steps or of tokens.

    >>> line = Schedule(values=(64, 256), until=(100,), multiple_of=8)
    >>> [line.value(at) for at in (1, 25, 50, 99, 100, 1000)]
    [64, 112, 160, 248, 256, 256]
    >>> stairs = Schedule(values=(64, 128, 256), until=(10, 20), kind="discrete")
    >>> [stairs.value(at) for at in (1, 10, 11, 20, 21)]
    [64, 64, 128, 128, 256]
    """

    values: tuple[int, ...]  # ``linear`` and ``root``: the first and the last value. ``discrete``: all values in order.
    # ``linear`` and ``root``: position from which the last value applies. ``discrete``: last position of each value but
    # the last.
    until: tuple[int, ...]
    kind: Kind = "linear"
    # ``linear`` and ``root``: values in between are multiples of this, rounded down but not below the first value.
    multiple_of: int = 8
    root_degree: float = 2.0  # ``root``: 2 is the square root, which grows faster at first; 1 is linear
    name: str = "values"  # name of the option that sets ``values``, for error messages

    def __post_init__(self) -> None:
        for field in ("values", "until"):
            object.__setattr__(self, field, tuple(getattr(self, field)))  # LightningCLI gives lists
        given = f"{self.name}={list(self.values)}, until={list(self.until)}, schedule={self.kind!r}"
        if self.kind not in get_args(Kind):
            raise ConfigError(f"Got {given}. Use one of the schedules {', '.join(get_args(Kind))}.")
        if not self.values or min((*self.values, *self.until, self.multiple_of)) < 1 or not self.root_degree > 0:
            raise ConfigError(
                f"Got {given}, multiple_of={self.multiple_of}, root_degree={self.root_degree}. Set all numbers above 0."
            )
        if self.kind == "discrete":
            if len(self.values) != len(self.until) + 1:
                raise ConfigError(f"Got {given}. Give one number fewer in until than in {self.name}.")
            if any(a >= b for a, b in zip(self.until, self.until[1:], strict=False)):
                raise ConfigError(f"Got {given}. The numbers in until must ascend.")
        elif len(self.values) != 2 or len(self.until) != 1 or self.values[0] > self.values[1]:
            raise ConfigError(
                f"Got {given}. Give the first and the last of {self.name} in ascending order, and one number in until: "
                f"{self.name}: [64, 1024], until: [10000]."
            )

    def value(self, at: int) -> int:
        """Return the value at a position, which counts from 0."""
        if self.kind == "discrete":
            return next((v for v, end in zip(self.values, self.until, strict=False) if at <= end), self.values[-1])
        first, last = self.values
        if at >= self.until[0]:
            return last
        part = (float(at) / self.until[0]) ** (1.0 / (self.root_degree if self.kind == "root" else 1.0))
        value = math.floor(part * (last - first) + first)
        value -= value % self.multiple_of
        return min(max(value, -(-first // self.multiple_of) * self.multiple_of), last)

    def possible(self) -> Iterator[int]:
        """Yield every value that can occur."""
        if self.kind == "discrete":
            yield from self.values
            return
        first, last = self.values
        yield from range(-(-first // self.multiple_of) * self.multiple_of, last, self.multiple_of)
        yield last


# --- base class of callbacks with a value that follows a `Schedule` ---------------------------------------------------


class ScheduledCallback(Callback):
    """Keeps one value for all micro-batches of an optimizer step, in logs and checkpoints. Steps count from 1."""

    tag = "value"

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.value: int | None = None  # value at the current step; None before the first
        self._step = 0

    def position(self) -> int:
        """Return the current position in the schedule: the step."""
        return self._step

    def current(self, trainer: pl.Trainer) -> int:
        """Return the value for the next batch, which is the same for all batches of a step. Not collective."""
        step = trainer.global_step + 1
        if self.value is None or step != self._step:
            self._step = step
            value = self.schedule.value(self.position())
            if self.value is None or (value != self.value and value == self.schedule.values[-1]):
                rank_zero_info(f"{type(self).__name__}: {self.tag} is {value} from step {step} on")
            self.value = value
        return self.value

    def _stop(self) -> None:
        raise NotImplementedError

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    def log_value(self, module: pl.LightningModule) -> None:
        """Log the value, from a hook around a training batch."""
        if self.value is not None:
            module.log(self.tag, float(self.value), on_step=True, on_epoch=False)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "value": self.value}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the saved step. Warn if the schedule has changed."""
        self._step, self.value = state_dict["step"], None
        before = state_dict["value"]
        now = self.schedule.value(self.position())
        if before is not None and before != now:
            rank_zero_warn(
                f"{type(self).__name__}: {self.tag} was {before} at step {self._step} of the checkpoint's run, but "
                f"this schedule gives {now}. The run continues with this schedule. Pass the old one to keep the "
                "previous values."
            )
