"""Models with random weights, built by ``from_config`` in ``configure_model``: the weights of DDP, bit for bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ls_strategy.lightning.strategy import ZeROStrategy
from tests.dist.ranks import assert_close, assert_equal, fit, on_ranks, weights
from tests.dist.test_pretrained import MODELS, Pretrained, tokens
from tests.marks import few_or_all, wide

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")


class FromConfig(Pretrained):
    """Not pretrained."""

    def __init__(self, name: str, converts: bool = False) -> None:
        self.name, self.converts = name, converts
        auto = "AutoModelForSequenceClassification" if name == "bert" else "AutoModelForCausalLM"
        super().__init__(Path(), auto)

    def load(self) -> Any:
        import transformers

        from ls_strategy import convert_moe

        _, config, sizes = MODELS[self.name]
        torch.manual_seed(11)
        model = getattr(transformers, self.auto).from_config(getattr(transformers, config)(**sizes))
        if self.converts:
            convert_moe(model)
        return model


def here(module: FromConfig) -> dict[str, torch.Tensor]:
    """Without what other pipeline ranks have."""
    return {name: value for name, value in module.at_start.items() if not value.is_meta}


@on_ranks(2, timeout_s=120)
def _equal_to_ddp(rank: int, world_size: int, names: tuple[str, ...]) -> None:
    for name in names:
        fit(3, ours := FromConfig(name), tokens(), max_epochs=1)
        fit("ddp", trusted := FromConfig(name), tokens(), max_epochs=1)
        assert ours.was_on_meta
        assert_equal(ours.at_start, trusted.at_start, f"{name}, at the start")
        assert_equal(ours.losses, trusted.losses, f"{name}, losses")
        assert_close(weights(ours), weights(trusted), f"{name}, at the end")


@pytest.mark.parametrize("names", few_or_all(("llama, tied",), ("gpt2", "llama", "llama, tied", "bert")))
def test_stage_3_trains_as_ddp(names: tuple[str, ...]) -> None:
    _equal_to_ddp(names=names)


LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor": ("llama", {"stage": 3, "parallel": {"tensor": 2}}),
    "tensor, tied": ("llama, tied", {"stage": 3, "parallel": {"tensor": 2}}),
    "pipeline, stage 1": ("llama", {"stage": 1, "parallel": {"pipeline": {"size": 2, "micro_batches": 2}}}),
    "pipeline": ("gpt2", {"stage": 3, "parallel": {"pipeline": {"size": 2, "micro_batches": 2}}}),
    "experts": ("qwen2-moe", {"stage": 3, "parallel": {"expert": 2}}),
    "offload": ("llama", {"stage": 3, "offload": "cpu"}),
}


@on_ranks(2, timeout_s=150)
def _parts(rank: int, world_size: int, layouts: list[str]) -> None:
    for layout in layouts:
        name, options = LAYOUTS[layout]
        converts = layout == "experts"
        strategy = ZeROStrategy(sharding={"min_unit_numel": 0}, **options)
        fit(strategy, ours := FromConfig(name, converts), tokens(), max_steps=2)
        fit("ddp", trusted := FromConfig(name, converts), tokens(), max_steps=2)
        assert ours.was_on_meta
        expected = {key: trusted.at_start[key] for key in here(ours)}
        assert_equal(here(ours), expected, f"{layout}, at the start")
        if "offload" in options:
            assert_close(ours.losses, trusted.losses, layout)


@pytest.mark.wide
@pytest.mark.parametrize(
    "layouts", [["pipeline"], wide(["tensor", "tensor, tied", "pipeline, stage 1", "experts", "offload"])]
)
def test_every_layout_starts_as_ddp(layouts: list[str]) -> None:
    _parts(layouts=layouts)


class Parallelized(FromConfig):
    """The user's own plan: layers are DTensors when the strategy gets them."""

    def configure_model(self) -> None:
        built = self.model is not None
        super().configure_model()
        if built or "tensor_parallel" not in (getattr(self.device_mesh, "mesh_dim_names", None) or ()):
            return
        for block in self.model.model.layers:
            plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
            parallelize_module(block.mlp, self.device_mesh["tensor_parallel"], plan)


@pytest.mark.wide
@pytest.mark.parametrize("stages", few_or_all((3,), (1, 3)))
@on_ranks(2)
def test_layers_that_the_user_parallelizes(rank: int, world_size: int, stages: tuple[int, ...]) -> None:
    for stage in stages:
        fit(ZeROStrategy(stage, parallel={"tensor": 2}), ours := Parallelized("llama"), tokens(), max_steps=2)
        fit("ddp", trusted := FromConfig("llama"), tokens(), max_steps=2)
        assert_equal(ours.at_start, trusted.at_start, f"stage {stage}, at the start")
