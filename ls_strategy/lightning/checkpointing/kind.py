"""Choose the kind of a checkpoint: a folder to which every rank writes its part, or one file in Lightning's format.

All ranks make the same choice, before anything of the checkpoint is gathered, because they base it on values that they
have exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ls_strategy._torch import persistent_buffer_names
from ls_strategy.checkpoint.describe import human_bytes
from ls_strategy.engine import Engine
from ls_strategy.host.pytorch import is_overridden, pl

LARGEST_FILE = 2 << 30
"""Bytes of weights and optimizer states up to which ``checkpoint.format="auto"`` writes one file."""


@dataclass(frozen=True)
class Kind:
    """The kind of one checkpoint."""

    is_file: bool
    why: str
    """For the log; empty if the user chose the kind."""

    everywhere: bool = False
    """Whether every rank gets the values that a file holds, because hooks of the user's may work on them."""

    together: bool = False
    """Whether all ranks write a file together, and none of them gathers its values."""

    def __str__(self) -> str:
        kind = "are single files in Lightning's format" if self.is_file else "are folders"
        return f"ZeROStrategy: checkpoints {kind}, because {self.why} (checkpoint='auto')"


def kind_of(
    engine: Engine,
    exchange: Callable[[Any], list[Any]],
    *,
    hooks: bool = False,
    others: Iterable[Engine] = (),
    disks: str = "",
) -> Kind:
    """Return the kind of the next checkpoint, the same on all ranks. Collective, unless folders were asked for.

    Args:
        engine: of the model.
        exchange: gives every rank's value to all ranks.
        hooks: whether this rank has hooks that get the checkpoint.
        others: engines of further models in the same checkpoint.
        disks: to which this rank may write its part of a file, from `disks_of`; empty if rank 0 is to gather it.
    """
    config = engine.config.checkpoint
    if config.format == "sharded":
        return Kind(is_file=False, why="")
    if config.format == "auto":
        if engine.mesh.shape.pipeline > 1:
            return Kind(is_file=False, why="no rank has all layers of a pipeline")
        if not config.frozen:
            return Kind(is_file=False, why="only folders record what checkpoint.frozen=False leaves out")
    sizes = [_bytes_of(each) for each in (engine, *others)]
    reported = exchange((sum(s for s, _ in sizes), sum(own for _, own in sizes), hooks, disks))
    total = max(shared for shared, *_ in reported) + sum(own for _, own, *_ in reported)
    fits = total <= LARGEST_FILE
    any_hooks = any(has_hooks for *_, has_hooks, _ in reported)
    everywhere = fits and any_hooks
    together = not any_hooks and bool(disks) and all(each == disks for *_, each in reported)
    if config.format == "file":
        return Kind(is_file=True, why="", everywhere=everywhere, together=together)
    limit = f"{'at most' if fits else 'more than'} {human_bytes(LARGEST_FILE)}"
    return Kind(fits, f"weights and optimizer states together have {human_bytes(total)}, {limit}", everywhere, together)


def gets_checkpoints(module: pl.LightningModule) -> bool:
    """Return whether the module, or a callback that is not of this package, has a hook that gets every checkpoint."""
    if is_overridden("on_save_checkpoint", module):
        return True
    callbacks: list[Any] = module.trainer.callbacks  # type: ignore[attr-defined]
    others = (c for c in callbacks if not type(c).__module__.startswith("ls_strategy."))
    return any(is_overridden("on_save_checkpoint", c, parent=pl.Callback) for c in others)


def disks_of(engine: Engine) -> str:
    """Return what the disks have in common to which ranks may write a file together; empty if this rank may not.

    It may not where other ranks have other parameters or parts of them, or where an optimizer has code of its own for
    its state dict, which may work on full states.
    """
    own = any(optimizer.sharded.states.protocol.is_own for optimizer in engine.optimizers)
    parts = any(slot.part is not None for flat in engine.flats for slot in flat.layout.slots)
    if own or parts or engine.mesh.shape.pipeline > 1:
        return ""
    try:  # not two machines or containers of one name
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text()}{Path('/proc/self/ns/mnt').readlink()}"
    except OSError:
        return ""


def _bytes_of(engine: Engine) -> tuple[int, int]:
    """Return bytes in a file: of what all ranks hold together, in shards or alike, and of what only this rank holds."""
    shared = sum(_elements(flat) * flat.master_dtype.itemsize for flat in engine.flats)
    saved = persistent_buffer_names(engine.model)
    shared += sum(b.nbytes for n, b in engine.model.named_buffers() if n in saved and not b.is_meta)
    own = 0
    for optimizer in engine.optimizers:
        states = optimizer.sharded.states
        states.collect()
        for store in states.store:
            shared += _elements(store.flat) * sum(dtype.itemsize for dtype in store.dtypes().values())
        own += sum(v.nbytes for kept in states.entries.values() for v in kept.values() if isinstance(v, Tensor))
    return shared, own


def _elements(flat: Any) -> int:
    """Return the elements of the full parameters in a buffer."""
    return sum(math.prod(slot.full_shape) for slot in flat.layout.slots)
