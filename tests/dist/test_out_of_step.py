"""Ranks that wait for each other in different places say where they are; what is sure to hang ends within seconds."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch

from ls_strategy import ZeROStrategy
from tests.dist.ranks import Net, batches, on_ranks, trainer_of


class OnOneRank(pl.Callback):
    """Runs code at the end of the second batch, on one rank."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, i: int) -> None:
        if i == 1 and trainer.global_rank == self.rank:
            self.act(trainer, module, batch)

    def act(self, trainer: pl.Trainer, module: Any, batch: Any) -> None:
        raise NotImplementedError


class Forward(OnOneRank):
    def act(self, trainer: pl.Trainer, module: Any, batch: Any) -> None:
        with torch.no_grad():
            module(batch[0])


class StateDict(OnOneRank):
    def act(self, trainer: pl.Trainer, module: Any, batch: Any) -> None:
        module.state_dict()


class Barrier(OnOneRank):
    def act(self, trainer: pl.Trainer, module: Any, batch: Any) -> None:
        trainer.strategy.barrier()


class TorchBarrier(OnOneRank):
    def act(self, trainer: pl.Trainer, module: Any, batch: Any) -> None:
        torch.distributed.barrier()


class Save(OnOneRank):
    def act(self, trainer: pl.Trainer, module: Any, batch: Any) -> None:
        trainer.save_checkpoint("/tmp/out_of_step.ckpt")


class Sleep(OnOneRank):
    def act(self, trainer: pl.Trainer, module: Any, batch: Any) -> None:
        time.sleep(6)


class Validate(OnOneRank):
    def act(self, trainer: pl.Trainer, module: Any, batch: Any) -> None:
        module.eval()
        with torch.no_grad():
            for one in batches():
                module.validation_step(one, 0)
        module.train()


class LogsOnOneRank(Net):
    def training_step(self, batch: Any, i: int) -> Any:
        loss = super().training_step(batch, i)
        if self.global_rank == 0 and i == 1:
            self.log("loss", loss, on_step=True, sync_dist=True)
        return loss


class Branches(Net):
    """One rank leaves a block out."""

    def forward(self, x: Any) -> Any:
        h = self.first(x)
        for i, block in enumerate(self.blocks):
            if i == 1 and self.global_rank == 1 and len(self.losses) == 2:
                continue
            h = block(h)
        return self.last(h)


class Skips(Net):
    """Manual optimization: an exception on one rank is swallowed, and with it a step."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, i: int) -> Any:
        optimizer = self.optimizers()
        try:
            loss = super().training_step(batch, i)
            if i == 1 and self.global_rank == 1:
                raise ValueError("a bad sample")
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        except ValueError:
            pass


CASES: dict[str, tuple[int, Any, Any]] = {
    "forward": (3, Net, Forward),
    "forward_2": (2, Net, Forward),
    "state_dict": (3, Net, StateDict),
    "barrier": (2, Net, Barrier),
    "barrier_3": (3, Net, Barrier),
    "torch_barrier": (2, Net, TorchBarrier),
    "save": (2, Net, Save),
    "save_3": (3, Net, Save),
    "log": (2, LogsOnOneRank, None),
    "log_3": (3, LogsOnOneRank, None),
    "branch_2": (2, Branches, None),
    "branch_3": (3, Branches, None),
    "sleep": (2, Net, Sleep),
    "skip_1": (1, Skips, None),
    "skip_2": (2, Skips, None),
    "skip_3": (3, Skips, None),
    "validate": (3, Net, Validate),
    "validate_2": (2, Net, Validate),
}


@on_ranks(2, timeout_s=60)
def try_one(rank: int, world_size: int, name: str) -> None:
    stage, module, callback = CASES[name]
    strategy = ZeROStrategy(stage, min_unit_numel=0, timeout=timedelta(seconds=25), explain_waits_after=2.0)
    trainer = trainer_of(strategy, callbacks=[callback()] if callback else [], max_epochs=1)
    started = time.monotonic()
    words = "nothing"
    net = module()
    try:
        trainer.fit(net, batches())
    except BaseException as error:
        words = f"{type(error).__name__}: {error}"[:300]
    print(f"\n#### {name} rank {rank} after {time.monotonic() - started:.1f} s: {words} {[round(x, 3) for x in net.losses]}", flush=True)
    time.sleep(2)
