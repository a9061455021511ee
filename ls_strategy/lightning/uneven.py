"""Ranks with different numbers of batches: an error on all of them, or finished ranks that wait for the others.

The one invariant: with ``uneven="join"`` all ranks run the same number of steps, and a step's averages are over the
ranks that have a batch in it.

Before each batch the ranks agree on who has one (`Lockstep.turn`). A rank without one runs a *filler*: its last batch
again, or another rank's if it had none, because forwards at stage 3, gradient averages and the user's own collectives
need all ranks. Nothing of it counts::

    gradients                      left out of the averages (`LeftOut`)
    self.log                       in a collection that is thrown away; averages over ranks leave this rank out
    buffers, torchmetrics, random  restored afterwards
    hooks of the batch             do not run, but those of Lightning's callbacks, which may be collective, do
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from ls_strategy.checkpoint.random import random_states, restore_random_states
from ls_strategy.engine import Engine
from ls_strategy.errors import DataError, PlanError, StateError
from ls_strategy.host.fabric import sized_len
from ls_strategy.host.pytorch import Callback, extract_batch_size, pl
from ls_strategy.lightning._private import metric_snapshot
from ls_strategy.lightning._private_uneven import (
    JoinedFetcher,
    NoBatch,
    Results,
    around_evaluation_lengths,
    around_lengths,
    around_training_batches,
    hides_batches,
    run_filler_in_evaluation,
    run_filler_in_training,
    to_device,
)
from ls_strategy.lightning.precision import ZeROPrecision
from ls_strategy.lightning.run_state import RunState

UnevenMode = Literal["error", "join", "join_samples"]

_OWN = (f"{pl.__name__}.", "ls_strategy.")


@dataclass(frozen=True)
class Turn:
    """Agreement of the ranks on one batch: which of them have one, and with what weight."""

    ranks: tuple[int, ...]
    """Those that have a batch."""
    weight: float
    """Factor in this rank's values, so that their average over all ranks is that over ``ranks``; 0 if it has none."""
    last: bool
    """Whether no rank has another batch."""


@dataclass
class _Pass:
    """One pass of a loop over its batches."""

    loop: Any
    kept: Any = None
    """The last batch on this rank's device."""
    kept_loader: int = -1
    kept_index: int = 0
    counts: list[int] = field(default_factory=list)
    """Batches of each rank so far."""
    logged: bool = False
    """Whether this rank has run a batch of its own."""
    finished: bool = False
    """Whether this rank had no more batches when the checkpoint was saved that the pass continues from."""
    waiting: Any = None
    """An item of a later loader, for which other ranks are not ready."""
    turn: Turn | None = None


class UnevenData:
    """Compares the lengths of the ranks' data, and lets finished ranks wait for the others."""

    def __init__(self, run: RunState, mode: UnevenMode, precision: Callable[[], ZeROPrecision]) -> None:
        """Compare nothing yet. ``precision`` returns the plugin, which weights the loss of a batch."""
        self._run, self._precision = run, precision
        self.joins = mode != "error"
        self.runs_filler = False
        """Whether this rank runs a batch that does not count, because others have more."""
        self.contribution: float | None = None
        """During a step of ranks of which some have no batch: this rank's weight in averages over ranks."""
        self._by_samples = mode == "join_samples"
        self._passes: list[_Pass] = []
        self._restore: _Restore | None = None
        self._resumed: list[int] | None = None
        """Batches of each rank in the epoch that continues."""

    # set-up ----------------------------------------------------------------------------------------------------------

    def prepare(self, trainer: pl.Trainer) -> None:
        """Let the ranks agree on the number of training batches, before ``configure_optimizers`` may ask for it.

        Raises:
            PlanError: finished ranks cannot wait with this kind of parallelism.
        """
        sizes = self._run.config.parallel.sizes
        kinds = [name for name, size in sizes.items() if size > 1]
        if self.joins and kinds:
            raise PlanError(
                f"Got uneven='join' with parallel.{kinds[0]}={sizes[kinds[0]]}, but only ranks that each have their "
                "own batches can wait for others. Leave uneven out, or use ZeRO without model parallelism."
            )
        around_lengths(trainer, self._agree_on_length)

    def begin_run(self, trainer: pl.Trainer, *, evaluation: bool) -> None:
        """Take part in the loops of a run. ``evaluation``: ranks wait for each other in validation, too."""
        self._passes.clear()
        self._end_filler()
        around_training_batches(trainer, self._fill_training, self._after_training_batch)
        if evaluation:
            around_evaluation_lengths(trainer, lambda length: max(self._all(length)))

    def check_sized(self, dataloader: Any) -> None:
        """Raise on all ranks if a loader has a length on some of them only. Collective."""
        sized = [length >= 0 for length in self._all(-1.0 if sized_len(dataloader) is None else 1.0)]
        if any(sized) and not all(sized):
            have = [rank for rank, has in enumerate(sized) if has]
            raise DataError(
                f"Got a {type(dataloader).__name__} that has a length on {_ranks(have)} and none on the others, but "
                "Lightning compares lengths where there is one. Give it a length on all ranks or on none: an "
                "IterableDataset without __len__ has none."
            )

    def _all(self, value: float) -> list[float]:
        """Return every rank's value. Collective."""
        comm = self._run.parallel.world
        if comm is None or comm.world_size == 1:
            return [value]
        values = torch.full((comm.world_size,), -torch.inf, dtype=torch.float64)
        values[comm.rank] = value
        return comm.agree(values).tolist()

    def _agree_on_length(self, length: float, validates_every: float | None) -> float:
        lengths = self._all(length)
        if self.joins:
            longest = max(lengths)
            return longest if longest == float("inf") else int(longest)
        if 0 in lengths and any(lengths):
            empty = [rank for rank, each in enumerate(lengths) if not each]
            raise DataError(
                f"Got no training batches on {_ranks(empty)}, and {max(lengths):g} on another rank, but ranks wait for "
                'each other in every step. Give every rank data, or set ZeROStrategy(uneven="join").'
            )
        trainer = self._trainer
        every = self._all(-1.0 if validates_every is None else validates_every)
        steps = trainer.max_steps * trainer.accumulate_grad_batches
        validates = trainer.enable_validation and (trainer.max_steps == -1 or steps > min(every))
        if validates and trainer.val_check_interval != 1.0 and len(set(every)) > 1:
            numbers = ", ".join(f"{number:g}" for number in lengths)
            raise DataError(
                f"Got loaders of {numbers} batches on ranks 0 to {len(lengths) - 1} and "
                f"val_check_interval={trainer.val_check_interval}, so ranks would validate after different batches. "
                "Set val_check_interval to a number of batches, give all ranks loaders of the same length, or set "
                'ZeROStrategy(uneven="join").'
            )
        return length

    @property
    def _trainer(self) -> pl.Trainer:
        return self._run.require_module().trainer

    # checkpoints -----------------------------------------------------------------------------------------------------

    def position(self) -> dict[str, Any]:
        """Return what a checkpoint needs: the batches of each rank in this epoch, none between two epochs."""
        training = bool(self._passes) and self._passes[0].loop is self._trainer.fit_loop.epoch_loop
        return {"own_batches": list(self._passes[0].counts) if training else []}

    def resume(self, trainer: pl.Trainer, saved: dict[str, Any]) -> None:
        """Continue an epoch where a checkpoint was saved.

        Raises:
            StateError: on another number of ranks, whose batches would be others.
        """
        counts, progress = saved.get("own_batches"), trainer.fit_loop.epoch_loop.batch_progress
        if not counts or progress.is_last_batch:
            return
        if len(counts) != self._run.comm.world_size:
            raise StateError(
                f"Got a checkpoint of {len(counts)} ranks with different numbers of batches, saved in the middle of an "
                f"epoch, on {self._run.comm.world_size} ranks: nothing says which batches are still to come. Resume on "
                f"{len(counts)} ranks, or from a checkpoint of the end of an epoch."
            )
        self._resumed = list(counts)

    # a pass over batches ---------------------------------------------------------------------------------------------

    def fetcher(self, loop: Any, inner: Any) -> Any:
        """Return the data fetcher of a pass that has begun.

        Raises:
            PlanError: the user's step fetches its batches itself.
        """
        if hides_batches(inner):
            raise PlanError(
                "Got uneven='join' with a step that takes dataloader_iter, but a rank can wait for others only before "
                "Lightning fetches a batch. Take (batch, batch_idx) in the step, or leave uneven out."
            )
        training = loop is self._trainer.fit_loop.epoch_loop
        now = _Pass(loop, counts=[0] * self._run.comm.world_size)
        if training and self._resumed is not None:
            progress: Any = loop.batch_progress.current
            now.counts, self._resumed = self._resumed, None
            now.finished = now.counts[self._run.comm.rank] < progress.processed
        self._passes.append(now)
        return JoinedFetcher(inner, self._fetch_training if training else self._fetch_evaluation)

    def end_pass(self) -> None:
        """End a pass over batches."""
        if self._passes:
            self._passes.pop()

    def _fetch_training(self, fetcher: JoinedFetcher) -> Any:
        now = self._passes[-1]
        item = None if now.finished else fetcher.take()
        turn = self._agree(now, item, more=not now.finished and fetcher.has_more)
        if turn is None:
            fetcher.agreed(done=True, all_done=True)
            raise StopIteration
        fetcher.agreed(done=turn.last, all_done=turn.last)
        self._precision().weight = turn.weight or 1.0
        if not turn.weight:
            raise NoBatch
        return item

    def _fetch_evaluation(self, fetcher: JoinedFetcher) -> Any:
        now = self._passes[-1]
        item, now.waiting = now.waiting or fetcher.take(), None
        while True:
            turn = self._agree(now, item, more=fetcher.has_more)
            if turn is None:
                fetcher.agreed(done=True, all_done=True)
                raise StopIteration
            fetcher.agreed(done=not fetcher.has_more, all_done=turn.last)
            if turn.weight:
                return item
            with self._filling(now):
                run_filler_in_evaluation(self._trainer, now.loop, now.kept, now.kept_index, now.kept_loader)

    def _agree(self, now: _Pass, item: Any, *, more: bool) -> Turn | None:
        """Return the next turn, None if no rank has a batch. Collective.

        Loaders that a pass runs through one after the other end together: a rank with an item of a later loader waits.
        """
        rank = self._run.comm.rank
        samples = max(extract_batch_size(item[0]), 1) if item is not None and self._by_samples else 1
        loader = -1 if item is None else item[2]
        assert self._run.lockstep is not None
        said = self._run.lockstep.turn((1, loader + 1, samples << 1 | more, now.kept_loader + 1))
        loaders = [each[1] - 1 for each in said]
        current = min((each for each in loaders if each >= 0), default=-1)
        if current < 0:
            now.turn = None
            return None
        ranks = tuple(r for r, each in enumerate(loaders) if each == current)
        weights = [said[r][2] >> 1 for r in ranks]
        mine = weights[ranks.index(rank)] if rank in ranks else 0
        last = not any(each[2] & 1 for each in said) and all(each in (-1, current) for each in loaders)
        now.turn = Turn(ranks, mine * len(said) / sum(weights), last)
        for r in ranks:
            now.counts[r] += 1
        needed = [r for r, each in enumerate(said) if r not in ranks and each[3] - 1 != current]
        if needed:
            self._lend(now, item, ranks[0], rank in needed, current)
        if item is not None and rank in ranks:
            now.logged = True
            now.kept_index, now.kept_loader = item[1], current
        return now.turn

    def _lend(self, now: _Pass, item: Any, lender: int, borrows: bool, loader: int) -> None:
        """Send a batch to the ranks that have had none. Collective."""
        comm = self._run.comm
        sent: list[Any] = [item if comm.rank == lender else None]
        with comm.blocking("broadcast", "batch", group=comm.control, source=lender):
            dist.broadcast_object_list(sent, src=lender, group=comm.control)
        if borrows:
            batch, now.kept_index, _ = sent[0]
            now.kept = to_device(self._trainer, batch, loader)
            now.kept_loader = loader

    # steps -----------------------------------------------------------------------------------------------------------

    @contextmanager
    def around_step(self, args: Sequence[Any]) -> Generator[None, None, None]:
        """Surround the user's step on a batch of a joined pass."""
        now = self._passes[-1] if self._passes else None
        turn = None if now is None else now.turn
        if now is None or turn is None:
            yield
            return
        if not self.runs_filler and args:
            now.kept = args[0]
        self.contribution = turn.weight
        if self.runs_filler:
            self._restore = _Restore(self._run.require_module())
        try:
            yield
        finally:
            self.contribution = None

    def after_backward(self, engine: Engine, *, synchronizes: bool) -> None:
        """Give every rank the buffers of the first rank that has a batch, if rank 0 has none. Collective then.

        DDP broadcasts rank 0's before the next forward, and nothing that rank 0 does now counts. This comes after
        backward, which may read buffers.
        """
        now = self._passes[-1] if self._passes else None
        if now is None or now.turn is None or not synchronizes or 0 in now.turn.ranks:
            return
        if self._restore is not None:
            self._restore.buffers()
        engine.broadcast_buffers(now.turn.ranks[0])
        if self._restore is not None:
            self._restore.take_buffers(engine.model)

    def _fill_training(self) -> None:
        trainer = self._trainer
        with self._filling(self._passes[-1]) as results:

            @contextmanager
            def after_step() -> Generator[None, None, None]:
                self._put_back()  # before callbacks, which may save a checkpoint
                with results.shared():
                    yield

            run_filler_in_training(trainer, self._passes[-1].kept, _collective_callbacks(trainer), after_step)

    @contextmanager
    def _filling(self, now: _Pass) -> Generator[Results, None, None]:
        results = Results(now.loop, is_first=not now.logged)
        self.runs_filler = True
        try:
            yield results
        finally:
            self._end_filler()
            results.end()

    def _end_filler(self) -> None:
        self.runs_filler = False
        self._put_back()

    def _put_back(self) -> None:
        if self._restore is not None:
            self._restore.all()
            self._restore = None

    def _after_training_batch(self) -> None:
        """Stop a finished rank where all others want to stop: hooks of the batch have not run there."""
        now, trainer = self._passes[-1], self._trainer
        self._precision().weight = 1.0
        if now.turn is None or len(now.turn.ranks) == self._run.comm.world_size:
            return
        stops = self._all(float(trainer.should_stop))
        if all(stops[rank] for rank in now.turn.ranks):
            trainer.should_stop = True


class _Restore:
    """Snapshot of what a step changes in a module besides its parameters: buffers, metrics, random states."""

    def __init__(self, module: nn.Module) -> None:
        self.take_buffers(module)
        self._metrics = metric_snapshot(module)
        self._random = random_states()

    def take_buffers(self, module: nn.Module) -> None:
        """Keep the buffers as they are now."""
        self._buffers = [(b, b.detach().clone()) for b in module.buffers() if not b.is_meta]

    def buffers(self) -> None:
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)

    def all(self) -> None:
        self.buffers()
        self._metrics()
        restore_random_states(self._random)


def _collective_callbacks(trainer: pl.Trainer) -> list[Callback]:
    """Return the callbacks whose hooks of a batch run on finished ranks: Lightning's, this package's, and their kind.

    They may save, which is collective, and do not look at batches.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [
        callback
        for callback in callbacks
        if any(kind is not Callback and kind.__module__.startswith(_OWN) for kind in type(callback).__mro__)
    ]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
