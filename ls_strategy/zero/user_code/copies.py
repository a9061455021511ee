"""Copies and pickles of modules whose parameters are in flat buffers: plain modules with memory of their own.

Invariant: what ``copy.deepcopy``, ``pickle`` and ``torch.save`` make of a module holds its full weights, does not need
this package, and takes no more memory than the module.

::

    module.__reduce_ex__     leaves out everything `Transient`: our hooks and replaced methods
    nn.Parameter             is pickled with its own elements, without the rest of the flat buffer

Shallow copies share hooks and parameters with the module, as in plain torch. So do processes that ``multiprocessing``
starts: they share the parameters' memory.
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

from ls_strategy._torch import StorageWeakRef, storage_key
from ls_strategy.errors import StateError
from ls_strategy.transient import Method, Transient
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.parameters import ResidentParameter, ShardedParameter, unnoticed

_FLAT_OF: weakref.WeakValueDictionary[int, FlatBuffer] = weakref.WeakValueDictionary()
"""``id(parameter)`` -> its flat buffer, which keeps the parameter alive."""

_BUFFERS: dict[int, StorageWeakRef] = {}
"""Memory of flat buffers, by `storage_key`: parameters stay views of it after the engine was freed."""

_HOOK_TABLES = frozenset(key for key, value in vars(nn.Module()).items() if "_hooks" in key and isinstance(value, dict))
"""Attributes in which a module stores its hooks and their options, by the same ids."""


class PlainCopies:
    """Makes copies of a model's modules plain modules, as long as it is attached."""

    def __init__(self, model: nn.Module, flats: Iterable[FlatBuffer]) -> None:
        """Attach to every module of ``model``, the parameters of which are in ``flats``."""
        for kind in (nn.Parameter, ResidentParameter, ShardedParameter):
            copyreg.pickle(kind, reduce_parameter)  # type: ignore[arg-type]
        for kind in (ResidentParameter, ShardedParameter):
            ForkingPickler.register(kind, _share_parameter)
        for key in [key for key, reference in _BUFFERS.items() if reference.expired()]:
            del _BUFFERS[key]
        for flat in flats:
            _FLAT_OF.update((id(param), flat) for param in flat.params)
            _BUFFERS[storage_key(flat.full)] = StorageWeakRef(flat.full.untyped_storage())
        self._methods = [Method(module, "__reduce_ex__", _reduce_module) for module in model.modules()]

    def remove(self) -> None:
        """Detach. Parameters that stay views of flat buffers are still pickled with their own elements only."""
        for method in self._methods:
            method.remove()
        self._methods.clear()


class NotHereError(StateError, TypeError):
    """Raised by a copy or a pickle of a module whose parameters are on other ranks.

    It is a ``TypeError``, as Python's own for objects that cannot be pickled: loggers leave such hyperparameters out.
    """


def _not_here(
    why: str = "sharded (stage 3)", cure: str = "Copy it inside gathered_parameters(), or take"
) -> NotHereError:
    """Return the error. ``why``: state of the parameters; ``cure``: beginning of the sentence with the cures."""
    return NotHereError(
        f"this module's parameters are {why}, so it cannot be pickled or copied. {cure} module.state_dict() on all "
        "ranks, or trainer.save_checkpoint(path), and load that into a new module."
    )


def require_here(params: Iterable[nn.Parameter], *, gathers: bool = False) -> None:
    """Wait for new weights in flight to parameters that are to be copied. Not collective.

    Args:
        params: parameters to be copied.
        gathers: whether the copy gathers them, on every rank. A pickle, often made on one rank alone, does not.

    Raises:
        NotHereError: a parameter is partitioned over ranks, or sharded and not gathered.
    """
    for param in params:
        flat = _FLAT_OF.get(id(param))
        index = next((i for i, p in enumerate(flat.params) if p is param), None) if flat is not None else None
        if flat is None or index is None:
            continue
        if flat.layout.slots[index].part is not None:
            raise _not_here("partitioned over ranks", "Take")
        if flat.gathering is not None and not flat.policy.parameters:
            flat.finish_gather()
        if flat.policy.parameters and not flat.is_gathered and not gathers:
            raise _not_here()


def _reduce_module(method: Method, protocol: Any) -> Any:
    module: nn.Module = method.owner
    reduced = type(module).__reduce_ex__(module, protocol)
    if isinstance(reduced, str) or len(reduced) < 3:
        return reduced
    shallow = _called_by(copy.copy, depth=3)
    if not shallow:
        deep = _called_by(copy.deepcopy, depth=3)  # it copies parameters one by one, and gathers them
        require_here(module.parameters(), gathers=deep)
    function, args, state, *rest = reduced
    return (function, args, _without_ours(state, hooks=not shallow), *rest)


def _called_by(function: Any, *, depth: int) -> bool:
    """Return whether ``function`` is the caller at ``depth``.

    The arguments cannot show it: ``copy`` passes the same ones as pickle.
    """
    return sys._getframe(depth).f_code is function.__code__


def _without_ours(state: Any, *, hooks: bool) -> Any:
    """Return a module's state without `Transient` attributes and, with ``hooks``, without our hooks."""
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
    """Share the memory of ``param`` with a process that ``multiprocessing`` starts, as torch does."""
    require_here([param])
    kind = type(param)
    param.__class__ = nn.Parameter
    try:
        return reduce_tensor(param)
    finally:
        param.__class__ = kind


def reduce_parameter(param: nn.Parameter) -> Any:
    """Reduce ``param`` as torch does; a view of a flat buffer is cloned first, to leave out the buffer."""
    if _called_by(copy.copy, depth=2):
        with unnoticed():
            return nn.Parameter.__reduce_ex__(param, 2)
    require_here([param])
    reduced = param.__reduce_ex__(2)
    if isinstance(param, ResidentParameter):
        return reduced
    if storage_key(param) not in _BUFFERS:
        return reduced
    function, (data, *rest), *more = reduced
    return (function, (data.clone(), *rest), *more)
