"""From gradients to new weights: phases, shared parameters, and gradients that user code changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ls_strategy.config import LossScaleConfig
from ls_strategy.distributed.comm import Comm
from ls_strategy.engine import Engine
from ls_strategy.errors import PlanError, StateError
from ls_strategy.ops.norm import sum_of_squares
from ls_strategy.zero.flat import averages
from ls_strategy.zero.flat.parameters import unnoticed
from ls_strategy.zero.setup.share import Share
from ls_strategy.zero.step.global_norm import global_norm
from ls_strategy.zero.step.stepper import Phase
from tests.unit.one_rank import adamw, backward, engine_on, network, steps, weights


def take(engine: Engine, index: int = 0) -> None:
    engine.step(index, engine.optimizers[index].sharded.optimizer.step)


def test_the_phases_of_a_step() -> None:
    model = network()
    engine = engine_on(model, [adamw(model.parameters())], stage=1, offload="cpu")
    (state,) = engine.optimizers
    seen = [state.phase]
    backward(engine, 0)
    seen.append(state.phase)
    engine.finish(0)
    seen.append(state.phase)
    engine.clip_norm_(0, 1e-3)
    seen.append(state.phase)
    take(engine)
    seen.append(state.phase)
    engine.zero_grad(0)
    seen.append(state.phase)
    assert seen == [
        Phase.ACCUMULATING, Phase.ACCUMULATING, Phase.AVERAGED, Phase.CLIPPED, Phase.STEPPED, Phase.ACCUMULATING
    ]  # fmt: skip


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_gradients_without_zero_grad_add_up(stage: int) -> None:
    model, baseline = network(), network()
    engine = engine_on(model, [torch.optim.SGD(model.parameters(), lr=0.5)], stage=stage, offload=None)
    optimizer = torch.optim.SGD(baseline.parameters(), lr=0.5)
    for number in range(2):
        backward(engine, number)
        take(engine)
        baseline(torch.randn(4, 24, generator=torch.Generator().manual_seed(number))).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(weights(engine), [p.detach() for p in baseline.parameters()])


def test_a_parameter_of_two_optimizers_is_stepped_by_both() -> None:
    model, baseline = network(), network()
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(model.parameters(), lr=0.5),
        torch.optim.SGD(model[0].parameters(), lr=0.25),
    ]
    engine = engine_on(model, optimizers, stage=1)
    plain = [torch.optim.SGD(baseline.parameters(), lr=0.5), torch.optim.SGD(baseline[0].parameters(), lr=0.25)]
    backward(engine, 0)
    baseline(torch.randn(4, 24, generator=torch.Generator().manual_seed(0))).square().mean().backward()
    for index, optimizer in enumerate(plain):
        take(engine, index)
        optimizer.step()
    torch.testing.assert_close(weights(engine), [p.detach() for p in baseline.parameters()])


def test_clipping_by_one_optimizer_reopens_the_other() -> None:
    model = network()
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(model.parameters(), lr=0.5),
        torch.optim.SGD(model[0].parameters(), lr=0.25),
    ]
    engine = engine_on(model, optimizers, stage=1)
    backward(engine, 0)
    engine.finish(1)
    engine.clip_norm_(0, 1e-3)
    assert engine.optimizers[1].phase is Phase.ACCUMULATING
    assert engine.grad_norm(1) < 1e-3


def test_a_parameter_that_loses_its_gradient_is_not_stepped() -> None:
    model = network()
    engine = engine_on(model, [adamw(model.parameters())], stage=1, offload="cpu")
    before = weights(engine)
    backward(engine, 0)
    with unnoticed():
        model[0].zero_grad()
    engine.zero_params(model[0].parameters(), set_to_none=True)
    take(engine)
    same = list(map(torch.equal, weights(engine), before))
    assert same == [True, True, False, False, False, False]


def test_sharded_gradients_are_lost_by_a_change_of_groups() -> None:
    model = network()
    optimizer = adamw(model[1:].parameters())
    engine = engine_on(model, [optimizer], stage=2, offload="cpu")
    backward(engine, 0)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    later = engine_on(model, [optimizer], stage=2, offload="cpu")
    later.go_on_from(engine)
    with pytest.raises(StateError, match=r"of AdamW had gradients, and zero_grad\(\) was not called since"):
        later.finish(0)
    later.zero_grad(0)
    steps(later, 1, first=1)


def test_a_later_engine_counts_the_steps_on() -> None:
    model = network()
    optimizer = adamw(model.parameters())
    engine = engine_on(model, [optimizer], stage=1, offload="cpu")
    steps(engine, 2)
    later = engine_on(model, [optimizer], stage=1, offload="cpu")
    later.go_on_from(engine)
    assert later.schedule.begin_step(0) == 3


def test_an_optimizer_of_another_engine_has_no_number() -> None:
    model = network()
    engine = engine_on(model, [adamw(model.parameters())])
    assert engine.index_of(engine.optimizers[0].sharded.optimizer) == 0
    assert engine.index_of(adamw(network().parameters())) is None


def test_a_new_group_is_refused_where_ranks_hold_parts() -> None:
    model = network()
    optimizer = adamw(model[1:].parameters())
    engine = engine_on(model, [optimizer])
    optimizer.add_param_group({"params": list(model[0].parameters())})
    engine.stepper.check_change([optimizer], "")
    with pytest.raises(PlanError, match=r"AdamW changed while training runs, under tensor parallelism, which needs a"):
        engine.stepper.check_change([optimizer], "tensor")


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("change", [lambda p: p.grad.mul_(3), lambda p: setattr(p, "grad", p.grad * 3)])
def test_clipping_is_by_the_norm_of_the_gradients_as_user_code_left_them(stage: int, change: Any) -> None:
    model = network()
    engine = engine_on(model, [torch.optim.SGD(model.parameters(), lr=0.5)], stage=stage, offload=None)
    backward(engine, 0)
    before = engine.grad_norm(0).item()
    for p in model.parameters():
        change(p)
    assert engine.clip_norm_(0, before).item() == pytest.approx(3 * before)
    clipped = 3 * before * (before / (3 * before + 1e-6))  # as torch.nn.utils.clip_grad_norm_
    assert global_norm(engine.flats, Comm(None, None)).item() == pytest.approx(clipped)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("edited", [False, True])
def test_with_a_loss_scale_squares_are_summed_once_per_step(
    stage: int, edited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search for an overflow and the norm share the sums, unless user code changes gradients in between."""
    summed: list[int] = []

    def counting(grad: Tensor, *, unscale: float) -> Tensor:
        summed.append(grad.numel())
        return sum_of_squares(grad, unscale=unscale)

    monkeypatch.setattr(averages, "sum_of_squares", counting)
    model = network()
    scale = LossScaleConfig(initial_power=4)
    engine = engine_on(
        model, [adamw(model.parameters())], stage=stage, offload=None, trainer_precision="16-mixed", loss_scale=scale
    )
    engine.private_gradients = True  # as the strategy sets it without hooks of the user
    for number in range(2):
        backward(engine, number)
        assert engine.finish(0)
        expected = global_norm(engine.flats, Comm(None, None))
        if edited:
            for p in model.parameters():
                assert p.grad is not None
                p.grad.mul_(4)  # which is exact
        summed.clear()
        assert engine.clip_norm_(0, 1e-3) == expected * (4 if edited else 1)
        assert len(summed) == (len(engine.flats) if edited else 0)
        take(engine)
        engine.zero_grad(0)


def test_hooks_of_the_user_change_gradients_before_the_engine_takes_them() -> None:
    """Those that were registered before the engine was there, and after; in their order."""

    def hook(order: list[str], name: str, change: Callable[[Tensor], Any]) -> Callable[..., None]:
        def run(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            order.append(name)
            for group in optimizer.param_groups:
                for p in group["params"]:
                    change(p.grad)

        return run

    def train(*, sharded: bool) -> tuple[list[Tensor], list[str]]:
        model, order = network(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer.register_step_pre_hook(hook(order, "first", lambda grad: grad.add_(1.0)))
        engine = engine_on(model, [optimizer], stage=1) if sharded else None
        optimizer.register_step_pre_hook(hook(order, "second", lambda grad: grad.mul_(0.5)))
        if engine is not None:
            backward(engine, 0)
            take(engine)
            return weights(engine), order
        model(torch.randn(4, 24, generator=torch.Generator().manual_seed(0))).square().mean().backward()
        optimizer.step()
        return [p.detach() for p in model.parameters()], order

    (found, order), (expected, plain) = train(sharded=True), train(sharded=False)
    torch.testing.assert_close(found, expected)
    assert order == plain == ["first", "second"]


class WithTied(Share):
    """Another stage holds the same parameters, and its gradients are ones."""

    def sum_tied(self, gradients: Tensor) -> None:
        gradients.add_(1)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_gradients_of_parameters_that_two_stages_share_are_summed_once(stage: int) -> None:
    model = network()
    engine = engine_on(model, [torch.optim.SGD(model.parameters(), lr=0.5)], stage=stage, offload=None)
    engine.stepper._model = replace(engine.stepper._model, share=WithTied())
    tied = engine.flats[1]
    tied.plan = replace(tied.plan, tied=True)
    averages = []
    for counts in (False, True):
        backward(engine, 0)
        if counts:
            engine.stepper.owe_tied()
        for _ in range(2):
            engine.stepper.as_they_are(0)
        averages.append([flat.averages.tensor().clone() for flat in engine.flats])
        engine.zero_grad(0)
    changed = [(b - a)[:600].unique().tolist() for a, b in zip(*averages, strict=True)]
    assert changed[0] == changed[2] == [0.0]
    assert changed[1] == pytest.approx([1.0] * len(changed[1]))


class OtherStage(Comm):
    """All ranks, with one more that holds another part of the model: the ZeRO group of this rank has no part of it."""

    def __init__(self, *, square: float = 0.0, overflows: bool = False) -> None:
        super().__init__(None, None)
        self._square, self._overflows = square, overflows

    def reduce_numbers(self, value: Tensor, op: Any) -> Tensor:
        return value + self._square

    def agree(self, values: Tensor, op: Any = None) -> Tensor:
        return values.clamp_(min=int(self._overflows))


def test_gradients_are_clipped_by_the_norm_over_all_ranks() -> None:
    """And not over those of one ZeRO group: other tensor-parallel ranks and stages have other parameters."""
    model = network()
    engine = engine_on(model, [torch.optim.SGD(model.parameters(), lr=0.5)], stage=1)
    backward(engine, 0)
    alone = engine.grad_norm(0).item()
    engine.stepper._world = OtherStage(square=9.0)
    engine.zero_grad(0)
    backward(engine, 0)
    norm = engine.clip_norm_(0, 1.0).item()
    assert norm == pytest.approx((alone**2 + 9) ** 0.5)
    engine.stepper._world = OtherStage()
    assert global_norm(engine.flats, engine.stepper._world).item() == pytest.approx(alone / norm)


def test_an_overflow_of_any_rank_skips_the_step() -> None:
    """Also of a rank outside of this one's ZeRO group."""
    model = network()
    engine = engine_on(
        model, [adamw(model.parameters())], stage=1, trainer_precision="16-true",
        loss_scale=LossScaleConfig(initial_power=4),
    )  # fmt: skip
    before = weights(engine)
    engine.stepper._world = OtherStage(overflows=True)
    backward(engine, 0)
    take(engine)
    assert engine.stepper.skipped_steps == 1
    assert all(map(torch.equal, weights(engine), before))


def test_the_state_of_the_bare_optimizer_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = adamw(model.parameters())
    engine_on(model, [optimizer], stage=1)
    with pytest.raises(StateError, match=r"AdamW.state_dict\(\) was asked for .* Call trainer.strategy"):
        optimizer.state_dict()
    with pytest.raises(StateError, match=r"AdamW.state\[...\]"):
        optimizer.state[next(model.parameters())]
