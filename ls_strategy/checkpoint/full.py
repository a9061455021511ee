"""Gather full state dicts from shards and load them back: the single-file checkpoint of torch and Lightning.

Weights are saved in master precision, so that a 16-bit run resumes exactly. A plain module casts them on load.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from ls_strategy._torch import persistent_buffer_names
from ls_strategy.checkpoint.reshard import StandIn
from ls_strategy.checkpoint.source import versions_of, with_versions
from ls_strategy.distributed.mesh import Mesh
from ls_strategy.errors import StateError
from ls_strategy.meta_init.lazy import parts_of
from ls_strategy.transient import Transient
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.parameters import unnoticed
from ls_strategy.zero.flat.released import ShowingReleased
from ls_strategy.zero.flat.units import Unit, places_of
from ls_strategy.zero.parts import full_of, part_of
from ls_strategy.zero.user_code.on_demand import OnDemandGather


def full_state_dict(
    raw: Mapping[str, Any],
    units: list[Unit],
    mesh: Mesh,
    *,
    all_ranks: bool = False,
    master: bool = True,
    others: Mapping[FlatBuffer, Tensor] | None = None,
) -> dict[str, Any]:
    """Return the module's state dict with full parameters, on the CPU. Collective.

    Args:
        raw: ``module.state_dict()``. Its keys are kept and its sharded tensors replaced.
        units: The units that hold the parameters.
        mesh: The device mesh.
        all_ranks: Fill it on every rank. By default rank 0 gets it, and the others get an empty dict.
        master: Use master precision instead of the dtype that the forward reads.
        others: Values to return instead of the master weights, in this rank's part of a buffer, such as an average.
    """
    wanted: dict[int, list[tuple[str, int]]] = {}
    result: dict[str, Any] = {}
    places = places_of(raw, units)
    for key, value in raw.items():
        place = places.get(key)
        if place is None:
            if not (isinstance(value, Tensor) and value.is_meta):  # else it is on another pipeline rank
                result[key] = value.detach().cpu() if isinstance(value, Tensor) else value
        else:
            result[key] = None
            wanted.setdefault(id(place[0]), []).append((key, place[1]))
    first = mesh.stage.rank == 0
    for unit in units:
        for flat in unit.flats:
            if id(flat) not in wanted:
                continue
            gathered = _gathered(flat, None if others is None else others.get(flat))
            copies: dict[int, Tensor] = {}
            # Also on the ranks that hold other parts of rank 0's values: `full_of` is collective.
            keep = all_ranks or mesh.zero.rank == 0 or flat.axis is mesh.expert
            for key, i in wanted.get(id(flat), []) if keep else []:
                if i not in copies:  # tied entries stay one tensor, as torch.save keeps them
                    slot = flat.layout.slots[i]
                    mine = gathered[slot.offset : slot.end].view(slot.shape)
                    full = full_of(mine, slot.part, flat.axis)
                    copies[i] = full.to("cpu", dtype=None if master else flat.full.dtype, copy=True)
                result[key] = copies[i]
    return with_versions(result, versions_of(raw)) if all_ranks or first else {}


def _gathered(flat: FlatBuffer, others: Tensor | None) -> Tensor:
    if others is None:
        return flat.full_master()
    return flat.gather_shards(others.dtype, others) if flat.policy.optimizer else others


def stand_ins(raw: Mapping[str, Any], units: list[Unit]) -> dict[str, Any]:
    """Return the module's state dict with parameters on meta, of full shapes: for hooks on ranks without the values."""
    found = {
        key: StandIn.of(flat.layout.slots[i].full_shape, flat.master_dtype)
        for key, (flat, i) in places_of(raw, units).items()
    }
    return with_versions({**raw, **found}, versions_of(raw))


def load_full_state_dict(
    model: nn.Module,
    state: Mapping[str, Any],
    units: list[Unit],
    *,
    strict: bool = True,
    may_lack: Collection[str] = (),
) -> None:
    """Load full tensors into the shards. Every rank passes the same state. Not collective.

    ``model.load_state_dict`` runs, with everything that a module may override or hook; what it copies into a parameter
    goes to the parameter's master weights.

    Args:
        model: The module.
        state: Full tensors by name. Of a `LazyTensor`, each rank reads only what it needs.
        units: The units that hold the parameters.
        strict: Refuse missing and unexpected keys.
        may_lack: Names that may be missing even with ``strict``.

    Raises:
        StateError: Missing or unexpected keys (with ``strict``), or a wrong shape. Nothing has been changed then,
            unless a module with loading code of its own has caused it.
    """
    places = {id(p): (flat, i) for unit in units for flat in unit.flats for i, p in enumerate(flat.params)}
    problems = _problems(model, state, places, strict=strict, may_lack=may_lack)
    if problems:
        raise _does_not_fit(model, "; ".join(problems))
    buffers = {name: buffer.device for name, buffer in model.named_buffers(remove_duplicate=False)}
    mode = _IntoShards(model, places, state)
    with _may_lack(model, may_lack), mode:
        try:
            model.load_state_dict(state, strict=strict)
        except RuntimeError as error:
            if mode.error is not None:
                raise mode.error from None
            if not str(error).startswith("Error(s) in loading state_dict"):
                raise
            raise _does_not_fit(model, str(error)) from error
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            device = buffers.get(f"{prefix}.{name}".removeprefix("."))
            if buffer is not None and device is not None and not buffer.is_meta and buffer.device != device:
                module._buffers[name] = buffer.to(device)  # the module has taken one of the checkpoint, on the CPU


def _does_not_fit(model: nn.Module, problems: str) -> StateError:
    return StateError(
        f"the checkpoint does not fit {type(model).__name__}: {problems}. Load it into the model it was saved from, or "
        "set strict_loading=False on the LightningModule for missing and unexpected keys."
    )


_LOADS = nn.Module._load_from_state_dict


def _problems(
    model: nn.Module,
    state: Mapping[str, Any],
    places: Mapping[int, tuple[FlatBuffer, int]],
    *,
    strict: bool,
    may_lack: Collection[str],
) -> list[str]:
    """Return what torch would find wrong, before anything is changed.

    Names of modules with loading code of their own, and of those inside them, are left to that code.
    """
    own = tuple(prefix for prefix, module in model.named_modules(remove_duplicate=False) if _loads_itself(module))
    if "" in own or type(model).load_state_dict is not nn.Module.load_state_dict:
        return []
    persistent = persistent_buffer_names(model)
    here: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    here |= {n: b for n, b in model.named_buffers(remove_duplicate=False) if n in persistent}
    inside = tuple(f"{prefix}." for prefix in own)
    missing = sorted(name for name in here.keys() - state.keys() - set(may_lack) if not name.startswith(inside))
    unexpected = sorted(
        name for name in state.keys() - here.keys() - _extra_names(model) if not name.startswith(inside)
    )
    by_kind = {"missing": missing, "unexpected": unexpected}
    problems = [f"{kind} keys: {', '.join(keys)}" for kind, keys in by_kind.items() if strict and keys]
    for name, tensor in here.items():
        flat, i = places.get(id(tensor), (None, 0))
        if name not in state or name.startswith(inside) or (flat is None and tensor.is_meta):
            continue
        shape = tuple(tensor.shape) if flat is None else flat.layout.slots[i].full_shape
        if isinstance(state[name], Tensor) and tuple(state[name].shape) != shape:
            problems.append(f"{name} has shape {tuple(state[name].shape)}, the model has {shape}")
    return problems


def _loads_itself(module: nn.Module) -> bool:
    """Return whether a module has code that may change what is loaded into it or into the modules inside it."""
    return type(module)._load_from_state_dict is not _LOADS or bool(module._load_state_dict_pre_hooks)


@contextmanager
def _may_lack(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Let ``model.load_state_dict(strict=True)`` accept that these names are missing, while the context is active."""

    def accept(_module: nn.Module, keys: Any) -> None:
        keys.missing_keys[:] = [key for key in keys.missing_keys if key not in names]

    handle = model.register_load_state_dict_post_hook(accept)
    try:
        yield
    finally:
        handle.remove()


class _IntoShards(TorchFunctionMode):
    """Makes ``parameter.copy_(values)`` write to the shards of an engine's parameters, none of which is gathered."""

    def __init__(
        self, model: nn.Module, places: Mapping[int, tuple[FlatBuffer, int]], state: Mapping[str, Any]
    ) -> None:
        super().__init__()
        tensors = [*model.parameters(), *model.buffers()]
        self._kept = tensors  # so that no other tensor gets one of their ids
        self._places = places
        elsewhere = {id(t) for t in tensors if id(t) not in places and t.is_meta}
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        loaded = {id(t): getattr(state.get(name), "shape", t.shape) for name, t in named}
        self._elsewhere = {key: torch.Size(loaded[key]) for key in elsewhere}
        """On another pipeline rank, which loads them and compares shapes: with tensor parallelism, this rank knows only
        those of parts."""
        self.error: Exception | None = None
        """What the first read or write has raised; torch makes one text of all of them."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = args[0] if args and isinstance(args[0], Tensor) else None
        place = self._places.get(id(target))
        if place is not None and target is not None:
            if func is _COPY:
                return self._write(target, *place, args[1])
            if func == _SHAPE:
                return torch.Size(place[0].layout.slots[place[1]].full_shape)
        elif id(target) in self._elsewhere:
            if func is _COPY:
                return target
            if func == _SHAPE:
                return self._elsewhere[id(target)]
            if func == _IS_META:
                return False
        return func(*args, **(kwargs or {}))

    def _write(self, target: Tensor, flat: FlatBuffer, i: int, value: Tensor) -> Tensor:
        try:
            shape = torch.Size(flat.layout.slots[i].full_shape)
            with torch.no_grad():
                _write(flat, i, value if value.shape == shape else value.expand(shape))
        except Exception as error:
            self.error = self.error or error
            raise
        return target


_TENSOR: Any = Tensor
_COPY, _SHAPE, _IS_META = _TENSOR.copy_, _TENSOR.shape.__get__, _TENSOR.is_meta.__get__
"""Getters are equal to what a mode gets, but not the same object: Python makes one at every access."""


def masters_from_state_dict(
    model: nn.Module, state: Mapping[str, Tensor], flats: Sequence[FlatBuffer], masters: list[Tensor]
) -> None:
    """Fill tensors shaped like the master shards of ``flats`` from full tensors. Not collective."""
    names = {id(p): n for n, p in model.named_parameters()}
    for flat, master in zip(flats, masters, strict=True):
        for param, piece, slot in zip(flat.params, flat.pieces, flat.layout.slots, strict=True):
            value = part_of(state[names[id(param)]], slot.part)
            for at, part in parts_of(value, piece.param_start, piece.param_start + piece.numel):
                start = piece.start + at - piece.param_start
                master[start : start + part.numel()].copy_(part)


def _write(flat: FlatBuffer, i: int, value: Tensor) -> None:
    piece, slot = flat.pieces[i], flat.layout.slots[i]
    value = part_of(value, slot.part)
    if flat.gathering is not None:
        flat.finish_gather()
    align = flat.layout.align  # a portion must not end inside a block of quantized weights
    for at, part in parts_of(value, piece.param_start, piece.param_start + piece.numel, align):
        flat.write_master(piece.start + at - piece.param_start, part)
    flat.require_refresh(flat.has_own_shard)
    flat.written([i])
    if flat.is_fetched:
        for at, part in parts_of(value, 0, slot.numel, align):
            flat.write_fetched(slot.offset + at, part)


def _extra_names(model: nn.Module) -> set[str]:
    return {f"{prefix}._extra_state".removeprefix(".") for prefix, _ in model.named_modules()}


def _nothing(*_: Any) -> None:
    """Do nothing: replaces a hook in a copy of the module."""


def _do_nothing() -> Any:
    return _nothing


class _Begin(Transient):
    """Pre-hook that runs before a module lists its parameters."""

    def __init__(self, hooks: StateDictHooks) -> None:
        self._hooks = hooks

    def __call__(self, _module: nn.Module, prefix: str, _keep_vars: bool) -> None:
        if not prefix:
            self._hooks.begin(sys._getframe(1))

    def __reduce__(self) -> tuple[Any, ...]:
        return (_do_nothing, ())


class StateDictHooks(Transient):
    """Stage 3: make ``state_dict()`` of any submodule return full tensors. Collective: call it on all ranks."""

    def __init__(self, model: nn.Module, units: list[Unit], mesh: Mesh) -> None:
        """Attach to every module, because users call ``state_dict()`` on any of them."""
        self._units = units
        self._mesh = mesh
        self._enabled = True
        self._handles = [m.register_state_dict_post_hook(self) for m in model.modules()]
        self._handles += [m.register_state_dict_pre_hook(_Begin(self)) for m in model.modules()]

    def __call__(self, _module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        """Replace the collected tensors once, at the outermost module of the call."""
        if prefix or not self._enabled:
            return
        on_demand = self._on_demand
        on_demand.collects(None)
        on_demand.take_parameter_writes()
        on_demand.take_copies_early()
        on_demand.state_dict_copies.drop()
        on_demand.begin_returned()
        places = places_of(state, self._units)
        full = full_state_dict(state, self._units, self._mesh, all_ranks=True, master=False)
        state.update(full)
        for values, place in {id(full[key]): (full[key], place) for key, place in places.items()}.values():
            on_demand.state_dict_copies.add(*place, values)

    def begin(self, frame: FrameType) -> None:
        """Record ``frame``, the call of ``state_dict()`` that lists parameters. It gathers their values at its end."""
        if self._enabled:
            self._on_demand.collects(frame)

    @property
    def _on_demand(self) -> OnDemandGather:
        return cast("OnDemandGather", next(flat.on_demand for unit in self._units for flat in unit.flats))

    @contextmanager
    def disabled(self) -> Any:
        """Make ``state_dict()`` return stand-ins for parameters, which are gathered only for hooks that use them."""
        self._enabled = False
        flats = [flat for unit in self._units for flat in unit.flats]
        places = {id(p): (flat, i) for flat in flats for i, p in enumerate(flat.params)}
        try:
            with unnoticed(), ShowingReleased(places):
                yield
        finally:
            self._enabled = True

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies of the module hold full parameters and need no hook."""
        return (_do_nothing, ())

    def remove(self) -> None:
        """Detach the hooks."""
        for handle in self._handles:
            handle.remove()
