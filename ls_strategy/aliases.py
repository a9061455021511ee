"""The aliases as classes for jsonargparse: ``zero3_offload`` is `ZeROStrategy` with the defaults of that name.

jsonargparse finds classes by name. With these, ``strategy: zero0`` in a file can be combined with
``--trainer.strategy.stage 3`` on the command line, and ``--help`` lists the names.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import wraps
from typing import Any

from ls_strategy.autoload import ALIASES
from ls_strategy.config import OffloadConfig, ZeROConfig
from ls_strategy.config.renamed import RENAMED, in_new_words, refuse_unknown
from ls_strategy.lightning.strategy import ZeROStrategy

_SIGNATURE = inspect.signature(ZeROStrategy.__init__)


def _make(name: str, defaults: Mapping[str, Any]) -> type[ZeROStrategy]:
    groups = {n: d for n, d in defaults.items() if n in ("stage", "offload")}
    preset = ZeROConfig.of(**{"stage": 3, **groups}).offload
    shown = {**defaults, "offload": preset} if "offload" in defaults else defaults

    @wraps(ZeROStrategy.__init__)
    def init(self: ZeROStrategy, *args: Any, **kwargs: Any) -> None:
        refuse_unknown(kwargs, [*_SIGNATURE.parameters])
        options = {**shown, **_SIGNATURE.bind(self, *args, **kwargs).arguments}
        del options["self"]
        if "offload" in defaults:
            options["offload"] = _completed(options["offload"], preset)
        ZeROStrategy.__init__(self, **options)

    parameters = [p.replace(default=shown.get(n, p.default)) for n, p in _SIGNATURE.parameters.items()]
    init.__signature__ = _SIGNATURE.replace(parameters=parameters)  # type: ignore[attr-defined]
    members = {"__init__": init, "__module__": __name__, "__qualname__": name, "__doc__": ZeROStrategy.__doc__}
    members["PRESET"] = frozenset(defaults)
    return type(name, (ZeROStrategy,), members)


def explain_old_names(parser: Any) -> None:
    """Make a parser class of jsonargparse give the new name when it refuses an option of version 0.1."""
    if parser is None or "error" in vars(parser):
        return  # jsonargparse is missing, or this was called before
    error = parser.error

    @wraps(error)
    def explained(self: Any, message: str, *args: Any, **kwargs: Any) -> Any:
        found = re.findall(r"(?:Option|Key|key) ['\"](?:[\w.]*\.)?(\w+)['\"]", str(message))
        old = {name: Ellipsis for name in found if name in RENAMED}
        if old and self.exit_on_error:  # not where the text becomes part of an outer parser's message
            message = f"{in_new_words(old)}\n{message}"
        return error(self, message, *args, **kwargs)

    parser.error = explained


def _completed(given: Any, preset: OffloadConfig) -> Any:
    """Return ``given`` with the alias's tiers where it sets none: ``zero3_nvme`` with a folder still offloads."""
    tiers = {kind: tier for kind in ("optimizer", "parameters") if (tier := preset.tier_of(kind)) is not None}
    if isinstance(given, OffloadConfig):
        return replace(given, **{kind: tier for kind, tier in tiers.items() if getattr(given, kind) is None})
    if not isinstance(given, Mapping):
        return given
    filled = {}
    for kind, tier in tiers.items():
        option = given.get(kind, tier)
        filled[kind] = {"tier": tier.tier, **option} if isinstance(option, Mapping) else option
    return {**given, **filled}


globals().update({name: _make(name, defaults) for name, defaults in ALIASES.items() if "strategy" not in name})
