"""Converted transformers models whose experts are sharded over ranks, against the same model on one."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ls_strategy.distributed.axis import Axis
from ls_strategy.distributed.comm import Comm, make_comm
from ls_strategy.moe.convert import ConvertedMoE, convert_moe
from ls_strategy.moe.losses import moe_losses
from ls_strategy.moe.parallel import apply_expert_parallel
from ls_strategy.testing import spawn
from tests.dist.ranks import assert_close, assert_equal
from tests.unit.test_moe_convert import EXPERTS, make_model

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")

BATCH, LENGTH, NEW = 4, 6, 5


def samples() -> Tensor:
    return torch.randint(0, 50, (BATCH, LENGTH), generator=torch.Generator().manual_seed(4))


def step(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Loss summed over the tokens, logits, and gradients."""
    logits = model(input_ids=ids).logits
    targets = ids.roll(-1, 1).flatten()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "logits": logits.detach(), **grads}


def expert_parallel(model: Any, axis: Axis, *, replicated: bool = False, **options: Any) -> set[str]:
    """Convert and shard; returns the names of the sharded parameters."""
    convert_moe(model, **options)
    parts = apply_expert_parallel(model, axis, tensor_axis=axis if replicated else None)
    blocks = [m for m in model.modules() if isinstance(m, ConvertedMoE)]
    stacked = [p for block in blocks for p in block.get_submodule("experts").parameters()]
    assert sorted(parts) == sorted(id(p) for p in stacked)
    assert all(p.shape == parts[id(p)].shape and len(p) == EXPERTS // axis.size for p in stacked)
    return {name for name, p in model.named_parameters() if id(p) in parts}


def gathered(result: dict[str, Tensor], parts: set[str], axis: Axis, *, replicated: bool = False) -> dict[str, Tensor]:
    """Results of the ranks, together."""
    together: dict[str, Tensor] = {}
    for key, value in result.items():
        if key in parts or (key == "logits" and not replicated):
            together[key] = axis.all_gather(value, 0)
        else:
            together[key] = value if replicated else axis.all_reduce(value)
    return together


CASES = [
    (name, dtype, replicated)
    for name in ("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "DeepseekV2", "DeepseekV3", "GptOss")
    for dtype in (torch.float64, torch.float32)
    for replicated in (False, True)
    # DeepSeek's routers compute in fp32 whatever the dtype of the model is.
    if dtype == torch.float32 or not name.startswith("Deepseek")
]
"""Model, dtype, and whether all ranks get the same tokens, as with tensor parallelism, and dispatch a part each."""


DROPPING = {"drop_tokens": True, "capacity_factor": 0.75, "min_capacity": 1, "balance_loss": 0.5}
PROMPTS = {2: (1, 3), 4: (1, 1, 1, 1)}
"""Of each rank, for so many ranks."""


def everything(rank: int, world_size: int) -> dict[int, list[dict[str, Tensor]]]:
    """By number of ranks that share experts: results of `CASES`, with dropping, and of generation."""
    halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    pair = halves[rank // 2]
    assert isinstance(pair, dist.ProcessGroup)
    axes = (Axis("expert", Comm(pair, pair)), Axis("expert", make_comm()))
    return {axis.size: [*every_case(axis), dropping(axis), generating(axis)] for axis in axes}


def every_case(axis: Axis) -> list[dict[str, Tensor]]:
    results: list[dict[str, Tensor]] = []
    for name, dtype, replicated in CASES:
        model = make_model(name).to(dtype)
        parts = expert_parallel(model, axis, replicated=replicated)
        ids = samples() if replicated else samples().chunk(axis.size)[axis.rank]
        results.append(gathered(step(model, ids), parts, axis, replicated=replicated))
    return results


def dropping(axis: Axis) -> dict[str, Tensor]:
    model = make_model("Qwen2Moe")
    parts = expert_parallel(model, axis, **DROPPING)
    result = step(model, samples().chunk(axis.size)[axis.rank])
    result["losses"] = moe_losses(model).detach()
    return gathered(result, parts, axis)


def generating(axis: Axis) -> dict[str, Tensor]:
    model = make_model("Qwen2Moe").eval()
    expert_parallel(model, axis)
    counts = PROMPTS[axis.size]
    text = generated(model, samples().split(counts)[axis.rank])
    return {"text": axis.all_gather(text, 0, counts)}


@pytest.fixture(scope="module")
def ranks() -> list[dict[int, list[dict[str, Tensor]]]]:
    return spawn(everything, 4, timeout_s=180)


@pytest.mark.wide
@pytest.mark.parametrize("size", [2, 4])
def test_sharded_experts_compute_the_same(ranks: list[dict[int, list[dict[str, Tensor]]]], size: int) -> None:
    for i, (name, dtype, replicated) in enumerate(CASES):
        expected = step(make_model(name).to(dtype), samples())
        for results in ranks:
            what = f"{name}, {dtype}, {'replicated' if replicated else 'own'} tokens"
            assert_close(results[size][i], expected, what, 1e-12 if dtype == torch.float64 else 2e-6)


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [2, 4])
def test_capacity_is_per_rank(ranks: list[dict[int, list[dict[str, Tensor]]]], size: int) -> None:
    model = make_model("Qwen2Moe")
    convert_moe(model, **DROPPING)
    shares = [step(model, share) for share in samples().chunk(size)]  # gradients of the last are those of all
    statistics = [m.statistics() for m in model.modules() if isinstance(m, ConvertedMoE)]
    assert all(s.kept.sum() < s.routed.sum() for s in statistics)
    expected = {
        **shares[-1],
        "loss": torch.stack([share["loss"] for share in shares]).sum(),
        "logits": torch.cat([share["logits"] for share in shares]),
        "losses": moe_losses(model).detach(),
    }
    for results in ranks:
        assert_close(results[size][-2], expected, "dropping", 1e-12)


@pytest.mark.parametrize("size", [2, 4])
def test_text_is_the_same(ranks: list[dict[int, list[dict[str, Tensor]]]], size: int) -> None:
    text = generated(make_model("Qwen2Moe").eval(), samples())
    for results in ranks:
        assert_equal(results[size][-1]["text"], text, "text")


def generated(model: Any, prompts: Tensor) -> Tensor:
    return model.generate(prompts, do_sample=False, max_new_tokens=NEW, pad_token_id=0, eos_token_id=None)
