"""Where in an epoch a run was: a run that resumes in the middle of an epoch goes on with the next batch.

Lightning restores the number of the batch, and then starts the loader from its first. For a plain ``DataLoader`` over
a sampler whose order is a function of the epoch (``DistributedSampler``, which Lightning inserts, or a sequential one)
the position is that number alone: the sampler's first indices are left out, and no data is loaded for it. Loaders with
a ``state_dict`` restore themselves. Iterable datasets have no position that could be known here.

An epoch is over once Lightning has counted it as processed, also one that ``max_steps`` or ``should_stop`` ended early.
A checkpoint saved from then on resumes with the batches that DDP would take: nothing is left out.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sized
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from ls_strategy._compat import training_loaders

_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Draw an order that nothing remembers: they resume as Lightning does it, with its warning."""


class SkippingSampler:
    """A sampler whose first pass begins later."""

    def __init__(self, sampler: Any, skip: int) -> None:
        """``skip``: indices to leave out, once."""
        self.inner = sampler
        self._skip = skip

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        return itertools.islice(iter(self.inner), skip, None)

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)  # set_epoch, for one


def position(trainer: pl.Trainer) -> dict[str, Any]:
    """What a checkpoint needs beside Lightning's own counters."""
    loaders = training_loaders(trainer)
    return {"world_size": _replicas(trainer), "batch_sizes": [getattr(dl, "batch_size", None) for dl in loaders]}


def _replicas(trainer: pl.Trainer) -> int:
    """Ranks that train on different batches."""
    return trainer.strategy.data_parallel_size  # type: ignore[attr-defined]


def forget(loader: Any) -> None:
    """Take a `SkippingSampler` of an earlier fit off ``loader``, which may be the user's own object."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(batch_sampler, "sampler", None)
    if isinstance(sampler, SkippingSampler):
        batch_sampler.sampler = sampler.inner  # type: ignore[union-attr]


def resume(trainer: pl.Trainer, loader: Any, saved: dict[str, Any]) -> None:
    """Let ``loader`` begin where the run was that ``saved`` comes from, if that was in the middle of an epoch.

    On another number of ranks, or with another batch size, the run goes on after as many samples, in full batches.
    """
    if "world_size" not in saved or not _order_is_known(loader):
        return
    epochs: Any = trainer.fit_loop.epoch_progress.current
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    in_epoch = epochs.started > epochs.processed
    no_more = in_epoch and progress.is_last_batch and progress.current.processed == progress.current.ready
    _convert(trainer, loader, saved, no_more=no_more)
    if not in_epoch:
        return
    sampler = loader.batch_sampler.sampler
    if hasattr(sampler, "set_epoch"):  # loaders with workers take their first indices before Lightning does this
        sampler.set_epoch(epochs.processed + no_more)
    done = progress.current.processed  # one that an exception ended is done again
    if not no_more and done % len(loader):
        loader.batch_sampler.sampler = SkippingSampler(sampler, done % len(loader) * loader.batch_sampler.batch_size)
        rank_zero_info(f"ZeROStrategy: the training data goes on after batch {done} of {len(loader)} of the epoch")
    warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")


def _order_is_known(loader: Any) -> bool:
    """Whether the batches of an epoch are determined by the number of the epoch."""
    if hasattr(loader, "load_state_dict") or not isinstance(loader, DataLoader):
        return False
    batch_sampler: Any = loader.batch_sampler
    if not isinstance(batch_sampler, BatchSampler) or type(batch_sampler).__iter__ is not BatchSampler.__iter__:
        return False
    sampler = batch_sampler.sampler
    below = getattr(getattr(sampler, "dataset", None), "_sampler", sampler)  # what Lightning distributed over ranks
    return isinstance(loader, Sized) and len(loader) > 0 and not isinstance(below, _RANDOM)


def _convert(trainer: pl.Trainer, loader: Any, saved: dict[str, Any], *, no_more: bool) -> None:
    """Count the epoch's batches as this run does; further loaders find them converted.

    Args:
        trainer: its progress is changed.
        loader: the training data.
        saved: what `position` gave.
        no_more: all batches of the epoch are done.
    """
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    batch_size = loader.batch_sampler.batch_size
    before = saved["world_size"] * ((saved.get("batch_sizes") or [None])[0] or batch_size)
    now = _replicas(trainer) * batch_size
    if before == now:
        return
    behind = progress.processed - progress.completed
    done = _batches(trainer, loader) if no_more else progress.processed * before // now
    progress.ready = progress.started = progress.processed = done
    progress.completed = done - behind
    saved.update(world_size=_replicas(trainer), batch_sizes=[batch_size])


def _batches(trainer: pl.Trainer, loader: Any) -> int:
    """Batches of an epoch."""
    limit = trainer.limit_train_batches
    return min(len(loader), limit) if isinstance(limit, int) else int(len(loader) * limit)
