"""The compiled kernels of routing: a library of their own, since only models with experts need it."""

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

_FILES = {
    "cpu.cpp": "routing_cpu.cpp",
    "schemas.cpp": "routing_schemas.cpp",
    "kernels.cpp": "routing_kernels.cpp",
    "update.cu": "routing.cu",
}


def available(device_type: str) -> bool:
    """Whether there are kernels for this kind of device. Builds them at the first call.

    Raises:
        ConfigError: there are none, and ``LS_STRATEGY_OPS=1`` requires them.
    """
    if device_type not in _paths:  # no lock once it is known
        with _lock:
            if device_type not in _paths:
                _paths[device_type] = _load(device_type)
    return _paths[device_type] is not None


def recipe(updates: _build.Recipe) -> _build.Recipe:
    """How to build the kernels of routing: with the commands of the updates, from the files of routing.

    Args:
        updates: `_build.cpu_recipe` or `_build.cuda_recipe`.
    """
    sources = [(unit, Path(unit.command[-1])) for unit in updates.units]
    units = [
        _build.Unit(unit.name, (*unit.command[:-1], str(source.with_name(_FILES[source.name]))))
        for unit, source in sources
        if source.name in _FILES
    ]
    return replace(updates, name=f"routing-{updates.name}", units=tuple(units))


def limit_isa(limit: int) -> int:
    """Use no better instruction set of the CPU than 0 portable, 1 AVX2, 2 AVX-512; returns the one in use. Tests."""
    path = _paths["cpu"] if available("cpu") else None
    if path is None:
        raise RuntimeError(f"no kernels of routing for the CPU: {_build.status()['cpu']}")
    return ctypes.CDLL(str(path)).ls_strategy_limit_routing_isa(limit)


def _load(device_type: str) -> Path | None:
    # The kernels of the updates say, once for both, whether kernels are wanted and whether there is a compiler.
    if not native.available(device_type) or (device_type != "cpu" and not available("cpu")):
        return None
    try:
        path = _build.library(recipe(_recipe_of_updates(device_type)))
        torch.ops.load_library(path)
    except (_build.BuildError, OSError, RuntimeError) as e:
        if os.environ.get("LS_STRATEGY_OPS") == "1":
            raise ConfigError(f"LS_STRATEGY_OPS=1, but routing has no kernel for {device_type}: {e}.") from e
        _log.warning("%s: the slower references of routing are used, no kernel: %s", device_type, e)
        return None
    return path


def _recipe_of_updates(device_type: str) -> _build.Recipe:
    if device_type == "cpu":
        return _build.cpu_recipe()
    devices = range(torch.cuda.device_count())
    return _build.cuda_recipe(tuple(sorted({torch.cuda.get_device_capability(d) for d in devices})))
