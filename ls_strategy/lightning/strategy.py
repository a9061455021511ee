"""`ZeROStrategy`: which Lightning hook calls which part of the package, and nothing else.

===========================  =======================================================================================
Lightning                    here
===========================  =======================================================================================
``setup_environment``        `Connection`: process groups and monitored collectives, as under a Fabric
``setup``                    `EngineSetup`: ``configure_optimizers``, then `Engine` takes parameters and optimizers over
``training_step``            `Steps`, then the strategy's `StepLoop`: `Engine.begin_step`, step, `Engine.end_forward`
``backward``                 `ZeROPrecision.backward`: `Engine.begin_backward`, the user's, `Engine.end_backward`
``optimizer_step``           `ZeROPrecision.optimizer_step`: closure, `Engine.finish`, hooks, clipping, `Engine.step`
saving                       `Saves`: collects and writes checkpoints, removes and links them
loading                      `Resume`: weights, optimizer states, random numbers, position in the data
``on_exception``             `ends_alone`: the error reaches every rank, or the connections they wait on are closed
``teardown``                 waits and detaches; shards stay, so that saving, testing and a second fit work
===========================  =======================================================================================
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ls_strategy import host, spans
from ls_strategy.checked import at_least, checked
from ls_strategy.config import (
    ActivationsConfig,
    CheckpointConfig,
    CompileConfig,
    OffloadConfig,
    OffloadTier,
    ParallelConfig,
    PrecisionConfig,
    ShardingConfig,
    ZeROConfig,
)
from ls_strategy.config.option_names import takes_groups
from ls_strategy.distributed.comm import Comm
from ls_strategy.distributed.launch import rendezvous, slurm_job
from ls_strategy.distributed.launch.launcher import end_processes
from ls_strategy.distributed.launch.ray_worker import in_train_function
from ls_strategy.distributed.lockstep import Lockstep
from ls_strategy.engine import Engine
from ls_strategy.errors import PlanError, RankFailedError
from ls_strategy.host.fabric import CheckpointIO, ClusterEnvironment
from ls_strategy.host.pytorch import (
    STEP_OUTPUT,
    Accelerator,
    DDPStrategy,
    Precision,
    SIGTERMException,
    TrainerFn,
    pl,
)
from ls_strategy.lightning import guards, ranks
from ls_strategy.lightning._private import around_dumps, name_logs_by_job, replace_links, show_as_text
from ls_strategy.lightning.activation_memory import ActivationMemory
from ls_strategy.lightning.checkpointing.contents import Collection
from ls_strategy.lightning.checkpointing.resume import Resume
from ls_strategy.lightning.checkpointing.saving import Saves
from ls_strategy.lightning.connection import ConnectedCallback
from ls_strategy.lightning.deepspeed import Configuration, takes_deepspeed_config
from ls_strategy.lightning.engine_setup import EngineSetup
from ls_strategy.lightning.loggers import take_part
from ls_strategy.lightning.loop import loop_of
from ls_strategy.lightning.loop.plain import LoopParts
from ls_strategy.lightning.module_state import MetricsOnHost
from ls_strategy.lightning.parallel import ModelParallel
from ls_strategy.lightning.planning import Planning
from ls_strategy.lightning.precision import ZeROPrecision
from ls_strategy.lightning.readings import EngineStrategy
from ls_strategy.lightning.run_state import RunState
from ls_strategy.lightning.steps import Steps
from ls_strategy.lightning.uneven import UnevenData, UnevenMode
from ls_strategy.lightning.virtual.ranks import VirtualRanks
from ls_strategy.meta_init.deferred import note_deferred
from ls_strategy.pretrained.huggingface import without_memory
from ls_strategy.zero_stages import POLICIES

_IN_FABRIC = (
    "Got ZeROStrategy, the strategy of a Trainer, for a Fabric. Use ls_strategy.ZeROFabricStrategy with the same "
    'options, or an alias such as Fabric(strategy="zero3").'
)


def _phase(name: str) -> AbstractContextManager[None]:
    """Record a phase, while anything is recorded."""
    return nullcontext() if spans.SpanRecorder.active is None else spans.phase(name)


class ZeROStrategy(EngineStrategy):  # its many public members are Lightning's hooks
    """ZeRO data parallelism, stages 0 to 3, for a plain LightningModule, on CPU (gloo) and GPU (NCCL).

    Losses are DDP's; model states are sharded over the ranks. ``Trainer(strategy="zero3", devices=N)`` is this class
    with its defaults.

    Args:
        stage: 0 replicates everything (DDP on this engine), 1 shards optimizer states, 2 also gradients, 3 also
            parameters. ``"auto"`` plans when a fit begins: the stage, recomputation and offload that fit and are
            predicted to be the fastest.
        sharding: which blocks are gathered together, how far ahead, and how much each rank stores.
        precision: of masters, sums, moments and frozen weights. ``Trainer(precision=...)`` is that of the computation.
        offload: ``"cpu"`` or ``"nvme"``: optimizer states, and at stage 3 the parameters, are stored and updated there;
            ``OffloadConfig(...)`` sets each. Same numbers.
        activations: ``"full"`` or ``"selective"`` recomputes blocks in backward; ``ActivationsConfig(...)`` also
            offloads or partitions activations.
        parallel: ranks that share a model replica: ``{"tensor": 2}``, ``{"pipeline": 2}``, ``{"context": 2}``,
            ``{"expert": 2}``, or a ``ParallelConfig``.
        checkpoint: ``"file"``, ``"sharded"`` (folders), or ``"auto"``: a file up to 2 GiB, a folder beyond;
            ``CheckpointConfig(...)`` writes in the background.
        compile: ``torch.compile`` every block (``"blocks"``), or also what lies between them (``"model"``);
            ``CompileConfig(...)`` chooses the backend.
        deepspeed_config: a DeepSpeed configuration, as a JSON file or a dictionary. It sets the options above, what the
            Trainer leaves at its default (precision, clipping, accumulation), and optimizer and schedule where the
            module has none. A contradiction, or a key without a counterpart, is an error; the log shows every key.
        accelerator: set by the Trainer.
        parallel_devices: set by the Trainer.
        cluster_environment: set by the Trainer.
        checkpoint_io: how checkpoint files are written.
        precision_plugin: made from ``Trainer(precision=...)``; pass a `ZeROPrecision` for fp16 on the CPU.
        process_group_backend: ``nccl`` on GPUs and ``gloo`` on CPUs unless given.
        timeout: of collectives; a rank that waits longer fails.
        explain_waits_after: seconds. When a rank has waited this long, every rank prints where it is; if no rank could
            ever continue (code that ran on one rank only), all fail. None disables it.
        start_method: how ranks are started when no launcher did: ``popen``, ``spawn``, ``fork``, ``forkserver``.
        uneven: for different numbers of batches. ``error``: all ranks raise. ``join``: finished ranks wait, and
            averages are over the ranks that have a batch. ``join_samples``: the same, weighted by batch size.
    """

    _precision = None
    """A Fabric reads this before it sets the accelerator, where it is refused."""

    # As long as it is because of one argument per option, which parsers read off the signature.
    @takes_groups
    @takes_deepspeed_config
    @checked(("deepspeed_config",), explain_waits_after=at_least(0.5))
    def __init__(
        self,
        stage: Literal[0, 1, 2, 3, "auto"] = 3,
        *,
        sharding: ShardingConfig | Mapping[str, Any] = ShardingConfig(),
        precision: PrecisionConfig | Mapping[str, Any] = PrecisionConfig(),
        offload: OffloadTier | OffloadConfig | Mapping[str, Any] | None = OffloadConfig(),
        activations: Literal["full", "selective"] | ActivationsConfig | Mapping[str, Any] | None = ActivationsConfig(),
        parallel: ParallelConfig | Mapping[str, Any] = ParallelConfig(),
        checkpoint: Literal["auto", "sharded", "file"] | CheckpointConfig | Mapping[str, Any] = CheckpointConfig(),
        compile: Literal["blocks", "model"] | CompileConfig | Mapping[str, Any] | None = CompileConfig(),
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
        uneven: UnevenMode = "error",
    ) -> None:
        self._deepspeed = cast("Configuration | None", deepspeed_config)  # as the decorator has completed it
        config = ZeROConfig.of(
            stage, sharding=sharding, precision=precision, offload=offload, activations=activations, parallel=parallel,
            checkpoint=checkpoint, compile=compile,
        )  # fmt: skip
        ranks_of_model = ModelParallel(config.parallel, config.sharding)
        self._run = run = RunState(
            config, ranks_of_model, ActivationMemory(config.activations), VirtualRanks.of(ranks_of_model, self)
        )
        self.planning = Planning(run, self.zero_precision, auto=stage == "auto")
        self.uneven = UnevenData(run, uneven, self.zero_precision)
        self.resume = Resume(run, self)
        parts = LoopParts(run, self.planning, self.uneven, self.resume)
        self.loop = loop_of(parts)
        self.resume.restores(self.loop.load)
        self.engine_setup = EngineSetup(run, self, self.loop, self.uneven, self.resume)
        self.steps = Steps(parts, self.loop, self.engine_setup)
        self.saves = Saves(run, self, self.loop, self.engine_setup, self.resume)
        self._logs_are_named = False
        self._connect_later(ranks_of_model, explain_waits_after)
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
        host.show_to_others(type(self))

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register nothing: `ls_strategy.autoload` registers the aliases, and DDP's must not point to this class."""

    @classmethod
    def from_deepspeed_config(cls, config: str | Path | dict[str, Any], **options: Any) -> ZeROStrategy:
        """Return the strategy that a DeepSpeed configuration describes.

        Args:
            config: see ``deepspeed_config``.
            options: options that the configuration does not set.

        Raises:
            ConfigError: a key is unknown, or ignoring it would change results; the message has the cure.
        """
        return cls(deepspeed_config=config, **options)

    # set-up ----------------------------------------------------------------------------------------------------------

    @property
    @override
    def accelerator(self) -> Accelerator | None:
        return super().accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator | None) -> None:
        """Take what the Trainer sets first.

        Raises:
            ConfigError: it is a Trainer of the other package, or a Fabric.
        """
        host.require_own(accelerator, Accelerator, _IN_FABRIC)
        DDPStrategy.accelerator.fset(self, accelerator)  # type: ignore[attr-defined]

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        """Replace the Trainer's plugin: with a plain ``GradScaler`` ranks could disagree on skipping a step."""
        plugin = None if precision_plugin is None else ZeROPrecision.from_plugin(precision_plugin)
        if plugin is not None and self._deepspeed is not None:
            plugin = self._deepspeed.precision(plugin)
        self._precision_plugin = plugin

    @override
    def zero_precision(self) -> ZeROPrecision:
        if self._precision_plugin is None:
            self._precision_plugin = ZeROPrecision()
        assert isinstance(self._precision_plugin, ZeROPrecision)
        return self._precision_plugin

    @property
    @override
    def optimizers(self) -> list[Optimizer]:
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        DDPStrategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]
        guards.forward_methods(self._lightning_optimizers)

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        self._run.module = model
        self.resume.forget()
        if model._trainer is not None:
            self.resume.reading.prepare(model.trainer)
        if self._deepspeed is not None:
            self._deepspeed.connect(model)

    @override
    def setup_environment(self) -> None:
        module: Any = self.lightning_module
        if module is not None and module._trainer is not None:
            if self._start_method == "fork":
                show_as_text(module.trainer)
            for callback in module.trainer.callbacks:
                if isinstance(callback, ConnectedCallback):
                    callback.connecting(module.trainer)
        super().setup_environment()
        self.parallel.show_device_mesh(self.lightning_module)
        name = slurm_job.job_id(os.environ)
        if name is not None and self.lightning_module is not None and not self._logs_are_named:
            self._logs_are_named = True
            name_logs_by_job(self.lightning_module.trainer, name, self._own_folder)

    @override
    def _check_size(self) -> None:
        if in_train_function():
            raise PlanError(
                f"Got {type(self).__name__} in a train function of Ray Train, whose ranks and process group are Ray's. "
                'Use ls_strategy.ray.RayZeROStrategy with the same options, or an alias: Trainer(strategy="zero3").'
            )
        super()._check_size()

    @override
    def _take_ranks(self) -> None:
        self.set_world_ranks()

    @override
    def _connected(self, comm: Comm) -> None:
        self._run.lockstep = Lockstep(comm)
        self.engine = None

    def _own_folder(self, parent: str, name: str) -> str:
        """Return rank 0's answer on all ranks. Collective."""
        return self.broadcast(slurm_job.own_folder(parent, name, os.environ) if self.is_global_zero else name)

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Build ``configure_model`` on meta where no rank has the full model: at stage 3, with model parallelism."""
        partial_model = POLICIES[self.config.stage].parameters or self.parallel.splits_model
        on_meta = partial_model and (
            empty_init or (empty_init is None and (dist.is_initialized() or self.config.offload.parameters is not None))
        )
        if not on_meta:
            with super().tensor_init_context(empty_init=empty_init), self._reading_together():
                yield
            return
        building = without_memory(self.root_device, reports=self.is_global_zero, draws=not empty_init)
        with guards.refuse_loading_into_meta(), building, MetricsOnHost():
            yield

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        assert self.accelerator is not None
        assert module is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if not fitting:
            self._reset_optimizers_and_schedulers()
        if fitting or self.engine is None or Engine.holding(module) is not self.engine:
            self.engine_setup.check(trainer, module)
            if fitting and self._layer_sync:
                self.model = self._layer_sync.apply(module)
            note_deferred(module)
            self.engine_setup.place(module)
            parts = self.parallel.shard(module, self.root_device, recomputes=self.activations.recomputes)
            if fitting:
                self.setup_optimizers(trainer)
                self.planning.plan(trainer, module)
            plugin = self.zero_precision()
            plugin.on_batch, plugin.around_backward = self.resume.on_batch, self.steps.around_backward
            self.engine_setup.build(module, parts)
        else:
            self.engine.broadcast_buffers()  # as DDPStrategy does before every evaluation
        self.model = module
        take_part()
        self.steps.begin_run(trainer)
        around_dumps(trainer, self.saves.collecting)
        replace_links(trainer, self.saves.link)
        if fitting:
            self.resume.begin_fit(trainer)
        self.setup_precision_plugin()
        self.engine_setup.arm(trainer, module, fitting=fitting)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        if self._deepspeed is not None:
            self._deepspeed.resolve(trainer, self.data_parallel_size)
        super().setup_optimizers(trainer)
        if self._deepspeed is not None:
            self._deepspeed.watch(self.lr_scheduler_configs, partial(getattr, self, "skipped_steps"))

    # steps -----------------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self.resume.note_step()
        with _phase(spans.FORWARD):
            return self.steps.train(super().training_step, args, kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self.steps.evaluate(super().validation_step, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self.steps.evaluate(super().test_step, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.steps.evaluate(super().predict_step, args, kwargs)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Keep gradients of stages 0 and 1 on their rank; stages 2 and 3 average every micro-batch anyway."""
        self.steps.accumulating = True
        try:
            yield
        finally:
            self.steps.accumulating = False

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        module = model or self.lightning_module
        assert isinstance(module, pl.LightningModule)
        with _phase(spans.OPTIMIZER), self.require_engine().comm.naming_failures():
            try:
                return self.zero_precision().optimizer_step(optimizer, model=module, closure=closure, **kwargs)
            except Exception as error:
                self.planning.explain_memory(error)
                raise

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
        self.steps.end_fit()

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce in place, as DDP does, but without its barrier before every reduction.

        The default group is the replicas of the model: the ranks of one replica have the same value.
        """
        mesh = self.parallel.mesh
        if not isinstance(tensor, Tensor) or mesh is None or (group is None and mesh.data.world_size == 1):
            return tensor
        weight = self.uneven.contribution
        return ranks.reduce(tensor, mesh.data, self.root_device, op=reduce_op, group=group, weight=weight)

    # data ------------------------------------------------------------------------------------------------------------

    @property
    def runs_filler(self) -> bool:
        """Return whether this rank runs a batch that does not count, because others have more (``uneven="join"``)."""
        return self.uneven.runs_filler

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Give every replica of the model, or every virtual rank, its own part of the data.

        Training data is split over all islands, other data inside each of them.
        """
        kwargs = super().distributed_sampler_kwargs
        if self.virtual is not None and self.virtual.applies:
            kwargs = {"num_replicas": self.virtual.count, "rank": self.virtual.ranks[0]}
        module: Any = self.lightning_module
        if module is None or not module.trainer.training:
            return kwargs
        island, islands = self.islands
        here = kwargs["num_replicas"]
        return {"num_replicas": islands * here, "rank": island * here + kwargs["rank"]}

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        """Let the training data continue where a checkpoint was saved, and seed workers by replica."""
        self.uneven.check_sized(dataloader)
        return self.loop.loader(dataloader, super().process_dataloader)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Compare the batch over the ranks of a replica, then move it."""
        with _phase(spans.DATA):
            self.parallel.check_batch(batch)
            with self.loop.moving_batch():
                return super().batch_to_device(batch, device, dataloader_idx)

    # checkpoints -----------------------------------------------------------------------------------------------------

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write what was collected: a folder, every rank its part, or a file on rank 0. Collective.

        Raises:
            CheckpointError: on every rank, if any rank failed; earlier checkpoints are untouched.
        """
        self.saves.save(checkpoint, os.fspath(filepath), storage_options)

    @override
    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks, except after a save that goes on in the background."""
        if self.saves.is_awaited(name):
            super().barrier(name, *args, **kwargs)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a folder or a file, on rank 0, when the checkpoint that replaces it is committed.

        What is not a checkpoint of this package stays, with a warning: training does not end because of it.
        """
        self.saves.remove(filepath)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Return a checkpoint of any strategy, a folder or a file. Every rank reads its part of a folder later.

        Raises:
            CheckpointError: the folder is not committed, or damaged.
        """
        return self.resume.load(checkpoint_path, weights_only, super().load_checkpoint)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return full weights in master precision, on the CPU of rank 0. Collective.

        While a checkpoint folder is collected it returns stand-ins, and is not collective.
        """
        return self.saves.weights()

    def raw_state_dict(self) -> dict[str, Any]:
        """Return the module's own ``state_dict()``, at stage 3 with released parameters. Not collective."""
        return self.saves.raw_weights()

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.resume.load_weights(checkpoint["state_dict"], strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state in torch's own format, full tensors on the CPU of rank 0. Collective.

        While a checkpoint folder is collected the state is by parameter name, with stand-ins for what is sharded, and
        the call is collective only if some parameters are stepped whole (Muon).
        """
        return self.saves.optimizer_state(optimizer)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self.resume.load_optimizer_states(self.engine_setup.follow_optimizers(), checkpoint["optimizer_states"])

    @property
    def collection(self) -> Collection | None:
        """The contents of a checkpoint folder while ``trainer.save_checkpoint`` collects them."""
        return self.saves.collection

    @property
    def save_failed(self) -> bool:
        """Return whether the last checkpoint could not be written and training went on (``checkpoint.on_error``)."""
        return self.saves.failed

    @override
    def wait_for_saves(self) -> None:
        self.saves.wait()

    # end -------------------------------------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Report the error to the other ranks. If some of them did not fail, close the connections they wait on."""
        try:
            if self.engine is not None:
                self.engine.abort()
        finally:
            self._report(exception)

    def _report(self, exception: BaseException) -> None:
        if self._comm is None and self._start_method != "popen":
            end_processes(self._launcher.procs)  # type: ignore[union-attr]  (of the process that forked the ranks)
            return
        if isinstance(exception, SIGTERMException) and not self.steps.stops_alone:
            return  # the ranks have agreed on it
        if self._comm is None or not dist.is_initialized() or self._comm.world_size == 1:
            return
        waits = self._run.lockstep is not None and self._run.lockstep.in_flight
        place = f"{waits} {self.engine.reducer.abandoned if self.engine is not None else 0}"
        alone = ranks.ends_alone(exception, self._comm, place)
        if alone:
            self.saves.abandon()  # the other ranks will not complete them
        if alone or isinstance(exception, RankFailedError):
            self._break_connections()
            dist.destroy_process_group()
            if self.cluster_environment is not None:
                where = self.cluster_environment.main_address, self.cluster_environment.main_port
                rendezvous.leave(*where, f"{type(exception).__name__}: {exception}")

    @override
    def teardown(self) -> None:
        module = self.lightning_module
        with self._leaving():
            self.engine_setup.detach()
            if module is not None:
                if self._deepspeed is not None:
                    self._deepspeed.disconnect(module)
                guards.unwatch_methods(module)
                self.activations.remove()
                if self._layer_sync and module._trainer is not None and module._trainer.state.fn == TrainerFn.FITTING:
                    self.model = self._layer_sync.revert(module)
            if self.cluster_environment is not None:
                self.cluster_environment.teardown()
            self.zero_precision().teardown()
            self.saves.close(quietly=module is not None and module._trainer is not None and module._trainer.interrupted)
            if self.accelerator is not None:
                self.accelerator.teardown()
            self.checkpoint_io.teardown()
