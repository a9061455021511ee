"""The process group of a strategy: how ranks meet, what they exchange, and how an error on one rank ends all of them.

The one invariant: no rank waits for a rank that has failed. An error either reaches every rank, or the rank that raised
it closes the connections that the others wait on.
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ls_strategy import host
from ls_strategy.distributed.comm import Comm
from ls_strategy.distributed.launch import rendezvous, slurm_job
from ls_strategy.distributed.launch.launcher import end_processes
from ls_strategy.distributed.launch.ray_worker import in_train_function
from ls_strategy.distributed.lockstep import Lockstep
from ls_strategy.engine import Engine
from ls_strategy.errors import OutOfStepError, PlanError, RankFailedError, StateError
from ls_strategy.host.pytorch import Accelerator, Callback, DDPStrategy, SIGTERMException, pl
from ls_strategy.lightning._private import name_logs_by_job, show_as_text
from ls_strategy.lightning.connection import Connection
from ls_strategy.lightning.parallel import ModelParallel

T = TypeVar("T")

_PATIENCE_S = 3.0
"""Seconds that a failed rank waits for the failures of the others before it closes the connections."""

_IN_FABRIC = (
    "Got ZeROStrategy, the strategy of a Trainer, for a Fabric. Use ls_strategy.ZeROFabricStrategy with the same "
    'options, or an alias such as Fabric(strategy="zero3").'
)


class ConnectedCallback(Callback):
    """A callback that acts before the ranks of a strategy meet."""

    def connecting(self, trainer: pl.Trainer) -> None:
        """Act before the process group is made. Not collective.

        Raises:
            ConfigError: on every rank.
        """


class RankStrategy(Connection, DDPStrategy):
    """DDPStrategy with monitored collectives and with errors that reach every rank. `ZeROStrategy` adds the engine."""

    runs_filler: bool = False
    """Whether this rank runs a batch that does not count, because others have more (``uneven="join"``)."""

    islands: tuple[int, int] = (0, 1)
    """Number of this group of ranks, and of all that train the same model on other data (`DiLoCo`)."""

    _precision = None
    """A Fabric reads this before it sets the accelerator, where it is refused."""

    def __init__(self, parallel: ModelParallel, explain_waits_after: float | None, **options: Any) -> None:
        """Make no process group yet.

        Args:
            parallel: model parallelism, which makes the device mesh.
            explain_waits_after: seconds; see `ZeROStrategy`.
            options: of `DDPStrategy`.
        """
        self._connect_later(parallel, explain_waits_after)
        self.engine: Engine | None = None
        """Made in `setup`, for one module on one process group."""
        self._lockstep: Lockstep | None = None
        self._contribution: float | None = None
        """During a step of ranks of which some have no batch: this rank's weight in averages over ranks."""
        self._logs_are_named = False
        self._stops_alone = False
        """Whether a signal ended an evaluation on this rank only."""
        super().__init__(**options)
        host.show_to_others(type(self))

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

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register nothing: `ls_strategy.autoload` registers the aliases, and DDP's must not point to this class."""

    def require_engine(self) -> Engine:
        """Return the engine of the current module.

        Raises:
            StateError: the module is not set up yet.
        """
        if self.engine is None:
            raise StateError("the model is not set up yet: this works from on_fit_start (or on_validation_start) on.")
        return self.engine

    # set-up ----------------------------------------------------------------------------------------------------------

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
        self._lockstep = Lockstep(comm)
        self.engine = None

    def _own_folder(self, parent: str, name: str) -> str:
        """Return rank 0's answer on all ranks. Collective."""
        return self.broadcast(slurm_job.own_folder(parent, name, os.environ) if self.is_global_zero else name)

    # collectives -----------------------------------------------------------------------------------------------------

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a copy, as DDP does, but without its barrier before every reduction.

        The default group is the replicas of the model: the ranks of one replica have the same value.
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
        if self._contribution is not None:
            result = _weigh(result, self._contribution, "mean" if mean else op)
        with mesh.data.blocking("reduce", group=None if group is mesh.data.group else group):
            dist.all_reduce(result, op=op, group=group)
        return result / dist.get_world_size(group) if mean else result

    # errors ----------------------------------------------------------------------------------------------------------

    def all_interrupted(self) -> bool:
        """Return whether an exception ended the same step on every rank, so that all can save together.

        Waits a few seconds for the other ranks.
        """
        complete = self._comm is None or not self._comm.failures.stopped  # else another rank failed alone and has left
        try:
            if self.engine is not None:
                self.engine.check_complete()
        except StateError:
            complete = False  # the others need no message: they do not wait long for this rank
        if self._comm is None or self._comm.world_size == 1:
            return complete
        everyone = complete and self._comm.failures.announce(RuntimeError("interrupted"), patience_s=_PATIENCE_S)
        self._alone = not everyone
        return everyone

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
        if isinstance(exception, SIGTERMException) and not self._stops_alone:
            return  # the ranks have agreed on it
        if self._comm is None or not dist.is_initialized() or self._comm.world_size == 1:
            return
        waits = self._lockstep is not None and self._lockstep.in_flight
        place = f"{waits} {self.engine.reducer.abandoned if self.engine is not None else 0}"
        known = isinstance(exception, OutOfStepError)
        all_failed = not known and self._comm.failures.announce(exception, patience_s=_PATIENCE_S, place=place)
        if not all_failed:
            self._abandon_saves()
        if not all_failed or isinstance(exception, RankFailedError):
            self._break_connections()
            dist.destroy_process_group()
            if self.cluster_environment is not None:
                where = self.cluster_environment.main_address, self.cluster_environment.main_port
                rendezvous.leave(*where, f"{type(exception).__name__}: {exception}")

    def wait_for_saves(self) -> None:
        """Return when every checkpoint that was saved is committed. Collective.

        Raises:
            CheckpointError: one could not be written.
        """

    def _abandon_saves(self) -> None:
        """Give up saves in the background that other ranks will not complete."""


def _weigh(value: Tensor, weight: float, op: Any) -> Tensor:
    """Return what a rank contributes to a reduction over ranks of which only some have a batch.

    Args:
        value: this rank's; of sums it contributes its value, of means ``weight`` times it.
        weight: 0 for a rank without a batch.
        op: ``mean`` or an operation of ``torch.distributed``.
    """
    if op == "mean":
        return value * weight if weight else torch.zeros_like(value)
    if weight:
        return value
    neutral = {dist.ReduceOp.SUM: 0, dist.ReduceOp.PRODUCT: 1}.get(op)
    if neutral is None:
        info = torch.finfo(value.dtype) if value.is_floating_point() else torch.iinfo(value.dtype)
        neutral = info.min if op == dist.ReduceOp.MAX else info.max
    return torch.full_like(value, neutral)
