"""A traced step in pieces, one per block and pass, and any number of blocks put together from them.

::

    trace of 5 blocks    before 0 1 2 3 4 after | after' 4' 3' 2' 1' 0' before'
    9 blocks             before 0 1 2 2 2 2 2 3 4 after | after' 4' 3' 2' 2' 2' 2' 2' 1' 0' before'
    a stage of them      (received) 2 2 2 (sent) | (received) 2' 2' 2' (sent)

Each piece names storages by the piece that allocates them and their number in it. So a storage that one block
allocates and the next one frees is found again at any other place in the stack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from ls_strategy.errors import PlanError
from ls_strategy.extras.planner.trace import Event, Kind, Trace, condensed

SHORT = (3, 4, 5)
"""Blocks of a shortened trace. Three, where the first and the last one are like those between; four, where only the
last one is. Otherwise five: the first two, the last two, and one between, whose neighbours are like others'."""


def stand_in(block: int, blocks: int, traced: int) -> int:
    """Return the traced block that stands for one of ``blocks``.

    >>> [stand_in(b, 8, 5) for b in range(8)]
    [0, 1, 2, 2, 2, 2, 3, 4]
    >>> [stand_in(b, 8, 4) for b in range(8)]
    [0, 1, 2, 2, 2, 2, 2, 3]
    """
    if traced == blocks or block < traced // 2:
        return block
    return max(block - blocks + traced, traced // 2)


class Place(NamedTuple):
    """A piece: which pass, and the block; -1 for what is before the first block, and their number for what is after."""

    backward: bool
    block: int


class Change(NamedTuple):
    """Change of the bytes of activations in a piece: at its end, and at its peak."""

    net: int
    high: int  # the most above what was there at its beginning


class _Storage(NamedTuple):
    owner: Place
    number: int


class _Item(NamedTuple):
    kind: Kind
    storage: _Storage | None
    number: int
    amount: int


@dataclass(frozen=True)
class Pieces:
    """A marked trace, cut."""

    blocks: int
    items: dict[Place, list[_Item]]
    spent: dict[Place, Counter[int]]  # what the meters have counted: 0 for FLOPs
    passed: dict[int, _Storage]  # what passes into each block, and out of the last one
    sizes: dict[_Storage, int]
    freed: dict[_Storage, Place]

    @property
    def is_uniform(self) -> bool:
        """Return whether the block in the middle of a shortened trace allocates as those next to it do."""
        middle = self.blocks // 2
        return all(
            self._allocations(Place(back, b)) == self._allocations(Place(back, middle))
            for back in (False, True)
            for b in (middle - 1, middle + 1)
        )

    def _allocations(self, place: Place) -> list[int]:
        return [size for storage, size in self.sizes.items() if storage.owner == place]

    def boundary_bytes(self) -> int:
        """Return the bytes that one block passes to the next."""
        return self.sizes.get(self.passed[min(1, self.blocks - 1)], 0) if self.passed else 0

    @cached_property
    def _changes(self) -> dict[Place, Change]:
        changes: dict[Place, Change] = {}
        for place, items in self.items.items():
            now = high = 0
            for item in items:
                if item.kind == "bytes":
                    now += item.amount
                    high = max(high, now)
            changes[place] = Change(now, high)
        return changes

    def alive_bytes(self, stop: int, blocks: int, *, forwards: int = 1) -> int:
        """Return the most bytes of activations of a first stage: what comes before the blocks, and ``stop`` blocks.

        Args:
            stop: all, or as many as the stage has. Then the gradient that the next one sends is not counted.
            blocks: of the model.
            forwards: micro-batches whose forward has run when the first backward begins.
        """
        at = [-1, *(self.source(g, blocks) for g in range(stop)), *([self.blocks] if stop == blocks else [])]
        high = now = 0
        for backward in (False, True):
            for block in reversed(at) if backward else at:
                change = self._changes[Place(backward, block)]
                high = max(high, now + change.high)
                now += change.net
            now *= forwards  # the earlier micro-batches hold what this one does
        return high

    def total(self, meter: int, first: int, stop: int, blocks: int) -> int:
        """Return what a meter counts in blocks ``first`` to ``stop`` of ``blocks``, with what is around them."""
        count = 0
        for backward in (False, True):
            at = [] if first else [-1]
            at += [self.source(g, blocks) for g in range(first, stop)]
            at += [self.blocks] if stop == blocks else []
            count += sum(self.spent[Place(backward, b)][meter] for b in at)
        return count

    def source(self, block: int, blocks: int) -> int:
        """Return the traced block that stands for block ``block`` of ``blocks``."""
        return stand_in(block, blocks, self.blocks)


def cut(trace: Trace, blocks: int, *, whole: bool = True) -> Pieces:  # noqa: C901  (one branch per kind of event)
    """Cut a trace with marks at ``blocks`` blocks; not ``whole``: one that ends before all have run.

    Raises:
        PlanError: the blocks do not run one after the other, once each.
    """
    items: dict[Place, list[_Item]] = {Place(b, i): [] for b in (False, True) for i in range(-1, blocks + 1)}
    spent: dict[Place, Counter[int]] = {place: Counter() for place in items}
    known: dict[int, _Storage] = {}
    counts: Counter[Place] = Counter()
    sizes: dict[_Storage, int] = {}
    now: Counter[_Storage] = Counter()
    freed: dict[_Storage, Place] = {}
    passed: dict[int, _Storage] = {}
    at, marked = Place(False, -1), 0
    for event in trace.events:
        kind, number, amount = event
        if kind == "into":
            if amount in known:
                passed[number] = known[amount]
            at, marked = Place(False, number), marked + 1
        elif kind == "end_forward":
            at = Place(True, blocks)
        elif kind == "back":
            at = Place(True, number - 1)
        elif kind == "spent":
            spent[at][number] += amount
        elif kind in ("bytes", "saved"):
            if number not in known:
                known[number] = _Storage(at, counts[at])
                counts[at] += 1
                sizes[known[number]] = 0
            storage = known[number]
            if kind == "bytes":
                now[storage] += amount
                sizes[storage] = max(sizes[storage], now[storage])
                if not now[storage]:
                    freed[storage] = at
            items[at].append(_Item(kind, storage, 0, amount))
        elif kind not in ("begin", "end_backward"):
            items[at].append(_Item(kind, None, number, amount))
    if whole and marked != blocks + 1:
        raise PlanError(
            f"the step does not call the {blocks} blocks of the model one after the other, once each, so they cannot "
            "be partitioned over ranks of a pipeline."
        )
    return Pieces(blocks, items, spent, passed, sizes, freed)


Law = Callable[[int, int], int | None]  # tells a number from those of two steps; None if it cannot


def told(one: Pieces, two: Pieces, size: Law, counts: Sequence[Law]) -> Pieces | None:
    """Return another step from two of the same operations: ``size`` tells bytes, ``counts`` what each meter counts.

    Returns:
        None if the two differ in more than numbers, or if a law does not tell.
    """
    if one.items.keys() != two.items.keys() or one.sizes.keys() != two.sizes.keys() or one.freed != two.freed:
        return None
    if any([i[:3] for i in its] != [i[:3] for i in two.items[place]] for place, its in one.items.items()):
        return None
    failed = False

    def tell(law: Law, a: int, b: int) -> int:
        nonlocal failed
        number = law(a, b)
        failed |= number is None
        return number or 0

    items = {
        place: [
            i._replace(amount=tell(size, i.amount, o.amount)) if i.kind == "bytes" else i
            for i, o in zip(its, two.items[place], strict=True)
        ]
        for place, its in one.items.items()
    }
    spent = {
        place: Counter({m: tell(counts[m], its[m], two.spent[place][m]) for m in its | two.spent[place]})
        for place, its in one.spent.items()
    }
    sizes = {storage: tell(size, nbytes, two.sizes[storage]) for storage, nbytes in one.sizes.items()}
    return None if failed else Pieces(one.blocks, items, spent, one.passed, sizes, one.freed)


def starts_like(trace: Trace, pieces: Pieces) -> bool:
    """Return whether a trace that ends after the first block is the beginning of ``pieces``."""
    begun = cut(trace, pieces.blocks, whole=False)
    return all(
        begun.items[place] == pieces.items[place] and begun.spent[place] == pieces.spent[place]
        for place in (Place(False, -1), Place(False, 0))
    )


@dataclass(frozen=True)
class Span:
    """Blocks ``first`` to ``stop`` of ``blocks``."""

    first: int
    stop: int
    blocks: int

    @property
    def is_first(self) -> bool:
        """Return whether the span includes what comes before the blocks."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        """Return whether the span includes what comes after the blocks."""
        return self.stop == self.blocks

    def places(self, *, backward: bool) -> list[int]:
        """Return the pieces in the order in which they run."""
        inside = [*([-1] if self.is_first else []), *range(self.first, self.stop)]
        inside += [self.blocks] if self.is_last else []
        return inside[::-1] if backward else inside


Rename = Callable[[Kind, int, int, int, int], Sequence[Event]]
"""Returns the events of the span's own units: kind, number, amount, traced block and block."""


class Composer:
    """Puts the events of one span together, one micro-batch after the other."""

    def __init__(self, pieces: Pieces, span: Span, rename: Rename) -> None:
        self._pieces, self._span, self._rename = pieces, span, rename
        self._numbers: dict[tuple[int, _Storage], int] = {}
        self._sizes: dict[int, int] = {}
        self._alive: dict[int, set[int]] = {}
        self._next = 0

    # storages --------------------------------------------------------------------------------------------------------

    def _new(self, micro_batch: int, nbytes: int) -> tuple[int, Event]:
        number = self._next
        self._next += 1
        self._sizes[number] = nbytes
        self._alive.setdefault(micro_batch, set()).add(number)
        return number, Event("bytes", number, nbytes)

    def _moved(self, storage: _Storage, source: int, block: int) -> _Storage:
        """Return the storage that stands at the same place relative to ``block`` as in the trace."""
        owner, blocks, traced = storage.owner, self._span.blocks, self._pieces.blocks
        if owner.block in (-1, traced):
            moved = -1 if owner.block == -1 else blocks
        elif source == -1:
            moved = owner.block
        elif source == traced:
            moved = owner.block - traced + blocks
        else:
            moved = block + owner.block - source
        return _Storage(Place(owner.backward, moved), storage.number)

    def _piece(self, micro_batch: int, block: int, *, backward: bool) -> Iterator[Event]:
        pieces, blocks = self._pieces, self._span.blocks
        outside = block in (-1, blocks)
        source = (-1 if block == -1 else pieces.blocks) if outside else pieces.source(block, blocks)
        for kind, storage, number, amount in pieces.items[Place(backward, source)]:
            if storage is None:
                yield from self._rename(kind, number, amount, source, block)
                continue
            key = (micro_batch, self._moved(storage, source, block))
            if key not in self._numbers and kind == "bytes" and amount > 0 and storage.owner == Place(backward, source):
                self._numbers[key], _ = self._new(micro_batch, 0)
            found = self._numbers.get(key)
            if found is None or found not in self._alive.get(micro_batch, ()):
                continue  # of another stage
            if kind == "bytes":
                self._sizes[found] += amount
                if not self._sizes[found]:
                    self._alive[micro_batch].discard(found)
            yield Event(kind, found, amount)

    # passes ----------------------------------------------------------------------------------------------------------

    def forward(self, micro_batch: int) -> Iterator[Event]:
        """Yield a forward. A stage that is not the first has received its input, and keeps it for backward."""
        span = self._span
        if not span.is_first:
            yield self._new(micro_batch, self._pieces.boundary_bytes())[1]
        for block in span.places(backward=False):
            yield from self._piece(micro_batch, block, backward=False)
        if not span.is_last:
            yield from self._leave(micro_batch, in_forward=True)

    def _leave(self, micro_batch: int, *, in_forward: bool) -> Iterator[Event]:
        """Free what a later stage would free, in its forward or in its backward."""
        span, pieces = self._span, self._pieces
        source = pieces.source(span.stop - 1, span.blocks)
        sent = pieces.passed.get(source + 1)
        owned = {key[1]: number for key, number in self._numbers.items() if key[0] == micro_batch}
        for storage in pieces.sizes:
            if storage.owner.backward or storage.owner.block == pieces.blocks:
                continue
            end = pieces.freed.get(storage)
            later = end is not None and not end.backward and end.block > source
            if (later and storage != sent) is not in_forward:
                continue
            if not in_forward and storage != sent and not (end is not None and end.backward and end.block > source):
                continue
            number = owned.get(self._moved(storage, source, span.stop - 1))
            if number is not None and number in self._alive.get(micro_batch, ()):
                self._alive[micro_batch].discard(number)
                yield Event("bytes", number, -self._sizes.pop(number))

    def backward(self, micro_batch: int) -> Iterator[Event]:
        """Yield a backward. A stage that is not the last has received the gradient of its output."""
        span, pieces = self._span, self._pieces
        if not span.is_last:
            yield from self._leave(micro_batch, in_forward=False)
            source = pieces.source(span.stop - 1, span.blocks)
            for storage in self._received(source):
                number, event = self._new(micro_batch, pieces.sizes[storage])
                self._numbers[micro_batch, self._moved(storage, source, span.stop - 1)] = number
                yield event
        for block in span.places(backward=True):
            yield from self._piece(micro_batch, block, backward=True)
        yield from self.flush(micro_batch)

    def _received(self, source: int) -> list[_Storage]:
        """Return the gradients that the block after ``source`` allocates and ``source`` frees."""
        after = Place(True, source + 1)
        return [s for s, end in self._pieces.freed.items() if s.owner == after and end == Place(True, source)]

    def flush(self, micro_batch: int) -> Iterator[Event]:
        """Free what is left of a micro-batch."""
        for number in sorted(self._alive.pop(micro_batch, ())):
            yield Event("bytes", number, -self._sizes.pop(number))
        for key in [key for key in self._numbers if key[0] == micro_batch]:
            del self._numbers[key]


class Passes(Protocol):
    """Passes of a stage of a pipeline: a `Composer`, or what stands for one."""

    def forward(self, micro_batch: int, /) -> Iterable[Event]:
        """Return the events of a forward."""
        ...

    def backward(self, micro_batch: int, /) -> Iterable[Event]:
        """Return the events of the backward after it."""
        ...


class SamePasses:
    """Condensed passes: without the names of their storages, those of all micro-batches are the same."""

    def __init__(self, composer: Composer) -> None:
        self._forward = condensed(composer.forward(0))
        self._backward = condensed(composer.backward(0))

    def forward(self, _micro_batch: int) -> Iterable[Event]:
        """Return the events of a forward."""
        return self._forward

    def backward(self, _micro_batch: int) -> Iterable[Event]:
        """Return the events of a backward."""
        return self._backward


def whole_step(pieces: Pieces, blocks: int, rename: Rename) -> Trace:
    """Return the step of ``blocks`` blocks on one rank, without a pipeline."""
    composer = Composer(pieces, Span(0, blocks, blocks), rename)
    events: list[Event] = [Event("begin"), *composer.forward(0), Event("end_forward")]
    events += [*composer.backward(0)]
    events.append(Event("end_backward"))
    return Trace(tuple(events), pieces.total(0, 0, blocks, blocks))


def numbers_by_name(names: Sequence[Sequence[str]]) -> dict[str, tuple[int, int]]:
    """Return unit and number in it of every parameter."""
    return {name: (unit, i) for unit, its in enumerate(names) for i, name in enumerate(its)}
