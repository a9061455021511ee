"""`ElasticTraining`: a run that continues when ranks or nodes are lost or added, from snapshots in memory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from ls_strategy import device as dev
from ls_strategy.checked import at_least, checked
from ls_strategy.distributed.launch import slurm_job
from ls_strategy.distributed.launch.ray_worker import in_train_function
from ls_strategy.errors import CheckpointError, ConfigError, PlanError, StateError
from ls_strategy.extras._lightning import (
    Unnamed,
    accumulates,
    before_batches,
    checkpoint_folder,
    choose_checkpoint,
    name_logs,
    overwrite_saved_config,
)
from ls_strategy.extras.callbacks import elastic_errors
from ls_strategy.extras.callbacks.continued import newest_of_run
from ls_strategy.extras.callbacks.continued import run_of as _run_of
from ls_strategy.extras.callbacks.corruption_check import CorruptionCheck
from ls_strategy.extras.callbacks.elastic_failures import Failures, LeftOutError
from ls_strategy.extras.callbacks.preemption import PreemptionHandler
from ls_strategy.extras.snapshots import progress
from ls_strategy.extras.snapshots.find import Found, listing
from ls_strategy.extras.snapshots.memory import Memory, root
from ls_strategy.extras.snapshots.nodes import Nodes
from ls_strategy.extras.snapshots.progress import agent_store_is_shared, run_name
from ls_strategy.extras.snapshots.remote import close_snapshots, open_snapshot
from ls_strategy.extras.snapshots.verify import Damage, newest_whole
from ls_strategy.extras.snapshots.write import InMemory
from ls_strategy.host.pytorch import MisconfigurationException, ModelCheckpoint, pl, rank_zero_info, rank_zero_warn
from ls_strategy.lightning._private import fetches_one_by_one, training_loaders
from ls_strategy.lightning.checkpointing.data_position import order_is_known
from ls_strategy.lightning.connection import ConnectedCallback
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.lightning.virtual.data import VirtualLoader

_COST = 0.01  # the share of the time that snapshots may take with ``max_repeated_steps="auto"``
_MOST_STEPS = 1000  # limits ``"auto"`` where steps are short
_PERMANENT = (ConfigError, PlanError, CheckpointError, StateError, MisconfigurationException)
"""Errors about what the user has given: the same at every start."""

_LOST = "Parts of a snapshot were lost with more nodes than one copy makes up for."


class ElasticTraining(ConnectedCallback):
    """Takes snapshots in memory, and continues from the newest complete one when the launcher starts the ranks again.

    ::

        every K optimizer steps   each rank copies its states in the background to its node's memory and to a buddy node
        a rank or a node is lost  torchrun starts all ranks again, on the nodes that there are
        start                     the ranks find the newest snapshot that is complete; without one, the newest
                                  checkpoint of this run in the folders of ModelCheckpoint
        a rank is wrong twice     as `CorruptionCheck` says: with virtual ranks, the run goes on without its node
        end of the fit            the snapshots are removed

    With ``parallel.virtual_ranks`` the run continues on any number of ranks with the bits of a run that nothing
    happened to; without, on as many ranks as before. Start the program with
    ``torchrun --nnodes=MIN:MAX --max-restarts=R --rdzv-backend=c10d --rdzv-id=NAME --rdzv-endpoint=HOST:PORT`` and
    ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``. ``Trainer(num_nodes=...)`` follows the launcher.

    The log, and the loggers under ``elastic/``, have every restart: the ranks, the nodes that left and came, the steps
    that are repeated, and the seconds from the last finished step to the next one; and the ranks that are left out.
    """

    @checked(max_repeated_steps=at_least(1))
    def __init__(
        self,
        max_repeated_steps: int | Literal["auto"] = "auto",
        *,
        memory: str | os.PathLike[str] | None = None,
        run: str | None = None,
    ) -> None:
        """Set the options; none is required.

        Args:
            max_repeated_steps: the most optimizer steps that a loss repeats. A snapshot is taken after half as many,
                and training waits for one that is not complete in time; 1 waits for every one. ``"auto"`` takes as many
                steps between two snapshots as keep the time that training waits for them below 1 %, on the CPU with the
                time of the thread that writes; a loss repeats those, and the steps that ran while the newest one was
                being written.
            memory: folder on a memory file system of the node. Default: ``$LS_STRATEGY_MEMORY``, or a folder of this
                user in ``/dev/shm``. A snapshot needs the bytes of a checkpoint, twice with more than one node, and
                twice again while it is written.
            run: the name of the run, the same whenever it is started again. Default: the SLURM job, or the
                ``--rdzv-id``, together with the Trainer's ``default_root_dir``.

        Raises:
            ConfigError: a value is out of its range, or ``memory`` is empty.
        """
        if memory is not None and not os.fspath(memory):
            raise ConfigError(
                "Got memory='', which names no folder. Name one on a memory file system, or leave memory out."
            )
        self.max_repeated_steps = max_repeated_steps
        self.memory = memory
        self.run = run
        self._run = ""
        self._nodes: Nodes | None = None
        self._failures: Failures | None = None
        self._leaving: list[int] = []  # ranks that are left out after the running step
        self._progress: progress.Progress | None = None
        self._undo: Any = None
        self._found: Found | None = None
        self._left_out: list[Damage] = []
        self._trained = False  # whether this start has trained a step
        self._lost_at = 0.0
        self._last_step = -1
        self._lost_steps = 0
        self._reports = False
        self._every = 1
        self._due = 0
        # Steps of the newest snapshot, and of the newest one that is known to be complete; the same on all ranks.
        self._begun = self._complete = 0
        self._since = 0.0
        self.taken = 0  # snapshots that this process has begun in the running fit
        self._error: CheckpointError | None = None

    # start -----------------------------------------------------------------------------------------------------------

    @override
    def connecting(self, trainer: pl.Trainer) -> None:
        """Let the launcher decide on the number of nodes, and name the logs by the run."""
        strategy: Any = trainer.strategy
        if in_train_function():
            raise ConfigError(
                "Got ElasticTraining in a train function of Ray Train, which starts workers again by itself. Use "
                "ls_strategy.ray.RayReportCallback, and RunConfig(failure_config=FailureConfig(max_failures=...))."
            )
        if agent_store_is_shared(os.environ):
            raise ConfigError(
                "Got ElasticTraining under torchrun with a store that the agents share with the ranks, but that store "
                "keeps the addresses of ranks that have ended, and a change of nodes would hang. Set "
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun."
            )
        self._run = run_name(self.run, os.environ, trainer.default_root_dir)
        self._trained = False
        if "TORCHELASTIC_RUN_ID" in os.environ:
            ranks, here = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
            strategy.num_nodes = max(ranks // here, 1)
            strategy._takes_any_size = True
            if trainer.state.fn == "fit":
                name_logs(trainer, f"run_{self._run}")

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find the newest snapshot of this run in the memories of all nodes. Collective."""
        if stage != "fit":
            return
        strategy = self._check(trainer, pl_module)
        # Last, so that other callbacks have seen the end of a step before its snapshot is taken.
        trainer.callbacks = [c for c in trainer.callbacks if c is not self] + [self]  # type: ignore[attr-defined]
        comm = strategy.parallel.world
        assert comm is not None
        memory = strategy.on_all_ranks(self._open)
        self._close()
        self._nodes = Nodes(
            memory, comm.rank, os.environ.get("MASTER_ADDR"), comm.exchange_objects, strategy.on_all_ranks
        )
        self._find(comm.exchange_objects)
        self._leaving = []
        self._failures = None if strategy.virtual is None else Failures(self._nodes, comm.exchange_objects)
        if self._last_step >= 0 or _is_restarted(os.environ):
            overwrite_saved_config(trainer)
        choose_checkpoint(trainer, lambda given: self._choose(trainer, strategy, given))

    def _open(self) -> Memory:
        return Memory(root(os.environ) if self.memory is None else Path(self.memory).resolve(), self._run)

    def _check(self, trainer: pl.Trainer, module: pl.LightningModule) -> ZeROStrategy:
        strategy = trainer.strategy
        if not isinstance(strategy, ZeROStrategy):
            raise ConfigError(
                f"Got ElasticTraining with {type(strategy).__name__}, whose states it cannot copy. Use a strategy of "
                'ls_strategy, such as Trainer(strategy="zero2").'
            )
        if not module.automatic_optimization:
            raise ConfigError(
                "Got ElasticTraining with automatic_optimization=False, but then nothing says between which batches no "
                "gradients are waiting. Use PreemptionHandler and ModelCheckpoint instead."
            )
        if strategy.uneven.joins:
            raise ConfigError(
                "Got ElasticTraining with uneven='join', whose ranks take snapshots at different batches. Leave one of "
                "the two out."
            )
        return strategy

    def _find(self, exchange: Any) -> None:
        """Find the newest complete snapshot, and what the run did last. Collective."""
        nodes = self._nodes
        assert nodes is not None
        mine: Any = None
        if nodes.is_lead:
            nodes.memory.free_unused()
            folder = nodes.memory.folder
            mine = nodes.own.id, listing(nodes.memory), progress.last(folder), progress.members(folder)
        found = [each for each in exchange(mine) if each is not None]
        self._found, self._left_out = newest_whole({node: each for node, each, _, _ in found}, nodes, exchange)
        self._last_step, self._lost_at = max(last for _, _, last, _ in found)
        before = max((members for _, _, _, members in found), key=lambda each: (len(each), str(each)))
        members = exchange({"rank": nodes.rank, "host": os.uname().nodename, "node": nodes.own.id})
        if self._last_step >= 0:
            rank_zero_info(f"ElasticTraining: {progress.change(before, members)}")
        for damage in self._left_out:
            rank_zero_info(f"ElasticTraining: {damage.described(members, self._found)}")
        if nodes.is_lead:
            progress.note_members(nodes.memory.folder, members)
            self._progress = progress.Progress(nodes.memory.folder)

    def _choose(self, trainer: pl.Trainer, strategy: ZeROStrategy, given: Any) -> Any:
        """Return the path to continue from: a snapshot, a checkpoint of this run on disk, or what the user gave."""
        nodes = self._nodes
        assert nodes is not None
        started = nodes.memory.folder / "started"
        command = strategy.broadcast(repr(given))
        other = nodes.is_lead and started.exists() and started.read_text() != command
        if strategy.broadcast(other):  # the user has started the run again, from another checkpoint
            self._found = None
        if nodes.is_lead:
            if self._found is None:
                nodes.memory.keep("")
            started.write_text(command)
        self._reports = False
        if self._found is not None:
            self._report_snapshot(self._found, nodes)
            return open_snapshot(self._run, self._found, nodes)
        restarted = self._last_step >= 0 or _is_restarted(os.environ)
        on_disk = None
        if restarted:
            look = trainer.is_global_zero
            on_disk = strategy.broadcast(strategy.on_all_ranks(lambda: self._newest_of_run(trainer) if look else None))
        if restarted:
            where = f"{on_disk} on disk" if on_disk else (given or "the beginning")
            rank_zero_warn(
                f"ElasticTraining: no complete snapshot of the run {self._run} is in memory, so it continues from "
                f"{where}. " + ("All that there were are damaged." if self._left_out else _LOST)
            )
        return given if on_disk is None else Unnamed(on_disk)

    def _report_snapshot(self, found: Found, nodes: Nodes) -> None:
        self._lost_steps = max(self._last_step - found.step, 0)
        self._reports = self._lost_at > 0
        here = sum(nodes.own.id in having for _, having in found.files.values())
        rank_zero_info(
            f"ElasticTraining: continues after step {found.step} from the snapshot of {found.world_size} ranks in "
            f"memory ({here} of its {len(found.files)} files on this node); {self._lost_steps} steps are repeated"
        )

    def _newest_of_run(self, trainer: pl.Trainer) -> str | None:
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if any(isinstance(c, PreemptionHandler) for c in callbacks):
            return None  # it looks there, and in its own folder
        folders = [checkpoint_folder(c, trainer) for c in callbacks if isinstance(c, ModelCheckpoint)]
        found = newest_of_run(folders, lambda path: _run_of(path, self.state_key) == self._run)
        if found.skipped:
            rank_zero_warn(
                "ElasticTraining: the run does not continue from newer checkpoints that are damaged or cannot be read. "
                f"{found}. If you trust one, start the run again with it as ckpt_path; or remove it."
            )
        return found.path

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the name of the run: a checkpoint of another one is not continued from."""
        return {"run": self._run}

    # steps -----------------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take a snapshot between batches from now on.

        Raises:
            ConfigError: the run could not continue with the next batch of the training data.
        """
        _check_loaders(trainer)
        fixed = self.max_repeated_steps
        self._every = 1 if isinstance(fixed, str) else max(fixed // 2, 1)
        self._due = trainer.global_step + self._every
        self._begun = self._complete = trainer.global_step
        self.taken, self._error = 0, None
        self._since = time.perf_counter()
        self._begun_at = trainer.global_step
        self._undo = before_batches(trainer, lambda: self._before_batch(trainer))
        if self._failures is not None:
            for check in _checks(trainer):
                check.failures.update(self._failures.by_rank())
                check.on_failure = partial(self._note_failure, trainer, self._failures, check)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the step, and after a restart log what it has cost."""
        if not self._trained and self._nodes is not None and self._nodes.is_lead:
            elastic_errors.forget(self._nodes.memory.folder)
        self._trained = True
        if self._progress is not None:
            self._progress.note(trainer.global_step)
        if self._reports and trainer.global_step > self._begun_at:
            self._reports = False
            seconds = time.time() - self._lost_at
            rank_zero_info(
                f"ElasticTraining: {seconds:.1f} s from the last finished step to the next one, on "
                f"{trainer.world_size} ranks"
            )
            values = {
                "elastic/seconds": seconds,
                "elastic/repeated_steps": float(self._lost_steps),
                "elastic/ranks": float(trainer.world_size),
            }
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.global_step)

    def _before_batch(self, trainer: pl.Trainer) -> None:
        """Take a snapshot if it is due, and wait for it if the next step would be one too many. Collective then."""
        step, most = trainer.global_step, self.max_repeated_steps
        if accumulates(trainer):
            return
        if step >= self._due:
            if self._leaving:
                self._leave(trainer, step)
            self._begin(trainer, step)
        if not isinstance(most, str) and self._begun > self._complete and step + 1 - self._complete > most:
            strategy: Any = trainer.strategy
            strategy.wait_for_saves()
            if self._error is None:
                self._complete = self._begun

    def _note_failure(self, trainer: pl.Trainer, failures: Failures, check: CorruptionCheck) -> bool:
        """Return whether the run goes on without a rank that was wrong twice. Called on all ranks."""
        leaving = failures.note(check.failures)
        if leaving:
            self._leaving = leaving
            self._due = trainer.global_step + 1
        return bool(leaving)

    def _leave(self, trainer: pl.Trainer, step: int) -> None:
        """Take a snapshot of the right values that the step has used, and end all ranks. Collective.

        Raises:
            LeftOutError: always.
        """
        strategy, nodes = trainer.strategy, self._nodes
        assert isinstance(strategy, ZeROStrategy)
        assert nodes is not None
        strategy.wait_for_saves()
        self._error = None
        strategy.saves.snapshot(InMemory(nodes, step), f"the snapshot of step {step}", self._failed)
        strategy.wait_for_saves()
        for rank in self._leaving:
            for logger in trainer.loggers:
                logger.log_metrics({"elastic/left_out": float(rank)}, step=step)
        since = f"after step {step}" if self._error is None else f"from the last snapshot ({self._error})"
        ranks = ", ".join(map(str, self._leaving))
        raise LeftOutError(
            f"ElasticTraining: CorruptionCheck has found a rank wrong for the second time, so the run goes on {since} "
            f"without the ranks {ranks} of its node. Test the node before it trains again.",
            self._leaving,
        )

    def copy_for_rewind(self, trainer: pl.Trainer) -> Callable[[bool], None]:
        """Return a function for when the run has gone back to this step: the newest snapshot is of undone steps then.

        It lets the next one be due; with the same batches behind them, since loaders stand there.
        """
        step = trainer.global_step

        def put_back(batches: bool) -> None:
            self._due = trainer.global_step + 1 if batches else step
            self._begun_at = step
            self._begun = self._complete = min(self._complete, step)

        return put_back

    def _begin(self, trainer: pl.Trainer, step: int) -> None:
        """Take a snapshot, unless something is still being written. Collective."""
        strategy: Any = trainer.strategy
        world = strategy.require_engine().mesh.world
        if bool(world.agree(torch.tensor([strategy.saves.in_flight], dtype=torch.uint8)).item()):
            return  # a checkpoint, or the snapshot before this one
        if self._error is None:
            self._complete = self._begun
        self._check_the_last(step)
        # Without an accelerator, the thread that writes takes its time from training.
        written_s = strategy.saves.busy_s if dev.is_host(strategy.root_device) else 0.0
        start = time.perf_counter()
        nodes = self._nodes
        assert nodes is not None
        strategy.saves.snapshot(InMemory(nodes, step), f"the snapshot of step {step}", self._failed)
        self.taken += 1
        self._begun = step
        self._due = step + self._next(world, start, step, written_s)

    def _failed(self, error: CheckpointError) -> None:
        self._error = error

    def _check_the_last(self, step: int) -> None:
        """Report the error of the last snapshot, which is the same on all ranks; of the first one, raise it.

        Raises:
            CheckpointError: the run has no snapshot at all.
        """
        error, self._error = self._error, None
        if error is None:
            return
        if self.taken == 1:
            raise CheckpointError(
                f"{error} The run could not survive a loss. Free memory on the nodes, or set "
                "ElasticTraining(memory=...)."
            ) from error
        rank_zero_warn(f"ElasticTraining: at step {step} the snapshot before the last one counts. {error}")

    def _next(self, world: Any, start: float, step: int, written_s: float) -> int:
        """Return the steps until the next snapshot, which has begun at ``start``. Collective."""
        now = time.perf_counter()
        if not isinstance(self.max_repeated_steps, str):
            return self._every
        steps = max(step - self._begun_at, 1)
        times: Tensor = world.agree(
            torch.tensor([now - start + written_s, (start - self._since) / steps], dtype=torch.float64)
        )
        self._since, self._begun_at = now, step
        taken, each = times.tolist()
        return min(max(int(taken / (_COST * max(each, 1e-6))) + 1, 1), _MOST_STEPS)

    # end -------------------------------------------------------------------------------------------------------------

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remove the snapshots: the run is complete. Collective."""
        strategy, nodes = trainer.strategy, self._nodes
        assert isinstance(strategy, ZeROStrategy)
        if nodes is None:
            return
        strategy.wait_for_saves()
        if self._error is not None:
            rank_zero_warn(f"ElasticTraining: {self._error}")
        strategy.barrier("ElasticTraining.on_fit_end")
        lead, memory = nodes.is_lead, nodes.memory
        self._close()
        if lead:
            memory.clear()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave the snapshots for the next start, unless it would end with the same error."""
        self._end_if_again(trainer, exception)
        if isinstance(exception, LeftOutError) and trainer.global_rank in exception.ranks:
            launcher = elastic_errors.launcher()
            if launcher is not None and os.environ.get("LOCAL_RANK") == "0":
                elastic_errors.end(launcher, exception, "the other nodes go on without this one, so torchrun ends.")
        if self._undo is not None:
            self._undo()
            self._undo = None

    def _end_if_again(self, trainer: pl.Trainer, error: BaseException) -> None:
        """Note an error before the first step; end the launcher if the start before ended with the same one."""
        if self._trained or not isinstance(error, _PERMANENT) or os.environ.get("LOCAL_RANK") != "0":
            return
        if self._found is not None and isinstance(error, (PlanError, CheckpointError)):
            return  # of a snapshot, on the nodes that there are now: a lost one may come back
        with contextlib.suppress(Exception):  # the run ends with its own error
            again = elastic_errors.came_again(self._open().folder, error, trainer.world_size)
            launcher = elastic_errors.launcher()
            if again and launcher is not None and elastic_errors.has_restarts(os.environ):
                elastic_errors.end(launcher, error, elastic_errors.AGAIN)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Stop serving this node's memory."""
        self._close()

    def _close(self) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None
        if self._progress is not None:
            self._progress.close()
            self._progress = None
        if self._nodes is not None:
            self._nodes.close()
            self._nodes = self._failures = None
        close_snapshots()


def _checks(trainer: pl.Trainer) -> list[CorruptionCheck]:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [each for each in callbacks if isinstance(each, CorruptionCheck)]


def _check_loaders(trainer: pl.Trainer) -> None:
    for loader in training_loaders(trainer):
        first = loader.loaders[0] if isinstance(loader, VirtualLoader) else loader
        known = hasattr(first, "load_state_dict") or order_is_known(first)
        if not known or not fetches_one_by_one(trainer):
            raise ConfigError(
                f"Got ElasticTraining with a {type(first).__name__} whose next batch cannot be known after a restart: "
                "it has no length, or its sampler has an order of its own. Leave the sampler to Lightning "
                "(use_distributed_sampler=True), use a DistributedSampler, or give the loader a length, state_dict and "
                "load_state_dict."
            )


def _is_restarted(environ: Any) -> bool:
    """Return whether the launcher has started this run before."""
    return environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" or bool(slurm_job.restarts(environ))
