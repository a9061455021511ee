"""The data, random numbers and folder of an island: each has its own."""

from __future__ import annotations

import random
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ls_strategy._torch import tree_iter
from ls_strategy.errors import ConfigError
from ls_strategy.extras.islands import fingerprint
from ls_strategy.host.pytorch import pl
from ls_strategy.lightning._private import training_loaders
from ls_strategy.lightning.strategy import ZeROStrategy


def check_loaders(trainer: pl.Trainer, strategy: ZeROStrategy) -> None:
    """Refuse samplers of the user's that deal out the data over one island only. Not collective.

    Raises:
        ConfigError: with the numbers to set.
    """
    island, islands = strategy.islands
    wanted = strategy.data_parallel_size * islands
    for loader in training_loaders(trainer):
        sampler = getattr(loader, "sampler", None)
        replicas = getattr(sampler, "num_replicas", wanted)
        if hasattr(sampler, "rank") and replicas != wanted:
            raise ConfigError(
                f"Got a {type(sampler).__name__} for {replicas} ranks, but {islands} islands read from the data with "
                f"{strategy.data_parallel_size} ranks each. Make it with num_replicas={wanted} and rank="
                f"{island * strategy.data_parallel_size + strategy.data_parallel_rank} on this rank, or leave it to "
                "Lightning (use_distributed_sampler=True)."
            )


def digest(batch: Any) -> int:
    """Return a digest of the values of a batch."""
    code = 0
    for leaf in tree_iter(batch):
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().to("cpu").contiguous()
            code = zlib.crc32(leaf.view(torch.uint8).numpy().tobytes() if leaf.numel() else b"", code)
        else:
            code = zlib.crc32(repr(leaf).encode() if isinstance(leaf, (str, int, float, bool)) else b"", code)
    return code


def own_folder(trainer: pl.Trainer) -> dict[str, Any]:
    """Return where the island writes, which no other island may."""
    if not trainer.loggers and not trainer.checkpoint_callbacks:  # type: ignore[attr-defined]
        return {}
    folder = Path(trainer.default_root_dir).absolute()
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return {fingerprint.OWN + "folder": f"{folder} (inode {there.stat().st_ino})"}


def draw_other_numbers(island: int) -> None:
    """Let this island draw other random numbers than island 0, whose are those of a run without islands."""
    torch.manual_seed(torch.initial_seed() + 1_000_003 * island)
    random.seed(random.getrandbits(63) + island)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        drawn = numpy.random.randint(0, 2**32, 4, dtype=numpy.uint32)
        numpy.random.seed([*drawn.tolist(), island])
