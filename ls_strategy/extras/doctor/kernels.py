"""Report which operations of this package run in compiled kernels, and why others do not."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from ls_strategy.errors import ConfigError
from ls_strategy.extras.doctor.finding import Finding, one_line

ROUTING = ("topk_indices", "sort_by_expert", "permute", "combine", "pair_dots")
"""Operations of Mixture of Experts, which have a separate library."""

_INSTRUCTION_SETS = ("portable code", "AVX2", "AVX-512")


def kernels() -> Iterator[Finding]:
    """Report the path of every operation on every kind of device. Compiles missing kernels."""
    import torch

    from ls_strategy.ops import native
    from ls_strategy.ops.extra_library import routing_library

    yield cache()
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]  # CUDA only: others have no kernels
    updates = (*native.NAMES, "sum_of_squares")
    for device in devices:
        yield library(device, "updates", updates, native.available, native.limit_isa)
        yield library(device, "routing", ROUTING, routing_library.available, routing_library.limit_isa)


def cache() -> Finding:
    """Check the folder of compiled kernels."""
    from ls_strategy.ops import _build

    path = _build.cache_dir()
    chosen = os.environ.get("LS_STRATEGY_CACHE")
    if not os.access(path, os.W_OK | os.X_OK) or (chosen and path != Path(chosen)):
        return Finding(
            "cache",
            f"{chosen or path} is not writable: every process compiles its own kernels",
            "note",
            "Set LS_STRATEGY_CACHE to a writable folder on a file system that all nodes share.",
        )
    try:
        _build.check_trusted(path)
    except _build.BuildError as error:
        return Finding(
            "cache", str(error), "problem", "Set LS_STRATEGY_CACHE to a folder that only this user may write to."
        )
    found = [file for file in path.glob("*") if file.suffix in (".so", ".image")]
    return Finding("cache", f"{path}, {len(found)} libraries")


def library(
    device: str,
    name: str,
    operations: tuple[str, ...],
    available: Callable[[str], bool],
    limit_isa: Callable[[int], int],
) -> Finding:
    """Report the path that the operations of one library take on a device, ``cpu`` or ``cuda``.

    Args:
        device: The kind of device.
        name: Name of the library.
        operations: Its operations.
        available: Builds and loads it for a device; returns whether that succeeded.
        limit_isa: Returns the CPU instruction set in use, given the best that is allowed.
    """
    title = f"{name} on {device}"
    listed = " ".join(operations)
    try:
        with _warnings_of("ls_strategy.ops") as warnings:
            found = available(device)
    except ConfigError as error:
        cure = "Install the compiler, or unset LS_STRATEGY_OPS: the torch references give the same results."
        return Finding(title, f"{listed}: {one_line(str(error))}", "problem", cure)
    if found:
        code = f" with {_INSTRUCTION_SETS[limit_isa(len(_INSTRUCTION_SETS) - 1)]}" if device == "cpu" else ""
        return Finding(title, f"{listed}: kernels{code}")
    if os.environ.get("LS_STRATEGY_OPS") == "0":
        cure = "Unset LS_STRATEGY_OPS to use the kernels."
        return Finding(title, f"{listed}: torch references, because LS_STRATEGY_OPS=0", "note", cure)
    reason = one_line("; ".join(warnings)) or _known_reason(device)
    cure = (
        "See the compilers above; LS_STRATEGY_OPS=1 makes a missing kernel an error. Results are the same, but slower."
    )
    return Finding(title, f"{listed}: torch references. {reason}", "note", cure)


def _known_reason(device: str) -> str:
    from ls_strategy.ops import _build

    return _build.status().get(device, "There is no kernel for this kind of device.")


@contextmanager
def _warnings_of(logger_name: str) -> Generator[list[str], None, None]:
    """Collect a logger's warnings instead of printing them."""
    collected: list[str] = []
    logger = logging.getLogger(logger_name)

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            collected.append(record.getMessage())

    handler, propagates = Collect(logging.WARNING), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield collected
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
