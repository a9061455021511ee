"""`RunFile`: what only the process knows of a run, in ``zero_run.jsonl`` next to its logs, for ``ls-strategy report``.

One line for every start and end of a fit, and every slow rank.
"""

from __future__ import annotations

import dataclasses
import platform
import socket
from importlib import metadata
from pathlib import Path
from typing import Any

from ls_strategy import device as dev
from ls_strategy.extras.run_file import RUN_FILE, append_line
from ls_strategy.host.pytorch import pl, rank_zero_warn
from ls_strategy.lightning.strategy import ZeROStrategy

_PACKAGES = ("ls_strategy", "torch", "lightning", "pytorch-lightning", "transformers")


class RunFile:
    """The file of one fit. Written by rank 0 only, and only where a logger has a folder for this run."""

    def __init__(self) -> None:
        self._path: Path | None = None

    def start(self, trainer: pl.Trainer, strategy: ZeROStrategy) -> None:
        """Note that a fit begins. Collective."""
        own_folder = any(getattr(logger, "log_dir", None) for logger in trainer.loggers)
        folder = str(trainer.log_dir or "") if own_folder else ""  # broadcast, so on all ranks
        self._path = None
        if not trainer.is_global_zero or not folder or "://" in folder:
            return
        self._path = Path(folder) / RUN_FILE
        self._write(
            "start",
            step=trainer.global_step,
            world_size=trainer.world_size,
            host=socket.gethostname(),
            device=_device(strategy),
            precision=str(trainer.precision),
            strategy=type(strategy).__name__,
            options=dataclasses.asdict(strategy.config),
            versions={"python": platform.python_version(), **_versions()},
        )

    def note(self, event: str, **fields: Any) -> None:
        """Note an event of the fit."""
        if self._path is not None:
            self._write(event, **fields)

    def end(self, trainer: pl.Trainer, error: BaseException | None = None) -> None:
        """Note that a fit ends. Idempotent."""
        if self._path is None:
            return
        what: dict[str, Any] = {"step": trainer.global_step}
        if error is None:
            self._write("end", **what)
        else:
            self._write("error", **what, type=type(error).__name__, message=str(error)[:2000])
        self._path = None

    def _write(self, event: str, **fields: Any) -> None:
        assert self._path is not None
        try:
            append_line(self._path, event, **fields)
        except OSError as error:
            rank_zero_warn(f"Monitor: {self._path} cannot be written, so a report will miss versions: {error}.")
            self._path = None


def _device(strategy: ZeROStrategy) -> str:
    return dev.name(strategy.root_device)


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
