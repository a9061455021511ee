"""Which memory the gathers of a fit get on the simulated device, and what torch's own allocator would give them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ls_strategy import device as dev
from ls_strategy.distributed.buffer_pool import BufferPool
from tests.simulated_device.collectives import fit_aside
from tests.simulated_device.device import SimulatedDevice
from tests.simulated_device.programs import Block, Stack, batches, fit

SWITCH = "LS_STRATEGY_GATHER_POOL"


class Sizes(Stack):
    """A stack whose blocks differ in size, with batches for validation."""

    def __init__(self, sizes: Sequence[int] = (3, 1, 4, 1, 5, 2)) -> None:
        super().__init__(blocks=0)
        for size in sizes:
            block = Block(16)
            block.up, block.down = nn.Linear(16, 24 * size), nn.Linear(24 * size, 16)
            self.blocks.append(block)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])

    def val_dataloader(self) -> Any:
        return batches(self.first.weight.dtype, 2)


class Keeps(Stack):
    """A stack from which user code keeps views during a step, and one until the next step."""

    def __init__(self) -> None:
        super().__init__(blocks=6)
        self.is_unchanged: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weights = [self.blocks[n].up.weight for n in (1, 4)]  # type: ignore[union-attr]
        views = [weight.detach() for weight in weights]
        before = [view.clone() for view in views]
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            self(batch[0])  # gathers all other units again
        self.is_unchanged += [(view == copy).all() for view, copy in zip(views, before, strict=True)]
        self.kept = views[batch_idx % 2]
        return loss


def kept(device: torch.device) -> list[bool]:
    """Return whether views of released units had their own values, in every step."""
    module = Keeps()
    fit_aside(device, {"stage": 3}, {"max_steps": 6}, module=module)
    return [bool(each.cpu()) for each in module.is_unchanged]


class Steps(pl.Callback):
    """Begins a new list of addresses with every training batch."""

    def __init__(self) -> None:
        self.all: list[list[int]] = []
        self.marks: list[list[int]] = []
        """How long the device's log was then, and at the end of the batch."""
        self.is_running = False

    def on_train_batch_start(self, *args: Any) -> None:
        self.all.append([])
        self.marks.append([len(SimulatedDevice.here.log())])
        self.is_running = True

    def on_train_batch_end(self, *args: Any) -> None:
        self.marks[-1].append(len(SimulatedDevice.here.log()))
        self.is_running = False


def addresses(
    device: torch.device,
    options: dict[str, Any],
    trainer: dict[str, Any] | None = None,
    blocks: int = 0,
    pool: str = "1",
) -> dict[str, Any]:
    """Train, and return the losses, the peak, and for every batch the addresses of what was gathered.

    Args:
        device: the simulated one.
        options: of the strategy.
        trainer: of the Trainer.
        blocks: of one size; 0 stands for blocks of different sizes, with validation.
        pool: `SWITCH`.
    """
    allocate, steps = BufferPool.allocate, Steps()

    def noting(pool: BufferPool, buffer: Tensor) -> None:
        had_memory = buffer.untyped_storage().size() > 0
        allocate(pool, buffer)
        if steps.is_running and not had_memory:
            steps.all[-1].append(buffer.data_ptr())

    trainer = {"max_steps": 20, "max_epochs": -1, "callbacks": [steps], **(trainer or {})}
    module = Stack(blocks) if blocks else Sizes()
    with mock.patch.object(BufferPool, "allocate", noting), mock.patch.dict(os.environ, {SWITCH: pool}):
        train = fit if dist.is_initialized() else fit_aside
        run = train(device, options, trainer, module=module)
    return {
        "losses": run["losses"],
        "weights": run["weights"],
        "from nodes": any(flat.node for unit in run["plan"].units for flat in unit.flats),
        "peak": dev.peak_bytes(device),
        "steps": steps.all,
        "log": SimulatedDevice.here.log(),
        "marks": steps.marks,
    }


def places(log: list[tuple[int, int, int, int]]) -> tuple[int, int]:
    """Return how many addresses gathers of the commonest size had, and how many there were at most at once."""
    sizes = Counter(nbytes for _, nbytes, _, pool in log if pool and nbytes)
    commonest = sizes.most_common(1)[0][0]
    every, now, most = set[int](), set[int](), 0
    for address, nbytes, _, pool in log:
        if pool and nbytes == commonest:
            now.add(address)
            every.add(address)
            most = max(most, len(now))
        elif not nbytes:
            now.discard(address)
    return len(every), most
