"""`Failures`: reports through the store, and the errors that other ranks make of them."""

from __future__ import annotations

from typing import Any

import pytest

from ls_strategy.distributed.watchdog import failures as failures_module
from ls_strategy.distributed.watchdog.failures import Failures
from ls_strategy.errors import OutOfStepError, RankFailedError


class Store(dict[str, bytes]):
    """What is used of torch's store."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self[key] for key in keys]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Failures]:
    """Two ranks with one store."""
    store = Store()
    monkeypatch.setattr(failures_module, "default_store", lambda: store)
    monkeypatch.setattr("ls_strategy.distributed.watchdog.wait_report.default_store", lambda: store)
    return [Failures(rank, 2) for rank in range(2)]


def announce(ranks: list[Failures], *places: str) -> list[bool]:
    """Let rank 1 and then rank 0 fail; rank 1 does not wait."""
    ranks[1].announce(ValueError("theirs"), patience_s=0, place=places[1])
    return [ranks[0].announce(ValueError("mine"), patience_s=5, place=places[0])]


@pytest.mark.parametrize(("places", "together"), [("aa", True), ("ab", False)])
def test_ranks_that_fail_at_the_same_place_keep_the_group(ranks: list[Failures], places: str, together: bool) -> None:
    assert announce(ranks, *places) == [together]
    assert ranks[0].round == 1
    assert not ranks[0].announce(ValueError("again"), patience_s=0.1), "an earlier round is not counted"


def test_a_rank_that_fails_alone_waits_no_longer_than_its_patience(ranks: list[Failures]) -> None:
    assert not ranks[0].announce(ValueError("mine"), patience_s=0.1)
    assert ranks[0].round == 0


@pytest.mark.parametrize("reported", [True, False])
def test_a_broken_connection_becomes_the_error_that_was_reported(ranks: list[Failures], reported: bool) -> None:
    if reported:
        ranks[1].announce(ValueError("theirs"), patience_s=0)
        with pytest.raises(RankFailedError, match="another one failed: rank 1: ValueError: theirs") as raised:
            ranks[0].raise_if_any(RuntimeError("Connection closed"))
        assert str(raised.value.__cause__) == "Connection closed"
    else:
        ranks[0].raise_if_any(RuntimeError("Connection closed"))
    assert ranks[0].stopped is reported


def test_a_verdict_comes_before_reports(ranks: list[Failures]) -> None:
    ranks[1].announce(ValueError("theirs"), patience_s=0)
    ranks[0].where.verdict = "no rank can continue"
    with pytest.raises(OutOfStepError, match="no rank can continue"):
        ranks[0].raise_if_any(RuntimeError("Connection closed"))


def test_a_lost_store_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> Any:
        raise RuntimeError("no store")

    monkeypatch.setattr(failures_module, "default_store", lost)
    monkeypatch.setattr("ls_strategy.distributed.watchdog.wait_report.default_store", lost)
    failures = Failures(0, 2)
    assert not failures.announce(ValueError("mine"), patience_s=5)
    failures.raise_if_any(RuntimeError("Connection closed"))
