"""Logits of which every rank has a part, in a tensor that looks whole, so that a loss is written as ever.

::

    logits = model(tokens)                         (B, T, V) to the eye; this rank has V / 4 of the columns, say
    logits.float().flatten(0, 1)                   acts on the part, and stays divided
    functional.cross_entropy(..., targets)         works on the parts: see `cross_entropy`
    logits.softmax(-1), logits[mask], ...          anything else gathers the whole first, and goes on with that

Two kinds of division, alone or together: by vocabulary, over ranks that see the same tokens, and along the tokens. What
follows on a whole tensor is the same on every rank. Gradients: over the vocabulary a rank takes its own part of the
gradient; along the tokens ``size`` times its own part, because parameters' gradients are averaged over these ranks.
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

from ls_strategy._compat import make_wrapper, tree_map
from ls_strategy.distributed.axis import Axis
from ls_strategy.errors import StateError
from ls_strategy.parallel.cross_entropy import Options, cross_entropy
from ls_strategy.parallel.dim_shard import DimShard, own_part, slice_shard, spelled_out, unsharded
from ls_strategy.parallel.regions import untraced


def wrap_vocabulary(local: Tensor, axis: Axis, full_size: int, start: int) -> Tensor:
    """Logits ``(..., full_size)`` of which this rank has the columns from ``start`` on. Not collective.

    The parts must be as `TensorPart.cut` makes them: as equal as can be, the longer ones first.

    Args:
        local: ``(..., columns)``; may be divided along the tokens already.
        axis: ranks that see the same tokens.
        full_size: columns of all ranks.
        start: this rank's first one.
    """
    low, more = divmod(full_size, axis.size)
    cut = DimShard(axis, local.dim() - 1, tuple(low + (r < more) for r in range(axis.size)), averaged=False)
    if (cut.start, cut.mine) != (start, local.shape[-1]):
        raise ValueError(
            f"rank {axis.rank} of {axis.size} has {local.shape[-1]} of {full_size} columns from {start} on, where "
            f"equal parts give it {cut.mine} from {cut.start} on."
        )
    return _wrap(local, cut)


def wrap_sequence(local: Tensor, axis: Axis, full_length: int, dim: int = 1) -> Tensor:
    """Logits that are ``full_length`` long along ``dim``, of which this rank has an equal part. Not collective.

    Args:
        local: ``(B, full_length / axis.size, V)``; may be divided by vocabulary already.
        axis: ranks that see the same batch, and over which gradients of parameters are averaged.
        full_length: tokens of all ranks.
        dim: of the tokens.
    """
    if local.shape[dim] * axis.size != full_length:
        raise ValueError(
            f"dimension {dim} of {tuple(local.shape)} is not a {axis.size}th of {full_length} tokens: every rank must "
            "have equally many."
        )
    return _wrap(local, DimShard(axis, dim % local.dim(), (local.shape[dim],) * axis.size, averaged=True))


def gather(tree: Any) -> Any:
    """``tree`` with every divided tensor in it replaced by the whole one: plain, with its gradient. Collective.

    Looks into lists, tuples, dicts and dataclasses.
    """
    return tree_map(_gather_leaf, tree)


def _gather_leaf(leaf: Any) -> Any:
    if isinstance(leaf, ShardedLogits):
        return unsharded(leaf.part, leaf.cuts)
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        before = {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf)}
        after = {name: gather(value) for name, value in before.items()}
        if any(after[name] is not before[name] for name in before):
            leaf = copy.copy(leaf)
            for name, value in after.items():
                object.__setattr__(leaf, name, value)
    return leaf


@untraced
def _wrap(local: Tensor, cut: DimShard) -> Tensor:
    if isinstance(local, ShardedLogits):
        return _divided(local.part, (*local.cuts, cut))
    return _divided(local, (cut,)) if cut.axis.size > 1 else local


def _divided(part: Tensor, cuts: tuple[DimShard, ...]) -> ShardedLogits:
    result = _Sharded.apply(part, cuts)
    assert isinstance(result, ShardedLogits)
    result.part, result.cuts = part, cuts
    return result


class _Sharded(torch.autograd.Function):
    """From a part to what looks whole; nothing is computed. For code that reaches the tensor past Python's level."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, cuts: tuple[DimShard, ...]) -> Tensor:
        ctx.cuts = cuts
        shape = list(part.shape)
        for cut in cuts:
            shape[cut.dim] = cut.outer * cut.full * cut.inner
        result = make_wrapper(ShardedLogits, part, tuple(shape))
        result.part, result.cuts = part.detach(), cuts
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return own_part(grad, ctx.cuts), None


class ShardedLogits(Tensor):
    """Has the metadata of the whole tensor, and in memory this rank's part of it.

    In-place operations, pickling and ``retain_grad`` are refused. A hook of ``register_hook`` sees the gradient of this
    rank's part.
    """

    part: Tensor
    cuts: tuple[DimShard, ...]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Metadata from here, some operations on the part, all others on the unsharded."""
        kwargs = kwargs or {}
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs)
        _refuse_changes(func, args, kwargs)
        act = _ON_PARTS.get(func)
        if act is not None and args and isinstance(args[0], ShardedLogits):
            result = act(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*gather(args), **gather(kwargs))

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Below Python's level: the unsharded. Its gradient comes back through `_Sharded`."""
        if func is torch.ops.aten.detach.default:
            return _divided(args[0].part.detach(), args[0].cuts)
        if str(func).split(".")[1].endswith("_"):
            raise _refusal(str(func))
        return func(*gather(args), **gather(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """No values: to print them would take all ranks."""
        parts = ", ".join(
            f"{c.axis.name} rank {c.axis.rank} of {c.axis.size} along dimension {c.dim}" for c in self.cuts
        )
        return f"ShardedLogits(shape={tuple(self.shape)}, dtype={self.dtype}, part of {parts})"

    __str__ = __repr__

    def __format__(self, format_spec: str) -> str:
        """As `__repr__`."""
        return format(repr(self), format_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedLogits:
        """A copy of the part. The axis is the same."""
        return _divided(copy.deepcopy(self.part, memo), self.cuts)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: each rank would write a part that nobody could read alone."""
        raise StateError(
            "these logits are divided over ranks and cannot be pickled or saved. Make a whole tensor first, on all "
            "ranks: ls_strategy.parallel.logits.gather(logits)."
        )

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """Call ``hook`` with the gradient of this rank's part."""
        return self.part.register_hook(hook)


# --- what must not be called ------------------------------------------------------------------------------------------

_CHANGES = {"__setitem__", "__set__", "__delete__", "retain_grad", "register_post_accumulate_grad_hook"}
_CHANGES |= {"data_ptr", "storage", "untyped_storage", "set_data", "__iadd__", "__isub__", "__imul__", "__itruediv__"}


def _refusal(name: str) -> StateError:
    return StateError(
        f"{name} on logits that are divided over ranks would act on a part, or on a copy. Write it out of place "
        "(logits = logits / 2, torch.where, masked_fill without the underscore), or make a whole, plain tensor of them "
        "first, on all ranks: ls_strategy.parallel.logits.gather(logits)."
    )


def _refuse_changes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What changes its first argument, or ``out``, would be lost with the whole tensor that was made for it."""
    name = getattr(func, "__name__", "")
    in_place = name in _CHANGES or (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace") is True
    changes_first = in_place and args and isinstance(args[0], ShardedLogits)
    if changes_first or isinstance(kwargs.get("out"), ShardedLogits) or func is torch.autograd.grad:
        raise _refusal(name)


# --- operations on the parts ------------------------------------------------------------------------------------------


def _element_wise(func: Callable[..., Any], logits: ShardedLogits, *args: Any, **kwargs: Any) -> Any:
    """Ops between a tensor and numbers: any part stays what it is."""
    if not all(_is_plain(value) for value in (*args, *kwargs.values())):
        return NotImplemented
    result = func(logits.part, *args, **kwargs)
    if not isinstance(result, Tensor) or (result.shape, result.device) != (logits.part.shape, logits.part.device):
        return NotImplemented
    return _divided(result, logits.cuts)


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return type(value) is Tensor and value.dim() == 0 and not value.requires_grad
    return value is None or isinstance(value, (int, float, str, torch.dtype, torch.device, torch.memory_format))


def _reshape(func: Callable[..., Any], logits: ShardedLogits, *args: Any, **kwargs: Any) -> Any:
    """Other dimensions of the same elements in the same order."""
    old = tuple(logits.shape)
    outcome = func(torch.empty(old, dtype=logits.dtype, device="meta"), *args, **kwargs)
    new = tuple(outcome.shape)
    if outcome.dtype != logits.dtype or not math.prod(old):
        return NotImplemented
    return _with_shape(logits, old, new)


def _with_shape(logits: ShardedLogits, old: tuple[int, ...], new: tuple[int, ...]) -> Any:
    cuts = [cut.reshaped(old, new) for cut in logits.cuts]
    found = tuple(cut for cut in cuts if cut is not None)
    if len(found) < len(cuts) or len({cut.dim for cut in found}) < len(found):
        return NotImplemented
    shape = list(new)
    for cut in found:
        shape[cut.dim] = cut.local_length()
    return _divided(logits.part.reshape(shape), found)


def _permute(func: Callable[..., Any], logits: ShardedLogits, *args: Any, **kwargs: Any) -> Any:
    """The dimensions in another order, which the strides of a stand-in tell."""
    n = logits.dim()
    strides = func(torch.empty_strided(logits.shape, tuple(range(1, n + 1)), device="meta"), *args, **kwargs).stride()
    if len(strides) != n:
        return NotImplemented
    order = [stride - 1 for stride in strides]
    return _divided(logits.part.permute(order), tuple(cut.moved(order.index(cut.dim)) for cut in logits.cuts))


def _index(func: Callable[..., Any], logits: ShardedLogits, index: Any) -> Any:
    """Numbers, slices, None and an ellipsis; of a divided dimension, slices without a step."""
    items = spelled_out(index if isinstance(index, tuple) else (index,), logits.dim())
    if items is None:
        return NotImplemented
    divided = {cut.dim: cut for cut in logits.cuts}
    cuts: list[DimShard] = []
    local: list[Any] = []
    dim = new_dim = 0
    for item in items:
        cut = divided.get(dim) if item is not None else None
        if cut is not None:
            item, cut = slice_shard(item, cut)
            if cut is None:
                return NotImplemented
            cuts.append(cut.moved(new_dim))
        local.append(item)
        dim += item is not None
        new_dim += item is None or isinstance(item, slice)
    return _divided(logits.part[tuple(local)], tuple(cuts))


def _argmax(func: Callable[..., Any], input: ShardedLogits, dim: Any = None, keepdim: bool = False) -> Any:
    """Along one dimension: each rank's best, then the best of these. A plain tensor."""
    if not isinstance(dim, int):
        return NotImplemented
    dim %= input.dim()
    part = input.part.detach()
    best = part.argmax(dim, keepdim=True) if part.shape[dim] else None
    for cut in input.cuts:
        if cut.dim == dim:
            if not cut.plain:
                return NotImplemented
            best = _best_of_ranks(part, best, cut)
    if best is None:  # nothing to choose from
        return NotImplemented
    for cut in input.cuts:
        if cut.dim != dim:
            best = cut.join(best)
    return best if keepdim else best.squeeze(dim)


def _best_of_ranks(part: Tensor, best: Tensor | None, cut: DimShard) -> Tensor:
    shape = [1 if d == cut.dim else n for d, n in enumerate(part.shape)]
    value = part.new_full(shape, -torch.inf) if best is None else part.gather(cut.dim, best)
    index = torch.zeros(shape, dtype=torch.long, device=part.device) if best is None else best + cut.start
    values, indices = (cut.axis.all_gather(t, cut.dim) for t in (value, index))
    return indices.gather(cut.dim, values.argmax(cut.dim, keepdim=True))


def _cross_entropy(func: Callable[..., Any], input: Any, target: Any, weight: Any = None, **options: Any) -> Any:
    return cross_entropy(input, input.part, input.cuts, target, weight, Options(**options))


# --- which operation is which -----------------------------------------------------------------------------------------


def _named(names: str) -> list[Any]:
    """All spellings of functions: ``torch.f``, ``Tensor.f``."""
    found = (getattr(owner, name, None) for name in names.split() for owner in (torch, Tensor))
    return [func for func in found if callable(func)]


def _getters(names: str) -> list[Any]:
    """Attributes of tensors, as ``__torch_function__`` is told of them."""
    attributes: list[Any] = [getattr(Tensor, name) for name in names.split()]
    return [attribute.__get__ for attribute in attributes]


_ON_PARTS: dict[Any, Callable[..., Any]] = {
    functional.cross_entropy: _cross_entropy,
    Tensor.__getitem__: _index,
    **dict.fromkeys(
        _named("float double half bfloat16 to clone contiguous detach neg negative tanh sigmoid clamp pow"),
        _element_wise,
    ),
    **dict.fromkeys(
        _named("mul multiply div divide true_divide add sub subtract __radd__ __rsub__ __rmul__ __rtruediv__"),
        _element_wise,
    ),
    **dict.fromkeys(_named("view reshape flatten unflatten squeeze unsqueeze ravel"), _reshape),
    **dict.fromkeys(_named("transpose permute movedim moveaxis swapaxes swapdims t"), _permute),
    **dict.fromkeys(_getters("T mT"), _permute),
    **dict.fromkeys(_getters("data"), lambda _, logits: _divided(logits.part.detach(), logits.cuts)),
    **dict.fromkeys(_named("argmax"), _argmax),
}

_METADATA = {
    *_named("size dim ndimension numel nelement stride is_contiguous element_size get_device storage_offset"),
    *_named("is_floating_point is_complex is_signed is_inference is_conj is_neg is_pinned __len__ __hash__ __dir__"),
    *_getters(
        "shape dtype device requires_grad ndim layout is_leaf grad_fn grad retains_grad output_nr itemsize nbytes"
    ),
    *_getters("is_cpu is_cuda is_meta is_sparse is_sparse_csr is_quantized is_nested is_mps is_xpu is_mkldnn"),
}
