"""A program with the habits of users for `torchrun`, whose ranks end themselves where a test says.

    torchrun ... -m tests.dist.elastic_program OPTIONS.json

It writes ``out.json`` with a digest of the final weights and what was logged, from rank 0.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from ls_strategy import CorruptionCheck, ElasticTraining, ZeROStrategy
from tests.dist.test_corruption_check import flip

torch.set_num_threads(1)


class Ends:
    """Ends this process with SIGKILL, once per entry of ``kills``: step, rank, place."""

    def __init__(self, kills: list[list[Any]], folder: Path) -> None:
        self.kills, self.folder = kills, folder

    def at(self, trainer: Any, place: str) -> None:
        for number, (step, rank, where) in enumerate(self.kills):
            done = self.folder / f"killed-{number}"
            if where == place and trainer.global_step >= step and trainer.global_rank == rank and not done.exists():
                done.write_text(str(trainer.global_step))
                os.kill(os.getpid(), signal.SIGKILL)


class Model(pl.LightningModule):
    def __init__(self, options: dict[str, Any], ends: Ends) -> None:
        super().__init__()
        self.options, self.ends = options, ends
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.GELU(), nn.Linear(32, 32), nn.Linear(32, 4))
        self.score = MeanMetric()
        self.seen: list[float] = []
        self.automatic_optimization = not options.get("manual", False)

    def _loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.ends.at(self.trainer, "train")
        time.sleep(self.options.get("sleep", 0.0))
        loss = self._loss(batch)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        if (self.current_epoch != 1 and batch_idx == 0) or batch_idx == 7:
            self.log("seldom", loss, on_step=False, on_epoch=True, sync_dist=True)
        if self.options.get("loader") == "own" and batch_idx in (0, 7):
            self.score.update(loss.detach().double())
            self.log("score", self.score, on_step=True, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.ends.at(self.trainer, "optimizer")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.ends.at(self.trainer, "validation")
        self.log("val", self._loss(batch), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        seen = self.trainer.callback_metrics
        self.seen += [float(seen[name]) for name in ("loss_epoch", "seldom", "score_epoch") if name in seen]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = list(self.seen)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = list(checkpoint["seen"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05)
        step = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n / 50))
        return [optimizer], [
            {"scheduler": plateau, "monitor": "loss_epoch", "interval": "epoch"},
            {"scheduler": step, "interval": "step"},
        ]


class Flips(Callback):
    """Flips a bit in the memory of a rank of a node, once per entry of ``flips``: step, node, and what."""

    def __init__(self, flips: list[list[Any]], folder: Path) -> None:
        self.flips, self.folder = flips, folder

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        for number, (step, node, what) in enumerate(self.flips):
            done = self.folder / f"flipped-{number}"
            here = Path(os.environ.get("LS_STRATEGY_MEMORY", "")).name == node
            if here and trainer.global_step >= step and not done.exists():
                done.write_text(f"{trainer.global_step} {trainer.global_rank}")
                if what == "weights":
                    flip(trainer.strategy.require_engine().flats[0].full, random.Random(number))
                else:
                    self.hook = pl_module.net[0].weight.register_hook(self._once)

    def _once(self, grad: torch.Tensor) -> torch.Tensor:
        self.hook.remove()
        grad = grad.clone()
        flip(grad, random.Random(1))
        return grad


class Own(DataLoader):
    """A loader with a state that only its own rank can continue from; its batches are not those of a sampler."""

    def __init__(self, dataset: Any, batch_size: int) -> None:
        super().__init__(dataset, batch_size=batch_size)
        self.done, self.rank = 0, int(os.environ.get("RANK", "0"))

    def __iter__(self) -> Any:
        while self.done < 8:
            self.done += 1
            chosen = torch.Generator().manual_seed(100 * self.rank + self.done)
            yield tuple(t[torch.randint(0, 192, (4,), generator=chosen)] for t in self.dataset.tensors)
        self.done = 0

    def __len__(self) -> int:
        return 8

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "rank": self.rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done, self.rank = state["done"], state["rank"]


class Losses(Callback):
    """Keeps the loss of every step."""

    def __init__(self, save_at: int | None) -> None:
        self.values: dict[str, float] = {}
        self.save_at = save_at

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values[str(trainer.fit_loop.epoch_loop.total_batch_idx)] = float(outputs["loss"])
        if trainer.global_step == self.save_at:
            trainer.save_checkpoint(f"{trainer.default_root_dir}/saved.ckpt")

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = dict(state_dict)


def rank_of(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """Run as a rank of `ls_strategy.testing.spawn`."""
    main(options)


def main(options: dict[str, Any]) -> None:
    folder = Path(options["folder"])
    pl.seed_everything(7, verbose=False)
    model = Model(options, Ends(options.get("kills", []), folder))
    data = torch.Generator().manual_seed(1)
    x, y = torch.randn(192, 8, generator=data), torch.randint(0, 4, (192,), generator=data)
    losses = Losses(options.get("save_at"))
    elastic = ElasticTraining(options.get("every", 1), run=options.get("run"))
    callbacks: list[Any] = [elastic, losses]
    if "check" in options:
        callbacks += [CorruptionCheck(options["check"]), Flips(options.get("flips", []), folder)]
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=ZeROStrategy(
            stage=options.get("stage", 2),
            offload=options.get("offload"),
            parallel=options.get("parallel", {"virtual_ranks": 4}),
        ),
        precision=options.get("precision", "32-true"),
        max_epochs=options.get("epochs", 2),
        accumulate_grad_batches=options.get("accumulate", 1),
        gradient_clip_val=0.5,
        val_check_interval=options.get("val_check_interval", 4),
        limit_val_batches=2,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        default_root_dir=str(folder),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=options.get("logger", True),
        use_distributed_sampler=options.get("loader") != "own",
        callbacks=callbacks,
    )
    started = folder / "starts"
    with started.open("a") as file:
        file.write(f"{os.environ.get('RANK', '0')} {os.environ.get('WORLD_SIZE', '1')} {time.time()}\n")
    loader = DataLoader(TensorDataset(x, y), batch_size=options.get("batch_size", 4), shuffle=True)
    if "file_limit" in options:  # a full memory file system
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (options["file_limit"], options["file_limit"]))
    if options.get("loader") == "own":
        loader = Own(TensorDataset(x, y), 4)
    validation = DataLoader(TensorDataset(x, y), batch_size=8)
    trainer.fit(model, loader, validation, ckpt_path=options.get("ckpt_path"))
    weights = trainer.strategy.lightning_module_state_dict()
    if trainer.is_global_zero:
        digest = hashlib.sha256(b"".join(v.contiguous().numpy().tobytes() for _, v in sorted(weights.items())))
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        result = {
            "weights": digest.hexdigest(),
            "steps": trainer.global_step,
            "epochs": trainer.current_epoch,
            "losses": losses.values if options.get("keep_losses", True) else {},
            "seen": model.seen,
            "lr": rates,
            "val": float(trainer.callback_metrics["val"]),
            "world_size": trainer.world_size,
        }
        (folder / "out.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
