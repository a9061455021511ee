"""`EngineStrategy`: what users read off a run is the engine's, and of the right communicator."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn

from ls_strategy.errors import StateError
from ls_strategy.lightning.strategy import ZeROStrategy
from tests.unit.one_rank import adamw, backward, engine_on, network, steps, weights


def strategy_of(engine: Any) -> Any:
    strategy = ZeROStrategy(3)
    strategy.engine = engine
    return strategy


def trained(**options: Any) -> tuple[nn.Module, Any]:
    model = network()
    return model, strategy_of(engine_on(model, [adamw(model.parameters())], **options))


def two_optimizers() -> tuple[nn.Module, Any, list[torch.optim.Optimizer]]:
    model = network()
    halves = list(model.parameters())[:2], list(model.parameters())[2:]
    optimizers = [adamw(half) for half in halves]
    return model, strategy_of(engine_on(model, optimizers, stage=1)), optimizers


def test_norms_are_those_of_all_gradients_or_of_one_optimizers() -> None:
    """The optimizer may be Lightning's wrapper, and one that is not the run's is refused."""
    model, strategy, optimizers = two_optimizers()
    backward(strategy.engine, 0)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    expected = torch.nn.utils.get_total_norm(grads)
    assert strategy.grad_norm().item() == pytest.approx(expected.item(), rel=1e-6)
    largest = max(g.abs().max().item() for g in grads[2:])
    assert strategy.grad_norm(float("inf"), optimizer=optimizers[1]).item() == pytest.approx(largest, rel=1e-6)
    wrapper = LightningOptimizer(optimizers[0])
    assert torch.equal(strategy.grad_norm(optimizer=wrapper), strategy.grad_norm(optimizer=optimizers[0]))
    with pytest.raises(StateError, match=r"Got a AdamW .* that configure_optimizers has not returned\. Pass one of"):
        strategy.grad_norm(optimizer=adamw(model.parameters()))


def test_every_axis_has_its_own_traffic() -> None:
    meters = {name: object() for name in ("zero", "tensor", "sequence", "expert")}
    axes = {name: SimpleNamespace(traffic=meter) for name, meter in meters.items()}
    strategy = strategy_of(SimpleNamespace(comm=axes["zero"], mesh=SimpleNamespace(**axes)))
    found = [
        strategy.traffic,
        strategy.tensor_parallel_traffic,
        strategy.context_parallel_traffic,
        strategy.expert_parallel_traffic,
    ]
    assert found == list(meters.values())


def test_a_replica_has_a_number_and_a_count() -> None:
    strategy = strategy_of(None)
    strategy.parallel = strategy._run.parallel = SimpleNamespace(data_rank=(2, 5))
    assert (strategy.data_parallel_rank, strategy.data_parallel_size) == (2, 5)


@pytest.mark.parametrize(("scaler", "scale"), [(None, None), (SimpleNamespace(scale=64.0), 64.0)], ids=["", "fp16"])
def test_bytes_steps_waits_and_the_loss_scale_are_the_engines(scaler: Any, scale: float | None) -> None:
    engine = SimpleNamespace(
        memory_bytes=lambda: {"parameters": 8}, precision="policy", skipped_steps=3, exposed_step_s=0.5, scaler=scaler
    )
    strategy = strategy_of(engine)
    assert strategy.loss_scale == scale
    assert strategy.memory_bytes() == {"parameters": 8}
    assert (strategy.precision_policy, strategy.skipped_steps, strategy.exposed_step_s) == ("policy", 3, 0.5)


@pytest.mark.parametrize("as_module", [True, False])
def test_gathered_parameters_of_a_part_are_full_inside(as_module: bool) -> None:
    model, strategy = trained()
    expected = network()[1]
    part = model.get_submodule("1")
    with strategy.gathered_parameters(part if as_module else part.parameters()):
        for mine, theirs in zip(part.parameters(), expected.parameters(), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("modify", [True, False])
def test_what_is_written_to_gathered_parameters_is_kept_if_wanted_and_an_error_otherwise(modify: bool) -> None:
    model, strategy = trained()
    said = nullcontext() if modify else pytest.raises(StateError, match="modify")
    with said, strategy.gathered_parameters(modify=modify), torch.no_grad():
        for p in model.parameters():
            p.fill_(2.0)
    if modify:
        assert all((values == 2.0).all() for values in weights(strategy.engine))
        steps(strategy.engine, 1)  # from these values
        assert all((values - 2.0).abs().max() < 0.1 for values in weights(strategy.engine))


def test_nothing_can_be_read_before_the_set_up() -> None:
    with pytest.raises(StateError, match="the model is not set up yet"):
        strategy_of(None).memory_bytes()
