"""The strategy's aliases as classes: ``zero3_offload`` is `ZeROStrategy` with the defaults of that name.

For jsonargparse, which finds classes by name: ``strategy: zero0`` in one file takes ``--trainer.strategy.stage 3`` from
the command line, and ``--help`` lists the names.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import wraps
from typing import Any

from ls_strategy.autoload import ALIASES
from ls_strategy.lightning.strategy import ZeROStrategy

_SIGNATURE = inspect.signature(ZeROStrategy.__init__)


def _make(name: str, defaults: Mapping[str, object]) -> type[ZeROStrategy]:
    @wraps(ZeROStrategy.__init__)
    def init(self: ZeROStrategy, *args: Any, **kwargs: Any) -> None:
        given = _SIGNATURE.bind(self, *args, **kwargs).arguments
        options = {**defaults, **given}
        del options["self"]
        ZeROStrategy.__init__(self, **options)

    parameters = [p.replace(default=defaults.get(n, p.default)) for n, p in _SIGNATURE.parameters.items()]
    init.__signature__ = _SIGNATURE.replace(parameters=parameters)  # type: ignore[attr-defined]
    members = {"__init__": init, "__module__": __name__, "__qualname__": name, "__doc__": ZeROStrategy.__doc__}
    members["PRESET"] = frozenset(defaults)
    return type(name, (ZeROStrategy,), members)


globals().update({name: _make(name, defaults) for name, defaults in ALIASES.items() if "strategy" not in name})
