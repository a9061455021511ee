"""Record the operations on tensors without memory, and replay them where their values are needed.

::

    configure_model, on meta              what is noted                         later, unit by unit
    weight = torch.empty(4, 6)            memory A: empty                       replay: run, in program order, the
    weight.uniform_(-1, 1)                A: uniform_, generator at state s     operations that the wanted values
    weight[0] = 0                         A: fill_ on a view of A               depend on, each random one from its
    scale = weight.norm(dim=1)            memory B: norm of A                   own state of the generator

The one invariant is that a replay runs operations in the order of the program, on memory of its own, from the states
of the generators that the program had. So a value does not depend on when it is asked for, and its bits are those of a
run with memory.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ls_strategy import device as dev
from ls_strategy._torch import tree_iter, tree_map
from ls_strategy.errors import PlanError
from ls_strategy.meta_init.lazy import LazyTensor, source_of_memory

_HOST = torch.device("cpu")

_COPIED = 1 << 16
"""Elements up to which a tensor in memory is copied when it is noted, so that later changes do not count."""

_END = 1 << 62
_numbers = itertools.count()


@dataclass(eq=False)
class Memory:
    """The memory that a tensor on meta and its views would share, with everything that was written to it."""

    nbytes: int
    writes: list[DeferredOperation] = field(default_factory=list)

    source: LazyTensor | None = None
    """Where its first values are, if they are in a file."""

    is_set: bool = False
    """Whether it was given values, so that nothing else needs to fill it."""

    is_read: bool = False
    """Whether an operation has used its values."""

    def add(self, operation: DeferredOperation, *, replaces_all: bool) -> None:
        """Note that an operation writes to it."""
        if replaces_all and not self.is_read:
            self.writes.clear()  # nobody can ask for these values any more
        self.writes.append(operation)

    def before(self, number: int) -> DeferredOperation | None:
        """Return the last operation before ``number`` that has written to it."""
        at = bisect_left(self.writes, number, key=lambda operation: operation.number)
        return self.writes[at - 1] if at else None


@dataclass(frozen=True, eq=False)
class TensorPlace:
    """A tensor in a memory."""

    memory: Memory
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_read: bool = True
    """Whether the operation needs its values."""

    @property
    def fills_memory(self) -> bool:
        """Return whether the tensor consists of all elements of the memory."""
        numel = 1
        for length, stride in sorted(zip(self.size, self.stride, strict=True), key=lambda pair: pair[1]):
            if length != 1 and stride != numel:
                return False
            numel *= length
        return self.offset == 0 and numel * self.dtype.itemsize >= self.memory.nbytes

    def blank(self, device: torch.device) -> Tensor:
        """Return a tensor of this form without values."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor in real memory."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Captured:
    """A tensor with values that an operation on meta has used."""

    value: Tensor
    version: int

    @classmethod
    def of(cls, value: Tensor) -> Captured:
        """Note a tensor; a small one is copied."""
        value = value.detach().clone() if value.numel() <= _COPIED else value
        return cls(value, value._version)


_Storages = dict[Memory, torch.UntypedStorage]


@dataclass(eq=False)
class DeferredOperation:
    """One call, with tensors replaced by their places."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    outputs: list[TensorPlace | None] = field(default_factory=list)
    """Results in memory of their own, in order; None for others."""

    written: list[TensorPlace] = field(default_factory=list)
    number: int = field(default_factory=lambda: next(_numbers))
    """Its place in the program."""

    state: Tensor | None = None
    """State of the generator before it, if it draws random numbers."""

    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

    def places(self) -> Iterator[TensorPlace]:
        """Yield the tensors without memory among the arguments."""
        return (leaf for leaf in tree_iter((self.args, self.kwargs)) if isinstance(leaf, TensorPlace))

    @property
    def generator(self) -> torch.Generator | None:
        """The generator that the program gave it; None: the default of the device."""
        return next((x for x in tree_iter((self.args, self.kwargs)) if isinstance(x, torch.Generator)), None)

    def problem(self) -> str | None:
        """Return why it cannot be run again."""
        if self.call is _unknown:
            return "a tensor on meta was made elsewhere, so its values are not known"
        if any(isinstance(x, Captured) and x.value._version != x.version for x in tree_iter((self.args, self.kwargs))):
            return f"{self.name} reads a tensor in host memory that was changed afterwards"
        return None

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.call, "__name__", str(self.call))

    def run(self, storages: _Storages, device: torch.device, *, redraw: bool = True, full_size: bool = True) -> None:
        """Run it on real memory.

        Args:
            storages: the real memory so far; gets what the operation makes.
            device: where to run it.
            redraw: draw the random numbers of the program again. Otherwise: the next ones of the program's generator.
            full_size: give memory that is written to its full size. Otherwise only what the operation writes.
        """
        given = self.generator
        spot = device if given is None else given.device
        fresh: torch.Generator | None = None
        if redraw and self.state is not None:
            if given is None:
                dev.set_random_state(self.state, device)
            else:
                fresh = torch.Generator(device=given.device)
                fresh.set_state(self.state)

        def real(leaf: Any) -> Any:
            if isinstance(leaf, TensorPlace):
                if leaf.memory not in storages and full_size and any(leaf.memory is w.memory for w in self.written):
                    empty = torch.empty(leaf.memory.nbytes, dtype=torch.uint8, device=device)
                    storages[leaf.memory] = empty.untyped_storage()
                held = storages.get(leaf.memory)
                return leaf.blank(device) if held is None else leaf.of(held)
            if isinstance(leaf, Captured):
                return leaf.value
            if isinstance(leaf, torch.device):
                return spot if leaf.type == "meta" else leaf
            return fresh if fresh is not None and isinstance(leaf, torch.Generator) else leaf

        args, kwargs = tree_map(real, self.args), tree_map(real, self.kwargs)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.default_dtype)
        try:
            # The functions of `torch.nn.init` make tensors of the default device.
            with nullcontext() if isinstance(self.call, torch._ops.OpOverload) else spot:
                result = self.call(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)
        self._keep(result, storages)

    def _keep(self, result: Any, storages: _Storages) -> None:
        if not any(self.outputs):
            return
        theirs = {storages[p.memory].data_ptr() for p in self.places() if p.memory in storages}
        for place, leaf in zip(self.outputs, tree_iter(result), strict=True):
            if place is None:
                continue
            value: Tensor = leaf.materialize() if isinstance(leaf, LazyTensor) else leaf
            as_on_meta = value.stride() == place.stride and value.storage_offset() == 0 and value.dtype == place.dtype
            storage = value.untyped_storage()
            if not as_on_meta or storage.data_ptr() in theirs or storage.nbytes() < place.memory.nbytes:
                storage = torch.empty(place.memory.nbytes, dtype=torch.uint8, device=value.device).untyped_storage()
                place.of(storage).copy_(value)
            storages[place.memory] = storage


def needed(places: Sequence[TensorPlace], before: int = _END) -> list[DeferredOperation]:
    """Return the operations that the values of ``places`` depend on, in order of the program.

    Args:
        places: tensors without memory.
        before: number of the operation before which the values are wanted.
    """
    found: dict[int, DeferredOperation] = {}
    waiting: list[int] = []

    def need(memory: Memory, number: int) -> None:
        operation = memory.before(number)
        if operation is not None and operation.number not in found:
            found[operation.number] = operation
            heapq.heappush(waiting, -operation.number)

    for place in places:
        need(place.memory, before)
    while waiting:
        operation = found[-heapq.heappop(waiting)]
        for place in operation.places():
            if place.is_read:
                need(place.memory, operation.number)
        for place in operation.written:
            if not place.fills_memory:
                need(place.memory, operation.number)
    return [found[number] for number in sorted(found)]


@torch.no_grad()
def replay(places: Sequence[TensorPlace], device: torch.device, before: int = _END) -> _Storages:
    """Make the memory of ``places``, as it was before an operation of the program, on ``device``.

    What is needed only on the way is freed at once, and the generators are left as they were.
    """
    operations = needed(places, before)
    problem = next((why for why in (operation.problem() for operation in operations) if why is not None), None)
    if problem is not None:
        raise PlanError(refusal(problem))
    last: dict[Memory, int] = {}
    for operation in operations:
        for place in (*operation.places(), *operation.written, *filter(None, operation.outputs)):
            last[place.memory] = operation.number
    wanted = {place.memory for place in places}
    storages: _Storages = {}
    draws = any(operation.state is not None and operation.generator is None for operation in operations)
    state = dev.random_state(device) if draws else None
    try:
        for operation in operations:
            operation.run(storages, device)
            for memory in [m for m in storages if m not in wanted and last[m] <= operation.number]:
                del storages[memory]
    finally:
        if state is not None:
            dev.set_random_state(state, device)
    for place in places:  # without any operation: no value was ever written
        if place.memory not in storages:
            empty = torch.empty(place.memory.nbytes, dtype=torch.uint8, device=device)
            storages[place.memory] = empty.untyped_storage()
    return storages


def refusal(problem: str) -> str:
    """Return the message of an error."""
    return (
        "configure_model runs on the meta device, and what it does to weights is done again where they get memory, "
        f"but {problem}. Make it in configure_model and do not change it after it was used, or build the module under "
        "`with torch.device('cpu'):`."
    )


# --- tensors on meta -------------------------------------------------------------------------------------------------

_MEMORY = "_ls_strategy_memory"


def is_plain(tensor: Any) -> bool:
    """Return whether torch handles operations on a tensor. A DTensor's class, for example, handles them itself."""
    return type(tensor).__torch_dispatch__ is _PLAIN


_TENSOR: Any = Tensor
_PLAIN = _TENSOR.__torch_dispatch__


def place_of(tensor: Tensor, *, is_read: bool = True) -> TensorPlace:
    """Return the place of a tensor on meta. The first time, its memory gets a record."""
    storage = tensor.untyped_storage()
    memory, source = getattr(storage, _MEMORY, None), source_of_memory(tensor)
    if memory is None or (source is not None and memory.source is not source):
        memory = Memory(storage.nbytes(), source=source, is_set=source is not None)
        if source is None:
            memory.writes.append(DeferredOperation(_unknown, (), {}))
        else:
            place = TensorPlace(memory, (source.numel(),), (1,), 0, tensor.dtype)
            memory.writes.append(DeferredOperation(_read, (source, tensor.dtype), {}, [place]))
        setattr(storage, _MEMORY, memory)
    return TensorPlace(
        memory, tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype, is_read
    )


def new_place(tensor: Tensor, *, is_set: bool) -> TensorPlace:
    """Return the place of a tensor on meta in memory that was just made."""
    storage = tensor.untyped_storage()
    setattr(storage, _MEMORY, Memory(storage.nbytes(), is_set=is_set))
    return place_of(tensor)


def _unknown() -> None:
    raise AssertionError("it is refused before")


def _read(source: LazyTensor, dtype: torch.dtype) -> Tensor:
    return source.materialize().to(dtype).reshape(-1)


def memory_of(tensor: Tensor) -> Memory | None:
    """Return the record of the memory of a tensor on meta."""
    return getattr(tensor.untyped_storage(), _MEMORY, None)
