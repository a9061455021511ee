"""What the engine of a fit should look like (``stage="auto"``), and why a step did not fit into memory.

A side product knows: see `Planner`, and `ls_strategy.extensions`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch.optim import Optimizer

from ls_strategy.config import ZeROConfig
from ls_strategy.distributed.comm import Comm
from ls_strategy.extensions import find, require
from ls_strategy.host.pytorch import rank_zero_info
from ls_strategy.lightning import guards
from ls_strategy.lightning.activation_memory import ActivationMemory
from ls_strategy.lightning.precision import ZeROPrecision
from ls_strategy.lightning.run_state import RunState
from ls_strategy.precision import PrecisionPolicy

if TYPE_CHECKING:
    import lightning.pytorch as pl

NVME_PATH = "LS_STRATEGY_NVME_PATH"
"""Environment variable with the folder for states on NVMe, if the options name none."""


@dataclass(frozen=True)
class Fit:
    """What a Trainer is about to train, for a `Planner`."""

    trainer: pl.Trainer
    module: pl.LightningModule
    config: ZeROConfig
    precision: PrecisionPolicy
    updates_early: bool
    """No user code may read gradients between backward and step."""


class Planner(Protocol):
    """Chooses the configuration of a fit, and explains why a step did not fit into memory.

    One object for a strategy. ``planner`` of `ls_strategy.extensions` is the class, which takes no arguments.
    """

    def begin(
        self, optimizers: Sequence[Optimizer], comm: Comm, device: torch.device, ranks_per_node: int, nvme_path: str
    ) -> None:
        """Record what is free before a fit, and its optimizers, whose groups an engine will change. Not collective."""
        ...

    def choose(self, ask: Callable[[], Fit], comm: Comm, device: torch.device) -> tuple[ZeROConfig, str]:
        """Return the fastest configuration that fits, and the reason. Collective. Called after `begin`.

        Raises:
            PlanError: nothing fits, or there is no data to plan with.
        """
        ...

    def explain_memory(self, error: BaseException, ask: Callable[[], Fit]) -> None:
        """Raise an error that says what takes how much memory, and which options take less, after a failed allocation.

        Return if ``error`` is none.
        """
        ...


class Planning:
    """Plans the fits of a strategy."""

    def __init__(self, run: RunState, precision: Callable[[], ZeROPrecision], *, auto: bool) -> None:
        """Plan nothing yet.

        Args:
            run: gets the configuration that is chosen.
            precision: returns the plugin.
            auto: whether a configuration is to be chosen, once; until then stage 3 builds on the meta device.
        """
        self._run, self._precision, self._auto = run, precision, auto
        self._planner: Planner | None = None

    @property
    def planned_step_s(self) -> float | None:
        """Predicted seconds of an optimizer step; None if nothing was planned, or the planner has none."""
        return getattr(self._planner, "planned_step_s", None)

    def plan(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Record the memory that is free before the fit, for error messages. With ``stage="auto"`` choose how to train.

        Collective with ``stage="auto"``.
        """
        run, comm = self._run, self._run.comm
        if self._planner is None:
            planner = require("planner", "stage='auto'") if self._auto else find("planner")
            self._planner = None if planner is None else planner()
        if self._planner is None:
            return
        path, device = run.config.offload.nvme_path or os.environ.get(NVME_PATH, ""), run.parallel.device
        per_node = min(comm.node_size or comm.world_size, comm.world_size)
        self._planner.begin(trainer.optimizers, comm, device, per_node, path)
        if not self._auto:
            return
        config, reason = self._planner.choose(lambda: self._fit(trainer, module), comm, device)
        rank_zero_info(f"ZeROStrategy(stage='auto'): {reason}")
        self._auto = False
        run.config, run.activations = config, ActivationMemory(config.activations)

    def _fit(self, trainer: pl.Trainer, module: pl.LightningModule) -> Fit:
        steps_by_itself = guards.steps_by_itself(trainer, module, self._run.engine)
        reads_gradients = steps_by_itself or guards.has_hooks_before_step(trainer, module)
        config = self._run.config
        dtypes = self._precision().asked(config.precision)
        return Fit(trainer, module, config, dtypes, updates_early=not reads_gradients)

    def explain_memory(self, error: BaseException) -> None:
        """Raise an error that says what takes how much memory, and which options take less, after a failed allocation.

        Return if ``error`` is none. Call it where that is handled.
        """
        if self._planner is None:
            return

        def ask() -> Fit:
            module = self._run.require_module()
            return self._fit(module.trainer, module)

        self._planner.explain_memory(error, ask)
