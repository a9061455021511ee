"""Host buffers that go round, and the memory that is registered for them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from ls_strategy import device as dev
from ls_strategy.tiers.arrival import Arrival
from ls_strategy.tiers.buffers import PAGE, AlignedBuffer
from ls_strategy.tiers.link import Link
from ls_strategy.tiers.stock import BufferStock


def test_a_free_buffer_is_used_again() -> None:
    stock = BufferStock(pin=None)
    buffer, _ = stock.take(4 * PAGE)
    stock.give(buffer)
    assert stock.take(3 * PAGE)[0] is buffer
    assert stock.total_bytes == stock.taken_bytes == 4 * PAGE


@pytest.mark.parametrize(
    ("given", "wanted", "used"), [((6, 4), 4, 1), ((9,), 4, None)], ids=["the smallest", "none of twice the size"]
)
def test_the_smallest_buffer_that_fits_is_taken(given: tuple[int, ...], wanted: int, used: int | None) -> None:
    stock = BufferStock(pin=None)
    buffers = [stock.take(pages * PAGE)[0] for pages in given]
    for buffer in buffers:
        stock.give(buffer)
    taken = stock.take(wanted * PAGE)[0]
    assert [taken is buffer for buffer in buffers] == [number == used for number in range(len(given))]


def test_unused_buffers_are_freed_after_some_rounds() -> None:
    stock = BufferStock(pin=None)
    stock.give(stock.take(PAGE)[0])
    for _ in range(stock.rounds_kept):
        stock.trim()
    assert stock.total_bytes == PAGE
    stock.trim()
    assert stock.total_bytes == 0


def test_close_frees_what_is_not_taken() -> None:
    stock = BufferStock(pin=None)
    stock.take(PAGE)
    stock.give(stock.take(2 * PAGE)[0])
    stock.close()
    assert stock.total_bytes == stock.taken_bytes == PAGE


# copies in flight ----------------------------------------------------------------------------------------------------


class Event:
    """Happens when somebody waits for it."""

    def __init__(self) -> None:
        self.happened = False

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self.happened = True


def in_flight(stock: BufferStock, count: int) -> list[tuple[AlignedBuffer, Event]]:
    """Let copies use ``count`` buffers of a page."""
    taken = [stock.take_idle(PAGE) for _ in range(count)]
    events = [Event() for _ in taken]
    for buffer, event in zip(taken, events, strict=True):
        stock.give(buffer, Arrival(event))
    return list(zip(taken, events, strict=True))


def test_a_buffer_that_no_copy_uses_is_taken_first() -> None:
    stock = BufferStock(pin=None)
    (_, first), (buffer, second) = in_flight(stock, 2)
    second.happened = True
    assert stock.take_idle(PAGE) is buffer
    assert not first.happened


@pytest.mark.parametrize(("busy", "waits"), [(None, 0), (3, 1)], ids=["rather than waits", "but not of many"])
def test_there_are_more_buffers(busy: int | None, waits: int) -> None:
    stock = BufferStock(pin=None)
    if busy is not None:
        stock.busy_bytes = busy * PAGE
    used = in_flight(stock, 3)
    taken = stock.take_idle(PAGE)
    assert [event.happened for _, event in used].count(True) == waits
    assert [event.happened for _, event in used] == [buffer is taken for buffer, _ in used]
    assert stock.total_bytes == (3 if waits else 4) * PAGE


def test_two_buffers_are_allowed_whatever_their_size() -> None:
    stock = BufferStock(pin=None)
    stock.busy_bytes = 0
    used = in_flight(stock, 1)
    assert stock.take_idle(PAGE) is not used[0][0]
    assert not used[0][1].happened


def test_values_are_staged_for_the_device() -> None:
    link, target = Link(torch.device("cpu")), torch.zeros(5, dtype=torch.bfloat16)
    for value in (1.0, 2.0):
        source = torch.full((5,), value)
        link.staged_to_device(target, lambda host, source=source: host.copy_(source)).wait_on_host()  # type: ignore[misc]
        assert torch.equal(target.float(), source)
    assert link.stock.total_bytes == PAGE


# registered memory ---------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []

    def register(_address: int, _nbytes: int) -> int:
        calls.append("register")
        return 0

    def note(name: str) -> Any:
        return lambda *_: calls.append(name)

    monkeypatch.setattr(dev, "register_host_memory", register)
    monkeypatch.setattr(dev, "unregister_host_memory", note("unregister"))
    monkeypatch.setattr(dev, "synchronize", note("synchronize"))
    return calls


@pytest.mark.wide
def test_memory_is_unregistered_with_its_last_tensor_when_no_copy_uses_it(calls: list[str]) -> None:
    tensor = AlignedBuffer(PAGE, pin=torch.device("cpu")).elements(3, torch.float32)
    part = tensor[1:]
    del tensor
    gc.collect()
    assert calls == ["register"]
    del part
    gc.collect()
    assert calls == ["register", "synchronize", "unregister"]


def test_a_child_process_leaves_the_registration_to_its_parent(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = AlignedBuffer(PAGE, pin=torch.device("cpu"))
    monkeypatch.setattr("os.getpid", lambda: -1)
    del buffer
    gc.collect()
    assert calls == ["register"]
