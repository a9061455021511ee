"""ZeRO in the train function of a Ray Train trainer; needs the extra ``ray``.

- `RayZeROStrategy`: `ls_strategy.ZeROStrategy` on the ranks that Ray has started.
- `RayReportCallback`: saves checkpoints where Ray keeps them, and reports them with the metrics.
- `latest_checkpoint`: what to resume from.
- `RayEnvironment`: ranks and world size, as Ray knows them; the strategy makes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ls_strategy.extras.ray.environment import RayEnvironment
    from ls_strategy.extras.ray.report import RayReportCallback
    from ls_strategy.extras.ray.storage import latest_checkpoint
    from ls_strategy.extras.ray.strategy import RayZeROStrategy

__all__ = ["RayEnvironment", "RayReportCallback", "RayZeROStrategy", "latest_checkpoint"]

_HOME = {
    "RayEnvironment": "environment",
    "RayReportCallback": "report",
    "RayZeROStrategy": "strategy",
    "latest_checkpoint": "storage",
}
"""The module of every public name."""


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
