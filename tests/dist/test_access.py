"""What users do with weights, gradients and memory between steps: on two ranks, with the strategy's own methods.

The ranks are started once for all cases.
"""

from __future__ import annotations

import functools
import tempfile
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ls_strategy.config import ShardingConfig, ZeROConfig
from ls_strategy.distributed.comm import make_comm
from ls_strategy.distributed.mesh import Mesh
from ls_strategy.engine import Engine
from ls_strategy.errors import ConfigError, StateError
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.precision import resolve_precision
from ls_strategy.testing import spawn
from tests.live_bytes import LiveBytes
from tests.marks import few_or_all

pytestmark = pytest.mark.dist

WIDTH = 24
SHARD = 304
"""Elements that a rank sends when a block of 600 is gathered: half of them, and the padding."""


FEW: dict[int, tuple[str, ...]] = {0: ("device",), 1: ("cpu",), 2: ("device",), 3: ("device", "nvme")}
"""``stage -> tiers`` of the default run."""

_every_tier = True


def tiers(stage: int) -> Iterator[dict[str, Any]]:
    """Yield options that store the states of a stage on each tier, or on few of them."""
    chosen = ("device", "cpu", "nvme")[: 3 if stage else 1] if _every_tier else FEW[stage]
    if "device" in chosen:
        yield {}
    for tier in (name for name in chosen if name != "device"):
        offload = {"optimizer": tier, "gradients": tier, "nvme_path": tempfile.gettempdir(), "nvme_allow_ram": True}
        yield {"offload": {**offload, "parameters": tier} if stage == 3 else offload}


CASES: dict[str, Callable[[], None]] = {}


def case(body: Callable[[], None]) -> Callable[[], None]:
    CASES[body.__name__] = body
    return body


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))


def sharded(stage: int = 3, precision: str = "32-true", model: Any = None, **groups: Any) -> tuple[Any, Any]:
    """Return a model and a strategy that holds it; every block is a unit."""
    model = model or network()
    strategy: Any = ZeROStrategy(stage)  # type: ignore[arg-type]
    config = ZeROConfig.of(stage, sharding=ShardingConfig(min_unit_numel=1), **groups)
    strategy.engine = Engine(
        model,
        [torch.optim.AdamW(model.parameters(), lr=1e-2)],
        config=config,
        precision=resolve_precision(precision),
        mesh=Mesh.data_only(make_comm()),
        device=torch.device("cpu"),
    )
    return model, strategy


def batch(number: int) -> Tensor:
    rank = torch.distributed.get_rank()
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2 * number + rank))


def backward(model: nn.Module, engine: Engine, number: int = 0, *, last: bool = True) -> None:
    """Run a micro-batch. ``last``: of its step."""
    engine.begin_step()
    x = batch(number).to(engine.precision.compute)
    loss = model(x).float().square().mean()
    engine.end_forward()
    engine.begin_backward(eager=last)
    loss.backward()
    engine.end_backward(local=not last)


def step(model: nn.Module, engine: Engine, number: int = 0) -> None:
    backward(model, engine, number)
    engine.step(0, engine.optimizers[0].sharded.optimizer.step)
    engine.zero_grad(0)


def sent(strategy: Any) -> int:
    return strategy.traffic.elements["all_gather"]


def refused(message: str, body: Callable[[], Any]) -> None:
    with pytest.raises(StateError, match=message):
        body()


# --- gathered_parameters ----------------------------------------------------------------------------------------------


@case
def only_the_part_is_gathered() -> None:
    model, strategy = sharded()
    whole, parts = network(), (model[1], model[1][0].weight, [model[1]], [model[1][0].bias, model[1][0]])
    for part in parts:
        before = sent(strategy)
        with strategy.gathered_parameters(part):
            assert sent(strategy) - before == SHARD
            assert torch.equal(model[1][0].weight, whole[1][0].weight)
            assert torch.equal(model[1][0].bias, whole[1][0].bias)
        assert sent(strategy) - before == SHARD
        assert strategy.memory_bytes()["parameters"] == 0
    before = sent(strategy)
    with strategy.gathered_parameters([model[0], model[2][0].bias]):
        assert sent(strategy) - before == 2 * SHARD


@case
def a_part_is_modules_and_parameters() -> None:
    _, strategy = sharded()
    for part in ("1.0.weight", torch.ones(3), [torch.ones(3)], {"weight": 1}):
        refused("for a part of the model, but a part is a module", lambda part=part: enter(strategy, part))


def enter(strategy: Any, part: Any) -> None:
    with strategy.gathered_parameters(part):
        pass


@case
def writes_are_kept_on_every_tier() -> None:
    for stage in (1, 3):
        for groups in tiers(stage):
            model, strategy = sharded(stage, **groups)
            with strategy.gathered_parameters([model[0], model[2][0].weight], modify=True), torch.no_grad():
                model[0][0].weight.mul_(2.0)
                model[2][0].weight.data.fill_(3.0)
            expected = network()
            assert torch.equal(model[0][0].weight, 2.0 * expected[0][0].weight)
            assert (model[2][0].weight == 3.0).all()
            assert torch.equal(model[2][0].bias, expected[2][0].bias)
            step(model, strategy.engine)
            assert 0 < (model[2][0].weight - 3.0).abs().max() < 0.1
            strategy.engine.offload.close()


@case
def a_write_belongs_to_the_innermost_context() -> None:
    model, strategy = sharded()
    weight = model[0][0].weight
    with torch.no_grad():
        with strategy.gathered_parameters(modify=True):
            weight.fill_(1.0)
            with strategy.gathered_parameters(model[0]):
                assert (weight == 1.0).all()
            with strategy.gathered_parameters([weight]):
                weight.sum()
            weight.add_(1.0)
        with strategy.gathered_parameters(model[0]), strategy.gathered_parameters(weight, modify=True):
            weight.add_(1.0)

        def writes_outside() -> None:
            with strategy.gathered_parameters():
                weight.add_(1.0)
                with strategy.gathered_parameters(model[0], modify=True):
                    pass

        refused("opened for reading", writes_outside)
    assert (weight == 4.0).all()


@case
def forwards_inside_send_nothing_and_may_differ_in_number() -> None:
    model, strategy = sharded()
    expected = network()(batch(0))
    rank = torch.distributed.get_rank()
    with strategy.gathered_parameters(model), torch.no_grad():
        before = sent(strategy)
        for _ in range(1 + 3 * rank):
            assert torch.equal(model(batch(0)), expected)
        assert sent(strategy) == before
    assert strategy.memory_bytes()["parameters"] == 0
    with strategy.gathered_parameters(model[:2]), torch.no_grad():  # the next block is not fetched ahead
        before = sent(strategy)
        for _ in range(1 + rank):
            model[1](model[0](batch(0)))
        assert sent(strategy) == before
    assert strategy.memory_bytes()["parameters"] == 0


@case
def a_rollout_inside_a_step_changes_no_number() -> None:
    plain_model, plain = sharded()
    model, strategy = sharded()
    for number in range(3):
        step(plain_model, plain.engine, number)
        engine = strategy.engine
        engine.begin_step()
        with strategy.gathered_parameters(model), torch.no_grad():
            model(batch(9))
        loss = model(batch(number)).square().mean()
        engine.end_forward()
        engine.begin_backward(eager=True)
        loss.backward()
        engine.end_backward()
        engine.step(0, engine.optimizers[0].sharded.optimizer.step)
        engine.zero_grad(0)
    with plain.gathered_parameters(), strategy.gathered_parameters():
        assert all(torch.equal(a, b) for a, b in zip(plain_model.parameters(), model.parameters(), strict=True))


@case
def a_step_inside_is_seen_by_the_next_use() -> None:
    plain_model, plain = sharded()
    model, strategy = sharded()
    with strategy.gathered_parameters(model, modify=True):
        for number in range(3):
            step(plain_model, plain.engine, number)
            before = sent(strategy)
            step(model, strategy.engine, number)
            assert sent(strategy) - before == (0 if number == 0 else 3 * SHARD)  # once for forward and backward
        outputs = model(batch(5))
    assert strategy.memory_bytes()["parameters"] == 0
    assert torch.equal(outputs, plain_model(batch(5)))


# --- gradients --------------------------------------------------------------------------------------------------------


def averaged(*numbers: int) -> dict[str, Tensor]:
    """Return the gradients of plain torch, accumulated and averaged over the ranks as DDP does."""
    model = network()
    for number in numbers:
        model(batch(number)).square().mean().backward()
    result = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for grad in result.values():
        torch.distributed.all_reduce(grad)
        grad /= 2
    return result


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].shape == value.shape
        assert found[name].dtype == torch.float32
        assert (found[name] - value).abs().max() <= 1e-6 * value.abs().max(), name


def norms_of(gradients: dict[str, Tensor], order: float = 2.0) -> dict[str, Tensor]:
    return {name: torch.linalg.vector_norm(value, order) for name, value in gradients.items()}


@case
def gradients_are_those_of_ddp() -> None:
    expected = averaged(0, 1)
    for stage in (0, 1, 2, 3):
        for groups in tiers(stage):
            model, strategy = sharded(stage, **groups)
            backward(model, strategy.engine, 0, last=False)
            assert_close(dict(strategy.full_gradients()), averaged(0))
            backward(model, strategy.engine, 1)
            for order in (2.0, 1.0, float("inf")):
                assert_close(strategy.grad_norms(norm_type=order), norms_of(expected, order))
            assert_close(dict(strategy.full_gradients()), expected)
            part = {name: expected[name] for name in ("0.0.weight", "2.0.weight", "2.0.bias")}
            assert_close(dict(strategy.full_gradients([model[0][0].weight, model[2]])), part)
            assert_close(strategy.grad_norms([model[0][0].weight, model[2]]), norms_of(part))
            strategy.engine.offload.close()


@case
def a_unit_is_gathered_once_and_norms_gather_nothing() -> None:
    model, strategy = sharded()
    backward(model, strategy.engine)
    before = sent(strategy)
    strategy.grad_norms()
    assert sent(strategy) == before
    strategy.grad_norm()
    loop = strategy.full_gradients()
    for number in range(6):
        next(loop)
        assert sent(strategy) - before == (1 + number // 2) * SHARD  # weight and bias of a block together


@case
def clipped_gradients_are_shown_as_the_optimizer_gets_them() -> None:
    for stage in (0, 1, 3):
        for private in (False, True):
            model, strategy = sharded(stage, precision="bf16-mixed")
            strategy.engine.private_gradients = private
            backward(model, strategy.engine)
            whole = dict(strategy.full_gradients())
            norm = strategy.engine.clip_norm_(0, 1e-3)
            factor = 1e-3 / (norm + 1e-6)
            assert_close(dict(strategy.full_gradients()), {name: value * factor for name, value in whole.items()})
            assert_close(strategy.grad_norms(), norms_of({name: value * factor for name, value in whole.items()}))


@case
def gradients_are_without_the_loss_scale() -> None:
    model, strategy = sharded(2, precision="16-mixed")
    for private in (False, True):
        strategy.engine.private_gradients = private
        engine = strategy.engine
        engine.begin_step()
        loss = model(batch(0)).square().mean()
        engine.end_forward()
        engine.begin_backward(eager=True)
        (loss * engine.scaler.scale).backward()
        engine.end_backward()
        found = dict(strategy.full_gradients())
        for name, value in averaged(0).items():
            assert (found[name] - value).abs().max() <= 1e-2 * value.abs().max()
        assert_close(strategy.grad_norms(), norms_of(found))
        engine.zero_grad(0)


@case
def without_gradients_there_is_an_error() -> None:
    model, strategy = sharded()
    refused("there is no gradient to read", lambda: list(strategy.full_gradients()))
    backward(model, strategy.engine)
    strategy.engine.zero_grad(0)
    refused("there is no gradient to read", strategy.grad_norms)
    backward(model, strategy.engine)
    with pytest.raises(ConfigError, match="it must be positive"):
        strategy.grad_norms(norm_type=0.0)


# --- offload_states ---------------------------------------------------------------------------------------------------

AWAY = r"after strategy\.offload_states.*Call strategy\.reload_states"


@case
def states_come_back_with_the_same_bits() -> None:
    for stage in (0, 1, 2, 3):
        for groups in tiers(stage):
            runs = [sharded(stage, precision="bf16-mixed", **groups) for _ in range(2)]
            for number in range(3):
                for (model, strategy), gives in zip(runs, (False, True), strict=True):
                    for micro in range(2):
                        if gives:
                            strategy.offload_states()
                            strategy.reload_states()
                        backward(model, strategy.engine, 2 * number + micro)
                    if gives:
                        strategy.offload_states("optimizer")
                        strategy.offload_states("gradients")
                        assert strategy.engine.state_offload.kinds == {"optimizer", "gradients"}
                        strategy.reload_states()
                    strategy.engine.step(0, strategy.engine.optimizers[0].sharded.optimizer.step)
                    strategy.engine.zero_grad(0)
            (model, strategy), (other, gave) = runs
            with strategy.gathered_parameters(), gave.gathered_parameters():
                assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
            for _, each in runs:
                each.engine.offload.close()


def refuses_what_is_away(stage: int) -> None:
    model, strategy = sharded(stage)
    engine = strategy.engine
    step(model, engine)
    backward(model, engine)
    strategy.offload_states()
    run = engine.optimizers[0].sharded.optimizer.step
    uses: list[Callable[[], Any]] = [
        lambda: backward(model, engine),
        lambda: engine.begin_backward(eager=True),
        lambda: engine.step(0, run),
        lambda: engine.clip_norm_(0, 1.0),
        lambda: model[0][0].weight.sum(),
        lambda: model[0][0].weight.grad,
        lambda: model[0](batch(0)),
        lambda: enter(strategy, model),
        lambda: list(strategy.full_gradients()),
        engine.check_complete,
        engine.optimizers[0].sharded.states.full_state_dict,
        engine.trainable_masters,
    ]
    for use in uses:
        refused(AWAY, use)
    strategy.reload_states()
    engine.step(0, run)
    engine.zero_grad(0)
    step(model, engine, 1)
    assert all(flat.users == 0 for flat in engine.flats)


@case
def what_is_away_is_not_used() -> None:
    for stage in (1, 3):
        refuses_what_is_away(stage)


@case
def the_optimizer_alone_may_be_away_during_forward_and_backward() -> None:
    model, strategy = sharded()
    strategy.offload_states("optimizer")
    backward(model, strategy.engine)
    refused(AWAY, lambda: strategy.engine.step(0, strategy.engine.optimizers[0].sharded.optimizer.step))
    strategy.reload_states()
    strategy.engine.step(0, strategy.engine.optimizers[0].sharded.optimizer.step)
    with pytest.raises(ConfigError, match="states are of the kinds parameters, masters, optimizer, gradients"):
        strategy.offload_states("moments")


# --- full_weights -----------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Blocks with a tied weight, a buffer, and a parameter that is frozen."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.blocks[0].weight
        self.blocks[1].weight.requires_grad_(False)
        self.register_buffer("count", torch.ones(2, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return self.last(x)


def exactly(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@case
def a_stream_has_what_the_state_dict_has() -> None:
    for stage in (0, 1, 2, 3):
        for groups in tiers(stage):
            model, strategy = sharded(stage, precision="bf16-mixed", model=Tied(), **groups)
            step(model, strategy.engine)
            with strategy.gathered_parameters():
                expected = {name: value.detach().clone() for name, value in model.state_dict().items()}
            exactly(dict(strategy.full_weights()), expected)
            found = dict(strategy.full_weights(dtype=torch.bfloat16))
            exactly(found, {k: v.bfloat16() if v.is_floating_point() else v for k, v in expected.items()})
            assert found["last.weight"] is found["blocks.0.weight"]
            exactly(dict(strategy.full_weights(model.last)), {k: expected[f"last.{k}"] for k in ("weight", "bias")})
            found["last.bias"].zero_()  # a copy
            exactly(dict(strategy.full_weights()), expected)
            strategy.engine.offload.close()


@case
def a_stream_holds_two_units() -> None:
    model, strategy = sharded(model=Tied(12))
    step(model, strategy.engine)
    unit = 2 * SHARD * 4
    before = sent(strategy)
    with LiveBytes() as live:
        for flat in strategy.engine.flats:
            live.note(flat.master)
        start = live.now
        live.reset_peak()
        names = [name for name, _ in strategy.full_weights(model.blocks)]
        assert unit < live.peak - start <= 2 * unit + 1000
    assert len(names) == 24
    assert sent(strategy) - before == 11 * SHARD + shards_of_root(strategy)


def shards_of_root(strategy: Any) -> int:
    return sum(flat.layout.shard for unit in strategy.engine.units if unit.is_root for flat in unit.flats)


# --- frozen models ----------------------------------------------------------------------------------------------------


@case
def a_frozen_model_is_released_block_by_block_also_without_no_grad() -> None:
    model = network()
    model[:2].requires_grad_(False)
    model, strategy = sharded(model=model)
    engine = strategy.engine
    engine.begin_step()
    with torch.no_grad():
        expected = model[1](model[0](batch(0)))
    found = model[1](model[0](batch(0)))
    assert torch.equal(found, expected)
    assert not any(flat.is_gathered for flat in engine.flats[:2])
    model[2](found).square().mean().backward()
    engine.gatherer.release_all()
    x = batch(0).requires_grad_()
    model[1](model[0](x)).square().mean().backward()  # what is frozen passes gradients on
    assert x.grad is not None
    assert x.grad.abs().max() > 0


# --- run --------------------------------------------------------------------------------------------------------------


def run_all(rank: int, world_size: int, every_tier: bool) -> dict[str, str]:
    global _every_tier
    _every_tier = every_tier
    found: dict[str, str] = {}
    for name, body in CASES.items():
        try:
            body()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
            break  # the other rank may be at another place now
    return found


@functools.cache
def outcome(every_tier: bool) -> list[dict[str, str]]:
    return spawn(run_all, 2, every_tier, timeout_s=100)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("every_tier", few_or_all(False, True))
def test_on_two_ranks(every_tier: bool, name: str) -> None:
    for rank, found in enumerate(outcome(every_tier)):
        assert found.get(name, "not run: an earlier case failed") == "", f"rank {rank}"
