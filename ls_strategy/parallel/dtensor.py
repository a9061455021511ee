"""Modules that their user has divided by torch's own ``parallelize_module``: DTensors outside, plain shards inside.

What follows (flat buffers, ZeRO, checkpoints) works on plain tensors. So every DTensor parameter is replaced in its
module by a plain one that holds this rank's shard, and the module sees a DTensor only while its forward runs::

    module._parameters["weight"]     plain shard: what parameters(), state_dict() and optimizers see, always
    module.__dict__["weight"]        DTensor.from_local(plain shard): what `self.weight` finds during forward

The instance's ``__dict__`` is looked up first, so that neither the module's code nor its class changes, and autograd
goes through ``from_local`` to the plain parameter. A gradient that torch has as a sum still to be taken (of a norm
under ``SequenceParallel``) is summed there, so that replicated parameters get the same whole gradient on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils.hooks import RemovableHandle

from ls_strategy.distributed.axis import Axis
from ls_strategy.errors import PlanError, StateError
from ls_strategy.layout import TensorPart


@dataclass(frozen=True)
class _Global:
    """How a local tensor becomes the DTensor that it is a shard of."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, value: DTensor) -> _Global:
        """Read off a DTensor."""
        return cls(value.device_mesh, tuple(value.placements), tuple(value.shape), tuple(value.stride()))

    def wrap(self, local: Tensor) -> DTensor:
        """The DTensor around ``local``, which shares its memory; differentiable. Not collective."""
        # Shape and stride matter where shards differ in length; torch takes those of a scalar for none given.
        known: dict[str, Any] = {"shape": self.shape, "stride": self.stride} if self.shape else {}
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False, **known)


class _Forward:
    """The hooks of one module: DTensors in its ``__dict__`` from the start of its forward to the end.

    A deep copy of the module (a weight average's) gets hooks of its own, which work on the copy.
    """

    def __init__(self, seen: dict[str, _Global]) -> None:
        """``seen``: by name of the parameter or buffer."""
        self._seen = seen
        self._depth = 0

    def enter(self, module: nn.Module, _args: Any) -> None:
        """Before forward."""
        self._depth += 1
        if self._depth == 1:
            for name, how in self._seen.items():
                plain = module._parameters.get(name)
                plain = module._buffers.get(name) if plain is None else plain
                assert plain is not None
                module.__dict__[name] = how.wrap(plain)

    def leave(self, module: nn.Module, _args: Any, _output: Any) -> None:
        """After forward, also one that raised; what autograd needs it holds itself."""
        self._depth = max(self._depth - 1, 0)
        if not self._depth:
            for name in self._seen:
                module.__dict__.pop(name, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forward:
        return _Forward(self._seen)  # the device mesh holds process groups, which have no copies

    def __reduce__(self) -> Any:
        raise StateError(
            "this module's parameters are divided over the tensor-parallel ranks, so it cannot be pickled. Take "
            "trainer.save_checkpoint(path), and load that into a module that was built again."
        )


@dataclass
class Localized:
    """A model whose DTensor parameters have become plain shards."""

    parts: dict[int, TensorPart] = field(default_factory=dict)
    """``id(parameter)`` -> what of it is on this rank; replicated ones are not here."""

    _modules: list[tuple[nn.Module, dict[str, _Global]]] = field(default_factory=list)
    _handles: list[RemovableHandle] = field(default_factory=list)

    def remove(self) -> None:
        """Take the hooks off, and give the modules DTensor parameters again, with the values of now. Not collective."""
        for handle in self._handles:
            handle.remove()
        again: dict[int, nn.Parameter] = {}
        for module, seen in self._modules:
            for name, how in seen.items():
                plain = module._parameters.get(name)
                if plain is None:
                    buffer = module._buffers[name]
                    assert buffer is not None
                    module._buffers[name] = how.wrap(buffer)
                    continue
                if id(plain) not in again:
                    again[id(plain)] = nn.Parameter(how.wrap(plain.detach()), requires_grad=plain.requires_grad)
                module._parameters[name] = again[id(plain)]
        self._handles.clear()
        self._modules.clear()
        self.parts.clear()


def localize(model: nn.Module, axis: Axis) -> Localized:
    """Replace every DTensor parameter of ``model`` by a plain one, in place.

    A parameter that several modules share stays shared. A module that owns none is not touched. The shards must be
    used through their own module: a parameter that another module reaches for is seen as the plain shard.

    Call it after ``parallelize_module`` and before optimizers are made. Not collective.

    Args:
        model: some of it went through ``torch.distributed.tensor.parallel.parallelize_module``.
        axis: the tensor-parallel ranks; must be those of the DTensors' mesh.

    Raises:
        PlanError: a DTensor is laid out in a way that has no counterpart; nothing has been changed then.
    """
    found = list(_dtensors(model))
    for name, module, _, _ in found:
        if isinstance(module, nn.ParameterList | nn.ParameterDict):
            raise PlanError(
                f"parameter {name!r} is a DTensor in a {type(module).__name__}, which has no forward around which it "
                "could be shown as one. Make it an attribute of the module that uses it."
            )
    cuts = {id(value): _part_of(name, value, axis) for name, _, _, value in found}
    localized = Localized()
    plain: dict[int, nn.Parameter] = {}
    by_module: dict[int, tuple[nn.Module, dict[str, _Global]]] = {}
    for _, module, key, value in found:
        by_module.setdefault(id(module), (module, {}))[1][key] = _Global.of(value)
        if key in module._buffers:
            module._buffers[key] = value.to_local()
            continue
        if id(value) not in plain:
            plain[id(value)] = nn.Parameter(value.to_local().detach().contiguous(), requires_grad=value.requires_grad)
            part = cuts[id(value)]
            if part is not None:
                localized.parts[id(plain[id(value)])] = part
        module._parameters[key] = plain[id(value)]
    for module, seen in by_module.values():
        hooks = _Forward(seen)
        localized._modules.append((module, seen))
        localized._handles += [
            module.register_forward_pre_hook(hooks.enter),
            module.register_forward_hook(hooks.leave, always_call=True),
        ]
    return localized


def parallelize(model: nn.Module, styles: Mapping[str, ParallelStyle], mesh: DeviceMesh, axis: Axis) -> Localized:
    """Divide ``model`` by torch's ``parallelize_module``, and `localize` it. Collective over the axis.

    Args:
        model: whole, the same values on every rank.
        styles: by pattern of module names, as torch matches them.
        mesh: of one dimension, over the ranks of ``axis``.
        axis: the tensor-parallel ranks.

    Raises:
        PlanError: see `localize`.
    """
    parallelize_module(model, mesh, dict(styles))
    return localize(model, axis)


def has_dtensors(model: nn.Module) -> bool:
    """Whether any parameter or buffer of ``model`` is a DTensor."""
    return next(_dtensors(model), None) is not None


def _dtensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, DTensor]]:
    """Every place of a DTensor: its full name, the module, the name in it, and the DTensor; shared ones again."""
    for prefix, module in model.named_modules():
        for key, value in (*module._parameters.items(), *module._buffers.items()):
            if isinstance(value, DTensor):
                name = f"{prefix}.{key}" if prefix else key
                yield name, module, key, value


def _part_of(name: str, value: DTensor, axis: Axis) -> TensorPart | None:
    """What of the whole is here; None for all of it.

    Raises:
        PlanError: the layout has no counterpart.
    """
    where = f"parameter {name!r} is a DTensor with placements {tuple(value.placements)}"
    mesh = value.device_mesh
    if mesh.ndim != 1 or value.placements[0].is_partial():
        raise PlanError(
            f"{where} on a mesh of dimensions {mesh.mesh_dim_names or mesh.ndim}: only what "
            'parallelize_module(module, self.device_mesh["tensor_parallel"], plan) makes is supported, Shard(dim) and '
            "Replicate() along that one dimension. Leave fully_shard out: ZeROStrategy shards parameters along the "
            "data-parallel ranks itself."
        )
    ranks, ours = mesh.mesh.flatten().tolist(), _ranks(axis)
    if ranks != ours:
        raise PlanError(
            f"{where} over ranks {ranks} (mesh dimensions {mesh.mesh_dim_names}), but the tensor-parallel ranks are "
            f'{ours}. Parallelize with self.device_mesh["tensor_parallel"], the mesh that the strategy provides, and '
            "leave the data-parallel dimension to ZeROStrategy."
        )
    placement = value.placements[0]
    if placement.is_replicate():
        return None
    if type(placement) is not Shard:
        raise PlanError(
            f"{where}: only Shard(dim) and Replicate() are supported. Leave fully_shard out: ZeROStrategy shards "
            "parameters along the data-parallel ranks itself."
        )
    return _chunk(tuple(value.shape), placement.dim % value.ndim, axis)


def _chunk(shape: tuple[int, ...], dim: int, axis: Axis) -> TensorPart:
    """This rank's piece as ``torch.chunk`` cuts: the same length on all ranks but the last ones."""
    step = -(-shape[dim] // axis.size)
    first = min(axis.rank * step, shape[dim])
    return TensorPart(shape, dim, ((first, min(step, shape[dim] - first)),))


def _ranks(axis: Axis) -> list[int]:
    """The ranks of ``axis``, in the numbers of the default process group."""
    if axis.comm.group is not None:
        return dist.get_process_group_ranks(axis.comm.group)
    return [dist.get_rank() if dist.is_initialized() else 0]
