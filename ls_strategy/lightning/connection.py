"""Connect the ranks of a strategy, under a Trainer and under a Fabric: launcher, process groups, collectives."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ls_strategy import device as dev
from ls_strategy import host
from ls_strategy._torch import open_sockets
from ls_strategy.config import ZeROConfig
from ls_strategy.distributed.comm import Comm, make_comm
from ls_strategy.distributed.launch import interface, rendezvous, slurm_check
from ls_strategy.distributed.launch.launcher import VARIABLE as LAUNCHER
from ls_strategy.distributed.launch.launcher import LauncherWatch
from ls_strategy.errors import ConfigError, PlanError
from ls_strategy.host.pytorch import Callback, pl
from ls_strategy.lightning._private import (
    accept_any_size,
    before_launch,
    free_main_port,
    is_interactive,
    is_started_by_lightning,
)
from ls_strategy.lightning.parallel import ModelParallel
from ls_strategy.lightning.precision import ZeROPrecision
from ls_strategy.pretrained.huggingface import with_memory

if TYPE_CHECKING:
    from ls_strategy.host.pytorch import DDPStrategy as _DDPStrategy
else:
    _DDPStrategy = object

T = TypeVar("T")


class ConnectedCallback(Callback):
    """A callback that acts before the ranks of a strategy meet."""

    def connecting(self, trainer: pl.Trainer) -> None:
        """Act before the process group is made. Not collective.

        Raises:
            ConfigError: on every rank.
        """


class Connection(_DDPStrategy):
    """Comes before a `DDPStrategy`, of a Trainer or of a Fabric, in the bases of a class; monitors its collectives."""

    config: ZeROConfig
    """Every option, in groups."""

    _alone = False
    """Whether this rank failed and others did not."""

    _takes_any_size = False
    """Whether the launcher alone decides on the number of ranks, which may change with every start."""

    def _connect_later(self, parallel: ModelParallel, explain_waits_after: float | None) -> None:
        """Make no process group yet.

        Args:
            parallel: model parallelism, which makes the device mesh.
            explain_waits_after: seconds; see `ZeROStrategy`.
        """
        self.parallel = parallel
        self.explain_waits_after = explain_waits_after
        self._comm: Comm | None = None
        self._watch = LauncherWatch()

    def zero_precision(self) -> ZeROPrecision:
        """Return the precision plugin, made with its defaults if none was set."""
        raise NotImplementedError

    # set-up ----------------------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        free_main_port(environment, rendezvous.free_port)
        accept_any_size(environment)
        if environment is None or environment.creates_processes_externally:
            super()._configure_launcher()
            return
        # Before the other ranks start: they would wait for a rank 0 that has raised.
        rendezvous.check_port(environment.main_address, environment.main_port, environment.global_rank())
        os.environ[LAUNCHER] = str(os.getpid())  # for ranks that this process starts
        host.remember_for_children()
        if self._start_method == "popen" and is_interactive():
            if self.num_processes * self.num_nodes == 1:
                return  # without a launcher, this process is the only rank
            self._start_method = "fork"
        super()._configure_launcher()
        if self._start_method == "fork":
            before_launch(self, self._before_fork)

    def _before_fork(self) -> None:
        """Check that forked ranks can work, and end what an earlier fit in this process has left.

        Raises:
            PlanError: the ranks could not use their devices.
        """
        devices = self.parallel_devices or []
        if any(dev.is_accelerator(device) for device in devices) and dev.is_in_use():
            kind = next(device.type for device in devices if dev.is_accelerator(device))
            raise PlanError(
                f"Got {len(devices)} ranks to fork from this process, but it already uses {kind}, and a forked process "
                f"cannot use {kind} then. Restart the kernel, and before the fit create no tensor on {kind} and call "
                f"nothing that starts it, such as torch.{kind}.get_device_name(). Or set devices=1, which trains in "
                "this process, or run the code as a script."
            )
        if dist.is_initialized() and dist.get_world_size() == 1:
            dist.destroy_process_group()  # the ranks would take it for theirs

    @override
    def setup_environment(self) -> None:
        before = None if dist.is_initialized() else open_sockets()
        self._check_size()
        environment = self.cluster_environment
        self._watch.start(by_lightning=is_started_by_lightning(environment))
        if not dist.is_initialized() and environment is not None:
            self._check_backend()
            self._check_launcher()
            rendezvous.check_left(environment.main_address, environment.main_port)
            if self.num_nodes > 1:
                interface.choose(os.environ, environment.main_address)
            self._take_ranks()  # a forked rank only has its local rank so far
            rendezvous.check_port(environment.main_address, environment.main_port, environment.global_rank())
            rendezvous.check_agent(environment.main_address, environment.main_port)
        super().setup_environment()
        self._watch.starting = False
        self._watch.select_device = dev.selecting()
        expected = self.num_nodes * self.num_processes
        if dist.get_world_size() != expected and not self._takes_any_size:
            raise PlanError(
                f"the launcher started {dist.get_world_size()} ranks, but devices={self.num_processes} and "
                f"num_nodes={self.num_nodes} make {expected}. Make the two agree."
            )
        if self._comm is None or not self._comm.is_alive():
            self._comm = make_comm(before, self._timeout)
            self._comm.locate(self.num_processes)
            self.parallel.connect(self._comm, self.root_device, self._timeout)
            self._alone = False
            self._connected(self._comm)
        self._comm.where.watch(self.explain_waits_after, self.root_device, self._break_connections)

    def _check_size(self) -> None:
        """Compare the Trainer's options with the ranks that ``torchrun`` has started, which all ranks know.

        Raises:
            PlanError: on every rank.
        """
        if "TORCHELASTIC_RUN_ID" not in os.environ or "LOCAL_WORLD_SIZE" not in os.environ:
            return
        ranks, here = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
        fits = here == self.num_processes if self._takes_any_size else ranks == self.num_nodes * self.num_processes
        if not fits:
            raise PlanError(
                f"torchrun started {ranks} ranks, {here} on this node, but the Trainer has "
                f"devices={self.num_processes} and num_nodes={self.num_nodes}. Set devices={here} and "
                f"num_nodes={max(ranks // here, 1)}, or start as many ranks."
            )

    def _check_backend(self) -> None:
        """Refuse a backend that torch does not know; libraries may have registered theirs by now.

        Raises:
            ConfigError: on every rank.
        """
        given = self._process_group_backend
        known = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
        parts = [part.rpartition(":")[2].strip().lower() for part in (given or "").split(",")]
        if given and not {*parts} <= {*dist.Backend.backend_list}:
            raise ConfigError(
                f"Got process_group_backend={given!r}, but torch knows {', '.join(map(repr, known))}, and texts like "
                "'cpu:gloo,cuda:nccl'. Leave it out: nccl is the default on GPUs, and gloo on CPUs."
            )

    def _check_launcher(self) -> None:
        """Compare the Trainer's options with SLURM's variables.

        Raises:
            PlanError: on every rank.
        """
        gpus = self.root_device.type == "cuda"
        slurm_check.require(os.environ, devices=self.num_processes, num_nodes=self.num_nodes, gpus=gpus)

    def _take_ranks(self) -> None:
        """Set the ranks of this process, which the environment of the cluster knows."""
        raise NotImplementedError

    def _connected(self, comm: Comm) -> None:
        """Forget what belonged to earlier process groups."""

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Give every replica of the model its own part of the data."""
        replica, replicas = self.parallel.data_rank
        return {"num_replicas": replicas, "rank": replica}

    # collectives -----------------------------------------------------------------------------------------------------

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Combine the decisions of all ranks. Collective."""
        if self._comm is None:
            return decision
        votes = self._comm.agree(torch.tensor([decision, not decision], dtype=torch.uint8)).tolist()
        return not votes[1] if all else bool(votes[0])

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks. Return at once if this rank failed and others did not."""
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
        """Return a context for a collective of Lightning, so that a wait in it can be explained."""
        comm = self._comm
        if comm is None or comm.world_size == 1 or not comm.is_alive():
            return nullcontext()
        return comm.blocking(kind, **options)

    def on_all_ranks(self, work: Callable[[], T]) -> T:
        """Run ``work``, which must not be collective, on every rank. If it fails on any rank, raise on all. Collective.

        Raises:
            CheckpointError: on the ranks where ``work`` succeeded; the others raise their own error.
        """
        assert self._comm is not None
        return self._comm.on_all_ranks(work)

    def _reading_together(self) -> AbstractContextManager[None]:
        """Return a context in which pretrained weights that every rank needs in full are read once for all ranks."""
        comm = self._comm
        if comm is None or comm.world_size == 1 or not comm.is_alive():
            return nullcontext()
        return with_memory(comm, self.root_device)

    @contextmanager
    def _leaving(self) -> Generator[None, None, None]:
        """Surround the end of a run: whatever happens, the threads that watch it end."""
        try:
            yield
        finally:
            self._watch.stop()
            if self._comm is not None:
                self._comm.where.leave()

    def _break_connections(self) -> None:
        """Make every wait of this rank, and every wait of others for it, fail."""
        if self._comm is not None:
            self._comm.break_connections()
