"""``activations.tiling``: the losses, norms and weights of one process, at every stage and on every axis."""

from __future__ import annotations

from typing import Any

import pytest

from ls_strategy import ConfigError, ZeROStrategy
from tests.dist.parallel_runs import Run, assert_as_plain
from tests.marks import slow

pytestmark = pytest.mark.dist

TILES: dict[str, Any] = {"activations.tiling": {"tokens": 3}}


@pytest.mark.parametrize(
    "more",
    [
        {},
        slow({"sharding.block_classes": ["SwiGLU", "Attention"]}),
        slow({"parallel.tensor": 2}),
        slow({"parallel.context": 2}),
        slow({"activations.checkpointing": "selective", "activations.offload": "cpu"}),
        slow({"activations.loss": {"chunk_bytes": 1000}, "offload.optimizer": "cpu"}),
    ],
    ids=str,
)
def test_it_changes_no_number(more):
    runs = [Run({"stage": s, **TILES, **more}, steps=4) for s in (1, 3)]
    assert_as_plain(2, runs)


def test_sharded_results_are_refused():
    with pytest.raises(ConfigError, match="sequence_parallel"):
        ZeROStrategy(activations={"tiling": "mlp"}, parallel={"tensor": {"size": 2, "sequence_parallel": True}})


@pytest.mark.slow
def test_in_a_pipeline():
    runs = [Run({"stage": s, **TILES, "parallel.pipeline": {"size": 2, "micro_batches": 2}}, steps=4) for s in (1, 3)]
    assert_as_plain(2, runs)
