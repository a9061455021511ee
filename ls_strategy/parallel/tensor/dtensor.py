"""Models that torch's ``parallelize_module`` has sharded: plain shards as parameters, DTensors inside forward.

Flat buffers, ZeRO and checkpoints work on plain tensors. So every DTensor parameter is replaced by a plain one that
holds this rank's shard, and the module sees a DTensor only while its forward runs::

    module._parameters["weight"]     plain shard: what parameters(), state_dict() and optimizers see at all times
    module.__dict__["weight"]        DTensor.from_local(plain shard): what `self.weight` returns during forward

Python looks up the instance's ``__dict__`` first, so neither the module's code nor its class changes, and autograd
goes through ``from_local`` to the plain parameter. There a ``Partial`` gradient (of a norm under ``SequenceParallel``)
is summed, so that replicated parameters get the same full gradient on every rank.
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
from ls_strategy.meta_init.deferred import recall


@dataclass(frozen=True)
class _Global:
    """The metadata that turns a local shard into its DTensor."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, value: DTensor) -> _Global:
        return cls(value.device_mesh, tuple(value.placements), tuple(value.shape), tuple(value.stride()))

    def wrap(self, local: Tensor) -> DTensor:
        """Return a DTensor that shares the memory of ``local``. Differentiable, not collective."""
        # Shards of different lengths need shape and stride. torch takes the empty shape of a scalar for a missing one.
        known: dict[str, Any] = {"shape": self.shape, "stride": self.stride} if self.shape else {}
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False, **known)


class _DTensorForward:
    """The hooks of one module: they put DTensors into its ``__dict__`` while its forward runs.

    A deep copy of the module (for weight averaging) gets its own hooks.
    """

    def __init__(self, metadata: dict[str, _Global]) -> None:
        self._metadata = metadata
        self._depth = 0

    def enter(self, module: nn.Module, _args: Any) -> None:
        """Insert the DTensors before forward."""
        self._depth += 1
        if self._depth == 1:
            for name, metadata in self._metadata.items():
                plain = module._parameters.get(name)
                plain = module._buffers.get(name) if plain is None else plain
                assert plain is not None
                module.__dict__[name] = metadata.wrap(plain)

    def leave(self, module: nn.Module, _args: Any, _output: Any) -> None:
        """Remove the DTensors after forward, even if it raised. Autograd holds those that backward needs."""
        self._depth = max(self._depth - 1, 0)
        if not self._depth:
            for name in self._metadata:
                module.__dict__.pop(name, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> _DTensorForward:
        return _DTensorForward(self._metadata)  # the device mesh holds process groups, which cannot be copied

    def __reduce__(self) -> Any:
        raise StateError(
            "this module's parameters are sharded over the tensor-parallel ranks, so it cannot be pickled. Save it "
            "with trainer.save_checkpoint(path), and load that into a newly built module."
        )


@dataclass
class Localized:
    """A model whose DTensor parameters have been replaced by plain shards."""

    parts: dict[int, TensorPart] = field(default_factory=dict)
    """``id(parameter)`` -> what this rank holds of it; without replicated parameters."""

    _modules: list[tuple[nn.Module, dict[str, _Global]]] = field(default_factory=list)
    _handles: list[RemovableHandle] = field(default_factory=list)

    def remove(self) -> None:
        """Remove the hooks, and make DTensors of the present values the parameters again. Not collective."""
        for handle in self._handles:
            handle.remove()
        restored: dict[int, nn.Parameter] = {}
        for module, by_name in self._modules:
            for name, metadata in by_name.items():
                plain = module._parameters.get(name)
                if plain is None:
                    buffer = module._buffers[name]
                    assert buffer is not None
                    module._buffers[name] = metadata.wrap(buffer)
                    continue
                if id(plain) not in restored:
                    restored[id(plain)] = nn.Parameter(metadata.wrap(plain.detach()), requires_grad=plain.requires_grad)
                module._parameters[name] = restored[id(plain)]
        self._handles.clear()
        self._modules.clear()
        self.parts.clear()


def localize(model: nn.Module, axis: Axis) -> Localized:
    """Replace every DTensor parameter of ``model`` by a plain one, in place. Not collective.

    Call it after ``parallelize_module`` and before optimizers are built. Shared parameters stay shared. A module that
    accesses a parameter of another module sees the plain shard. ``axis`` must have the ranks of the DTensors' mesh.

    Raises:
        PlanError: The layout of a DTensor is not supported. Nothing has been changed then.
    """
    found = list(_dtensors(model))
    for name, module, _, _ in found:
        if isinstance(module, nn.ParameterList | nn.ParameterDict):
            raise PlanError(
                f"parameter {name!r} is a DTensor in a {type(module).__name__}, which has no forward that could be "
                "hooked. Make it an attribute of the module that uses it."
            )
    parts = {id(value): _part_of(name, value, axis) for name, _, _, value in found}
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
            part = parts[id(value)]
            if part is not None:
                localized.parts[id(plain[id(value)])] = part
        module._parameters[key] = plain[id(value)]
        recall(module, key)
    for module, metadata in by_module.values():
        hooks = _DTensorForward(metadata)
        localized._modules.append((module, metadata))
        localized._handles += [
            module.register_forward_pre_hook(hooks.enter),
            module.register_forward_hook(hooks.leave, always_call=True),
        ]
    return localized


def parallelize(model: nn.Module, styles: Mapping[str, ParallelStyle], mesh: DeviceMesh, axis: Axis) -> Localized:
    """Shard ``model`` by torch's ``parallelize_module``, and `localize` it. Collective over the axis.

    ``model`` is unsharded, with the same values on every rank. ``mesh`` has one dimension, the ranks of ``axis``.

    Raises:
        PlanError: See `localize`.
    """
    parallelize_module(model, mesh, dict(styles))
    return localize(model, axis)


def has_dtensors(model: nn.Module) -> bool:
    """Return whether any parameter or buffer of ``model`` is a DTensor."""
    return next(_dtensors(model), None) is not None


def _dtensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, DTensor]]:
    """Yield ``(full name, module, name in the module, DTensor)``, shared DTensors once per owner."""
    for prefix, module in model.named_modules():
        for key, value in (*module._parameters.items(), *module._buffers.items()):
            if isinstance(value, DTensor):
                name = f"{prefix}.{key}" if prefix else key
                yield name, module, key, value


def _part_of(name: str, value: DTensor, axis: Axis) -> TensorPart | None:
    """Return what this rank holds; None for a replicated DTensor.

    Raises:
        PlanError: The layout is not supported.
    """
    where = f"parameter {name!r} is a DTensor with placements {tuple(value.placements)}"
    mesh = value.device_mesh
    if mesh.ndim != 1 or value.placements[0].is_partial():
        raise PlanError(
            f"{where} on a mesh of dimensions {mesh.mesh_dim_names or mesh.ndim}, but only the result of "
            'parallelize_module(module, self.device_mesh["tensor_parallel"], plan) is supported: Shard(dim) and '
            "Replicate() along that one dimension. Remove fully_shard: ZeROStrategy shards parameters over the "
            "data-parallel ranks itself."
        )
    ranks, ours = mesh.mesh.flatten().tolist(), _ranks(axis)
    if ranks != ours:
        raise PlanError(
            f"{where} over ranks {ranks} (mesh dimensions {mesh.mesh_dim_names}), but the tensor-parallel ranks are "
            f'{ours}. Parallelize over self.device_mesh["tensor_parallel"], the mesh that the strategy provides, and '
            "leave the data-parallel dimension to ZeROStrategy."
        )
    placement = value.placements[0]
    if placement.is_replicate():
        return None
    if type(placement) is not Shard:
        raise PlanError(
            f"{where}, but only Shard(dim) and Replicate() are supported. Remove fully_shard: ZeROStrategy shards "
            "parameters over the data-parallel ranks itself."
        )
    shape, dim = tuple(value.shape), placement.dim % value.ndim
    step = -(-shape[dim] // axis.size)  # as torch.chunk cuts: only the last ranks may hold less
    first = min(axis.rank * step, shape[dim])
    return TensorPart(shape, dim, ((first, min(step, shape[dim] - first)),))


def _ranks(axis: Axis) -> list[int]:
    if axis.comm.group is not None:
        return dist.get_process_group_ranks(axis.comm.group)
    return [dist.get_rank() if dist.is_initialized() else 0]
