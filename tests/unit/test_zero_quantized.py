"""Frozen weights in 4 and 8 bits, on one rank: what is quantized, and that training is that of rounded weights."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ls_strategy.checkpoint.full import full_state_dict, load_full_state_dict
from ls_strategy.config import PrecisionConfig, ZeROConfig
from ls_strategy.engine import Engine
from ls_strategy.errors import ConfigError, PlanError
from ls_strategy.meta_init.lazy import LazyTensor
from ls_strategy.ops.quantized import rounded
from ls_strategy.zero.flat.quantized import QuantizedFlat
from ls_strategy.zero.setup.frozen import quantized_params
from tests.unit.one_rank import ShelfTier, adamw, engine_on, steps, weights

FORMS = ("nf4", "int4", "int8")
WIDTH, RANK = 40, 4
OPTIONS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 3": {"stage": 3},
    "host": {"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}},
}


class Adapted(nn.Module):
    """A frozen linear layer with an adapter, as LoRA adds it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.a = nn.Linear(width, RANK, bias=False)
        self.b = nn.Linear(RANK, width, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.b(self.a(x)))


def network(width: int = WIDTH, blocks: int = 3) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(Adapted(width)) for _ in range(blocks)))


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def engine_of(model: nn.Module, form: str | None = "nf4", **options: Any) -> Engine:
    return engine_on(model, [adamw(trained(model))], precision={"frozen": form}, **options)


def round_frozen(model: nn.Module, form: str) -> nn.Module:
    """The reference: a copy in which the frozen matrices were rounded."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Adapted):
                module.base.weight.copy_(rounded(module.base.weight.reshape(-1), form).view(WIDTH, WIDTH))  # type: ignore[arg-type]
    return model


# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", OPTIONS)
def test_training_is_that_of_rounded_weights(options: str, form: str) -> None:
    """Adapters get the gradients of the dequantized weights, bit for bit."""
    model = network()
    trusted = round_frozen(model, form)
    expected = steps(engine_of(trusted, None, **OPTIONS[options]))
    result = steps(engine_of(model, form, **OPTIONS[options]))
    assert all(map(torch.equal, result, expected))


@pytest.mark.parametrize("options", OPTIONS)
def test_stored_bytes_are_those_of_the_plan(options: str) -> None:
    model = network(64)
    engine = engine_of(model, **OPTIONS[options])
    steps(engine)
    (_, quantized) = split(engine)
    assert len(quantized) == 3
    assert all(f.master.nbytes == 64 * 64 * 17 // 32 for f in quantized)  # 4.25 bits
    assert all(f.full.untyped_storage().size() == 0 for f in quantized)
    planned = engine.plan.state_bytes()
    measured = engine.memory_bytes()
    assert measured["masters"] + measured["parameters"] == planned["masters"] + planned["parameters"]


def split(engine: Engine) -> tuple[list[Any], list[QuantizedFlat]]:
    quantized = [f for f in engine.flats if isinstance(f, QuantizedFlat)]
    return [f for f in engine.flats if not isinstance(f, QuantizedFlat)], quantized


# --- what is quantized -----------------------------------------------------------------------------------------------


def chosen(model: nn.Module, form: str | None = "nf4", **options: Any) -> list[str]:
    config = PrecisionConfig(frozen=form, **options)  # type: ignore[arg-type]
    found = quantized_params(model, config, {id(p) for p in trained(model)}, [])
    return [name for name, p in model.named_parameters() if id(p) in found]


class Transformer(nn.Module):
    """Embedding, projection, blocks, a norm, and a head of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.project = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 7))
        self.requires_grad_(False)


BLOCK = ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight")


def test_linear_layers_are_quantized_but_not_what_follows_the_blocks() -> None:
    blocks = [f"blocks.{i}.{name}" for i in range(2) for name in BLOCK]
    assert chosen(Transformer()) == ["project.weight", *blocks]


def test_parts_of_a_model_are_looked_at_one_by_one() -> None:
    both = nn.ModuleDict({"student": Transformer(), "teacher": Transformer()})
    both["student"].requires_grad_(True)
    names = chosen(both)
    assert names
    assert all(name.startswith("teacher.") for name in names)
    assert not any("head" in name for name in names)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (
            [nn.Embedding(7, 8), *(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2)), nn.Linear(8, 7)],
            [f"{i}.{name}" for i in (1, 2) for name in BLOCK],
        ),
        ([nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 7)], ["0.weight", "2.weight"]),
    ],
    ids=["blocks and a head", "no blocks"],
)
def test_a_sequence(layers: list[nn.Module], expected: list[str]) -> None:
    assert chosen(nn.Sequential(*layers).requires_grad_(False)) == expected


def test_exceptions_are_ends_of_names() -> None:
    model = Transformer()
    assert not any("linear1" in name for name in chosen(model, frozen_except=("linear1",)))
    assert not any(name.startswith("blocks.0") for name in chosen(model, frozen_except=("blocks.0", "project")))
    assert chosen(model, frozen_except=("blocks.*.linear?", "self_attn")) == ["project.weight"]
    with pytest.raises(PlanError, match=r"no module has the name 'linear9' .* such as 'project'"):
        chosen(model, frozen_except=("linear9",))


def test_what_is_trainable_shared_or_of_another_dtype_keeps_its_precision() -> None:
    model = Transformer()
    model.blocks[0].linear1.weight.requires_grad_(True)
    model.blocks[1].linear1.weight = model.blocks[1].linear2.weight  # shared
    model.project.double()
    names = chosen(model)
    assert names == ["blocks.0.self_attn.in_proj_weight", "blocks.0.self_attn.out_proj.weight",
                     "blocks.0.linear2.weight", "blocks.1.self_attn.in_proj_weight",
                     "blocks.1.self_attn.out_proj.weight"]  # fmt: skip


def test_routers_and_adapters_keep_their_precision() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 4)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    class Lora(nn.Module):
        adapter_layer_names = ("lora_A",)

        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Linear(8, 8)
            self.lora_A = nn.ModuleDict({"idle": nn.Linear(8, 2), "other": nn.Linear(8, 2)})

    model = nn.Sequential(nn.Sequential(Sparse()), nn.Sequential(Lora())).requires_grad_(False)
    assert chosen(model) == [*(f"0.0.experts.{i}.weight" for i in range(4)), "1.0.base_layer.weight"]


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (nn.Sequential(nn.Linear(8, 8), nn.Tanh()), {}, r"Got precision.frozen='nf4', but .*requires_grad_\(False\)"),
        (network(), {"trainer_precision": "64-true"}, "no linear layer with a frozen weight in fp32, bf16 or fp16"),
    ],
    ids=["trainable", "in 64 bits"],
)
def test_nothing_to_quantize_is_an_error_with_the_cure(model: nn.Module, options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        engine_of(model, **options)


def test_an_evaluation_needs_no_frozen_weights() -> None:
    model = network().requires_grad_(True)
    assert split(engine_on(model, [], precision={"frozen": "nf4"}))[1] == []


@pytest.mark.parametrize("given", [{"frozen": "nf5"}, {"frozen_except": ("a",)}])
def test_wrong_options(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="frozen"):
        ZeROConfig.of(3, precision=given)


# --- writes, checkpoints, other engines ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
def test_written_values_are_rounded_again(options: str, caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    engine = engine_of(model, **OPTIONS[options])
    before = weights(engine)
    weight = model[1][0].base.weight
    new = torch.randn(WIDTH, WIDTH)
    with caplog.at_level(logging.WARNING, "ls_strategy.zero"), engine.gathered([weight], modify=True), torch.no_grad():
        weight.copy_(new)
    assert "rounded again" in caplog.text
    after = weights(engine)
    expected = rounded(new.reshape(-1), "nf4").view(WIDTH, WIDTH)
    for p, old, now in zip(model.parameters(), before, after, strict=True):
        assert torch.equal(now, expected if p is weight else old)


@pytest.mark.parametrize("options", OPTIONS)
def test_writing_what_was_read_changes_nothing(options: str) -> None:
    model = network()
    engine = engine_of(model, **OPTIONS[options])
    stored = [f.master.clone() for f in split(engine)[1]]
    state = full_state_dict(model.state_dict(), engine.units, engine.mesh)
    load_full_state_dict(model, state, engine.units)
    assert all(torch.equal(f.master, before) for f, before in zip(split(engine)[1], stored, strict=True))


@pytest.mark.parametrize("options", ["stage 1", "host"])
def test_loaded_values_are_rounded_in_one_piece(options: str) -> None:
    """Whatever the portions are in which a file is read."""
    model, values = network(), torch.randn(WIDTH, WIDTH)

    class Stored(LazyTensor):
        @property
        def at_once(self) -> int:
            return 100

        @staticmethod
        def __new__(cls: Any) -> Any:
            return Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)  # type: ignore[attr-defined]

        def load(self, start: int, stop: int) -> Tensor:
            return values.reshape(-1)[start:stop].clone()

    engine = engine_of(model, **OPTIONS[options])
    load_full_state_dict(model, {"1.0.base.weight": Stored()}, engine.units, strict=False)
    with engine.gathered():
        assert torch.equal(model[1][0].base.weight, rounded(values.reshape(-1), "nf4").view(WIDTH, WIDTH))


@pytest.mark.parametrize("thawed", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_weight_that_becomes_trainable_starts_from_its_rounded_values(options: str, thawed: bool) -> None:
    """Also where it stays frozen, another engine of the model has the same weights."""
    model = network()
    engine = engine_of(model, **OPTIONS[options])
    before = steps(engine)
    if thawed:
        model.requires_grad_(True)
    optimizers = [adamw(trained(model))] if thawed else []
    follower = engine_on(model, optimizers, precision={"frozen": "nf4"}, **OPTIONS[options])
    assert len(split(follower)[1]) == (0 if thawed else 3)
    assert all(map(torch.equal, weights(follower), before))
    assert not thawed or not torch.equal(steps(follower)[0], before[0])


def test_weights_on_a_drive_are_quantized(shelves: list[ShelfTier], tmp_path: Any) -> None:
    places = {"optimizer": "nvme", "parameters": "nvme", "nvme_path": str(tmp_path)}
    model = network()
    trusted = round_frozen(model, "nf4")
    expected = steps(engine_of(trusted, None, stage=3))
    result = steps(engine_of(model, stage=3, offload=places))
    assert all(map(torch.equal, result, expected))
    sizes = [t.nbytes for (_, name), t in shelves[-1].shelf.items() if name == "master" and t.dtype == torch.uint8]
    assert sizes == [2048 * 17 // 32] * 3  # of 1600 elements, in full tiles


@pytest.mark.parametrize("options", ["stage 1", "stage 3"])
def test_a_copy_of_the_module_is_plain(options: str) -> None:
    model = network()
    trusted = round_frozen(model, "nf4")
    engine = engine_of(model, **OPTIONS[options])
    copied = copy.deepcopy(model)
    del engine
    assert all(type(p) is nn.Parameter for p in copied.parameters())
    assert all(map(torch.equal, copied.parameters(), trusted.parameters()))


@pytest.mark.parametrize("loads", [False, True], ids=["written", "loaded"])
@pytest.mark.parametrize("options", OPTIONS)
def test_gathered_weights_show_what_is_stored(options: str, loads: bool) -> None:
    """Also what a forward reads after the write and before the next gather, on every rank."""
    model = network()
    engine = engine_of(model, sharding={"min_unit_numel": 10**6}, **OPTIONS[options])  # all in the root unit
    weight, new = model[1][0].base.weight, torch.randn(WIDTH, WIDTH)  # type: ignore[index, union-attr]
    expected = rounded(new.reshape(-1), "nf4").view(WIDTH, WIDTH)
    engine.begin_step()
    if loads:
        load_full_state_dict(model, {"1.0.base.weight": new}, engine.units, strict=False)
    else:
        with torch.no_grad():
            weight.copy_(new)
        engine.end_forward()
    assert all(f.is_gathered for f in split(engine)[1])
    assert torch.equal(weight.detach(), expected)
    engine.gatherer.release_all()
    assert torch.equal(weight.detach(), expected)
