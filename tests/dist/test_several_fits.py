"""Fits one after the other in one process, as in a notebook or a search: a finished one leaves nothing behind."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from ls_strategy.config import nested
from ls_strategy.lightning.strategy import ZeROStrategy
from tests.dist.ranks import STAGES, Net, assert_close, fit, on_ranks, weights
from tests.limits import wall
from tests.marks import slow

pytestmark = pytest.mark.wide

OFFLOADS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"offload.optimizer": "cpu"},
    "drive": {"offload.optimizer": "nvme", "offload.nvme_allow_ram": True},
}


def threads() -> int:
    """Of this process, those of gloo included."""
    return len(list(Path("/proc/self/task").iterdir()))


def threads_when_ended(at_most: int) -> int:
    """As `threads`, but those that were told to end get five seconds to be gone from the kernel's list."""
    deadline = time.monotonic() + wall(5)
    while threads() > at_most and time.monotonic() < deadline:
        time.sleep(0.05)
    return threads()


@pytest.mark.parametrize("tier", [slow("device"), slow("host"), "drive"])
@on_ranks(2)
def test_nothing_of_a_fit_is_left(rank: int, world_size: int, tier: str, tmp_path: Any) -> None:
    stages = (0, 1, 2, 3) if tier == "device" else (2, 3)
    options = {**OFFLOADS[tier], **({"offload.nvme_path": str(tmp_path)} if tier == "drive" else {})}
    counts: dict[int, int] = {}
    for number in range(2):
        for stage in stages:
            strategy = ZeROStrategy(stage, **nested({"sharding.min_unit_numel": 0, **options}))
            model = Net()
            fit(strategy, model)
            engine = strategy.require_engine()
            kept = [weakref.ref(each) for each in (engine, *(f for u in engine.units for f in u.flats), model)]
            kept += [weakref.ref(p) for p in model.parameters()]
            del strategy, model, engine
            gc.collect()
            gc.collect()  # what tensors held in circles is seen when they are gone
            left = [type(each()).__name__ for each in kept if each() is not None]
            assert not left, f"stage {stage}: {left}"
            before = counts.setdefault(stage, threads())
            assert threads_when_ended(before) <= before, f"stage {stage}, fit {number}"


@on_ranks(1)
def test_a_fit_frees_the_drive_and_the_threads_of_the_one_before(rank: int, world_size: int, tmp_path: Any) -> None:
    """Trainer and model refer to each other, and Python's collector may not look at them for a long time."""
    options = nested({**OFFLOADS["drive"], "offload.nvme_path": str(tmp_path)})
    found: list[tuple[int, int]] = []
    gc.disable()
    try:
        for _ in range(3):
            fit(ZeROStrategy(2, **options), Net(), max_steps=2)
            links = [str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
            own = [thread for thread in threading.enumerate() if thread.name.startswith("ls_strategy-io")]
            found.append((sum(str(tmp_path) in link for link in links), len(own)))
    finally:
        gc.enable()
    assert found == [found[0]] * 3


@on_ranks(2)
def test_a_model_trains_on_as_under_ddp_after_the_fit_of_another(rank: int, world_size: int) -> None:
    """The hooks of gradients, which refer weakly to everything, live as long as the module."""
    expected: dict[str, Any] = {}
    for strategy in ("ddp", *STAGES):
        model = Net()
        fit(strategy, model)
        fit(strategy, Net(lr=1.0))
        gc.collect()
        fit(strategy, model)
        found = weights(model)
        expected = expected or found
        assert_close(found, expected, f"stage {strategy}")
