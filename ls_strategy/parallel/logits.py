"""Sharded logits: a tensor that has the full shape, but holds this rank's shard, so that losses need no change.

::

    logits = model(tokens)                         its shape is (B, T, V); this rank holds V / 4 columns, say
    logits.float().flatten(0, 1)                   works on the shard and stays sharded
    functional.cross_entropy(..., targets)         works on the shards: see `cross_entropy`
    logits.softmax(-1), logits[mask], ...          anything else gathers the full tensor first

Logits are sharded along the vocabulary, over ranks with the same tokens, along the tokens, or both. A gathered tensor
is the same on all ranks. In backward a rank takes its shard of the gradient along the vocabulary, and ``size`` times
its shard along the tokens, because gradients of parameters are averaged over those ranks.
"""

from __future__ import annotations

import copy
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
from ls_strategy.parallel.cross_entropy import Options, cross_entropy
from ls_strategy.parallel.dim_shard import DimShard, expand_index, local_gradient, slice_shard, unshard
from ls_strategy.parallel.regions import untraced


def wrap_vocabulary(local: Tensor, axis: Axis, full_size: int, start: int) -> Tensor:
    """Wrap this rank's columns of vocabulary-parallel logits ``(..., full_size)``. Not collective.

    The shards must be those of `TensorPart.cut`: of equal length, up to one column more on the first ranks.

    Args:
        local: ``(..., columns)``; may be sharded along the tokens already.
        axis: ranks with the same tokens.
        full_size: number of columns on all ranks.
        start: index of this rank's first column.
    """
    low, more = divmod(full_size, axis.size)
    shard = DimShard(axis, local.dim() - 1, tuple(low + (r < more) for r in range(axis.size)), averaged=False)
    if (shard.start, shard.local_size) != (start, local.shape[-1]):
        raise ValueError(
            f"rank {axis.rank} of {axis.size} has {local.shape[-1]} of {full_size} columns from {start} on, but equal "
            f"shards give it {shard.local_size} from {shard.start} on."
        )
    return _wrap(local, shard)


def wrap_sequence(local: Tensor, axis: Axis, full_length: int) -> Tensor:
    """Wrap this rank's tokens of logits ``(B, full_length, V)``. Not collective.

    Args:
        local: ``(B, full_length / axis.size, V)``; may be sharded along the vocabulary already.
        axis: ranks with the same batch, over which gradients of parameters are averaged.
        full_length: number of tokens on all ranks.
    """
    if local.shape[1] * axis.size != full_length:
        raise ValueError(
            f"dimension 1 of {tuple(local.shape)} is not 1/{axis.size} of {full_length} tokens: every rank must hold "
            "the same number."
        )
    return _wrap(local, DimShard(axis, 1, (local.shape[1],) * axis.size, averaged=True))


def gather(tree: Any) -> Any:
    """Replace every sharded tensor in ``tree`` by the full, plain tensor, which keeps its gradient. Collective.

    ``tree`` may consist of lists, tuples, dicts and dataclasses.
    """
    return tree_map(_gather_leaf, tree)


def _gather_leaf(leaf: Any) -> Any:
    if isinstance(leaf, ShardedLogits):
        return unshard(_in_memory(leaf.local), leaf.shards)
    if isinstance(leaf, Tensor):
        return _in_memory(leaf)
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        before = {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf)}
        after = {name: gather(value) for name, value in before.items()}
        if any(after[name] is not before[name] for name in before):
            leaf = copy.copy(leaf)
            for name, value in after.items():
                object.__setattr__(leaf, name, value)
    return leaf


def _in_memory(local: Tensor) -> Tensor:
    """Return logits that are computed only when they are needed (`losses.deferred`) as a plain tensor."""
    compute = getattr(type(local), "compute", None)
    return local if compute is None else compute(local)


@untraced
def _wrap(local: Tensor, shard: DimShard) -> Tensor:
    if isinstance(local, ShardedLogits):
        return _sharded(local.local, (*local.shards, shard))
    return _sharded(local, (shard,)) if shard.axis.size > 1 else local


def _sharded(local: Tensor, shards: tuple[DimShard, ...]) -> ShardedLogits:
    result = _WrapShard.apply(local, shards)
    assert isinstance(result, ShardedLogits)
    result.local, result.shards = local, shards
    return result


class _WrapShard(torch.autograd.Function):
    """Wrap a shard, without computing anything. Backward serves code that reaches the tensor below Python."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, shards: tuple[DimShard, ...]) -> Tensor:
        ctx.shards = shards
        shape = list(local.shape)
        for shard in shards:
            shape[shard.dim] = shard.outer * shard.full_size * shard.inner
        result = make_wrapper(ShardedLogits, shape, local.dtype, local.device)
        result.local, result.shards = local.detach(), shards
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return local_gradient(grad, ctx.shards), None


class ShardedLogits(Tensor):
    """A tensor with the metadata of the full logits that holds this rank's shard.

    In-place operations, pickling and ``retain_grad`` raise an error. A hook of ``register_hook`` gets the gradient of
    the shard.
    """

    local: Tensor
    shards: tuple[DimShard, ...]

    @property
    def uses_weights_later(self) -> bool:
        """Return whether the shard is computed only when it is needed: see `losses.deferred`."""
        return getattr(self.local, "uses_weights_later", False)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer metadata, run some operations on the shard, and gather for all others."""
        kwargs = kwargs or {}
        if func in METADATA:
            return super().__torch_function__(func, types, args, kwargs)
        _refuse_changes(func, args, kwargs)
        act = _ON_SHARDS.get(func)
        if act is not None and args and isinstance(args[0], ShardedLogits):
            result = act(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*gather(args), **gather(kwargs))

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Gather for operations that are called below Python. The gradient comes back through `_WrapShard`."""
        if func is torch.ops.aten.detach.default:
            return _sharded(args[0].local.detach(), args[0].shards)
        if str(func).split(".")[1].endswith("_"):
            raise _refusal(str(func))
        return func(*gather(args), **gather(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Describe the tensor without its values: printing these would be collective."""
        shards = ", ".join(
            f"{s.axis.name} rank {s.axis.rank} of {s.axis.size} along dimension {s.dim}" for s in self.shards
        )
        return f"ShardedLogits(shape={tuple(self.shape)}, dtype={self.dtype}, shard of {shards})"

    __str__ = __repr__

    def __format__(self, format_spec: str) -> str:
        return format(repr(self), format_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedLogits:
        """Copy the shard; the axis stays the same object."""
        return _sharded(copy.deepcopy(self.local, memo), self.shards)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise an error: the shard of one rank alone would be useless."""
        raise StateError(
            "these logits are sharded over ranks and cannot be pickled or saved. Gather them first, on all ranks: "
            "ls_strategy.parallel.logits.gather(logits)."
        )

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """Call ``hook`` with the gradient of this rank's shard."""
        return self.local.register_hook(hook)


# --- operations that raise an error -----------------------------------------------------------------------------------

_CHANGES = {"__setitem__", "__set__", "__delete__", "retain_grad", "register_post_accumulate_grad_hook"}
_CHANGES |= {"data_ptr", "storage", "untyped_storage", "set_data", "__iadd__", "__isub__", "__imul__", "__itruediv__"}


def _refusal(name: str) -> StateError:
    return StateError(
        f"{name} on logits that are sharded over ranks would act on a shard, or on a copy. Write it out of place "
        "(logits = logits / 2, torch.where, masked_fill without the underscore), or gather them into a plain tensor "
        "first, on all ranks: ls_strategy.parallel.logits.gather(logits)."
    )


def _refuse_changes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse operations that write to their first argument or to ``out``: they would change a gathered copy."""
    name = getattr(func, "__name__", "")
    in_place = name in _CHANGES or (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace") is True
    changes_first = in_place and args and isinstance(args[0], ShardedLogits)
    if changes_first or isinstance(kwargs.get("out"), ShardedLogits) or func is torch.autograd.grad:
        raise _refusal(name)


# --- operations on the shards -----------------------------------------------------------------------------------------


def _element_wise(func: Callable[..., Any], logits: ShardedLogits, *args: Any, **kwargs: Any) -> Any:
    """Run an operation between the logits and scalars."""
    if not all(is_plain_scalar(value) for value in (*args, *kwargs.values())):
        return NotImplemented
    result = func(logits.local, *args, **kwargs)
    if not isinstance(result, Tensor) or (result.shape, result.device) != (logits.local.shape, logits.local.device):
        return NotImplemented
    return _sharded(result, logits.shards)


def is_plain_scalar(value: Any) -> bool:
    """Return whether the second operand of an operation on each logit is a number, without a gradient."""
    if isinstance(value, Tensor):
        return type(value) is Tensor and value.dim() == 0 and not value.requires_grad
    return value is None or isinstance(value, (int, float, str, torch.dtype, torch.device, torch.memory_format))


def _reshape(func: Callable[..., Any], logits: ShardedLogits, *args: Any, **kwargs: Any) -> Any:
    """Change the shape, with the same elements in the same order."""
    old = tuple(logits.shape)
    outcome = func(torch.empty(old, dtype=logits.dtype, device="meta"), *args, **kwargs)
    new = tuple(outcome.shape)
    if outcome.dtype != logits.dtype or not math.prod(old):
        return NotImplemented
    shards = [shard.reshaped(old, new) for shard in logits.shards]
    found = tuple(shard for shard in shards if shard is not None)
    if len(found) < len(shards) or len({shard.dim for shard in found}) < len(found):
        return NotImplemented
    shape = list(new)
    for shard in found:
        shape[shard.dim] = shard.local_length()
    return _sharded(logits.local.reshape(shape), found)


def _permute(func: Callable[..., Any], logits: ShardedLogits, *args: Any, **kwargs: Any) -> Any:
    """Permute the dimensions. The strides of a meta tensor show their new order."""
    n = logits.dim()
    strides = func(torch.empty_strided(logits.shape, tuple(range(1, n + 1)), device="meta"), *args, **kwargs).stride()
    if len(strides) != n:
        return NotImplemented
    order = [stride - 1 for stride in strides]
    return _sharded(logits.local.permute(order), tuple(s.with_dim(order.index(s.dim)) for s in logits.shards))


def _index(func: Callable[..., Any], logits: ShardedLogits, index: Any) -> Any:
    """Index by numbers, slices, None and an ellipsis; a sharded dimension only by slices without a step."""
    items = expand_index(index if isinstance(index, tuple) else (index,), logits.dim())
    if items is None:
        return NotImplemented
    by_dim = {shard.dim: shard for shard in logits.shards}
    shards: list[DimShard] = []
    local: list[Any] = []
    dim = new_dim = 0
    for item in items:
        shard = by_dim.get(dim) if item is not None else None
        if shard is not None:
            item, shard = slice_shard(item, shard)
            if shard is None:
                return NotImplemented
            shards.append(shard.with_dim(new_dim))
        local.append(item)
        dim += item is not None
        new_dim += item is None or isinstance(item, slice)
    return _sharded(logits.local[tuple(local)], tuple(shards))


def _argmax(func: Callable[..., Any], input: ShardedLogits, dim: Any = None, keepdim: bool = False) -> Any:
    """Take the best of every rank along one dimension, then the best of these. Return a plain tensor."""
    if not isinstance(dim, int):
        return NotImplemented
    dim %= input.dim()
    local = input.local.detach()
    best = local.argmax(dim, keepdim=True) if local.shape[dim] else None
    for shard in input.shards:
        if shard.dim == dim:
            if not shard.plain:
                return NotImplemented
            best = _best_of_ranks(local, best, shard)
    if best is None:  # the dimension is empty
        return NotImplemented
    for shard in input.shards:
        if shard.dim != dim:
            best = shard.gather(best)
    return best if keepdim else best.squeeze(dim)


def _best_of_ranks(local: Tensor, best: Tensor | None, shard: DimShard) -> Tensor:
    shape = [1 if d == shard.dim else n for d, n in enumerate(local.shape)]
    value = local.new_full(shape, -torch.inf) if best is None else local.gather(shard.dim, best)
    index = torch.zeros(shape, dtype=torch.long, device=local.device) if best is None else best + shard.start
    values, indices = (shard.axis.all_gather(t, shard.dim) for t in (value, index))
    return indices.gather(shard.dim, values.argmax(shard.dim, keepdim=True))


def _cross_entropy(func: Callable[..., Any], input: Any, target: Any, weight: Any = None, **options: Any) -> Any:
    return cross_entropy(input, input.local, input.shards, target, weight, Options(**options))


# --- tables of operations ---------------------------------------------------------------------------------------------


def _named(names: str) -> list[Any]:
    """Return ``torch.f`` and ``Tensor.f`` for every name that exists."""
    found = (getattr(owner, name, None) for name in names.split() for owner in (torch, Tensor))
    return [func for func in found if callable(func)]


def _getters(names: str) -> list[Any]:
    """Return attributes of tensors in the form that ``__torch_function__`` gets."""
    attributes: list[Any] = [getattr(Tensor, name) for name in names.split()]
    return [attribute.__get__ for attribute in attributes]


ELEMENT_WISE = [
    *_named("float double half bfloat16 to clone contiguous detach neg negative tanh sigmoid clamp pow"),
    *_named("mul multiply div divide true_divide add sub subtract __radd__ __rsub__ __rmul__ __rtruediv__"),
]
RESHAPES = _named("view reshape flatten unflatten squeeze unsqueeze ravel")
PERMUTATIONS = [*_named("transpose permute movedim moveaxis swapaxes swapdims t"), *_getters("T mT")]

_ON_SHARDS: dict[Any, Callable[..., Any]] = {
    functional.cross_entropy: _cross_entropy,
    Tensor.__getitem__: _index,
    **dict.fromkeys(ELEMENT_WISE, _element_wise),
    **dict.fromkeys(RESHAPES, _reshape),
    **dict.fromkeys(PERMUTATIONS, _permute),
    **dict.fromkeys(_getters("data"), lambda _, logits: _sharded(logits.local.detach(), logits.shards)),
    **dict.fromkeys(_named("argmax"), _argmax),
}

METADATA = {
    *_named("size dim ndimension numel nelement stride is_contiguous element_size get_device storage_offset"),
    *_named("is_floating_point is_complex is_signed is_inference is_conj is_neg is_pinned __len__ __hash__ __dir__"),
    *_getters(
        "shape dtype device requires_grad ndim layout is_leaf grad_fn grad retains_grad output_nr itemsize nbytes"
    ),
    *_getters("is_cpu is_cuda is_meta is_sparse is_sparse_csr is_quantized is_nested is_mps is_xpu is_mkldnn"),
}
