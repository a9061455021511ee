"""`ZeROStrategy`: which Lightning hook calls which part of the engine, and nothing else.

===========================  =======================================================================================
Lightning                    here
===========================  =======================================================================================
``setup``                    ``configure_optimizers``, then `Engine` takes parameters and optimizers over
``training_step``            `Engine.begin_step`, the user's step, `Engine.end_forward`
``backward``                 `ZeROPrecision.backward`: `Engine.begin_backward`, the user's, `Engine.end_backward`
``optimizer_step``           `ZeROPrecision.optimizer_step`: closure, `Engine.finish`, hooks, clipping, `Engine.step`
checkpoint hooks             `ls_strategy.checkpoint`
``teardown``                 waits and detaches; shards stay, so that saving, testing and a second fit work
===========================  =======================================================================================
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.ddp import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ls_strategy import spans
from ls_strategy._compat import (
    STOP,
    around_batches,
    around_data_setup,
    around_dumps,
    defer_signals,
    free_main_port,
    is_mock_optimizer,
    is_started_by_lightning,
    name_logs_by_job,
    open_sockets,
    raise_sigterm,
    replace_links,
    unwrap_optimizer,
)
from ls_strategy.activations.storage import NVMeFolder
from ls_strategy.checked import at_least, checked
from ls_strategy.checkpoint.background import BackgroundSaver
from ls_strategy.checkpoint.commit import link as link_checkpoint
from ls_strategy.checkpoint.commit import recover
from ls_strategy.checkpoint.commit import remove as remove_checkpoint
from ls_strategy.checkpoint.full import StateDictHooks, full_state_dict, load_full_state_dict
from ls_strategy.checkpoint.random import random_states, restore_random_states
from ls_strategy.checkpoint.target import check_replaceable
from ls_strategy.config import (
    ActivationsConfig,
    CheckpointConfig,
    OffloadConfig,
    ParallelConfig,
    PrecisionConfig,
    ShardingConfig,
    ZeROConfig,
)
from ls_strategy.config.renamed import takes_groups
from ls_strategy.deepspeed.config import Translation
from ls_strategy.deepspeed.options import takes_deepspeed_config
from ls_strategy.distributed import rendezvous
from ls_strategy.distributed.comm import Comm, Traffic, make_comm
from ls_strategy.distributed.launcher import VARIABLE as LAUNCHER
from ls_strategy.distributed.launcher import LauncherWatch, end_processes
from ls_strategy.distributed.lockstep import Lockstep
from ls_strategy.engine import Engine
from ls_strategy.errors import CheckpointError, ConfigError, OutOfStepError, PlanError, RankFailedError, StateError
from ls_strategy.layout import TensorPart
from ls_strategy.lightning import checkpoints, data_position, guards
from ls_strategy.lightning.checkpoints import Collection
from ls_strategy.lightning.deepspeed import DeepSpeedConfiguration, took_default
from ls_strategy.lightning.loggers import take_part
from ls_strategy.lightning.parallel import ActivationMemory, ModelParallel
from ls_strategy.lightning.precision import ZeROPrecision
from ls_strategy.parallel.dtensor import has_dtensors
from ls_strategy.planner.choice import Question, candidate_of, choose, explain, smallest
from ls_strategy.planner.fit import before_sharding, question_of_fit
from ls_strategy.planner.hardware import Hardware, found_here
from ls_strategy.planner.out_of_memory import explaining
from ls_strategy.precision import PrecisionPolicy, resolve_precision
from ls_strategy.slurm import job, preflight
from ls_strategy.zero.lazy import LazyTensor
from ls_strategy.zero.parameters import unnoticed
from ls_strategy.zero_stages import POLICIES

T = TypeVar("T")

_FITTING = (TrainerFn.FITTING, TrainerStatus.RUNNING)
"""The Trainer's state during a fit, while it validates too."""

_PATIENCE_S = 3.0
"""How long a rank that failed looks for the others' failures before it breaks the connections."""


class ZeROStrategy(DDPStrategy):
    """ZeRO data parallelism, stages 0 to 3, for a plain LightningModule, on CPU (gloo) and GPU (NCCL).

    Losses are DDP's; model states are divided over the ranks. ``Trainer(strategy="zero3", devices=N)`` is this class
    with its defaults.

    Args:
        stage: 0 replicates everything (DDP on this engine), 1 shards optimizer states, 2 also gradients, 3 also
            parameters. ``"auto"`` plans when a fit begins, and takes the lightest that fits: stage, recomputation and
            offload.
        sharding: which blocks are gathered and reduced together, how far ahead, and how much each rank holds.
        precision: master weights, the dtype of sums over ranks, modules in fp32, the loss scale, moments in fewer bits.
            The precision of the numbers themselves is ``Trainer(precision=...)``.
        offload: ``"cpu"`` or ``"nvme"``: the optimizer's states, and at stage 3 the parameters, are stored there, and
            updated there. ``OffloadConfig(optimizer=..., parameters=..., ...)`` says more. The numbers do not change.
        activations: ``"full"`` or ``"selective"``: blocks are computed again in backward. ``ActivationsConfig(...)``
            stores activations in host memory or on NVMe, or partitions them.
        parallel: ranks that work on one model replica together: ``{"tensor": 2}``, ``{"pipeline": 2}``,
            ``{"context": 2}``, ``{"expert": 2}``, or a ``ParallelConfig``.
        checkpoint: ``"sharded"`` (folders) or ``"file"``; ``CheckpointConfig(...)`` writes in the background.
        deepspeed_config: a DeepSpeed configuration, as JSON file or dictionary. It sets the options above, what the
            Trainer leaves at its default (precision, clipping, accumulation), and optimizer and schedule where the
            module has none. What contradicts it, or has no counterpart here, is an error; the log shows every key.
        accelerator: set by the Trainer.
        parallel_devices: set by the Trainer.
        cluster_environment: set by the Trainer.
        checkpoint_io: how checkpoint files are written.
        precision_plugin: made from ``Trainer(precision=...)``; pass a `ZeROPrecision` for fp16 on the CPU.
        process_group_backend: ``nccl`` on GPUs and ``gloo`` on CPUs unless given.
        timeout: of collectives; a rank that waits longer fails.
        explain_waits_after: a rank that waits longer for others asks them where they are, and every rank prints a line.
            If none could ever go on (code that ran on one rank only), all fail then. None: never. Seconds.
        start_method: how ranks are started when no launcher did: ``popen``, ``spawn``, ``fork``, ``forkserver``.
    """

    @takes_groups
    @takes_deepspeed_config(took_default)
    @checked(("deepspeed_config",), explain_waits_after=at_least(0.5))
    def __init__(
        self,
        stage: Literal[0, 1, 2, 3, "auto"] = 3,
        *,
        sharding: ShardingConfig | Mapping[str, Any] = ShardingConfig(),
        precision: PrecisionConfig | Mapping[str, Any] = PrecisionConfig(),
        offload: Literal["cpu", "nvme"] | OffloadConfig | Mapping[str, Any] | None = OffloadConfig(),
        activations: Literal["full", "selective"] | ActivationsConfig | Mapping[str, Any] | None = ActivationsConfig(),
        parallel: ParallelConfig | Mapping[str, Any] = ParallelConfig(),
        checkpoint: Literal["sharded", "file"] | CheckpointConfig | Mapping[str, Any] = CheckpointConfig(),
        deepspeed_config: str | Path | dict[str, Any] | None = None,
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
        self._deepspeed = (
            DeepSpeedConfiguration(deepspeed_config) if isinstance(deepspeed_config, Translation) else None
        )
        self.auto = stage == "auto"
        """Whether `setup` is still to choose; until then this is stage 3, which builds on the meta device."""
        self.config = ZeROConfig.of(
            stage,
            sharding=sharding,
            precision=precision,
            offload=offload,
            activations=activations,
            parallel=parallel,
            checkpoint=checkpoint,
        )
        """Every option, in groups."""
        self.parallel = ModelParallel(self.config.parallel)
        self.activations = ActivationMemory(self.config.activations)
        self.explain_waits_after = explain_waits_after
        self.collection: Collection | None = None
        """While ``trainer.save_checkpoint`` collects what a folder will hold."""
        self._saver: BackgroundSaver | None = None
        self._save_failed = False
        self._alone = False
        self.engine: Engine | None = None
        self._comm: Comm | None = None
        self._lockstep: Lockstep | None = None
        self._meets_in_evaluation = False
        self._stops_alone = False
        self._watch = LauncherWatch()
        self._logs_are_named = False
        self._hardware: Hardware | None = None
        self._unsharded: list[Optimizer] = []
        self._state_dict_hooks: StateDictHooks | None = None
        self._pending_weights: Callable[[Engine], None] | None = None
        self._pending_random: dict[str, Any] | None = None
        self._ours: dict[str, Any] = {}
        """Of the checkpoint that was loaded last, what only this package reads."""
        self._position: dict[str, Any] | None = None
        self._accumulating = False
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )

    @classmethod
    def from_deepspeed_config(cls, config: str | Path | dict[str, Any], **options: Any) -> ZeROStrategy:
        """The strategy that a DeepSpeed configuration describes, a JSON file or a dictionary.

        Args:
            config: see ``deepspeed_config``.
            options: further options, which the configuration says nothing about.

        Raises:
            ConfigError: an unknown key, or one whose absence would change results; the message has the cure.
        """
        return cls(deepspeed_config=config, **options)

    # what users ask --------------------------------------------------------------------------------------------------

    def grad_norm(self, norm_type: float = 2.0, *, optimizer: Optimizer | None = None) -> Tensor:
        """Global norm of the averaged gradients, ``()`` fp32: of one optimizer, or of all together. Collective.

        Call it between backward and the next ``zero_grad``, for example in ``on_before_optimizer_step``, which runs
        before clipping.

        Raises:
            StateError: there are no gradients.
        """
        engine = self.require_engine()
        index = None if optimizer is None else engine.index_of(unwrap_optimizer(optimizer))
        return engine.grad_norm(index, norm_type)

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of model state on this rank, by kind. Not collective."""
        return self.require_engine().memory_bytes()

    @property
    def traffic(self) -> Traffic:
        """What this rank sent so far for sharded states, counted where it leaves."""
        return self.require_engine().comm.traffic

    @property
    def tensor_parallel_traffic(self) -> Traffic:
        """What this rank sent so far to the others that divide its layers."""
        return self.require_engine().mesh.tensor.traffic

    @property
    def context_parallel_traffic(self) -> Traffic:
        """What this rank sent so far to the others that divide its sequences."""
        return self.require_engine().mesh.sequence.traffic

    @property
    def expert_parallel_traffic(self) -> Traffic:
        """What this rank sent so far to the others that divide its experts: tokens, and their gradients."""
        return self.require_engine().mesh.expert.traffic

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the model, each with batches of its own."""
        return self.parallel.data_rank[1]

    @property
    def data_parallel_rank(self) -> int:
        """Which replica this rank belongs to."""
        return self.parallel.data_rank[0]

    @property
    def loss_scale(self) -> float | None:
        """The current loss scale, None in modes without one."""
        scaler = self.require_engine().scaler
        return None if scaler is None else scaler.scale

    @property
    def precision_policy(self) -> PrecisionPolicy:
        """Dtypes in force."""
        return self.require_engine().precision

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps skipped after an fp16 overflow."""
        return self.require_engine().skipped_steps

    @property
    def exposed_step_s(self) -> float:
        """Seconds so far that training has waited for updates of offloaded states, beyond what computation hid."""
        return self.require_engine().exposed_step_s

    @contextmanager
    def gathered_parameters(
        self, part: nn.Module | Iterable[nn.Parameter] | None = None, *, modify: bool = False
    ) -> Generator[None, None, None]:
        """Inside, parameters are in full on every rank, all at once. Collective.

        It is never needed: whoever touches a parameter has it gathered, and writes count. It saves time where many are
        used again and again, and takes their memory.

        Args:
            part: a module, or parameters. Default: the whole model.
            modify: what is written inside counts; every rank writes the same. Without it a write is an error.

        Raises:
            StateError: something was written without ``modify``; on every rank.
        """
        params = part.parameters() if isinstance(part, nn.Module) else part
        with self.require_engine().gathered(params, modify=modify):
            yield

    def require_engine(self) -> Engine:
        """The engine of the current module.

        Raises:
            StateError: the module is not set up yet.
        """
        if self.engine is None:
            raise StateError("the model is not set up yet: this works from on_fit_start (or on_validation_start) on.")
        return self.engine

    # set-up ----------------------------------------------------------------------------------------------------------

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        """The Trainer's plugin, made ours: a plain ``GradScaler`` would let ranks disagree on skipping a step."""
        plugin = None if precision_plugin is None else ZeROPrecision.from_plugin(precision_plugin)
        if plugin is not None and self._deepspeed is not None:
            plugin = self._deepspeed.precision(plugin)
        self._precision_plugin = plugin

    @override
    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        free_main_port(environment, rendezvous.free_port)
        if environment is not None and not environment.creates_processes_externally:
            # Before the other ranks are started, which would wait for a rank 0 that has raised.
            rendezvous.check_port(environment.main_address, environment.main_port, environment.global_rank())
            os.environ[LAUNCHER] = str(os.getpid())  # for ranks that are started from here
        super()._configure_launcher()

    @property
    @override
    def optimizers(self) -> list[Optimizer]:
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        DDPStrategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]
        guards.forward_zero_grad(self._lightning_optimizers)

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Aliases are registered by `ls_strategy.autoload`; DDP's must not be registered again under this class."""

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        if self._deepspeed is not None:
            self._deepspeed.connect(model)

    @override
    def setup_environment(self) -> None:
        before = open_sockets()
        environment = self.cluster_environment
        if is_started_by_lightning(environment):
            self._watch.start()
        if not dist.is_initialized() and environment is not None:
            gpus = self.root_device.type == "cuda"
            preflight.require(os.environ, devices=self.num_processes, num_nodes=self.num_nodes, gpus=gpus)
            rendezvous.check_left(environment.main_address, environment.main_port)
            self.set_world_ranks()  # a forked rank has its local one alone so far
            rendezvous.check_port(environment.main_address, environment.main_port, environment.global_rank())
        super().setup_environment()
        expected = self.num_nodes * self.num_processes
        if dist.get_world_size() != expected:
            raise PlanError(
                f"the launcher started {dist.get_world_size()} ranks, Trainer(devices={self.num_processes}, "
                f"num_nodes={self.num_nodes}) expects {expected}. Make the two agree."
            )
        if self._comm is None or not self._comm.is_alive():
            self._comm = make_comm(before)
            self._lockstep = Lockstep(self._comm)
            self.parallel.connect(self._comm, self.root_device.type)
            self.engine = None
            self._alone = False
        self._comm.where.watch(self.explain_waits_after, self.root_device, self._break_connections)
        self.parallel.show_device_mesh(self.lightning_module)
        name = job.job_id(os.environ)
        if name is not None and self.lightning_module is not None and not self._logs_are_named:
            self._logs_are_named = True
            name_logs_by_job(self.lightning_module.trainer, name, self._own_folder)

    def _own_folder(self, parent: str, name: str) -> str:
        """Rank 0's answer for all. Collective."""
        return self.broadcast(job.own_folder(parent, name, os.environ) if self.is_global_zero else name)

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Stage 3, and every stage in a pipeline, builds ``configure_model`` on meta: no rank ever holds the model."""
        divided = self.parallel.config.pp.size > 1
        on_meta = (POLICIES[self.config.stage].parameters or divided) and (
            empty_init or (empty_init is None and (dist.is_initialized() or self.config.offload.parameters is not None))
        )
        if not on_meta:
            with super().tensor_init_context(empty_init=empty_init):
                yield
            return
        with guards.refuse_loading_into_meta(), torch.device("meta"):
            yield

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        module = self.lightning_module
        assert module is not None
        assert self._comm is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        held = self.engine is not None and Engine.holding(module) is self.engine
        if not fitting:
            self._reset_optimizers_and_schedulers()
        if fitting or not held:
            kinds = "" if self.parallel.mesh is None else self.parallel.mesh.shape.kinds
            guards.check_trainer(trainer, self._precision(), kinds)
            if fitting and self._layer_sync:
                self.model = self._layer_sync.apply(module)
            parts = self.parallel.shard(module, self.root_device, recomputes=self.activations.recomputes)
            if fitting:
                self.setup_optimizers(trainer)
            if fitting:
                self._plan(trainer, module)
            self._choose_nvme_path(trainer)
            self._build_engine(module, parts)
        self.model = module
        take_part()
        self._keep_step(trainer)
        around_dumps(trainer, self._collecting)
        replace_links(trainer, self._link)
        if fitting and self._pending_random is not None:
            around_data_setup(trainer, self._making_iterators)
        self.setup_precision_plugin()
        self._arm(trainer, module, fitting=fitting)
        if POLICIES[self.config.stage].parameters:
            # A gathered inference tensor could not take part in autograd later.
            for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
                loop.inference_mode = False

    def _arm(self, trainer: pl.Trainer, module: pl.LightningModule, *, fitting: bool) -> None:
        """Let the engine know what it may do while user code looks on, and its modules what activations they keep."""
        engine = self.require_engine()
        engine.schedule.overlap = fitting and self.config.sharding.overlap_step
        automatic = fitting and not guards.steps_by_itself(trainer, module, engine)
        # Who reads `p.grad` is noticed; who reads the gradients of the pieces that parallel ranks have is not.
        engine.private_gradients = automatic and not (
            engine.mesh.shape.kinds and guards.has_hooks_after_backward(trainer, module)
        )
        engine.early_step = (
            engine.private_gradients
            and not guards.has_hooks_before_step(trainer, module)
            and self.config.sharding.overlap_step
            and not trainer.gradient_clip_val
            and self.parallel.pipeline is None  # what is tied over stages has to be summed first
        )
        if fitting:
            guards.watch_methods(module, engine)
            assert self.parallel.mesh is not None
            path, io = self.config.offload.nvme_path, self.config.offload.nvme_io
            drive = NVMeFolder(path, io, self.global_rank, allow_ram=self.config.offload.nvme_allow_ram)
            self.activations.apply(module, self.parallel.mesh, self.root_device, engine.storages, drive)

    def _follow_optimizers(self) -> Engine:
        """Return the engine, another one where user code has changed optimizers or groups since. Collective then.

        Raises:
            PlanError: no engine can follow.
        """
        engine, module = self.require_engine(), self.lightning_module
        optimizers = self._real_optimizers()
        if engine.follows(optimizers):
            return engine
        assert module is not None
        engine.check_change(optimizers)
        self.wait_for_saves()
        self._build_engine(module, {})
        self.require_engine().go_on_from(engine)
        self._arm(module.trainer, module, fitting=True)
        return self.require_engine()

    def _real_optimizers(self) -> list[Optimizer]:
        return [unwrap_optimizer(o) for o in self.optimizers if not is_mock_optimizer(o)]

    def _keep_step(self, trainer: pl.Trainer) -> None:
        """Let ranks notice one that has no further batch, and do what signals ask for at the same batch. Collective."""
        lockstep, shape = self._lockstep, self.parallel
        assert lockstep is not None
        lockstep.reset()
        self._stops_alone = False
        # Elsewhere ranks may evaluate different numbers of batches, as under DDP.
        self._meets_in_evaluation = (
            POLICIES[self.config.stage].parameters
            or shape.config.expert > 1
            or (shape.shards and self.data_parallel_size == 1)
        )
        around_batches(trainer, lockstep.begin, lockstep.end, evaluation=self._meets_in_evaluation)
        defer_signals(trainer, lockstep.ask, lockstep.agree)

    def _plan(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Note what is free before the fit takes it, for errors; if asked for, choose what fits: collective."""
        assert self._comm is not None
        self._unsharded = before_sharding(self.optimizers)
        path = self.config.offload.nvme_path or os.environ.get("LS_STRATEGY_NVME_PATH", "")
        ranks = self._comm.world_size
        if not self.auto:
            here = partial(found_here, self.root_device, ranks=ranks, ranks_per_node=min(self.num_processes, ranks))
            self._hardware = self._hardware or here(nvme_path=path)
            return
        self._hardware = smallest(self._comm, self.root_device, path)
        choice = choose(lambda: self._question(trainer, module), self._comm, self._hardware)
        rank_zero_info(f"ZeROStrategy(stage='auto'): {choice.words}")
        self.auto = False
        self.config = choice.candidate.config(self.config)
        self.activations = ActivationMemory(self.config.activations)

    def _question(self, trainer: pl.Trainer, module: pl.LightningModule) -> Question:
        policy = resolve_precision(
            str(self._precision().precision),
            master_weights=self.config.precision.master_weights,
            reduce_dtype=self.config.precision.reduce_dtype,
        )
        return question_of_fit(
            trainer,
            module,
            self._unsharded,
            config=self.config,
            precision=policy,
            recompute=self.config.activations.recompute,
            updates_early=not guards.steps_by_itself(trainer, module, self.engine)
            and not guards.has_hooks_before_step(trainer, module),
        )

    @contextmanager
    def _explaining_memory(self) -> Generator[None, None, None]:
        """Inside, an allocation that fails says what takes how much, and what takes less."""

        def describe() -> str:
            module, hardware = self.lightning_module, self._hardware
            assert module is not None
            assert hardware is not None
            question = self._question(module.trainer, module)
            return explain(question, hardware, candidate_of(self.config))()

        with explaining(describe):
            yield

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        if self._deepspeed is not None:
            self._deepspeed.resolve(trainer, self.data_parallel_size)
        super().setup_optimizers(trainer)
        if self._deepspeed is not None:
            self._deepspeed.watch(self.lr_scheduler_configs, partial(getattr, self, "skipped_steps"))

    def _choose_nvme_path(self, trainer: pl.Trainer) -> None:
        wanted = "nvme" in self.config.offload.tiers or self.activations.needs_nvme
        if not wanted or self.config.offload.nvme_path:
            return
        named = os.environ.get("LS_STRATEGY_NVME_PATH")
        path = named or str(Path(trainer.default_root_dir) / "nvme")
        source = "LS_STRATEGY_NVME_PATH" if named else "default_root_dir; set offload.nvme_path to a local NVMe drive"
        rank_zero_info(f"ZeROStrategy: states on NVMe rest in {path} (from {source})")
        self.config = replace(self.config, offload=replace(self.config.offload, nvme_path=path))

    def _on_batch(self) -> None:
        """A batch has been fetched, and nothing of the module has seen it yet."""
        module = self.lightning_module
        if self._pending_random is not None and module is not None and module.trainer.training:
            self.restore_random_states()

    def _precision(self) -> ZeROPrecision:
        if self._precision_plugin is None:
            self._precision_plugin = ZeROPrecision()
        assert isinstance(self._precision_plugin, ZeROPrecision)
        return self._precision_plugin

    def _build_engine(self, module: pl.LightningModule, parts: dict[int, TensorPart]) -> None:
        assert self.parallel.mesh is not None
        plugin = self._precision()
        self._state_dict_hooks = None
        optimizers = self._real_optimizers()
        self.engine = Engine(
            module,
            optimizers,
            config=self.config,
            precision=resolve_precision(
                str(plugin.precision),
                master_weights=self.config.precision.master_weights,
                reduce_dtype=self.config.precision.reduce_dtype,
            ),
            mesh=self.parallel.mesh,
            device=self.root_device,
            loss_scale=self.config.precision.loss_scale,
            parts=parts,
            share=self.parallel.share(module, optimizers),
        )
        if self.engine.policy.parameters or parts:
            self._state_dict_hooks = StateDictHooks(module, self.engine.units, self.engine.mesh)
            self.engine.on_detach.append(self._state_dict_hooks.remove)
        rank_zero_info(f"ZeROStrategy(stage={self.config.stage}): {self.engine.describe()}")
        plugin.attach(self.engine)
        plugin.on_batch = self._on_batch
        plugin.around_backward = self._around_backward
        if self._pending_weights is not None:
            load, self._pending_weights = self._pending_weights, None
            self._on_all_ranks(partial(load, self.engine))

    # steps -----------------------------------------------------------------------------------------------------------

    @override
    @spans.phase(spans.FORWARD)
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        engine, lockstep = self.require_engine(), self._lockstep
        assert self.lightning_module is not None
        assert lockstep is not None
        # DDP takes rank 0's buffers before a forward whose predecessor synchronised gradients.
        synchronises = self.lightning_module.automatic_optimization and not self._accumulating
        with lockstep.step(), engine.comm.naming_failures(), self._explaining_memory():
            self.restore_random_states()
            engine = self._follow_optimizers()
            engine.begin_step(sync_buffers_after=synchronises)
            if self.parallel.pipeline is not None:
                last = not self._accumulating
                module, step = self.lightning_module, super().training_step
                with self.activations.around_forward():
                    return self.parallel.pipeline.train(module, engine, step, args, last=last)
            with self.activations.around_forward():
                output = super().training_step(*args, **kwargs)
            engine.end_forward()
            return self.parallel.whole_outputs(output)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._evaluation_step(super().validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self._evaluation_step(super().test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step(super().predict_step, *args, **kwargs)

    def _evaluation_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        engine, module, lockstep = self.require_engine(), self.lightning_module, self._lockstep
        assert module is not None
        assert lockstep is not None
        self._stop_if_asked(module.trainer, lockstep)
        with lockstep.step() if self._meets_in_evaluation else nullcontext(), engine.comm.naming_failures():
            engine.begin_step()
            if self.parallel.pipeline is not None:
                return self.parallel.pipeline.evaluate(module, step, args)
            return self.parallel.whole_outputs(step(*args, **kwargs))

    def _stop_if_asked(self, trainer: pl.Trainer, lockstep: Lockstep) -> None:
        """Before a batch of an evaluation: end it after SIGTERM, all ranks together where they wait for each other."""
        asked = lockstep.agree() if self._meets_in_evaluation else lockstep.asked
        if asked == STOP:
            self._stops_alone = not self._meets_in_evaluation
            raise_sigterm(trainer)
        lockstep.ask(asked)  # what else there is waits for the next training batch

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Inside, gradients of stages 0 and 1 stay on their rank; stages 2 and 3 average every micro-batch anyway."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    @contextmanager
    def _around_backward(self, module: pl.LightningModule) -> Generator[bool, None, None]:
        """Around what `Strategy.backward` runs between the hooks; yield whether it is still to run."""
        engine = self.require_engine()
        if self.parallel.pipeline is not None:  # it has run in training_step
            engine.keeps_gradients = False
            yield False
            return
        engine.begin_backward(eager=module.automatic_optimization and not self._accumulating)
        with guards.explain_released_parameters(), engine.comm.naming_failures(), self._explaining_memory():
            yield True
        engine.end_backward(local=self._accumulating)

    @override
    @spans.phase(spans.OPTIMIZER)
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        module = model or self.lightning_module
        assert isinstance(module, pl.LightningModule)
        with self.require_engine().comm.naming_failures(), self._explaining_memory():
            result = self._precision().optimizer_step(optimizer, model=module, closure=closure, **kwargs)
            self.parallel.balance_experts(module)
            return result

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As DDP's, without the barrier it makes before every reduction; always on a copy.

        Over the replicas of the model, unless ``group`` says otherwise: a replica's ranks have the same value.
        """
        mesh = self.parallel.mesh
        if not isinstance(tensor, Tensor) or mesh is None or (group is None and mesh.data.world_size == 1):
            return tensor
        group = group or mesh.data.group
        mean = reduce_op is None or reduce_op == dist.ReduceOp.AVG or str(reduce_op).lower() in ("mean", "avg")
        op: Any = dist.ReduceOp.SUM if mean else reduce_op
        if isinstance(op, str):
            op = getattr(dist.ReduceOp, op.upper())
        result = tensor.detach().clone().contiguous().to(self.root_device)
        if mean and not result.is_floating_point():
            result = result.float()
        with mesh.data.blocking("reduce", group=None if group is mesh.data.group else group):
            dist.all_reduce(result, op=op, group=group)
        return result / dist.get_world_size(group) if mean else result

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Over all ranks."""
        if self._comm is None:
            return decision
        votes = self._comm.agree(torch.tensor([decision, not decision], dtype=torch.uint8)).tolist()
        return not votes[1] if all else bool(votes[0])

    def _wait_for_weights(self) -> None:
        if self.engine is not None:
            self.engine.wait()

    @override
    def on_train_start(self) -> None:
        if self._deepspeed is not None and self.lightning_module is not None:
            self._deepspeed.check_loaders(self.lightning_module.trainer)

    @override
    def on_validation_start(self) -> None:
        self._wait_for_weights()

    @override
    def on_train_end(self) -> None:
        self._wait_for_weights()
        self.barrier("ZeROStrategy.on_train_end")  # rank 0 may still remove or link checkpoints

    # checkpoints -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _collecting(self) -> Generator[bool, None, None]:
        """Around everything that Lightning collects for one checkpoint; False if there is to be none."""
        engine, module = self.engine, self.lightning_module
        if module is not None and module.trainer.interrupted and not self._all_interrupted():
            rank_zero_warn("No checkpoint is saved on this exception: other ranks go on, or a step was half done.")
            yield False
            return
        state = None if module is None else module.trainer.state
        if engine is not None and state is not None and (state.fn, state.status) == _FITTING:
            engine = self._follow_optimizers()
        if engine is None or self.config.checkpoint.format == "file":
            yield True
            return
        engine.check_whole()
        self._wait_for_weights()
        self.collection = Collection(engine, frozen=self.config.checkpoint.frozen)
        try:
            yield True
        except BaseException:
            self.collection = None
            raise

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write what was collected: a folder, every rank its part, or a file on rank 0. Collective.

        Raises:
            CheckpointError: on every rank, if any rank failed; earlier checkpoints are untouched.
        """
        collection, self.collection = self.collection, None
        if not checkpoint:
            return
        if self.lightning_module is not None:
            position = data_position.position(self.lightning_module.trainer)
            checkpoint = {**checkpoint, checkpoints.OURS: position}  # hooks keep what they were handed
        if self.engine is not None:
            checkpoint = checkpoints.with_full_modules(checkpoint, self.engine)
        path = os.fspath(filepath)
        if collection is None:
            exchange = self._comm.exchange_objects if self._comm is not None else lambda value: [value]
            with self._tolerating():
                checkpoints.write_file(
                    checkpoint, path, self.checkpoint_io, storage_options, self.global_rank, exchange
                )
            return
        assert self.lightning_module is not None
        fitting = self.lightning_module.trainer.training  # a save after the fit is there when the call returns
        with self._tolerating():
            self.wait_for_saves()
        with self._tolerating():
            saver = self._background() if self.config.checkpoint.background and fitting else None
            if saver is not None:  # a wrong path is an error now, not at the next save
                self._on_all_ranks(partial(check_replaceable, path) if self.is_global_zero else lambda: None)
            checkpoints.write(collection, checkpoint, path, self.checkpoint_io, storage_options, saver)

    def _background(self) -> BackgroundSaver:
        assert self._comm is not None
        if self._saver is None:
            self._saver = BackgroundSaver(self._comm.rank, self._comm.world_size)
        return self._saver

    @contextmanager
    def _tolerating(self) -> Generator[None, None, None]:
        """Raise what a save raises, or log it, as ``checkpoint.on_error`` says."""
        try:
            yield
            self._save_failed = False
        except CheckpointError as error:
            self._save_failed = True
            if self.config.checkpoint.on_error == "raise":
                raise
            rank_zero_warn(f"{error} Training continues (checkpoint.on_error='continue').")

    @property
    def save_failed(self) -> bool:
        """Whether the last checkpoint could not be written, and training went on (``checkpoint.on_error``)."""
        return self._save_failed

    def wait_for_saves(self) -> None:
        """Return when every checkpoint that was saved is committed. Collective.

        Raises:
            CheckpointError: one is not.
        """
        if self._saver is not None:
            self._saver.wait()

    def _all_interrupted(self) -> bool:
        """Whether an exception ended this step on every rank, so that all can save together; waits for the others."""
        whole = self._comm is None or not self._comm.failures.told  # another rank failed alone, and has left
        try:
            if self.engine is not None:
                self.engine.check_whole()
        except StateError:
            whole = False  # no word to the others: they will not wait for this rank for long
        if self._comm is None or self._comm.world_size == 1:
            return whole
        all_here = whole and self._comm.failures.announce(RuntimeError("interrupted"), patience_s=_PATIENCE_S)
        self._alone = not all_here
        return all_here

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks; for none, if this one failed alone."""
        if not self._alone:
            with self._blocking("barrier"):
                super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        with self._blocking("broadcast", source=src):
            return super().broadcast(obj, src)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        with self._blocking("all_gather", group=group):
            return super().all_gather(tensor, group, sync_grads)

    def _blocking(self, kind: str, **options: Any) -> AbstractContextManager[None]:
        """Around a collective of Lightning's."""
        comm = self._comm
        if comm is None or comm.world_size == 1 or not comm.is_alive():
            return nullcontext()
        return comm.blocking(kind, **options)

    def _after_save(self, action: Callable[[], None]) -> None:
        """On rank 0, once the last save is committed; never, if it failed: what it was to replace is still needed."""
        if not self.is_global_zero:
            return
        if self._saver is not None:
            self._saver.then(action)
        elif not self._save_failed:
            action()

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a folder or a file, on rank 0, once the checkpoint that replaces it is committed.

        What is not a checkpoint of this package stays, with a warning: training does not end for what it can keep.
        """
        self._after_save(partial(self._remove, filepath))

    def _remove(self, filepath: str | Path) -> None:
        if self.config.checkpoint.format == "file" and not checkpoints.is_lightnings(self.checkpoint_io):
            self.checkpoint_io.remove_checkpoint(filepath)
            return
        try:
            remove_checkpoint(filepath)
        except CheckpointError as error:
            rank_zero_warn(f"A checkpoint was not removed. {error}")

    def _link(self, _trainer: pl.Trainer, path: str, name: str) -> None:
        def link() -> None:
            if Path(path).absolute() != Path(name).absolute():
                self._after_save(partial(link_checkpoint, path, name))

        try:
            link() if self._alone else self._on_all_ranks(link)
        except CheckpointError as error:
            if self.config.checkpoint.on_error == "raise":
                raise
            rank_zero_warn(f"{error} Training continues (checkpoint.on_error='continue').")

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """A checkpoint of any strategy, folder or file. Of a folder's tensors every rank reads its part later.

        Raises:
            CheckpointError: a folder that is not committed, or damaged.
        """
        self.wait_for_saves()
        if self.is_global_zero:
            recover(checkpoint_path)
        self.barrier("ZeROStrategy.load_checkpoint")
        if not checkpoints.is_folder(checkpoint_path):
            mapped = checkpoints.map_file(checkpoint_path, self.checkpoint_io, weights_only)
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only) if mapped is None else mapped
            self._ours = self._position = checkpoint.pop(checkpoints.OURS, {})
            self._take_random_states(self._ours)  # a file's top level is Lightning's and the user's
            return checkpoint
        read = partial(checkpoints.read, checkpoint_path, self.checkpoint_io, weights_only)
        checkpoint = self._on_all_ranks(read)
        self._ours = self._position = checkpoint.pop(checkpoints.OURS)
        self._take_random_states(checkpoint)
        return checkpoint

    def _take_random_states(self, saved: dict[str, Any]) -> None:
        self._pending_random = saved.pop(checkpoints.RANDOM, {}).get(f"rank_{self.parallel.first_rank}")

    def _on_all_ranks(self, work: Callable[[], T]) -> T:
        """Run ``work``, which is not collective; if it fails on any rank, raise on all of them."""
        assert self._comm is not None
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            error = raised
        told = self._comm.exchange_objects(None if error is None else f"rank {self._comm.rank}: {error}")
        if error is not None:
            raise error
        for words in told:
            if words is not None:
                raise CheckpointError(words)
        return cast("T", result)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Full weights in master precision, on the CPU of rank 0. Collective.

        While a checkpoint folder is collected: stand-ins, not collective.
        """
        assert self.lightning_module is not None
        if self.engine is None:
            return self.lightning_module.state_dict()
        if self.collection is not None:
            return self.collection.weights(self.raw_state_dict())
        self.engine.check_whole()
        raw = self.raw_state_dict()
        full = full_state_dict(raw, self.engine.units, self.engine.mesh)
        full = {k: v for part in self.engine.mesh.pipeline.exchange_objects(full) for k, v in part.items()}
        return full or ({} if self._state_dict_hooks is not None else raw)

    def raw_state_dict(self) -> dict[str, Any]:
        """``state_dict()`` as the module holds it: at stage 3 with released parameters. Not collective."""
        assert self.lightning_module is not None
        self._wait_for_weights()
        with unnoticed() if self._state_dict_hooks is None else self._state_dict_hooks.disabled():
            return self.lightning_module.state_dict()

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        assert module is not None
        weights, may_lack = checkpoint["state_dict"], self._ours.get("left_out", ())

        def load(engine: Engine) -> None:
            load_full_state_dict(module, weights, engine.units, strict=strict, may_lack=may_lack)

        if self.engine is not None and Engine.holding(module) is self.engine:
            self._on_all_ranks(partial(load, self.engine))
        elif (
            may_lack
            or any(p.is_meta for p in module.parameters())
            or has_dtensors(module)
            or any(isinstance(v, LazyTensor) for v in weights.values())
        ):
            self._pending_weights = load
        else:
            module.load_state_dict(weights, strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """State in torch's own format, full tensors on the CPU of rank 0. Collective.

        While a checkpoint folder is collected: by parameter name, stand-ins for what is sharded, not collective.
        """
        inner = unwrap_optimizer(optimizer)
        index = self.require_engine().index_of(inner)
        if index is None:
            return inner.state_dict()
        if self.collection is not None:
            return self.collection.optimizer_state(index)
        return self.require_engine().optimizers[index].sharded.states.full_state_dict()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        engine = self._follow_optimizers()
        if checkpoints.is_named(states):
            indices = [engine.index_of(unwrap_optimizer(o)) for o in self.optimizers]
            self._on_all_ranks(partial(checkpoints.load_optimizers, engine, indices, states))
            return
        if len(states) != len(self.optimizers):
            raise StateError(
                f"the checkpoint holds the states of {len(states)} optimizers, configure_optimizers returned "
                f"{len(self.optimizers)}. Return the same optimizers, in the same order."
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            index = engine.index_of(unwrap_optimizer(optimizer))
            if index is not None:
                engine.optimizers[index].sharded.states.load_full_state_dict(state)

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        """After a resume the training data goes on where it was."""
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        position = self._position
        data_position.forget(dataloader)
        if position and trainer is not None and trainer.training and trainer.fit_loop.restarting:
            data_position.resume(trainer, dataloader, position)
        self.parallel.seed_workers(dataloader)
        return super().process_dataloader(dataloader)

    @override
    @spans.phase(spans.DATA)
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Also compare it over the ranks that work on it together."""
        self.parallel.check_batch(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every replica of the model gets its own part of the data."""
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    @contextmanager
    def _making_iterators(self) -> Generator[None, None, None]:
        """Around the making of the first iterator over the training data after a resume.

        Between two epochs it draws seeds from the random state that was saved. In the middle of an epoch it does not:
        the iterator of that epoch was made before.
        """
        module, pending = self.lightning_module, self._pending_random
        boundary = module is not None and module.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if pending is None or not boundary:
            yield
            return
        restore_random_states(pending)
        yield
        self._pending_random = random_states()  # what hooks do before the first batch is undone then

    def restore_random_states(self) -> None:
        """Go on with the random numbers of the checkpoint; once, when the first batch after a resume is there."""
        self._position = None
        states, self._pending_random = self._pending_random, None
        if states is not None:
            restore_random_states(states)

    # end -------------------------------------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks; if they did not fail too, close the connections that they wait on."""
        if self.engine is not None:
            self.engine.abort()
        if self._comm is None and self._start_method != "popen":
            end_processes(self._launcher.procs)  # type: ignore[union-attr]  (of the process that forked the ranks)
            return
        together = isinstance(exception, SIGTERMException) and not self._stops_alone
        if together or isinstance(exception, (ConfigError, PlanError)):
            return  # raised on every rank alike: nobody waits
        if self._comm is None or not dist.is_initialized() or self._comm.world_size == 1:
            return
        waits = self._lockstep is not None and self._lockstep.in_flight
        place = f"{waits} {self.engine.reducer.abandoned if self.engine is not None else 0}"
        known = isinstance(exception, OutOfStepError)
        all_failed = not known and self._comm.failures.announce(exception, patience_s=_PATIENCE_S, place=place)
        if not all_failed and self._saver is not None:
            self._saver.abandon()
        if not all_failed or isinstance(exception, RankFailedError):
            self._break_connections()
            dist.destroy_process_group()
            if self.cluster_environment is not None:
                where = self.cluster_environment.main_address, self.cluster_environment.main_port
                rendezvous.leave(*where, f"{type(exception).__name__}: {exception}")

    def _break_connections(self) -> None:
        """Make every wait of this rank, and for it, fail."""
        if self.parallel.pipeline is not None:
            self.parallel.pipeline.break_connections()
        if self._comm is not None:
            self._comm.break_connections()

    def _end_saves(self, *, quietly: bool) -> None:
        """Wait for saves in the background; after an exception only log what goes wrong."""
        saver, self._saver = self._saver, None
        if saver is None:
            return
        try:
            with self._tolerating():
                saver.wait()
        except CheckpointError as error:
            if not quietly:
                raise
            rank_zero_warn(str(error))
        finally:
            saver.close()

    @override
    def teardown(self) -> None:
        module = self.lightning_module
        if self.engine is not None:
            self.engine.gradients.local = True  # no step is to come; Trainers call zero_grad() before they validate
            self.engine.on_demand.thread = None
            self.engine.on_demand.given.training = False
        if self.engine is not None and (self.engine.comm.world_size == 1 or dist.is_initialized()):
            self.engine.wait()
            if self._state_dict_hooks is None:  # every rank has whole parameters
                self.engine.detach()
        if module is not None:
            if self._deepspeed is not None:
                self._deepspeed.disconnect(module)
            guards.unwatch_methods(module)
            self.activations.remove()
            if self._layer_sync and module._trainer is not None and module._trainer.state.fn == TrainerFn.FITTING:
                self.model = self._layer_sync.revert(module)
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        self._precision().teardown()
        self._end_saves(quietly=module is not None and module._trainer is not None and module._trainer.interrupted)
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()
        self._watch.stop()
        if self._comm is not None:
            self._comm.where.leave()
