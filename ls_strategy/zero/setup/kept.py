"""Select parameters and buffers that stay in fp32 while the rest of the model is rounded to 16 bits. No tensor is read.

Three sources: batch norms, ``precision.fp32_modules``, and the lists in which authors of transformers' models name what
must not be rounded, such as the bias by which a router of DeepSeek-V3 selects experts.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ls_strategy.blocks import outermost
from ls_strategy.errors import PlanError
from ls_strategy.moe.router import RoutingAccounts

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

_NOT_CALLED = (nn.ModuleList, nn.ModuleDict)
"""Modules without a forward: their children are called."""

_WRAPPERS = re.compile(r"(?:_orig_mod|base_layer|original_module|modules_to_save\.[^.]+)\.")
"""Parts of names that torch.compile and PEFT insert."""


@dataclass(frozen=True)
class KeptInFp32:
    """Parameters, buffers and modules that stay in fp32 in the 16-bit precisions."""

    params: frozenset[int] = frozenset()
    """``id`` of parameters."""

    buffers: frozenset[tuple[int, str]] = frozenset()
    """``id`` of the module and name in it: set-up replaces the tensors themselves."""

    bounded: tuple[nn.Module, ...] = ()
    """Modules whose inputs are cast to fp32, and whose outputs are cast back."""


def kept_in_fp32(model: nn.Module, names: Collection[str], dtype: torch.dtype) -> KeptInFp32:
    """Find what stays in fp32.

    Args:
        model: the full model, on any device.
        names: ``precision.fp32_modules``: classes of modules, and names of modules, parameters and buffers.
        dtype: of the rest of the model.

    Raises:
        PlanError: one of ``names`` matches nothing.
    """
    bounded = _named_modules(model, names)
    routers = [m for m in model.modules() if isinstance(m, RoutingAccounts)]  # their biases change in small steps
    full = {id(m) for named in bounded for m in named.modules()}
    full |= {id(m) for m in model.modules() if isinstance(m, _BATCH_NORMS)}
    single = {id(t) for pattern in names for name, t in _tensors(model) if _ends(name, pattern)}
    single |= named_by_authors(model, dtype)
    params = {
        id(p) for m in model.modules() for p in m.parameters(recurse=False) if id(m) in full or id(p) in single
    }  # fmt: skip
    whole = full | {id(m) for m in routers}
    buffers = {
        (id(m), key)
        for m in model.modules()
        for key, b in m._buffers.items()
        if b is not None and (id(m) in whole or id(b) in single)
    }
    return KeptInFp32(frozenset(params), frozenset(buffers), _called(bounded))


def _named_modules(model: nn.Module, names: Collection[str]) -> list[nn.Module]:
    """Return the outermost modules that are named.

    Raises:
        PlanError: a name matches no module, parameter or buffer.
    """
    modules = {_plain(name): m for name, m in model.named_modules() if name}
    classes = {type(m).__name__ for m in model.modules()}
    tensors = [name for name, _ in _tensors(model)]
    missing = [p for p in names if p not in classes and not any(_ends(n, p) for n in (*modules, *tensors))]
    if missing:
        raise PlanError(
            f"Got precision.fp32_modules={list(names)}, but the model has no module of class "
            f"{', '.join(missing)} among {', '.join(sorted(classes))}. Name some of these, or give names, or the ends "
            "of names, of modules, parameters or buffers, in which * matches anything, such as "
            f"{next(iter(tensors), 'gate.weight')!r}."
        )
    found = {id(m) for n, m in modules.items() if any(_ends(n, p) for p in names)}
    found |= {id(m) for m in model.modules() if type(m).__name__ in names}
    return [m for _, m in outermost(model, lambda m: id(m) in found)]


def _called(modules: list[nn.Module]) -> tuple[nn.Module, ...]:
    """Replace lists and dicts of modules by what they contain."""
    result: list[nn.Module] = []
    for module in modules:
        result.extend(_called(list(module.children())) if isinstance(module, _NOT_CALLED) else [module])
    return tuple(result)


def named_by_authors(model: nn.Module, dtype: torch.dtype) -> set[int]:
    """Return ``id`` of the tensors that transformers keeps in fp32 when it loads a model in ``dtype``.

    A pattern may match anywhere in a name, and ``*`` stands for any characters, as in transformers 5. The plain list is
    meant for fp16 only, the strict one for bf16 too. No module gets a boundary: the models cast by themselves.
    """
    lists = {
        torch.float16: ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
        torch.bfloat16: ("_keep_in_fp32_modules_strict",),
    }.get(dtype, ())
    kept: set[int] = set()
    for module in model.modules():
        found = [getattr(module, each, None) for each in lists]
        patterns = {p for names in found if isinstance(names, (list, tuple, set, frozenset)) for p in names}
        if patterns:
            regex = re.compile("|".join(f"(?:{p.replace('*', '.*')})" for p in sorted(patterns)))
            kept |= {id(t) for name, t in _tensors(module, tied=False) if regex.search(name)}
    return kept


def _tensors(module: nn.Module, *, tied: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers; tied ones under every name, or under the first."""
    for name, tensor in module.named_parameters(remove_duplicate=not tied):
        yield _plain(name), tensor
    for name, tensor in module.named_buffers(remove_duplicate=not tied):
        yield _plain(name), tensor


def _ends(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(f".{name}", f"*.{pattern}")


def _plain(name: str) -> str:
    return _WRAPPERS.sub("", f"{name}.").rstrip(".")
