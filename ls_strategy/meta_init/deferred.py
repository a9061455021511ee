"""The values of parameters, buffers and other tensors that ``configure_model`` made on meta."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ls_strategy._torch import tree_iter
from ls_strategy.distributed.axis import Axis
from ls_strategy.meta_init.lazy import OWNED, forget_owner, forget_source, give_source, source_of, source_of_memory
from ls_strategy.meta_init.program import (
    Captured,
    DeferredOperation,
    Memory,
    TensorPlace,
    is_plain,
    memory_of,
    needed,
    place_of,
    refusal,
    replay,
)


class Deferred:
    """The values of a parameter or buffer on meta."""

    def __init__(self, place: TensorPlace) -> None:
        """Note where it is: what is in that place at the end of the program counts."""
        self._place = place

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that it had."""
        return self._place.size

    def __deepcopy__(self, memo: dict[int, Any]) -> Deferred:
        return self

    def operations(self) -> list[DeferredOperation]:
        """Return what its values depend on, in order of the program."""
        return needed([self._place])

    def problem(self) -> str | None:
        """Return the message of the error that `make` would raise."""
        problems = (operation.problem() for operation in self.operations())
        found = next((why for why in problems if why is not None), None)
        return None if found is None else refusal(found)

    def make(self, device: torch.device) -> Tensor:
        """Make the values, on ``device``, in memory of their own.

        Raises:
            PlanError: a tensor in memory that they depend on has changed.
        """
        value = self._place.of(replay([self._place], device)[self._place.memory])
        value = value.to(device)
        return value.clone() if value.untyped_storage().nbytes() > value.numel() * value.itemsize else value

    def fingerprint(self) -> int:
        """Return a number that is the same on two ranks whose values are the same."""
        result = 0
        names: dict[Memory, int] = {}

        def simple(leaf: Any) -> Any:
            if isinstance(leaf, TensorPlace):
                return names.setdefault(leaf.memory, len(names)), leaf.size, leaf.stride, leaf.offset, str(leaf.dtype)
            if isinstance(leaf, Captured):
                return zlib.crc32(
                    leaf.value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                )
            return type(leaf).__name__ if isinstance(leaf, (torch.Generator, torch.device)) else leaf

        for operation in self.operations():
            text = repr((operation.name, [simple(leaf) for leaf in tree_iter((operation.args, operation.kwargs))]))
            result = zlib.crc32(text.encode(), result)
            if operation.state is not None:
                result = zlib.crc32(operation.state.numpy().data, result)
        return result


_DEFERRED = "_ls_strategy_deferred"
_NOTED = "_ls_strategy_deferred_values"
_LOOSE = "_ls_strategy_deferred_tensors"
_RECORDED = "_ls_strategy_recorded"


def note_deferred(model: nn.Module) -> None:
    """Note, at every parameter, buffer and other tensor of a model on meta, where its values come from.

    From then on the values are known even where the tensor is replaced by another one on meta.
    """
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return
    for owner in model.modules():
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            deferred = None if tensor is None else _note(tensor)
            if deferred is not None:
                forget_owner(owner, name)
                vars(owner).setdefault(_NOTED, {})[name] = deferred
        others = [value for name, value in vars(owner).items() if name not in _KNOWN]
        tensors = [x for x in tree_iter(others) if isinstance(x, Tensor) and not isinstance(x, nn.Parameter)]
        loose = [tensor for tensor in tensors if _note(tensor, of_files=True) is not None]
        if loose:
            vars(owner)[_LOOSE] = loose


def _note(tensor: Tensor, *, of_files: bool = False) -> Deferred | None:
    """Note at a tensor where its values come from; None if that is not recorded, or only that they are in a file."""
    if not tensor.is_meta or not is_plain(tensor):
        return None
    is_loaded = source_of_memory(tensor) is not None
    memory = memory_of(tensor)
    if (is_loaded and not of_files) or not (is_loaded or (memory is not None and memory.is_set)):
        return None
    forget_source(tensor)
    deferred = Deferred(place_of(tensor))
    setattr(tensor, _DEFERRED, deferred)
    return deferred


@contextmanager
def marking_recorded() -> Generator[None, None, None]:
    """Mark the parameters that modules get inside and whose values are recorded at the end, for `has_lost_values`."""
    built: list[nn.Parameter | None] = []

    def keep(_owner: nn.Module, _name: str, value: nn.Parameter) -> None:
        built.append(value)

    handle = register_module_parameter_registration_hook(keep)
    try:
        yield
    finally:
        handle.remove()
    for param in built:
        memory = memory_of(param) if param is not None and param.is_meta and is_plain(param) else None
        if memory is not None and memory.is_set:
            setattr(param, _RECORDED, True)


def has_lost_values(param: nn.Parameter) -> bool:
    """Return whether a parameter on meta was built with recorded values that are not known any more."""
    return _RECORDED in vars(param) and param.is_meta and deferred_of(param) is None and source_of(param) is None


def note_replaced(owner: nn.Module, name: str, value: nn.Parameter) -> None:
    """Note the values of a parameter on meta that ``value`` is about to replace, if it is a DTensor of the same shape.

    A hook for `torch.nn.modules.module.register_module_parameter_registration_hook`.
    """
    before = owner._parameters.get(name)
    is_shard = isinstance(value, Tensor) and value.is_meta and not is_plain(value)
    if before is not None and is_shard and before.shape == value.shape:
        deferred = _note(before)
        if deferred is not None:
            vars(owner).setdefault(_NOTED, {})[name] = deferred


def fill_loose(owner: nn.Module, device: torch.device) -> None:
    """Give tensors that a module holds in other attributes, also in lists and dicts, memory and values."""
    for tensor in vars(owner).pop(_LOOSE, []):
        deferred = deferred_of(tensor)
        if deferred is not None:  # else it is held in another place too
            torch.utils.swap_tensors(tensor, deferred.make(device).requires_grad_(tensor.requires_grad))


_KNOWN = frozenset({"_parameters", "_buffers", "_modules", _NOTED, _LOOSE, OWNED})


def deferred_of(tensor: Tensor) -> Deferred | None:
    """Return where the values of a parameter on meta come from, if `note_deferred` has noted it."""
    return vars(tensor).get(_DEFERRED) if tensor.is_meta else None


def noted_in(owner: nn.Module) -> Mapping[str, Deferred]:
    """Return what `note_deferred` has noted at a module, by name of the parameter or buffer."""
    return vars(owner).get(_NOTED, {})


def recall(owner: nn.Module, name: str) -> None:
    """Give a parameter on meta that has replaced another one, as this rank's shard of a DTensor has, its values."""
    param = owner._parameters.get(name)
    if param is None or not param.is_meta:
        return
    source, noted = vars(owner).get(OWNED, {}).get(name), noted_in(owner).get(name)
    if source is not None and source_of(param) is None:
        give_source(param, source)
    if noted is not None:
        setattr(param, _DEFERRED, noted)


def share_random_states(model: nn.Module, axis: Axis) -> None:
    """Let the ranks draw what rank 0 draws, where they have recorded the same program. Collective.

    Other programs are left alone: their values differ in more than random numbers.
    """
    noted = [deferred for module in model.modules() for deferred in noted_in(module).values()]
    found = {operation.number: operation for deferred in noted for operation in deferred.operations()}
    draws = [found[number] for number in sorted(found) if found[number].state is not None]
    lengths = [operation.state.numel() for operation in draws if operation.state is not None]
    states = torch.cat([operation.state for operation in draws if operation.state is not None] or [torch.empty(0)])
    shape = ([operation.name for operation in draws], lengths)
    theirs = axis.comm.exchange_objects((shape, zlib.crc32(states.numpy().data)))
    if any(other[0] != shape for other in theirs) or len({crc for _, crc in theirs}) == 1:
        return
    wire = axis.comm.sendable(states)
    axis.broadcast_(wire)
    for operation, state in zip(draws, wire.cpu().split(lengths), strict=True):
        operation.state = state.clone()


def forget_notes(model: nn.Module) -> None:
    """Undo `note_deferred` and `note_owner` in a model."""
    for module in model.modules():
        for notes in (OWNED, _NOTED, _LOOSE):
            vars(module).pop(notes, None)
