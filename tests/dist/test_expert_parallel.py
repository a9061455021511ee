"""Experts sharded over ranks: losses, gradient norms and weights are those of DDP, where every rank has all experts."""

from __future__ import annotations

import importlib.util
from itertools import product
from typing import Any

import pytest
import torch

from ls_strategy import convert_moe
from ls_strategy.testing import spawn
from recipes.gpt.network import GPT, GPTConfig
from tests.dist.parallel_runs import (
    SHAPE,
    Module,
    Run,
    assert_as_plain,
    assert_consolidates,
    assert_resumed,
    assert_same_bits,
    plain,
    start,
    train_all,
    unequal,
)
from tests.marks import wide

pytestmark = pytest.mark.dist

CAPACITY = {"drop_tokens": True, "capacity_factor": 1.0, "min_capacity": 2}
DROPLESS = {"drop_tokens": False}
ROUTINGS: dict[str, dict[str, Any]] = {
    "capacity, k=1": {**CAPACITY, "k": 1},
    "capacity, k=2": {**CAPACITY, "k": 2},
    "dropless, k=1": {**DROPLESS, "k": 1},
    "dropless, k=2": {**DROPLESS, "k": 2},
}
STAGES = (1, 2, 3)


ALONE = {"balance_loss": 0.0, "second_expert_sampling": False}
"""Without what sees a rank's tokens alone, or draws by rank."""


QUICK = {(2, 2, "capacity, k=1"), (2, 2, "dropless, k=2")}


@pytest.mark.parametrize(("stage", "routing"), [wide(2, "capacity, k=1"), (3, "dropless, k=2")])
def test_eight_steps_are_those_of_ddp(stage, routing):
    runs = [Run({"stage": stage, "parallel.expert": 2}, experts=ROUTINGS[routing], steps=8)]
    assert_as_plain(2, runs, plain_ranks=2)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("world", "size", "routing"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in product((2, 4), (1, 2, 4), ROUTINGS)
        if case[0] >= case[1]
    ],
)
def test_losses_norms_and_weights_are_those_of_ddp(world, size, routing):
    """Stage against stage bit for bit. Random token selection and sampling draw the same numbers in all runs."""
    runs = [Run({"stage": s, "parallel.expert": size}, experts=ROUTINGS[routing]) for s in STAGES]
    assert_same_bits(assert_as_plain(world, runs, plain_ranks=world))


@pytest.mark.wide
def test_batches_on_four_ranks_are_one_batch_on_one():
    """Nothing depends on the number of ranks, if nothing sees a rank's tokens alone."""
    assert_as_plain(4, [Run({"stage": 2, "parallel.expert": 4}, experts=ROUTINGS["dropless, k=2"] | ALONE)])


VARIANTS: dict[str, dict[str, Any]] = {
    "residual": {"use_residual": True},
    "sigmoid, groups, bias": {
        "score": "sigmoid", "groups": 2, "top_groups": 1, "bias_update_rate": 1e-3, "balance_loss": 0.0, "k": 2,
    },
    "z": {"z_loss": 1e-3},
}  # fmt: skip


@pytest.mark.wide
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_the_layer(variant):
    experts = ROUTINGS["dropless, k=1"] | VARIANTS[variant]
    run = Run({"stage": 3, "parallel.expert": 2}, experts=experts)
    whole = Run({"stage": 1}, experts=experts)
    expected, found = start(2, [whole, run])
    assert not unequal(expected, [run], [found])
    if "bias_update_rate" in experts:
        biases = [v for k, v in expected.weights.items() if k.endswith("router.bias")]
        assert len(biases) == 2
        assert all(b.abs().max() > 0 for b in biases)


@pytest.mark.slow
def test_with_offload_recompute_clipping_and_accumulation():
    experts = ROUTINGS["capacity, k=2"]
    shared: dict[str, Any] = {"parallel.expert": 2}
    runs = [
        Run({**shared, "stage": 3, "offload.optimizer": "cpu", "offload.parameters": "cpu"}, experts=experts),
        Run({**shared, "stage": 2, "activations.checkpointing": "full"}, experts=experts),
        Run({**shared, "stage": 3, "activations.checkpointing": "selective"}, experts=experts),
        Run({**shared, "stage": 1}, experts=experts, trainer={"gradient_clip_val": 0.5}),
        Run({**shared, "stage": 2}, experts=experts, trainer={"accumulate_grad_batches": 2}),
        Run({**shared, "stage": 0}, experts=experts, trainer={"accumulate_grad_batches": 2}),
    ]
    assert_as_plain(2, runs, plain_ranks=2)


@pytest.mark.wide
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_with_divided_layers(size):
    """Experts are folded over data- and tensor-parallel ranks: each of these sends a part of the tokens."""
    experts = ROUTINGS["dropless, k=2"]
    plan = {f"model.{k}": v for k, v in GPT(GPTConfig(**SHAPE)).tensor_parallel_plan().items() if ".mlp" not in k}
    options = {"parallel.tensor.size": 2, "parallel.tensor.plan": plan, "parallel.expert": size}
    runs = [Run({"stage": s, **options}, experts=experts) for s in STAGES]
    tokens = {"parallel.tensor.sequence_parallel": True}
    runs.append(Run({"stage": 2, **options, **tokens}, experts=experts | ALONE))
    runs.append(Run({"stage": 3, **options, **tokens, "parallel.expert": 1}, experts=experts | ALONE))
    assert_as_plain(4, runs, plain_ranks=2)


@pytest.mark.wide
def test_with_sequence_parallelism():
    experts = ROUTINGS["dropless, k=1"] | ALONE
    assert_as_plain(2, [Run({"stage": 2, "parallel.context": 2, "parallel.expert": 2}, experts=experts)])


@pytest.mark.wide
def test_the_plan_counts_what_is_sent():
    """Dense states go over all ranks, an expert's over those that hold it."""
    steps, experts = 5, ROUTINGS["dropless, k=1"]
    runs = [Run({"stage": s, "parallel.expert": 2}, experts=experts, steps=steps) for s in STAGES]
    for rank in spawn(train_all, 4, runs, init_process_group=False):
        for outcome in rank:
            sent = sum(outcome.notes["zero"][kind] for kind in ("all_gather", "reduce_scatter"))
            assert sent == steps * outcome.notes["plan"].elements_sent()


CHECKPOINT_STEPS = 8


@pytest.mark.wide
@pytest.mark.parametrize("save_as", ["sharded", pytest.param("file", marks=pytest.mark.slow)])
def test_a_checkpoint_goes_on_at_any_size(tmp_path, save_as):
    """Saved after 4 of 8 steps with experts over 2 ranks, resumed over 1, 2 and 4."""
    experts = ROUTINGS["dropless, k=2"] | ALONE
    uninterrupted = plain(Run(experts=experts, steps=CHECKPOINT_STEPS))
    half, path = CHECKPOINT_STEPS // 2, str(tmp_path / "saved.ckpt")
    run = Run(
        {"stage": 2, "parallel.expert": 2, "checkpoint.format": save_as},
        experts=experts, steps=CHECKPOINT_STEPS, save=(half, path),
    )  # fmt: skip
    start(4, [run])
    for world, options in (
        (2, {"stage": 3}), (4, {"stage": 1, "parallel.expert": 4}), (4, {"stage": 3, "parallel.expert": 2}),
    ):  # fmt: skip
        run = Run(options, experts=experts, steps=CHECKPOINT_STEPS, resume=path)
        assert_resumed(world, [run], uninterrupted, half)


@pytest.mark.wide
def test_a_folder_saved_in_parts_consolidates_to_the_single_file(tmp_path):
    path = {kind: str(tmp_path / f"{kind}.ckpt") for kind in ("sharded", "file", "consolidated")}
    options = {"stage": 2, "parallel.expert": 2}
    for kind in ("sharded", "file"):
        run = Run(
            {**options, "checkpoint.format": kind}, experts=ROUTINGS["capacity, k=1"], steps=2, save=(2, path[kind])
        )
        start(4, [run])
    assert_consolidates(path["sharded"], path["file"], path["consolidated"])


# --- a model of transformers -----------------------------------------------------------------------------------------


class Mixtral(Module):
    """Built with all experts by every rank, converted unless the run is the trusted one."""

    def __init__(self, run: Run) -> None:
        from transformers import MixtralConfig, MixtralForCausalLM

        super().__init__(run)
        config = MixtralConfig(
            vocab_size=SHAPE["vocab_size"], hidden_size=32, intermediate_size=40, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, use_cache=False,
        )  # fmt: skip
        self.model = MixtralForCausalLM(config)
        if run.options is not None:
            convert_moe(self.model)

    def configure_model(self) -> None:
        """It is there."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens_BT, targets_BT = batch
        logits = self.model(input_ids=tokens_BT).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets_BT.flatten())


@pytest.mark.wide
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_a_converted_model():
    runs = [
        Run({"stage": 3, "parallel.expert": 2}),
        Run({"stage": 2, "parallel.expert": 4}),
        Run({"stage": 1, "parallel.expert": 2, "parallel.tensor.size": 2}),
    ]
    assert_as_plain(4, runs, Mixtral)
