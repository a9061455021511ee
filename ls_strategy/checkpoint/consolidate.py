"""Consolidate a sharded checkpoint into one file in Lightning's format, without holding it in memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ls_strategy.checkpoint.output import Progress, atomic_output
from ls_strategy.checkpoint.source import OURS, RANDOM, read_checkpoint
from ls_strategy.checkpoint.torch_file import StreamedSave
from ls_strategy.errors import ConfigError

_TRAINING_KEYS = ("callbacks", "optimizer_states", "lr_schedulers")
"""Keys that Lightning leaves out with ``save_weights_only``."""


def consolidate(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    weights_only: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write a sharded checkpoint as one ``.ckpt`` file, as a plain Trainer saves it.

    ``torch.load``, ``LightningModule.load_from_checkpoint`` and ``Trainer.fit(ckpt_path=...)`` under any strategy read
    it. Tied weights appear under all their names, and optimizer states are numbered as in torch. Needs memory for a few
    chunks of one tensor (64 MiB of fp32 each), whatever the checkpoint's size. Verifies the checksums of all it reads.

    Pickled objects are built, as by ``torch.load(weights_only=False)``. Use it only for checkpoints that you trust.

    Args:
        source: The checkpoint's folder. A single file is copied.
        target: The file to write.
        weights_only: Leave out optimizers, schedulers and callbacks, as Lightning's ``save_weights_only`` does.
        force: Replace ``target`` if it exists.
        progress: Called with the bytes written so far and the total.

    Raises:
        CheckpointError: ``source`` is incomplete, or ``target`` could not be written.
        ConfigError: ``target`` exists, or is the source.
    """
    read = partial(read_checkpoint, source, weights_only=False)
    write_file(read, source, target, weights_only=weights_only, force=force, progress=progress)


def write_file(
    read: Callable[[], dict[str, Any]],
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    weights_only: bool,
    force: bool,
    progress: Progress | None,
) -> None:
    """Write the checkpoint that ``read`` returns to one file. See `consolidate` for the other arguments."""
    if Path(source).resolve() == Path(target).resolve():
        raise ConfigError(f"{source} is both source and target. Give the target another name.")
    checkpoint = read()
    if weights_only:
        for key in _TRAINING_KEYS:
            checkpoint.pop(key, None)
        checkpoint.get(OURS, {}).pop(RANDOM, None)
    save = StreamedSave(checkpoint)
    with atomic_output(Path(target), nbytes=save.nbytes, force=force) as path:
        save.write(path, progress)
