"""``precision.matmul="fp8"``, emulated: the numbers of DDP with torchao's own conversion, and plain weights."""

from __future__ import annotations

import copy
import pickle
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ls_strategy import CorruptionCheck
from ls_strategy.config import PrecisionConfig, nested
from ls_strategy.errors import PlanError, StateError
from ls_strategy.lightning.float8 import multiply_in_fp8
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.precision import resolve_precision
from ls_strategy.zero.flat.float8 import Float8Flat
from tests.dist.ranks import Net, assert_close, assert_equal, batches, fit, on_ranks, weights
from tests.dist.test_corruption_check import Flip, data, train
from tests.dist.test_spike_guard import assert_same

pytest.importorskip("torchao.float8")
pytestmark = pytest.mark.own_ranks  # torchao is imported, and replaces functions of torch

D = 32


class Narrowed(nn.Linear):
    """A subclass that computes what its base does, as recipes have it."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up, self.down = nn.Linear(D, 2 * D), Narrowed(2 * D, D, bias=False)
        self.odd = nn.Linear(D, 7)
        self.back = nn.Linear(7, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(torch.tanh(self.up(h))) + self.back(self.odd(h))


class Configured(nn.Linear):
    """Has an attribute that torchao's layer has."""

    config = "mine"


class Plain(Net):
    """A layer before the blocks that multiplies in fp8, too, and an output head that does not."""

    def build(self) -> None:
        self.first = nn.Linear(8, 2 * D)
        self.middle = nn.Linear(2 * D, D)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.lm_head = nn.Linear(D, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.middle(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)  # type: ignore[no-any-return]


class ByHand(Plain):
    """The same by torchao's own hand."""

    recipe = "tensorwise"

    def build(self) -> None:
        super().build()
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        wanted = [f"blocks.{i}.{name}" for i in range(3) for name in ("up", "down")] + ["middle"]
        config = replace(Float8LinearConfig.from_recipe_name(self.recipe), emulate=True)
        convert_to_float8_training(self, module_filter_fn=lambda module, name: name in wanted, config=config)


class RowsByHand(ByHand):
    recipe = "rowwise_with_gw_hp"


class Copied(Plain):
    """Copies a block in the middle of the fit, for a teacher."""

    def build(self) -> None:
        super().build()
        self.blocks[2].odd = Configured(D, 7)

    def on_train_batch_end(self, *_: Any) -> None:
        with self.trainer.strategy.gathered_parameters():
            self.__dict__["teacher"] = pickle.loads(pickle.dumps(copy.deepcopy(self.blocks[0])))


SEEN: list[str] = []


def note(name: str, module: nn.Module, _: Any, __: Any) -> None:
    SEEN.append(f"{name} {type(module).__name__}")


def trained(module: Net, options: Any, **trainer: Any) -> Net:
    fit(ZeROStrategy(**nested({"sharding.min_unit_numel": 0, **options})), module, **trainer)
    return module


@pytest.mark.parametrize(
    ("stage", "options", "trainer"),
    [
        (3, {}, {}),
        pytest.param(1, {}, {"precision": "bf16-mixed"}, marks=pytest.mark.wide),
        pytest.param(3, {}, {"precision": "bf16-mixed"}, marks=pytest.mark.wide),
        pytest.param(2, {"offload": "cpu"}, {"gradient_clip_val": 0.1}, marks=pytest.mark.wide),
        pytest.param(3, {"offload": "cpu"}, {"accumulate_grad_batches": 2}, marks=pytest.mark.wide),
        pytest.param(3, {"activations": "full"}, {}, marks=pytest.mark.wide),
        pytest.param(3, {"compile": {"regions": "blocks", "backend": "aot_eager"}}, {}, marks=pytest.mark.wide),
        pytest.param(1, {"compile": {"regions": "model", "backend": "aot_eager"}}, {}, marks=pytest.mark.wide),
        pytest.param(0, {"precision.matmul": {"recipe": "rowwise_with_gw_hp"}}, {}, marks=pytest.mark.wide),
        pytest.param(3, {"precision.matmul": {"recipe": "rowwise_with_gw_hp"}}, {}, marks=pytest.mark.wide),
    ],
)
@on_ranks(2, timeout_s=120)
def test_numbers_are_those_of_ddp_with_the_same_conversion(
    rank: int, world_size: int, stage: int, options: Any, trainer: Any
) -> None:
    rows = "precision.matmul" in options
    by_hand, plain = RowsByHand() if rows else ByHand(), Plain()
    fit("ddp", by_hand, **trainer)
    fit("ddp", plain, **trainer)
    module = trained(Plain(), {"precision.matmul": "fp8", **options, "stage": stage}, **trainer)
    # Rounding to 4 bits can turn a difference in the last bit into another number: so sums are equal here.
    assert_close(module.losses, by_hand.losses, f"stage {stage}")
    assert_close(weights(module), weights(by_hand), f"stage {stage}")
    assert max(abs(a - b) for a, b in zip(module.losses, plain.losses, strict=True)) > 1e-4  # it does round
    own = trained(type(by_hand)(), {**options, "precision.matmul": None, "stage": stage}, **trainer)
    assert_close(own.losses, by_hand.losses, f"stage {stage}, converted by hand")


@pytest.mark.parametrize(("capability", "emulated"), [((0, 0), True), ((8, 6), True), ((8, 9), False), ((9, 0), False)])
def test_devices_without_fp8_emulate_it(
    capability: tuple[int, int], emulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ls_strategy.device.compute_capability", lambda device: capability)
    module = Plain()
    made = multiply_in_fp8(module, PrecisionConfig(matmul="fp8"), resolve_precision("32-true"), torch.device("cpu"))
    assert len(made) == 7
    assert module.blocks[0].up.config.emulate == emulated
    made[0].remove()


@pytest.mark.wide
@on_ranks(2, timeout_s=120)
def test_a_module_is_what_it_was_after_the_run(rank: int, world_size: int) -> None:
    """Weights are plain; classes, hooks and copies, too; a test after the fit is in fp8 again."""
    seen, module = SEEN, Copied()
    seen.clear()
    options = {"stage": 2, "precision.fp32_modules": ["middle"], "precision.matmul": {"skip": ["blocks.1.*"]}}
    for name, layer in module.named_modules():
        layer.register_forward_hook(partial(note, name))
    before = {name: type(m) for name, m in module.named_modules()}
    names = list(module.state_dict())
    trained(module, options)
    fp8 = {"blocks.0.up Float8Linear", "blocks.0.down Float8Linear", "blocks.2.up Float8Linear",
           "blocks.2.down Float8Linear"}  # fmt: skip
    assert {each for each in seen if "Float8" in each} == fp8
    for state in (module.state_dict(), module.trainer.strategy.lightning_module_state_dict()):
        assert list(state) == names
        assert all(type(value) in (torch.Tensor, nn.Parameter) for value in state.values())
    assert {name: type(m) for name, m in module.named_modules()} == before
    assert not {name for m in module.modules() for name in vars(m) if "linear_mm" in name}
    assert [type(layer) for layer in (module.teacher.up, module.teacher.down)] == [nn.Linear, Narrowed]
    assert "config" not in vars(module.teacher.up)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(module.blocks)))
    assert_equal({n: p.detach() for n, p in copied.named_parameters()},
                 {n: p.detach().clone() for n, p in module.blocks.named_parameters()}, "copies")  # fmt: skip
    seen.clear()
    module.trainer.test(module, batches(), verbose=False)
    assert {each for each in seen if "Float8" in each} == fp8
    seen.clear()
    trained(module, {"stage": 1})
    assert not {each for each in seen if "Float8" in each}


@pytest.mark.wide
@on_ranks(2, timeout_s=120)
def test_what_cannot_multiply_in_fp8_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(PlanError, match="no module has the name 'blok'"):
        trained(Plain(), {"precision.matmul": {"skip": ["blok"]}})
    with pytest.raises(PlanError, match="in_features and out_features that are multiples of 16"):
        trained(Net(), {"precision.matmul": "fp8"})
    with pytest.raises(PlanError, match="64-true"):
        trained(Plain(), {"precision.matmul": "fp8"}, precision="64-true")


class FlipsExponent(Flip):
    """Multiplies a weight, or the scale of a weight in fp8, by a power of two that no other weight comes near."""

    def __init__(self, kind: str, rank: int, hook: str) -> None:
        super().__init__(kind, rank, step=2, seed=rank)
        self.hook = hook

    def weights(self, trainer: Any) -> None:
        if self.here(trainer):
            self.done = True
            flats = [flat for flat in trainer.strategy.require_engine().flats if isinstance(flat, Float8Flat)]
            values = flats[-1]._casts.scales[0] if self.kind == "scale" else flats[-1].master[:1]
            values.data.view(torch.int32).bitwise_xor_(1 << 30)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("stage", "precision", "flips"),
    [
        (3, "32-true", [FlipsExponent("weight", 0, "on_train_batch_start"), Flip("gradient", 1, 3, 0)]),
        (3, "bf16-true", [FlipsExponent("scale", 1, "on_before_backward"), Flip("gathered", 0, 4, 2)]),
        (2, "bf16-mixed", [Flip("weights", 1, 2, 1), Flip("reduced", 0, 3, 1)]),
    ],
    ids=["3", "3 in 16 bits", "2"],
)
@on_ranks(2, timeout_s=120)
def test_a_flipped_bit_is_found_also_in_the_scale_of_a_weight(
    rank: int, world_size: int, stage: int, precision: str, flips: list[Flip], tmp_path: Path
) -> None:
    """A scale that comes from a weight that was wrong is computed again from the right one."""
    warnings.simplefilter("ignore")

    def run(*callbacks: Any) -> Any:
        given = {"stage": stage, "precision.matmul": "fp8", "sharding.min_unit_numel": 0, "checkpoint": "file"}
        strategy = ZeROStrategy(**nested(given))
        return train(strategy, data(rank), tmp_path, *callbacks, module=Plain(), precision=precision)

    check, expected = CorruptionCheck(every=1), run()
    assert_same(run(check, *flips), expected, "flips")
    assert [flip.done for flip in flips] == [flip.rank == rank for flip in flips]
    assert (check.found, check.failures) == (2, {0: 1, 1: 1})


class Normed(Plain):
    """What layer norms return under autocast on a CPU is in fp32."""

    def training_step(self, batch: Any, i: int) -> Any:
        return self.noted(self.blocks[0](batch[0].repeat(1, D // 8)).square().mean())


@pytest.mark.wide
@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_an_input_in_fp32_that_torchao_does_not_cast_is_explained(rank: int, world_size: int, stage: int) -> None:
    options = {"precision.matmul": {"recipe": "rowwise_with_gw_hp"}, "stage": stage}
    with pytest.raises(StateError, match="recipe='rowwise' or 'tensorwise'"):
        trained(Normed(), options, precision="bf16-mixed")
