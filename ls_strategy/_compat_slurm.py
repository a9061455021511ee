"""Private API of Lightning that preemption needs: its signal handlers, its per-step collective, its resume path."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint


def take_signals_over(trainer: pl.Trainer, restore: Callable[[], None]) -> None:
    """Keep Lightning from registering handlers of its own, and call ``restore`` where it would restore the old ones.

    Its SIGTERM handler broadcasts from inside the handler, its SLURM handler saves from inside it, and
    ``_broadcast_sigterm_tensor`` broadcasts on the device and waits for it before every batch.
    """
    connector: Any = trainer._signal_connector
    connector.register_signal_handlers = _do_nothing
    connector.teardown = restore
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    epoch_loop._broadcast_sigterm_tensor = _do_nothing


def give_signals_back(trainer: pl.Trainer) -> None:
    """Undo `take_signals_over`. Does nothing the second time."""
    for owner, names in (
        (trainer._signal_connector, ("register_signal_handlers", "teardown")),
        (trainer.fit_loop.epoch_loop, ("_broadcast_sigterm_tensor",)),
    ):
        for name in names:
            vars(owner).pop(name, None)


def _do_nothing() -> None:
    """Lightning's version is switched off."""


def resume_from(trainer: pl.Trainer, path: str) -> None:
    """Make the restore that follows use ``path`` unless the user named another checkpoint. Once."""
    connector: Any = trainer._checkpoint_connector

    def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        vars(connector).pop("resume_start", None)
        connector.resume_start(checkpoint_path or path, weights_only=weights_only)

    connector.resume_start = resume_start


def overwrite_saved_config(trainer: pl.Trainer) -> None:
    """Let LightningCLI write ``config.yaml`` into the log folder of the run that goes on. Before its ``setup``."""
    cli = sys.modules.get("lightning.pytorch.cli")
    for callback in trainer.callbacks if cli is not None else ():  # type: ignore[attr-defined]
        if isinstance(callback, cli.SaveConfigCallback):  # type: ignore[union-attr]
            callback.overwrite = True


def checkpoint_folder(callback: ModelCheckpoint, trainer: pl.Trainer) -> str:
    """Where ``callback`` will save. Before its own ``setup``, too."""
    resolve: Any = callback._ModelCheckpoint__resolve_ckpt_dir  # type: ignore[attr-defined]
    return str(resolve(trainer))


def free_main_port(environment: Any, choose: Callable[[], int]) -> None:
    """Set the rendezvous port of a run whose ranks Lightning itself starts, where nothing has fixed it yet.

    Args:
        environment: the Trainer's cluster environment.
        choose: returns a free port.
    """
    if type(environment) is not LightningEnvironment or environment.creates_processes_externally:
        return
    if environment._main_port == -1 and "MASTER_PORT" not in os.environ and "STANDALONE_PORT" not in os.environ:
        environment._main_port = choose()
