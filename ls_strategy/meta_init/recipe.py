"""Recipes of what was done to tensors of files, so that a part of the result needs only parts of the files.

::

    experts 0..7 of a file ── stack ──┐
                                      ├─ cat ── transpose ── cast     box [3:5, :, 64:128] of this
    experts 0..7 of a file ── stack ──┘                               = boxes of experts 3 and 4

A recipe is a tree. Its leaves are tensors in files or in memory, its other nodes operations that move elements or cast
them. A box of a node is made of boxes of its sources; the one invariant is that nothing is kept after that. The result
of any other operation is computed from its sources in full, each time a part of it is needed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ls_strategy._torch import make_wrapper, tree_map, without_torch_function
from ls_strategy.layout import flat_offset, flat_range_to_boxes
from ls_strategy.meta_init.lazy import READ_CHUNK, LazyTensor, narrowed

Offsets = tuple[int, ...]

_MOST_RUNS = 256
"""Runs of a reshaped box that are read one by one. For more, everything between the first and the last is read."""


@dataclass(frozen=True)
class Recipe:
    """Values that are made when they are needed."""

    shape: tuple[int, ...]
    """Of the full value."""

    dtype: torch.dtype

    def box(self, offsets: Offsets, sizes: Offsets) -> Tensor:
        """Make a rectangular part. Shape: ``sizes``."""
        raise NotImplementedError

    def flat(self, start: int, stop: int) -> Tensor:
        """Make elements ``[start, stop)`` of the flattened value, by default of boxes."""
        boxes = flat_range_to_boxes(self.shape, start, stop)
        if len(boxes) == 1:
            return self.box(boxes[0].offsets, boxes[0].sizes).reshape(-1)
        out = torch.empty(max(stop - start, 0), dtype=self.dtype, device="cpu")
        for b in boxes:
            out[b.start - start : b.stop - start].view(b.sizes).copy_(self.box(b.offsets, b.sizes))
        return out


def full(recipe: Recipe) -> Tensor:
    """Make the full value."""
    return recipe.box((0,) * len(recipe.shape), recipe.shape)


def runs_in(shape: Sequence[int], offsets: Offsets, sizes: Offsets) -> tuple[int, Iterator[int]]:
    """Return the length of a box's contiguous runs, and where each begins in the flattened tensor, in order."""
    split = len(shape)
    while split > 0 and sizes[split - 1] == shape[split - 1]:
        split -= 1
    # Dimensions from here on are complete; the one before is cut, and is the last that a run extends over.
    split = max(split - 1, 0)
    first, strides = flat_offset(shape, offsets), [math.prod(shape[d + 1 :]) for d in range(split)]
    indices = itertools.product(*map(range, sizes[:split]))
    starts = (first + sum(i * s for i, s in zip(index, strides, strict=True)) for index in indices)
    return math.prod(sizes[split:]), starts


@dataclass(frozen=True)
class InMemory(Recipe):
    """A tensor that has its values."""

    value: Tensor

    @override
    def box(self, offsets: Offsets, sizes: Offsets) -> Tensor:
        return narrowed(self.value.detach(), offsets, sizes)


@dataclass(frozen=True)
class Cast(Recipe):
    """Another dtype."""

    source: Recipe

    @override
    def box(self, offsets: Offsets, sizes: Offsets) -> Tensor:
        return self.source.box(offsets, sizes).to(self.dtype)

    @override
    def flat(self, start: int, stop: int) -> Tensor:
        return self.source.flat(start, stop).to(self.dtype)


@dataclass(frozen=True)
class Permuted(Recipe):
    """Dimensions in another order: dimension ``i`` is ``order[i]`` of the source."""

    source: Recipe
    order: tuple[int, ...]

    @override
    def box(self, offsets: Offsets, sizes: Offsets) -> Tensor:
        back = [self.order.index(d) for d in range(len(self.order))]
        value = self.source.box(tuple(offsets[i] for i in back), tuple(sizes[i] for i in back))
        return value.permute(self.order)


@dataclass(frozen=True)
class Sliced(Recipe):
    """Every ``step``-th of the indices from ``start`` on along ``dim``."""

    source: Recipe
    dim: int
    start: int
    step: int

    @override
    def box(self, offsets: Offsets, sizes: Offsets) -> Tensor:
        at, size = list(offsets), list(sizes)
        at[self.dim] = self.start + offsets[self.dim] * self.step
        size[self.dim] = (sizes[self.dim] - 1) * self.step + 1 if sizes[self.dim] else 0
        value = self.source.box(tuple(at), tuple(size))
        return value if self.step == 1 else value[(slice(None),) * self.dim + (slice(None, None, self.step),)]


@dataclass(frozen=True)
class Joined(Recipe):
    """Several values one after the other along ``dim``."""

    sources: tuple[Recipe, ...]
    dim: int

    @override
    def box(self, offsets: Offsets, sizes: Offsets) -> Tensor:
        low, high = offsets[self.dim], offsets[self.dim] + sizes[self.dim]
        out: Tensor | None = None
        begin = 0
        for source in self.sources:
            length = source.shape[self.dim]
            lo, hi = max(low, begin), min(high, begin + length)
            if lo < hi:
                at, size = list(offsets), list(sizes)
                at[self.dim], size[self.dim] = lo - begin, hi - lo
                part = source.box(tuple(at), tuple(size))
                if hi - lo == high - low:
                    return part
                out = torch.empty(sizes, dtype=self.dtype, device="cpu") if out is None else out
                out.narrow(self.dim, lo - low, hi - lo).copy_(part)
            begin += length
        return torch.empty(sizes, dtype=self.dtype, device="cpu") if out is None else out


@dataclass(frozen=True)
class Reshaped(Recipe):
    """The same elements, row by row, in another shape."""

    source: Recipe

    @override
    def flat(self, start: int, stop: int) -> Tensor:
        return self.source.flat(start, stop)

    @override
    def box(self, offsets: Offsets, sizes: Offsets) -> Tensor:
        if math.prod(sizes) == 0:
            return torch.empty(sizes, dtype=self.dtype, device="cpu")
        inner = self._without_ones(offsets, sizes)
        if inner is not None:
            return self.source.box(*inner).reshape(sizes)
        run, starts = runs_in(self.shape, offsets, sizes)
        if math.prod(sizes) // run <= _MOST_RUNS:
            return torch.cat([self.flat(at, at + run) for at in starts]).view(sizes)
        strides = [math.prod(self.shape[d + 1 :]) for d in range(len(sizes))]
        last = [at + size - 1 for at, size in zip(offsets, sizes, strict=True)]
        between = self.flat(flat_offset(self.shape, offsets), flat_offset(self.shape, last) + 1)
        return between.as_strided(sizes, strides)

    def _without_ones(self, offsets: Offsets, sizes: Offsets) -> tuple[Offsets, Offsets] | None:
        """Return the box of the source if the shapes differ only in dimensions of size 1."""
        mine = [d for d, size in enumerate(self.shape) if size != 1]
        theirs = [d for d, size in enumerate(self.source.shape) if size != 1]
        if [self.shape[d] for d in mine] != [self.source.shape[d] for d in theirs]:
            return None
        at, size = [0] * len(self.source.shape), [1] * len(self.source.shape)
        for own, other in zip(mine, theirs, strict=True):
            at[other], size[other] = offsets[own], sizes[own]
        return tuple(at), tuple(size)


@dataclass(frozen=True)
class Computed(Recipe):
    """The result of any other function, which needs its arguments in full."""

    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @override
    def box(self, offsets: Offsets, sizes: Offsets) -> Tensor:
        args, kwargs = tree_map(_value_of, (self.args, self.kwargs))
        return narrowed(self.function(*args, **kwargs), offsets, sizes).clone()


def computes(recipe: Recipe) -> bool:
    """Return whether any part of the value needs a source in full."""
    if isinstance(recipe, Computed):
        return True
    sources = [getattr(recipe, "source", None), *getattr(recipe, "sources", ())]
    return any(computes(source) for source in sources if source is not None)


def _value_of(leaf: Any) -> Any:
    return leaf.materialize() if isinstance(leaf, LazyTensor) else leaf


# --- tensors ---------------------------------------------------------------------------------------------------------


class RecipeTensor(LazyTensor):
    """A tensor without data that is made by a recipe."""

    recipe: Recipe

    @staticmethod
    def __new__(cls: Any, recipe: Recipe) -> RecipeTensor:  # noqa: D102
        self = make_wrapper(cls, recipe.shape, recipe.dtype)
        self.recipe = recipe
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        kind, recipe = type(self).__name__, type(self.recipe).__name__
        return f"{kind}(shape={tuple(self.shape)}, dtype={self.dtype}, {recipe})"

    @property
    @override
    def at_once(self) -> int:
        return self.numel() if computes(self.recipe) else READ_CHUNK

    @override
    def load(self, start: int, stop: int) -> Tensor:
        if computes(self.recipe):  # a box would be computed from full sources, and so would the next one
            return full(self.recipe).reshape(-1)[start:stop].clone()
        return self.recipe.flat(start, stop)

    @override
    def load_box(self, offsets: Offsets, sizes: Offsets) -> Tensor:
        return self.recipe.box(offsets, sizes)

    @override
    def materialize(self) -> Tensor:
        return full(self.recipe).contiguous() if self.held is None else self.held


class RecordedTensor(RecipeTensor):
    """A tensor without data that records what is done to it: the results are recipes too."""

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return RecordedTensor(self.recipe) if self.held is None else self.held.clone()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what the operation returns, without making it an instance of this class."""
        with without_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    @override
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record operations that move or cast elements, and functions of tensors; run all others on values."""
        record = _RECORDED.get(func)
        if record is None and func.namespace == "aten" and not func._schema.is_mutable:
            record = None if torch.Tag.nondeterministic_seeded in func.tags else _computed
        made = None if record is None else record(func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs) if made is None else tree_map(_wrap, made)


def recipe_of(tensor: Tensor) -> Recipe:
    """Return how to make the values of ``tensor``."""
    if isinstance(tensor, RecipeTensor) and tensor.held is None:
        return tensor.recipe
    value = tensor.materialize() if isinstance(tensor, LazyTensor) else tensor
    return InMemory(tuple(value.shape), value.dtype, value)


def _wrap(leaf: Any) -> Any:
    return leaf if isinstance(leaf, (Tensor, int, float, str, bytes, bool)) or leaf is None else RecordedTensor(leaf)


# --- operations ------------------------------------------------------------------------------------------------------


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record any function with one result. None if its shape depends on values."""

    def bare(leaf: Any) -> Any:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, Tensor) else leaf

    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device("meta")}
    try:
        like = func(*tree_map(bare, args), **tree_map(bare, kwargs))
    except (RuntimeError, NotImplementedError):
        return None
    if not isinstance(like, Tensor):
        return None
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    return Computed(tuple(like.shape), like.dtype, func, args, kwargs)


def _same(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Recipe:
    return recipe_of(args[0])


def _cast(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recipe:
    """Cast. The device is not a question: values are made where they are needed."""
    recipe, dtype = recipe_of(args[0]), kwargs.get("dtype")
    return recipe if dtype in (None, recipe.dtype) else Cast(recipe.shape, dtype, recipe)


def _reshape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recipe:
    """Reshape by any function that keeps the order of elements; torch says to which shape."""
    recipe = recipe_of(args[0])
    like = func(torch.empty(recipe.shape, dtype=recipe.dtype, device="meta"), *args[1:], **kwargs)
    return Reshaped(tuple(like.shape), recipe.dtype, recipe)


def _permute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recipe:
    recipe = recipe_of(args[0])
    ndim = len(recipe.shape)
    if func in (_aten.t.default, _aten.transpose.int):
        order = list(range(ndim))
        a, b = args[1:3] if func is _aten.transpose.int else (0, -1)
        order[a], order[b] = order[b], order[a]
    else:
        order = [d % ndim for d in args[1]]
    return Permuted(tuple(recipe.shape[d] for d in order), recipe.dtype, recipe, tuple(order))


def _slice(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Recipe:
    defaults: tuple[Any, ...] = (0, None, None, 1)
    dim, start, stop, step = (*args[1:], *defaults[len(args) - 1 :])
    recipe = recipe_of(args[0])
    dim %= len(recipe.shape)
    chosen = range(recipe.shape[dim])[slice(start, stop, step)]
    return _sliced(recipe, dim, chosen)


def _sliced(recipe: Recipe, dim: int, chosen: range) -> Recipe:
    shape = (*recipe.shape[:dim], len(chosen), *recipe.shape[dim + 1 :])
    return Sliced(shape, recipe.dtype, recipe, dim, chosen.start, chosen.step)


def _select(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Recipe:
    recipe, dim, index = recipe_of(args[0]), args[1] % args[0].ndim, args[2]
    return _selected(recipe, dim, index % recipe.shape[dim])


def _selected(recipe: Recipe, dim: int, index: int) -> Recipe:
    shape = (*recipe.shape[:dim], *recipe.shape[dim + 1 :])
    return Reshaped(shape, recipe.dtype, _sliced(recipe, dim, range(index, index + 1)))


def _unbind(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> list[Recipe]:
    recipe = recipe_of(args[0])
    dim = (args[1] if len(args) > 1 else 0) % len(recipe.shape)
    return [_selected(recipe, dim, i) for i in range(recipe.shape[dim])]


def _split(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> list[Recipe]:
    recipe = recipe_of(args[0])
    sizes, *more = args[1:]
    dim = (more[0] if more else 0) % len(recipe.shape)
    total = recipe.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, total - at) for at in range(0, total, sizes)]
    starts = [0, *itertools.accumulate(sizes)]
    return [_sliced(recipe, dim, range(at, at + size)) for at, size in zip(starts, sizes, strict=False)]


def _join(func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Recipe | None:
    tensors: Sequence[Tensor] = args[0]
    recipes: list[Recipe] = [recipe_of(t) for t in tensors]
    if len({r.dtype for r in recipes}) > 1 or any(len(r.shape) != len(recipes[0].shape) for r in recipes):
        return None
    more = args[1:]
    dim: int = more[0] if more else 0
    if func is _aten.stack.default:
        dim %= len(recipes[0].shape) + 1
        recipes = [Reshaped((*r.shape[:dim], 1, *r.shape[dim:]), r.dtype, r) for r in recipes]
    first = recipes[0].shape
    dim %= len(first)
    shape = (*first[:dim], sum(r.shape[dim] for r in recipes), *first[dim + 1 :])
    return Joined(shape, recipes[0].dtype, tuple(recipes), dim)


_aten = torch.ops.aten

_RECORDED: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        (_aten.detach.default, _aten.alias.default, _aten.clone.default, _aten.lift_fresh.default), _same
    ),
    _aten._to_copy.default: _cast,
    **dict.fromkeys(
        (
            _aten.view.default, _aten._unsafe_view.default, _aten._reshape_alias.default, _aten.unsqueeze.default,
            _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims,
        ),
        _reshape,
    ),
    **dict.fromkeys((_aten.t.default, _aten.transpose.int, _aten.permute.default), _permute),
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    _aten.unbind.int: _unbind,
    **dict.fromkeys((_aten.split.Tensor, _aten.split_with_sizes.default), _split),
    **dict.fromkeys((_aten.cat.default, _aten.stack.default), _join),
}  # fmt: skip
"""How to record an operation. Returns recipes, or None to run it on values."""
MOVES = frozenset(_RECORDED)
"""Operations of which a part of the result needs only parts of the arguments."""
