"""Strategies that are wrong on purpose, for the conformance suite to find."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy


class Halves(DDPStrategy):
    """Halves gradients, and says nothing."""

    def backward(self, closure_loss: Any, *args: Any, **kwargs: Any) -> Any:
        return super().backward(closure_loss / 2, *args, **kwargs)


class Hangs(DDPStrategy):
    """Rank 1 never ends its third step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1 and batch_idx == 2:
            time.sleep(1000)
        return super().training_step(batch, batch_idx)


class WritesInPlace(DDPStrategy):
    """A save empties the file before it writes."""

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        if self.is_global_zero and Path(filepath).exists():
            Path(filepath).write_bytes(b"")
            time.sleep(0.5)
        super().save_checkpoint(checkpoint, filepath, storage_options)


class Refuses(DDPStrategy):
    """Runs nothing, and says what to do."""

    def setup(self, trainer: Any) -> None:
        raise ValueError("Got devices='cpu', but this needs a quantum computer. Use DDP.")


class Fails(DDPStrategy):
    """Fails in the last rank, without a cure."""

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if self.global_rank == 1:
            raise KeyError("shard 7")


class Forgets(DDPStrategy):
    """Resumes without the states of optimizers."""

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        pass
