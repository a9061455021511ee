"""How programs run on the device: in processes of their own, so that a fault of the device ends with its process.

A program is a function ``program(device, *args)``. It knows the device only by its argument, so the default selection
runs it too: on the simulated device or on the CPU, see `tests.simulated_device.test_gpu_programs`.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ls_strategy.testing import spawn

# Otherwise cuBLAS may sum in another order when several streams are busy, and nothing could be compared bit for bit.
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@dataclass(frozen=True)
class Raised:
    """What a program raised."""

    text: str


def run(
    function: Callable[..., Any],
    *args: Any,
    device: str = "cuda",
    timeout_s: float = 120,
    env: Mapping[str, str | None] | None = None,
) -> Any:
    """Call ``function(device, *args)`` in a process of its own and return the result."""
    environment = {**ENVIRONMENT, **(env or {})}
    return spawn(_call, 1, function, device, args, timeout_s=timeout_s, init_process_group=False, env=environment)[0]


def _call(rank: int, world_size: int, function: Callable[..., Any], device: str, args: Any) -> Any:
    where = torch.device("cpu") if device == "cpu" else torch.device(device, 0)
    torch.empty(1, device=where)  # its allocator can be asked from now on
    return function(where, *args)


def each(device: torch.device, programs: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Run programs one after the other in this process, since a start costs more than most of them.

    Args:
        device: for all of them.
        programs: the function and its other arguments, by name.

    Returns:
        the results by name; `Raised` where a program has raised an exception.
    """
    results: dict[str, Any] = {}
    for name, (function, *args) in programs.items():
        try:
            results[name] = function(device, *args)
        except Exception:
            results[name] = Raised(traceback.format_exc())
        gc.collect()
    return results


def result(results: Mapping[str, Any], name: str) -> Any:
    """Return one of the results of `each`.

    Raises:
        AssertionError: the program has raised an exception.
    """
    found = results[name]
    if isinstance(found, Raised):
        raise AssertionError(f"{name} raised\n{found.text}")
    return found
