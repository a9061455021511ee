"""A gradient in ``p.grad`` whose elements are sharded over ranks until an operation needs them.

Norms are summed over the shards, with one number per parameter on the wire. Multiplications by a number, clamps and
other elementwise operations change every rank's own shard and send nothing. So ``torch.nn.utils.clip_grad_norm_``,
``clip_grad_value_``, ``get_total_norm`` and Lightning's ``grad_norm`` take no memory for full gradients. Any other
torch function gathers the tensor first: the object changes its class, as parameters do
(`ls_strategy.zero.flat.parameters`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ls_strategy._torch import foreach_function, tree_iter, tree_map, without_torch_function
from ls_strategy.errors import StateError
from ls_strategy.zero.flat.parameters import NEED_NO_VALUES

_DATA: Any = torch.Tensor.data

_ITSELF = {torch.Tensor.detach, torch.Tensor.detach_, _DATA.__get__}
"""Functions that return an alias of the same memory."""

_LINEAR = ("mul_", "multiply_", "div_", "divide_", "true_divide_", "__imul__", "__itruediv__", "neg_", "zero_")
_ELEMENTWISE = (*_LINEAR, "clamp_", "clamp_min_", "clamp_max_", "clip_", "nan_to_num_")
_FOREACH = ("mul_", "div_", "neg_", "zero_", "clamp_min_", "clamp_max_")


class GradientSource(Protocol):
    """Provides the elements of one parameter's averaged gradient."""

    def gather(self) -> None:
        """Make the object an ordinary tensor with all elements. Collective."""

    def norm(self, order: float) -> Tensor:
        """Return the norm of all elements, ``()``. Collective."""
        ...

    def edit(self, change: Callable[[Tensor], Any], *, linear: bool) -> None:
        """Change this rank's elements in place. ``linear``: applied to a norm, the change gives the new norm."""

    def used(self) -> None:
        """End the operation for which `gather` was called."""


class ShardedGradient(torch.Tensor):
    """An averaged gradient of which this rank has a shard."""

    source: weakref.ref[GradientSource] | None = None
    """Provides the elements. Ordinary tensors, as copies and pickles are, have none."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Work on shards where that is possible; gather first otherwise."""
        kwargs = kwargs or {}
        if func in NEED_NO_VALUES:
            with without_torch_function():
                return func(*args, **kwargs)
        if func in _ITSELF:
            return args[0]
        handler = _OVER_SHARDS.get(func)
        if handler is not None:
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        sources = [_source_of(leaf) for leaf in tree_iter((args, kwargs)) if type(leaf) is ShardedGradient]
        for source in sources:
            source.gather()
        try:
            return func(*args, **kwargs)
        finally:
            for source in sources:
                source.used()


def new_gradient(shape: torch.Size, placeholder: Tensor, source: GradientSource) -> Tensor:
    """Return a sharded gradient of ``shape``; ``placeholder``, of one element, gives dtype and device."""
    with torch.no_grad():
        gradient = torch.empty(0, dtype=placeholder.dtype, device=placeholder.device)
    take_elements(gradient, shape, placeholder, source)
    return gradient


def give_elements(gradient: Tensor, values: Tensor) -> None:
    """Make ``gradient`` an ordinary tensor at ``values``."""
    with without_torch_function():
        _DATA.__set__(gradient, values)
    gradient.__class__ = torch.Tensor
    vars(gradient).pop("source", None)


def take_elements(gradient: Tensor, shape: torch.Size, placeholder: Tensor, source: GradientSource) -> None:
    """Make ``gradient`` sharded: ``source`` provides its elements. Code that bypasses the class reads NaN."""
    with without_torch_function():
        _DATA.__set__(gradient, placeholder.expand(shape))
    gradient.__class__ = ShardedGradient
    gradient.source = weakref.ref(source)  # type: ignore[attr-defined]


def forget(gradient: Tensor) -> None:
    """Detach ``gradient`` from its source. If it has its elements, it keeps them."""
    if type(gradient) is ShardedGradient:
        gradient.source = None


def as_plain(value: Tensor) -> Tensor:
    """Make ``value`` an ordinary tensor, and return it. Collective if it is sharded."""
    if type(value) is ShardedGradient:
        source = _source_of(value)
        source.gather()
        source.used()
    return value


def _source_of(gradient: Any) -> GradientSource:
    source = None if gradient.source is None else gradient.source()
    if source is None:
        raise StateError(
            f"a gradient of shape {tuple(gradient.shape)} was used after zero_grad(), p.grad = None or the end of the "
            "fit had dropped it, when its elements were sharded over the ranks. Keep p.grad.clone() instead of p.grad."
        )
    return source


def _vector_norm(
    x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, out: Any = None
) -> Any:
    if dim is not None or keepdim or out is not None or not isinstance(ord, (int, float)):
        return NotImplemented
    found = _source_of(x).norm(float(ord))
    return found if dtype is None else found.to(dtype)


def _linalg_norm(x: Tensor, ord: Any = None, *args: Any, **kwargs: Any) -> Any:
    if ord is not None and x.dim() != 1:
        return NotImplemented  # a norm of a matrix
    return _vector_norm(x, 2 if ord is None else ord, *args, **kwargs)


def _norm(x: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, out: Any = None, dtype: Any = None) -> Any:
    return _vector_norm(x, 2 if p in ("fro", None) else p, dim, keepdim, dtype=dtype, out=out)


def _foreach_norm(tensors: Any, ord: Any = 2, dtype: Any = None) -> Any:
    return tuple(torch.linalg.vector_norm(t, ord, dtype=dtype) for t in tensors)


def _in_place(name: str) -> Callable[..., Any]:
    method = getattr(torch.Tensor, name)

    def handler(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(x) is not ShardedGradient or not all(map(_is_number, (*args, *kwargs.values()))):
            return NotImplemented

        def change(values: Tensor) -> Any:
            numbers = tree_map(lambda n: n.to(values.device) if isinstance(n, Tensor) else n, (args, kwargs))
            return method(values, *numbers[0], **numbers[1])

        _source_of(x).edit(change, linear=name in _LINEAR)
        return x

    return handler


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and type(value) is torch.Tensor
    return value is None or isinstance(value, (bool, int, float))


def _foreach_in_place(name: str) -> Callable[..., Any]:
    method = getattr(torch.Tensor, name)

    def handler(tensors: Any, *args: Any) -> Any:
        if len(args) > 1:
            return NotImplemented
        numbers = args[0] if args and isinstance(args[0], (list, tuple)) else [*args] * len(tensors)
        for i, t in enumerate(tensors):
            method(t, *numbers[i : i + 1])
        return None

    return handler


_OVER_SHARDS: dict[Any, Callable[..., Any]] = {
    torch.linalg.vector_norm: _vector_norm,
    torch.linalg.norm: _linalg_norm,
    torch.norm: _norm,
    torch.Tensor.norm: _norm,
    foreach_function("norm"): _foreach_norm,
    **{getattr(torch.Tensor, name): _in_place(name) for name in _ELEMENTWISE},
    **{foreach_function(name): _foreach_in_place(name) for name in _FOREACH},
}
"""Functions that work on shards. Each returns NotImplemented for arguments that need all elements."""
