"""Nothing is done on the first device, where every new thread begins, by a rank that has the second one."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from ls_strategy import device as dev
from tests import cuda_runtime
from tests.marks import wide
from tests.simulated_device.device import NAME, SimulatedDevice, run
from tests.simulated_device.programs import ALL_THREADS, CROSSED, crossed


@pytest.mark.parametrize("name", [name if name == ALL_THREADS else wide(name) for name in CROSSED])
def test_a_fit_uses_no_other_device(name: str) -> None:
    """Whatever thread saves, reads, writes, steps, prefetches or runs backward.

    A thread that only writes files selects the device too: the collector may destroy an event in any of them.
    """
    found = run(crossed, name)
    nbytes, devices = found.result
    assert found.hazards == []
    assert nbytes == 0
    assert devices == dict.fromkeys(devices, 1)
    kinds = {re.sub(r"[-_\d]*$", "", thread) for thread in devices}
    assert name != ALL_THREADS or kinds >= {"ls_strategy-io", "ls_strategy_save", "ls_strategy-update"}


on_cuda = pytest.mark.skipif(not cuda_runtime.is_available(), reason="torch is built without CUDA, or has a GPU")


@on_cuda
def test_whether_the_device_is_in_use_is_found_without_beginning_to_use_it(tmp_path: Path) -> None:
    """Otherwise no rank could be forked any more, as notebooks do."""
    found = cuda_runtime.call("tests.cuda_runtime.replay", {"program": "not in use"}, tmp_path)
    assert found == {"before": False, "begun": False, "after": True}


@on_cuda
def test_threads_that_use_the_second_gpu_make_no_context_on_the_first(tmp_path: Path) -> None:
    """In torch's own code for CUDA. After an event it goes back to the thread's device: so threads select theirs."""
    *uses, (without, last) = cuda_runtime.call(
        "tests.cuda_runtime.replay", {"program": "second device"}, tmp_path
    ).items()
    assert [name for name, (first, _) in uses if first] == []
    assert [second for _, (_, second) in uses] == [False] + [True] * (len(uses) - 1)
    assert without == "an event, in a thread without a device"
    assert last == [True, True]


# the simulation ------------------------------------------------------------------------------------------------------


def forgets(device: torch.device) -> dict[str, Any]:
    """Do one thing after the other in a thread that has selected no device. Return what each of them raised."""
    raised: dict[str, Any] = {}
    dev.select(device)
    other, event = torch.device(NAME, 0), dev.record(device)
    mine = torch.ones(3, device=device)
    on_other = torch.empty(3, device=other)

    def try_(name: str, action: Callable[[], object]) -> None:
        line = SimulatedDevice.here.timeline
        line.hazards.clear()
        try:
            action()
        except RuntimeError as error:
            raised[name] = str(error)
        else:
            raised[name] = sorted({hazard.partition(" (")[0] for hazard in line.hazards})

    def act() -> None:
        try_("nothing", lambda: (mine + torch.zeros(3, device=device), event.query()))
        try_("a tensor without an index", lambda: torch.empty(3, device=NAME))
        try_("an operation there", lambda: on_other.add_(1))
        try_("a wait for the current device", torch.accelerator.synchronize)
        try_("a new stream", lambda: torch.Stream(NAME))
        try_("the current stream's event", lambda: torch.Event(NAME).record(torch.accelerator.current_stream()))
        try_("an event of this device", lambda: dev.record(device))
        try_("memory", lambda: dev.free_bytes(other))
        try_("pinned by hand", lambda: dev.register_host_memory(1 << 20, 1 << 12))
        try_("a wait for this device", lambda: dev.synchronize(device))
        try_("the wrong stream", lambda: event.record(torch.accelerator.current_stream()))
        try_("the wrong memory", lambda: mine.record_stream(torch.accelerator.current_stream()))
        try_("two devices", lambda: mine + on_other)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(act).result()
        thread.submit(dev.select, device).result()
        thread.submit(try_, "selected", lambda: (torch.ones(3, device=NAME), dev.record(device))).result()
    dev.unregister_host_memory(1 << 20)
    SimulatedDevice.here.timeline.hazards.clear()
    return raised


def test_what_forgets_its_device_is_noticed() -> None:
    """As torch with CUDA: after an event, it selects the device before, which makes a context there."""
    after_event = "the end of an operation on an event, in a thread that had selected no device,"
    found = run(forgets).result
    assert found == {
        "nothing": [],
        "a tensor without an index": ["an allocation"],
        "an operation there": ["an operation"],
        "a wait for the current device": ["a wait for all of its work"],
        "a new stream": ["a new stream"],
        "the current stream's event": ["a record of an event"],
        "an event of this device": [after_event],
        "memory": ["a question for its free memory"],
        "pinned by hand": ["host memory that is pinned"],
        "a wait for this device": [],
        "the wrong stream": found["the wrong stream"],
        "the wrong memory": found["the wrong memory"],
        "two devices": found["two devices"],
        "selected": [],
    }
    assert "an event of one device, a stream of another" in found["the wrong stream"]
    assert "Expected a stream of sim:1" in found["the wrong memory"]
    assert "Expected all tensors to be on the same device" in found["two devices"]
