"""Copies and pickles of modules whose parameters lie in flat buffers: plain modules, with memory of their own.

The one invariant: what ``copy.deepcopy``, ``pickle`` and ``torch.save`` make of a module holds its full weights, needs
nothing of this package, and takes the room that the module takes.

::

    module.__reduce_ex__     leaves out what is `Transient`: our hooks, and what stands in for methods
    nn.Parameter             is pickled with its own elements, not with all of the flat buffer that it is a view of

Shallow copies share hooks and parameters with the module, as ever. Processes that ``multiprocessing`` starts share the
memory of parameters, as those of plain torch do.
"""

from __future__ import annotations

import copy
import copyreg
import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch import nn
from torch.multiprocessing.reductions import reduce_tensor

from ls_strategy._compat import StorageWeakRef, storage_key
from ls_strategy.errors import StateError
from ls_strategy.transient import Method, Transient
from ls_strategy.zero.parameters import Absent, Present, unnoticed
from ls_strategy.zero.units import Flat

_FLAT_OF: weakref.WeakValueDictionary[int, Flat] = weakref.WeakValueDictionary()
"""``id(parameter)`` -> its flat buffer, which holds the parameter for as long as it lives."""

_BUFFERS: dict[int, StorageWeakRef] = {}
"""Memory of flat buffers, by `storage_key`: parameters stay views of it when the engine has gone."""

_HOOK_TABLES = frozenset(key for key, value in vars(nn.Module()).items() if "_hooks" in key and isinstance(value, dict))
"""Attributes in which a module has its hooks, and what is to be known of each, by the same numbers."""


class PlainCopies:
    """Makes copies of a model's modules plain, for as long as it is attached."""

    def __init__(self, model: nn.Module, flats: Iterable[Flat]) -> None:
        """Attach to every module of ``model``, whose parameters are in ``flats``."""
        for kind in (nn.Parameter, Present, Absent):
            copyreg.pickle(kind, reduce_parameter)  # type: ignore[arg-type]
        for kind in (Present, Absent):
            ForkingPickler.register(kind, _share_parameter)
        for key in [key for key, reference in _BUFFERS.items() if reference.expired()]:
            del _BUFFERS[key]
        for flat in flats:
            _FLAT_OF.update((id(param), flat) for param in flat.params)
            _BUFFERS[storage_key(flat.full)] = StorageWeakRef(flat.full.untyped_storage())
        self._methods = [Method(module, "__reduce_ex__", _reduce_module) for module in model.modules()]

    def remove(self) -> None:
        """Detach. Parameters that stay views of flat buffers are pickled with their own elements all the same."""
        for method in self._methods:
            method.remove()
        self._methods.clear()


class NotHereError(StateError, TypeError):
    """What a copy or a pickle raises whose parameters are on other ranks: it would be a copy of nothing.

    A ``TypeError``, as Python's own for what cannot be pickled: loggers leave such hyperparameters out.
    """


def not_here(
    why: str = "sharded (stage 3)", cure: str = "Copy it inside gathered_parameters(), or take"
) -> NotHereError:
    """The error. ``why``: what the parameters are; ``cure``: how the cures begin."""
    return NotHereError(
        f"this module's parameters are {why}, so it cannot be pickled or copied. {cure} module.state_dict() on all "
        "ranks, or trainer.save_checkpoint(path), and load that into a new module."
    )


def require_here(params: Iterable[nn.Parameter], *, gathers: bool = False) -> None:
    """Let new weights that are on their way to parameters arrive. Not collective.

    Args:
        params: to be copied.
        gathers: whoever copies them will touch them, on every rank. A pickle is often made on one rank alone.

    Raises:
        NotHereError: one is in parts, or in shards that are not gathered.
    """
    for param in params:
        flat = _FLAT_OF.get(id(param))
        index = next((i for i, p in enumerate(flat.params) if p is param), None) if flat is not None else None
        if flat is None or index is None:
            continue
        if flat.layout.slots[index].part is not None:
            raise not_here("divided over ranks", "Take")
        if flat.gathering is not None and not flat.policy.parameters:
            flat.finish_gather()
        if flat.policy.parameters and not flat.is_gathered and not gathers:
            raise not_here()


def _reduce_module(method: Method, protocol: Any) -> Any:
    module: nn.Module = method.owner
    reduced = type(module).__reduce_ex__(module, protocol)
    if isinstance(reduced, str) or len(reduced) < 3:
        return reduced
    shallow = _called_by(copy.copy, depth=3)
    if not shallow:
        deep = _called_by(copy.deepcopy, depth=3)  # which copies parameters one by one, and gathers for that
        require_here(module.parameters(), gathers=deep)
    function, args, state, *rest = reduced
    return (function, args, _without_ours(state, hooks=not shallow), *rest)


def _called_by(function: Any, *, depth: int) -> bool:
    """Whether ``copy.copy`` or ``copy.deepcopy`` has called: both give the arguments that pickle gives."""
    return sys._getframe(depth).f_code is function.__code__


def _without_ours(state: Any, *, hooks: bool) -> Any:
    """A module's state without what is `Transient`; with ``hooks``, without our hooks too."""
    if isinstance(state, tuple) and len(state) == 2:  # with slots
        return _without_ours(state[0], hooks=hooks), state[1]
    if not isinstance(state, dict):
        return state
    plain = {key: value.plain() if isinstance(value, Transient) else value for key, value in state.items()}
    kept = {key: value for key, value in plain.items() if value is state[key] or value is not None}
    if hooks:
        tables = {key: kept[key] for key in _HOOK_TABLES & kept.keys()}
        ours = {i for table in tables.values() for i, hook in table.items() if isinstance(hook, Transient)}
        for key, table in tables.items():
            if not ours.isdisjoint(table):
                kept[key] = OrderedDict((i, hook) for i, hook in table.items() if i not in ours)
    return kept


def _share_parameter(param: nn.Parameter) -> Any:
    """For a process that ``multiprocessing`` starts: the same memory, as of any parameter."""
    require_here([param])
    kind = type(param)
    param.__class__ = nn.Parameter
    try:
        return reduce_tensor(param)
    finally:
        param.__class__ = kind


def reduce_parameter(param: nn.Parameter) -> Any:
    """As torch does, but for a view of a flat buffer, which would be pickled in full: with elements of its own."""
    if _called_by(copy.copy, depth=2):
        with unnoticed():
            return nn.Parameter.__reduce_ex__(param, 2)
    require_here([param])
    reduced = param.__reduce_ex__(2)
    if isinstance(param, Present):
        return reduced
    if storage_key(param) not in _BUFFERS:
        return reduced
    function, (data, *rest), *more = reduced
    return (function, (data.clone(), *rest), *more)
