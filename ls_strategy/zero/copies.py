"""Copies and pickles of modules whose parameters lie in flat buffers: plain modules, with memory of their own.

The one invariant: what ``copy.deepcopy``, ``pickle`` and ``torch.save`` make of a module holds its full weights, needs
nothing of this package, and takes the room that the module takes.

::

    module.__reduce_ex__     leaves out what is `Transient`: our hooks and the methods that we stand in for
    nn.Parameter             is pickled with its own elements, not with all of the flat buffer that it is a view of

Shallow copies share hooks and parameters with the module, as ever. Processes that ``multiprocessing`` starts share the
memory of parameters, as those of plain torch do.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ls_strategy.errors import StateError
from ls_strategy.zero.units import Flat

_FLAT_OF: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Parameter -> weak reference to the flat buffer that it is, or was last, a view of. Ends with the parameter."""


class Transient:
    """What this package hangs on modules, as a hook or an attribute, and their copies are to lack."""


class Method(Transient):
    """Stands in for a method on one object. A copy of the object has the method of its class."""

    def __init__(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        """Put it on ``owner``; ``call`` gets the owner, then the arguments."""
        self._owner = weakref.ref(owner)
        self._name = name
        self._call = call
        vars(owner)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the method does."""
        return self._call(self._owner(), *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Where a class copies its ``__dict__`` by itself."""
        owner = self._owner()
        return functools.partial, (getattr(type(owner), self._name), owner)

    def remove(self) -> None:
        """Take it off, unless somebody else has put something in its place."""
        owner = self._owner()
        if owner is not None and vars(owner).get(self._name) is self:
            del vars(owner)[self._name]


class PlainCopies:
    """Makes copies of a model's modules plain, for as long as it is attached."""

    def __init__(self, model: nn.Module, flats: Iterable[Flat]) -> None:
        """Attach to every module of ``model``, whose parameters are in ``flats``."""
        copyreg.pickle(nn.Parameter, _reduce_parameter)  # type: ignore[arg-type]
        for flat in flats:
            for param in flat.params:
                _FLAT_OF[param] = weakref.ref(flat)
        self._methods = [Method(module, "__reduce_ex__", _reduce_module) for module in model.modules()]

    def remove(self) -> None:
        """Detach. Parameters that stay views of flat buffers are pickled with their own elements all the same."""
        for method in self._methods:
            method.remove()
        self._methods.clear()


class ShardedError(StateError, TypeError):
    """A copy of a module without its parameters would be a copy of nothing.

    A ``TypeError``, as Python's own for what cannot be pickled: loggers leave such hyperparameters out.
    """


def refusal() -> ShardedError:
    """What a copy or a pickle raises whose parameters are elsewhere."""
    return ShardedError(
        "this module's parameters are sharded (stage 3), so it cannot be pickled or copied. Copy it inside "
        "strategy.gathered_parameters(), or take module.state_dict() on all ranks, or trainer.save_checkpoint(path), "
        "and load that into a new module."
    )


def is_released(param: nn.Parameter) -> bool:
    """Whether a parameter's values are not here, but in shards."""
    reference = _FLAT_OF.get(param)
    flat: Flat | None = None if reference is None else reference()
    return flat is not None and flat.policy.parameters and not flat.is_gathered


def _wait(param: nn.Parameter) -> None:
    """Let new weights that are on their way arrive."""
    reference = _FLAT_OF.get(param)
    flat: Flat | None = None if reference is None else reference()
    if flat is not None and flat.gathering is not None:
        flat.finish_gather()


def _reduce_module(module: nn.Module, protocol: Any) -> Any:
    reduced = type(module).__reduce_ex__(module, protocol)
    if isinstance(reduced, str) or len(reduced) < 3:
        return reduced
    shallow = _for_shallow_copy(depth=3)
    if not shallow:
        for param in module.parameters():
            _wait(param)
            if is_released(param):
                raise refusal()
    function, args, state, *rest = reduced
    return (function, args, _without_ours(state, hooks=not shallow), *rest)


def _for_shallow_copy(*, depth: int) -> bool:
    """Whether ``copy.copy`` has called: it gives the same arguments as ``copy.deepcopy``."""
    return sys._getframe(depth).f_code is copy.copy.__code__


def _without_ours(state: Any, *, hooks: bool) -> Any:
    """A module's state without what is `Transient`; with ``hooks``, without our hooks too."""
    if isinstance(state, tuple) and len(state) == 2:  # with slots
        return _without_ours(state[0], hooks=hooks), state[1]
    if not isinstance(state, dict):
        return state
    kept = {key: value for key, value in state.items() if not isinstance(value, Transient)}
    if hooks:
        tables = {key: value for key, value in kept.items() if "_hooks" in key and isinstance(value, dict)}
        ours = {i for table in tables.values() for i, hook in table.items() if isinstance(hook, Transient)}
        for key, table in tables.items():
            if not ours.isdisjoint(table):
                kept[key] = OrderedDict((i, hook) for i, hook in table.items() if i not in ours)
    return kept


def _reduce_parameter(param: nn.Parameter) -> Any:
    """As torch does, but for a view of a flat buffer, which would be pickled in full: with elements of its own."""
    reduced = param.__reduce_ex__(2)
    if param not in _FLAT_OF or _for_shallow_copy(depth=2):
        return reduced
    if is_released(param):
        raise refusal()
    _wait(param)
    function, (data, *rest), *more = reduced
    return (function, (data.clone(), *rest), *more)
