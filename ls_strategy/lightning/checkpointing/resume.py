"""Restoring a strategy's run from a checkpoint: weights, optimizer states, random numbers, position in the data."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ls_strategy.checkpoint.commit import recover
from ls_strategy.checkpoint.full import load_full_state_dict
from ls_strategy.checkpoint.history import HISTORY, History
from ls_strategy.checkpoint.random import random_states, restore_random_states
from ls_strategy.engine import Engine
from ls_strategy.errors import CheckpointError, PlanError, StateError
from ls_strategy.lightning._private import (
    around_data_setup,
    before_first_fetch,
    end_restart,
    set_loader_states,
    unwrap_optimizer,
)
from ls_strategy.lightning._private_data import follow_reloads, is_resuming
from ls_strategy.lightning._private_uneven import hides_batches
from ls_strategy.lightning.checkpointing import before_batch, contents, data_position
from ls_strategy.lightning.checkpointing.data_resume import DataResume
from ls_strategy.lightning.virtual.data import VirtualLoader
from ls_strategy.lightning.virtual.random import VIRTUAL
from ls_strategy.meta_init.lazy import LazyTensor
from ls_strategy.parallel.tensor.dtensor import has_dtensors

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from ls_strategy.lightning.readings import EngineStrategy
    from ls_strategy.lightning.run_state import RunState


class Resume:
    """State of a loaded checkpoint that is still to be restored."""

    def __init__(self, run: RunState, strategy: EngineStrategy) -> None:
        """Restore nothing yet. ``strategy`` has Lightning's part: files, optimizers, and the precision."""
        self._run, self._strategy = run, strategy
        self.reading = DataResume(run, self)
        """Where the training data continue."""
        self._ours: dict[str, Any] = {}
        """The entries of the last loaded checkpoint that only this package reads."""
        self._position: dict[str, Any] | None = None
        self._loads: list[Callable[[pl.Trainer, dict[str, Any]], None]] = []
        self._weights: Callable[[Engine], None] | None = None
        """Loads weights that wait for the engine."""
        self._random: dict[str, Any] | None = None
        """Random states that wait for the first batch."""
        self._before_iterators: dict[str, Any] | None = None
        """Those with which the iterators of the next epoch are made, until its first batch is fetched."""
        self._between: dict[str, Any] | None = None
        """What a snapshot that was taken between two batches holds of this rank, in addition to a checkpoint."""
        self._history: History | None = None
        """Of the running fit, or of the last one."""
        self._loaded: History | None = None
        """Of the checkpoint that the run has loaded."""
        self._has_trained = False
        """Whether this fit has run a training step."""
        self._goes_back = False
        """Whether a checkpoint was loaded after one."""

    def restores(self, load: Callable[[pl.Trainer, dict[str, Any]], None]) -> None:
        """Call ``load`` when the training data continue, with the entries of a checkpoint that only we read."""
        self._loads.append(load)

    def forget(self) -> None:
        """Forget what waits for a batch: an evaluation has loaded a checkpoint, or a fit had nothing left to do."""
        self._has_trained = self._goes_back = False
        self._position = self._random = self._before_iterators = self._between = self._loaded = None
        self.reading.forget()
        if self._run.virtual is not None:
            self._run.virtual.random.restore({})

    def note_step(self) -> None:
        """Record that this fit runs a training step.

        A fit that loads a checkpoint later (`LearningRateFinder` does so) gets what the caller restores of weights,
        states and progress, but keeps its random numbers, and reads its data as if it had not: as under DDP.
        """
        self._has_trained = True

    def resumes(self, trainer: pl.Trainer) -> bool:
        """Return whether a fit goes on from a checkpoint that it has begun with, and has trained on no batch yet."""
        return is_resuming(trainer) and not self._goes_back

    def load(
        self, path: str | Path, weights_only: bool | None, load_file: Callable[..., dict[str, Any]]
    ) -> dict[str, Any]:
        """Return a Lightning checkpoint of any strategy. Collective.

        Args:
            path: a file or a folder; a folder's tensors are lazy, and every rank reads its part later.
            weights_only: as for ``torch.load``, also of a file on a web server.
            load_file: Lightning's own way to read a file.

        Raises:
            CheckpointError: the folder is not committed, or damaged.
        """
        strategy, comm = self._strategy, self._run.comm
        strategy.wait_for_saves()
        self._goes_back = self._has_trained
        if comm.rank == 0:
            recover(path)
        strategy.barrier("ZeROStrategy.load_checkpoint")
        checkpoint, is_folder = contents.load(path, strategy.checkpoint_io, weights_only, load_file, comm)
        if not isinstance(checkpoint, dict):
            raise CheckpointError(
                f"Got {path}, but it holds a {type(checkpoint).__name__}, and a Lightning checkpoint is a dictionary. "
                "Give one that a Trainer saved."
            )
        self._ours = checkpoint.pop(contents.OURS, {})
        self._take(checkpoint if is_folder else self._ours)  # a file's top level is Lightning's and the user's
        if is_folder and self._between is not None and self._between["loaders"]:
            set_loader_states(checkpoint, self._between["loaders"])
        return checkpoint

    def _take(self, saved: dict[str, Any]) -> None:
        """Take what the run continues with besides weights, states and progress. ``saved`` has the random states."""
        states, virtual = saved.pop(contents.RANDOM, {}), self._run.virtual
        if self._goes_back:
            return
        self._position, self._between = self._ours, None
        self._loaded = History.of(self._ours.get(HISTORY))
        self.reading.take(states, self._ours.get("world_size"))
        if self._ours.get(before_batch.MARK):
            self._take_between(states)
        self._random = states.get(f"rank_{self._run.parallel.first_rank}")
        if virtual is not None:
            self._random = self._random or states.get("rank_0")  # of the same seed, as long as hooks draw on all ranks
            virtual.random.restore({k: v for each in states.values() for k, v in each.get(VIRTUAL, {}).items()})
        (self._random or {}).pop(VIRTUAL, None)

    def _take_between(self, states: dict[str, Any]) -> None:
        ranks = self._run.comm.world_size
        if len(states) != ranks and self._run.virtual is None:
            raise PlanError(
                f"Got a snapshot of {len(states)} ranks on {ranks} ranks, but without virtual ranks another number of "
                f"ranks trains on other batches. Set parallel.virtual_ranks={len(states)}, or start as many ranks."
            )
        self._between = before_batch.of_rank(states, self._run.comm.rank, ranks)
        end_restart(self._run.require_module().trainer, self._continue_between)

    @property
    def between_batches(self) -> bool:
        """Return whether the run continues from a snapshot, inside an epoch whose iterators had been made."""
        return self._between is not None

    def _continue_between(self) -> None:
        """Restore what a snapshot holds besides a checkpoint, before the first batch is fetched."""
        module, states = self._run.require_module(), self._between
        assert states is not None
        before_batch.restore(states, module.trainer, module)
        self._between = None
        self.restore_random_states()

    # weights and optimizer states ------------------------------------------------------------------------------------

    def load_weights(self, weights: Mapping[str, Any], *, strict: bool) -> None:
        """Load weights into the module, or keep them until there is an engine that can. Collective with an engine."""
        module, engine = self._run.require_module(), self._run.engine
        may_lack = self._ours.get("left_out", ())

        def load(engine: Engine) -> None:
            load_full_state_dict(module, weights, engine.units, strict=strict, may_lack=may_lack)

        if engine is not None and Engine.holding(module) is engine:
            self._run.comm.on_all_ranks(partial(load, engine))
        elif (
            may_lack
            or any(p.is_meta for p in module.parameters())
            or has_dtensors(module)
            or any(isinstance(v, LazyTensor) for v in weights.values())
        ):
            self._weights = load
        else:
            if self._strategy.zero_precision().precision == "64-true":
                module.double()  # Lightning converts later, so that resumed DDP runs round the weights to fp32
            module.load_state_dict(weights, strict=strict)

    def weights_for(self, engine: Engine) -> None:
        """Load weights that waited for this engine, if there are any. Collective then."""
        if self._weights is not None:
            load, self._weights = self._weights, None
            self._run.comm.on_all_ranks(partial(load, engine))

    def load_optimizer_states(self, engine: Engine, states: Sequence[dict[str, Any]]) -> None:
        """Load optimizer states, by parameter name (folders) or by position (files). Collective.

        A hook of the user's may have removed all states: then they start afresh, as under Lightning's strategies.

        Raises:
            StateError: states by position are not of as many optimizers as there are.
        """
        optimizers = self._strategy.optimizers
        indices = [engine.index_of(unwrap_optimizer(o)) for o in optimizers]
        if contents.is_named(states):
            self._run.comm.on_all_ranks(partial(contents.load_optimizers, engine, indices, states))
            return
        if states and len(states) != len(optimizers):
            raise StateError(
                f"the checkpoint holds the states of {len(states)} optimizers, configure_optimizers returned "
                f"{len(optimizers)}. Return the same optimizers, in the same order."
            )
        for index, state in zip(indices, states, strict=False):
            if index is not None:
                engine.optimizers[index].sharded.states.load_full_state_dict(state)

    def history(self) -> dict[str, Any]:
        """Return what a checkpoint needs so that its age can be compared with that of others of its run."""
        return {} if self._history is None else {HISTORY: self._history.to_dict()}

    # random numbers and data -----------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Return whether random states wait for the first batch."""
        return self._random is not None

    def on_batch(self) -> None:
        """Restore random states once the first training batch was fetched, before the module sees it."""
        module = self._run.module
        if self.pending and module is not None and module.trainer.training:
            self.restore_random_states()

    def restore_random_states(self) -> None:
        """Restore the random states of the checkpoint, once."""
        self._position = self._before_iterators = None
        states, self._random = self._random, None
        if states is not None:
            restore_random_states(states)

    def begin_fit(self, trainer: pl.Trainer) -> None:
        """Take part when the fit begins with its training data, after Lightning has restored the progress."""
        before = self._loaded if self._position is not None or not trainer.global_step else self._history
        self._history = History.begin() if before is None else before.goes_on()
        around_data_setup(trainer, partial(self._beginning, trainer), self._go_on)

    @contextmanager
    def _beginning(self, trainer: pl.Trainer) -> Generator[None, None, None]:
        if not is_resuming(trainer):  # user code has only looked into a checkpoint
            self.forget()
        if self._run.virtual is not None:
            self._run.virtual.begun = True
        with self.making_iterators():
            yield
        self.reading.made()
        if self.resumes(trainer):
            follow_reloads(trainer)
            data_position.warn_of_lost_gradients(trainer)
        done: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        if self.pending and done.ready == done.processed and not hides_batches(trainer.fit_loop._data_fetcher):
            # The states are those before the next fetch, in which samplers and datasets may draw.
            before_first_fetch(trainer, self.restore_random_states)

    def _go_on(self, loaders: list[Any]) -> bool:
        """Let loaders that were made before the progress was restored continue. Return whether iterators have to."""
        virtual = self._run.virtual
        moved = [
            self.data(each) for one in loaders for each in (one.loaders if isinstance(one, VirtualLoader) else [one])
        ]
        waits = self.makes_iterators or self.between_batches or self.reading.moves_iterators
        return any(moved) or waits or (virtual is not None and self.pending)

    @property
    def makes_iterators(self) -> bool:
        """Return whether the first iterator over the training data draws its seeds from the saved random states."""
        module = self._run.module
        if not self.pending or module is None:
            return False
        batches: Any = module.trainer.fit_loop.epoch_loop.batch_progress
        ends = batches.is_last_batch and batches.current.ready == batches.current.processed  # not before its last step
        return ends or self.reading.begins_epoch

    @contextmanager
    def making_iterators(self) -> Generator[None, None, None]:
        """Surround the creation of the first iterator over the training data after a resume.

        Between two epochs the iterator draws its seeds from the saved random states. In the middle of an epoch it does
        not: the uninterrupted run made the iterator of that epoch earlier.
        """
        if not self.makes_iterators:
            yield
            return
        self._before_iterators = self._random
        self.before_iterators()
        yield
        self.after_iterators()

    def before_iterators(self) -> None:
        """Restore the random states from which the next epoch's iterators draw; Lightning may make them repeatedly."""
        if self._before_iterators is not None:
            restore_random_states(self._before_iterators)

    def after_iterators(self) -> None:
        """Undo what hooks draw from now on before the first batch."""
        if self._before_iterators is not None:
            self._random = random_states()

    def data(self, dataloader: Any) -> bool:
        """Let the training data continue where the checkpoint was saved. Return whether iterators stand elsewhere."""
        module = self._run.module
        trainer = None if module is None else module._trainer
        data_position.forget(dataloader)
        if not self._position or trainer is None or not trainer.training or not self.resumes(trainer):
            return False
        for load in self._loads:
            load(trainer, self._position)
        return data_position.resume(trainer, dataloader, self._position)
