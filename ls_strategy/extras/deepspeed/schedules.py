"""DeepSpeed's five learning-rate schedules with identical values, as torch schedulers.

A schedule sets a rate when it is created and after every optimizer step, so the first step uses the first rate. Steps
count from -1 (no step yet), as DeepSpeed's ``last_batch_iteration`` does. States are DeepSpeed's
``{"last_batch_iteration": n}``, so that its checkpoints can be resumed.

With the step count ``i``, warmup steps ``W`` and total steps ``T``:

==============  =====================================================================================
WarmupLR        ``min + (max - min) * g``; ``g = log(i + 1) / log(W)`` or ``i / W``, then 1
WarmupDecayLR   the same, then ``g = (T - i) / (T - W)`` down to 0
WarmupCosineLR  rate times ``r0 + (1 - r0) * g``, then half a cosine down to ``cos_min_ratio``
LRRangeTest     ``min * (1 + rate * (i + 1) / step_size)``, optionally in stairs (Smith, 2018, arXiv:1803.09820)
OneCycle        one cycle between two rates, the first beta inversely, then decay (Smith, 2018)
==============  =====================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from ls_strategy.errors import ConfigError

PerGroup = float | Sequence[float]  # one value for all parameter groups, or one per group


class Schedule(LRScheduler):
    """Base class. Call ``step()`` once after every optimizer step."""

    def __init__(
        self, optimizer: Optimizer, last_batch_iteration: int = -1
    ) -> None:  # no super().__init__: it would step
        """Store the optimizer. Subclasses then call `start`."""
        self.optimizer = optimizer
        self.last_batch_iteration: int = last_batch_iteration
        # Returns how many steps an fp16 overflow has skipped. As in DeepSpeed, they do not advance the schedule.
        self.skipped_steps: Callable[[], int] | None = None
        self._skipped_before = 0
        self._last_lr: list[Any] = []

    def start(self) -> None:
        """Set the first rate."""
        if self.last_batch_iteration == -1:
            self.set_rates(self.get_lr())

    @override
    def get_last_lr(self) -> list[Any]:
        return self._last_lr

    @override
    def step(self, epoch: int | None = None) -> None:
        """Advance by one step, or to step ``epoch``."""
        if epoch is not None:
            self.last_batch_iteration = epoch
        elif self._was_skipped():
            return
        else:
            self.last_batch_iteration += 1
        self.set_rates(self.get_lr())

    def _was_skipped(self) -> bool:
        before = self._skipped_before
        self._skipped_before = before if self.skipped_steps is None else self.skipped_steps()
        return self._skipped_before > before

    def set_rates(self, rates: Sequence[Any]) -> None:
        """Write the rates into the optimizer's groups. A rate that is a tensor is updated in place."""
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of DeepSpeed, and set its rate."""
        self.last_batch_iteration = state_dict["last_batch_iteration"]
        if self.skipped_steps is not None:
            self._skipped_before = self.skipped_steps()
        if self.last_batch_iteration >= 0:
            self.set_rates(self.get_lr())

    def per_group(self, value: PerGroup, name: str) -> list[float]:
        """Return one value per parameter group.

        Raises:
            ConfigError: A list has the wrong length.
        """
        groups = len(self.optimizer.param_groups)
        if not isinstance(value, Sequence):
            return [value] * groups
        if len(value) != groups:
            raise ConfigError(
                f"Got {name}={list(value)}, but the optimizer has {groups} parameter groups. Give one value per group."
            )
        return list(value)


def _positive(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"Got {name}={value!r}. Set a number of steps, an integer of at least 1.")
    return value


class _Warmup:
    """``g`` in the table above: 0 to 1 over the first ``steps`` steps."""

    def __init__(self, steps: int, kind: str) -> None:
        self.steps = max(2, _positive(steps, "warmup_num_steps"))
        if kind not in ("log", "linear"):
            raise ConfigError(f"Got warmup_type={kind!r}. Use 'log' or 'linear'.")
        self._log = kind == "log"

    def __call__(self, iteration: int) -> float:
        if self._log:
            return (1.0 / math.log(self.steps)) * math.log(iteration + 1)
        return iteration / self.steps


class WarmupLR(Schedule):
    """Warmup from ``warmup_min_lr`` to ``warmup_max_lr``, then a constant rate."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        """With ``warmup_max_lr=None``, use the rates of the optimizer's groups."""
        super().__init__(optimizer, last_batch_iteration)
        top = [group["lr"] for group in optimizer.param_groups] if warmup_max_lr is None else warmup_max_lr
        self.min_lrs = self.per_group(warmup_min_lr, "warmup_min_lr")
        self.max_lrs = self.per_group(top, "warmup_max_lr")
        self.warmup = _Warmup(warmup_num_steps, warmup_type)
        self.start()

    @override
    def get_lr(self) -> list[float]:  # type: ignore[override]
        if self.last_batch_iteration < 0:
            return self.min_lrs
        warm = self.last_batch_iteration < self.warmup.steps
        gamma = self.warmup(self.last_batch_iteration) if warm else self.after_warmup()
        return [low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def after_warmup(self) -> float:
        """Return ``g`` after the warmup."""
        return 1.0


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, followed by a linear decay to ``warmup_min_lr`` at step ``total_num_steps``."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _positive(total_num_steps, "total_num_steps")
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    @override
    def after_warmup(self) -> float:
        left = float(self.total_num_steps - self.last_batch_iteration)
        return max(0.0, left / float(max(1.0, self.total_num_steps - self.warmup.steps)))


class WarmupCosineLR(Schedule):
    """The groups' rates times a ratio: from ``warmup_min_ratio`` to 1, then half a cosine to ``cos_min_ratio``."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.total_num_steps = _positive(total_num_steps, "total_num_steps")
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.warmup = _Warmup(warmup_num_steps, warmup_type)
        self.full_lrs: list[Any] = [
            g["lr"].clone() if isinstance(g["lr"], Tensor) else g["lr"] for g in optimizer.param_groups
        ]
        self.start()

    @override
    def get_lr(self) -> list[float]:  # type: ignore[override]
        ratio = self.ratio() if self.last_batch_iteration >= 0 else 0.0
        return [rate * ratio for rate in self.full_lrs]

    def ratio(self) -> float:
        """Return the factor on the groups' rates."""
        iteration, steps = self.last_batch_iteration, self.warmup.steps
        if iteration < steps:
            return self.warmup_min_ratio + self.warmup(iteration) * (1.0 - self.warmup_min_ratio)
        progress = min(1.0, (iteration - steps + 1) / max(1, self.total_num_steps - steps))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)


class LRRangeTest(Schedule):
    """A rate that grows without limit, to find the largest one that trains."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lrs = self.per_group(lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = _positive(lr_range_test_step_size, "lr_range_test_step_size")
        self.step_rate, self.staircase = lr_range_test_step_rate, lr_range_test_staircase
        self.start()

    @override
    def get_lr(self) -> list[float]:  # type: ignore[override]
        interval = float(self.last_batch_iteration + 1) / self.step_size
        growth = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [rate * growth for rate in self.min_lrs]


class OneCycle(Schedule):
    """One cycle from ``cycle_min_lr`` to ``cycle_max_lr`` and back, then decay. ``betas[0]`` moves inversely.

    As in DeepSpeed, ``cycle_momentum`` also sets ``betas[1]`` to 0.99. Optimizers without betas keep their momentum.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - DeepSpeed's arguments, in its order
        self,
        optimizer: Optimizer,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        if cycle_first_step_size <= 0 or second < 0:
            raise ConfigError(
                f"Got cycle_first_step_size={cycle_first_step_size} and cycle_second_step_size={second}. Set the first "
                "above 0, and the second to 0 or more."
            )
        self.first_size, self.second_size = float(cycle_first_step_size), float(second)
        self.total_size = self.first_size + self.second_size
        self.step_ratio = self.first_size / self.total_size
        self.first_stairs = cycle_first_stair_count
        self.second_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.decay_step_size = decay_step_size
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.min_lrs = self.per_group(cycle_min_lr, "cycle_min_lr")
        self.max_lrs = self.per_group(cycle_max_lr, "cycle_max_lr")
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        if self.cycle_momentum:
            self.min_moms = self.per_group(cycle_min_mom, "cycle_min_mom")
            self.max_moms = self.per_group(cycle_max_mom, "cycle_max_mom")
        self.start()

    @override
    def start(self) -> None:
        super().start()
        if self.cycle_momentum and self.last_batch_iteration == -1:
            self._set_betas(self.min_moms)

    @override
    def set_rates(self, rates: Sequence[Any]) -> None:
        super().set_rates(rates)
        if self.cycle_momentum and self.last_batch_iteration >= 0:
            self._set_betas(self.momenta())

    def _set_betas(self, momenta: Sequence[float]) -> None:
        for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
            group["betas"] = (momentum, 0.99)

    @override
    def get_lr(self) -> list[float]:  # type: ignore[override]
        if self.last_batch_iteration < self.total_size:
            scale = self._scale()
            return [low + (high - low) * scale for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        decay = self._decay(self.decay_lr_rate)
        return [rate / decay for rate in self.min_lrs]

    def momenta(self) -> list[float]:
        """Return ``betas[0]`` of every group."""
        if self.last_batch_iteration < self.total_size:
            scale = self._scale()
            return [high - (high - low) * scale for low, high in zip(self.min_moms, self.max_moms, strict=True)]
        decay = self._decay(self.decay_mom_rate)
        return [momentum * decay for momentum in self.max_moms]

    def _decay(self, rate: float) -> float:
        if math.isclose(self.decay_step_size, 0) or math.isclose(rate, 0):
            return 1.0
        return 1 + rate * ((self.last_batch_iteration - self.total_size + 1) / self.decay_step_size)

    def _scale(self) -> float:
        """Return 0 at both ends of the cycle and 1 at its top."""
        at = self.last_batch_iteration + 1
        x = 1.0 + at / self.total_size - math.floor(1 + at / self.total_size)
        rising = x <= self.step_ratio
        stairs = self.first_stairs if rising else self.second_stairs
        if stairs <= 0:
            return x / self.step_ratio if rising else (x - 1) / (self.step_ratio - 1)
        within = at % self.total_size  # integers, so that rounding does not skip the top stair
        if within <= self.first_size:
            return math.floor(within * stairs / self.first_size) / stairs
        return math.floor((self.total_size - within) * stairs / self.second_size) / stairs


SCHEDULES: dict[str, type[Schedule]] = {
    kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)
}
"""By the name in ``scheduler.type``."""
