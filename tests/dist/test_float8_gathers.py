"""Stage 3 gathers weights of products in fp8 as their bytes: the bits of gathers in full, with a byte per element."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ls_strategy.config import ActivationOffloadConfig, ZeROConfig, nested
from ls_strategy.errors import StateError
from ls_strategy.extras.planner.candidates import Candidate
from ls_strategy.extras.planner.choice import Question
from ls_strategy.extras.planner.forecast import Run
from ls_strategy.extras.planner.hardware import Hardware
from ls_strategy.extras.planner.step import first_batch
from ls_strategy.lightning.float8 import multiply_in_fp8
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.precision import resolve_precision
from ls_strategy.testing import spawn
from ls_strategy.zero.flat.float8 import Float8Flat, _largest, scaled, scales_for
from tests.dist import gather_runs
from tests.dist.gather_runs import SETTINGS, ClampsInBlocks, Counts, trained
from tests.dist.ranks import Net, assert_close, assert_equal, fit, global_batches, on_ranks, weights
from tests.dist.test_planner import Begin
from tests.live_bytes import LiveBytes
from tests.marks import few_or_all
from tests.models import quiet

pytest.importorskip("torchao.float8")  # before the next module, which asks so too

from tests.dist.test_float8 import ByHand, D
from tests.dist.test_float8 import Plain as Converted

pytestmark = pytest.mark.own_ranks  # torchao is imported, and replaces functions of torch

WIDE = 64


class Plain(Counts, Converted):
    """Counts the scales, too, and the layers that read bytes."""

    given: ClassVar[dict[str, Any]] = {"precision.matmul": "fp8"}

    def on_train_start(self) -> None:
        super().on_train_start()
        self.flats = [f for f in self.strategy.engine.flats if isinstance(f, Float8Flat)]
        self.scales: list[int] = []
        """Of each exchange of magnitudes, how many."""
        for flat in self.flats:
            self.count_scales(flat._casts)

    def count_scales(self, wire: Any) -> None:
        exchange = wire._comm.reduce_numbers

        def counted(value: Tensor, op: Any) -> Tensor:
            self.scales.append(value.numel())
            return exchange(value, op)

        wire._comm = copy.copy(wire._comm)
        wire._comm.reduce_numbers = counted


def compare(kind: type[Counts], options: dict[str, Any] | None = None, **trainer: Any) -> tuple[Any, Any]:
    full, sent = gather_runs.compare(kind, options, **trainer)
    assert (len(full.flats), len(sent.flats) > 0) == (0, True)
    return full, sent


@on_ranks(2, timeout_s=120)
def test_bits_are_those_of_gathers_in_full_and_bytes_are_one_per_element(rank: int, world_size: int) -> None:
    bits_and_bytes(world_size, "bf16-true")


class Large(Net):
    """Gathers as many bytes as it has activations."""

    def build(self) -> None:
        self.blocks = nn.ModuleList([Wide() for _ in range(4)])
        self.first, self.last = nn.Linear(8, WIDE), nn.Linear(WIDE, 8)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDE)
        self.up, self.down = nn.Linear(WIDE, 2 * WIDE), nn.Linear(2 * WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


ROWS = {"recipe": "rowwise_with_gw_hp"}
PLANNED: list[tuple[int, str, Any]] = [
    (3, "bf16-true", "fp8"), (3, "bf16-mixed", "fp8"), (2, "bf16-true", "fp8"), (3, "32-true", "fp8"),
    (3, "bf16-mixed", ROWS),
]  # fmt: skip


def measure(rank: int, world_size: int, indices: tuple[int, ...]) -> list[tuple[int, int]]:
    """Peak bytes of tensors, and bytes sent in the last step."""
    quiet()
    result = []
    for stage, precision, matmul in (PLANNED[index] for index in indices):
        data = global_batches(rank, world_size, 2)
        with LiveBytes(ignore=list(data.dataset.tensors)) as live:  # type: ignore[attr-defined]
            begin = Begin(live)
            options: dict[str, Any] = {"precision": precision, "callbacks": [begin], "max_epochs": 1}
            given = nested({"stage": stage, "sharding.min_unit_numel": 0, "precision.matmul": matmul})
            fit(ZeROStrategy(**given), Large(), data, use_distributed_sampler=False, **options)
        result.append((live.peak, begin.sent[-1] - begin.sent[-2]))
    return result


@pytest.mark.parametrize("indices", few_or_all((0, 1), tuple(range(len(PLANNED)))))
def test_the_planner_knows_the_bytes(indices: tuple[int, ...]) -> None:
    ranks = spawn(measure, 2, indices, init_process_group=False, timeout_s=120)
    for number, index in enumerate(indices):
        stage, name, matmul = PLANNED[index]
        module = Large()
        config = ZeROConfig.of(stage, sharding={"min_unit_numel": 0}, precision={"matmul": matmul})  # type: ignore[arg-type]
        asked = Question(
            module, [module.configure_optimizers()], resolve_precision(name), first_batch(global_batches(0, 2, 2)),
            Run(config=config, clips=True),
        )  # fmt: skip
        with asked.forecaster() as forecaster:
            forecast = forecaster.forecast(Candidate(stage), Hardware(ranks=2, device="cpu"))  # type: ignore[arg-type]
        assert {type(m) for m in module.modules()} == {type(m) for m in Large().modules()}, "converted only meanwhile"
        for rank in ranks:
            peak, sent = rank[number]
            assert forecast.traffic.sent == sent
            assert forecast.peak.device == pytest.approx(peak, rel=0.01)


@pytest.mark.wide
@on_ranks(3, timeout_s=120)
def test_bits_and_bytes_of_shards_that_cut_rows(rank: int, world_size: int) -> None:
    for precision in ("bf16-mixed", "32-true", "bf16-true"):
        bits_and_bytes(world_size, precision)


def bits_and_bytes(world_size: int, precision: str) -> None:
    full, sent = compare(Plain, precision=precision, max_epochs=1)
    engine = sent.strategy.engine
    times = engine.plan.gathers_per_step()
    flats = [(n, f) for n, unit in zip(times, engine.units, strict=True) for f in unit.flats]
    others = sum(n * f.plan.gathered_numel * f.plan.gathered_itemsize for n, f in flats if f not in sent.flats)
    # The elements of the weights, a byte each, from this rank to all others; slots and shards begin at multiples of 16.
    mine = sum(n * (sum(s.numel for s in f.layout.slots) // world_size) for n, f in flats if f in sent.flats)
    assert sent.bytes == [pytest.approx(others + mine * (world_size - 1), rel=0.01)] * len(sent.bytes)
    if precision == "bf16-true":
        whole = sum(n * f.plan.gathered_numel * f.plan.gathered_itemsize for n, f in flats if f in sent.flats)
        assert [a - b for a, b in zip(full.bytes, sent.bytes, strict=True)] == [whole] * len(sent.bytes)
    # A step has one exchange of magnitudes per buffer, with all of its weights.
    assert sorted(sent.scales) == sorted(len(f.params) for f in sent.flats for _ in sent.bytes)


@on_ranks(2, timeout_s=120)
def test_numbers_are_those_of_ddp_with_accumulation_and_recomputation(rank: int, world_size: int) -> None:
    trainer = {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}
    by_hand = ByHand()
    fit("ddp", by_hand, **trainer)
    module = trained(Plain(), "compute", {"activations": "full"}, **trainer)
    assert_close(module.losses, by_hand.losses, "losses")
    assert_close(weights(module), weights(by_hand), "weights")
    assert all(not f._casts.always_exact for f in module.flats)


class InItsLoss(Plain):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 1e-2 * self.blocks[1].up.weight.square().mean()


class BeforeBackward(Plain):
    def on_before_backward(self, loss: Tensor) -> None:
        for layer in (self.middle, self.blocks[2].up, self.blocks[0].down):
            self.note(layer.weight.norm())


class AfterSteps(Plain):
    """Reads and writes in hooks: state dicts, copies, weights."""

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end()
        with torch.no_grad():
            self.note(self(torch.ones(4, 8)).sum())
        state = self.state_dict()
        self.note(sum(value.sum() for value in state.values()))  # type: ignore[arg-type]
        state["blocks.2.up.weight"].mul_(1.25)
        self.note(copy.deepcopy(self.blocks[1]).up.weight.sum())
        with self.strategy.gathered_parameters(modify=True), torch.no_grad():
            self.blocks[0].up.weight.mul_(0.5)
        self.load_state_dict({k: v * 1.01 for k, v in self.state_dict().items()})


class OneRow(Plain):
    """Writes to elements of one rank's shard, so that only it notices, while a forward and a backward are to come."""

    def training_step(self, batch: Any, i: int) -> Any:
        if i == 1:
            self.view = self.blocks[1].up.weight.data
        if i == 2:
            with torch.no_grad():
                self.blocks[1].up.weight.data[0, :3] = 3.0
                self.middle.weight[0].clamp_(-0.1, 0.1)
        return super().training_step(batch, i)


class InOtherWays(Plain):
    """The functional form, a scaled weight, a product of autograd's own."""

    def forward(self, x: Tensor) -> Tensor:
        one, two, three = self.blocks
        h = functional.linear(self.middle(self.first(x)), one.up.weight * 0.5, one.up.bias)
        h = functional.linear(torch.tanh(h), two.down.weight) @ two.down.weight @ three.up.weight
        return self.lm_head(three(h))  # type: ignore[no-any-return]


class Clamps(ClampsInBlocks, Plain):
    """Changes the largest magnitude."""

    clamped, limit = "up", 0.1


class Twice(Plain):
    """Shares a layer, runs blocks twice, freezes one."""

    def build(self) -> None:
        super().build()
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.first(x))
        for block in (*self.blocks, *self.blocks):
            x = block(x) / 2
        return self.lm_head(x)  # type: ignore[no-any-return]


class Attends(Plain):
    """Attention reads a weight without calling its layer."""

    def build(self) -> None:
        super().build()
        self.attention = nn.MultiheadAttention(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.first(x))
        x = self.attention(x, x, x)[0]
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)  # type: ignore[no-any-return]


class TwoForwards(Plain):
    manual = True


ALL = [Plain, InItsLoss, BeforeBackward, AfterSteps, OneRow, InOtherWays, Clamps, Twice, Attends]


@on_ranks(2, timeout_s=120)
def test_every_other_use_of_a_weight_has_its_own_bits(rank: int, world_size: int) -> None:
    for kind in (InItsLoss, AfterSteps, OneRow, InOtherWays):
        compare(kind, max_epochs=1)
    compare(Clamps, {"activations": "full"}, accumulate_grad_batches=2, max_epochs=1)
    assert not any(flat._casts.always_exact for flat in compare(Attends, max_epochs=1)[1].flats)


@pytest.mark.wide
@pytest.mark.parametrize("options", SETTINGS, ids=str)
@on_ranks(2, timeout_s=300)
def test_bits_are_the_same_in_every_setting(rank: int, world_size: int, options: dict[str, Any]) -> None:
    for kind in ALL:
        compare(kind, options, gradient_clip_val=0.1, precision="bf16-mixed", max_epochs=1)
    compare(TwoForwards, options, max_epochs=1)


@pytest.mark.wide
@pytest.mark.parametrize("options", [{"sharding.hpz": 2}, {"sharding.shard_size": 2}], ids=str)
@on_ranks(4, timeout_s=240)
def test_bits_are_the_same_over_groups_of_ranks(rank: int, world_size: int, options: dict[str, Any]) -> None:
    for kind in (Plain, AfterSteps, OneRow, Clamps):
        compare(kind, options, precision="bf16-mixed")


class OldGraph(gather_runs.OldGraph, Plain):
    """Of these weights."""


class Halves(Plain):
    """Changes weights between forward and backward so that their bytes stay, and only the scale is another."""

    def on_before_backward(self, loss: Tensor) -> None:
        with torch.no_grad():
            self.blocks[1].up.weight.mul_(0.5)


class OwnHooks(gather_runs.OwnHooks, Plain):
    """Of these weights."""


@pytest.mark.wide
@on_ranks(2, timeout_s=120)
def test_a_backward_through_weights_of_before_is_refused(rank: int, world_size: int) -> None:
    for kind in (OldGraph, Halves):
        with pytest.raises(StateError, match="weights were changed"):
            trained(kind(), "compute", precision="bf16-mixed")
    compare(OwnHooks)
    offload = {"activations.offload": ActivationOffloadConfig(tier="cpu", min_bytes=0, in_flight_bytes=0)}
    compare(Plain, offload)
    with pytest.raises(StateError, match="weights were changed"):
        trained(Halves(), "compute", offload)


@on_ranks(2, timeout_s=120)
def test_a_run_goes_on_from_a_checkpoint_of_plain_weights(rank: int, world_size: int, tmp_path: Path) -> None:
    whole = trained(Plain(), "compute")
    first = trained(Plain(), "compute", max_epochs=1)
    first.trainer.save_checkpoint(tmp_path / "half")
    other = Plain()
    strategy = ZeROStrategy(2, sharding={"min_unit_numel": 0}, precision={"matmul": "fp8"})  # type: ignore[arg-type]
    fit(strategy, other, ckpt=tmp_path / "half")
    again = Plain()
    given = nested({"sharding.min_unit_numel": 0, "precision.matmul": "fp8"})
    fit(ZeROStrategy(3, **given), again, ckpt=tmp_path / "half")
    half = len(first.losses)
    assert first.losses + again.losses == whole.losses
    assert other.losses == whole.losses[half:]
    assert_equal(weights(again), weights(whole), "resumed")
    assert len(again.flats) > 3


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_only_a_cast_that_serves_both_passes_is_gathered(recipe: str) -> None:
    """With a scale per row, the transposed weight of backward has other bytes than that of forward."""
    from ls_strategy.config import PrecisionConfig

    module = Plain()
    options = PrecisionConfig(matmul={"recipe": recipe})  # type: ignore[arg-type]
    made = multiply_in_fp8(module, options, resolve_precision("32-true"), torch.device("cpu"))
    layer: Any = module.blocks[0].up
    assert layer.reads_weight_in == (torch.float8_e4m3fn if recipe == "tensorwise" else None)
    made[0].remove()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_and_scales_are_those_of_torchao(dtype: torch.dtype) -> None:
    """Of shards, too; also of zeros, numbers without an exponent, infinities and NaN."""
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    from ls_strategy.layout import Piece

    torch.manual_seed(0)
    some = torch.randn(64, 32) * torch.logspace(-8, 0, 64)[:, None]
    for weight in (some, torch.zeros(64, 32), some * 1e-30, some / 0, some.clone().fill_diagonal_(float("inf")), -some,
                   some.clone().fill_diagonal_(-float("nan"))):  # fmt: skip
        given = weight.to(dtype)
        wanted: Any = hp_tensor_to_float8_dynamic(given, torch.float8_e4m3fn, LinearMMConfig())
        pieces = [Piece(0, 700, 0), Piece(700, 700, 0), Piece(700, 2048, 700)]
        largest = _largest(given.flatten(), pieces).max()
        scale = scales_for(largest.view(torch.float32), torch.float8_e4m3fn)
        assert torch.equal(scale.view(torch.int32), wanted._scale.view(torch.int32)) or scale.isnan()
        assert scale.isnan() == wanted._scale.isnan()
        sent = torch.cat([scaled(given.flatten()[p.start : p.stop], scale, torch.float8_e4m3fn) for p in pieces])
        sent = sent.to(torch.float8_e4m3fn).float()
        assert torch.equal(sent.nan_to_num(1000), wanted._data.float().flatten().nan_to_num(1000))
