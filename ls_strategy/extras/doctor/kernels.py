"""Report which operations of this package run in compiled kernels, and why others do not."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

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

    yield shipped()
    yield cache()
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]  # CUDA only: others have no kernels
    updates = (*native.NAMES, "sum_of_squares")
    for device in devices:
        yield library(device, "updates", updates, native)
        yield library(device, "routing", ROUTING, routing_library)


def shipped() -> Finding:
    """Check the libraries for CPUs that a platform wheel has."""
    from ls_strategy.ops import _build

    if not _build.SHIPPED.is_dir():
        return Finding("shipped", "none: from the pure wheel and from a checkout, kernels are compiled here")
    unfit = [_build.shipped_name(name) for name in _build.CPU_LIBRARIES if _build.shipped(name) is None]
    if unfit:
        return Finding(
            "shipped",
            f"{' '.join(unfit)} in {_build.SHIPPED}: missing or damaged, so compiled here",
            "note",
            "Reinstall the wheel: pip install --force-reinstall --no-deps",
        )
    return Finding("shipped", f"all {len(_build.CPU_LIBRARIES)} libraries for CPUs came with the wheel")


def cache() -> Finding:
    """Check the folder of compiled kernels."""
    from ls_strategy.ops import _build

    path = _build.cache_dir()
    chosen = os.environ.get("LS_STRATEGY_CACHE")
    if not os.access(path, os.W_OK | os.X_OK) or (chosen and path != Path(chosen)):
        return Finding(
            "cache",
            f"{chosen or path} is not writable: every process compiles for itself what the wheel has not shipped",
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


class Library(Protocol):
    """Kernels as `ls_strategy.ops.native` and `ls_strategy.ops.extra_library` have them."""

    def available(self, device_type: str, /) -> bool:
        """Load it for a device, after building it if necessary; return whether that succeeded."""
        ...

    def path(self) -> str:
        """Return the file of the kernels for CPUs."""
        ...

    def limit_isa(self, limit: int, /) -> int:
        """Return the CPU instruction set in use, given the best that is allowed."""
        ...


def library(device: str, name: str, operations: tuple[str, ...], kernels: Library) -> Finding:
    """Report the path that the operations of one library take on a device, ``cpu`` or ``cuda``.

    Args:
        device: The kind of device.
        name: Name of the library.
        operations: Its operations.
        kernels: The library.
    """
    title = f"{name} on {device}"
    listed = " ".join(operations)
    try:
        with _warnings_of("ls_strategy.ops") as warnings:
            found = kernels.available(device)
    except ConfigError as error:
        cure = "Install the compiler, or unset LS_STRATEGY_OPS: the torch references give the same results."
        return Finding(title, f"{listed}: {one_line(str(error))}", "problem", cure)
    if found:
        return Finding(title, f"{listed}: kernels{_code(kernels) if device == 'cpu' else ''}")
    if os.environ.get("LS_STRATEGY_OPS") == "0":
        cure = "Unset LS_STRATEGY_OPS to use the kernels."
        return Finding(title, f"{listed}: torch references, because LS_STRATEGY_OPS=0", "note", cure)
    reason = one_line("; ".join(warnings)) or _known_reason(device)
    cure = (
        "See the compilers above; LS_STRATEGY_OPS=1 makes a missing kernel an error. Results are the same, but slower."
    )
    return Finding(title, f"{listed}: torch references. {reason}", "note", cure)


def _code(kernels: Library) -> str:
    """Return for which instruction set and where kernels for CPUs were compiled."""
    from ls_strategy.ops import _build

    where = "came with the wheel" if Path(kernels.path()).parent == _build.SHIPPED else "compiled here"
    return f" with {_INSTRUCTION_SETS[kernels.limit_isa(len(_INSTRUCTION_SETS) - 1)]}, {where}"


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
