"""What the core asks of side products, by name: imported when it is asked for, absent where the product is absent.

The core imports nothing of `ls_strategy.extras`. What it needs of one of them is named here, as aliases are named in
`ls_strategy.autoload`, and other packages may add to it with `offer`:

==========================  =====================================================================  ====================
name                        what                                                                   who asks
==========================  =====================================================================  ====================
``planner``                 a class like `ls_strategy.lightning.planning.Planner`                  ``stage="auto"``, and
                                                                                                   errors about memory
``deepspeed_config``        ``(strategy, arguments) -> arguments``: see                            ``ZeROStrategy``
                            `ls_strategy.lightning.deepspeed`
``checkpoint_reader``       ``(folder, weights_only=) -> checkpoint``, or None for a folder of     loads of folders
                            another kind; all that are offered are tried
``strategy_in_ray``         the strategy's class in train functions of Ray                         aliases
==========================  =====================================================================  ====================
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ls_strategy.errors import ConfigError

_OFFERED: dict[str, list[str]] = {
    "planner": ["ls_strategy.extras.planner.fit:FitPlanner"],
    "deepspeed_config": ["ls_strategy.extras.deepspeed.strategy:with_config"],
    "checkpoint_reader": ["ls_strategy.extras.deepspeed.checkpoint:read_if_deepspeed"],
    "strategy_in_ray": ["ls_strategy.extras.ray.strategy:RayZeROStrategy"],
}
"""``module:attribute`` of everything that is offered under a name, the first offer first."""


def offer(name: str, target: str) -> None:
    """Offer ``target``, a ``module:attribute``, under one of the names above. The last offer comes first.

    Raises:
        ConfigError: nobody asks for that name, or the target is not written so.
    """
    if name not in _OFFERED:
        raise ConfigError(f"Got {name!r}, but nothing is asked for under that name. Use {', '.join(sorted(_OFFERED))}.")
    module, colon, attribute = target.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"Got {target!r} for {name!r}. Write it as 'package.module:attribute'.")
    if target in _OFFERED[name]:
        _OFFERED[name].remove(target)
    _OFFERED[name].insert(0, target)


def find_all(name: str) -> list[Any]:
    """Return everything that is offered under ``name`` and installed."""
    found = (_load(target) for target in _OFFERED[name])
    return [each for each in found if each is not None]


def find(name: str) -> Any | None:
    """Return what is offered under ``name``; None if it is not installed."""
    return next((each for each in map(_load, _OFFERED[name]) if each is not None), None)


def require(name: str, asked: str) -> Any:
    """Return what is offered under ``name``.

    Args:
        name: one of the names above.
        asked: what the user gave that needs it, for the error.

    Raises:
        ConfigError: it is not installed.
    """
    found = find(name)
    if found is None:
        modules = ", ".join(target.partition(":")[0] for target in _OFFERED[name])
        raise ConfigError(f"Got {asked}, which needs {modules}, but that is not installed. Install all of ls_strategy.")
    return found


def _load(target: str) -> Any | None:
    """Import a target. None if its module or a package around it does not exist; other errors are the module's own."""
    module, _, attribute = target.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module != missing and not module.startswith(f"{missing}."):
            raise
        return None
