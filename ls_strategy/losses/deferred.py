"""Logits that are not computed before something needs them: a tensor with their shape that holds the hidden states.

::

    logits = head(hidden)                          its shape is (B, T, V); it holds hidden states (B, T, D)
    logits.float()[:, :-1].flatten(0, 1)           the operation is noted, or acts on the hidden states
    functional.cross_entropy(..., targets)         computes a few tokens' logits at a time: see `chunked`
    logits.softmax(-1), logits * mask, ...         anything else computes all logits, once

So losses need no change. Logits can be sharded over ranks too: `parallel.logits.ShardedLogits` then holds these.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ls_strategy._torch import make_wrapper, tree_map
from ls_strategy.distributed.axis import Axis
from ls_strategy.errors import StateError
from ls_strategy.losses.chunked import Product, highest_columns, token_losses
from ls_strategy.parallel.cross_entropy import Options, TokenLoss, cross_entropy
from ls_strategy.parallel.cross_entropy import token_losses as losses_of_logits
from ls_strategy.parallel.dim_shard import expand_index
from ls_strategy.parallel.logits import ELEMENT_WISE, METADATA, PERMUTATIONS, RESHAPES, is_plain_scalar
from ls_strategy.parallel.regions import untraced


@untraced
def defer(hidden: Tensor, weight: Tensor, bias: Tensor | None = None, *, chunk_bytes: int | None = None) -> Tensor:
    """Return ``functional.linear(hidden, weight, bias)`` as logits that are computed in chunks. Not collective.

    Under autocast the product runs in its dtype, also in backward.

    Args:
        hidden: ``(..., D)``.
        weight: ``(V, D)``.
        bias: ``(V,)``, or None.
        chunk_bytes: size of the fp32 logits that are held at a time. None: 1/32 of all, between 1 MiB and 256 MiB.
    """
    kind = hidden.device.type
    autocast = torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64
    dtype = torch.get_autocast_dtype(kind) if autocast else torch.result_type(hidden, weight)
    source = LogitSource(hidden, weight, bias, hidden.dim() - 1, Product(dtype, autocast, (), chunk_bytes))
    return _wrap(source, dtype, _LogitState())


@dataclasses.dataclass
class _LogitState:
    """State that all deferred logits of one call of the layer share."""

    expired: bool = False
    """Whether the weights have changed since."""

    derived: bool = False
    """Whether there are several of them, which would be views of each other."""


@dataclasses.dataclass(frozen=True)
class LogitSource:
    """Inputs that deferred logits are computed from, and the computation."""

    hidden: Tensor
    """``(..., D)``."""

    weight: Tensor
    bias: Tensor | None

    dim: int
    """The dimension of the logits that has the columns; the others are those of ``hidden``, in their order."""

    product: Product

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the logits."""
        rows = list(self.hidden.shape[:-1])
        rows.insert(self.dim, self.weight.shape[0])
        return tuple(rows)

    def compute(self) -> Tensor:
        """Compute all logits. Differentiable where gradients are enabled."""
        return self.product.logits(self.hidden, self.weight, self.bias).movedim(-1, self.dim)

    def losses(self, target: Tensor | None, loss: TokenLoss) -> Tensor:
        """Return one number per token, in the order of ``hidden``: see `chunked.token_losses`."""
        rows = self.hidden.reshape(-1, self.hidden.shape[-1])
        return token_losses(rows, self.weight, self.bias, target, self.product, loss)


def _wrap(source: LogitSource, dtype: torch.dtype, shared: _LogitState) -> DeferredLogits:
    result = _WrapHidden.apply(source.hidden, source.weight, source.bias, source, dtype)
    assert isinstance(result, DeferredLogits)
    result._source, result._shared, result._full = source, shared, None
    return result


class _WrapHidden(torch.autograd.Function):
    """Wrap hidden states without computing anything. Backward serves code that reaches the tensor below Python."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, source: LogitSource, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.source = dataclasses.replace(source, hidden=hidden.detach(), weight=weight.detach(), bias=None)
        result = make_wrapper(DeferredLogits, source.shape, dtype, hidden.device)
        result._source, result._shared, result._full = ctx.source, _LogitState(), None
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        leaves = [None if t is None else t.detach().requires_grad_() for t in ctx.saved_tensors]
        source = dataclasses.replace(ctx.source, hidden=leaves[0], weight=leaves[1], bias=leaves[2])
        with torch.enable_grad():
            full = source.compute()
        present = [leaf for leaf in leaves if leaf is not None]
        found = iter(torch.autograd.grad(full, present, grad))
        return *(None if leaf is None else next(found) for leaf in leaves), None, None


class DeferredLogits(Tensor):
    """A tensor with the metadata of logits that holds the hidden states and the weight."""

    _source: LogitSource
    _shared: _LogitState
    _full: Tensor | None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer metadata, note some operations, and compute all logits for all others."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, DeferredLogits) and first._full is None:
            if func in METADATA:
                return super().__torch_function__(func, types, args, kwargs)
            act = _ON_SOURCES.get(func)
            result = NotImplemented if act is None else act(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        _refuse_changes_of_views(func, args, kwargs)
        return func(*computed(args), **computed(kwargs))

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute all logits for operations called below Python. Their gradient comes back by `_WrapHidden`."""
        if func is torch.ops.aten.detach.default:
            source = args[0]._source
            cut = dataclasses.replace(source, hidden=source.hidden.detach(), weight=source.weight.detach())
            result = make_wrapper(DeferredLogits, source.shape, args[0].dtype, source.hidden.device)
            result._source, result._shared, result._full = cut, args[0]._shared, args[0]._full
            return result
        if str(func).split(".")[1].endswith("_"):
            raise _refusal(str(func))
        args = tree_map(_compute_below_autograd, args)
        return func(*args, **tree_map(_compute_below_autograd, kwargs or {}))

    @property
    def uses_weights_later(self) -> bool:
        """Return whether a loss may read the weights after the layer's forward: stage 3 must keep them gathered."""
        return self._full is None

    def compute(self) -> Tensor:
        """Return all logits as a plain tensor, the same one at every call.

        Raises:
            StateError: the weights have changed since the call of the layer.
        """
        if self._full is None:
            self._check()
            # With a gradient also inside no_grad(), because code outside may use the same tensor.
            with torch.set_grad_enabled(self.requires_grad):
                self._full = self._source.compute()
        return self._full

    def token_losses(self, target: Tensor, loss: TokenLoss) -> Tensor:
        """Return the loss of every token of logits ``(N, V)``; see `chunked.token_losses`."""
        if self._full is not None or self._source.dim != self.dim() - 1:
            return losses_of_logits(self.compute(), target, loss)
        self._check()
        return self._source.losses(target, loss)

    def _check(self) -> None:
        if self._shared.expired:
            raise StateError(
                "these logits were not needed before the optimizer step and were never computed; now the weights have "
                "changed. Compute them before the step: logits = logits.clone().contiguous() + 0, or return them from "
                "training_step. Or set activations.loss=None."
            )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Describe the tensor without computing its values."""
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    __str__ = __repr__

    def __format__(self, format_spec: str) -> str:
        return format(repr(self), format_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copy the computed logits."""
        return self.compute().detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the computed logits."""
        return self.compute().detach().__reduce_ex__(protocol)


def expire(logits: Tensor) -> None:
    """Note that the weights have changed, so logits that are not computed yet raise an error."""
    if isinstance(logits, DeferredLogits):
        logits._shared.expired = True


def computed(tree: Any) -> Any:
    """Replace deferred logits in nested containers and dataclasses by plain tensors, which keep their gradient."""
    return tree_map(_compute_leaf, tree)


def _compute_leaf(leaf: Any) -> Any:
    return leaf.compute() if isinstance(leaf, DeferredLogits) else leaf


def _compute_below_autograd(leaf: Any) -> Any:
    if not isinstance(leaf, DeferredLogits):
        return leaf
    leaf._check()
    with torch.no_grad():
        return leaf._source.compute() if leaf._full is None else leaf._full.detach()


def _refusal(name: str) -> StateError:
    return StateError(
        f"{name} would change logits in place that other tensors are views of, but with activations.loss='chunked' "
        "they are not in memory. Write it out of place (logits = logits / 2, torch.where, masked_fill without the "
        "underscore), or set activations.loss=None."
    )


def _refuse_changes_of_views(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse in-place operations where other deferred logits may be views of these."""
    name = getattr(func, "__name__", "")
    in_place = name in _CHANGES or (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace") is True
    target = kwargs.get("out") if "out" in kwargs else args[0] if args and in_place else None
    if isinstance(target, DeferredLogits) and target._shared.derived:
        raise _refusal(name)


_CHANGES = {"__setitem__", "__set__", "set_data", "__iadd__", "__isub__", "__imul__", "__itruediv__"}


# --- operations on the sources ----------------------------------------------------------------------------------------


def _derive(logits: DeferredLogits, source: LogitSource, dtype: torch.dtype | None = None) -> DeferredLogits:
    logits._shared.derived = True
    return _wrap(source, dtype or logits.dtype, logits._shared)


def _element_wise(func: Callable[..., Any], logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    """Note an operation with scalars."""
    if not all(is_plain_scalar(value) for value in (*args, *kwargs.values())):
        return NotImplemented
    source, device = logits._source, logits.device
    sample = func(torch.zeros((1, 2), dtype=logits.dtype, device=device), *args, **kwargs)
    if not isinstance(sample, Tensor) or sample.shape != (1, 2) or sample.device != device:
        return NotImplemented
    # A copy of numbers in tensors, which the program may change before backward.
    args, kwargs = tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, (args, kwargs))
    changes = (*source.product.changes, lambda x: func(x, *args, **kwargs))
    product = dataclasses.replace(source.product, changes=changes)
    return _derive(logits, dataclasses.replace(source, product=product), sample.dtype)


def _detach(_func: Callable[..., Any], logits: DeferredLogits) -> Any:
    source = logits._source
    bias = None if source.bias is None else source.bias.detach()
    cut = dataclasses.replace(source, hidden=source.hidden.detach(), weight=source.weight.detach(), bias=bias)
    return _derive(logits, cut)


def _reshape(func: Callable[..., Any], logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    """Change the shape of all dimensions but the last one, which has the columns."""
    source, old = logits._source, tuple(logits.shape)
    outcome = func(torch.empty(old, dtype=logits.dtype, device="meta"), *args, **kwargs)
    new = tuple(outcome.shape)
    if outcome.dtype != logits.dtype or source.dim != len(old) - 1 or not new or new[-1] != old[-1]:
        return NotImplemented
    if math.prod(new[:-1]) != math.prod(old[:-1]):
        return NotImplemented
    hidden = source.hidden.reshape((*new[:-1], source.hidden.shape[-1]))
    return _derive(logits, dataclasses.replace(source, hidden=hidden, dim=len(new) - 1))


def _permute(func: Callable[..., Any], logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    """Permute the dimensions. The strides of a meta tensor show their new order."""
    n, source = logits.dim(), logits._source
    outcome = func(torch.empty_strided(logits.shape, tuple(range(1, n + 1)), device="meta"), *args, **kwargs)
    strides = outcome.stride()
    if len(strides) != n:
        return NotImplemented
    order = [stride - 1 for stride in strides]
    rows = [d - (d > source.dim) for d in order if d != source.dim]
    hidden = source.hidden.permute(*rows, n - 1)
    return _derive(logits, dataclasses.replace(source, hidden=hidden, dim=order.index(source.dim)))


def _index(_func: Callable[..., Any], logits: DeferredLogits, index: Any) -> Any:
    """Index the dimensions before the last one, which has the columns."""
    source, n = logits._source, logits.dim()
    items: list[Any] | None = list(index) if isinstance(index, tuple) else [index]
    assert items is not None
    if any(item is Ellipsis for item in items):
        items = None if any(isinstance(i, Tensor) for i in items) else expand_index(tuple(items), n)
    if items is None or source.dim != n - 1 or not all(map(_is_index, items)):
        return NotImplemented
    if sum(map(_consumed, items)) == n:
        last = items.pop()
        if not isinstance(last, slice) or last != slice(None):
            return NotImplemented
    hidden = source.hidden[tuple(items)]
    return _derive(logits, dataclasses.replace(source, hidden=hidden, dim=hidden.dim() - 1))


def _is_index(item: Any) -> bool:
    if isinstance(item, Tensor):
        return type(item) is Tensor and not item.is_floating_point()
    return item is None or (isinstance(item, int | slice) and not isinstance(item, bool))


def _consumed(item: Any) -> int:
    """Return the number of dimensions that an item of an index stands for."""
    if isinstance(item, Tensor):
        return item.dim() if item.dtype == torch.bool else 1
    return int(item is not None)


def _cross_entropy(_func: Callable[..., Any], input: Any, target: Any, weight: Any = None, **options: Any) -> Any:
    return cross_entropy(input, input, (), target, weight, Options(**options))


def _log_sum_exp(_func: Callable[..., Any], input: DeferredLogits, dim: Any, keepdim: bool = False) -> Any:
    """Sum over the columns in chunks."""
    source = input._source
    if not _is_last(input, dim):
        return NotImplemented
    input._check()
    result = source.losses(None, TokenLoss(Axis("alone"), 0, input.shape[-1])).view(input.shape[:-1])
    dtype = torch.logsumexp(torch.zeros((1, 2), dtype=input.dtype, device=input.device), 1).dtype
    return (result[..., None] if keepdim else result).to(dtype)


def _argmax(_func: Callable[..., Any], input: DeferredLogits, dim: Any = None, keepdim: bool = False) -> Any:
    source = input._source
    if not _is_last(input, dim) or not input.numel():
        return NotImplemented
    input._check()
    rows = source.hidden.detach().reshape(-1, source.hidden.shape[-1])
    result = highest_columns(rows, source.weight.detach(), source.bias, source.product).view(input.shape[:-1])
    return result[..., None] if keepdim else result


def _is_last(logits: DeferredLogits, dim: Any) -> bool:
    """Return whether ``dim`` is the last dimension, and has the columns."""
    dims = (dim,) if isinstance(dim, int) else dim
    n = logits.dim()
    return logits._source.dim == n - 1 and isinstance(dims, list | tuple) and [d % n for d in dims] == [n - 1]


def _same(_func: Callable[..., Any], logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    """Return the logits: where they lie in memory has no meaning yet."""
    return NotImplemented if args or kwargs else logits


_ON_SOURCES: dict[Any, Callable[..., Any]] = {
    functional.cross_entropy: _cross_entropy,
    Tensor.__getitem__: _index,
    **dict.fromkeys(ELEMENT_WISE, _element_wise),
    **dict.fromkeys(RESHAPES, _reshape),
    **dict.fromkeys(PERMUTATIONS, _permute),
    Tensor.contiguous: _same,
    Tensor.detach: _detach,
    torch.detach: _detach,
    Tensor.logsumexp: _log_sum_exp,
    torch.logsumexp: _log_sum_exp,
    Tensor.argmax: _argmax,
    torch.argmax: _argmax,
}
