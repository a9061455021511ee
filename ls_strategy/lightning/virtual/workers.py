"""Random numbers that a DataLoader draws in its worker processes: seeded for every batch of a virtual rank.

::

    begin of an epoch     a number from the virtual rank's stream, without advancing it
    every batch           (this number, virtual rank, number of the batch) -> Python, NumPy, torch in the worker

So a worker's draws depend neither on the batches that it has loaded before nor on how many workers there are, and a run
that continues inside an epoch draws what the unbroken run has drawn. Where a loader with a state stands is known to it
alone, so there the samples of the batch take the place of its number.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from ls_strategy._torch import around_fetch
from ls_strategy.host.fabric import pl_worker_init_function


class SeededIndices(list[Any]):
    """Indices of a batch, with the seed for loading it."""

    seed: int


class WorkerSeeds:
    """The seeds of one loader of one virtual rank."""

    def __init__(self, loader: Any, rank: int) -> None:
        self._loader, self._rank = loader, rank
        self._epoch = 0
        self._first = 0
        self.applies = isinstance(loader, DataLoader) and loader.num_workers > 0 and loader.batch_sampler is not None
        """Whether there are workers that load batches by index."""
        self._by_number = not hasattr(loader, "load_state_dict")
        if isinstance(loader, DataLoader):
            loader.worker_init_fn = self._init_fn(loader.worker_init_fn)

    def _init_fn(self, given: Any) -> Any:
        given = given.args[0] if isinstance(given, partial) and given.func is _begin_worker else given
        lightnings = isinstance(given, partial) and given.func is pl_worker_init_function
        if lightnings or (given is None and int(os.environ.get("PL_SEED_WORKERS", "0"))):
            given = partial(pl_worker_init_function, rank=self._rank)
        return partial(_begin_worker, given) if self.applies else given

    def begin_epoch(self, first: int) -> None:
        """Take the epoch's number from this process's generator. ``first``: batches that the run has loaded before."""
        if self.applies:
            state = torch.get_rng_state()
            self._epoch = int(torch.randint(2**63 - 1, ()).item())
            torch.set_rng_state(state)
            self._first = first % len(self._loader) if self._by_number and first else 0

    @contextmanager
    def creating(self) -> Generator[None, None, None]:
        """Surround the creation of an iterator, whose workers get seeds with their indices from then on."""
        if not self.applies:
            yield
            return
        own = vars(self._loader)  # DataLoader refuses setattr
        before = own["batch_sampler"]
        own["batch_sampler"] = _Seeding(before, self)
        try:
            yield
        finally:
            own["batch_sampler"] = before

    def of(self, indices: list[Any], number: int) -> SeededIndices:
        """Return the indices of a batch with their seed. ``number``: how many this iterator gave before."""
        which = str(self._first + number) if self._by_number else repr(indices)
        seeded = SeededIndices(indices)
        digest = hashlib.blake2b(f"{self._epoch} {self._rank} {which}".encode(), digest_size=8).digest()
        seeded.seed = int.from_bytes(digest, "little") >> 1
        return seeded


class _Seeding:
    """A batch sampler that gives every batch its seed."""

    def __init__(self, inner: Any, seeds: WorkerSeeds) -> None:
        self._inner, self._seeds = inner, seeds

    def __iter__(self) -> Iterator[Any]:
        for number, indices in enumerate(self._inner):
            yield self._seeds.of(indices, number) if isinstance(indices, list) else indices

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)


def _begin_worker(given: Callable[[int], None] | None, worker: int) -> None:
    """Seed before every batch that this worker process loads."""
    if given is not None:
        given(worker)
    around_fetch(_seed)


def _seed(indices: Any) -> None:
    if isinstance(indices, SeededIndices):
        random.seed(indices.seed)
        torch.manual_seed(indices.seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed([indices.seed & 0xFFFFFFFF, indices.seed >> 32])
