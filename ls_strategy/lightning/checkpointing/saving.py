"""Saving a strategy's checkpoints: collect, write, link and remove them.

The one invariant: a checkpoint is removed only after the one that replaces it is committed.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Container, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from ls_strategy.checkpoint.background import BackgroundSaver
from ls_strategy.checkpoint.commit import link as link_checkpoint
from ls_strategy.checkpoint.commit import remove as remove_checkpoint
from ls_strategy.checkpoint.full import full_state_dict, stand_ins
from ls_strategy.checkpoint.place import CheckpointPath
from ls_strategy.checkpoint.random import random_states
from ls_strategy.checkpoint.save import SaveTarget
from ls_strategy.checkpoint.shared_file import can_share
from ls_strategy.checkpoint.source import versions_of, with_versions
from ls_strategy.checkpoint.target import check_replaceable
from ls_strategy.errors import CheckpointError
from ls_strategy.host.pytorch import TrainerFn, TrainerStatus, rank_zero_info, rank_zero_warn
from ls_strategy.lightning._private import AFTER_SAVE, dump_again, dump_for_resume, unwrap_optimizer
from ls_strategy.lightning.checkpointing import before_batch, contents, data_position
from ls_strategy.lightning.checkpointing.contents import Background, Collection, FileCollection
from ls_strategy.lightning.checkpointing.data_resume import DATA
from ls_strategy.lightning.checkpointing.kind import Kind, disks_of, gets_checkpoints, kind_of
from ls_strategy.lightning.virtual.random import VIRTUAL
from ls_strategy.zero.flat.parameters import unnoticed

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from ls_strategy.engine import Engine
    from ls_strategy.lightning.checkpointing.resume import Resume
    from ls_strategy.lightning.engine_setup import EngineSetup
    from ls_strategy.lightning.loop.plain import StepLoop
    from ls_strategy.lightning.readings import EngineStrategy
    from ls_strategy.lightning.run_state import RunState

_FITTING = (TrainerFn.FITTING, TrainerStatus.RUNNING)
"""The Trainer's state during a fit, including its validation."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.16
"""Seconds between two questions whether all ranks have written their parts. They double up to the longest, which keeps
the questions of a long save, collective calls of one byte, below seven per second."""


class Saves:
    """The saves of a strategy, some of which may run in the background."""

    def __init__(
        self, run: RunState, strategy: EngineStrategy, loop: StepLoop, engine_setup: EngineSetup, resume: Resume
    ) -> None:
        """Save nothing yet.

        Args:
            run: what is saved.
            strategy: has Lightning's part: how files are written, and what a subclass of the user's overrides.
            loop: has a state of its own.
            engine_setup: has the engine of the module as it is now.
            resume: knows where the data have been read to.
        """
        self.failed = False
        """Whether the last checkpoint could not be written and training went on (``checkpoint.on_error``)."""
        self.collection: Collection | None = None
        """The contents of a checkpoint folder while ``trainer.save_checkpoint`` collects them."""
        self._run, self._strategy, self._loop = run, strategy, loop
        self._engine_setup, self._resume = engine_setup, resume
        self._saver: BackgroundSaver | None = None
        self._snapshot: SaveTarget | None = None
        """Where the checkpoint that is being collected goes, if that is not a path of the user's."""
        self._kind = Kind(is_file=True, why="")
        """The kind of the checkpoint that is being collected, or was collected last."""
        self._dumping = False
        """Whether what goes into a file is being gathered for a checkpoint."""
        self._gathers = False
        """Whether files go where the ranks cannot write them together, or code of the user's gets their contents."""
        self._shared = {""}
        """Folders in which the ranks can."""
        self._just_begun = False
        """Whether the last save has only begun."""

    @contextmanager
    def collecting(self) -> Generator[bool, None, None]:
        """Surround what Lightning collects for one checkpoint; yield False if there is to be no checkpoint."""
        engine, module = self._run.engine, self._run.module
        if module is not None and module.trainer.interrupted and not self._strategy.all_interrupted():
            rank_zero_warn("No checkpoint is saved on this exception: other ranks continue, or a step is incomplete.")
            yield False
            return
        state = None if module is None else module.trainer.state
        if engine is not None and state is not None and (state.fn, state.status) == _FITTING:
            engine = self._engine_setup.follow_optimizers()
        is_file = engine is None or (self._snapshot is None and self._decide(engine).is_file)
        if engine is None or (is_file and not self._kind.together):
            self._dumping = engine is not None
            try:
                yield True
            finally:
                self._dumping = False
            return
        engine.check_complete()
        engine.wait()
        frozen = self._run.config.checkpoint.frozen
        self.collection = FileCollection(engine) if is_file else Collection(engine, frozen=frozen)
        try:
            yield True
        except BaseException:
            self.collection = None
            raise

    def _decide(self, engine: Engine) -> Kind:
        """Return the kind of the next checkpoint, and log it if it is another than before. Collective."""
        before, module = self._kind, self._run.module
        hooks = module is not None and gets_checkpoints(module)
        disks = disks_of(engine) if self._may_write_together() else ""
        self._kind = kind_of(engine, engine.mesh.world.exchange_objects, hooks=hooks, disks=disks)
        if self._kind.why and (not before.why or before.is_file != self._kind.is_file):
            rank_zero_info(str(self._kind))
        return self._kind

    def _may_write_together(self) -> bool:
        """Return whether neither a plugin nor a subclass of the user's gets the contents of files."""
        strategy = self._strategy
        methods = (strategy.save_checkpoint, strategy.lightning_module_state_dict, strategy.optimizer_state)
        ours = all(method.__module__.startswith("ls_strategy.") for method in methods)
        return ours and not self._gathers and contents.is_lightnings(strategy.checkpoint_io)

    def weights(self) -> dict[str, Any]:
        """Return full weights on the CPU of rank 0, or stand-ins while a folder is collected. Collective without it."""
        engine, module = self._run.engine, self._run.require_module()
        if engine is None:
            return module.state_dict()
        if self.collection is not None:
            return self.collection.weights(self.raw_weights())
        engine.check_complete()
        released = self.raw_weights()
        everywhere = self._dumping and self._kind.everywhere
        full = full_state_dict(released, engine.units, engine.mesh, all_ranks=everywhere)
        merged = {k: v for part in engine.mesh.pipeline.exchange_objects(full) for k, v in part.items()}
        ordered = {name: merged[name] for name in released if name in merged}
        if merged:
            return with_versions({**ordered, **merged}, versions_of(released))
        if self._engine_setup.state_dict_hooks is None:
            return released
        return stand_ins(released, engine.units) if self._dumping else {}

    def raw_weights(self) -> dict[str, Any]:
        """Return the module's own ``state_dict()``, at stage 3 with released parameters."""
        if self._run.engine is not None:
            self._run.engine.wait()
        with self._gathering_nothing():
            return self._run.require_module().state_dict()

    def _gathering_nothing(self) -> AbstractContextManager[None]:
        """Return a context in which ``state_dict()`` of the module and its parts is not collective."""
        hooks = self._engine_setup.state_dict_hooks
        return unnoticed() if hooks is None else hooks.disabled()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer: full, or stand-ins while a folder is collected. Collective without it."""
        inner, engine = unwrap_optimizer(optimizer), self._run.require_engine()
        engine.state_offload.require()
        collection = self.collection
        index = engine.index_of(inner)
        if index is None:
            return inner.state_dict()
        if collection is not None:
            return collection.optimizer_state(index)
        return engine.optimizers[index].sharded.states.full_state_dict()

    def save(self, checkpoint: dict[str, Any], path: str, storage_options: Any) -> None:
        """Write what was collected. Collective.

        Raises:
            CheckpointError: on every rank, if any rank failed; earlier checkpoints are untouched.
        """
        run, config, comm = self._run, self._run.config.checkpoint, self._run.parallel.world
        collection, self.collection = self.collection, None
        if not checkpoint:
            return
        module, checkpoint_io = run.module, self._strategy.checkpoint_io
        to_share = collection if isinstance(collection, FileCollection) else None
        if to_share is not None and not self._can_share(to_share, checkpoint, path, storage_options):
            assert module is not None
            self._gathers = True  # from now on at once
            checkpoint = dump_again(module.trainer, checkpoint)
            collection = None
        if module is not None:
            position = {**data_position.position(module.trainer), **self._loop.state()}
            position.update(self._resume.history())
            checkpoint = {**checkpoint, contents.OURS: position}  # not in place: hooks keep the dictionary they got
        if run.engine is not None:
            checkpoint = contents.with_full_modules(checkpoint, run.engine)
        # A save after the fit is complete when the call returns.
        fitting = module is not None and comm is not None and module.trainer.training
        saver = self._background() if config.background and fitting else None
        refused = True
        with self.tolerating():
            refused = self._wait(refused=saver is not None and run.parallel.is_first and not _is_replaceable(path))
        with self.tolerating():
            if saver is not None and refused:  # a wrong path is an error now, not at the next save
                run.comm.on_all_ranks(partial(check_replaceable, path) if run.parallel.is_first else lambda: None)
            background = None if saver is None else Background(saver)
            to = (checkpoint, path, checkpoint_io, storage_options)
            if collection is None:
                contents.write_file(*to, comm, self._random(), background)
            elif isinstance(collection, FileCollection):
                contents.write_together(collection, checkpoint, path, background, self._random())
            else:
                contents.write(collection, *to, background, self._random())
            self._just_begun = saver is not None

    def is_awaited(self, barrier: Any = None) -> bool:
        """Return whether ranks have a reason to meet in this barrier, which Lightning may have named.

        They have none at the end of a save that has only begun. They have agreed to begin it, and its threads take the
        cores already: a rank whose partner has to wait for one would wait as long.
        """
        just_begun, self._just_begun = self._just_begun, False
        return not (just_begun and barrier == AFTER_SAVE)

    def _can_share(
        self, collection: FileCollection, checkpoint: dict[str, Any], path: str, storage_options: Any
    ) -> bool:
        """Return whether the ranks, which are on one host, can write the file together. Collective."""
        world, place = self._run.require_engine().mesh.world, CheckpointPath(path)
        can = storage_options is None and place.local and not collection.contents.computed_with(checkpoint)
        folder = place.parent.path if can and _is_replaceable(path) else ""  # else the save says why not
        can, folder = world.exchange_objects((can, folder))[0]
        if can and folder not in self._shared:
            can = can_share(folder, world.rank, world.exchange_objects)
            self._shared.update([folder] if can else [])
        return can

    @property
    def in_flight(self) -> bool:
        """Return whether this rank is still writing a checkpoint in the background."""
        return self._saver is not None and self._saver.in_flight

    @property
    def busy_s(self) -> float:
        """CPU time of the thread that wrote the last checkpoint in the background, in seconds."""
        return 0.0 if self._saver is None else self._saver.busy_s

    def snapshot(self, target: SaveTarget, name: str, failed: Callable[[CheckpointError], None]) -> None:
        """Save a checkpoint to ``target`` in the background, between two batches of a fit. Collective.

        Args:
            target: where it goes.
            name: for messages.
            failed: gets the error, on every rank, if it fails; called by the thread that writes.

        Raises:
            CheckpointError: on every rank, if a checkpoint in the background failed before (``checkpoint.on_error``).
        """
        module = self._run.require_module()
        try:
            self.wait()
        except CheckpointError as error:  # of a checkpoint before this
            self.failed = True
            self._raise_or_log(error)
        self._snapshot = target
        try:
            checkpoint = dump_for_resume(module.trainer)
        finally:
            self._snapshot = None
        collection, self.collection = self.collection, None
        assert collection is not None
        position = {**data_position.position(module.trainer), **self._resume.history(), before_batch.MARK: True}
        checkpoint = contents.with_full_modules({**checkpoint, contents.OURS: position}, collection.engine)
        random = {**self._random(), before_batch.STATES: before_batch.states(module.trainer, module)}
        background = Background(self._background(), target, failed)
        contents.write(collection, checkpoint, name, self._strategy.checkpoint_io, None, background, random)

    def save_weights(self, path: str, plan: Callable[[dict[str, Any]], tuple[SaveTarget, Container[str]]]) -> None:
        """Save weights alone to a target, in the background as checkpoints are (``checkpoint.background``). Collective.

        Args:
            path: where they go, for the target and for messages.
            plan: gets the module's state dict, with placeholders of full shape for parameters, and returns the target
                and the names to save. Called on all ranks; ``state_dict()`` gathers nothing meanwhile.

        Raises:
            CheckpointError: on every rank, if any rank failed, or if the save before failed (``checkpoint.on_error``).
        """
        module = self._run.require_module()
        with self.tolerating():
            self.wait()
        engine = self._engine_setup.follow_optimizers()
        engine.check_complete()
        engine.wait()
        collection = Collection(engine, frozen=True)
        weights = collection.weights(self.raw_weights())
        with self._gathering_nothing():
            target, names = plan(weights)
        checkpoint = {
            "state_dict": {name: value for name, value in weights.items() if name in names},
            "global_step": module.trainer.global_step,
            "epoch": module.trainer.current_epoch,
        }
        with self.tolerating():
            # Also where training waits: one rank may write for longer than the others can wait in a collective call.
            background = Background(self._background(), target, waits=not self._run.config.checkpoint.background)
            contents.write(collection, checkpoint, path, self._strategy.checkpoint_io, None, background, {})
            if background.waits:
                self.wait()

    def _random(self) -> dict[str, Any]:
        """Return the random states of this process and of its virtual ranks, and where its training data stand."""
        virtual, module = self._run.virtual, self._run.module
        data = {} if module is None else {DATA: self._resume.reading.saved()}
        return {**random_states(), **data, **({} if virtual is None else {VIRTUAL: virtual.random.saved()})}

    def _background(self) -> BackgroundSaver:
        comm = self._run.comm
        if self._saver is None:
            # Not by a number of this process: other ranks' processes may have saved more, or less, before this run.
            name = comm.exchange_objects(uuid.uuid4().hex)[0]
            self._saver = BackgroundSaver(comm.rank, comm.world_size, self._run.parallel.device, name)
        return self._saver

    @contextmanager
    def tolerating(self) -> Generator[None, None, None]:
        """Raise the error of a save, or log it, as ``checkpoint.on_error`` says."""
        try:
            yield
            self.failed = False
        except CheckpointError as error:
            self.failed = True
            self._raise_or_log(error)

    def _raise_or_log(self, error: CheckpointError) -> None:
        if self._run.config.checkpoint.on_error == "raise":
            raise error
        rank_zero_warn(f"{error} Training continues (checkpoint.on_error='continue').")

    def wait(self) -> None:
        """Return when every checkpoint that was saved is committed. Collective.

        Raises:
            CheckpointError: one could not be written.
        """
        self._wait(refused=False)

    def _wait(self, *, refused: bool) -> bool:
        """Do `wait`, and return whether ``refused`` is true on any rank, which takes no collective call of its own."""
        if self._saver is not None:
            refused = self._wait_for_all_ranks(self._saver, refused=refused)
            self._saver.wait()
        return refused

    def _wait_for_all_ranks(self, saver: BackgroundSaver, *, refused: bool) -> bool:
        """Return when no rank writes any more, and whether ``refused`` is true on any rank. Collective.

        The thread of a save waits for the reports of all ranks, however long writing takes. It cannot tell a slow rank
        from one that was lost, but a collective call can: it fails at once.
        """
        comm = self._run.comm
        pause = _FIRST_PAUSE_S
        while True:
            in_flight, anywhere = comm.agree(torch.tensor([saver.in_flight, refused], dtype=torch.uint8)).tolist()
            if not in_flight:
                return bool(anywhere)
            saver.ended_within(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _after_save(self, action: Callable[[], None]) -> None:
        """Run ``action`` on rank 0 when the last save is committed; never, if that save failed."""
        if not self._run.parallel.is_first or self.failed:
            return
        if self._saver is not None:
            self._saver.then(action)
        else:
            action()

    def remove(self, path: str | Path) -> None:
        """Remove a folder or a file when the checkpoint that replaces it is committed."""
        self._after_save(partial(self._remove, path))

    def _remove(self, path: str | Path) -> None:
        checkpoint_io = self._strategy.checkpoint_io
        try:
            if not contents.is_lightnings(checkpoint_io) and not contents.is_folder(path):
                checkpoint_io.remove_checkpoint(path)  # wrote it
                return
            remove_checkpoint(path)
        except CheckpointError as error:
            rank_zero_warn(f"A checkpoint was not removed. {error}")

    def link(self, _trainer: pl.Trainer, path: str, name: str) -> None:
        """Make ``name`` a link to the checkpoint ``path`` (`ModelCheckpoint`'s ``save_last="link"``). Collective."""

        def link() -> None:
            if Path(path).absolute() != Path(name).absolute():
                self._after_save(partial(link_checkpoint, path, name))

        try:
            # In the background there is no error yet on which ranks would have to agree.
            link() if self._strategy._alone or self._saver is not None else self._run.comm.on_all_ranks(link)
        except CheckpointError as error:
            self._raise_or_log(error)

    def abandon(self) -> None:
        """Give up saves in the background that other ranks will not complete."""
        if self._saver is not None:
            self._saver.abandon()

    def close(self, *, quietly: bool) -> None:
        """Wait for saves in the background; with ``quietly``, after an exception, only log their errors."""
        saver, self._saver = self._saver, None
        if saver is None:
            return
        try:
            with self.tolerating():
                saver.wait()
        except CheckpointError as error:
            if not quietly:
                raise
            rank_zero_warn(str(error))
        finally:
            saver.close()


def _is_replaceable(path: str) -> bool:
    try:
        check_replaceable(path)
    except (CheckpointError, OSError):
        return False
    return True
