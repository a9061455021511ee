"""fp16: an overflow on one rank skips the step on all of them and touches nothing but the scale."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from ls_strategy.config import LossScaleConfig
from ls_strategy.testing import spawn
from tests.marks import few_or_all
from tests.models import Case, Net, loader, quiet, trainer_of

STAGES = (0, 1, 2, 3)
PRECISIONS = ("16-mixed", "16-true")
OVERFLOWS = (2, 3, 5)  # optimizer steps, from 0
STEPS = 7
FIRST = 2.0**10
# hysteresis 2: the first overflow is tolerated, the others halve; no window ends
SCALES = [FIRST, FIRST, FIRST, FIRST / 2, FIRST / 2, FIRST / 4, FIRST / 4]

Cases = list[tuple[int, str, int, bool]]
"""Stage, precision, micro-batches of a step, and whether the run is saved and resumed."""

FEW: Cases = [
    (0, "16-true", 1, False),
    (1, "16-mixed", 2, True),
    (2, "16-true", 1, False),
    (3, "16-true", 2, True),
]
ALL: Cases = [(*each, each[1:] == ("16-true", 2)) for each in itertools.product(STAGES, PRECISIONS, (1, 2))]


def case_of(stage: int, precision: str, accumulate: int = 1) -> Case:
    config = LossScaleConfig(initial_power=10, window=1000, hysteresis=2)
    options = (("precision.loss_scale", config),)
    return Case(
        stage=stage, precision=precision, steps=STEPS, optimizer="adamw", accumulate=accumulate, options=options
    )


class Overflowing(Net):
    """The last rank's loss is infinite in the first micro-batch of some steps."""

    def loss(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().loss(batch, batch_idx)
        step, micro = divmod(batch_idx, self.case.accumulate)
        if step in OVERFLOWS and micro == 0 and self.global_rank == self.trainer.world_size - 1:
            return loss * float("inf")
        return loss


class Recorder(pl.Callback):
    """After every optimizer step: the scale, the count of skipped steps, and all masters, moments and step counts."""

    def __init__(self) -> None:
        self.scales: list[float] = []
        self.skipped: list[int] = []
        self.states: list[list[Tensor]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if (batch_idx + 1) % module.case.accumulate:
            return
        strategy = trainer.strategy
        self.scales.append(strategy.loss_scale)
        self.skipped.append(strategy.skipped_steps)
        state = strategy.optimizer_state(trainer.optimizers[0])["state"]
        tensors = [t.detach().clone() for t in strategy.require_engine().trainable_masters()]
        tensors += [torch.as_tensor(v).clone() for entry in state.values() for v in entry.values()]
        self.states.append(tensors)


def train(rank: int, world_size: int, folder: str, cases: Cases) -> list[dict[str, Any]]:
    quiet()
    result = []
    for stage, precision, accumulate, resumes in cases:
        case = case_of(stage, precision, accumulate)
        recorder = Recorder()
        trainer = trainer_of(case, world_size, callbacks=[recorder])
        trainer.fit(Overflowing(case), loader(case, world_size))
        pairs = zip(recorder.states[:-1], recorder.states[1:], strict=True)
        result.append(
            {
                "scales": recorder.scales,
                "skipped": recorder.skipped,
                "unchanged": [len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in pairs],
                "finite": all(bool(t.isfinite().all()) for t in recorder.states[-1]),
                "restored": restore(trainer, case, world_size, f"{folder}/{len(result)}.ckpt") if resumes else None,
            }
        )
    return result


def restore(trainer: Any, case: Case, world_size: int, path: str) -> dict[str, Any]:
    """The scaler's state that a second run starts with, and the one that the first had saved."""
    saved = trainer.strategy.require_engine().scaler.state_dict()
    trainer.save_checkpoint(path)
    found: list[dict[str, Any]] = []

    class Look(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            found.append(trainer.strategy.require_engine().scaler.state_dict())

    again = trainer_of(case, world_size, callbacks=[Look()])
    again.fit_loop.max_epochs = 2
    again.fit(Net(case), loader(case, world_size), ckpt_path=path, weights_only=False)
    return {"saved": saved, "found": found[0]}


@pytest.mark.parametrize("cases", few_or_all(FEW, ALL))
def test_overflow_on_one_rank_skips_on_all(cases: Cases, tmp_path: Path) -> None:
    """Masters, moments and step counts stay as they were in exactly the steps that overflow; on every rank.

    The scale is saved and restored.
    """
    ranks = spawn(train, 2, str(tmp_path), cases, init_process_group=False, timeout_s=150)
    for case, seen in itertools.chain.from_iterable(zip(cases, rank, strict=True) for rank in ranks):
        assert seen["unchanged"] == [step in OVERFLOWS for step in range(1, STEPS)], case
        assert seen["skipped"] == [sum(o <= step for o in OVERFLOWS) for step in range(STEPS)], case
        assert seen["scales"] == SCALES, case
        assert seen["finite"], case
        if seen["restored"] is not None:
            assert seen["restored"]["found"] == seen["restored"]["saved"], case
            assert seen["restored"]["saved"]["scale"] == SCALES[-1], case
