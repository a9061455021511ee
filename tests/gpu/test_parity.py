"""Training on a GPU is what Lightning's DDP makes of the same model, data and seeds on the same GPU.

The promises are those of `tests/dist/test_parity.py`: in fp32 equal up to the order of sums, and all stages equal bit
for bit; in 16 bit an error against fp32 of at most twice DDP's.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.dist.test_parity import STAGES, check_parity, error_of
from tests.gpu.programs import CLIPS, PRECISIONS, case_of, train, train_alone
from tests.gpu.run import each, result, run
from tests.models import Result, same_bits

LIMIT_S = 200
pytestmark = pytest.mark.timeout(LIMIT_S + 30)
CASES = list(itertools.product(PRECISIONS, CLIPS))


def programs() -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {}
    for precision, clip in CASES:
        for stage in (None, *STAGES):
            found[f"{precision}, {clip}, {stage}"] = (train, case_of(precision, clip, stage))
        found[f"{precision}, {clip}, alone"] = (train_alone, case_of(precision, clip, 3))
    return found


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Every fit, in one process."""
    return run(each, programs(), timeout_s=LIMIT_S)


def group(results: dict[str, Any], *names: Any) -> tuple[Result]:
    return (result(results, ", ".join(map(str, names))),)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("stage", STAGES)
def test_fp32_is_ddp_up_to_the_order_of_sums(results: dict[str, Any], stage: int, clip: str) -> None:
    """Notices a gradient that is lost, scaled or clipped wrongly, and a stage that trains on old weights."""
    trusted = group(results, "32-true", clip, None)
    check_parity(case_of("32-true", clip), trusted, group(results, "32-true", clip, stage))


@pytest.mark.parametrize(("precision", "clip"), CASES)
def test_stages_are_equal_bit_for_bit(results: dict[str, Any], precision: str, clip: str) -> None:
    """Also with the shortcut for one rank, which shards nothing."""
    first, *others = [group(results, precision, clip, stage)[0] for stage in (0, 1, 2, 3, "alone")]
    for other in others:
        assert same_bits(first, other)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("precision", "clip"), [c for c in CASES if c[0] != "32-true"])
def test_16_bit_error_is_at_most_twice_ddps(results: dict[str, Any], precision: str, clip: str, stage: int) -> None:
    """Notices a missing master weight, a wrong loss scale, and sums in 16 bit."""
    reference = group(results, "32-true", clip, None)
    loss, weight = error_of(reference, group(results, precision, clip, stage))
    ddp_loss, ddp_weight = error_of(reference, group(results, precision, clip, None))
    assert 0 < loss <= 2 * ddp_loss
    assert 0 < weight <= 2 * ddp_weight
