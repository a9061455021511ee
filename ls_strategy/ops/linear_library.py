"""The compiled products with packed weights: a library of their own, since only quantised models need it."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from dataclasses import replace
from pathlib import Path

import torch

from ls_strategy.errors import ConfigError
from ls_strategy.ops import _build, native

_log = logging.getLogger("ls_strategy.ops")
_lock = threading.RLock()
_paths: dict[str, Path | None] = {}

_FILES = {"cpu.cpp": "linear_cpu.cpp", "schemas.cpp": "linear_schemas.cpp", "kernels.cpp": "linear_kernels.cpp"}


def available(device_type: str) -> bool:
    """Whether there are kernels for this kind of device, which is the CPU alone. Builds them at the first call.

    Raises:
        ConfigError: there are none for the CPU, and ``LS_STRATEGY_OPS=1`` requires them.
    """
    if device_type != "cpu":
        return False
    if device_type not in _paths:  # no lock once it is known
        with _lock:
            if device_type not in _paths:
                _paths[device_type] = _load()
    return _paths[device_type] is not None


def recipe(updates: _build.Recipe) -> _build.Recipe:
    """How to build the products: with the commands of the updates (`_build.cpu_recipe`), from files of their own."""
    sources = [(unit, Path(unit.command[-1])) for unit in updates.units]
    units = [
        _build.Unit(unit.name, (*unit.command[:-1], str(source.with_name(_FILES[source.name]))))
        for unit, source in sources
    ]
    return replace(updates, name=f"linear-{updates.name}", units=tuple(units))


def limit_isa(limit: int) -> int:
    """Use no better instruction set of the CPU than 0 portable, 1 AVX2, 2 AVX-512; returns the one in use. Tests."""
    path = _paths["cpu"] if available("cpu") else None
    if path is None:
        raise RuntimeError(f"no products with packed weights for the CPU: {_build.status()['cpu']}")
    return ctypes.CDLL(str(path)).ls_strategy_limit_linear_isa(limit)


def _load() -> Path | None:
    # The kernels of the updates say, once for all, whether kernels are wanted and whether there is a compiler.
    if not native.available("cpu"):
        return None
    try:
        path = _build.library(recipe(_build.cpu_recipe()))
        torch.ops.load_library(path)
    except (_build.BuildError, OSError, RuntimeError) as e:
        if os.environ.get("LS_STRATEGY_OPS") == "1":
            raise ConfigError(f"LS_STRATEGY_OPS=1, but there is no product with packed weights: {e}.") from e
        _log.warning("cpu: weights in 8 and 4 bits are spelled out at every use, no kernel: %s", e)
        return None
    return path
