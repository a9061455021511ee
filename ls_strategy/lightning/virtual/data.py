"""Batches of virtual ranks: one loader per virtual rank of this process, and one for Lightning that stands for them."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ls_strategy._torch import MAKES_ITERATOR, SHARED_BY_LOADERS
from ls_strategy.distributed.rounds import Split
from ls_strategy.errors import PlanError
from ls_strategy.lightning.virtual.random import VIRTUAL, VirtualRandom
from ls_strategy.lightning.virtual.workers import WorkerSeeds
from ls_strategy.transient import Method


class VirtualLoader:
    """The loader that Lightning iterates over: its batches are those of the first virtual rank of this process.

    The batches of the others wait in `waiting`, in the same order.
    """

    def __init__(
        self, loader: Any, split: Split, rank: int, random: VirtualRandom, islands: tuple[int, int] = (0, 1)
    ) -> None:
        """Make a loader per virtual rank.

        Args:
            loader: of the first virtual rank of this process, with its sampler.
            split: which virtual ranks every rank computes.
            rank: this rank.
            random: the random numbers of virtual ranks.
            islands: number of this group of virtual ranks, and of all that share the data.

        Raises:
            PlanError: the batches of other virtual ranks cannot be had from this loader.
        """
        ranks, first = split.ranks_of(rank), islands[0] * split.count
        for each in _samplers_of(loader):  # on every rank, also those with one virtual rank
            _check_replicas(each, split.count * islands[1])
        self.loaders = [loader if each == ranks[0] else _for_rank(loader, first + each) for each in ranks]
        self._seeds = [WorkerSeeds(each, virtual) for virtual, each in zip(ranks, self.loaders, strict=True)]
        self._ranks, self._as = ranks, random.as_rank
        self._random = random
        self._replaced: list[Method] = []
        self.waiting: deque[list[Any]] = deque()
        """For every batch that was fetched, those of the other virtual ranks."""
        self.on_iterate: Callable[[Callable[[], list[Iterator[Any]]]], list[Iterator[Any]]] = lambda make: make()
        """Makes the iterators, with what has to happen before it."""
        self.first: Callable[[], int] = lambda: 0
        """Returns how many batches of the epoch the run has loaded before."""
        self.exchange: Callable[[Any], list[Any]] = lambda own: [own]
        """Returns what every rank has given."""
        self.on_batch: Callable[[], None] = lambda: None
        """Called before a batch is fetched."""

    @property
    def sampler(self) -> Any:
        """All samplers, for ``set_epoch``."""
        return _Samplers([getattr(loader, "sampler", None) for loader in self.loaders])

    @property
    def batch_sampler(self) -> Any:
        """All batch samplers, for ``set_epoch`` of their samplers, which Lightning calls when an epoch begins."""
        return _Samplers([getattr(loader, "batch_sampler", None) for loader in self.loaders])

    def __len__(self) -> int:
        return len(self.loaders[0])

    def begin_run(self, *, training: bool) -> None:
        """Let iterators over training data draw their seeds from the random numbers of the epoch's begin.

        Also those that a loader makes when it is asked for its first batch. And seed their workers.
        """

        def creating(rank: int, seeds: WorkerSeeds) -> Callable[[Method], Any]:
            def make(method: Method) -> Any:
                stays = method.owner.persistent_workers
                around = self._random.creating(rank, stays=stays) if training else nullcontext()
                with around, seeds.creating():
                    return method.original()

            return make

        for rank, loader, seeds in zip(self._ranks, self.loaders, self._seeds, strict=True):
            if isinstance(loader, DataLoader) and (training or seeds.applies):
                self._replaced.append(Method(loader, MAKES_ITERATOR, creating(rank, seeds)))

    def end_run(self) -> None:
        """Give the user's loader its own method back."""
        for method in self._replaced:
            method.remove()
        self._replaced = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self.__dict__["loaders"][0], name)
        return {"state_dict": self._states, "load_state_dict": self._load_states}.get(name, found)

    def own_states(self) -> dict[str, Any]:
        """Return the states of the loaders of this process's virtual ranks."""
        return {VIRTUAL: {rank: loader.state_dict() for rank, loader in zip(self._ranks, self.loaders, strict=True)}}

    def _states(self) -> dict[str, Any]:
        """Return the states of the loaders of all virtual ranks. Collective."""
        own = self.own_states()[VIRTUAL]
        return {VIRTUAL: {rank: state for each in self.exchange(own) for rank, state in each.items()}}

    def _load_states(self, states: dict[str, Any]) -> None:
        """Load the states of all virtual ranks; or that of one rank, as Lightning saves it, for all of them."""
        for rank, loader in zip(self._ranks, self.loaders, strict=True):
            loader.load_state_dict(states[VIRTUAL][rank] if VIRTUAL in states else states)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the first virtual rank."""

        def make() -> list[Iterator[Any]]:
            made = []
            for rank, loader, seeds in zip(self._ranks, self.loaders, self._seeds, strict=True):
                with self._as(rank):
                    seeds.begin_epoch(self.first())
                    made.append(iter(loader))
            return made

        self.waiting.clear()
        return self._batches(self.on_iterate(make))

    def _batches(self, iterators: list[Iterator[Any]]) -> Iterator[Any]:
        while True:
            self.on_batch()
            found = []
            for rank, iterator in zip(self._ranks, iterators, strict=True):
                with self._as(rank):
                    batch = next(iterator, _END)
                if batch is _END:
                    return
                found.append(batch)
            self.waiting.append(found[1:])
            yield found[0]


_END = object()
_OWN = ("batch_sampler", "sampler", "generator")
"""Attributes of a DataLoader of which every virtual rank needs its own."""


class _Samplers:
    """Stands for the samplers of all virtual ranks of this process: passes ``set_epoch`` on to them."""

    def __init__(self, samplers: Sequence[Any]) -> None:
        self._samplers = samplers

    @property
    def sampler(self) -> _Samplers:
        """Those inside of batch samplers."""
        return _Samplers([getattr(sampler, "sampler", None) for sampler in self._samplers])

    def set_epoch(self, epoch: int) -> None:
        for sampler in self._samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)


def check(loader: Any) -> None:
    """Refuse a loader that does not know its rank from its sampler."""
    if isinstance(loader, (list, tuple, range)):
        return  # every rank has the same batches under DDP too
    if not isinstance(loader, DataLoader):
        raise PlanError(
            f"Got a {type(loader).__name__} as a loader with parallel.virtual_ranks, but its batches would be those of "
            "the real rank, and the same ones for every virtual rank. Return a DataLoader, or a list of batches."
        )
    if isinstance(loader.dataset, IterableDataset):
        raise PlanError(
            f"Got an IterableDataset ({type(loader.dataset).__name__}) with parallel.virtual_ranks, but it would give "
            "every virtual rank the same samples, or those of the real rank. Use a dataset with __getitem__ and "
            "__len__, whose samples a DistributedSampler splits."
        )


def _for_rank(loader: Any, rank: int) -> Any:
    """Return a copy of a loader for another virtual rank, with the same dataset and samplers of its own."""
    other = copy.copy(loader)
    if not isinstance(loader, DataLoader):
        return other
    # Samplers draw from generators and remember an order: every rank under DDP has its own. A class with a state may
    # keep it anywhere; its other attributes refer to the same samplers.
    stateful = hasattr(loader, "load_state_dict")
    owned = [name for name in vars(loader) if name in _OWN or (stateful and name not in SHARED_BY_LOADERS)]
    memo = {id(each): each for name, each in vars(loader).items() if name in SHARED_BY_LOADERS}
    try:
        own = copy.deepcopy({name: vars(loader)[name] for name in owned}, memo)
    except Exception as error:
        raise PlanError(
            f"Got parallel.virtual_ranks with a {type(loader).__name__} whose samplers or state cannot be copied "
            f"({error}), but every virtual rank needs its own. Use samplers that copy.deepcopy can copy."
        ) from error
    vars(other).update(own, _iterator=None)  # DataLoader refuses setattr
    for each in _samplers_of(other):
        if hasattr(each, "rank"):
            each.rank = rank
    return other


def _samplers_of(loader: Any) -> list[Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    return [getattr(sampler, "inner", sampler) for sampler in found]  # what a `SkippingSampler` has inside


def _check_replicas(sampler: Any, count: int) -> None:
    if hasattr(sampler, "rank") and getattr(sampler, "num_replicas", count) != count:
        raise PlanError(
            f"Got a {type(sampler).__name__} for {sampler.num_replicas} ranks with parallel.virtual_ranks={count}. "
            f"Make it with num_replicas={count}, or leave it to Lightning (use_distributed_sampler=True)."
        )
