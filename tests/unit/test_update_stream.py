"""The stream of updates: jobs in order, the next one read during the present one's work; nothing after an error."""

from __future__ import annotations

import pytest

from ls_strategy.tiers.stream import Stream


class Job:
    """Notes what is asked of it; raises where it is told to."""

    def __init__(self, name: str, notes: list[str], fails: str = "") -> None:
        self.name, self.notes, self.fails = name, notes, fails

    def _do(self, what: str) -> None:
        self.notes.append(f"{what} {self.name}")
        if what == self.fails:
            raise OSError(f"{what} of {self.name} failed")

    def read(self) -> None:
        self._do("read")

    def update(self) -> None:
        self._do("update")

    def write(self) -> None:
        self._do("write")


@pytest.mark.parametrize("threaded", [False, True])
def test_the_next_job_is_read_before_the_present_one_is_worked_on(threaded: bool) -> None:
    notes: list[str] = []
    stream = Stream(threaded=threaded)
    stream.submit([Job(name, notes) for name in "abc"]).wait()
    stream.close()
    assert notes == [
        "read a", "read b", "update a", "write a", "read c", "update b", "write b", "update c", "write c",
    ]  # fmt: skip


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("fails", ["read", "update", "write"])
def test_nothing_is_worked_on_after_a_job_that_failed(fails: str, threaded: bool) -> None:
    """Neither what was submitted with it, nor what was before or is after; all who wait learn why, every time."""
    notes: list[str] = []
    stream = Stream(threaded=threaded)
    before = stream.submit([Job("a", notes)])
    before.wait()
    failed = stream.submit([Job("b", notes), Job("c", notes, fails), Job("d", notes), Job("e", notes)])
    later = stream.submit([Job("f", notes)])
    for ticket in (failed, later, failed, stream.submit([Job("g", notes)])):
        with pytest.raises(OSError, match=f"{fails} of c failed"):
            ticket.wait()
        assert ticket.done
    before.wait()
    stream.close()
    done = [note for note in notes if not note.startswith("read")]
    expected = ["update a", "write a"] + {
        "read": [],  # c is read while b waits for its turn
        "update": ["update b", "write b", "update c"],
        "write": ["update b", "write b", "update c", "write c"],
    }[fails]
    assert done == expected
    assert "read e" not in notes
    assert "read f" not in notes
    assert "read g" not in notes
