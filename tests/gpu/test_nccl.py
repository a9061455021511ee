"""The engine through the real communicator: on one rank, and on two that share the GPU where NCCL allows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ls_strategy.testing import spawn
from tests.dist.ranks import assert_equal
from tests.dist.test_parity import NORM, check_parity
from tests.gpu.communicator import trained_on_ranks
from tests.gpu.programs import write_checkpoints
from tests.gpu.run import ENVIRONMENT, run
from tests.models import Case

TWO_RANKS_ON_A_GPU = (2, 30)
"""The first NCCL that allows it."""
LIMIT_S = 150
pytestmark = pytest.mark.timeout(LIMIT_S + 30)


@pytest.fixture
def written() -> dict[str, Any]:
    """What the program has found."""
    return run(write_checkpoints, timeout_s=LIMIT_S)


def test_one_rank_sends_saves_and_resumes(written: dict[str, Any]) -> None:
    """Notices a tensor of the host that is given to NCCL, and a part that the folder or the file lacks."""
    found = written
    assert {"all_gather", "reduce_scatter"} <= found["sent"]
    assert (found["sharded, exists"], found["file, exists"]) == ("folder", "file")
    for form in ("sharded", "file"):
        assert_equal(found[f"{form}, resumed"], found[form], form)
    assert_equal(found["file"], found["sharded"], "weights")


CASES = [
    Case(steps=20, **NORM),
    Case(steps=20, traits=("tied", "uneven"), accumulate=3),
]


def on_two_ranks(cases: list[Case], device: str) -> list[tuple[Any, ...]]:
    """The results of every rank, for every case."""
    env = {**ENVIRONMENT, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    ranks = spawn(trained_on_ranks, 2, cases, device, init_process_group=False, timeout_s=LIMIT_S, env=env)
    return list(zip(*ranks, strict=True))


def test_two_ranks_on_one_gpu_train_as_ddp() -> None:
    """Notices a collective with other sizes or in another order than its peer's, and sums over the wrong ranks."""
    version = torch.cuda.nccl.version()  # type: ignore[attr-defined]
    if version < TWO_RANKS_ON_A_GPU:
        pytest.skip(f"NCCL {version} does not allow two ranks on a GPU, 2.30 does")
    stages = (None, 0, 1, 2, 3)
    found = iter(on_two_ranks([case.at(stage) for case in CASES for stage in stages], "cuda"))
    for case in CASES:
        expected = next(found)
        for _ in stages[1:]:
            check_parity(case, expected, next(found))
