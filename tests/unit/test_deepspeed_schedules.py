"""Learning-rate schedules: step by step against DeepSpeed's own classes, and their states."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ls_strategy.errors import ConfigError
from ls_strategy.extras.deepspeed import schedules

CASES = [
    ("WarmupLR", {}),
    ("WarmupLR", {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-2, "warmup_num_steps": 7, "warmup_type": "linear"}),
    ("WarmupLR", {"warmup_max_lr": [1e-2, 3e-3], "warmup_num_steps": 1}),
    ("WarmupDecayLR", {"total_num_steps": 25, "warmup_num_steps": 10}),
    ("WarmupDecayLR", {"total_num_steps": 25, "warmup_min_lr": 1e-4, "warmup_num_steps": 9, "warmup_type": "linear"}),
    ("WarmupDecayLR", {"total_num_steps": 5, "warmup_num_steps": 10}),
    ("WarmupCosineLR", {"total_num_steps": 25, "warmup_num_steps": 5}),
    ("WarmupCosineLR", {"total_num_steps": 9, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.2, "warmup_num_steps": 4}),
    ("WarmupCosineLR", {"total_num_steps": 30, "warmup_num_steps": 6, "warmup_type": "linear"}),
    ("LRRangeTest", {"lr_range_test_step_size": 4, "lr_range_test_step_rate": 0.5}),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": [1e-3, 2e-3], "lr_range_test_step_size": 4, "lr_range_test_staircase": True},
    ),
    ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 8}),
    (
        "OneCycle",
        {
            "cycle_min_lr": 1e-4,
            "cycle_max_lr": [1e-2, 2e-2],
            "cycle_first_step_size": 7,
            "cycle_second_step_size": 12,
            "decay_step_size": 3,
            "decay_lr_rate": 0.1,
            "decay_mom_rate": 0.01,
        },
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 1e-4,
            "cycle_max_lr": 1e-2,
            "cycle_first_step_size": 9,
            "cycle_second_step_size": 13,
            "cycle_first_stair_count": 3,
            "cycle_second_stair_count": 4,
            "cycle_momentum": False,
        },
    ),
]


def make(cls=torch.optim.AdamW, **kwargs):
    params = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    return cls([{"params": [params[0]], "lr": 0.3}, {"params": [params[1]]}], lr=0.1, **kwargs)


def walk(kind, arguments, steps, optimizer):
    schedule = kind(optimizer, **arguments)
    seen = [[(g["lr"], g.get("betas")) for g in optimizer.param_groups]]
    for _ in range(steps):
        schedule.step()
        seen.append([(g["lr"], g.get("betas")) for g in optimizer.param_groups])
    return schedule, seen


@pytest.fixture
def theirs(monkeypatch):
    """DeepSpeed's file of schedules, without the rest of it, which takes seconds and changes the environment."""
    package = importlib.util.find_spec("deepspeed")
    if package is None:
        pytest.skip("needs deepspeed")
    utils = ModuleType("deepspeed.utils")
    utils.logger = logging.getLogger("deepspeed")
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    monkeypatch.setitem(sys.modules, "deepspeed.utils", utils)
    path = Path(package.submodule_search_locations[0]) / "runtime" / "lr_schedules.py"
    spec = importlib.util.spec_from_file_location("deepspeed_lr_schedules", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("name", "arguments"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_every_step_is_deepspeeds(name, arguments, theirs):
    _, ours_seen = walk(schedules.SCHEDULES[name], arguments, 60, make())
    _, theirs_seen = walk(getattr(theirs, name), arguments, 60, make())
    assert ours_seen == theirs_seen


def test_the_formulas_by_hand():
    """Without DeepSpeed: a few points that can be computed by hand."""
    _, seen = walk(
        schedules.WarmupLR, {"warmup_max_lr": 1.0, "warmup_num_steps": 4, "warmup_type": "linear"}, 6, make()
    )
    assert [s[0][0] for s in seen] == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    arguments = {"total_num_steps": 6, "warmup_max_lr": 1.0, "warmup_num_steps": 2, "warmup_type": "linear"}
    _, seen = walk(schedules.WarmupDecayLR, arguments, 8, make())
    assert [s[0][0] for s in seen] == [0.0, 0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    arguments = {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 2, "cycle_momentum": False}
    _, seen = walk(schedules.OneCycle, arguments, 5, make())
    assert [s[0][0] for s in seen] == [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(("name", "arguments"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_a_state_goes_on(name, arguments):
    kind = schedules.SCHEDULES[name]
    first, seen = walk(kind, arguments, 12, make())
    assert first.state_dict() == {"last_batch_iteration": 11}
    optimizer = make()
    again = kind(optimizer, **arguments)
    again.load_state_dict(first.state_dict())
    assert [(g["lr"], g["betas"]) for g in optimizer.param_groups] == seen[-1]
    first.step()
    again.step()
    assert again.get_last_lr() == first.get_last_lr()


def test_a_skipped_step_does_not_count():
    schedule = schedules.WarmupLR(make(), warmup_max_lr=1.0, warmup_num_steps=4, warmup_type="linear")
    skipped = 0
    schedule.skipped_steps = lambda: skipped
    schedule.step()
    schedule.step()
    skipped += 1
    schedule.step()
    assert schedule.get_last_lr() == [0.25, 0.25]
    schedule.step()
    assert schedule.get_last_lr() == [0.5, 0.5]


def test_rates_in_tensors_stay_there():
    optimizer = make()
    place = optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    schedule = schedules.WarmupCosineLR(optimizer, 10, warmup_num_steps=2, warmup_type="linear")
    assert float(place) == 0.0
    schedule.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] is place
    assert float(place) == 0.25


def test_momentum_without_betas_is_left_alone():
    optimizer = make(torch.optim.SGD, momentum=0.5)
    walk(schedules.OneCycle, {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 2}, 3, optimizer)
    assert [g["momentum"] for g in optimizer.param_groups] == [0.5, 0.5]
    assert all("betas" not in g for g in optimizer.param_groups)


@pytest.mark.parametrize(
    ("kind", "arguments", "word"),
    [
        (schedules.WarmupLR, {"warmup_num_steps": 0}, "warmup_num_steps"),
        (schedules.WarmupLR, {"warmup_num_steps": 2.5}, "warmup_num_steps"),
        (schedules.WarmupLR, {"warmup_type": "cubic"}, "warmup_type"),
        (schedules.WarmupLR, {"warmup_max_lr": [1.0]}, "2 parameter groups"),
        (schedules.WarmupDecayLR, {"total_num_steps": 0}, "total_num_steps"),
        (schedules.LRRangeTest, {"lr_range_test_step_size": -1}, "lr_range_test_step_size"),
        (
            schedules.OneCycle,
            {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0},
            "cycle_first_step_size",
        ),
    ],
)
def test_refused(kind, arguments, word):
    with pytest.raises(ConfigError, match=word):
        kind(make(), **arguments)
