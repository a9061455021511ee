"""Give meta tensors memory and values, one unit at a time."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ls_strategy._torch import drop_references, renew_references, tree_map
from ls_strategy.distributed.mesh import Mesh
from ls_strategy.errors import PlanError
from ls_strategy.layout import TensorPart
from ls_strategy.meta_init.deferred import (
    Deferred,
    deferred_of,
    fill_loose,
    forget_notes,
    has_lost_values,
    noted_in,
)
from ls_strategy.meta_init.lazy import LazyCast, LazyTensor, forget_source, source_of
from ls_strategy.precision import at_least_fp32
from ls_strategy.zero.parts import part_of


class Materializer:
    """Gives meta tensors memory and values. Parameters keep their identity, so that optimizers still hold them.

    What ``configure_model`` did to a tensor is done again, so a model starts with the same weights at every stage. A
    module with others runs ``reset_parameters()`` once; these modules are filled in the order of registration, as far
    as the next unit needs.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        parts: Mapping[int, TensorPart],
        mesh: Mesh,
        absent: Collection[int] = (),
    ) -> None:
        """Find the modules to fill, on ``device``.

        The full parameter is filled and then cut into ``parts``, so every element has the value it has without tensor
        and expert parallelism. The first rank's values are broadcast over the ranks with parts of a parameter, or with
        replicas along the tensor axis. Parameters of other pipeline stages are ``absent``. In a meta model they are
        filled in turn, so that all ranks draw the same random numbers, and freed at once.
        """
        self._absent = absent
        self._model = model
        self._device = device
        self._parts = parts
        self._mesh = mesh
        self._modules = [
            (name, module)
            for name, module in model.named_modules()
            if any(_is_unfilled(p) for p in module.parameters(recurse=False)) or any(_unknown_buffers(module))
        ]
        if not any(_is_unfilled(p) and id(p) not in absent for p in model.parameters()):
            # Also a module of which another stage holds some parameters has all that this rank needs.
            self._modules = [m for m in self._modules if any(_unknown_buffers(m[1])) and not self._is_absent(*m)]
        self._next = 0
        if any(p.is_meta for p in model.parameters()):
            drop_references(model)
        self._sums: dict[str, int] = {}
        """In a pipeline: checksums of the filled values, by parameter name."""

    def _is_absent(self, name: str, module: nn.Module) -> bool:
        """Return whether another pipeline stage holds all parameters of the module, or of the module around it."""
        params = list(module.parameters(recurse=False))
        while not params and name:
            name = name.rpartition(".")[0]
            params = list(self._model.get_submodule(name).parameters())
        return bool(params) and all(id(p) in self._absent for p in params)

    def provide(self, params: Sequence[nn.Parameter]) -> None:
        """Fill ``params``, except those whose values are in a file.

        Raises:
            PlanError: the values of a meta tensor are not known, and its module has no ``reset_parameters``.
        """
        for param in params:
            deferred = deferred_of(param)
            if deferred is not None:
                self._make(param, deferred)
        while any(map(_is_unfilled, params)) and self._next < len(self._modules):
            self._fill(*self._modules[self._next])
            self._next += 1

    def finish(self) -> None:
        """Fill what remains: buffers, and shared parameters. Collective.

        Raises:
            PlanError: the ranks of a pipeline have filled a parameter with different values.
        """
        while self._next < len(self._modules):
            self._fill(*self._modules[self._next])
            self._next += 1
        for name, module in self._model.named_modules():
            if self._absent:
                self._sums |= {f"{name}.{key}": value.fingerprint() for key, value in noted_in(module).items()}
            if self._is_absent(name, module):
                continue
            fill_loose(module, self._device)
            for key, deferred in _noted_buffers(module):
                buffer = module._buffers[key]
                assert buffer is not None
                module._buffers[key] = deferred.make(self._device).to(buffer.dtype)
        forget_notes(self._model)
        renew_references(self._model)
        if not self._absent:
            return
        sums = self._mesh.model.exchange_objects(self._sums)
        different = sorted(n for n in sums[0] if any(other.get(n, sums[0][n]) != sums[0][n] for other in sums))
        if different:
            raise PlanError(
                f"{', '.join(different[:3])}: configure_model or reset_parameters() gives them different values on the "
                "ranks of a pipeline, where every block keeps the values of its own rank. Let them depend only on "
                "torch's random numbers, or build the module in configure_model under `with torch.device('cpu'):`, "
                "which broadcasts rank 0's values."
            )

    def _full(self, param: nn.Parameter) -> nn.Parameter:
        """Return an uninitialized parameter of the full shape."""
        part = self._parts.get(id(param))
        shape = param.shape if part is None else part.full_shape
        return nn.Parameter(torch.empty(shape, dtype=param.dtype, device=self._device))

    def _make(self, param: nn.Parameter, deferred: Deferred) -> None:
        """Give a parameter the values that ``configure_model`` gave it."""
        part = self._parts.get(id(param))
        shape = tuple(param.shape) if part is None else part.full_shape
        if deferred.shape != shape:
            raise PlanError(
                f"a parameter had shape {deferred.shape} at the end of configure_model, and has shape {shape} now. "
                "Change shapes in configure_model, or build the module under `with torch.device('cpu'):`."
            )
        value = deferred.make(self._device).to(param.dtype)
        if part is None:
            self._mesh.tensor.broadcast_(value)
        else:
            _, axis = self._mesh.holders(part)
            axis.broadcast_(value)
            value = part_of(value, part).clone()
        _replace(param, nn.Parameter(value, requires_grad=param.requires_grad))

    def _fill(self, name: str, module: nn.Module) -> None:
        if not callable(getattr(module, "reset_parameters", None)):
            raise PlanError(
                f"module {name!r} ({type(module).__name__}) was built without memory (configure_model runs on the meta "
                "device at stage 3 and with model parallelism), nothing gave its parameters or buffers values, and it "
                "has no reset_parameters() to fill them. Give them values in its constructor, or build the module in "
                "configure_model under `with torch.device('cpu'):`."
            )
        # Absent, shared with a module that is already filled, with values that are known, or in a file: stays as it is.
        own = dict(module.named_parameters(recurse=False))
        kept = {k: p for k, p in own.items() if id(p) in self._absent or not _is_unfilled(p)}
        cut = {k: p for k, p in module.named_parameters(recurse=False) if k not in kept and id(p) in self._parts}
        noted = {k: module._buffers[k] for k, _ in _noted_buffers(module)}
        fresh: list[nn.Parameter] = []
        for key, p in module.named_parameters(recurse=False):
            if key in kept or key in cut:
                setattr(module, key, self._full(p))
            else:
                fresh.append(p)
                real = nn.Parameter(torch.empty_like(p, device=self._device), requires_grad=p.requires_grad)
                _replace(p, real)
        for key, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(module, key, torch.empty_like(buffer, device=self._device))
        with torch.no_grad():
            module.reset_parameters()  # type: ignore[operator]
        module._buffers.update(noted)
        if self._absent:
            self._sums |= {f"{name}.{k}": _checksum(p.detach()) for k, p in module.named_parameters(recurse=False)}
        for key, p in kept.items():
            setattr(module, key, p)
        for p in fresh:
            self._mesh.tensor.broadcast_(p.detach())
        for key, p in cut.items():
            full, part = getattr(module, key).detach(), self._parts[id(p)]
            _, axis = self._mesh.holders(part)
            axis.broadcast_(full)
            real = nn.Parameter(part_of(full, part).clone(), requires_grad=p.requires_grad)
            _replace(p, real)
            setattr(module, key, p)


def _is_unfilled(tensor: Tensor) -> bool:
    """Return whether a tensor is on meta and only its module itself can provide the values."""
    return tensor.is_meta and source_of(tensor) is None and deferred_of(tensor) is None


def _noted_buffers(module: nn.Module) -> Iterator[tuple[str, Deferred]]:
    """Yield the buffers on meta whose values are known."""
    for key, deferred in noted_in(module).items():
        buffer = module._buffers.get(key)
        if buffer is not None and buffer.is_meta:
            yield key, deferred


def _unknown_buffers(module: nn.Module) -> Iterator[str]:
    """Yield the buffers on meta that the module itself has to fill."""
    known = {key for key, _ in _noted_buffers(module)}
    return (key for key, b in module.named_buffers(recurse=False) if b.is_meta and key not in known)


def _replace(param: nn.Parameter, real: nn.Parameter) -> None:
    """Give a parameter memory. It keeps its identity and its attributes."""
    vars(real).update({k: v for k, v in vars(param).items() if v is not deferred_of(param)})
    torch.utils.swap_tensors(param, real)


def value_of(param: nn.Parameter, part: TensorPart | None, device: torch.device) -> Tensor:
    """Return the values of a parameter on this rank. If they are in a file, they are lazy.

    Such a parameter leaves meta for ``device``, still without memory for its values.

    Raises:
        PlanError: the parameter has another shape than what was loaded.
    """
    source = source_of(param)
    if source is None:
        return param.detach()
    shape = tuple(param.shape) if part is None else part.full_shape
    if tuple(source.shape) != shape:
        raise PlanError(
            f"a parameter was loaded from a file with shape {tuple(source.shape)}, and has shape {shape} now. Change "
            "shapes before the weights are loaded, or load them under `with torch.device('cpu'):`."
        )
    forget_source(param)
    empty = torch.empty((1,), dtype=param.dtype, device=device).expand(param.shape)
    real = nn.Parameter(empty, requires_grad=param.requires_grad)
    vars(real).update(vars(param))
    torch.utils.swap_tensors(param, real)
    value = part_of(source, part)
    assert isinstance(value, LazyTensor)
    return value if value.dtype == param.dtype else LazyCast(value, param.dtype)


def _checksum(values: Tensor) -> int:
    return zlib.crc32(values.reshape(-1).view(torch.uint8).cpu().numpy().data) if values.numel() else 0


def require_values(model: nn.Module, absent: Collection[int]) -> None:
    """Check that what ``configure_model`` did to meta tensors can be done again.

    Raises:
        PlanError: it cannot, for the parameter or buffer that is named.
    """
    for name, param in model.named_parameters():
        if has_lost_values(param):
            raise PlanError(
                f"parameter {name!r} was built without memory, and was changed after configure_model or "
                "trainer.init_module(), for example by module.half(), so its values are not known. Change it inside, "
                "and leave its dtype to the Trainer's precision."
            )
        deferred = None if id(param) in absent else deferred_of(param)
        problem = None if deferred is None else deferred.problem()
        if problem is not None:
            raise PlanError(f"parameter {name!r}: {problem}")
    for prefix, module in model.named_modules():
        for key, deferred in _noted_buffers(module):
            problem = deferred.problem()
            if problem is not None:
                raise PlanError(f"buffer {f'{prefix}.{key}' if prefix else key!r}: {problem}")


def place_buffers(
    model: nn.Module, device: torch.device, dtype: torch.dtype | None, kept: Collection[tuple[int, str]]
) -> None:
    """Move buffers to ``device``, and cast floating-point ones to ``dtype``; those in ``kept`` are at least fp32."""
    for module in model.modules():
        for key, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                continue  # in a block of another pipeline stage
            to = dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype
            if (id(module), key) in kept and buffer.is_floating_point():
                to = at_least_fp32(buffer.dtype)
            module._buffers[key] = buffer.to(device=device, dtype=to)  # one that is an nn.Parameter stays a buffer


def refused_buffer(model: nn.Module) -> PlanError | None:
    """Return why a buffer cannot be broadcast to other ranks; None if all can."""
    for name, buffer in model.named_buffers():
        if buffer.is_meta or type(buffer) not in (Tensor, nn.Parameter):
            continue
        kind = next((kind for kind, holds in _NOT_DENSE.items() if holds(buffer)), None)
        if kind is not None:
            return PlanError(
                f"Got the buffer {name!r}, which is {kind}, but rank 0's buffers are broadcast to all ranks, as under "
                "DDP, and each needs dense memory of its own. Register buffer.to_dense(), .dequantize() or .clone(), "
                "or the tensors that it is made of. Or let it be an attribute that is not registered."
            )
    return None


_NOT_DENSE: dict[str, Callable[[Tensor], bool]] = {
    "nested": lambda b: b.is_nested,
    "sparse": lambda b: b.layout != torch.strided,
    "quantized": lambda b: b.is_quantized,
    "expanded": lambda b: b.nbytes > b.untyped_storage().nbytes(),
}


class Fp32Boundary:
    """Casts the inputs of a module to fp32 and its outputs back, so that fp32 parameters get fp32 activations.

    Batch norms do not need this: torch runs them on 16-bit inputs with fp32 parameters.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Attach to ``module``; ``dtype`` is the dtype outside of it."""
        self.dtype = dtype
        self._handles = [
            module.register_forward_pre_hook(self._enter, with_kwargs=True),
            module.register_forward_hook(self._leave),
        ]

    def _enter(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(lambda t: _cast(t, self.dtype, torch.float32), (args, kwargs))

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        return tree_map(lambda t: _cast(t, torch.float32, self.dtype), output)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def _cast(value: Any, source: torch.dtype, target: torch.dtype) -> Any:
    return value.to(target) if isinstance(value, Tensor) and value.dtype == source else value
