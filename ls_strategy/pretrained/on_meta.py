"""What user code does in ``configure_model`` with weights that were loaded on meta.

====================================  ==================================================================================
views, ``empty_like`` and the like    as they are
functions: casts, sums, ``cat``       recorded: the result is on meta, and its values are computed when they are needed
``tensor.item()``, ``tensor.cpu()``   the values are read and computed now
``zeros_`` and the like on others     recorded: ``reset_parameters`` of the module, which runs later, may not do it
writes                                refused: on meta they would be lost, and nobody would notice
====================================  ==================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from ls_strategy._compat import TorchDispatchMode, tree_iter, tree_map
from ls_strategy.errors import PlanError
from ls_strategy.zero.lazy import LazyTensor, give_source, note_constant, source_of_memory

_SHAPE_ONLY = frozenset(
    f"{name}{end}"
    for name, ends in {
        "empty": ("_like",), "zeros": ("_like",), "ones": ("_like",), "full": ("_like",), "rand": ("_like",),
        "randn": ("_like",), "randint": ("_like",),
        "new": ("_empty", "_zeros", "_ones", "_full", "_empty_strided"),
    }.items()
    for end in ends
)  # fmt: skip
"""Functions that read nothing but the shape, dtype and device."""


class LoadedOnMeta(TorchDispatchMode):
    """Keeps track of weights that were loaded on meta."""

    def __init__(self) -> None:
        super().__init__()
        self._paused = False

    @contextmanager
    def paused(self) -> Generator[None, None, None]:
        """Let everything be, while a loader runs."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable and func.namespace == "aten":
            _note_constants(func, args)
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if _is_plain(leaf)]
        if self._paused or not any(map(_is_loaded, tensors)) or _reads_nothing(func):
            return func(*args, **kwargs)
        device = kwargs.get("device")
        if device is not None and device.type != "meta":
            kwargs = {**kwargs, "device": torch.device("cpu")}
        written = _written(func, args)
        if any(t.is_meta for t in written) or any(t.is_meta and not _is_loaded(t) for t in tensors):
            raise PlanError(
                f"configure_model changes pretrained weights, or copies them into other weights ({func}), while they "
                "are on the meta device, where no rank has their values (stage 3, and pipelines). Load the model once "
                "without a strategy, change it, save it with save_pretrained(folder), and load that folder; or load it "
                "in configure_model under `with torch.device('cpu'):`, in full on every rank."
            )
        result = func(*tree_map(_lazy, args), **tree_map(_lazy, kwargs))
        if written:
            return result
        if device is not None and device.type != "meta":
            return tree_map(
                lambda leaf: leaf.materialize().to(device) if isinstance(leaf, LazyTensor) else leaf, result
            )
        return tree_map(_on_meta, result)


def _is_plain(leaf: Any) -> bool:
    return type(leaf) in (Tensor, nn.Parameter)


def _is_loaded(tensor: Tensor) -> bool:
    return tensor.is_meta and source_of_memory(tensor) is not None


def _reads_nothing(func: Any) -> bool:
    """Whether the function returns a view, reads only shapes, or is none of torch's own (a collective)."""
    view = not func._schema.is_mutable and any(r.alias_info is not None for r in func._schema.returns)
    return view or func.overloadpacket.__name__ in _SHAPE_ONLY or func.namespace != "aten"


def _note_constants(func: Any, args: Any) -> None:
    """Record that a parameter becomes a constant, which the module's ``reset_parameters`` may not know of."""
    number = {"zero_": 0.0, "fill_": args[1] if len(args) > 1 else None}.get(func.overloadpacket.__name__)
    for tensor in _written(func, args):
        if type(tensor) is nn.Parameter and tensor.is_meta:
            note_constant(tensor, None if isinstance(number, Tensor) else number)


def _written(func: Any, args: Any) -> list[Tensor]:
    """Return the tensors that the function writes to."""
    pairs = zip(func._schema.arguments, args, strict=False)
    changed = [value for argument, value in pairs if argument.alias_info is not None and argument.alias_info.is_write]
    return [leaf for leaf in tree_iter(changed) if isinstance(leaf, Tensor)]


def _lazy(leaf: Any) -> Any:
    """Return a loaded tensor as one that records what is done to it."""
    if not _is_plain(leaf) or not _is_loaded(leaf):
        return leaf
    source = source_of_memory(leaf)
    assert source is not None
    numel, start = leaf.numel(), leaf.storage_offset()
    if start == 0 and leaf.is_contiguous() and leaf.shape == source.shape:
        return source
    flat = source.reshape(-1)
    order = sorted(range(leaf.ndim), key=lambda d: (-leaf.stride(d), d))
    rows = leaf.permute(order)
    if rows.is_contiguous():  # a block of rows, perhaps transposed
        return flat[start : start + numel].reshape(rows.shape).permute([order.index(d) for d in range(leaf.ndim)])
    return flat.as_strided(leaf.shape, leaf.stride(), start)


def _on_meta(leaf: Any) -> Any:
    if not isinstance(leaf, LazyTensor):
        return leaf
    empty = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
    if math.prod(leaf.shape):
        give_source(empty, leaf)
    return empty
