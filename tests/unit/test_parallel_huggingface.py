"""Plans that Hugging Face's models hold, made exact by the heads of their attentions."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from ls_strategy.errors import PlanError
from ls_strategy.moe.feed_forward import GatedFeedForward
from ls_strategy.moe.layer import MoE
from ls_strategy.parallel.styles import Attributes, Column, Row
from ls_strategy.parallel.tensor.huggingface import styles_of, with_plans
from ls_strategy.parallel.tensor.plan_from_names import Found
from ls_strategy.parallel.tensor.plans import resolve_tensor_plan
from tests.unit.test_parallel_plan_from_names import HEADS, KEYS, SIZE, WIDTH, refused


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.num_key_value_groups = SIZE, HEADS // KEYS
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, n * SIZE) for n in (HEADS, KEYS, KEYS))
        self.o_proj, self.router = nn.Linear(HEADS * SIZE, WIDTH), nn.Linear(WIDTH, 2)


class Carrying(nn.Module):
    """A model with a plan, given as a style for every layer of its attention."""

    config: Any = object()

    def __init__(self, **plan: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention()])
        self._tp_plan = {f"layers.*.{name}": style for name, style in plan.items()}


COLUMNS = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise")


def styles(model: Carrying, size: int = 2, prefix: str = "") -> Found:
    return styles_of(prefix, model, model._tp_plan, size)


def test_columns_keep_complete_heads() -> None:
    found = styles(Carrying(**COLUMNS), 4)
    assert found["layers.0.q_proj"] == Column(granule=SIZE)
    assert found["layers.0.k_proj"] == found["layers.0.v_proj"] == Column(granule=SIZE, copies=2)


def test_the_number_of_groups_becomes_the_local_one() -> None:
    assert styles(Carrying(**COLUMNS), 4)["layers.0"] == Attributes((("num_key_value_groups", 1),))


def test_a_number_of_groups_that_stays_is_not_set() -> None:
    assert "layers.0" not in styles(Carrying(**COLUMNS), 2)


def test_entries_of_layers_that_the_model_lacks_are_ignored() -> None:
    assert styles(Carrying(o_proj="rowwise", missing="colwise")) == {"layers.0.o_proj": Row()}


def test_replicated_layers_get_no_style() -> None:
    assert styles(Carrying(router="replicate")) == {}


def test_names_begin_with_the_prefix() -> None:
    assert list(styles(Carrying(o_proj="rowwise"), prefix="net.model")) == ["net.model.layers.0.o_proj"]


def test_the_outermost_module_with_a_plan_is_found() -> None:
    inner = Carrying(o_proj="rowwise")
    inner.layers.append(Carrying(o_proj="rowwise"))
    found = list(with_plans(nn.ModuleDict({"net": inner})))
    assert [(name, module) for name, module, _ in found] == [("net", inner)]


def test_an_empty_plan_is_no_plan() -> None:
    model = Carrying(o_proj="rowwise")
    model._tp_plan = {}
    assert list(with_plans(model)) == []


def test_the_plan_is_the_source_of_auto() -> None:
    plan = resolve_tensor_plan(nn.ModuleDict({"model": Carrying(**COLUMNS, o_proj="rowwise")}), "auto", 2)
    assert plan.source == "Hugging Face's Carrying"
    assert plan.styles["model.layers.0.o_proj"] == [Row()]


def test_moe_layers_are_replicated() -> None:
    model = Carrying(o_proj="rowwise")
    moe = MoE(WIDTH, lambda: GatedFeedForward(WIDTH, 8), 2)
    model.layers.append(moe)
    model._tp_plan = dict.fromkeys((f"layers.*.{name}" for name, _ in moe.named_modules() if name), "colwise")
    assert not [name for name in styles(model) if name.startswith("layers.1")]


def test_heads_that_are_not_divisible_are_refused() -> None:
    with pytest.raises(PlanError, match=r"4 attention heads, which is not divisible by parallel.tensor=3"):
        styles(Carrying(**COLUMNS), 3)


def test_a_style_without_an_equivalent_is_refused_with_the_layer() -> None:
    message = refused(Carrying(router="ep_router"))
    assert "plan for 'layers.0.router' (Linear)" in message
    assert "tensor parallelism does not shard these experts" in message


def test_experts_of_another_layout_are_refused() -> None:
    assert "which requires experts with the parameters gate_up_proj" in refused(Carrying(router="moe_tp_experts"))


def test_a_sharded_bare_parameter_is_refused() -> None:
    model = Carrying()
    model._tp_plan = {"layers.*.router.weight": "colwise"}
    with pytest.raises(PlanError, match=r"shards the parameter layers.0.router.weight \(Linear\) as 'colwise'"):
        styles(model)
