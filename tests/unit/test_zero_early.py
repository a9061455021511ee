"""Updates that begin in backward: their bits, the memory of gradients that they free, and what may read afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ls_strategy.config import OffloadConfig, PrecisionConfig, ShardingConfig
from ls_strategy.engine import Engine
from ls_strategy.errors import StateError
from ls_strategy.zero.flat.states import UpdateState
from ls_strategy.zero.passes import reduce
from tests.live_bytes import LiveBytes
from tests.unit.one_rank import adamw, backward, close_engines, engine_on, network, steps, weights


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    close_engines()


def trains(
    model: nn.Module, overlap_step: Any, *, masters: Any = "24", moments: Any = "int8", **options: Any
) -> Engine:
    """Return an engine on which nothing reads gradients."""
    engine = engine_on(
        model,
        [adamw(model.parameters())],
        trainer_precision="bf16-true",
        precision=PrecisionConfig(master_weights=masters, moments=moments),
        sharding=ShardingConfig(min_unit_numel=1, overlap_step=overlap_step),
        **options,
    )
    engine.private_gradients, engine.early_step = True, bool(overlap_step)
    engine.gatherer.overlap = bool(overlap_step)
    return engine


PLACES: list[dict[str, Any]] = [
    {"stage": 1},
    {"stage": 2},
    {"stage": 2, "offload": OffloadConfig(optimizer="cpu")},
    {"stage": 3},
    {"stage": 3, "offload": OffloadConfig(optimizer="cpu", parameters="cpu")},
    {"stage": 3, "offload": OffloadConfig(parameters="cpu")},
]


@pytest.mark.parametrize("masters", [True, "split", "24"])
@pytest.mark.parametrize("options", PLACES, ids=lambda options: " ".join(map(str, options.values()))[:30])
def test_updates_in_backward_give_the_same_bits(options: dict[str, Any], masters: Any) -> None:
    kept, begun = network(), []  # an engine refers to its model weakly
    expected = steps(trains(kept, False, masters=masters, **options), 4)

    def look(engine: Engine) -> None:
        begun.append([flat.update is UpdateState.UPDATED_EARLY for flat in engine.flats])
        if begun[-1][0]:
            assert all(flat.averages.values is None for flat in engine.flats)

    model = network()
    engine = trains(model, "backward", masters=masters, **options)
    found = steps(engine, 4, between=look)
    assert begun == [[False] * 3, *[[True] * 3] * 3], "the first step shows whether hooks read gradients"
    assert all(map(torch.equal, found, expected))


class Reads(nn.Module):
    """Blocks of which the first one reads a weight of the last one in a way of its own."""

    def __init__(self, how: Callable[[Tensor, nn.Linear], Tensor]) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        for number, p in enumerate(self.parameters()):
            with torch.no_grad():
                p.copy_(torch.linspace(-0.3, 0.3, p.numel()).view_as(p).roll(number))

    def forward(self, x: Tensor) -> Tensor:
        first, second, last = cast("list[nn.Linear]", list(self.blocks))
        x = self.how(torch.tanh(first(x)), last)
        return last(torch.tanh(second(x)))


def detached(x: Tensor, layer: nn.Linear) -> Tensor:
    return nn.functional.linear(x, layer.weight.detach())


def through_data(x: Tensor, layer: nn.Linear) -> Tensor:
    return nn.functional.linear(x, layer.weight.data)


def recomputed(x: Tensor, layer: nn.Linear) -> Tensor:
    return checkpoint(lambda x: torch.tanh(x * layer.weight.detach().sum(0)), x, use_reentrant=False)


class Scaled(torch.autograd.Function):
    """Multiplies by a layer's weight, of which autograd does not know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Linear, saves: bool) -> Tensor:
        ctx.layer = layer
        if saves:
            ctx.save_for_backward(layer.weight)
        return x * layer.weight.sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (weight,) = ctx.saved_tensors or (ctx.layer.weight,)
        return grad * weight.sum(0), None, None


@pytest.mark.parametrize("masters", [True, "24"])
@pytest.mark.parametrize("how", [detached, through_data])
def test_what_is_still_referred_to_is_updated_after_backward(how: Any, masters: Any) -> None:
    kept, model = Reads(how), Reads(how)
    expected = steps(trains(kept, False, masters=masters, stage=2), 4)
    begun: list[list[bool]] = []
    engine = trains(model, "backward", masters=masters, stage=2)
    found = steps(engine, 4, between=lambda e: begun.append([f.update is UpdateState.UPDATED_EARLY for f in e.flats]))
    assert begun[-1] == [True, True, masters is True]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("how", "rule"),
    [
        (recomputed, r"read again in the backward pass.*overlap_step=False"),
        (lambda x, layer: Scaled.apply(x, layer, True), "modified by an inplace operation"),
        (lambda x, layer: Scaled.apply(x, layer, False), r"read again in the backward pass.*overlap_step"),
    ],
    ids=["recomputed", "saved", "attribute"],
)
def test_what_reads_an_updated_weight_in_the_same_backward_is_an_error(how: Any, rule: str) -> None:
    model = Reads(how)
    engine = trains(model, "backward", stage=2)
    with pytest.raises((StateError, RuntimeError), match=rule):
        steps(engine, 2)
    engine.abort()
    kept, others = Reads(how), Reads(how)
    expected = steps(trains(kept, False, masters=True, moments="fp32", stage=2), 3)
    found = steps(trains(others, "backward", masters=True, moments="fp32", stage=2), 3)
    assert all(map(torch.equal, found, expected)), "masters of their own do not change what backward reads"


def test_a_graph_that_is_kept_delays_updates_and_changes_no_number() -> None:
    def run(overlap_step: Any) -> list[Tensor]:
        model = network()
        engine = trains(model, overlap_step, stage=2)
        for number in range(3):
            engine.begin_step()
            loss = model(torch.full((4, 24), 0.1 * number + 0.1, dtype=torch.bfloat16)).square().mean()
            engine.end_forward()
            engine.begin_backward(eager=True)
            loss.backward(retain_graph=True)
            engine.end_backward()
            engine.step(0, engine.optimizers[0].sharded.optimizer.step)
            engine.zero_grad(0)
        return weights(engine)

    assert all(map(torch.equal, run("backward"), run(False)))


class Deep(nn.Module):
    """Equal blocks, whole in blocks of moments: nothing is padded."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("options", PLACES[1:5], ids=["2", "2 on the host", "3", "3 on the host"])
def test_live_bytes_per_parameter_are_five_and_with_gradients_seven(
    options: dict[str, Any], clips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 0.03 for scales, and 0.13 for buffers of a few units of 96 that go round."""
    monkeypatch.setattr(reduce, "IN_FLIGHT_BYTES", 1 << 14)  # 64 MiB are more than this model
    with LiveBytes() as live:
        model = Deep(96, 64)
        engine = trains(model, "backward", **options)
        engine.early_step = not clips  # as the strategy sets it
        for _ in range(3):
            backward(engine, 1)
            if clips:
                engine.clip_norm_(0, 0.1)
            engine.step(0, engine.optimizers[0].sharded.optimizer.step)
            engine.zero_grad(0)
        engine.wait()
        gc.collect()
        numel = sum(p.numel() for p in model.parameters())
        assert (7.03 if clips else 5.03) < live.now / numel < (7.16 if clips else 5.16)


def test_writes_before_an_update_in_backward_are_taken_or_refused() -> None:
    model = network()
    engine = trains(model, "backward", stage=2)
    steps(engine, 2)
    (first, *_) = (m for m in model.modules() if isinstance(m, nn.Linear))

    def write(_: Any) -> None:
        with torch.no_grad():
            first.weight.mul_(0.5)

    first.bias.register_hook(write)
    with pytest.raises(StateError, match="cannot tell which elements have changed"):
        steps(engine, 1)
