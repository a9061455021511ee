"""The engine of a run: how it is built, and when it has to be rebuilt."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist
from torch.optim import Optimizer

from ls_strategy.checkpoint.full import StateDictHooks
from ls_strategy.engine import Engine
from ls_strategy.host.pytorch import TrainerFn, rank_zero_info
from ls_strategy.layout import TensorPart
from ls_strategy.lightning import guards, module_state
from ls_strategy.lightning._private import is_mock_optimizer, unwrap_optimizer
from ls_strategy.lightning.compiled import compile_parts
from ls_strategy.lightning.float8 import multiply_in_fp8
from ls_strategy.lightning.loop.plain import StepLoop
from ls_strategy.lightning.planning import NVME_PATH
from ls_strategy.lightning.readings import EngineStrategy
from ls_strategy.lightning.run_state import RunState
from ls_strategy.lightning.uneven import UnevenData

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from ls_strategy.lightning.checkpointing.resume import Resume

_NO_GRADIENTS = (
    "ZeROStrategy: after the fit p.grad is None, since no rank keeps full gradients. Until on_train_end it is that of "
    "DDP, and trainer.strategy.full_gradients() returns those of the last step also afterwards."
)

_said: set[str] = set()
"""Lines of the log that one process needs once."""


class Switch(Protocol):
    """Makes a part of a module compute in another way while ``on``: compiled, or in another format."""

    @property
    def on(self) -> bool:
        """Whether it does so now."""
        ...

    @on.setter
    def on(self, on: bool) -> None: ...

    def remove(self) -> None:
        """Make the part what it was, for good."""
        ...


class EngineSetup:
    """Builds and rebuilds the engine of a strategy."""

    def __init__(
        self, run: RunState, strategy: EngineStrategy, loop: StepLoop, uneven: UnevenData, resume: Resume
    ) -> None:
        self.state_dict_hooks: StateDictHooks | None = None
        """Make ``module.state_dict()`` return full tensors; None where every rank has them anyway."""
        self._run, self._strategy, self._loop, self._uneven, self._resume = run, strategy, loop, uneven, resume
        self._switches: list[Switch] = []
        """What the module computes in another way while a Trainer runs, until another engine adopts it."""

    # before it is built ---------------------------------------------------------------------------------------------

    def choose_nvme_path(self, trainer: pl.Trainer) -> None:
        """Set ``offload.nvme_path`` if something is stored on NVMe and no folder was given."""
        run, offload = self._run, self._run.config.offload
        if offload.nvme_path or not ("nvme" in offload.tiers or run.activations.needs_nvme):
            return
        named = os.environ.get(NVME_PATH)
        path = named or str(Path(trainer.default_root_dir) / "nvme")
        source = NVME_PATH if named else "default_root_dir; set offload.nvme_path to a folder on a local NVMe device"
        rank_zero_info(f"ZeROStrategy: states on NVMe are stored in {path} (from {source})")
        run.config = replace(run.config, offload=replace(offload, nvme_path=path))

    def check(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Refuse what cannot work, before anything is sharded."""
        mesh = self._run.parallel.mesh
        kinds = "" if mesh is None else mesh.shape.kinds
        guards.check_trainer(trainer, self._strategy.zero_precision(), kinds)
        self._uneven.prepare(trainer)
        self._loop.check(trainer, module)

    def place(self, module: pl.LightningModule) -> None:
        """Convert and move what the module holds besides parameters, in the order of DDPStrategy. Not collective."""
        guards.refuse_hidden_meta(module)
        self._strategy.zero_precision().convert_module(module)
        module_state.move(module, self._run.parallel.device)

    # build -----------------------------------------------------------------------------------------------------------

    def build(self, module: pl.LightningModule, parts: dict[int, TensorPart]) -> None:
        """Give the strategy a new engine. Collective.

        Args:
            module: the module to train or evaluate.
            parts: of the model-parallel parameters, by ``id(parameter)``.
        """
        run, parallel = self._run, self._run.parallel
        assert parallel.mesh is not None
        self.choose_nvme_path(module.trainer)
        self.state_dict_hooks = None
        for switch in self._switches:
            switch.remove()
        plugin, config = self._strategy.zero_precision(), run.config
        policy = plugin.asked(config.precision)
        self._switches = [
            *multiply_in_fp8(module, config.precision, policy, parallel.device, tensor=parallel.tensor_layers(module)),
            *compile_parts(module, config),  # before the engine's hooks, which stay outside
        ]
        optimizers = self._real_optimizers()
        engine = run.engine = Engine(
            module,
            optimizers,
            config=config,
            precision=policy,
            mesh=parallel.mesh,
            device=parallel.device,
            loss_scale=config.precision.loss_scale,
            parts=parts,
            share=parallel.share(module, optimizers),
        )
        parallel.balance_experts(module, engine.events.on_stepped)
        if engine.gatherer.releases or parts:
            self.state_dict_hooks = StateDictHooks(module, engine.units, engine.mesh)
            engine.on_detach.append(self.state_dict_hooks.remove)
            engine.raw_states = self.state_dict_hooks.disabled
        engine.on_detach += [switch.remove for switch in self._switches]
        rank_zero_info(f"ZeROStrategy(stage={config.stage}): {engine.describe()}")
        plugin.attach(engine)
        self._resume.weights_for(engine)

    def detach(self) -> None:
        """Give a module with full parameters back; if some are sharded or quantized, the engine stays attached.

        Collective, but not after an exception.
        """
        engine, module = self._run.engine, self._run.module
        trainer = None if module is None else module._trainer
        fitted = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        complete = False
        if engine is not None and trainer is not None and fitted and not trainer.interrupted:
            engine.state_offload.reload()
            complete = _complete_gradients(engine)
        self._loop.end_run()
        for switch in self._switches:
            switch.on = False
        if engine is None:
            return
        engine.state_offload.reload()
        engine.gradients.local = True  # no step follows; Trainers call zero_grad() before they validate
        engine.on_demand.thread = None
        engine.on_demand.state_dict_copies.training = False
        try:
            if engine.comm.world_size == 1 or dist.is_initialized():
                engine.wait()
                if self.state_dict_hooks is None:
                    engine.detach()
        finally:
            engine.offload.rest()
            if fitted:
                engine.hooks.ended = True
                for flat in engine.flats:
                    flat.local.end_run(keep=complete)

    def _real_optimizers(self) -> list[Optimizer]:
        return [unwrap_optimizer(o) for o in self._strategy.optimizers if not is_mock_optimizer(o)]

    def follow_optimizers(self) -> Engine:
        """Return the engine; rebuild it first if user code has changed optimizers or their groups. Collective then.

        Raises:
            PlanError: no engine can follow the change.
        """
        run = self._run
        engine = run.engine or run.require_engine()
        optimizers = self._real_optimizers()
        if engine.follows(optimizers):
            return engine
        module = run.require_module()
        engine.check_change(optimizers)
        self._strategy.wait_for_saves()
        self.build(module, {})
        run.require_engine().go_on_from(engine)
        self.arm(module.trainer, module, fitting=True)
        return run.require_engine()

    def arm(self, trainer: pl.Trainer, module: pl.LightningModule, *, fitting: bool) -> None:
        """Set what the engine may do before user code could notice, and start the handling of activations."""
        run, engine = self._run, self._run.require_engine()
        for switch in self._switches:
            switch.on = True
        overlap = run.config.sharding.overlap_step
        engine.gatherer.overlap = fitting and bool(overlap)
        automatic = fitting and not guards.steps_by_itself(trainer, module, engine)
        # A read of `p.grad` is noticed; a read of the gradients of model-parallel pieces is not.
        engine.private_gradients = automatic and not (
            engine.mesh.shape.kinds and guards.has_hooks_after_backward(trainer, module)
        )
        engine.repeats_backward = fitting and not module.automatic_optimization
        engine.early_step = (
            engine.private_gradients
            and not guards.has_hooks_before_step(trainer, module)
            and bool(overlap)
            and not trainer.gradient_clip_val
            and self._loop.updates_early
        )
        guards.watch_generate(module, engine)
        if not fitting:
            return
        guards.watch_methods(module, engine)
        run.activations.apply(module, engine)


def _complete_gradients(engine: Engine) -> bool:
    """Let stage 0 leave what DDP leaves in ``p.grad``: averages, clipped. Return whether it does. Collective."""
    if engine.policy.optimizer or engine.mesh.shape.kinds:
        if _NO_GRADIENTS not in _said:
            _said.add(_NO_GRADIENTS)
            rank_zero_info(_NO_GRADIENTS)
        return False
    for param in (p for flat in engine.flats for p in flat.params):
        _ = param.grad  # a read averages what was not sent, and applies what was left to the update
    return True
