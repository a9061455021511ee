"""Records what is done to tensors on meta, and runs what cannot wait.

==============================================  ========================================================================
a new tensor, a function, a write               noted, see `ls_strategy.meta_init.program`
random numbers                                  drawn once at once, on memory that is freed, so that the generator is
                                                always where it would be in a run with memory
``item()``, ``cpu()``, masks as indices         what they depend on is computed now
==============================================  ========================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ls_strategy import device as dev
from ls_strategy._torch import tree_iter, tree_map
from ls_strategy.meta_init.lazy import drop_source
from ls_strategy.meta_init.program import Captured, DeferredOperation, TensorPlace, new_place, place_of, replay
from ls_strategy.tiers.link import trim_heap

_OVERWRITES = frozenset(
    f"{name}_"
    for name in (
        "zero", "fill", "copy", "normal", "uniform", "random", "exponential", "cauchy", "log_normal", "geometric",
        "bernoulli",
    )
)  # fmt: skip
"""Writes that do not depend on what was there."""

_EMPTY = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"})

_COPIES = frozenset({"clone", "_to_copy"})

_TRIM_BYTES = 32 << 20
"""Drawn bytes after which the heap is trimmed. What is drawn is freed at once, but between the states of generators
that are kept, so glibc would hold up to all of it (measured: 330 MiB for weights of 384 MiB). A trim takes 2 ms."""


class MetaRecorder:
    """Notes operations on meta."""

    def __init__(self, device: torch.device, *, draws: bool) -> None:
        """``device``: where values are made; ``draws``: whether to keep random numbers in the order of the program."""
        self.device = device
        self._draws = draws
        self._drawn_bytes = 0

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, shape_only: bool) -> Any:
        """Run an operation on meta and note it. ``shape_only``: whether it reads nothing but forms of tensors."""
        written = written_by(func, args, kwargs)
        if _leaves_meta(kwargs) or (written and not any(t.is_meta for t in written)):
            return func(*args, **kwargs) if shape_only else self._run_now(func, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            if not written:
                return self._on_meta(self._run_now(func, args, kwargs))
            result = args[0]  # a write whose form depends on values
        if not any(isinstance(leaf, Tensor) for leaf in tree_iter(result)) and not written:
            return result
        name = func.overloadpacket.__name__
        overwrites = name in _OVERWRITES or "out" in func._overloadname.split("_")
        operation = self._operation(func, args, kwargs, unread=_written_arguments(func) if overwrites else ())
        if shape_only:
            operation.args, operation.kwargs = tree_map(_unread, operation.args), tree_map(_unread, operation.kwargs)
        self._note_writes(operation, written, overwrites=overwrites)
        reads = [p.memory for p in operation.places() if p.is_read]
        is_set = any(m.is_set for m in reads) if name in _COPIES and reads else name not in _EMPTY
        self._note_results(operation, result, is_set=is_set, dtype=_takes_dtype(func))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._draw(operation)
        return result

    def record_fill(self, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Note a function that gives its first argument values, and does nothing on meta."""
        operation = self._operation(call, args, {}, unread=(0,))
        self._note_writes(operation, [args[0]], overwrites=True)
        self._draw(operation)

    @staticmethod
    def _operation(call: Any, args: Any, kwargs: Any, *, unread: Collection[int | str]) -> DeferredOperation:
        """Return the call with places for tensors; of the arguments ``unread`` it does not need the values."""

        def noted(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return place_of(leaf) if leaf.is_meta else Captured.of(leaf)

        def argument(key: int | str, value: Any) -> Any:
            value = tree_map(noted, value)
            return tree_map(_unread, value) if key in unread else value

        places = tuple(argument(i, value) for i, value in enumerate(args))
        return DeferredOperation(call, places, {key: argument(key, value) for key, value in kwargs.items()})

    @staticmethod
    def _note_writes(operation: DeferredOperation, written: list[Tensor], *, overwrites: bool) -> None:
        """Note what the operation reads, then what it writes."""
        read = [place.memory for place in operation.places() if place.is_read]
        for memory in read:
            memory.is_read = True
        is_set = not (overwrites and read) or any(memory.is_set for memory in read)  # `copy_` of nothing is nothing
        for tensor in (t for t in written if t.is_meta):
            place = place_of(tensor)
            drop_source(tensor)
            operation.written.append(place)
            place.memory.is_set |= is_set
            place.memory.add(operation, replaces_all=overwrites and place.fills_memory)

    @staticmethod
    def _note_results(operation: DeferredOperation, result: Any, *, is_set: bool, dtype: bool) -> None:
        known = {p.memory for p in (*operation.places(), *operation.written)}
        for leaf in tree_iter(result):
            if not isinstance(leaf, Tensor):
                operation.outputs.append(None)
                continue
            if place_of(leaf).memory in known:
                operation.outputs.append(None)
                continue
            place = new_place(leaf, is_set=is_set)
            place.memory.writes.append(operation)
            operation.outputs.append(place)
            if dtype and operation.kwargs.get("dtype") is None:
                operation.kwargs = {**operation.kwargs, "dtype": leaf.dtype}

    def _draw(self, operation: DeferredOperation) -> None:
        """Note the generator's state, and draw what a run with memory would draw."""
        generator = operation.generator
        if generator is None and not self._draws:
            return
        operation.state = dev.random_state(self.device) if generator is None else generator.get_state()
        with torch.no_grad():
            storages = replay([p for p in operation.places() if p.is_read], self.device, operation.number)
            operation.run(storages, self.device, redraw=False, full_size=False)
        places = (*operation.written, *filter(None, operation.outputs))
        self._drawn_bytes += sum(math.prod(place.size) * place.dtype.itemsize for place in places)
        if dev.is_host(self.device) and self._drawn_bytes >= _TRIM_BYTES:
            del storages
            trim_heap()
            self._drawn_bytes = 0

    def _run_now(self, func: Any, args: Any, kwargs: Any) -> Any:
        leaves = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_meta]
        places = {id(leaf): place_of(leaf) for leaf in leaves}
        storages = replay(list(places.values()), self.device)

        def real(leaf: Any) -> Any:
            if isinstance(leaf, torch.device) and leaf.type == "meta":
                return self.device
            place = places.get(id(leaf))
            return leaf if place is None else place.of(storages[place.memory])

        return func(*tree_map(real, args), **tree_map(real, kwargs))

    @staticmethod
    def _on_meta(result: Any) -> Any:
        """Return tensors of which the form was not known before as ones on meta."""

        def note(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            empty = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
            operation = DeferredOperation(torch.clone, (Captured.of(leaf),), {}, [new_place(empty, is_set=True)])
            for place in filter(None, operation.outputs):
                place.memory.writes.append(operation)
            return empty

        return tree_map(note, result)


def _unread(leaf: Any) -> Any:
    return replace(leaf, is_read=False) if isinstance(leaf, TensorPlace) else leaf


def _written_arguments(func: Any) -> list[int | str]:
    """Return the position and the name of every argument that the operation writes to."""
    written = [
        (i, a) for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    ]
    return [key for i, a in written for key in (i, a.name)]


def _leaves_meta(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type != "meta"


def _takes_dtype(func: Any) -> bool:
    """Return whether the function creates a tensor without reading one, of the default dtype unless it gets another."""
    arguments = func._schema.arguments
    return any(a.name == "dtype" for a in arguments) and not any("Tensor" in str(a.type) for a in arguments)


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    by_name = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    changed = [
        by_name[a.name]
        for a in func._schema.arguments
        if a.alias_info is not None and a.alias_info.is_write and a.name in by_name
    ]
    return [leaf for leaf in tree_iter(changed) if isinstance(leaf, Tensor)]
