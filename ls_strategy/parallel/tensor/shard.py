"""Tensor parallelism: shard parameters in place, and add the collectives by hooks on their modules.

::

    x ──copy──► column (q, k, v) ──► attention, by heads ──► row (o) ──sum──► y
       backward: one sum for all     random numbers by rank   bias after the sum

Modules and parameters keep their names and identities. A block of attention and MLP costs two all-reduces of its
activations in forward and two in backward. Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from ls_strategy.blocks import is_conv1d
from ls_strategy.distributed.axis import Axis
from ls_strategy.errors import PlanError
from ls_strategy.layout import TensorPart
from ls_strategy.parallel.hooks import GradientSums, Hooks, NoPickle, Owned, change_first
from ls_strategy.parallel.logits import wrap_vocabulary
from ls_strategy.parallel.random import Streams, share_random_state
from ls_strategy.parallel.regions import (
    SharedCopy,
    copy_to,
    gather_from,
    reduce_from,
    scatter_sequence,
    scatter_to,
    sum_copies,
)
from ls_strategy.parallel.styles import Column, ExpertFeatures, Features, PartialGradient, Plan, Row, Vocab
from ls_strategy.parallel.tensor.alibi import slice_head_biases
from ls_strategy.parallel.tensor.resolved_plan import Resolved, StyledLayer, resolve
from ls_strategy.parallel.tensor.sequence import TokenBlocks, fork_streams, owners


def apply_tensor_parallel(
    model: nn.Module,
    plan: Plan,
    axis: Axis,
    *,
    sequence: bool = False,
    blocks: Sequence[nn.Module] = (),
    elsewhere: Collection[int] = (),
    trains: bool = True,
) -> TensorParallel:
    """Shard a model over the ranks of ``axis``, in place. Collective.

    Parameters keep their identity, and sharded ones get the local shape. Parameters and buffers with values get those
    of rank 0. For parameters on the meta device the caller fills in the part given by `TensorParallel.parts`.

    Args:
        model: unsharded, with the same structure on every rank.
        plan: see `ls_strategy.parallel.styles`.
        axis: the ranks. With a single rank everything is checked, and only attributes are set.
        sequence: shard activations between ``blocks`` along the tokens, dimension 1 of ``(B, T, D)``.
        blocks: with ``sequence``, the repeated blocks. Modules in them that mix tokens need column and row layers.
        elsewhere: ``id`` of parameters that another kind of parallelism shards (experts).
        trains: whether parameters are trained and saved; refuse what only inference supports.

    Raises:
        PlanError: The plan does not fit the model. Raised on all ranks, before anything is changed or sent.
    """
    resolved = resolve(model, plan, axis.size)
    if axis.size > 1:
        _check_use(resolved, trains, sequence)
    tokens = TokenBlocks(model, blocks, resolved, elsewhere) if sequence else None
    for module, name, value in resolved.attributes.values():
        setattr(module, name, value)
    return TensorParallel(model, resolved, axis, tokens)


class TensorParallel:
    """A sharded model: this rank's parts of its parameters, and the hooks that make it compute the full model."""

    def __init__(self, model: nn.Module, resolved: Resolved, axis: Axis, tokens: TokenBlocks | None) -> None:
        self.axis = axis
        self.parts: dict[int, TensorPart] = {}
        """What this rank holds of every sharded parameter, by the parameter's id."""

        self._lines = _describe(resolved, axis, tokens)
        self._hooks = Hooks()
        if axis.size == 1:
            return
        self._copy = SharedCopy(axis)
        self._streams = Streams(axis.rank)
        self._draws = _DropoutSources(model)
        self._tokens = tokens
        self._gradients = GradientSums(self._hooks)
        broadcast_values(model, axis)
        share_random_state(axis, torch.device("cpu"))
        device = next((p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")), None)
        if device is not None:
            share_random_state(axis, device)
        self._shard_parameters(resolved)
        for owned, style, _ in resolved.parameters:
            if isinstance(style, PartialGradient):
                self._gradients.add(owned, axis.all_reduce)
        for layer in resolved.layers:
            self._attach(layer)
        self._attach_parents(model, resolved)
        slice_head_biases(model, axis, self._hooks)
        if tokens is not None:
            for owned, block in tokens.partial:
                self._gradients.add(owned, axis.all_reduce, block)
            tokens.attach(model, axis, self._hooks, self._streams, self._draws)
        self._hooks.on_remove(model.register_forward_pre_hook(NoPickle()).remove)

    @property
    def partial(self) -> set[int]:
        """Return the ``id`` of parameters whose gradients are summed over the ranks, which use them on parts."""
        return set() if self.axis.size == 1 else self._gradients.parameters

    def describe(self) -> str:
        """Return a summary of what is sharded, in a few lines."""
        return "\n".join(self._lines)

    def remove(self) -> None:
        """Remove the hooks; parameters stay sharded. Idempotent."""
        self._hooks.remove()

    # parameters ------------------------------------------------------------------------------------------------------

    def _shard_parameters(self, resolved: Resolved) -> None:
        """Shard every parameter once, however many modules own it, and sum gradients of parts held by several ranks."""
        for owned, shard in resolved.shards():
            parameter = owned.parameter
            if id(parameter) not in self.parts:
                part = shard.part(parameter.shape, self.axis.rank, self.axis.size)
                parameter.data = _copy_part(parameter.data, part)
                self.parts[id(parameter)] = part
            if isinstance(shard.copies, int) and shard.copies > 1:
                self._gradients.add(owned, partial(sum_copies, axis=self.axis, copies=shard.copies))

    # layers ----------------------------------------------------------------------------------------------------------

    def _attach(self, layer: StyledLayer) -> None:
        match layer.style:
            case Column():
                self._attach_column(layer, layer.style)
            case Row():
                self._attach_row(layer, layer.style)
            case Vocab() if isinstance(layer.module, nn.Embedding):
                self._attach_embedding(layer.module)
            case Vocab():
                self._attach_head(layer.module)
            case Features():
                self._set_local(layer.module, "embedding_dim", "weight", 1)
                if layer.style.gather:
                    self._hooks.after(layer.module, lambda _m, _args, y: gather_from(y, self.axis))
            case ExpertFeatures():
                self._attach_experts(layer.module)
            case PartialGradient():
                self._attach_partial(layer)
            case _:
                pass

    def _shards_tokens(self, module: nn.Module) -> bool:
        return self._tokens is not None and self._tokens.holds(module)

    def _attach_column(self, layer: StyledLayer, style: Column) -> None:
        module = layer.module
        if is_conv1d(module):
            self._set_local(module, "nf", "weight", 1)
        else:
            self._set_local(module, "out_features", "weight", 0)
        if not self._shards_tokens(module):  # with sharded tokens, the gather at the owner sums in its backward
            self._copy_input(module)
        if style.gather:
            order = _SectionOrder(layer.shards["weight"].sections, self.axis)
            self._hooks.after(module, lambda _m, _args, y: order.restore(gather_from(y, self.axis)))
        else:
            self._hooks.after(module, self._enter_region)

    def _enter_region(self, module: nn.Module, _args: Any, output: Tensor) -> None:
        if module.training and self._draws():
            self._streams.open(output.device)

    def _copy_input(self, module: nn.Module) -> None:
        self._hooks.before(module, lambda _m, args, kwargs: change_first(args, kwargs, self._copy))

    def _attach_row(self, layer: StyledLayer, style: Row) -> None:
        axis, module = self.axis, layer.module
        order = _SectionOrder(layer.shards["weight"].sections, axis)
        shards_tokens = self._shards_tokens(module)
        if not is_conv1d(module):
            self._set_local(module, "in_features", "weight", 1)

        def before(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            self._copy.clear()
            if not style.split:
                if not shards_tokens:
                    change_first(args, kwargs, self._leave_region)
                return None
            return change_first(args, kwargs, lambda x: scatter_to(order.sort(x), axis))

        def after(module: nn.Module, _args: Any, y: Tensor) -> Tensor:
            y = scatter_sequence(y, axis) if shards_tokens else reduce_from(y, axis)
            return y if module.bias is None else y + module.bias.to(y.dtype)  # type: ignore[union-attr, operator]

        self._hooks.before(module, before)
        self._hooks.after(module, after)
        if module.bias is not None:
            module.forward = types.MethodType(_conv1d_product if is_conv1d(module) else linear_product, module)
            self._hooks.on_remove(lambda: vars(module).pop("forward", None))

    def _leave_region(self, x: Tensor) -> Tensor:
        self._streams.close(x.device)
        return x

    def _attach_embedding(self, module: nn.Embedding) -> None:
        """Look up this rank's tokens. Other tokens look up row 0, and their output is set to zero before the sum."""
        part = self.parts[id(module.weight)]
        (start, length), others = part.runs[0], list[Tensor]()
        module.num_embeddings = length
        if module.padding_idx is not None:
            local = module.padding_idx - start
            module.padding_idx = local if 0 <= local < length else None

        def before(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            def local_rows(tokens: Tensor) -> Tensor:
                others[:] = [(tokens < start) | (tokens >= start + length)]
                return (tokens - start).masked_fill(others[0], 0)

            return change_first(args, kwargs, local_rows)

        def after(_module: nn.Module, _args: Any, y: Tensor) -> Tensor:
            return reduce_from(y.masked_fill(others.pop().unsqueeze(-1), 0), self.axis)

        self._hooks.before(module, before)
        self._hooks.after(module, after)

    def _attach_head(self, module: nn.Module) -> None:
        part = self.parts[id(module.weight)]
        full, start = part.full_shape[0], part.runs[0][0]
        self._set_local(module, "out_features", "weight", 0)

        def after(_module: nn.Module, _args: Any, logits: Tensor) -> Tensor:
            self._copy.clear()
            return wrap_vocabulary(logits, self.axis, full, start)

        self._copy_input(module)
        self._hooks.after(module, after)

    def _attach_experts(self, module: nn.Module) -> None:
        """Pass tokens and router weights in full, and sum the partial outputs over the ranks."""
        axis = self.axis
        for name in ("intermediate_dim", "intermediate_size"):
            if isinstance(getattr(module, name, None), int):
                self._set_local(module, name, "down_proj", 2)

        def before(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            def enter(value: Any) -> Any:
                return copy_to(value, axis) if isinstance(value, Tensor) and value.is_floating_point() else value

            return tuple(map(enter, args)), {key: enter(value) for key, value in kwargs.items()}

        self._hooks.before(module, before)
        self._hooks.after(module, lambda _m, _args, y: reduce_from(y, axis))

    def _attach_partial(self, layer: StyledLayer) -> None:
        """Sum gradients of all parameters in the module, and make its dropout draw different numbers on every rank."""
        for name, module in layer.module.named_modules(prefix=layer.name):
            for key, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in self.parts:
                    self._gradients.add(Owned(f"{name}.{key}", module, key), self.axis.all_reduce)
        fork_streams(layer.module, self._hooks, self._streams, self._draws)

    def _set_local(self, module: nn.Module, attribute: str, key: str, dim: int) -> None:
        """Set an attribute to the local length of dimension ``dim`` of the parameter ``key``."""
        setattr(module, attribute, self.parts[id(getattr(module, key))].shape[dim])

    def _attach_parents(self, model: nn.Module, resolved: Resolved) -> None:
        """End a region of random numbers at the latest with the module that owns its column layer."""
        columns = {id(layer.module) for layer in resolved.layers if isinstance(layer.style, Column)}
        parents = {id(parent): parent for parent, child in owners(model) if id(child) in columns}

        def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
            self._streams.close_all()

        for parent in parents.values():
            if not self._shards_tokens(parent):
                self._hooks.after(parent, leave, always=True)


class _SectionOrder:
    """Conversion between features ordered by section, and features ordered by rank."""

    def __init__(self, sections: Sequence[int], axis: Axis) -> None:
        self._sections = sections
        self._size = axis.size

    def restore(self, x: Tensor) -> Tensor:
        """Reorder the last dimension from rank by rank to section by section."""
        if len(self._sections) == 1:
            return x
        parts = [p.split([s // self._size for s in self._sections], -1) for p in x.chunk(self._size, -1)]
        return torch.cat([part[i] for i in range(len(self._sections)) for part in parts], -1)

    def sort(self, x: Tensor) -> Tensor:
        """Invert `restore`."""
        if len(self._sections) == 1:
            return x
        sections = [s.chunk(self._size, -1) for s in x.split(list(self._sections), -1)]
        return torch.cat([section[r] for r in range(self._size) for section in sections], -1)


class _DropoutSources:
    """Sources of dropout in a model: its dropout modules, and float attributes with "drop" in their names.

    A call returns whether any of them drops now: the rates may change after this is built.
    """

    def __init__(self, model: nn.Module) -> None:
        found: dict[tuple[int, str], Any] = {}
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                found[id(module), "p"] = module
            for holder in (module, getattr(module, "config", None)):
                for name, value in vars(holder).items() if hasattr(holder, "__dict__") else ():
                    if "drop" in name and isinstance(value, float):
                        found[id(holder), name] = holder
        self._sources = [(holder, name) for (_, name), holder in found.items()]

    def __call__(self) -> bool:
        return any(getattr(holder, name, 0) > 0 for holder, name in self._sources)


# --- functions -------------------------------------------------------------------------------------------------------


def _check_use(resolved: Resolved, trains: bool, sequence: bool) -> None:
    """Refuse layers that cannot be sharded for training, or with sharded tokens."""
    for layer in resolved.layers:
        if trains and any(shard.sections_differ for shard in layer.shards.values()):
            raise PlanError(
                f"module {layer.name!r} ({type(layer.module).__name__}) computes the queries of all heads and a single "
                "key and value head, which all ranks need, by one matrix. Only inference (init_inference) can shard "
                "it. Train with parallel.tensor=1; stage 3 shards its weights."
            )
        if sequence and isinstance(layer.style, ExpertFeatures):
            raise PlanError(
                f"parallel.tensor.sequence_parallel=True: module {layer.name!r} ({type(layer.module).__name__}) "
                "shards every expert over ranks that would hold different tokens. Set "
                "parallel.tensor.sequence_parallel=False, or convert the experts (ls_strategy.moe.convert_moe)."
            )


def linear_product(module: nn.Module, input: Tensor) -> Tensor:
    """Run `nn.Linear` without its bias."""
    return functional.linear(input, module.weight)  # type: ignore[arg-type]


def _conv1d_product(module: nn.Module, x: Tensor) -> Tensor:
    """Run Conv1D of transformers without its bias."""
    return x @ module.weight  # type: ignore[operator]


def _copy_part(full: Tensor, part: TensorPart) -> Tensor:
    """Return a copy of the part, so that the full tensor can be freed."""
    if full.is_meta:
        return full.new_empty(part.shape)
    pieces = [full.narrow(part.dim, first, length) for first, length in part.runs]
    if len(pieces) == 1:
        return pieces[0].clone(memory_format=torch.contiguous_format)
    return torch.cat(pieces, part.dim)


@torch.no_grad()
def broadcast_values(model: nn.Module, axis: Axis) -> None:
    """Copy the parameters and buffers of rank 0 to all ranks of the axis. Collective.

    Tensors on meta have no values, and shards of DTensors differ: both are skipped. All ranks must have the same
    tensors in the same order.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_meta or isinstance(tensor, DTensor):
            continue
        wire = axis.comm.sendable(tensor.detach().resolve_conj().resolve_neg()).contiguous()
        axis.broadcast_(wire.reshape(-1).view(torch.uint8))  # the transport does not know all dtypes
        if wire.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(wire)


def _describe(resolved: Resolved, axis: Axis, tokens: TokenBlocks | None) -> list[str]:
    counts = Counter(type(layer.style).__name__ for layer in resolved.layers)
    counts.update(type(style).__name__ for _, style, _ in resolved.parameters)
    sizes: dict[int, tuple[int, int]] = {}
    for owned, shard in resolved.shards():
        shape = tuple(owned.parameter.shape)
        part = shard.part(shape, axis.rank, axis.size)
        full = owned.parameter.numel()
        sizes[id(owned.parameter)] = (full, full // shape[shard.dim] * part.shape[shard.dim])
    lines = [
        f"tensor parallelism over {axis.size} ranks: "
        + (", ".join(f"{n} {style}" for style, n in sorted(counts.items())) or "nothing sharded"),
        f"sharded parameters: {len(sizes)}, {sum(f for f, _ in sizes.values()):,} elements, of which this rank holds "
        f"{sum(p for _, p in sizes.values()):,}",
    ]
    if tokens is not None:
        lines.append(f"activations between {len(tokens.blocks)} blocks are sharded along the tokens")
    return lines
