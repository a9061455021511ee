"""`Monitor` names the rank that is slow: real Trainers, whose own times are made up where exact numbers are claimed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from ls_strategy import Monitor, ZeROStrategy
from ls_strategy.config import nested
from ls_strategy.extras.callbacks import stragglers
from ls_strategy.extras.callbacks.stragglers import groups_with_same_work
from ls_strategy.spans import recorder
from tests.clocks import Clock
from tests.dist.parallel_runs import Module as GPTModule
from tests.dist.parallel_runs import Run
from tests.dist.ranks import Net, batches, fit, on_ranks, trainer_of

SLOW_FROM = 41
"""The first slow step."""


@contextmanager
def clock_of_the_test() -> Iterator[Clock]:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        for module in (recorder, stragglers):
            patch.setattr(module, "time", clock)
        yield clock


class Timed(Net):
    """Forward takes 30 ms and backward 60; from `SLOW_FROM` on, one of them takes 1.3 x as long on one rank."""

    def __init__(self, clock: Any, rank: int, slow: int | None, phase: str = "forward") -> None:
        super().__init__()
        self.clock, self.slow_phase = clock, phase if rank == slow else None

    def seconds(self, phase: str) -> float:
        slow = phase == self.slow_phase and self.trainer.global_step + 1 >= SLOW_FROM
        return {"forward": 0.03, "backward": 0.06}[phase] * (1.3 if slow else 1.0)

    def training_step(self, batch: Any, i: int) -> Tensor:
        self.clock.wait(self.seconds("forward"))
        loss = super().training_step(batch, i)
        loss.register_hook(lambda grad: self.clock.wait(self.seconds("backward")))
        return loss


def events(folder: Path) -> list[dict[str, Any]]:
    """What rank 0 has noted about ranks."""
    lines = [json.loads(line) for line in (folder / "0" / "zero_run.jsonl").read_text().splitlines()]
    return [line for line in lines if "rank" in line]


def logger_of(folder: Path, rank: int) -> CSVLogger:
    return CSVLogger(folder, name="", version=str(rank))


def train(strategy: Any, folder: Path, rank: int, module: Net, steps: int, **options: Any) -> Any:
    return fit(
        strategy, module, batches(1024), max_steps=steps, max_epochs=-1,
        logger=logger_of(folder, rank), callbacks=[Monitor(), *options.pop("callbacks", [])],
        **{"log_every_n_steps": 20, **options},
    )  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", [2, 0, 1, 3])
@on_ranks(4)
def test_a_rank_slowed_by_1_3_is_named_within_20_steps(rank: int, world_size: int, stage: int, tmp_path: Path) -> None:
    phase = "forward" if stage % 2 else "backward"
    with clock_of_the_test() as clock:
        train(stage, tmp_path, rank, Timed(clock, rank, slow=2, phase=phase), SLOW_FROM + 20)
    if rank == 0:
        (event,) = events(tmp_path)
        assert event["step"] <= SLOW_FROM + 19
        assert (event["rank"], event["phase"], event["since"], event["peers"]) == (2, phase, SLOW_FROM, 3)
        assert event["seconds"] / event["others_s"] == pytest.approx(1.3)
        assert event["about"].startswith("cpu, on ")


@on_ranks(2)
def test_equal_ranks_raise_no_alarm_in_200_steps_with_validation_and_accumulation(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    """Rank 0 also validates longer, logs and saves."""

    class Validates(Timed):
        def validation_step(self, batch: Any, i: int) -> None:
            self.clock.wait(0.0 if rank else 5.0)
            super().validation_step(batch, i)

    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, i: int) -> None:
            module.clock.wait(3.0 if rank == 0 and trainer.global_step % 25 == 0 else 0.0)

    with clock_of_the_test() as clock:
        trainer = trainer_of(
            2, max_steps=200, max_epochs=-1, logger=logger_of(tmp_path, rank), log_every_n_steps=20,
            accumulate_grad_batches=2, val_check_interval=20, limit_val_batches=1, callbacks=[Saves(), Monitor()],
        )  # fmt: skip
        trainer.fit(Validates(clock, rank, slow=None), batches(1024), batches(8))
        assert trainer.global_step == 200
    if rank == 0:
        assert events(tmp_path) == []
        rows = (tmp_path / "0" / "metrics.csv").read_text()
        assert "zero_stragglers/slowest_ratio" in rows


class Counts(Callback):
    """What all process groups have done, but for what the clock decides, and what was sent, after two of the steps."""

    def __init__(self) -> None:
        self.counts: list[tuple[int, int]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        strategy = trainer.strategy
        if trainer.global_step in (5, 75):
            by_the_clock = strategy._run.lockstep._journal
            journals = strategy.engine.comm.where.journals
            collectives = sum(journal.count for journal in journals.values() if journal is not by_the_clock)
            self.counts.append((collectives, sum(strategy.traffic.bytes.values())))


@on_ranks(2)
def test_comparing_ranks_takes_no_collective(rank: int, world_size: int, tmp_path: Path) -> None:
    done = []
    for slow in (None, 1):
        with clock_of_the_test() as clock:
            module, counts = Timed(clock, rank, slow), Counts()
            monitors = [] if slow is None else [Monitor()]
            fit(
                2, module, batches(1024), max_steps=80, max_epochs=-1, logger=logger_of(tmp_path, rank),
                log_every_n_steps=1000, callbacks=[*monitors, counts],
            )  # fmt: skip
        (before, sent_before), (after, sent) = counts.counts
        done.append((after - before, sent - sent_before))
    assert done[0] == done[1]
    assert min(done[0]) > 0
    if rank == 0:
        assert [event["rank"] for event in events(tmp_path)] == [1]


@on_ranks(2)
def test_a_resumed_fit_compares_again_and_the_end_is_noted(rank: int, world_size: int, tmp_path: Path) -> None:
    class Recovers(Timed):
        def seconds(self, phase: str) -> float:
            return super().seconds(phase) if self.trainer.global_step < 80 else 0.03

    with clock_of_the_test() as clock:
        trainer = train(1, tmp_path / "one", rank, Timed(clock, rank, slow=1), 60)
        trainer.save_checkpoint(tmp_path / "at60")
        train(1, tmp_path / "two", rank, Recovers(clock, rank, slow=1), 120, ckpt=tmp_path / "at60")
    if rank == 0:
        assert [e["since"] for e in events(tmp_path / "one")] == [SLOW_FROM]
        begins, ends = events(tmp_path / "two")
        assert (begins["event"], begins["since"]) == ("slow rank", 61)
        assert (ends["event"], ends["until"]) == ("rank no longer slow", 81)


class Sleeps:
    """The time of this machine."""

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)


@on_ranks(2)
def test_by_the_clock_of_this_machine_the_rank_is_named_and_not_the_one_that_waits(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    """Forward takes 100 ms and 130 on rank 1; both take 130 from outside, because rank 0 waits in backward."""

    class Slow(Net):
        def training_step(self, batch: Any, i: int) -> Tensor:
            time.sleep(0.13 if rank else 0.10)
            return super().training_step(batch, i)

    train(2, tmp_path, rank, Slow(), 20)
    if rank == 0:
        (event,) = events(tmp_path)
        assert (event["rank"], event["phase"]) == (1, "forward")
        assert event["step"] <= 20
        assert event["seconds"] - event["others_s"] > 0.015


# --- ranks with other work --------------------------------------------------------------------------------------------


class Groups(Callback):
    """The ranks that are compared."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.found = groups_with_same_work(trainer.strategy, trainer.strategy.parallel.mesh.shape)


@on_ranks(2)
def test_ranks_with_other_numbers_of_virtual_ranks_are_not_compared(rank: int, world_size: int, tmp_path: Path) -> None:
    options = {"virtual_ranks": 3, "virtual_ranks_per_rank": (2, 1)}
    strategy = ZeROStrategy(1, parallel=options)  # type: ignore[arg-type]
    with clock_of_the_test() as clock:
        groups = Groups()
        train(strategy, tmp_path, rank, Timed(clock, rank, slow=None), 60, callbacks=[groups])
        assert groups.found == [[0], [1]]
    if rank == 0:
        assert events(tmp_path) == []


@pytest.mark.wide
@pytest.mark.parametrize("slow", [None, 1])
@on_ranks(4)
def test_a_stage_of_a_pipeline_is_compared_with_itself(
    rank: int, world_size: int, slow: int | None, tmp_path: Path
) -> None:
    """Ranks 0 and 1 are the first stage, 2 and 3 the second one, which has twice the work."""
    options = {"stage": 1, "parallel.pipeline.size": 2, "parallel.pipeline.micro_batches": 4}

    with clock_of_the_test() as clock:

        class Piped(GPTModule):
            def training_step(self, *args: Any, **kwargs: Any) -> Any:
                clock.wait(0.04 if rank >= 2 else 0.01)
                clock.wait(0.01 if rank == slow else 0.0)
                return super().training_step(*args, **kwargs)

        groups = Groups()
        trainer = trainer_of(
            ZeROStrategy(**nested(options)), max_epochs=1, logger=logger_of(tmp_path, rank), log_every_n_steps=20,
            callbacks=[Monitor(), groups],
        )  # fmt: skip
        trainer.fit(Piped(Run(options, steps=40)))
        assert groups.found == [[0, 1], [2, 3]]
    if rank == 0:
        assert [(e["rank"], e["peers"]) for e in events(tmp_path)] == ([] if slow is None else [(slow, 1)])


@on_ranks(1)
def test_one_rank_has_nothing_to_compare(rank: int, world_size: int, tmp_path: Path) -> None:
    with clock_of_the_test() as clock:
        train(2, tmp_path, rank, Timed(clock, rank, slow=0), 60)
    assert events(tmp_path) == []
    assert "zero_stragglers" not in (tmp_path / "0" / "metrics.csv").read_text()


@on_ranks(2)
def test_a_store_that_fails_ends_the_comparison_and_not_the_fit(rank: int, world_size: int, tmp_path: Path) -> None:
    def fails(*_: Any) -> None:
        raise torch.distributed.DistStoreError("gone")

    with clock_of_the_test() as clock, pytest.MonkeyPatch.context() as patch:
        patch.setattr(stragglers.OwnTimesBoard, "write", fails)
        assert train(1, tmp_path, rank, Timed(clock, rank, slow=1), 60).global_step == 60
    if rank == 0:
        assert events(tmp_path) == []
