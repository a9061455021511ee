"""`ZeROFabricStrategy`: which call of a Fabric does what, and nothing else.

===============================  ===================================================================================
Fabric                           here
===============================  ===================================================================================
``launch``                       `Connection`: process groups and monitored collectives, as under a Trainer
``init_module``                  the meta device with ``empty_init=True`` at stage 3
``setup``, ``setup_module``      `Model`: `Engine` takes parameters and optimizers over
``backward``                     `Model.begin_backward`, autograd, `Model.end_backward`
``clip_gradients``               `Engine.clip_norm_`, `Engine.clip_value_`
``optimizer.step()``             `Model.step`
``save``, ``load``               `ls_strategy.fabric.checkpoints`
===============================  ===================================================================================
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Generator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ls_strategy import host
from ls_strategy.checked import at_least, checked
from ls_strategy.config import (
    ActivationsConfig,
    CheckpointConfig,
    OffloadConfig,
    OffloadTier,
    ParallelConfig,
    PrecisionConfig,
    ShardingConfig,
    ZeROConfig,
)
from ls_strategy.config.option_names import takes_groups
from ls_strategy.errors import ConfigError, PlanError, StateError
from ls_strategy.fabric.checkpoints import Checkpoints
from ls_strategy.fabric.model import Model, NoSync, Shell, not_set_up, unshelled
from ls_strategy.fabric.precision import ZeROFabricPrecision
from ls_strategy.host.fabric import Accelerator, CheckpointIO, ClusterEnvironment, DDPStrategy, Precision
from ls_strategy.host.pytorch import Accelerator as TrainerAccelerator
from ls_strategy.lightning import guards, module_state
from ls_strategy.lightning._private import forward_methods_of_fabric
from ls_strategy.lightning.connection import Connection
from ls_strategy.lightning.module_state import MetricsOnHost
from ls_strategy.lightning.parallel import ModelParallel
from ls_strategy.lightning.planning import NVME_PATH
from ls_strategy.pretrained.huggingface import without_memory
from ls_strategy.zero.step.stepper import MODES
from ls_strategy.zero_stages import POLICIES

_IN_TRAINER = (
    "Got ZeROFabricStrategy, the strategy of a Fabric, for a Trainer. Use ls_strategy.ZeROStrategy with the same "
    'options, or an alias such as Trainer(strategy="zero3").'
)


def _refuse_what_only_a_trainer_does(config: ZeROConfig) -> None:
    """Refuse options that would have no effect."""
    refused = {
        "precision.matmul='fp8'": (
            config.precision.float8 is not None,
            "which does not convert modules. Convert the module before fabric.setup(), with "
            "torchao.float8.convert_to_float8_training(module).",
        ),
        "sharding.overlap_step='backward'": (
            config.sharding.overlap_step == "backward",
            "the loop of which may read, change and clip gradients after backward, so no update can begin before "
            "optimizer.step(). Leave overlap_step out.",
        ),
        "checkpoint.background=True": (
            config.checkpoint.background,
            "the loop of which decides when fabric.save() writes, and goes on once the checkpoint is there. Leave "
            "background out.",
        ),
        "checkpoint.on_error='continue'": (
            config.checkpoint.on_error != "raise",
            "the loop of which can catch ls_strategy.CheckpointError itself, which fabric.save() raises on every rank. "
            "Leave on_error out.",
        ),
    }
    for option, (is_given, why) in refused.items():
        if is_given:
            raise ConfigError(f"Got {option} for a Fabric, {why}")


class ZeROFabricStrategy(Connection, DDPStrategy):  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]  (bases of Trainer and Fabric differ)
    """ZeRO data parallelism, stages 0 to 3, for a loop written with Lightning Fabric, on CPU (gloo) and GPU (NCCL).

    Losses are those of Fabric's DDP; model states are sharded over the ranks. ``Fabric(strategy="zero3", devices=N)``
    is this class with its defaults.

    Args:
        stage: 0 replicates everything, 1 shards optimizer states, 2 also gradients, 3 also parameters.
        sharding: which blocks are gathered and reduced together, how far ahead, and how much each rank stores.
        precision: master weights, the dtype of sums over ranks, modules in fp32, the loss scale, the format of moments.
            The precision of the computation is ``Fabric(precision=...)``.
        offload: ``"cpu"`` or ``"nvme"``: optimizer states, and at stage 3 the parameters, are stored and updated there.
        activations: ``"full"`` or ``"selective"``: blocks are recomputed in backward. ``ActivationsConfig(...)``
            stores activations in host memory or on NVMe.
        checkpoint: ``"sharded"`` (``fabric.save`` writes a folder, every rank its part), ``"file"``, or ``"auto"``: a
            file up to 2 GiB of weights and optimizer states, a folder beyond.
        accelerator: set by Fabric.
        parallel_devices: set by Fabric.
        cluster_environment: set by Fabric.
        checkpoint_io: how checkpoint files are written.
        precision_plugin: made from ``Fabric(precision=...)``; pass a `ZeROFabricPrecision` for fp16 on the CPU.
        process_group_backend: ``nccl`` on GPUs and ``gloo`` on CPUs unless given.
        timeout: of collectives; a rank that waits longer fails.
        explain_waits_after: seconds. When a rank has waited this long for others, every rank prints where it is. If no
            rank could ever continue (code that ran on one rank only), all of them fail. None disables it.
        start_method: how ranks are started when no launcher did: ``popen``, ``spawn``, ``fork``, ``forkserver``.
    """

    _precision_plugin = None
    """A Trainer reads this before it sets the accelerator, where it is refused."""

    @takes_groups
    @checked(("stage",), explain_waits_after=at_least(0.5))
    def __init__(
        self,
        stage: Literal[0, 1, 2, 3] = 3,
        *,
        sharding: ShardingConfig | Mapping[str, Any] = ShardingConfig(),
        precision: PrecisionConfig | Mapping[str, Any] = PrecisionConfig(),
        offload: OffloadTier | OffloadConfig | Mapping[str, Any] | None = OffloadConfig(),
        activations: Literal["full", "selective"] | ActivationsConfig | Mapping[str, Any] | None = ActivationsConfig(),
        checkpoint: Literal["auto", "sharded", "file"] | CheckpointConfig | Mapping[str, Any] = CheckpointConfig(),
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        explain_waits_after: float | None = 20.0,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        if stage == "auto":
            raise ConfigError(
                "Got stage='auto' for a Fabric, but planning a fit requires a Trainer, which knows the loop. Set the "
                'stage, for example strategy="zero3"; `ls-strategy plan` and docs/planning.md help to choose.'
            )
        self.config = ZeROConfig.of(
            stage,
            sharding=sharding,
            precision=precision,
            offload=offload,
            activations=activations,
            checkpoint=checkpoint,
        )
        """Every option, in groups."""
        _refuse_what_only_a_trainer_does(self.config)
        self.models: MutableMapping[nn.Module, Model] = {}
        """The modules that were set up, in this order."""
        self._connect_later(ModelParallel(ParallelConfig(), self.config.sharding), explain_waits_after)
        convert = self._convert_stateful_objects_in_state
        self._checkpoints = Checkpoints(self, self.parallel, self.model_of, convert)
        DDPStrategy.__init__(
            self,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=None if precision_plugin is None else ZeROFabricPrecision.from_plugin(precision_plugin),  # type: ignore[arg-type]
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._backward_sync_control = NoSync()  # pyright: ignore[reportAttributeAccessIssue]
        host.show_to_others(type(self))
        forward_methods_of_fabric(MODES)

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register nothing: `ls_strategy.autoload` registers the aliases, and DDP's must not point to this class."""

    # set-up ----------------------------------------------------------------------------------------------------------

    @property
    @override
    def accelerator(self) -> Any:
        return super().accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        """Take what Fabric sets first.

        Raises:
            ConfigError: it is a Fabric of the other package, or a Trainer.
        """
        if isinstance(accelerator, TrainerAccelerator):
            raise ConfigError(_IN_TRAINER)
        host.require_own(accelerator, Accelerator, _IN_TRAINER)
        DDPStrategy.accelerator.fset(self, accelerator)  # type: ignore[attr-defined]

    @property
    @override
    def precision(self) -> Precision:
        return self.zero_precision()

    @precision.setter
    def precision(self, precision: Precision | None) -> None:
        """Replace Fabric's plugin: with a plain ``GradScaler`` ranks could disagree on skipping a step."""
        self._precision = None if precision is None else ZeROFabricPrecision.from_plugin(precision)  # type: ignore[arg-type]

    @override
    def zero_precision(self) -> ZeROFabricPrecision:
        if self._precision is None:
            self._precision = ZeROFabricPrecision()
        assert isinstance(self._precision, ZeROFabricPrecision)
        return self._precision

    @override
    def _take_ranks(self) -> None:
        self._set_world_ranks()

    @override
    def _connected(self, comm: Any) -> None:
        self.models = weakref.WeakKeyDictionary()  # not before: ranks that are spawned get the strategy as a pickle

    @override
    def tensor_init_context(self) -> AbstractContextManager:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Create tensors on the device, in the precision's dtype."""
        stack = ExitStack()
        stack.enter_context(self.root_device)
        stack.enter_context(self.zero_precision().tensor_init_context())
        return stack

    @contextmanager
    @override
    def module_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Build a module: with ``empty_init=True`` at stage 3 on meta, so that no rank ever holds the full model.

        `from_pretrained` inside it then reads shards, and other modules are filled by their ``reset_parameters``.
        Without ``empty_init``, weights of stage 3 are created on the host, and the device gets shards of them.
        """
        partial_model = POLICIES[self.config.stage].parameters
        if partial_model and empty_init:
            building = without_memory(self.root_device, reports=self.is_global_zero, draws=False)
            with guards.refuse_loading_into_meta(), building, MetricsOnHost():
                yield
            return
        with ExitStack() as stack:
            stack.enter_context(DDPStrategy.module_init_context(self, empty_init=empty_init))
            if partial_model or self.config.offload.any_state:
                stack.enter_context(torch.device("cpu"))
            stack.enter_context(self._reading_together())
            yield

    @override
    def module_to_device(self, module: nn.Module) -> None:
        """Move a module; of one that is being set up, what it holds besides parameters."""
        move = module_state.move if self.zero_precision().sets_up(module) else nn.Module.to
        move(module, self.root_device)

    @override
    def setup_module_and_optimizers(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        return self._set_up(module, optimizers), optimizers, scheduler

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._set_up(module, [])

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Give an optimizer to the module that was set up before it. Collective.

        Raises:
            PlanError: its parameters are not those of one module.
        """
        model = next((model for model in self.models.values() if model.owns(optimizer)), None)
        if model is None:
            raise not_set_up(optimizer)
        self._check_scaling(model)
        model.add(optimizer)
        return optimizer

    def _set_up(self, module: nn.Module, optimizers: list[Optimizer]) -> Shell:
        wanted = "nvme" in (*self.config.offload.tiers, getattr(self.config.activations.stored, "tier", None))
        if wanted and not self.config.offload.nvme_path:
            path = os.environ.get(NVME_PATH) or str(Path.cwd() / "nvme")
            self.config = replace(self.config, offload=replace(self.config.offload, nvme_path=path))
        if optimizers:
            self._check_scaling(None)
        model = Model(self.config, self.parallel, self.zero_precision(), module, optimizers)
        self.models[module] = model
        return Shell(module, model)

    def _check_scaling(self, model: Model | None) -> None:
        """Refuse a second module that trains under a loss scale, which is one per module here."""
        others = [other for other in self.models.values() if other.trains and other is not model]
        if self.zero_precision().policy.loss_scaling and others:
            raise PlanError(
                f"Got a second module to train with precision={self.zero_precision().precision}, but each has its own "
                "loss scale, and one backward can have one. Set precision='bf16-mixed' or 'bf16-true', or put the "
                "modules into one, such as an nn.ModuleDict, and set that up with all optimizers."
            )

    def model_of(self, part: nn.Module | Optimizer) -> Model | None:
        """Return what was set up for a module, or for the module of an optimizer. None if nothing was."""
        if isinstance(part, nn.Module):
            return self.models.get(unshelled(part))
        return next((model for model in self.models.values() if model.index_of(part) is not None), None)

    def _require(self, optimizer: Optimizer) -> tuple[Model, int]:
        model = self.model_of(optimizer)
        index = None if model is None else model.index_of(optimizer)
        if model is None or index is None:
            raise not_set_up(optimizer)
        return model, index

    # steps -----------------------------------------------------------------------------------------------------------

    @override
    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run a backward pass, through every module that was set up. Collective."""
        models = list(self.models.values())
        training = [model for model in models if model.trains]
        alone = len(training) == 1
        plugin = self.zero_precision()
        if alone:
            plugin.engine = training[0].engine
        with ExitStack() as stack:
            stack.enter_context(guards.explain_released_parameters())
            if models:
                stack.enter_context(models[0].engine.comm.naming_failures())
            for model in models:
                model.begin_backward(alone=alone)
            try:
                plugin.backward(tensor, module, *args, **kwargs)
            except BaseException:
                for model in models:
                    model.engine.abort()
                raise
            for model in models:
                model.end_backward(alone=alone)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step on the sharded states. Collective."""
        model, _ = self._require(optimizer)
        return model.step(optimizer, closure, kwargs)

    @override
    def clip_gradients_norm(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip by the exact global norm over all ranks' shards; return the norm before clipping. Collective.

        Raises:
            RuntimeError: the norm is not finite, with ``error_if_nonfinite``; on every rank.
        """
        model, index = self._require(optimizer)
        norm = model.engine.clip_norm_(index, float(max_norm), float(norm_type))
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"The total norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be clipped. "
                "Pass error_if_nonfinite=False to fabric.clip_gradients to go on."
            )
        return norm

    @override
    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float | int) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Clamp every element of the averaged gradients. Collective."""
        model, index = self._require(optimizer)
        model.engine.clip_value_(index, float(clip_val))

    # checkpoints -----------------------------------------------------------------------------------------------------

    @override
    def save_checkpoint(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write a folder, every rank its part, or a file on rank 0. Collective.

        Raises:
            CheckpointError: on every rank, if any rank failed; earlier checkpoints are untouched.
        """
        self._checkpoints.save(os.fspath(path), state, storage_options, filter or {})

    @override
    def load_checkpoint(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        path: str | Path,
        state: nn.Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a folder or a file of any strategy and world size; of a folder, every rank reads its part. Collective.

        Returns:
            What was not restored into ``state``; everything without ``state``.

        Raises:
            CheckpointError: the folder is not committed, or damaged.
        """
        return self._checkpoints.load(path, state, strict=strict, weights_only=weights_only)

    @override
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return full weights in master precision, on the CPU of rank 0. Collective.

        While a checkpoint folder is collected it returns stand-ins, and is not collective.
        """
        return self._checkpoints.weights_of(module)

    @override
    def load_module_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        self._checkpoints.load_weights(module, state_dict, strict=strict)

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state in torch's own format, full tensors on the CPU of rank 0. Collective.

        While a checkpoint folder is collected the state is by parameter name, with stand-ins for what is sharded.
        """
        return self._checkpoints.optimizer_state_of(optimizer)

    # readings --------------------------------------------------------------------------------------------------------

    def require_model(self, module: nn.Module | None = None) -> Model:
        """Return what was set up for ``module``, by default for the only one.

        Raises:
            StateError: it was not set up, or there are several and ``module`` is None.
        """
        shell = getattr(module, "_forward_module", module)
        found = list(self.models.values()) if shell is None else [self.model_of(shell)]
        if len(found) != 1 or found[0] is None:
            raise StateError(
                f"{len(self.models)} modules were set up by this Fabric. Pass the one that you mean, as fabric.setup() "
                "returned it."
            )
        return found[0]

    def memory_bytes(self, module: nn.Module | None = None) -> dict[str, int]:
        """Return the bytes of model state of a module on this rank, by kind. Not collective."""
        return self.require_model(module).engine.memory_bytes()

    @contextmanager
    def gathered_parameters(self, module: nn.Module | None = None, *, modify: bool = False) -> Generator[None]:
        """Hold full parameters of a module on every rank inside, all at once. Collective.

        Args:
            module: as `fabric.setup` returned it. Default: the only one.
            modify: keep what is written inside; every rank must write the same. Without it a write is an error.

        Raises:
            StateError: something was written without ``modify``; on every rank.
        """
        with self.require_model(module).engine.gathered(modify=modify):
            yield
