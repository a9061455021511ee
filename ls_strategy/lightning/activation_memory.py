"""Apply the ``activations`` options to a module while it trains: recomputation, offload, chunked loss, tiles."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from ls_strategy.activations.apply import Activations
from ls_strategy.activations.storage import NVMeFolder
from ls_strategy.activations.tiles import Tiles
from ls_strategy.config import ActivationsConfig
from ls_strategy.engine import Engine
from ls_strategy.host.pytorch import rank_zero_info
from ls_strategy.losses.head import ChunkedHeads


class ActivationMemory:
    """Recomputation and offload of a module's activations while it trains."""

    def __init__(self, config: ActivationsConfig) -> None:
        self.config = config
        self.defers_logits = config.chunked_loss is not None
        """Whether the loss computes logits in chunks."""
        self.active: Activations | None = None
        self._heads: ChunkedHeads | None = None
        self._tiles: Tiles | None = None

    def apply(self, module: nn.Module, engine: Engine) -> None:
        """Start on the module of an engine, which may have been used before.

        Raises:
            PlanError: no module matches the options.
        """
        self.remove()
        config = self.config
        if config.chunked_loss is not None:
            self._heads = ChunkedHeads(module, config.chunked_loss.head, config.chunked_loss.chunk_bytes)
            rank_zero_info(f"ZeROStrategy: {self._heads.describe()}")
        if config.tiles is not None:
            self._tiles = Tiles(module, config.tiles)
            rank_zero_info(f"ZeROStrategy: tiled: {self._tiles.describe()}")
        if config.recompute is None and config.stored is None:
            return
        offload, rank = engine.config.offload, engine.mesh.world.rank
        self.active = Activations(
            module,
            engine.device,
            recompute=config.recompute,
            offload=config.stored,
            partition=engine.mesh.tensor if config.partitioning else None,
            protected=engine.storages,
            drive=NVMeFolder(offload.nvme_path, offload.nvme_io, rank, allow_ram=offload.nvme_allow_ram),
        )
        rank_zero_info(f"ZeROStrategy: {self.active.describe()}")

    @property
    def recomputes(self) -> bool:
        """Return whether blocks are recomputed in backward."""
        return self.config.recompute is not None

    @property
    def needs_nvme(self) -> bool:
        """Return whether activations are stored on NVMe."""
        return self.config.stored is not None and self.config.stored.tier == "nvme"

    def around_forward(self) -> AbstractContextManager[Any]:
        """Surround the forward of a training step."""
        return nullcontext() if self.active is None else self.active.around_forward()

    def metrics(self) -> dict[str, float]:
        """Return numbers to log."""
        return {} if self.active is None else {f"zero_activations/{k}": v for k, v in self.active.metrics().items()}

    def remove(self) -> None:
        """Undo `apply`."""
        for part in (self.active, self._tiles, self._heads):
            if part is not None:
                part.remove()
        self.active = self._tiles = self._heads = None
