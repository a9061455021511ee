"""What Lightning allows and ZeRO refuses, and the calls that the engine has to know of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn

from ls_strategy.errors import PlanError, StateError
from ls_strategy.lightning import guards


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)


class Clips(Plain):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        """By its own rule."""


class Looks(Plain):
    def on_after_backward(self) -> None:
        """Reads gradients."""


class Late(Plain):
    def on_before_zero_grad(self, _: Any) -> None:
        """Reads gradients."""


class Callback(pl.Callback):
    def on_before_optimizer_step(self, *_: Any) -> None:
        """Reads gradients."""


def trainer(*callbacks: Any, optimizers: Any = (), algorithm: str = "norm") -> Any:
    strategy = SimpleNamespace(optimizers=list(optimizers))
    return SimpleNamespace(callbacks=list(callbacks), strategy=strategy, gradient_clip_algorithm=algorithm)


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)


def hooked() -> torch.optim.SGD:
    optimizer = sgd()
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def manual() -> pl.LightningModule:
    module = Plain()
    module.automatic_optimization = False
    return module


@pytest.mark.parametrize(
    ("module", "run", "expected"),
    [
        (Plain(), trainer(optimizers=[sgd()]), False),
        (manual(), trainer(), True),
        (Clips(), trainer(), True),
        (Plain(), trainer(algorithm="value"), True),
        (Plain(), trainer(optimizers=[hooked()]), True),
    ],
    ids=["plain", "manual", "clips", "by value", "optimizer hook"],
)
def test_who_decides_when_to_step(module: Any, run: Any, expected: bool) -> None:
    assert guards.steps_by_itself(run, module, None) is expected


def test_hooks_between_backward_and_step() -> None:
    assert not guards.has_hooks_before_step(trainer(), Plain())
    assert guards.has_hooks_before_step(trainer(), Looks())
    assert guards.has_hooks_before_step(trainer(Callback()), Plain())
    assert not guards.has_hooks_before_step(trainer(), Late())


def test_hooks_between_backward_and_zero_grad() -> None:
    assert guards.has_hooks_after_backward(trainer(), Late())
    assert not guards.has_hooks_after_backward(trainer(), Plain())


def test_lightnings_own_callbacks_read_no_gradients() -> None:
    progress = pl.callbacks.LearningRateMonitor()
    assert not guards.has_hooks_after_backward(trainer(progress), Plain())


def test_zero_grad_of_lightnings_wrapper_is_the_optimizers() -> None:
    class Counts(torch.optim.SGD):
        calls = 0

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.calls += 1

    inner = Counts(nn.Linear(2, 1).parameters(), lr=0.1)
    wrapper = LightningOptimizer(inner)
    guards.forward_methods([wrapper])
    wrapper.zero_grad()
    assert inner.calls == 1


class Engine:
    """Records the calls that it gets."""

    def __init__(self) -> None:
        self.zeroed: list[set[int]] = []
        self.mirrored = 0

    def zero_params(self, params: Any, *, set_to_none: bool) -> None:
        self.zeroed.append({id(p) for p in params})

    def mirror_requires_grad(self) -> None:
        self.mirrored += 1


def test_zero_grad_of_a_module_reaches_the_engine_until_it_is_unwatched() -> None:
    module, engine = Plain(), Engine()
    guards.watch_methods(module, engine)  # type: ignore[arg-type]
    module.layer.zero_grad()
    assert engine.zeroed == [{id(p) for p in module.layer.parameters()}]
    guards.unwatch_methods(module)
    module.layer.zero_grad()
    assert len(engine.zeroed) == 1
    assert "zero_grad" not in vars(module.layer)


def test_an_overridden_zero_grad_clears_what_it_clears() -> None:
    class Keeps(nn.Linear):
        def zero_grad(self, set_to_none: bool = True) -> None:
            self.weight.grad = None

    module, engine = Plain(), Engine()
    module.layer = Keeps(2, 1)
    module.layer(torch.ones(1, 2)).sum().backward()
    guards.watch_methods(module, engine)  # type: ignore[arg-type]
    module.layer.zero_grad()
    assert engine.zeroed == [{id(module.layer.weight)}]
    assert isinstance(module.layer.bias.grad, Tensor)


def test_a_released_parameter_in_backward_is_explained() -> None:
    with pytest.raises(StateError, match="already released"), guards.explain_released_parameters():
        raise RuntimeError("setStorage: out of bounds for storage of size 0")
    with pytest.raises(RuntimeError, match="size mismatch"), guards.explain_released_parameters():
        raise RuntimeError("size mismatch")


def test_loading_into_a_meta_module_is_refused() -> None:
    weights = nn.Linear(2, 1).state_dict()
    with pytest.raises(PlanError, match="the weights would be lost"), guards.refuse_loading_into_meta():
        nn.Linear(2, 1, device="meta").load_state_dict(weights)


@pytest.mark.parametrize("hide", [lambda m: [m], lambda m: {"teacher": m}, lambda m: (m,)])
def test_a_hidden_module_without_memory_is_refused(hide: Any) -> None:
    module = Plain()
    module.layer.others = hide(nn.Linear(2, 1, device="meta"))
    with pytest.raises(PlanError, match=r"self\.layer\.others holds a Linear without memory.*self\.teacher = "):
        guards.refuse_hidden_meta(module)


def test_a_hidden_module_with_memory_and_parts_without_are_fine() -> None:
    module = Plain()
    module.layer = nn.Linear(2, 1, device="meta")
    module.layers = [module.layer, nn.Linear(2, 1)]
    guards.refuse_hidden_meta(module)
