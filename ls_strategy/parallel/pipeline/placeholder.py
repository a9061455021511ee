"""Tensors with a shape, a dtype and a device, but no values.

A rank does not have the values that the model computes before the rank's own blocks. That code runs with placeholders,
so that the user's code reaches the rank's blocks unchanged and sees the right shapes and dtypes:

=====================================  ==============================================================================
arguments of a function                result
=====================================  ==============================================================================
real tensors only                      the usual one
a placeholder, or a tensor on meta     a placeholder: the function ran on meta copies of its arguments
a parameter (in `PlaceholderMode`)     a placeholder: the parameter may be on another rank
only the shape of a placeholder        the usual one: ``zeros_like``, ``new_ones``, ...
=====================================  ==============================================================================

Functions that need a value (``item``, ``bool``, a shape that depends on values) raise a PlanError that names them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ls_strategy._torch import tree_flatten, tree_iter, tree_map, without_torch_functions
from ls_strategy.errors import LSError, PlanError
from ls_strategy.parallel.pipeline.counts import Mean, tokens_of
from ls_strategy.parallel.pipeline.record import RecordedStep, Unread

_META = torch.device("meta")
_FILLED = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "new_tensor")
_MOVES = ("to", "cpu", "cuda", "pin_memory")
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")
READS = ("item", "tolist", "numpy", "equal", "allclose")
READS += ("__bool__", "__int__", "__float__", "__index__", "__complex__")
_SELECT = ("__getitem__", "masked_select")
_NOT_REMEMBERED = frozenset((*_FILLED, *_MOVES, *_HOOKS, *READS, *_SELECT, "linear_cross_entropy"))
_IN_PLACE = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__", "__ixor__")


class Placeholder(Tensor):
    """A meta tensor that reports the device that its values would be on. Created by `placeholder`."""

    _device: torch.device

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        return _on_meta(func, args, options, _device_among(args, options))


def _no_explanation(_mode: PlaceholderMode, _name: str) -> None:
    """Know no more."""


class PlaceholderMode(TorchFunctionMode):
    """Runs every function that gets a placeholder, a meta tensor or a parameter on meta.

    With ``parameters=False``, after this rank's blocks, a real parameter counts as an ordinary tensor.
    """

    def __init__(self, device: torch.device) -> None:
        """``device``: where values would be. It replaces ``meta`` if the code passes on the device of a model."""
        super().__init__()
        self.device = device
        self.parameters = True
        self.known: dict[int, tuple[Tensor, Tensor]] = {}
        """Placeholders whose values have been received, and the values, by the placeholder's id."""

        self.missing: nn.Parameter | None = None
        """The first parameter that was used with ``parameters=False`` and is on another rank."""

        self.means: list[Mean] | None = None
        """Notes the losses that are means over tokens, unless it is None."""

        self.kept: frozenset[int] = frozenset()
        """``id`` of tensors that functions must not change: these calls are left out."""

        self.record: RecordedStep | None = None
        """Notes the calls with values of the model, unless it is None."""

        self.memory: dict[Any, Any] = {}
        """Placeholders for the results of functions, by the shapes of their arguments. Only with a record."""

        self.explain: Callable[[PlaceholderMode, str], PlanError | None] = _no_explanation
        """Gets this mode and a function's name; returns why the rank does not have what it needs, if more is known."""

        self._stale: dict[int, Tensor] = {}
        """Real tensors that would hold values of the model if these were known, by id. Only with a record."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _name_of(func) == "__get__":  # an attribute: a parameter's shape, device, ...
            asked = isinstance(args[0], Placeholder)
            result = _on_meta(func, args, kwargs, self.device) if asked else func(*args, **kwargs)
            self._note(func, args, kwargs, result, None)
            return result
        tokens = None if self.means is None else tokens_of(func, args, kwargs)
        result = self._run(func, args, kwargs)
        self._note(func, args, kwargs, result, tokens)
        if tokens is not None and not is_meta(tokens):
            assert self.means is not None
            value = None if is_meta(result) else result.detach()
            self.means.append(Mean(tokens, value, result.requires_grad))
        return result

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.record is not None and _name_of(func) == "loss_is_mean_over":
            self.record.declared = args[0]
        if self.kept and args and id(args[0]) in self.kept and _writes(_name_of(func)):
            return args[0]
        if self.known and any(id(leaf) in self.known for leaf in tree_iter((args, kwargs))):
            args = tree_map(self.if_known, args)
            kwargs = {name: tree_map(self.if_known, value) for name, value in kwargs.items()}
        if any(self._is_absent(leaf) for leaf in tree_iter((args, kwargs))):
            if self.record is not None:
                return self._run_recorded(self.record, func, args, kwargs)
            try:
                return _on_meta(func, args, kwargs, self.device)
            except PlanError:
                explained = self.explain(self, _name_of(func))
                if explained is None:
                    raise
                raise explained from None
        if any(leaf == _META for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.device)):
            args = tree_map(self._real_device, args)
            kwargs = {name: tree_map(self._real_device, value) for name, value in kwargs.items()}
        return func(*args, **kwargs)

    def _run_recorded(
        self, record: RecordedStep, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Go on where a run without a record ends: where values are read, and at changes of real tensors."""
        name, first = _name_of(func), args[0] if args else None
        if name in ("item", "tolist") and isinstance(first, Tensor) and first.numel() == 1:
            return Unread(record, first)
        if name == "__bool__" and isinstance(first, Tensor):
            return record.answer_to(first)
        if _writes(name) and isinstance(first, Tensor) and not is_meta(first):
            self._stale[id(first)] = first
            args = (placeholder(first.shape, first.dtype, self.device), *args[1:])
        key = self._key(func, args, kwargs)
        if key is not None and key in self.memory:
            return tree_map(self._fresh, self.memory[key])
        try:
            result = _on_meta(func, args, kwargs, self.device)
            if key is not None:
                self.memory[key] = tree_map(self._fresh, result)
            return result
        except PlanError:
            if kwargs.get("reduction") not in ("mean", "sum") or not isinstance(first, Tensor):
                raise
            return placeholder((), first.dtype, self.device)  # a loss that needs values

    def _key(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the shapes of a function's results depend on, or None."""
        name = _name_of(func)
        if _writes(name) or name in _NOT_REMEMBERED:
            return None
        with without_torch_functions():
            leaves, structure = tree_flatten((args, kwargs))
            described = [
                (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf)
                for leaf in leaves
            ]
        kind = self.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        key = (func, structure, autocast, *described)
        try:
            hash(key)
        except TypeError:  # a slice, for example
            return None
        return key

    def _fresh(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        with without_torch_functions():
            empty = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=_META)
            return _wrap(empty, self.device)

    def _note(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        tokens: Tensor | None,
    ) -> None:
        if self.record is None:
            return
        results: list[Tensor] = [leaf for leaf in tree_iter(result) if isinstance(leaf, Placeholder)]
        if _writes(_name_of(func)) and args and isinstance(args[0], Tensor) and self._is_absent(args[0]):
            results.append(args[0])
        self.record.add(func, args, kwargs, results, tokens)

    def if_known(self, leaf: Any) -> Any:
        """Return the received value of a placeholder, or the leaf itself."""
        return self.known[id(leaf)][1] if id(leaf) in self.known else leaf

    def _is_absent(self, leaf: Any) -> bool:
        if not isinstance(leaf, Tensor):
            return False
        if isinstance(leaf, nn.Parameter):
            return self.parameters or self._is_missing(leaf)
        return isinstance(leaf, Placeholder) or is_meta(leaf) or id(leaf) in self._stale

    def _is_missing(self, parameter: nn.Parameter) -> bool:
        if not is_meta(parameter):
            return False
        self.missing = parameter if self.missing is None else self.missing
        return True

    def _real_device(self, leaf: Any) -> Any:
        return self.device if leaf == _META and isinstance(leaf, torch.device) else leaf


def placeholder(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Placeholder:
    """Return a tensor without values."""
    with without_torch_functions():
        return _wrap(torch.empty(shape, dtype=dtype, device=_META), device)


def is_meta(tensor: Tensor) -> bool:
    """Return whether a tensor has no values, whatever device it reports."""
    with without_torch_functions():
        return tensor.device == _META


def _wrap(tensor: Tensor, device: torch.device) -> Placeholder:
    result = tensor.as_subclass(Placeholder)
    result._device = device
    return result


def _name_of(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", str(func))


def _device_among(args: Any, kwargs: Any) -> torch.device:
    return next(leaf._device for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Placeholder))


def _on_meta(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
    """Run ``func`` on meta copies of its tensors. The resulting tensors are placeholders on ``device``."""
    name = _name_of(func)
    if name == "__get__":
        return _attribute(func, args, device)
    if name == "linear_cross_entropy":  # its layer may be here
        return placeholder(args[2].shape if kwargs.get("reduction") == "none" else (), torch.float32, device)
    if name in READS:
        raise PlanError(
            f"{name}() asks for the value of a tensor that is computed on another rank of the pipeline. Before the "
            "model's blocks this rank knows only shapes. Read values after the blocks, or inside them."
        )
    if name in _HOOKS:
        return RemovableHandle(OrderedDict())
    if name in _FILLED:
        return _filled(func, args, kwargs, device)
    if name in _MOVES:
        args, kwargs = tree_map(_meta_for_device, (args, kwargs))
    _refuse_in_place(name, args, kwargs)
    try:
        if name in _SELECT and len(args) == 2:
            func, args = _by_indices(func, args)
        with without_torch_functions(), torch.no_grad():
            args, kwargs = tree_map(_to_meta, (args, kwargs))
            result = args[0] if name in _MOVES[1:] else func(*args, **kwargs)
            return tree_map(lambda leaf: _wrap(leaf, device) if isinstance(leaf, Tensor) else leaf, result)
    except LSError:
        raise
    except Exception as error:
        raise PlanError(
            f"{name}() failed on tensors whose values are on another rank of the pipeline: {type(error).__name__}: "
            f"{error}. Before the blocks, shapes must not depend on values, and only the rank's own device may be "
            "used. Move the call into the first block."
        ) from error


def _attribute(func: Callable[..., Any], args: tuple[Any, ...], device: torch.device) -> Any:
    name = getattr(getattr(func, "__self__", None), "__name__", "")
    if name == "device":
        return device
    if name in ("is_cpu", "is_cuda", "is_meta"):
        return name == f"is_{device.type}"
    with without_torch_functions():
        result = func(*args)
        return _wrap(result, device) if isinstance(result, Tensor) else result


def _filled(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Tensor:
    """Return a real tensor: its values do not depend on the placeholder."""
    kwargs = {**kwargs, "device": device if kwargs.get("device") in (None, _META) else kwargs["device"]}
    with without_torch_functions():
        return func(*args, **kwargs)


def _by_indices(func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the call of ``x[mask]`` or ``x.masked_select(mask)`` with the indices that a known mask selects.

    Their number is that of the results.
    """
    if _name_of(func) == "masked_select":
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in args))
        args, func = tuple(tensor.expand(shape) for tensor in args), Tensor.__getitem__
    indices: list[Any] = []
    for index in args[1] if isinstance(args[1], tuple) else (args[1],):
        is_mask = isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() and not is_meta(index)
        indices += index.nonzero(as_tuple=True) if is_mask else (index,)
    return func, (args[0], tuple(indices))


def _writes(name: str) -> bool:
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _refuse_in_place(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    target = args[0] if _writes(name) and args else kwargs.get("out")
    if isinstance(target, Tensor) and not is_meta(target):
        raise PlanError(
            f"{name}() writes a value that is computed on another rank of the pipeline into a tensor of this rank. "
            "Use the version that returns a new tensor, or move the call into the first block."
        )


def _meta_for_device(leaf: Any) -> Any:
    if not isinstance(leaf, str):
        return leaf
    torch.device(leaf)  # raises for an invalid device, as without placeholders
    return "meta"


def _to_meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return _META
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.device == _META:
        return leaf  # in-place functions must change the placeholder itself
    return torch.empty_like(leaf, device=_META)
