"""What a unit costs the training thread, counted and not timed: lines of this package that Python executes in a step.
And what a step costs a reader: the files and functions of this package that it enters.

One rank of a world of two takes part in every collective, but sends nothing (`benchmarks.host_time`).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ls_strategy
from benchmarks.host_time import BATCH, CONTENDERS, WIDTH, Blocks, Loop, join_unsent, judged
from ls_strategy.zero.flat.parameters import ShardedParameter

PACKAGE = str(Path(ls_strategy.__file__).parent)

LINES = {0: 1025, 1: 930, 2: 770, 3: 1175}
"""At most so many per unit and step, by stage: some more than there are, since versions of Python count differently."""

FILES = {0: 19, 1: 20, 2: 19, 3: 20}
FUNCTIONS = {0: 136, 1: 144, 2: 136, 3: 158}
"""A plain step may enter so many, by stage. They only ever fall: a feature that is off is not entered."""

CALLS_OF_A_GATHER = 6
"""Calls within the package from the start of a unit's gather to the collective."""


@pytest.fixture(autouse=True)
def unsent() -> Iterator[None]:
    join_unsent()
    yield
    dist.destroy_process_group()


def warm(stage: int, units: int) -> Loop:
    """A loop that has allocated, and has learned the order of its units."""
    loop = CONTENDERS[f"zero{stage}"](Blocks(units))
    for _ in range(3):
        loop.run(torch.ones(BATCH, WIDTH))
    return loop


def lines_of_a_step(stage: int, units: int) -> int:
    loop, count = warm(stage, units), 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    gc.collect()
    gc.disable()  # collecting the loop of another test runs lines, too
    sys.settrace(trace)
    try:
        loop.run(torch.ones(BATCH, WIDTH))
    finally:
        sys.settrace(before)
        gc.enable()
    return count


@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", range(4))
def test_every_unit_costs_the_same_and_not_much(stage: int) -> None:
    """Nothing that is done for a unit walks over all others, such as those that are in flight or were published."""
    few, more, most = (lines_of_a_step(stage, units) for units in (10, 20, 30))
    assert most - more == more - few
    assert 0 < (most - more) / 10 <= LINES[stage]


def calls_of_a_step(stage: int) -> list[tuple[str, str]]:
    """Files and names of all functions of the package that a step calls, in their order."""
    loop, calls = warm(stage, 3), []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls.append((frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_code.co_qualname))

    before = sys.getprofile()
    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        loop.run(torch.ones(BATCH, WIDTH))
    finally:
        sys.setprofile(before)
        gc.enable()
    return calls


@pytest.mark.skipif(sys.version_info < (3, 11), reason="functions of the same name in two classes count as one")
@pytest.mark.parametrize("stage", range(4))
def test_a_plain_step_enters_few_files(stage: int) -> None:
    calls = calls_of_a_step(stage)
    files = sorted({file for file, _ in calls})
    assert len(files) <= FILES[stage], "\n".join(files)
    assert len(set(calls)) <= FUNCTIONS[stage]


def test_few_calls_stand_between_the_start_of_a_gather_and_its_collective() -> None:
    names = [name for _, name in calls_of_a_step(3)]
    ends = [i for i, name in enumerate(names) if name == "Comm.all_gather"]
    starts = [max(i for i in range(end) if names[i].endswith(".start_gather")) for end in ends]
    assert ends
    assert max(e - s for s, e in zip(starts, ends, strict=True)) <= CALLS_OF_A_GATHER, names[starts[0] : ends[0] + 1]


def test_no_step_looks_at_a_released_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would pass through ``__torch_function__``, which takes as long as a launch."""
    loop, seen = warm(3, 4), []
    handle = ShardedParameter.__torch_function__

    def count(func: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(func)
        return handle(func, *args, **kwargs)

    monkeypatch.setattr(ShardedParameter, "__torch_function__", staticmethod(count))
    model_parameter = torch.nn.Parameter(torch.zeros(1))
    model_parameter.__class__ = ShardedParameter
    assert model_parameter.numel() == 1
    assert len(seen) == 1, "the count works"
    loop.run(torch.ones(BATCH, WIDTH))
    assert len(seen) == 1


def test_host_time_is_judged_against_the_plain_loop_and_fsdp2_of_the_same_round() -> None:
    times = {"plain": [[1.0, 2.0, 1.0], [2.0, 3.0, 2.0]], "fsdp2": [[3.0, 6.0, 2.0], [4.0, 7.0, 3.0]]}
    times["zero3"] = [[2.0, 3.0, 2.0], [3.0, 4.0, 3.0]]
    rows = judged(times, units=10)
    assert rows["zero3"]["forward"]["us"] == {"median": 1e5, "q1": 1e5, "q3": 1e5}
    assert rows["zero3"]["backward"]["over_fsdp2"]["median"] == 0.25
    assert rows["zero3"]["step"]["us"]["median"] == 3e5
    assert rows["plain"]["backward"]["us"] == {"median": 2.5e5, "q1": 2e5, "q3": 3e5}
