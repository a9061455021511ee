"""Collectives on streams of their own: nothing is used before it is there, and what need not wait does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.marks import wide
from tests.simulated_device.collectives import between_groups, fit_aside
from tests.simulated_device.device import run
from tests.simulated_device.programs import FITS, fit

NAMES = ["stage 3", *map(wide, ("stage 2, cpu, step on cpu", "stage 3, all on cpu", "stage 3, all on nvme"))]


@pytest.mark.parametrize("name", NAMES)
def test_a_fit_is_that_of_the_cpu(name: str) -> None:
    found = run(fit_aside, *FITS[name])
    assert found.hazards == []
    assert found.result["started"] == {"all_gather_single", "reduce_scatter_single"}
    expected = run(fit, *FITS[name], simulated=False).result
    assert found.result["losses"] == pytest.approx(expected["losses"], rel=1e-5)


@pytest.mark.wide
@pytest.mark.parametrize("without", ["gathers", "reductions"])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_missing_wait_is_noticed(stage: int, without: str) -> None:
    assert run(fit_without, {"stage": stage}, without).hazards


def fit_without(device: torch.device, options: dict[str, Any], without: str) -> None:
    fit_aside(device, options, {}, without=without)


@pytest.mark.parametrize(("shard", "dtype"), [(2, torch.float32), wide(2, None), wide(1, None), wide(1, torch.float32)])
def test_sums_of_groups_are_added_while_the_model_computes(shard: int, dtype: torch.dtype | None) -> None:
    """Each follows the sum inside the group in a stream of its own, before anybody asks for the average."""
    found = run(between_groups, shard, dtype, ranks=4)
    assert found.hazards == []
    assert found.result["averages"] == [[1.5], [2.5]]
    names = ["reduce_scatter_single", "all_reduce"] if shard > 1 else ["all_reduce"]
    assert [name for name, _ in found.result["begun"]] == 2 * names
    assert all(stream != found.result["model"] for name, stream in found.result["begun"] if name == "all_reduce")
    assert found.result["busy"] == 1
