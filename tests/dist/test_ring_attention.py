"""Ring attention, alone and with exchanged heads: the numbers are those of one process, and the traffic the formula."""

from __future__ import annotations

from typing import Any

import pytest

from ls_strategy import ConfigError, ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist.parallel_runs import Run, assert_as_plain, train_all
from tests.marks import few_or_all, slow

pytestmark = pytest.mark.dist


def options(size: int, ring: int, **more: Any) -> dict[str, Any]:
    return {"parallel.context": size, "parallel.ring": ring, **more}


@pytest.mark.parametrize("steps", few_or_all(4, 20))
def test_losses_norms_and_weights_are_those_of_one_process(steps):
    compare(2, 2, 2, steps)


@pytest.mark.wide
@pytest.mark.parametrize(("world", "size", "ring"), [(4, 4, 2), slow(4, 4, 4), slow(4, 2, 2)])
def test_on_four_ranks(world, size, ring):
    compare(world, size, ring, 20)


def compare(world: int, size: int, ring: int, steps: int) -> None:
    assert_as_plain(world, [Run({"stage": stage, **options(size, ring)}, steps=steps) for stage in (1, 3)])


@pytest.mark.wide
def test_one_key_head_on_four_ranks():
    assert_as_plain(4, [Run({"stage": 2, **options(4, ring)}, {"num_kv_heads": 1}) for ring in (2, 4)])


@pytest.mark.wide
def test_more_ranks_than_heads():
    assert_as_plain(4, [Run({"stage": 3, **options(4, 4)}, {"num_heads": 2})])


@pytest.mark.wide
@pytest.mark.parametrize(
    "more",
    [
        {"activations.checkpointing": "full"},
        {"activations.checkpointing": "selective", "activations.offload": "cpu"},
        {"activations.loss": {"chunk_bytes": 1000}, "activations.tiling": {"tokens": 3}},
    ],
    ids=str,
)
def test_with_less_memory(more):
    assert_as_plain(2, [Run({"stage": 3, **options(2, 2), **more})])


@pytest.mark.slow
def test_with_partitioned_layers():
    assert_as_plain(4, [Run({"stage": 3, **options(2, 2), "parallel.tensor": 2})])


@pytest.mark.parametrize("size", [2, slow(4)])
@pytest.mark.parametrize("kv_heads", [4, slow(1)])
def test_traffic_is_the_formula(size, kv_heads):
    """Of ``2 size`` chunks a rank sends those that belong to another one in zig-zag order; keys pass ``3 size - 2``
    times: forward, backward, and as gradients."""
    steps, blocks, batch, tokens, width = 2, 2, 4, 16, 32
    run = Run({"stage": 2, **options(size, size)}, {"num_kv_heads": kv_heads}, steps=steps)
    share = batch * tokens * width // size
    keys_values = 2 * share * kv_heads // 4
    for rank, (outcome,) in enumerate(spawn(train_all, size, [run], init_process_group=False, timeout_s=100)):
        owner = [c if c < size else 2 * size - 1 - c for c in range(2 * size)]
        moved = sum(owner[c] != rank for c in (2 * rank, 2 * rank + 1))
        exchanged = moved * (2 * share + keys_values) // 2
        found = outcome.notes["sequence"]
        # The first step also runs one block forward, to check it.
        assert found["all_to_all"] == exchanged * (2 * blocks * steps + 1)
        assert found["ring"] == keys_values * ((3 * size - 2) * blocks * steps + size - 1)


def test_a_ring_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"parallel\.context=3"):
        ZeROStrategy(parallel={"context": 4, "ring": 3})
