"""`Monitor` and `ShardedEMA` on two ranks."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from ls_strategy import Monitor, PlanError, ShardedEMA
from tests.dist.ranks import Net, assert_close, assert_equal, batches, fit, on_ranks, saved, weights

pytestmark = pytest.mark.wide

DECAY = 0.7


class Averaged(Net):
    """Keeps an average of its full weights by hand, and remembers what validation computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.by_hand: dict[str, Tensor] = {}
        self.validated: list[Tensor] = []

    def on_fit_start(self) -> None:
        self.by_hand = self.by_hand or weights(self)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name, value in weights(self).items():
            self.by_hand[name].lerp_(value, 1 - DECAY)

    def validation_step(self, batch: Any, i: int) -> None:
        self.validated.append(self(batch[0]).detach().clone())


def ema_fit(stage: int, module: Averaged, folder: Path, ckpt: Any = None, **options: Any) -> Any:
    trainer = fit(
        stage, module, ckpt=ckpt, callbacks=[ShardedEMA(decay=DECAY)], default_root_dir=folder, num_sanity_val_steps=0,
        **options,
    )  # fmt: skip
    trainer.save_checkpoint(folder / f"{stage}.ckpt")
    return saved(folder / f"{stage}.ckpt")


@pytest.mark.parametrize(("precision", "limit"), [("32-true", 1e-6), ("64-true", 1e-14)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_the_average_is_that_of_the_full_weights(
    rank: int, world_size: int, stage: int, precision: str, limit: float, tmp_path: Path
) -> None:
    module = Averaged()
    saved = ema_fit(stage, module, tmp_path, max_epochs=1, precision=precision)
    assert_close(saved["ema_state_dict"], module.by_hand, "average", limit)
    assert any(not torch.equal(saved["ema_state_dict"][k], saved["state_dict"][k]) for k in saved["state_dict"])


@pytest.mark.parametrize(("precision", "limit"), [("32-true", 1e-6), ("64-true", 1e-14)])
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_validation_runs_on_the_average_and_leaves_the_weights(
    rank: int, world_size: int, stage: int, precision: str, limit: float, tmp_path: Path
) -> None:
    module, plain = Averaged(), Averaged()
    from tests.dist.ranks import trainer_of

    callbacks: list[Any] = [ShardedEMA(decay=DECAY)]
    trainer = trainer_of(stage, max_epochs=1, callbacks=callbacks, num_sanity_val_steps=0, precision=precision)
    trainer.fit(module, batches(), batches())
    fit(stage, plain, max_epochs=1, precision=precision)
    for name, value in weights(plain).items():
        assert torch.equal(weights(module)[name], value), name
    reference = Net().to(module.validated[0].dtype)
    reference.load_state_dict(module.by_hand)
    inputs = next(iter(trainer.val_dataloaders))[0].to(module.validated[0].dtype)
    assert torch.allclose(module.validated[0], reference(inputs), atol=limit, rtol=10 * limit)


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_a_resumed_average_goes_on(rank: int, world_size: int, stage: int, tmp_path: Path) -> None:
    whole, first, second = Averaged(), Averaged(), Averaged()
    expected = ema_fit(stage, whole, tmp_path / "whole", max_epochs=2)
    ema_fit(stage, first, tmp_path, max_epochs=1)
    resumed = ema_fit(stage, second, tmp_path / "rest", ckpt=tmp_path / f"{stage}.ckpt", max_epochs=2)
    assert_close(resumed["ema_state_dict"], expected["ema_state_dict"], "average")


class Watched(Net):
    """Compares the norm that is logged with its own, and has a number of FLOPs."""

    def flops_per_sample(self) -> float:
        return 1e6

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy: Any = self.trainer.strategy
        self.norm = float(strategy.grad_norm())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_monitor_logs_what_the_strategy_counts(rank: int, world_size: int, stage: int, tmp_path: Path) -> None:
    module, logger = Watched(), CSVLogger(tmp_path, name="", version=f"{rank}")
    trainer = fit(stage, module, max_epochs=2, logger=logger, log_every_n_steps=2, callbacks=[Monitor(peak_tflops=1.0)])
    if rank:
        return
    with (tmp_path / "0" / "metrics.csv").open() as file:
        last = [row for row in csv.DictReader(file) if row.get("zero/grad_norm")][-1]
    assert float(last["zero/grad_norm"]) == pytest.approx(module.norm, rel=1e-6)
    strategy: Any = trainer.strategy
    sent = float(last["zero/sent_mib_per_step"]) * (1 << 20)
    planned = 4 * strategy.engine.plan.elements_sent()
    assert planned <= sent < planned + 256  # and the agreements of a few bytes
    states = strategy.memory_bytes()
    assert float(last["zero_memory_kib/optimizer"]) * (1 << 10) == pytest.approx(states["optimizer"])
    assert float(last["zero/samples_per_s"]) > 0
    assert float(last["zero/mfu"]) > 0
    assert "zero/tokens_per_s" not in last


@on_ranks(2)
def test_monitor_under_another_strategy_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(PlanError, match=r"reads shards.*zero0"):
        fit("ddp", Net(), callbacks=[Monitor()])


@on_ranks(1)
def test_an_average_resumes_within_a_step_of_several_batches(rank: int, world_size: int, tmp_path: Path) -> None:
    """The first batch ends without a step: that of the checkpoint is not averaged again."""

    def averaged(ckpt: Path | None, *callbacks: Any) -> dict[str, Tensor]:
        options = {"accumulate_grad_batches": 2, "enable_checkpointing": bool(callbacks)}
        trainer = fit(2, Net(), ckpt=ckpt, callbacks=[ShardedEMA(0.5), *callbacks], **options)
        trainer.save_checkpoint(tmp_path / "end.ckpt")
        return saved(tmp_path / "end.ckpt")["ema_state_dict"]

    every = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    assert_equal(averaged(None, every), averaged(tmp_path / "step=2.ckpt"), "average")
