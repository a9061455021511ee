"""DeepSpeed's explicit form of a plan shards what the automatic plan shards; models that are known not to work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ls_strategy
from ls_strategy import PlanError
from ls_strategy.extras.inference.engine import REASONS, refuse_known
from ls_strategy.parallel.tensor.plans import resolve_tensor_plan
from ls_strategy.parallel.tensor.policy import is_policy, styles_of_policy
from ls_strategy.parallel.tensor.resolved_plan import resolve
from tests.dist.test_inference import MODELS, POLICIES


def shards(model: nn.Module, styles: Any, size: int) -> tuple[dict[str, Any], dict[tuple[int, str], int]]:
    resolved = resolve(model, styles, size)
    attributes = {key: value for key, (_, _, value) in resolved.attributes.items()}
    return {
        owned.name: (shard.dim, shard.part(owned.parameter.shape, 0, size)) for owned, shard in resolved.shards()
    }, attributes


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "by_class"), [("t5", True), ("opt", False), *((name, True) for name in POLICIES if name != "t5")]
)
def test_the_examples_of_deepspeed(name: str, by_class: bool) -> None:
    transformers = pytest.importorskip("transformers")
    model_class, config_class, options = MODELS[name]
    with torch.device("meta"):
        model = getattr(transformers, model_class)(getattr(transformers, config_class)(**options))
    policy = POLICIES[name]
    if by_class:
        classes = {type(m).__name__: type(m) for m in model.modules()}
        policy = {classes[key]: names for key, names in policy.items()}
    assert is_policy(model, policy)
    for size in (2, 4):
        automatic = resolve_tensor_plan(model, "auto", size)
        assert shards(model, styles_of_policy(model, policy, size), size) == shards(model, automatic.styles, size)


class Attention(nn.Module):
    """Names that nothing knows, and grouped heads."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 4, 8
        self.ask, self.offer = nn.Linear(width, width), nn.Linear(width, width // 2)
        self.give, self.close = nn.Linear(width, width // 2), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for m in (self.ask, self.offer, self.give))
        y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.close(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.mix = Attention()
        self.wide = nn.Linear(32, 128 if fused else 64)
        self.narrow = nn.Linear(64, 32)


class Net(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(**options) for _ in range(2))


def test_layers_of_unknown_names() -> None:
    model = Net()
    found, _ = shards(model, styles_of_policy(model, {Block: ("mix.close", ".narrow")}, 2), 2)
    parts = {name: (dim, part.shape) for name, (dim, part) in found.items() if name.startswith("blocks.1")}
    assert parts == {
        "blocks.1.mix.ask.weight": (0, (16, 32)),
        "blocks.1.mix.ask.bias": (0, (16,)),
        "blocks.1.mix.offer.weight": (0, (8, 32)),
        "blocks.1.mix.offer.bias": (0, (8,)),
        "blocks.1.mix.give.weight": (0, (8, 32)),
        "blocks.1.mix.give.bias": (0, (8,)),
        "blocks.1.mix.close.weight": (1, (32, 16)),
        "blocks.1.wide.weight": (0, (32, 32)),
        "blocks.1.wide.bias": (0, (32,)),
        "blocks.1.narrow.weight": (1, (32, 32)),
    }
    fused, _ = shards(model := Net(fused=True), styles_of_policy(model, {"Block": ("close", "narrow")}, 2), 2)
    assert fused["blocks.0.wide.weight"][1].runs == ((0, 32), (64, 32))  # of gate and of up


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({nn.Conv2d: ("x",)}, "class 'Conv2d', but the model has no module of that class.*repeated blocks: Block"),
        ({"Block": ("mix.close", "shut")}, "names 'shut', but Block has no such linear layer. Use one of mix.ask"),
        ({"Block": ()}, "names no layer of Block"),
        ({"Block": ("mix.close",)}, "'blocks.0.wide' computes 64 features, which no row-parallel layer takes"),
        ({"Block": ("mix.close", "mix.give", "narrow")}, "computes query, key and value by 2 layers"),
    ],
)
def test_policies_that_do_not_fit(policy: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        styles_of_policy(Net(), policy, 2)


def test_a_policy_is_checked_on_one_rank_too() -> None:
    with pytest.raises(PlanError, match=r"names 'shut'.*injection_policy"):
        ls_strategy.init_inference(Net(), injection_policy={Block: ("shut",)})
    assert not is_policy(Net(), {"blocks.*.wide": "column"})


@pytest.mark.parametrize("kind", REASONS)
def test_models_that_are_known_not_to_work(kind: str) -> None:
    model = Net()
    model.blocks[0].config = SimpleNamespace(model_type=kind)  # type: ignore[assignment]
    with pytest.raises(PlanError) as error:
        refuse_known(model)
    assert f"Block ({kind}) cannot be sharded: {REASONS[kind]}" in str(error.value)
    assert "tensor_parallel_size=1" in str(error.value)
