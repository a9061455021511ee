"""What stays in fp32 in the 16-bit precisions: by class, by name, and by the lists of a model's author."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ls_strategy import PlanError, PrecisionConfig
from ls_strategy.zero.setup.kept import KeptInFp32, kept_in_fp32
from tests.unit.one_rank import engine_on


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2))
        self.register_buffer("bias", torch.zeros(2))
        self.scale = nn.Linear(2, 2)
        self.scale.register_buffer("count", torch.zeros(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = Router(), nn.Linear(2, 2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm, self.gates = nn.BatchNorm1d(2), nn.ModuleList([nn.Linear(2, 2)])


def kept(model: nn.Module, *names: str, dtype: torch.dtype = torch.bfloat16) -> KeptInFp32:
    return kept_in_fp32(model, names, dtype)


def found(model: nn.Module, kept: KeptInFp32) -> list[str]:
    """Return the names of what is kept, besides batch norms."""
    params = [n for n, p in model.named_parameters() if id(p) in kept.params]
    buffers = [
        f"{prefix}.{key}".lstrip(".")
        for prefix, m in model.named_modules()
        for key in m._buffers
        if (id(m), key) in kept.buffers
    ]
    return [n for n in (*params, *buffers) if not n.startswith("norm")]


def test_batch_norms_stay_and_have_no_boundary() -> None:
    model = Model()
    result = kept(model)
    assert result.params == {id(model.norm.weight), id(model.norm.bias)}
    assert {key for _, key in result.buffers} == {"running_mean", "running_var", "num_batches_tracked"}
    assert result.bounded == ()


def test_a_class_stays_with_all_that_it_contains() -> None:
    model = Model()
    result = kept(model, "Router")
    gate = ("weight", "scale.weight", "scale.bias")
    assert found(model, result) == [
        *(f"layers.{i}.gate.{n}" for i in (0, 1) for n in gate),
        *(f"layers.{i}.gate.{n}" for i in (0, 1) for n in ("bias", "scale.count")),
    ]
    assert result.bounded == (model.layers[0].gate, model.layers[1].gate)


def test_names_of_parameters_and_buffers_have_no_boundary() -> None:
    model = Model()
    result = kept(model, "gate.weight", "layers.*.gate.bias")
    assert found(model, result) == [f"layers.{i}.gate.{n}" for n in ("weight", "bias") for i in (0, 1)]
    assert result.bounded == ()


def test_the_plan_says_how_many_parameters_stay() -> None:
    def described(*names: str) -> str:
        options = PrecisionConfig(fp32_modules=names)
        return engine_on(Model().layers, [], stage=0, trainer_precision="bf16-true", precision=options).describe()

    assert "  8 parameters stay in fp32" in described("gate.weight")
    assert "stay in fp32" not in described()


def test_names_of_modules_have_one_boundary_on_the_outside() -> None:
    model = Model()
    result = kept(model, "layers.1.gate*", "Linear")
    assert model.layers[1].gate in result.bounded
    assert model.layers[1].gate.scale not in result.bounded
    assert set(result.bounded) == {model.layers[1].gate, *(b.up for b in model.layers), model.layers[0].gate.scale,
                                   model.gates[0]}  # fmt: skip


def test_a_list_of_modules_is_never_called_so_its_children_get_the_boundary() -> None:
    model = Model()
    assert kept(model, "gates").bounded == (model.gates[0],)


def test_a_star_names_everything_but_the_model_itself() -> None:
    model = Model()
    result = kept(model, "*")
    assert len(result.params) == len(list(model.parameters()))
    assert set(result.bounded) == {*model.layers, model.norm, model.gates[0]}


@pytest.mark.parametrize(
    "name", ["Router", "gate", "router.*", "weight.", "eight"], ids=["class", "module", "below", "dot", "part"]
)
def test_a_name_that_matches_nothing_is_refused(name: str) -> None:
    with pytest.raises(
        PlanError, match=rf"the model has no module of class {name} among Linear\. Name some of these.*'"
    ):
        kept(nn.Linear(2, 2), name)


def authored(plain: Any = None, strict: Any = None) -> nn.Module:
    model = nn.Module()
    model.net = Model()
    model.net._keep_in_fp32_modules, model.net._keep_in_fp32_modules_strict = plain, strict
    return model


def test_the_plain_list_is_for_fp16_and_the_strict_one_for_both() -> None:
    model = authored(["gate.bias"], {"gate.weight"})
    weights, biases = ([f"net.layers.{i}.gate.{n}" for i in (0, 1)] for n in ("weight", "bias"))
    names = {d: [n for n in found(model, kept(model, dtype=d)) if "norm" not in n] for d in
             (torch.float16, torch.bfloat16, torch.float32, torch.float64)}  # fmt: skip
    assert names == {
        torch.float16: weights + biases,
        torch.bfloat16: weights,
        torch.float32: [],
        torch.float64: [],
    }
    assert kept(model).bounded == ()


@pytest.mark.parametrize("value", [None, [], "gate.weight", AttributeError()], ids=["none", "empty", "text", "error"])
def test_what_is_no_list_of_names_keeps_nothing(value: Any) -> None:
    model = authored(strict=value)
    assert all("norm" in n for n in found(model, kept(model)))


def test_patterns_match_as_in_transformers() -> None:
    model = authored(strict=["layers.*.wei", "ale.cou"])
    assert [n for n in found(model, kept(model)) if "norm" not in n] == [
        *(f"net.layers.{i}.{n}.weight" for i in (0, 1) for n in ("gate", "gate.scale", "up")),
        *(f"net.layers.{i}.gate.scale.count" for i in (0, 1)),
    ]


def test_what_compilers_and_adapters_insert_in_names_is_left_out() -> None:
    class Wrapped(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.base_layer = layer

    model = authored(strict=["gate.weight"])
    model.net.layers[0].gate = Wrapped(model.net.layers[0].gate)
    inside = id(model.net.layers[0].gate.base_layer.weight)
    assert inside in kept(model).params
    assert inside in kept(model, "layers.0.gate.weight").params


def test_of_tied_parameters_the_first_name_counts_for_authors_and_every_name_for_options() -> None:
    model = nn.Module()
    model.embedding, model.head = nn.Embedding(2, 2), nn.Linear(2, 2, bias=False)
    model.head.weight = model.embedding.weight
    model._keep_in_fp32_modules_strict = ["head"]
    assert not kept(model).params
    assert kept(model, "head.weight").params == {id(model.embedding.weight)}
