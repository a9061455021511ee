"""The newest checkpoint of a run, on nodes whose clocks differ, from real Trainers: folders and single files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from typing_extensions import override

from ls_strategy import PreemptionHandler
from ls_strategy.checkpoint import commit
from tests.dist.ranks import Net, batches, on_ranks, trainer_of


class Saves(pl.Callback):
    """Saves at steps, each with a clock that is as many seconds fast."""

    def __init__(self, folder: Path, clocks: dict[int, float]) -> None:
        self._folder, self._clocks = folder, clocks

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        fast = self._clocks.get(trainer.global_step)
        if fast is None:
            return
        path, real = self._folder / f"step={trainer.global_step}.ckpt", commit.time.time
        commit.time.time = lambda: real() + fast
        try:
            trainer.save_checkpoint(path)
        finally:
            commit.time.time = real
        if path.is_file():
            os.utime(path, (real() + fast, real() + fast))


def run(save_as: str, folder: Path, clocks: dict[int, float], *callbacks: Any, ckpt: Any = None) -> pl.Trainer:
    trainer = trainer_of(2, save_as=save_as, callbacks=[Saves(folder, clocks), *callbacks], max_epochs=3)
    trainer.fit(Net(), batches(), ckpt_path=ckpt)
    return trainer


@pytest.mark.parametrize("save_as", ["sharded", "file"])
@on_ranks(1)
def test_steps_count_and_not_the_clock(rank: int, world_size: int, save_as: str, tmp_path: Path) -> None:
    def name(step: int) -> str:
        return str(tmp_path / f"step={step}.ckpt")

    run(save_as, tmp_path, {5: 3600.0, 10: 0.0})
    assert commit.newest([tmp_path]) == name(10)
    run(save_as, tmp_path, {12: -3600.0}, ckpt=name(10))
    assert commit.newest([tmp_path]) == name(12)
    run(save_as, tmp_path, {7: 0.0}, ckpt=name(5))  # the user goes back
    assert commit.newest([tmp_path]) == name(7)
    run(save_as, tmp_path, {11: 7200.0, 3: 7200.0})  # another run
    assert commit.newest([tmp_path]) == name(11)
    handler = PreemptionHandler(dirpath=tmp_path)
    trainer = run(save_as, tmp_path, {}, handler)
    assert handler._resumed_from == name(11)
    assert trainer.global_step == 24
