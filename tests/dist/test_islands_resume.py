"""Islands that continue from checkpoints, that are killed, and hubs that are."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from ls_strategy import ElasticTraining, StateError, ZeROStrategy
from ls_strategy.extras.islands import client, link
from ls_strategy.extras.islands.hub import Hub
from ls_strategy.extras.islands.server import HubServer
from ls_strategy.testing import free_port
from tests.dist.islands import become, diloco, hub, on_islands
from tests.dist.ranks import Net, assert_equal, batches, fit, quiet, trainer_of, weights
from tests.dist.test_islands import STREAMING, Frozen, Normed
from tests.limits import wall

pytestmark = [pytest.mark.dist, pytest.mark.wide]

NUMEL, BATCH, STEPS = 96, 2, 17

CASES: dict[str, tuple[type[Net], int, str, dict[str, Any], int]] = {
    "stage 0": (Net, 0, "sharded", {"every": 5}, 8),
    "stage 1, after a round": (Net, 1, "sharded", {"every": 5}, 10),
    "stage 3": (Net, 3, "sharded", {"every": 5}, 8),
    "stage 3, file": (Net, 3, "file", {"every": 5}, 8),
    "stage 0, file": (Net, 0, "file", {"every": 5}, 8),
    "streaming, a round in flight": (Net, 2, "sharded", STREAMING, 10),
    "frozen": (Frozen, 2, "sharded", {"every": 5}, 8),
    "batch norm, a round in flight": (Normed, 3, "sharded", {"every": 5, "delay": 3}, 11),
}
"""Module, stage, format, options of `DiLoCo`, and the step after which the checkpoint is saved."""


class Saves(Callback):
    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def continued(island: int, rank: int, meet: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for number, (name, (kind, stage, form, options, at)) in enumerate(CASES.items()):
        path = folder / f"{island}" / f"{number}"
        path.parent.mkdir(exist_ok=True)
        limits: dict[str, Any] = {"max_steps": STEPS, "max_epochs": -1}
        found[name] = []
        for ckpt in (None, path):
            module = kind()
            strategy = ZeROStrategy(stage, sharding={"min_unit_numel": 0}, checkpoint=form)  # type: ignore[arg-type]
            callbacks = [diloco(meet, island, **options), *([] if ckpt else [Saves(at, path)])]
            trainer = trainer_of(strategy, callbacks=callbacks, **limits)
            trainer.fit(module, batches(NUMEL, BATCH), ckpt_path=ckpt, weights_only=False)
            found[name].append(weights(module))
    return found


def test_islands_that_continue_have_the_bits_of_those_that_never_stopped(tmp_path: Path) -> None:
    with hub() as meet:
        found = on_islands(2, continued, meet, tmp_path, timeout_s=170)
    for ranks in found:
        for name, (straight, again) in ranks[0].items():
            assert_equal(again, straight, name)


class Pause(Callback):
    """Waits in a step until a file is there."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.path.with_suffix(f".{os.getpid()}").touch()
            while not self.path.exists():
                time.sleep(0.02)


def through(island: int, rank: int, meet: str, path: Path) -> Any:
    module, callback = Net(), diloco(meet, island, every=5)
    callback.patience_s = 20.0
    fit(1, module, batches(NUMEL, BATCH), max_steps=STEPS, max_epochs=-1, callbacks=[callback, Pause(7, path)])
    return weights(module)


def test_the_loss_of_the_hub_changes_nothing_if_it_is_started_again(tmp_path: Path) -> None:
    """The islands' own state is all there is."""
    with hub() as meet:
        straight = on_islands(1, through, meet, touched(tmp_path / "go"))
    port = free_port()
    first = subprocess.Popen(
        [sys.executable, "-m", "ls_strategy.cli", "meet", "--islands=2", f"--port={port}", "--patience=30"]
    )

    def replace() -> None:
        while len(list(tmp_path.glob("wait.*"))) < 2:
            time.sleep(0.05)
        first.kill()
        first.wait()
        second.append(HubServer(Hub(2, 30.0), host="127.0.0.1", port=port, secret=""))
        (tmp_path / "wait").touch()
        second[0].serve()

    second: list[HubServer] = []
    thread = threading.Thread(target=replace)
    thread.start()
    try:
        found = on_islands(1, through, f"127.0.0.1:{port}", tmp_path / "wait")
    finally:
        first.kill()
        (tmp_path / "wait.1").touch()
        (tmp_path / "wait.2").touch()
        while not second:
            time.sleep(0.05)
        second[0].close()
        thread.join()
    for (now,), (before,) in zip(found, straight, strict=True):
        assert_equal(now, before, "weights")


def in_vain(island: int, rank: int, meet: str, path: Path) -> tuple[str, list[str]]:
    link._UNUSUAL_S, client._LEAST_SILENCE_S = 1.0, 0.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            callback = diloco(meet, island, every=5, patience_s=6.0)
            fit(1, Net(), batches(NUMEL, BATCH), max_steps=STEPS, max_epochs=-1, callbacks=[callback, Pause(7, path)])
        except StateError as error:
            return str(error), [str(each.message) for each in caught]
    return "", []


def test_a_hub_that_is_stopped_is_reported_and_ends_every_island_with_the_cure(tmp_path: Path) -> None:
    """Its connections stand, and the kernel accepts new ones: they waited without a word and without end."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "ls_strategy.cli", "meet", "--islands=2", f"--port={port}"])

    def stop() -> None:
        while len(list(tmp_path.glob("wait.*"))) < 2 and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGSTOP)
        (tmp_path / "wait").touch()

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        found = on_islands(1, in_vain, f"127.0.0.1:{port}", tmp_path / "wait")
    finally:
        process.kill()
        process.wait()
        thread.join()
    for ((error, said),) in found:
        assert f"the hub at 127.0.0.1:{port} does not answer: it has said nothing for" in error
        assert any(f"the hub at 127.0.0.1:{port} has said nothing for" in each for each in said)


def touched(path: Path) -> Path:
    path.touch()
    return path


def program(folder: Path, island: int, meet: str, steps: int, *, elastic: bool = False) -> Any:
    """A process that is an island; ``elastic``: with snapshots in memory."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.dist.test_islands_resume"])
    process = context.Process(target=main, args=(str(folder), island, meet, steps, free_port(), elastic))
    process.start()
    return process


def main(folder: str, island: int, meet: str, steps: int, port: int, elastic: bool) -> None:
    quiet()
    become(0, 1, port)
    os.environ.update(MASTER_ADDR="127.0.0.1", GROUP_RANK="0")

    class Slow(Net):
        def training_step(self, batch: Any, i: int) -> Any:
            time.sleep(0.05)
            return super().training_step(batch, i)

    class Notes(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            with (Path(folder) / f"steps-{island}").open("a") as file:
                file.write(f"{trainer.global_step} {time.time()}\n")

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            Path(folder, f"rounds-{island}").write_text(str(trainer.callbacks[0].round))

    module = Slow()
    callbacks: list[Callback] = [diloco(meet, island, every=5, patience_s=60.0), Notes()]
    if elastic:
        callbacks.append(ElasticTraining(5, memory=f"{folder}/memory-{island}"))
    trainer = trainer_of(
        2, max_steps=steps, max_epochs=-1, callbacks=callbacks, default_root_dir=f"{folder}/island-{island}"
    )
    trainer.fit(module, batches(NUMEL, BATCH))
    torch.save(weights(module), Path(folder, f"weights-{island}"))


def _steps(folder: Path, island: int) -> list[tuple[int, float]]:
    path = folder / f"steps-{island}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(step), float(at)) for step, at in (line.split() for line in lines)]


def _until(condition: Any, what: str, process: Any) -> None:
    end = time.monotonic() + wall(120.0)
    while not condition():
        assert time.monotonic() < end, what
        assert process.is_alive(), f"{what}: exit code {process.exitcode}"
        time.sleep(0.05)


@pytest.mark.timeout(400)  # processes start slowly on a busy host
@pytest.mark.parametrize("elastic", [False, True])
def test_an_island_that_is_killed_is_left_out_and_comes_back(elastic: bool, tmp_path: Path) -> None:
    """The hub waits five minutes for an island that is late, but not for one whose connections have ended."""
    with hub(patience_s=300.0) as meet:
        first, second = (program(tmp_path, island, meet, 250, elastic=elastic) for island in (0, 1))
        try:
            _until(lambda: len(_steps(tmp_path, 1)) > 12, "island 1 does not train", second)
            second.kill()  # SIGKILL
            second.join()
            killed = time.time()
            _until(lambda: sum(at > killed for _, at in _steps(tmp_path, 0)) > 15, "island 0 does not go on", first)
            before = len(_steps(tmp_path, 1))
            second = program(tmp_path, 1, meet, 250, elastic=elastic)
            for each in (first, second):
                each.join(100)
        finally:
            for each in (first, second):
                each.kill()
    assert (first.exitcode, second.exitcode) == (0, 0)
    assert len(_steps(tmp_path, 1)) > before + 5, "the island that came back was in no round"
    last, again = (_steps(tmp_path, 1)[i][0] for i in (before - 1, before))
    if elastic:
        assert last - 4 <= again <= last + 1, "more than five steps were repeated"
    else:
        assert again == 1
    assert (tmp_path / "rounds-0").read_text() == (tmp_path / "rounds-1").read_text()
    ours, theirs = (torch.load(tmp_path / f"weights-{island}") for island in (0, 1))
    assert_equal(theirs, ours, "weights")


def alone(island: int, rank: int, meet: str) -> str:
    callback = diloco(meet, island, islands=1)
    callback.patience_s = 1.0
    try:
        trainer_of(1, max_steps=4, callbacks=[callback]).fit(Net(), batches())
    except StateError as error:
        return str(error)
    return ""


def test_without_a_hub_every_rank_raises_with_the_command_that_starts_it() -> None:
    port = free_port()
    for text in on_islands(2, alone, f"127.0.0.1:{port}", islands=1)[0]:
        assert f"Start it there: ls-strategy meet --port {port} --islands N" in text
