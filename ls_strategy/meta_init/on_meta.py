"""Track what ``configure_model`` does to tensors on the meta device.

=====================================================  ================================================================
views, ``set_`` and the like                           as they are
casts, slices, ``cat`` of weights that were loaded     recorded by ranges, so that a part of the result needs only
                                                       parts of the files (`ls_strategy.meta_init.recipe`)
all others, also writes                                recorded as a program, which runs again when a parameter gets
                                                       its memory (`ls_strategy.meta_init.recording`)
``tensor.item()``, ``tensor.cpu()``                    the values are computed now
=====================================================  ================================================================
"""

from __future__ import annotations

import math
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from ls_strategy._torch import TorchDispatchMode, tree_iter, tree_map
from ls_strategy.meta_init.lazy import LazyTensor, give_source, source_of_memory
from ls_strategy.meta_init.peft import refuse_skipped
from ls_strategy.meta_init.program import is_plain
from ls_strategy.meta_init.recipe import MOVES
from ls_strategy.meta_init.recording import MetaRecorder

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


class OnMeta(TorchDispatchMode):
    """Keeps track of the values that tensors on meta would have."""

    def __init__(self, device: torch.device, *, draws: bool = True) -> None:
        """``device``: where values are made.

        ``draws``: whether random numbers are those of a run with memory. Otherwise they are drawn when a parameter gets
        memory, in whatever order that happens.
        """
        super().__init__()
        self.is_paused = False
        self.recorder = MetaRecorder(device, draws=draws)

    @contextmanager
    def paused(self) -> Generator[None, None, None]:
        """Let everything be, while a loader runs."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        on_meta = any(t.is_meta for t in tensors) or _makes_meta(kwargs)
        if self.is_paused or not on_meta or not all(map(is_plain, tensors)) or _moves_nothing(func):
            return func(*args, **kwargs)
        if not self._is_of_files(func, tensors):
            return self.recorder.record(func, args, kwargs, shape_only=func.overloadpacket.__name__ in _SHAPE_ONLY)
        device = kwargs.get("device")
        if device is not None and device.type != "meta":
            kwargs = {**kwargs, "device": torch.device("cpu")}
        result = func(*tree_map(_lazy, args), **tree_map(_lazy, kwargs))
        if device is not None and device.type != "meta":
            return tree_map(
                lambda leaf: leaf.materialize().to(device) if isinstance(leaf, LazyTensor) else leaf, result
            )
        return tree_map(_on_meta, result)

    @staticmethod
    def _is_of_files(func: Any, tensors: list[Tensor]) -> bool:
        """Return whether the operation moves or casts weights of files, and reads no other tensor without memory."""
        return func in MOVES and any(map(_is_loaded, tensors)) and all(_is_loaded(t) for t in tensors if t.is_meta)


class DataOnMeta(TorchFunctionMode):
    """Keeps the values where torch drops them on meta: lists of numbers, and some of ``torch.nn.init``."""

    def __init__(self, on_meta: OnMeta) -> None:
        """``on_meta``: notes the values."""
        super().__init__()
        self._on_meta = on_meta

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._on_meta.is_paused:
            if func in _FROM_DATA and not isinstance(args[0] if args else kwargs.get("data"), Tensor):
                return self._from_data(func, args, kwargs)
            if func == Tensor.new_tensor and args[0].is_meta:
                return self._from_data(torch.tensor, args[1:], {"dtype": args[0].dtype, **kwargs})
            if func in _INDEXES and args[0].is_meta:
                return func(args[0], _index_in_memory(args[1]), *args[2:])
            if func in _ASKS_DEVICE and func(*args) in (True, _META):
                self._asked(args[0])
        return func(*args, **kwargs)

    @staticmethod
    def _from_data(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "meta":
            return func(*args, **kwargs)
        requires_grad = kwargs.pop("requires_grad", False)
        value = func(*args, **{**kwargs, "device": "cpu"})
        return value.to("meta").requires_grad_(requires_grad)

    def _asked(self, tensor: Tensor) -> None:
        """Note a call of ``torch.nn.init`` that asks whether the tensor is on meta, and returns if so."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_name == "__torch_function__":
            frame = frame.f_back
        if frame is None or not is_plain(tensor):
            return
        code, module = frame.f_code, frame.f_globals.get("__name__", "")
        if module.startswith("peft."):
            refuse_skipped(module, code)
        if module != "torch.nn.init":
            return
        args = [frame.f_locals[name] for name in code.co_varnames[: code.co_argcount]]
        if args and args[0] is tensor:
            self._on_meta.recorder.record_fill(FunctionType(code, frame.f_globals), tuple(args))


_META = torch.device("meta")
_ASKS_DEVICE: Any = (Tensor.is_meta.__get__, Tensor.device.__get__)  # type: ignore[attr-defined]
_FROM_DATA: Any = (torch.tensor, torch.as_tensor, torch.asarray)
_INDEXES: Any = (Tensor.__getitem__, Tensor.__setitem__)


def _index_in_memory(index: Any) -> Any:
    """Return an index with tensors in place of lists of numbers, of which torch makes tensors on meta."""
    if isinstance(index, tuple):
        return tuple(map(_index_in_memory, index))
    flat = index if isinstance(index, list) else []
    return torch.tensor(index, device="cpu") if flat and all(isinstance(i, int) for i in flat) else index


def _is_loaded(tensor: Tensor) -> bool:
    return tensor.is_meta and source_of_memory(tensor) is not None


def _makes_meta(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "meta"


def _moves_nothing(func: Any) -> bool:
    """Return whether the function returns a view, changes only the form of a tensor, or is a collective of torch."""
    view = not func._schema.is_mutable and any(r.alias_info is not None for r in func._schema.returns)
    return view or torch.Tag.inplace_view in func.tags or func.namespace in ("c10d", "_c10d_functional", "prim")


def _lazy(leaf: Any) -> Any:
    """Return a loaded tensor as one that records what is done to it."""
    if not isinstance(leaf, Tensor) or not _is_loaded(leaf):
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
