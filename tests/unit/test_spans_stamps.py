"""Ends of collectives are noted by whoever waits first, once."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from ls_strategy.spans.stamps import OWN_THREADS, Stamper


class Work:
    """Ends when its event is set."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.done, self.error, self.waits = threading.Event(), error, 0

    def wait(self) -> None:
        self.waits += 1
        assert self.done.wait(10)
        if self.error is not None:
            raise self.error


@pytest.fixture
def stamper() -> Any:
    made = Stamper()
    yield made
    made.close()


def test_the_thread_notes_the_end_without_anybody_waiting(stamper: Stamper) -> None:
    work, ends = Work(), []
    noted = threading.Event()
    stamper.follow([work], lambda at: (ends.append(at), noted.set()))  # type: ignore[func-returns-value]
    before = time.perf_counter()
    work.done.set()
    assert noted.wait(10)
    assert ends[0] >= before


def test_a_work_is_waited_for_and_noted_once(stamper: Stamper) -> None:
    work, ends = Work(), []
    followed = stamper.follow([work], ends.append)
    work.done.set()
    followed.wait()
    followed.wait()
    assert (work.waits, len(ends)) == (1, 1)


def test_a_later_work_is_not_held_up_by_an_earlier_one(stamper: Stamper) -> None:
    slow, fast = Work(), Work()
    stamper.follow([slow], lambda at: None)
    followed = stamper.follow([fast], lambda at: None)
    fast.done.set()
    followed.wait()
    assert not slow.done.is_set()
    slow.done.set()


def test_an_error_reaches_every_waiter(stamper: Stamper) -> None:
    work = Work(RuntimeError("Connection closed"))
    followed = stamper.follow([work], lambda at: None)
    work.done.set()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Connection closed"):
            followed.wait()


def test_the_thread_has_the_prefix_of_own_threads_and_ends(stamper: Stamper) -> None:
    assert stamper._thread.name.startswith(OWN_THREADS)
    stamper.close()
    assert not stamper._thread.is_alive()
