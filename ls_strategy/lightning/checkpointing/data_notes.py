"""Notes about the pass over the training data that runs now, from which a checkpoint takes those of its last batch.

Lightning saves the states of rank 0's loaders behind the batch that was fetched last. That is ahead of training where
the end of the data can only be found by looking, and where a checkpoint is saved before the step of its batch. The one
invariant: what is saved here belongs to the batch that this rank has trained on last.
"""

from __future__ import annotations

import copy
import inspect
import io
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from ls_strategy.checkpoint.random import random_marks, random_states
from ls_strategy.lightning._private_data import fetched_ahead, is_exhausted
from ls_strategy.lightning.checkpointing.data_position import order_is_known
from ls_strategy.lightning.virtual.data import VirtualLoader
from ls_strategy.lightning.virtual.random import VIRTUAL

Kind = Literal["order", "loader", "dataset", "read"]
"""What knows the position of a loader: the number of its indices; its state, or that of its dataset; nothing, so that
its batches have to be read again."""

_KEPT = 3
"""Batches whose notes are kept: the last that was trained on, the one in training, and one that is fetched ahead."""

_SAMPLED = 256
"""Elements of a tensor or a list that a checksum reads, more or less."""


class DataNotes:
    """Follows the passes over one rank's training data."""

    def __init__(self) -> None:
        self.kinds: list[Kind] = []
        """Of the loaders."""
        self.loaders: list[Any] = []
        """The loaders of the fit."""
        self.before: dict[str, Any] | None = None
        """The random states before the iterators of this pass were made, from which workers get their seeds."""
        self.first: dict[str, Any] | None = None
        """Those before its first batch was fetched, from which samplers draw their order."""
        self._generators: list[Tensor] = []
        """Those of the loaders' own generators then."""
        self.lacks = False
        """Whether one of several loaders has had no batch in this pass, where others had one."""
        self._ended = False
        """Whether the pass has said that there is no further batch."""
        self._draws = False
        """Whether data draw from this process's generators in every batch, as steps do."""
        self._exhausted = False
        """Whether the only loader has said that there is no further batch; of several, others have begun again then."""
        self._base = 0
        self._count = 0
        """Batches of the epoch behind which this pass stands, of which it has not read the first ``_base``."""
        self._states: dict[int, list[Any]] = {}
        """Those of the loaders, by this count."""
        self._sums: dict[int, int] = {0: 0}
        """Running checksums of what was read."""
        self._begun: set[int] = set()
        """Numbers of loaders that have given a state."""
        self._fetching: Any = None
        """Random states of this process when the last batch was about to be fetched."""
        self.on_making: Callable[[], None] = _nothing
        """Called before further iterators are made."""
        self.on_made: Callable[[], None] = _nothing
        """Called after that."""

    def follow(self, loaders: Sequence[Any]) -> None:
        """Follow other loaders, whose iterators are about to be made."""
        self.loaders, self.kinds = list(loaders), [kind_of(each) for each in loaders]
        self._begun.clear()
        self.making()

    def read_as(self, kinds: Sequence[Kind]) -> None:
        """Read again what a run before has read, because its ``state_dict`` has failed there, or was not there yet."""
        if len(kinds) == len(self.kinds):
            pairs = zip(self.kinds, kinds, strict=True)
            self.kinds = ["read" if now in ("loader", "dataset") and then == "read" else now for now, then in pairs]

    def begin_at(self, count: int, states: list[Any] | None = None) -> None:
        """Let the pass begin behind so many batches of the epoch, with the states that loaders have there."""
        self._base = self._count = count
        self._sums, self._states = {count: 0}, {} if states is None else {count: states}

    def saved(self, count: int) -> dict[str, Any]:
        """Return what a checkpoint needs of this rank if ``count`` batches are done, or all that it had."""
        count = min(count, self._count)
        states = self._states.get(count)
        return {
            "count": count,
            "kinds": list(self.kinds),
            "before": self.before,
            "first": self.first,
            "generators": self._generators,
            "generators_now": self._generator_states(),
            "base": self._base,
            "states": states if states is None or all(map(_is_readable, self.kinds, states)) else None,
            "sum": self._sums.get(count),
            "exhausted": self._exhausted,
            "ended": self._ended,
            "draws": self._draws,
        }

    def set_generators(self, states: Sequence[Tensor]) -> None:
        """Set the generators that loaders and samplers have of their own, if there are as many."""
        found = [each for loader in self.loaders for each in _generators(loader)]
        if len(found) == len(states):
            self._generators = list(states)
            for generator, state in zip(found, states, strict=True):
                generator.set_state(state)

    def _generator_states(self) -> list[Tensor]:
        return [each.get_state() for loader in self.loaders for each in _generators(loader)]

    def checksum(self, count: int) -> int | None:
        """Return the running checksum behind ``count`` batches, if these are among the last."""
        return self._sums.get(count)

    def fetched_before(self, fetcher: Any) -> None:
        """Note what a data fetcher has fetched before it could be followed."""
        for batch in fetched_ahead(fetcher):
            self.fetched(batch)
        if is_exhausted(fetcher):
            self.ended()

    # events of a pass: `ls_strategy.lightning._private_data.Observer` ------------------------------------------------

    def making(self) -> None:
        """Begin at the first batch of an epoch."""
        self.on_making()
        self.before, self.first, self._generators = random_states(), None, self._generator_states()
        self._exhausted = self._ended = self._draws = self.lacks = False
        self.begin_at(0)

    def made(self) -> None:
        """Note the states at its begin."""
        self.on_made()
        self._note_states()

    def fetching(self) -> None:
        """Note the random states before the first batch."""
        if "read" in self.kinds and self._count == 0:
            self.first = random_states()
        elif "read" in self.kinds and not self._draws:
            self._fetching = random_marks()

    def fetched(self, batch: Any) -> None:
        """Note a batch."""
        if self._fetching is not None:
            self._draws, self._fetching = self._fetching != random_marks(), None
        self._count += 1
        self.lacks |= len(self.loaders) > 1 and _lacks(batch)
        self._note_states()
        if "read" in self.kinds and self._count - 1 in self._sums:
            self._sums[self._count] = checksum(batch, self._sums[self._count - 1])
            self._sums.pop(self._count - _KEPT, None)

    def ended(self) -> None:
        """Note the states at the end, where some loaders prepare the next pass."""
        self._ended = True
        self._fetching = None
        if len(self.loaders) == 1:
            self._exhausted = True
            self._note_states()

    def _note_states(self) -> None:
        if "loader" in self.kinds or "dataset" in self.kinds:
            states = [self._state(number) for number in range(len(self.loaders))]
            self._states[self._count] = states
            self._states.pop(self._count - _KEPT, None)

    def _state(self, number: int) -> Any:
        """Return a loader's state, or None if it has none after all. A plain fit would not have asked for it."""
        try:
            # A copy, because some loaders return what they change later.
            state = copy.deepcopy(_state(self.kinds[number], self.loaders[number]))
        except Exception:
            self.kinds[number] = "read"
            return None
        if number not in self._begun and not _is_readable(self.kinds[number], state):
            self.kinds[number] = "read"
        self._begun.add(number)
        return state if self.kinds[number] != "read" else None


def _lacks(batch: Any) -> bool:
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    return isinstance(parts, (list, tuple)) and any(part is None for part in parts)


def _nothing() -> None:
    """Do nothing."""


def kind_of(loader: Any) -> Kind:
    """Return what knows the position of a loader."""
    if isinstance(loader, VirtualLoader) and not hasattr(loader, "state_dict"):
        return "order"  # or one that virtual ranks resume as before
    if _has_state(loader):
        return "read" if _draws_again(loader) else "loader"
    if order_is_known(loader):
        return "order"
    if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, IterableDataset) or loader.num_workers:
        return "read"
    return "dataset" if _has_state(loader.dataset) and not _loses_samples(loader.dataset) else "read"


def _generators(part: Any) -> list[torch.Generator]:
    """Return the generators of a loader, and of the samplers inside it and inside each other."""
    found: dict[int, torch.Generator] = {}
    parts = [] if isinstance(part, VirtualLoader) else [part]  # each virtual rank has copies
    for each in parts:
        generator = getattr(each, "generator", None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
        inner = [getattr(each, name, None) for name in ("batch_sampler", "sampler", "inner")]
        inner.append(getattr(getattr(each, "dataset", None), "_sampler", None))  # in Lightning's sampler
        parts += [one for one in inner if one is not None and not any(one is old for old in parts)]
    return list(found.values())


def _has_state(part: Any) -> bool:
    """Return whether a part says where it stands.

    Modules have other things under these names. Datasets that have to be told their position (litdata,
    mosaicml-streaming) leave it to their loaders.
    """
    if isinstance(part, nn.Module) or not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
        return False
    try:
        inspect.signature(part.state_dict).bind()
    except TypeError:
        return False
    except ValueError:  # it is written in C
        return True
    return True


def _draws_again(loader: Any) -> bool:
    """Return whether Lightning's sampler is around another one, which draws a new order when a state is loaded."""
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    return hasattr(getattr(sampler, "dataset", None), "_sampler")


def _loses_samples(dataset: Any) -> bool:
    """Return whether a dataset of Hugging Face shuffles in a buffer, of which its state has nothing."""
    part = getattr(dataset, "_ex_iterable", None)
    while part is not None:
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return True
        part = getattr(part, "ex_iterable", None)
    return False


def _state(kind: Kind, loader: Any) -> Any:
    if kind == "dataset":
        return loader.dataset.state_dict()
    if kind != "loader":
        return None
    return loader.own_states() if isinstance(loader, VirtualLoader) else loader.state_dict()


def _is_readable(kind: Kind, state: Any) -> bool:
    """Return whether a checkpoint with a state can be opened as any other. Lightning saves those of loaders anyway."""
    if kind != "dataset":
        return True
    try:
        torch.save(state, file := io.BytesIO())
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except Exception:
        return False
    return True


def merge_virtual(states: list[Any], others: Sequence[list[Any]]) -> None:
    """Add to one rank's states of loaders those that other ranks have of their virtual ranks."""
    for number, state in enumerate(states):
        if isinstance(state, dict) and VIRTUAL in state:
            state[VIRTUAL] = {rank: each for other in others for rank, each in other[number][VIRTUAL].items()}


def checksum(value: Any, before: int = 0) -> int:
    """Return a checksum of some elements of every tensor in a batch, of its other values and of their structure."""
    if isinstance(value, Mapping):
        value = [part for pair in value.items() for part in pair]
    if isinstance(value, (list, tuple)):
        before = zlib.crc32(f"{type(value).__name__} {len(value)}".encode(), before)
        for part in value[:: len(value) // _SAMPLED | 1]:  # odd, to meet keys and values
            before = checksum(part, before)
        return before
    if not isinstance(value, Tensor):
        known = isinstance(value, (int, float, str, bytes, bool, type(None)))
        return zlib.crc32((repr(value) if known else type(value).__name__).encode(), before)
    try:
        flat = value.detach().reshape(-1)
        chosen: Any = flat[:: max(1, flat.numel() // _SAMPLED)].resolve_conj().contiguous().cpu().view(torch.uint8)
        return zlib.crc32(chosen.numpy(), zlib.crc32(f"{tuple(value.shape)} {value.dtype}".encode(), before))
    except Exception:  # its bytes cannot be read: sparse, nested, without storage, a class with a layout of its own
        return zlib.crc32(f"{type(value).__name__} {value.layout} {value.dtype}".encode(), before)
