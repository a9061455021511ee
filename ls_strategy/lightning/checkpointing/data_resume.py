"""Training data that continue behind the last batch of a checkpoint, where that is not a number of a sampler's indices.

::

    loader                                                   a run that resumes inside an epoch
    its order is a function of the epoch (`data_position`)   skips indices, and reads nothing again
    it has a ``state_dict``, or its dataset in this process  loads the state behind the last batch
    another one                                              makes iterators with the random numbers of the epoch's
                                                             begin, reads what was trained on again, and drops it

The one invariant: the run trains on what would have come next, or a warning says what it does not. Batches that are
read again are compared with those that were trained on.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch.utils.data import DataLoader

from ls_strategy.checkpoint.random import random_states, restore_random_states
from ls_strategy.host.pytorch import rank_zero_info, rank_zero_warn
from ls_strategy.lightning._private import training_loaders
from ls_strategy.lightning._private_data import (
    around_loader_states,
    drop_loader_states,
    fetched_ahead,
    has_begun_again,
    leaves_out_validation,
    make_iterators,
    observe,
    read_on,
    reloads_for,
    set_sampler_epoch,
    untrained_epoch,
)
from ls_strategy.lightning.checkpointing.data_notes import DataNotes, merge_virtual
from ls_strategy.lightning.checkpointing.data_position import forget

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from ls_strategy.lightning.run_state import RunState

DATA = "data"
"""Under which a checkpoint has the notes of a rank, among its random states."""

_END = object()


class _Resume(Protocol):
    """What else is restored."""

    @property
    def between_batches(self) -> bool: ...

    @property
    def pending(self) -> bool: ...

    def resumes(self, trainer: pl.Trainer) -> bool: ...

    def before_iterators(self) -> None: ...

    def after_iterators(self) -> None: ...


class DataResume:
    """The training data of one rank, in a fit that may resume."""

    def __init__(self, run: RunState, resume: _Resume) -> None:
        self._run, self._resume = run, resume
        self._notes = DataNotes()
        self._notes.on_making, self._notes.on_made = self._before_pass, resume.after_iterators
        self._saved: dict[str, Any] | None = None
        """The notes that the checkpoint holds for this rank, until iterators are made."""
        self._replicas: int | None = None
        """The number of model replicas that have saved them, if it was another one."""
        self._outside: dict[str, Any] | None = None
        """This run's random states, while iterators are made with those of the checkpoint."""
        self._behind: dict[str, Any] | None = None
        """The random states behind that."""
        self._again: int | None = None
        """How many batches the next pass has to read again."""
        self._done = 0
        """The batches of the epoch behind which it then stands."""
        self._expected: int | None = None
        """Their checksum."""
        self._problem = ""
        """Why the data do not continue."""
        self._continues = False
        """Whether the next pass continues one."""
        self._has_begun = False
        """Whether the fit has its first iterators."""
        self._made_again = False
        """Whether the data were made again since, before a batch was fetched."""

    @property
    def _trainer(self) -> pl.Trainer:
        return self._run.require_module().trainer

    def forget(self) -> None:
        """Forget the notes of a checkpoint."""
        self._saved = self._replicas = None

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint needs of this rank. Not collective."""
        progress: Any = self._trainer.fit_loop.epoch_loop.batch_progress
        again = self._notes.lacks or (len(self._notes.loaders) > 1 and has_begun_again(self._trainer))
        return {**self._notes.saved(progress.current.processed), "again": again}

    def take(self, random: Mapping[str, dict[str, Any]], replicas: int | None) -> None:
        """Take the notes of all ranks out of their random states, and keep those for this rank.

        Args:
            random: the random states by rank, which are changed.
            replicas: the number of model replicas in the run that has saved them, if it is known.
        """
        run, self._saved, self._replicas = self._run, None, None
        found = {name: each.pop(DATA, None) for name, each in random.items()}
        all_notes: list[Any] = list(found.values())
        if not all_notes or None in all_notes:
            return
        same = len(found) == run.comm.world_size
        notes = found[f"rank_{run.comm.rank}"] if same else all_notes[0]
        if run.virtual is not None:
            merge_virtual(notes["states"] or [], [each["states"] for each in all_notes])
        elif not same and not replicas == run.data_parallel_size == 1:
            self._replicas = replicas or len(found)
        self._saved = notes

    # iterators -------------------------------------------------------------------------------------------------------

    def prepare(self, trainer: pl.Trainer) -> None:
        """Take part in a fit, before user code may ask for its data."""
        self._again, self._continues, self._problem = None, False, ""
        self._has_begun = self._made_again = False
        around_loader_states(trainer, self._before_iterators)

    @property
    def moves_iterators(self) -> bool:
        """Return whether iterators that were made before the progress was restored stand elsewhere."""
        return self._saved is not None and self._place() is not None

    @property
    def begins_epoch(self) -> bool:
        """Return whether the fit resumes between two epochs, also where Lightning does not know it."""
        return self._place() == "between"

    def _place(self) -> str | None:
        """Return where the fit resumes: "inside" an epoch, "between" two, or after one that was "cut" short."""
        if not self._resume.resumes(self._trainer):
            return None
        epochs: Any = self._trainer.fit_loop.epoch_progress.current
        batches: Any = self._trainer.fit_loop.epoch_loop.batch_progress
        if batches.is_last_batch and batches.current.processed == batches.current.ready:
            return "between"
        if epochs.started > epochs.processed:
            return "inside"
        # The shortest of several loaders may end a pass that another one's length promises to go on.
        return "between" if self._saved is not None and self._saved.get("ended") else "cut"

    def _before_iterators(self, load: Callable[[], None]) -> None:
        """Prepare the loaders for the first iterators. ``load`` gives them the states that Lightning has saved."""
        place, notes = self._place(), self._notes
        notes.follow(training_loaders(self._trainer))
        if place is None:
            load()
            return
        saved, self._saved = self._saved, None
        if saved is not None:
            notes.read_as(saved["kinds"])
        progress: Any = self._trainer.fit_loop.epoch_loop.batch_progress
        self._done = progress.current.processed if saved is None else saved["count"]
        if self._resume.between_batches:
            load()
            notes.begin_at(self._done)
            return
        self._set_epoch(place)
        self._continues = True
        own = saved if self._replicas is None else None
        if place == "between":
            if own is not None:
                self._notes.set_generators(own["generators_now"])
            self._draw_between()
        states = self._states(saved, place)
        if states is None:
            load()
        else:
            self._load(states)
            if place == "between" and states and saved is not None:
                self._begin_next(states, exhausted=saved["exhausted"])
        if place == "inside" and self._again is None:
            notes.begin_at(self._done, states)
        if own is not None and place == "inside":
            self._put_random(own)
        self._problem = self._problem or self._lost_order(saved, place)

    def _next_epoch(self) -> int:
        epochs: Any = self._trainer.fit_loop.epoch_progress.current
        return epochs.processed + (epochs.started > epochs.processed)

    def _draw_between(self) -> None:
        """Draw what the run that was not interrupted has drawn between two epochs, up to now."""
        if not self._has_begun:
            self._resume.before_iterators()
        elif self._resume.pending:  # the data are made again: `reloads_for`
            self._made_again = True
            make_iterators(self._trainer)

    def _before_pass(self) -> None:
        if not reloads_for(self._trainer, self._trainer.current_epoch):
            self._resume.before_iterators()

    def _lost_order(self, saved: dict[str, Any] | None, place: str) -> str:
        """Return a warning if loaders may go on in another order than in a run that was not interrupted."""
        if saved is None:
            return ""
        kinds, epoch = self._notes.kinds, self._next_epoch()
        if saved.get("again") and ("loader" in kinds or "dataset" in kinds):
            return (
                "one of several loaders had reached its end before the others, which their states do not say, so the "
                "data may go on in another order, or have another number of batches. Use loaders of one length, or "
                'CombinedLoader(loaders, "min_size").'
            )
        if saved.get("draws") and place == "inside" and "read" in kinds:
            return (
                "the data draw random numbers in the process that trains, which draws some between two batches, too, "
                "so they may go on with other numbers. Draw in workers of the DataLoader (num_workers=1), or from a "
                "generator of the dataset's own."
            )
        if epoch > 0 and any(getattr(each, "persistent_workers", False) for each in self._notes.loaders):
            return (
                "workers that stay between epochs (persistent_workers=True) have random numbers that no checkpoint "
                "holds, so what they draw (an order, augmentations) differs from a run that was not interrupted. Set "
                "persistent_workers=False."
            )
        return ""

    def _set_epoch(self, place: str) -> None:
        """Tell samplers the epoch: Lightning does so when some loaders have their indices already."""
        epochs: Any = self._trainer.fit_loop.epoch_progress.current
        ends = place == "between" and epochs.started > epochs.processed
        for loader in self._notes.loaders:
            set_sampler_epoch(loader, epochs.processed + ends)

    def _states(self, saved: dict[str, Any] | None, place: str) -> list[Any] | None:
        """Return the states that loaders need. None: those of Lightning; none: they begin at their first batch."""
        kinds = self._notes.kinds
        self._problem = self._foreign_states(saved) if place != "between" else ""
        if place == "inside":
            self._problem = self._problem or self._why_not(saved)
            if saved is not None and "read" in kinds and not self._problem:
                self._again, self._expected = (self._done - saved["base"]) or None, saved["sum"]
                self._notes.begin_at(saved["base"])
                for loader in self._notes.loaders:
                    forget(loader)  # all are read
                return []
        if saved is None or saved["kinds"] != kinds:
            return None
        if "loader" not in kinds and "dataset" not in kinds:
            return []
        # Before the first batch, those of Lightning are behind it.
        return saved["states"] if saved["states"] is not None or self._done else []

    def _foreign_states(self, saved: dict[str, Any] | None) -> str:
        """Return a warning if states are another rank's, else nothing."""
        ranks = self._replicas
        if ranks is None or "read" in self._notes.kinds or saved is None or not saved["states"]:
            return ""
        return (
            f"the states of the loaders are those that rank 0 had among {ranks} ranks, so the run may train on samples "
            f"twice or leave some out. Resume on {ranks} ranks, or at the end of an epoch."
        )

    def _why_not(self, saved: dict[str, Any] | None) -> str:
        """Return a warning if the data cannot continue where they are, else nothing."""
        kinds, ranks = self._notes.kinds, self._replicas
        loads = all(kind in ("order", "loader") for kind in kinds)
        if not self._done or set(kinds) == {"order"} or (saved is None and loads):
            return ""
        if saved is None:
            why = f"the checkpoint does not hold how they were read. {_AT_END}"
        elif ranks is not None:
            why = (
                f"which samples {ranks} ranks have read cannot be known on {self._run.data_parallel_size}. Resume "
                f"on {ranks} ranks, or at the end of an epoch."
            )
        elif saved["kinds"] != kinds:
            why = "the checkpoint was saved with loaders of another kind. Use the same ones."
        elif saved["states" if "read" not in kinds else "sum"] is None:
            why = (
                "training_step had fetched more batches than it had trained on, or the state_dict of the data holds "
                f"more than tensors, numbers and text. {_AT_END}"
            )
        else:
            return ""
        return (
            f"the training data begin again inside an epoch, so the run trains on {self._done} batches of every rank a "
            f"second time: {why}"
        )

    def _load(self, states: list[Any]) -> None:
        """Load states of loaders and datasets; without any, all begin at their first batch."""
        pairs = list(zip(self._notes.kinds, copy.deepcopy(states), strict=False))
        drop_loader_states(self._trainer)
        for loader, (kind, state) in zip(self._notes.loaders, pairs, strict=False):
            if kind in ("loader", "dataset"):
                (loader if kind == "loader" else loader.dataset).load_state_dict(state)

    def _begin_next(self, states: list[Any], *, exhausted: bool) -> None:
        """Let the next iterators begin a pass, as they did in the run that was not interrupted.

        With the state of a pass that a limit ended, or of one at its last batch, the next iterator would end that pass.
        """
        before, goes_on = random_states(), False
        for loader, kind in zip(self._notes.loaders, self._notes.kinds, strict=True):
            if kind in ("loader", "dataset"):
                iterator = iter(loader if kind == "loader" else loader.dataset)
                # A DataLoader at its end begins the next pass itself, and must not read from it.
                ready = exhausted and isinstance(loader, DataLoader) and kind == "loader"
                goes_on |= not ready and next(iterator, _END) is not _END
            forget_start(loader)
        complete = exhausted or all(_ends_with(loader, self._done) for loader in self._notes.loaders)
        if goes_on and complete:  # it was the state of the next pass already
            self._load(states)
        restore_random_states(before)

    def _put_random(self, saved: dict[str, Any]) -> None:
        """Let iterators draw what they have drawn when the epoch began."""
        notes = self._notes
        notes.set_generators(saved["generators"])
        if saved["before"] is not None and self._run.virtual is None:
            self._outside = random_states()
            notes.before, notes.first = saved["before"], saved["first"]
            restore_random_states(saved["before"])

    def made(self) -> None:
        """Return to this run's random numbers, behind iterators that were made with those of the checkpoint."""
        self._has_begun = True
        self._report_left_out()
        if self._resume.resumes(self._trainer) and reloads_for(self._trainer, self._next_epoch()):
            self._resume.before_iterators()  # user code makes the data again, and may draw
        if self._outside is not None:
            self._behind = random_states()
            restore_random_states(self._outside)
            self._outside = None

    def _report_left_out(self) -> None:
        """Report what Lightning leaves out of a run that resumes here, with any strategy."""
        if not self._resume.resumes(self._trainer) or self._resume.between_batches:
            return
        epoch = untrained_epoch(self._trainer)
        if epoch is not None:
            rank_zero_warn(
                "ZeROStrategy: the checkpoint was saved in on_train_epoch_start, where Lightning has not reset its "
                f"count of batches, so it takes epoch {epoch} for trained and goes on behind it, with any strategy. "
                "Resume from a checkpoint of another moment, and save in on_train_epoch_end or on_train_batch_start."
            )
        elif leaves_out_validation(self._trainer):
            rank_zero_info(
                "ZeROStrategy: the checkpoint was saved before a validation had ended. Lightning does not run that "
                "validation again, with any strategy, so random numbers that it draws are drawn later. Save in "
                "on_validation_end for a run that goes on as without an interruption."
            )

    # batches ---------------------------------------------------------------------------------------------------------

    def fetcher(self, loop: Any, inner: Any) -> Any:
        """Follow the data fetcher of a pass, and bring it behind the batches that are done.

        Collective in the first pass of a fit that resumes.
        """
        if loop is not self._trainer.fit_loop.epoch_loop:
            return inner
        if observe(inner, self._notes):
            self._notes.fetched_before(inner)
        if self._made_again:
            self._resume.after_iterators()
            self._made_again = False
        if self._continues:
            self._continues = False
            self._continue(inner)
        return inner

    def _continue(self, fetcher: Any) -> None:
        problem = self._problem
        if self._again is not None:
            problem = self._read_again(fetcher, self._again) or problem
            self._again = None
        self._behind = None
        for loader in self._notes.loaders:
            forget_start(loader)
        problems = self._run.comm.exchange_objects(problem)
        found = {rank: each for rank, each in enumerate(problems) if each}
        if found:
            ranks = "" if len(found) == len(problems) else f" (on ranks {', '.join(map(str, found))})"
            rank_zero_warn(f"ZeROStrategy: {next(iter(found.values()))}{ranks}")

    def _read_again(self, fetcher: Any, count: int) -> str:
        """Read ``count`` batches and drop them. Return a warning if they are not those that were trained on."""
        notes, before, start = self._notes, random_states(), time.monotonic()
        rank_zero_info(
            f"ZeROStrategy: {count} batches of the epoch are read again and dropped, because the training data cannot "
            "say where they stand"
        )
        first = None if fetched_ahead(fetcher) else notes.first
        restore_random_states(first or self._behind or before)
        found = read_on(fetcher, count)
        restore_random_states(before)
        took_s = time.monotonic() - start
        if found == count and notes.checksum(self._done) == self._expected:
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
            rank_zero_info(f"ZeROStrategy: the training data continue after batch {self._done} ({took_s:.1f} s)")
            return ""
        return (
            f"the {found} batches that were read again are not the {count} that the run has trained on, so it may "
            "train on samples twice or leave some out: the data changed, or depend on more than the random numbers of "
            "the epoch's begin. Give the loader, or its dataset, state_dict and load_state_dict."
        )


_AT_END = "Resume at the end of an epoch, or give the loader state_dict and load_state_dict for the next time."


def _ends_with(loader: Any, count: int) -> bool:
    """Return whether a pass over a loader is known to end after ``count`` batches, or before."""
    try:
        return len(loader) <= count
    except TypeError:  # it has no length
        return False


def forget_start(loader: Any) -> None:
    """Let the passes of a dataset of Hugging Face begin at its first sample again: each would begin at its state."""
    dataset: Any = getattr(loader, "dataset", None)
    if type(dataset).__module__.partition(".")[0] == "datasets" and hasattr(dataset, "load_state_dict"):
        dataset.load_state_dict({})
