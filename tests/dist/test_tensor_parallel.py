"""Tensor-parallel layers: the numbers are those of one process, at every stage, with every number of replicas."""

from __future__ import annotations

from typing import Any

import pytest

from ls_strategy.testing import spawn
from tests.dist.parallel_runs import (
    Run,
    assert_as_plain,
    assert_consolidates,
    assert_resumed,
    assert_same_bits,
    plain,
    start,
    train_all,
)
from tests.marks import few_or_all, slow

pytestmark = pytest.mark.dist

STAGES = (1, 2, 3)


def at_every_stage(
    world: int, tp: int, shape: Any = None, steps: int = 20, stages: tuple[int, ...] = STAGES, **options: Any
) -> None:
    runs = [Run({"stage": s, "parallel.tensor.size": tp, **options}, shape or {}, steps=steps) for s in stages]
    assert_same_bits(assert_as_plain(world, runs))  # of the stages


@pytest.mark.parametrize("options", few_or_all({"steps": 3, "stages": (1, 3)}, {}))
def test_losses_norms_and_weights_are_those_of_one_process(options):
    """Two replicas of two ranks."""
    at_every_stage(4, 2, **options)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_one_replica(ranks):
    at_every_stage(ranks, ranks)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_ranks_of_two_replicas():
    at_every_stage(8, 4)


VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {"tied_embeddings": False},
    "grouped": {"num_kv_heads": 2},
    "gelu and learned positions": {"mlp": "gelu", "positions": "learned"},
}


@pytest.mark.wide
@pytest.mark.parametrize("shape", VARIANTS.values(), ids=VARIANTS.keys())
def test_variants_of_the_model(shape):
    at_every_stage(2, 2, shape)


@pytest.mark.wide
@pytest.mark.parametrize(("world", "tp"), [pytest.param(2, 2, marks=pytest.mark.slow), (4, 2)])
def test_tokens_between_the_layers_divided_too(world, tp):
    at_every_stage(world, tp, **{"parallel.tensor.sequence_parallel": True})


@pytest.mark.slow
def test_with_offload_recompute_and_partitioned_activations():
    shared = {"parallel.tensor.size": 2}
    runs = [
        Run({**shared, "stage": 3, "offload.optimizer": "cpu", "offload.parameters": "cpu"}),
        Run({**shared, "stage": 2, "activations.checkpointing": "full"}),
        Run({**shared, "stage": 3, "activations.checkpointing": "full", "activations.partitioning": True}),
        Run({**shared, "stage": 3, "activations.checkpointing": "selective", "activations.offload": "cpu"}),
        Run({**shared, "stage": 1}, trainer={"gradient_clip_val": 0.5}),
        Run({**shared, "stage": 1}, trainer={"accumulate_grad_batches": 2}),
    ]
    assert_as_plain(4, runs)


@pytest.mark.parametrize("tp", [2, slow(4)])
def test_traffic_is_four_sums_per_block_and_micro_batch(tp):
    """b * t * h elements each, of which a rank of n sends 2 (n - 1) / n; and those of embedding, head and loss."""
    steps = 2
    found = spawn(train_all, tp, [Run({"stage": 1, "parallel.tensor.size": tp}, steps=steps)], init_process_group=False)
    b, t, h, blocks = 4, 16, 32, 2
    sums = 4 * blocks + 2  # the embedding's in forward, the head's in backward
    per_token = 3  # of the loss: the largest logit, the sum of exponentials, the target's logit
    elements = steps * (sums * b * t * h + per_token * b * t)
    for outcome in found:
        assert outcome[0].notes["tensor"]["all_reduce"] == elements * 2 * (tp - 1) // tp


CHECKPOINT_STEPS = 8


@pytest.mark.wide
@pytest.mark.parametrize("save_as", ["sharded", slow("file")])
def test_a_checkpoint_goes_on_at_any_size(tmp_path, save_as):
    """Saved after 4 of 8 steps at one size, resumed at others."""
    whole = plain(Run(steps=CHECKPOINT_STEPS))
    half = CHECKPOINT_STEPS // 2
    layouts: dict[str, tuple[int, dict[str, Any]]] = {
        "tp2": (2, {"stage": 2, "parallel.tensor.size": 2}),
        "tp4": (4, {"stage": 3, "parallel.tensor.size": 4}),
        "tp2 dp2": (4, {"stage": 1, "parallel.tensor.size": 2}),
        "dp2": (2, {"stage": 3}),
    }
    saved: dict[str, str] = {}
    for name in ("tp2", "tp4") if save_as == "sharded" else ("tp2",):
        world, options = layouts[name]
        saved[name] = str(tmp_path / f"{name}.ckpt")
        run = Run({**options, "checkpoint.format": save_as}, steps=CHECKPOINT_STEPS, save=(half, saved[name]))
        start(world, [run])
    for world in (2, 4):
        runs = [
            Run(options, steps=CHECKPOINT_STEPS, resume=path)
            for path in saved.values()
            for ranks, options in layouts.values()
            if ranks == world
        ]
        assert_resumed(world, runs, whole, half)


@pytest.mark.wide
def test_a_folder_saved_in_parts_consolidates_to_the_single_file(tmp_path):
    path = {kind: str(tmp_path / f"{kind}.ckpt") for kind in ("sharded", "file", "consolidated")}
    options = {"stage": 2, "parallel.tensor.size": 2}
    for kind in ("sharded", "file"):
        run = Run({**options, "checkpoint.format": kind}, steps=2, save=(2, path[kind]))
        start(4, [run])
    assert_consolidates(path["sharded"], path["file"], path["consolidated"])
