"""Compiled kernels in separate libraries that not every model needs."""

from __future__ import annotations

import ctypes
import logging
import os
import threading

from ls_strategy.errors import ConfigError
from ls_strategy.ops import _build, native
from ls_strategy.ops.cuda import quantized, routing
from ls_strategy.ops.cuda.program import Operations

_log = logging.getLogger("ls_strategy.ops")


class ExtraLibrary:
    """Kernels that are loaded at first use, and built if the wheel has not shipped them."""

    def __init__(self, name: str, *, on_cuda: Operations | None, without: str) -> None:
        """Build nothing yet.

        Args:
            name: of the library, with which its source files begin.
            on_cuda: its kernels for GPUs, if there are any.
            without: effect of missing kernels, for the log.
        """
        self._name = name
        self._on_cuda = on_cuda
        self._without = without
        self._lock = threading.RLock()
        self._loaded: dict[str, str | None] = {}

    def available(self, device_type: str) -> bool:
        """Return whether there are kernels for a device type. The first call builds them.

        Raises:
            ConfigError: there are none, but ``LS_STRATEGY_OPS=1`` requires them.
        """
        if device_type != "cpu" and self._on_cuda is None:
            return False
        if device_type not in self._loaded:  # no lock once it is known
            with self._lock:
                if device_type not in self._loaded:
                    self._loaded[device_type] = self._load(device_type)
        return self._loaded[device_type] is not None

    def path(self) -> str:
        """Return the library for CPUs, built or shipped with the wheel."""
        path = self._loaded["cpu"] if self.available("cpu") else None
        if path is None:
            raise RuntimeError(f"no {self._name} kernels for the CPU: {_build.status()['cpu']}")
        return path

    def limit_isa(self, limit: int) -> int:
        """Limit the CPU's instruction set to 0 portable, 1 AVX2, 2 AVX-512; return the one in use. For tests."""
        return getattr(ctypes.CDLL(self.path()), f"ls_strategy_limit_{self._name}_isa")(limit)

    def _load(self, device_type: str) -> str | None:
        """Return the library, or the architectures of the kernels; None without any."""
        if not native.available(device_type):  # which checks LS_STRATEGY_OPS and the compiler
            return None
        try:
            if device_type == "cpu":
                return str(_build.load_library(self._name))
            assert self._on_cuda is not None
            return self._on_cuda.load()
        except _build.BuildError as e:
            if os.environ.get("LS_STRATEGY_OPS") == "1":
                raise ConfigError(
                    f"LS_STRATEGY_OPS=1, but there is no {self._name} kernel for {device_type}: {e}."
                ) from e
            _log.warning("%s: %s, no kernel: %s", device_type, self._without, e)
            return None


routing_library = ExtraLibrary(
    "routing", on_cuda=routing.OPERATIONS, without="the slower references of routing are used"
)
"""For models with experts."""

linear_library = ExtraLibrary("linear", on_cuda=None, without="weights in 8 and 4 bits are dequantized at every use")
"""Products with packed weights, for quantized models on the CPU."""

quantized_library = ExtraLibrary(
    "quantized",
    on_cuda=quantized.OPERATIONS,
    without="weights and gradients in 4 and 8 bits are packed and unpacked by operations of torch",
)
"""For frozen weights that are stored quantized, and for messages in few bits."""
