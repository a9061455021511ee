"""The suite for several GPUs, ``python -m pytest -m gpus``, in small over gloo: its programs and their claims hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ls_strategy.ops import native
from ls_strategy.testing import spawn
from tests.dist.parallel_runs import differences
from tests.dist.test_parity import check_parity
from tests.gpu.memory import forecast
from tests.gpus import suite, test_layouts, test_stages
from tests.gpus.suite import FAILURES, LAYOUTS, STAGES
from tests.limits import wall

WIDTH = 96
pytestmark = [pytest.mark.wide, pytest.mark.dist]


@pytest.mark.parametrize("name", test_stages.CASES)
def test_stages_are_ddp(name: str) -> None:
    case = suite.case_of("cpu", "32-true", steps=10, **test_stages.CASES[name])
    found = suite.stages_of(2, case)
    for stage in STAGES:
        check_parity(case, found[None], found[stage])


@pytest.mark.parametrize("stage", [1, 3])
def test_without_kernels_no_bit_changes(stage: int) -> None:
    if not native.available("cpu"):
        pytest.skip("no compiled kernels")
    test_stages.check_kernels(2, "cpu", stage)


def test_the_peak_of_every_rank_is_what_was_predicted() -> None:
    """Host and device are one memory here."""
    for found in spawn(suite.peaks, 2, "cpu", WIDTH, init_process_group=False, timeout_s=170):
        for name, peak in found.items():
            predicted = forecast(name, WIDTH, 2, "cpu").peak
            assert peak == pytest.approx(predicted.device + predicted.cpu, rel=0.01), name


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if each.ranks > 4 else ()) for name, each in LAYOUTS.items()]
)
def test_layouts_have_the_numbers_of_one_device(name: str, tmp_path: Path) -> None:
    assert not suite.too_far(LAYOUTS[name], "cpu", tmp_path)


def test_a_wrong_number_is_noticed(tmp_path: Path) -> None:
    layout = LAYOUTS["uneven shards"]
    run = replace(layout.run, options={**(layout.run.options or {}), "sharding.quantized_gradients": "int8"})
    assert suite.too_far(replace(layout, run=run), "cpu", tmp_path)


def test_half_of_the_ranks_go_on(tmp_path: Path) -> None:
    whole, resumed = suite.saved_and_resumed("cpu", 4, 2, tmp_path)
    assert max(differences(whole, resumed).values()) <= 1e-5


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failing_rank_ends_all(failure: str) -> None:
    found = suite.ended("cpu", 2, failure, wall(test_layouts.END_S))
    assert found["seconds"] < wall(test_layouts.END_S)
    assert 0 not in found["statuses"]
    assert None not in found["statuses"]
