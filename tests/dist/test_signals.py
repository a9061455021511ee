"""SIGTERM, SIGINT and kill -9 at any moment of a fit, to the launcher or to one rank: all processes end, soon."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ls_strategy.testing import RankDiedError, spawn
from tests.dist.ranks import Net, batches, quiet, trainer_of
from tests.limits import wall
from tests.marks import slow
from tests.processes import is_running

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.wide, pytest.mark.timeout(400)]

PROGRAM = """
import gc, os, signal, sys, time
from pathlib import Path

signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell has started in the background ignores it
folder, strategy, how = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
rank = int(os.environ.get("LOCAL_RANK", "0"))
(folder / f"rank{rank}.pid").write_text(str(os.getpid()))

import lightning as L
from datetime import timedelta
from ls_strategy import ZeROStrategy
from tests.dist.ranks import Net, batches, quiet

class Program(Net):
    def on_train_start(self):
        gc.collect()  # Python drops a KeyboardInterrupt that meets it in a ``__del__``, and imports leave some behind
        (folder / f"rank{self.global_rank}.pid").write_text(str(os.getpid()))  # forked: the lines above did not run
        (folder / f"rank{self.global_rank}.trains").touch()

    def on_validation_start(self):
        (folder / f"rank{self.global_rank}.validates").touch()

    def validation_step(self, batch, i):
        if how == "validation":
            time.sleep(0.05)
        super().validation_step(batch, i)

    def on_train_batch_end(self, *_):
        if how == "sleep" and self.global_rank == 1 and self.trainer.global_step == 2:
            time.sleep(1000)

if __name__ == "__main__":
    quiet()
    options = {"start_method": "fork"} if how == "fork" else {}
    if how == "sleep":
        options["timeout"] = timedelta(seconds=15)  # also of the rendezvous
    trainer = L.Trainer(
        accelerator="cpu", devices=2,
        strategy=strategy if strategy == "ddp" else ZeROStrategy(int(strategy), **options),
        max_epochs=-1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=2, num_sanity_val_steps=0, val_check_interval=4,
    )
    trainer.fit(Program(), batches(64), batches(800 if how == "validation" else 8))
"""


class Run:
    """The program on two ranks."""

    def __init__(self, folder: Path, *words: str, torchrun: bool = False) -> None:
        self.folder = folder
        (folder / "program.py").write_text(PROGRAM)
        start = [sys.executable]
        if torchrun:
            start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        environment = {k: v for k, v in os.environ.items() if k not in ("MASTER_PORT", "LOCAL_RANK", "WORLD_SIZE")}
        self.log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            [*start, str(folder / "program.py"), str(folder), *words],
            env={**environment, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            stdout=self.log, stderr=self.log, start_new_session=True,
        )  # fmt: skip

    def pid(self, rank: int) -> int:
        return int((self.folder / f"rank{rank}.pid").read_text())

    def wait_for(self, what: str) -> None:
        """``trains``, ``validates`` or ``pid``, of both ranks."""
        deadline = time.monotonic() + wall(120)
        while not all((self.folder / f"rank{r}.{what}").exists() for r in range(2)):
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def said(self) -> str:
        return (self.folder / "log").read_text()[-3000:]

    def ends_within(self, seconds: float) -> None:
        """The launcher and both ranks."""
        deadline = time.monotonic() + seconds
        pids = {"launcher": self.process.pid}
        pids |= {p.stem: int(p.read_text()) for p in self.folder.glob("rank*.pid")}
        while running := [name for name, pid in pids.items() if is_running(pid)]:
            self.process.poll()
            assert time.monotonic() < deadline, f"{running} still run after {seconds} s\n{self.said()}"
            time.sleep(0.05)

    def close(self) -> None:
        for pid in (self.process.pid, *(int(p.read_text()) for p in self.folder.glob("rank*.pid"))):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(10)
        self.log.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(*words: str, torchrun: bool = False) -> Run:
        folder = tmp_path / str(len(runs))
        folder.mkdir()
        runs.append(Run(folder, *words, torchrun=torchrun))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


def strike(run: Run, target: str, number: int) -> None:
    pid = run.process.pid if target == "launcher" else run.pid(int(target[-1]))
    os.kill(pid, number)


@pytest.mark.parametrize("target", ["launcher", slow("rank1")])
def test_sigterm_ends_all_processes(start: Callable[..., Run], target: str) -> None:
    run = start("2", "plain")
    run.wait_for("trains")
    strike(run, target, signal.SIGTERM)
    run.ends_within(20)


class Struck(Net):
    """Rank 1 alone gets SIGTERM where no training batch follows."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def strike(self, where: str) -> None:
        if self.where == where and self.global_rank == 1:
            self.where = ""
            os.kill(os.getpid(), signal.SIGTERM)

    def training_step(self, batch: Any, i: int) -> Any:
        if self.trainer.global_step == 3:
            self.strike("last step")
        return super().training_step(batch, i)

    def on_train_epoch_end(self) -> None:
        self.strike("end of the epoch")

    def test_step(self, batch: Any, i: int) -> None:
        if i == 3:
            self.strike("last test")
        super().validation_step(batch, i)


def struck(rank: int, world_size: int, stage: int, where: str) -> str:
    quiet()
    trainer, module = trainer_of(stage, max_epochs=1), Struck(where)
    try:
        if where == "last test":
            trainer.test(module, batches())
        else:
            trainer.fit(module, batches())
    except SIGTERMException:
        return f"SIGTERM after step {trainer.global_step}"
    return "not ended"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("stage", "where"),
    [
        (1, "end of the epoch"),
        (3, "last step"),
        slow(0, "last step"),
        slow(2, "last step"),
        slow(3, "end of the epoch"),
    ],
)
def test_sigterm_to_one_rank_at_the_end_of_a_fit_ends_all(stage: int, where: str) -> None:
    assert spawn(struck, 2, stage, where, init_process_group=False, timeout_s=60) == ["SIGTERM after step 4"] * 2


@pytest.mark.parametrize("stage", [slow(0), 3])
def test_sigterm_at_the_end_of_an_evaluation_has_its_default_effect(stage: int) -> None:
    with pytest.raises(RankDiedError, match=r"rank 1 ended with signal 15 \(SIGTERM\)"):
        spawn(struck, 2, stage, "last test", init_process_group=False, timeout_s=60)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["0", "2", "3"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("target", ["launcher", "rank1"])
def test_signals_at_random_moments(start: Callable[..., Run], stage: str, number: int, target: str) -> None:
    moments = random.Random(f"{stage}{number}{target}")
    for _ in range(3):
        run = start(stage, "plain")
        run.wait_for("trains")
        time.sleep(moments.random())
        strike(run, target, number)
        run.ends_within(30)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("target", ["launcher", "rank0", "rank1"])
def test_signals_under_torchrun(start: Callable[..., Run], number: int, target: str) -> None:
    run = start("2", "plain", torchrun=True)
    run.wait_for("trains")
    time.sleep(0.3)
    strike(run, target, number)
    run.ends_within(40)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["2", "3"])
@pytest.mark.parametrize("target", ["launcher", "rank1"])
def test_sigterm_during_a_long_validation(start: Callable[..., Run], stage: str, target: str) -> None:
    run = start(stage, "validation")
    run.wait_for("validates")
    strike(run, target, signal.SIGTERM)
    run.ends_within(20)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
@pytest.mark.parametrize("torchrun", [False, True])
@pytest.mark.parametrize("delay_s", [0.0, 1.0, 3.0])
def test_the_launcher_ends_before_the_fit(
    start: Callable[..., Run], number: int, delay_s: float, torchrun: bool
) -> None:
    """During imports, the rendezvous or the set-up."""
    run = start("2", "plain", torchrun=torchrun)
    run.wait_for("pid")
    time.sleep(delay_s)
    strike(run, "launcher", number)
    run.ends_within(40)


@pytest.mark.slow
def test_a_rank_that_sleeps_ends_with_the_launcher(start: Callable[..., Run]) -> None:
    run = start("2", "sleep")
    run.wait_for("trains")
    run.ends_within(75)
    assert "has ended, so it ends, too" in run.said()


@pytest.mark.slow
def test_forked_ranks_end_with_an_interrupted_launcher(start: Callable[..., Run]) -> None:
    (run := start("2", "fork")).wait_for("trains")
    strike(run, "launcher", signal.SIGINT)
    run.ends_within(30)
