"""The engine on one process, without Lightning: one step from end to end."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ls_strategy.access.average import exchange_masters
from ls_strategy.config import LossScaleConfig
from ls_strategy.distributed.comm import Comm
from ls_strategy.engine import Engine
from ls_strategy.errors import PlanError, StateError
from ls_strategy.zero.flat.states import UpdateState
from tests.unit.one_rank import backward, engine_on, network, small, steps, weights


def plain(count: int) -> list[Tensor]:
    """Return the weights of a plain loop with torch's fused AdamW."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for number in range(count):
        batch = torch.randn(4, 24, generator=torch.Generator().manual_seed(number))
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(("stage", "offload"), [(0, None), (1, None), (3, None), (1, "cpu"), (2, "cpu"), (3, "cpu")])
def test_steps_are_those_of_a_plain_loop(stage: int, offload: str | None) -> None:
    _model, engine = small(stage=stage, offload=offload)
    torch.testing.assert_close(steps(engine), plain(3), rtol=1e-6, atol=1e-7)


def test_buffers_are_those_of_rank_0_in_every_step_that_asks_for_it() -> None:
    class Second(Comm):
        def broadcast_(self, tensor: Tensor, source: int = 0) -> None:
            assert source == 0
            tensor.fill_(7)

    model = network()
    model.register_buffer("mean", torch.zeros(3))
    model[0].register_buffer("count", torch.zeros((), dtype=torch.int64))  # type: ignore[operator]
    engine = engine_on(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    engine.comm = Second(None, None)
    engine.comm.rank, engine.comm.world_size = 1, 2
    found = []
    for after in (True, False, True):
        engine.begin_step(sync_buffers_after=after)
        found.append([b.unique().tolist() for b in model.buffers()])
        for b in model.buffers():
            b.zero_()
    assert found == [[[7], [7]], [[7], [7]], [[0], [0]]]


@pytest.mark.parametrize("stage", [1, 3])
def test_the_norm_is_that_of_all_gradients(stage: int) -> None:
    _model, engine = small(stage=stage, offload="cpu")
    backward(engine, 0)
    baseline = network()
    baseline(torch.randn(4, 24, generator=torch.Generator().manual_seed(0))).square().mean().backward()
    expected = nn.utils.get_total_norm([p.grad for p in baseline.parameters() if p.grad is not None])
    torch.testing.assert_close(engine.grad_norm(), expected)


def test_clipping_leaves_the_norm_of_before() -> None:
    _model, engine = small(stage=1, offload="cpu")
    backward(engine, 0)
    norm = engine.clip_norm_(0, 1e-3)
    assert norm > 1e-3
    assert engine.grad_norm() == norm


def test_the_norm_needs_gradients() -> None:
    _model, engine = small()
    with pytest.raises(StateError, match="there is no gradient to read"):
        engine.grad_norm()


def test_a_value_above_the_limit_is_clamped() -> None:
    model, engine = small(stage=0)
    backward(engine, 0)
    engine.clip_value_(0, 1e-4)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert max(g.abs().max().item() for g in grads) == pytest.approx(1e-4)


def test_an_overflow_skips_the_step_and_halves_the_scale() -> None:
    _model, engine = small(
        stage=1, offload="cpu", trainer_precision="16-true", loss_scale=LossScaleConfig(hysteresis=1)
    )
    before, scale = weights(engine), engine.scaler.scale if engine.scaler else 0.0
    backward(engine, 0, factor=float("inf"))
    assert not engine.finish(0)
    engine.step(0, engine.optimizers[0].sharded.optimizer.step)
    assert engine.skipped_steps == 1
    assert engine.scaler is not None
    assert engine.scaler.scale == scale / 2
    assert all(map(torch.equal, weights(engine), before))


def test_zero_grad_is_ignored_while_gradients_are_kept() -> None:
    model, engine = small(stage=0)
    backward(engine, 0)
    engine.keeps_gradients = True
    engine.zero_grad(0)
    assert all(p.grad is not None for p in model.parameters())
    engine.keeps_gradients = False
    engine.zero_grad(0)
    assert all(p.grad is None for p in model.parameters())


def test_a_second_engine_adopts_model_and_states() -> None:
    model, first = small(stage=1, offload="cpu")
    steps(first, 2)
    optimizer = first.optimizers[0].sharded.optimizer
    assert Engine.holding(model) is first
    second = engine_on(model, [optimizer], stage=3, offload="cpu")
    assert Engine.holding(model) is second
    torch.testing.assert_close(steps(second, 1, first=2), plain(3), rtol=1e-6, atol=1e-7)


def test_the_bare_optimizer_does_not_step() -> None:
    _model, engine = small(stage=1, offload="cpu")
    backward(engine, 0)
    with pytest.raises(StateError, match=r"AdamW.step\(\) was called on the bare optimizer"):
        engine.optimizers[0].sharded.optimizer.step()


def test_swapped_masters_come_back() -> None:
    _model, engine = small(stage=3, offload="cpu")
    before, others = weights(engine), [torch.zeros_like(m) for m in engine.trainable_masters()]
    exchange_masters(engine, others)
    assert not any(w.any() for w in weights(engine))
    exchange_masters(engine, others)
    assert all(map(torch.equal, weights(engine), before))


@pytest.mark.parametrize("stage", [1, 3])
def test_swapped_masters_are_what_the_next_forward_computes_with(stage: int) -> None:
    """Also where the parameters are copies of the masters, in another dtype."""
    model, engine = small(stage=stage, trainer_precision="bf16-true")
    steps(engine, 1)
    exchange_masters(engine, [torch.zeros_like(m) for m in engine.trainable_masters()])
    engine.begin_step()
    assert not model(torch.ones(2, 24, dtype=torch.bfloat16)).any()
    engine.end_forward()


def test_a_write_needs_modify() -> None:
    model, engine = small(stage=3, offload="cpu")
    param = next(iter(model.parameters()))
    with pytest.raises(StateError, match="opened for reading"), engine.gathered(), torch.no_grad():
        param.fill_(7.0)
    with engine.gathered(modify=True), torch.no_grad():
        param.fill_(7.0)
    assert weights(engine)[0].unique().tolist() == [7.0]


def test_weights_after_a_torn_backward_are_refused() -> None:
    _model, engine = small(stage=1, offload="cpu")
    engine.check_complete()
    engine.flats[0].update = UpdateState.UPDATED_EARLY
    engine.abort()
    with pytest.raises(StateError, match="do not belong to one step"):
        engine.check_complete()


def test_bytes_of_states_are_those_of_the_plan() -> None:
    _model, engine = small(stage=2, offload="cpu")
    steps(engine, 1)
    found, planned = engine.memory_bytes(), engine.plan.state_bytes()
    assert found["optimizer"] == planned["optimizer"]
    assert found["masters"] == planned["masters"]


def test_a_change_of_groups_is_noticed() -> None:
    _model, engine = small(stage=1, offload="cpu")
    optimizer = engine.optimizers[0].sharded.optimizer
    assert engine.follows([optimizer])
    assert not engine.follows([])
    removed = optimizer.param_groups[0]["params"].pop()
    assert not engine.follows([optimizer])
    with pytest.raises(PlanError, match=r"'2\.0\.bias' is in none of them any more"):
        engine.check_change([optimizer])
    optimizer.param_groups[0]["params"].append(removed)
    assert engine.follows([optimizer])
