"""Islands that are not in the last round: they end with the global weights, or with an error."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from ls_strategy import ConfigError, StateError
from ls_strategy.extras.islands.client import HubClient
from ls_strategy.extras.islands.hub import Hub
from ls_strategy.extras.islands.link import HubLostError
from ls_strategy.extras.islands.member import Member, Result
from ls_strategy.extras.islands.server import HubServer
from ls_strategy.testing import free_port
from tests.dist.islands import diloco, hub, on_islands
from tests.dist.ranks import Net, batches, trainer_of

pytestmark = pytest.mark.dist

STEPS, EVERY = 6, 2


@contextlib.contextmanager
def impatient(folder: Path, ranks: int) -> Iterator[str]:
    """A hub that does not wait for islands that are late, once all ranks have trained a step; yields its address."""
    decides = Hub(2, 60.0)
    server = HubServer(decides, host="127.0.0.1", port=0, secret="")

    def lose_patience() -> None:
        while len(list(folder.glob("trains-*"))) < ranks and not (folder / "over").exists():
            time.sleep(0.05)
        decides._patience_s = 3.0

    threads = [threading.Thread(target=server.serve), threading.Thread(target=lose_patience)]
    for thread in threads:
        thread.start()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        (folder / "over").touch()
        server.close()
        for thread in threads:
            thread.join()


class Waits(Callback):
    """Until the other island has ended: after a step, or at the end."""

    def __init__(self, step: int, folder: Path) -> None:
        self.step, self.folder = step, folder

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        (self.folder / f"trains-{os.getpid()}").touch()
        if trainer.global_step == self.step < STEPS:
            self.wait()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.step == STEPS:
            self.wait()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        (self.folder / "ended").touch()

    def wait(self) -> None:
        while not (self.folder / "ended").exists():
            time.sleep(0.05)


def train(island: int, rank: int, meet: str, folder: Path, late: int, options: dict[str, Any]) -> dict[str, Any]:
    """Island 1 waits after step ``late`` until island 0 has ended."""
    torch.manual_seed(0)
    module, exchange = Net(), diloco(meet, island, every=EVERY, **options)
    other = Waits(late if island else -1, folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = trainer_of(2, callbacks=[other, exchange], max_steps=STEPS, max_epochs=-1)
        error = ""
        try:
            trainer.fit(module, batches(64))
        except (ConfigError, StateError) as raised:
            error = str(raised)
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    said = " ".join(str(w.message) for w in caught)
    return {"weights": weights, "error": error, "said": said, "round": exchange.round}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("after", "options"),
    [(STEPS, {}), (STEPS - 1, {}), (1, {}), (1, {"delay": 1}), (STEPS, {"delay": 1}), (1, {"fragments": 2})],
    ids=["last round", "last two rounds", "all rounds", "all rounds, later", "last round, later", "fragments"],
)
@pytest.mark.sample(1)
def test_an_island_that_is_late_for_the_last_round_ends_with_the_global_weights(
    after: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """It ended with its own, and with exit code 0."""
    with impatient(tmp_path, 4) as meet:
        first, second = on_islands(2, train, meet, tmp_path, after, options)
    assert {rank["error"] for rank in (*first, *second)} == {""}
    assert all(torch.equal(rank["weights"], first[0]["weights"]) for rank in (*first, *second))
    assert "island 1 was too late for the last round" in second[0]["said"]


def cut(folder: Path) -> None:
    """Break the connection when the last contribution was sent, and wait for the sign to go on."""
    real = HubClient.ask

    def ask(self: HubClient, what: str, line: dict[str, Any], data: Any = b"") -> Any:
        if what != "exchange" or not line["ends"] or (folder / "cut").exists():
            return real(self, what, line, data)
        (folder / "cut").touch()

        def close() -> None:
            time.sleep(1.0)  # the contribution is there
            self.close()

        threading.Thread(target=close).start()
        try:
            return real(self, what, line, data)
        except HubLostError:
            while not (folder / "go on").exists():
                time.sleep(0.05)
            raise

    HubClient.ask = ask  # type: ignore[method-assign]


def interrupted(island: int, rank: int, meet: str, folder: Path) -> dict[str, Any]:
    if island:
        cut(folder)
    else:
        real = HubClient.ask

        def later(self: HubClient, what: str, line: dict[str, Any], data: Any = b"") -> Any:
            while what == "exchange" and line["ends"] and not (folder / "cut").exists():
                time.sleep(0.05)
            if what == "exchange" and line["ends"]:
                time.sleep(2.0)  # island 1 has lost its connection
            return real(self, what, line, data)

        HubClient.ask = later  # type: ignore[method-assign]
    return train(island, rank, meet, folder, -1, {})


@pytest.mark.wide
def test_an_island_whose_connection_breaks_in_the_last_round_ends_with_the_global_weights(tmp_path: Path) -> None:
    (tmp_path / "go on").touch()
    with hub(patience_s=10.0) as meet:
        ((first,), (second,)) = on_islands(1, interrupted, meet, tmp_path)
    assert first["error"] == second["error"] == ""
    assert torch.equal(first["weights"], second["weights"])


@pytest.mark.wide
def test_a_last_round_that_cannot_be_repeated_with_all_islands_is_an_error(tmp_path: Path) -> None:
    """The hub is lost when one island has its answer and the other one has not: it repeated the round alone."""
    port = free_port()
    command = [sys.executable, "-m", "ls_strategy.cli", "meet", "--islands=2", f"--port={port}", "--patience=10"]
    hubs = [subprocess.Popen(command)]

    def replace() -> None:
        while not (tmp_path / "ended").exists() and not (tmp_path / "over").exists():
            time.sleep(0.05)
        hubs[0].kill()
        hubs[0].wait()
        hubs.append(subprocess.Popen([*command[:-1], "--patience=2"]))
        (tmp_path / "go on").touch()

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        ((first,), (second,)) = on_islands(1, interrupted, f"127.0.0.1:{port}", tmp_path)
    finally:
        (tmp_path / "over").touch()
        thread.join()
        for each in hubs:
            each.kill()
            each.wait()
    assert first["error"] == ""
    assert "the hub was lost in the last round, and islands [0] do not take part in it again" in second["error"]


def apart(island: int, rank: int, meet: str, what: str) -> str:
    real, rounds = Member.settle, [0]

    def settle(self: Member) -> Result:
        rounds[0] += 1
        result = real(self)
        return Result(what) if rank and rounds[0] == 2 else result  # type: ignore[arg-type]

    Member.settle = settle  # type: ignore[method-assign]
    try:
        trainer_of(2, callbacks=[diloco(meet, 0, islands=1, every=2)], max_steps=4, max_epochs=-1).fit(Net(), batches())
    except StateError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", ["missed", "fetch", "ends"])
@pytest.mark.sample(1)
def test_ranks_that_lose_the_hub_one_by_one_are_an_error_on_every_rank(what: str) -> None:
    """Else each would wait for the others in another place."""
    with hub(1) as meet:
        (texts,) = on_islands(2, apart, meet, what, islands=1)
    assert all(f"a round is 'done', '{what}' on ranks 0 to 1" in text for text in texts)
