"""Where in an epoch a run was: a resumed run goes on with the next batch.

Lightning restores the number of the batch, and then starts the loader from its first. For a plain ``DataLoader`` over
a sampler whose order is a function of the epoch (``DistributedSampler``, which Lightning inserts, or a sequential one)
the position is that number alone: the sampler's first indices are left out, and no data is loaded for it. Loaders with
a ``state_dict`` restore themselves. Iterable datasets have no position that could be known here.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sized
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.data import BatchSampler, DataLoader

from ls_strategy._compat import training_loaders


class SkippingSampler:
    """A sampler whose first pass begins later."""

    def __init__(self, sampler: Any, skip: int) -> None:
        """``skip``: indices to leave out, once."""
        self._sampler = sampler
        self._skip = skip

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        return itertools.islice(iter(self._sampler), skip, None)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_sampler"], name)  # set_epoch, for one


def position(trainer: pl.Trainer) -> dict[str, Any]:
    """What a checkpoint needs beside Lightning's own counters."""
    loaders = training_loaders(trainer)
    return {"world_size": _replicas(trainer), "batch_sizes": [getattr(dl, "batch_size", None) for dl in loaders]}


def _replicas(trainer: pl.Trainer) -> int:
    """Ranks that train on different batches."""
    return trainer.strategy.data_parallel_size  # type: ignore[attr-defined]


def resume(trainer: pl.Trainer, loader: Any, saved: dict[str, Any]) -> None:
    """Let ``loader`` begin where the run was that ``saved`` comes from.

    On another number of ranks, or with another batch size, the run goes on after as many samples, in whole batches.
    """
    if "world_size" not in saved or hasattr(loader, "load_state_dict") or not isinstance(loader, DataLoader):
        return
    batch_sampler: Any = loader.batch_sampler
    if not isinstance(batch_sampler, BatchSampler) or not isinstance(loader, Sized) or not len(loader):
        return
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    batch_size = batch_sampler.batch_size
    before = saved["world_size"] * ((saved.get("batch_sizes") or [None])[0] or batch_size)
    done = progress.processed  # one that an exception ended is done again
    if before != _replicas(trainer) * batch_size:
        done = done * before // (_replicas(trainer) * batch_size)
        behind = progress.processed - progress.completed
        progress.ready = progress.started = progress.processed = done
        progress.completed = done - behind
        saved.update(world_size=_replicas(trainer), batch_sizes=[batch_size])  # further loaders find it converted
    batch_sampler.sampler = SkippingSampler(batch_sampler.sampler, done % len(loader) * batch_size)
    warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
    if done % len(loader):
        rank_zero_info(f"ZeROStrategy: the training data goes on after batch {done} of {len(loader)} of the epoch")
