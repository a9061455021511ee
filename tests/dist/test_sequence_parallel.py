"""Sequences sharded over ranks: the numbers are those of one process, at every stage, with every number of replicas."""

from __future__ import annotations

from typing import Any

import pytest

from ls_strategy.testing import spawn
from tests.dist.parallel_runs import (
    Run,
    assert_as_plain,
    assert_less_memory_changes_no_bit,
    assert_resumed,
    assert_same_bits,
    plain,
    start,
    train_all,
)
from tests.marks import slow

pytestmark = pytest.mark.dist


def at_stages(world: int, stages: tuple[int, ...] = (1, 2, 3), steps: int = 20, **options: Any) -> None:
    runs = [Run({"stage": s, **options}, steps=steps) for s in stages]
    assert_same_bits(assert_as_plain(world, runs))  # of the stages


def test_two_replicas_are_one_process():
    at_stages(4, (3,), 8, **{"parallel.context": 2})


@pytest.mark.wide
@pytest.mark.parametrize(("world", "size"), [(4, 2), *(pytest.param(n, n, marks=pytest.mark.slow) for n in (2, 4))])
def test_losses_norms_and_weights_are_those_of_one_process(world, size):
    at_stages(world, **{"parallel.context": size})


@pytest.mark.wide
def test_with_divided_layers():
    at_stages(4, (1, 3), **{"parallel.context": 2}, **{"parallel.tensor.size": 2})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_with_divided_layers_and_two_replicas():
    at_stages(8, (1, 3), **{"parallel.context": 2}, **{"parallel.tensor.size": 2})


@pytest.mark.wide
@pytest.mark.parametrize(
    "shape", [slow({"positions": "learned"}), {"num_kv_heads": 2}, slow({"num_kv_heads": 1})], ids=str
)
def test_variants_of_the_model(shape):
    assert_as_plain(2, [Run({"stage": 2, "parallel.context": 2}, shape, steps=8)])


@pytest.mark.wide
def test_recompute_and_offload_change_no_bit():
    assert_less_memory_changes_no_bit(2, {"stage": 3, "parallel.context": 2}, {}, steps=6)


@pytest.mark.parametrize("size", [2, slow(4)])
def test_traffic_is_eight_exchanges_per_block_and_micro_batch(size):
    """b * t * h / n elements each, of which (n - 1) / n leave; and four more, when the first step checks a block."""
    steps, blocks, b, t, h = 5, 2, 4, 16, 32
    run = Run({"stage": 2, "parallel.context": size}, steps=steps)
    one = b * t * h // size * (size - 1) // size
    for outcome in spawn(train_all, size, [run], init_process_group=False):
        assert outcome[0].notes["sequence"]["all_to_all"] == (8 * blocks * steps + 4) * one


@pytest.mark.wide
def test_a_checkpoint_goes_on_at_any_size(tmp_path):
    steps, half = 8, 4
    whole = plain(Run(steps=steps))
    path = str(tmp_path / "half.ckpt")
    shared = {"stage": 3, "parallel.context": 2}
    start(4, [Run(shared, steps=steps, save=(half, path))])
    layouts: dict[int, list[dict[str, Any]]] = {
        2: [shared, {"stage": 2, "parallel.tensor.size": 2}, {"stage": 1}],
        4: [{"stage": 1, "parallel.context": 4}, {**shared, "parallel.tensor.size": 2}],
    }
    for world, choices in layouts.items():
        runs = [Run(options, steps=steps, resume=path) for options in choices]
        assert_resumed(world, runs, whole, half)
