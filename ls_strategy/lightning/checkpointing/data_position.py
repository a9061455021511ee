"""The position in an epoch: a run that resumes in the middle of an epoch continues with the next batch.

Lightning restores the number of the batch, but starts the loader from its first. For a plain ``DataLoader`` whose
sampler's order is a function of the epoch (``DistributedSampler``, which Lightning inserts, another one with
``set_epoch``, or a sequential one) the position is that number alone: the sampler's first indices are skipped, and no
data is loaded for them. Another sampler may draw its order, or keep a place of its own. Loaders with a
``state_dict`` restore themselves. The position in an iterable dataset cannot be known here.

An epoch is over when Lightning has counted it as processed, even if ``max_steps`` or ``should_stop`` ended it early. A
checkpoint saved from then on resumes with the batches that DDP would use: nothing is skipped.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from ls_strategy.host.fabric import sized_len
from ls_strategy.host.pytorch import pl, rank_zero_info, rank_zero_warn
from ls_strategy.lightning._private import training_loaders

_KNOWN = (SequentialSampler.__iter__, DistributedSampler.__iter__)
"""Of samplers whose order is a function of the epoch. Others may draw it, or keep a place of their own."""


class SkippingSampler:
    """A sampler whose first pass starts later."""

    def __init__(self, sampler: Any, skip: int) -> None:
        """``skip``: indices to skip in the first pass."""
        self.inner = sampler
        self._skip = skip

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        return itertools.islice(iter(self.inner), skip, None)

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)  # such as set_epoch


def position(trainer: pl.Trainer) -> dict[str, Any]:
    """Return what a checkpoint needs in addition to Lightning's counters."""
    loaders = training_loaders(trainer)
    return {"world_size": _replicas(trainer), "batch_sizes": [getattr(dl, "batch_size", None) for dl in loaders]}


def _replicas(trainer: pl.Trainer) -> int:
    """Return the number of model replicas, which train on different batches."""
    return trainer.strategy.data_parallel_size  # type: ignore[attr-defined]


def forget(loader: Any) -> None:
    """Remove a `SkippingSampler` of an earlier fit from ``loader``, which may be the user's own object."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(batch_sampler, "sampler", None)
    if isinstance(sampler, SkippingSampler):
        batch_sampler.sampler = sampler.inner  # type: ignore[union-attr]


def resume(trainer: pl.Trainer, loader: Any, saved: dict[str, Any]) -> bool:
    """Make ``loader`` start where ``saved`` was saved, if that was in the middle of an epoch.

    On another number of ranks, or with another batch size, the run continues after as many samples, in full batches.

    Returns:
        whether an iterator that exists already stands elsewhere.
    """
    if "world_size" not in saved or not order_is_known(loader):
        return False
    epochs: Any = trainer.fit_loop.epoch_progress.current
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    in_epoch = epochs.started > epochs.processed
    no_more = in_epoch and progress.is_last_batch and progress.current.processed == progress.current.ready
    own = saved.get("own_batches")  # of ranks that have different numbers
    if own is None:
        _convert(trainer, loader, saved, no_more=no_more)
    sampler = loader.batch_sampler.sampler
    if hasattr(sampler, "set_epoch"):  # loaders with workers take their first indices before Lightning does this
        sampler.set_epoch(epochs.processed + no_more)
    if not in_epoch:
        return loader.num_workers > 0
    done = progress.current.processed  # a batch that an exception ended is repeated
    if own and own[trainer.global_rank] < done:
        return False  # this rank has finished the epoch
    if not no_more and done % len(loader):
        loader.batch_sampler.sampler = SkippingSampler(sampler, done % len(loader) * loader.batch_sampler.batch_size)
        lost = ". Its workers draw other random numbers than in an uninterrupted run" if loader.num_workers else ""
        rank_zero_info(
            f"ZeROStrategy: the training data continues after batch {done} of {len(loader)} of the epoch{lost}"
        )
    warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
    return True


def warn_of_lost_gradients(trainer: pl.Trainer) -> None:
    """Report that a run resumes within accumulated batches: no checkpoint has the gradients of the first ones."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress
    count = trainer.accumulate_grad_batches
    lost = batches.current.processed % count
    if lost and not batches.is_last_batch:  # after the last one of an epoch there was a step
        rank_zero_warn(
            f"The run continues after {lost} of {count} accumulated batches (accumulate_grad_batches={count}). Their "
            f"gradients are not in a checkpoint, so the next step uses those of the other {count - lost} alone, still "
            f"divided by {count}, as under DDP. Continue from a checkpoint that was saved at the end of a step."
        )


def order_is_known(loader: Any) -> bool:
    """Return whether the batches of an epoch are determined by the number of the epoch."""
    if hasattr(loader, "load_state_dict") or not isinstance(loader, DataLoader):
        return False
    if isinstance(loader.dataset, IterableDataset):  # its sampler says nothing, and it may have no length
        return False
    batch_sampler: Any = loader.batch_sampler
    if not isinstance(batch_sampler, BatchSampler) or type(batch_sampler).__iter__ is not BatchSampler.__iter__:
        return False
    sampler: Any = batch_sampler.sampler
    sampler = sampler.inner if isinstance(sampler, SkippingSampler) else sampler
    below = getattr(getattr(sampler, "dataset", None), "_sampler", sampler)  # the sampler that Lightning has wrapped
    known = type(below).__iter__ in _KNOWN or isinstance(below, Sequence) or hasattr(below, "set_epoch")
    return known and sized_len(loader) not in (None, 0)


def _convert(trainer: pl.Trainer, loader: Any, saved: dict[str, Any], *, no_more: bool) -> None:
    """Convert the progress to this run's batches. ``saved`` is updated, so that further loaders do not convert again.

    Args:
        trainer: its progress is changed.
        loader: the training data.
        saved: the result of `position`.
        no_more: whether all batches of the epoch are done.
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
    """Return the number of batches of an epoch."""
    limit = trainer.limit_train_batches
    return min(len(loader), limit) if isinstance(limit, int) else int(len(loader) * limit)
