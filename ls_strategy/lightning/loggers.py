"""``self.logger.experiment`` on ranks above 0, where Lightning has a dummy.

When rank 0 reads sharded parameters, or parameters in flight, all ranks fetch them together. So the dummy reads its
arguments as the experiment of rank 0 does, and discards them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ls_strategy._torch import tree_iter
from ls_strategy.lightning._private import replace_experiments
from ls_strategy.transient import Transient
from ls_strategy.zero.flat.parameters import ResidentParameter
from ls_strategy.zero.user_code.sharded_gradient import as_plain

_WATCHED: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()
"""Modules that rank 0 watches, and the handles of our hooks."""


def take_part() -> None:
    """Make the dummy read its arguments, from now on and for every Trainer of this process."""
    replace_experiments(_look)


def _look(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Read what ``experiment.name(*args, **kwargs)`` reads on rank 0."""
    if name == "watch":
        _watch(*args, **kwargs)
        return
    if name == "unwatch":
        _unwatch(*args, **kwargs)
        return
    for value in tree_iter((args, kwargs)):
        if isinstance(value, ResidentParameter):
            value.detach()
        elif isinstance(value, Tensor):
            as_plain(value)


def _watch(
    models: Any = None, criterion: Any = None, log: str | None = "gradients", log_freq: int = 1000, *_: Any, **__: Any
) -> None:
    """Imitate W&B's ``watch``, which reads parameters after every ``log_freq``-th forward, and gradients in hooks."""
    if log in ("parameters", "all"):
        for model in _each(models):
            _WATCHED.setdefault(model, []).append(model.register_forward_hook(_Reads(log_freq)))


def _unwatch(models: Any = None) -> None:
    for model in list(_WATCHED) if models is None else _each(models):
        for hook in _WATCHED.pop(model, []):
            hook.remove()


def _each(models: Any) -> list[nn.Module]:
    return [m for m in (models if isinstance(models, (tuple, list)) else [models]) if isinstance(m, nn.Module)]


class _Reads(Transient):
    """Reads a module's parameters after every ``log_freq``-th forward."""

    def __init__(self, log_freq: int) -> None:
        self._log_freq = log_freq
        self._calls = 0

    def __call__(self, module: nn.Module, *_: Any) -> None:
        self._calls += 1
        if self._calls >= self._log_freq:
            self._calls = 0
            for p in module.parameters():
                p.data  # noqa: B018
