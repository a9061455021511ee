"""Compiled kernels in separate libraries that not every model needs, built with the commands of the updates."""

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


class ExtraLibrary:
    """Kernels that are built at first use."""

    def __init__(self, name: str, files: dict[str, str], *, without: str) -> None:
        """Build nothing yet.

        Args:
            name: of the library.
            files: source file by the update's source file that it replaces.
            without: effect of missing kernels, for the log.
        """
        self._name = name
        self._files = files
        self._without = without
        self._lock = threading.RLock()
        self._paths: dict[str, Path | None] = {}

    def available(self, device_type: str) -> bool:
        """Return whether there are kernels for a device type. The first call builds them.

        Raises:
            ConfigError: there are none, but ``LS_STRATEGY_OPS=1`` requires them.
        """
        if device_type != "cpu" and "update.cu" not in self._files:
            return False
        if device_type not in self._paths:  # no lock once it is known
            with self._lock:
                if device_type not in self._paths:
                    self._paths[device_type] = self._load(device_type)
        return self._paths[device_type] is not None

    def recipe(self, updates: _build.BuildRecipe) -> _build.BuildRecipe:
        """Return the recipe: the commands of ``updates``, from `_build.recipe_for`, with this library's files."""
        sources = [(unit, Path(unit.command[-1])) for unit in updates.units]
        units = [
            _build.CompileUnit(unit.name, (*unit.command[:-1], str(source.with_name(self._files[source.name]))))
            for unit, source in sources
            if source.name in self._files
        ]
        return replace(updates, name=f"{self._name}-{updates.name}", units=tuple(units))

    def limit_isa(self, limit: int) -> int:
        """Limit the CPU's instruction set to 0 portable, 1 AVX2, 2 AVX-512; return the one in use. For tests."""
        path = self._paths["cpu"] if self.available("cpu") else None
        if path is None:
            raise RuntimeError(f"no {self._name} kernels for the CPU: {_build.status()['cpu']}")
        return getattr(ctypes.CDLL(str(path)), f"ls_strategy_limit_{self._name}_isa")(limit)

    def _load(self, device_type: str) -> Path | None:
        # Loading the update kernels checks LS_STRATEGY_OPS and the compiler.
        if not native.available(device_type) or (device_type != "cpu" and not self.available("cpu")):
            return None
        try:
            path = _build.library(self.recipe(_build.recipe_for(device_type)))
            torch.ops.load_library(path)
        except (_build.BuildError, OSError, RuntimeError) as e:
            if os.environ.get("LS_STRATEGY_OPS") == "1":
                raise ConfigError(
                    f"LS_STRATEGY_OPS=1, but there is no {self._name} kernel for {device_type}: {e}."
                ) from e
            _log.warning("%s: %s, no kernel: %s", device_type, self._without, e)
            return None
        return path


routing_library = ExtraLibrary(
    "routing",
    {
        "cpu.cpp": "routing_cpu.cpp",
        "schemas.cpp": "routing_schemas.cpp",
        "kernels.cpp": "routing_kernels.cpp",
        "update.cu": "routing.cu",
    },
    without="the slower references of routing are used",
)
"""For models with experts."""

linear_library = ExtraLibrary(
    "linear",
    {"cpu.cpp": "linear_cpu.cpp", "schemas.cpp": "linear_schemas.cpp", "kernels.cpp": "linear_kernels.cpp"},
    without="weights in 8 and 4 bits are dequantized at every use",
)
"""Products with packed weights, for quantized models on the CPU."""

quantized_library = ExtraLibrary(
    "quantized",
    {
        "cpu.cpp": "quantized_cpu.cpp",
        "schemas.cpp": "quantized_schemas.cpp",
        "kernels.cpp": "quantized_kernels.cpp",
        "update.cu": "quantized.cu",
    },
    without="weights and gradients in 4 and 8 bits are packed and unpacked by operations of torch",
)
"""For frozen weights that are stored quantized, and for messages in few bits."""
