"""Give meta tensors memory and values, one unit at a time."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ls_strategy._compat import tree_map
from ls_strategy.distributed.mesh import Mesh
from ls_strategy.errors import PlanError
from ls_strategy.layout import TensorPart
from ls_strategy.zero.lazy import LazyCast, LazyTensor, constant_of, forget_owners, forget_source, source_of
from ls_strategy.zero.parts import part_of

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Materializer:
    """Fills meta tensors: runs ``reset_parameters()`` once on every module that owns some.

    Modules are filled in the order of registration, as far as the next unit needs. So random numbers are drawn in the
    order of the plain constructor, and a model starts with the same weights at every stage. Parameters keep their
    identity, so that existing optimizers still hold them.
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
            if any(_is_unfilled(t) for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
        ]
        if not any(_is_unfilled(p) and id(p) not in absent for p in model.parameters()):
            self._modules = [m for m in self._modules if not self._is_absent(*m)]
        self._next = 0
        self._sums: dict[str, int] = {}
        """In a pipeline: checksums of the filled values, by parameter name."""

    def _is_absent(self, name: str, module: nn.Module) -> bool:
        """Whether another pipeline stage holds all parameters of the module itself, or of the module around it."""
        params = list(module.parameters(recurse=False))
        while not params and name:
            name = name.rpartition(".")[0]
            params = list(self._model.get_submodule(name).parameters())
        return bool(params) and all(id(p) in self._absent for p in params)

    def provide(self, params: Sequence[nn.Parameter]) -> None:
        """Fill modules until none of ``params`` is on meta, except those whose values are in a file.

        Raises:
            PlanError: a module owns meta tensors and has no ``reset_parameters``.
        """
        while any(map(_is_unfilled, params)) and self._next < len(self._modules):
            self._fill(*self._modules[self._next])
            self._next += 1

    def finish(self) -> None:
        """Fill the remaining modules: those with only buffers, or with shared parameters. Collective.

        Raises:
            PlanError: the ranks of a pipeline have filled a parameter with different values.
        """
        while self._next < len(self._modules):
            self._fill(*self._modules[self._next])
            self._next += 1
        forget_owners(self._model)
        if not self._absent:
            return
        sums = self._mesh.model.exchange_objects(self._sums)
        different = sorted(n for n in sums[0] if any(other.get(n, sums[0][n]) != sums[0][n] for other in sums))
        if different:
            raise PlanError(
                f"{', '.join(different[:3])}: reset_parameters() fills them with different values on the ranks of a "
                "pipeline, where every block keeps the values of its own rank. Let it depend only on torch's random "
                "numbers, or build the module in configure_model under `with torch.device('cpu'):`, which broadcasts "
                "rank 0's values."
            )

    def _full(self, param: nn.Parameter) -> nn.Parameter:
        """Return an uninitialized parameter of the full shape."""
        part = self._parts.get(id(param))
        shape = param.shape if part is None else part.full_shape
        return nn.Parameter(torch.empty(shape, dtype=param.dtype, device=self._device))

    def _fill(self, name: str, module: nn.Module) -> None:
        if not callable(getattr(module, "reset_parameters", None)):
            raise PlanError(
                f"module {name!r} ({type(module).__name__}) was built without memory (configure_model runs on the meta "
                "device at stage 3 and in pipelines) and has no reset_parameters() to fill its parameters and buffers. "
                "Add that method, or build the module in configure_model under `with torch.device('cpu'):`."
            )
        # Absent, shared with a module that is already filled, created with values by the user, or to be read from a
        # file: stays as it is.
        own = dict(module.named_parameters(recurse=False))
        kept = {k: p for k, p in own.items() if id(p) in self._absent or not _is_unfilled(p)}
        cut = {k: p for k, p in module.named_parameters(recurse=False) if k not in kept and id(p) in self._parts}
        constants = {k: constant_of(p) for k, p in own.items() if k not in kept}
        fresh: list[nn.Parameter] = []
        for key, p in module.named_parameters(recurse=False):
            if key in kept or key in cut:
                setattr(module, key, self._full(p))
            else:
                fresh.append(p)
                real = nn.Parameter(torch.empty_like(p, device=self._device), requires_grad=p.requires_grad)
                torch.utils.swap_tensors(p, real)
        for key, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(module, key, torch.empty_like(buffer, device=self._device))
        _reset(module, constants)
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
            torch.utils.swap_tensors(p, real)
            setattr(module, key, p)


@torch.no_grad()
def _reset(module: nn.Module, constants: Mapping[str, float | None]) -> None:
    """Let the module fill its parameters. Some were set to a number since, as adapters that start as zero are."""
    module.reset_parameters()  # type: ignore[operator]
    for key, number in constants.items():
        if number is not None:
            getattr(module, key).fill_(number)


def _is_unfilled(tensor: Tensor) -> bool:
    """Whether nothing but the module itself can provide the values."""
    return tensor.is_meta and source_of(tensor) is None


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


def place_buffers(model: nn.Module, device: torch.device, dtype: torch.dtype | None, keep: set[int]) -> None:
    """Move buffers to ``device``, and cast floating-point ones to ``dtype``, except those of modules in ``keep``."""
    for module in model.modules():
        for key, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                continue  # in a block of another pipeline stage
            to = dtype if dtype is not None and buffer.is_floating_point() and id(module) not in keep else buffer.dtype
            setattr(module, key, buffer.to(device=device, dtype=to))


def fp32_modules(model: nn.Module, class_names: tuple[str, ...]) -> list[nn.Module]:
    """Return the modules that keep fp32 parameters in 16-bit precisions: batch norms, and the named classes.

    Raises:
        PlanError: a name matches no module.
    """
    names = {type(m).__name__ for m in model.modules()}
    missing = sorted(set(class_names) - names)
    if missing:
        raise PlanError(
            f"Got precision.fp32_modules={list(class_names)}, but the model has no module of class "
            f"{', '.join(missing)} among {', '.join(sorted(names))}. Name some of these."
        )
    return [m for m in model.modules() if isinstance(m, _BATCH_NORMS) or type(m).__name__ in class_names]


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
