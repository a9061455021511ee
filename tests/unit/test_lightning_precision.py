"""`ZeROPrecision`: dtypes, the closure, clipping and the loss scale, without ranks."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import (
    BitsandbytesPrecision,
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    TransformerEnginePrecision,
)
from torch import nn

from ls_strategy.errors import ConfigError, PlanError
from ls_strategy.fabric.precision import ZeROFabricPrecision
from ls_strategy.lightning.precision import ZeROPrecision


@pytest.mark.parametrize(("name", "dtype"), [("bf16-true", torch.bfloat16), ("64-true", torch.float64)])
def test_floating_inputs_are_cast_and_others_are_not(name: str, dtype: torch.dtype) -> None:
    batch = {"x": torch.ones(2), "y": torch.ones(2, dtype=torch.int64), "name": "a"}
    cast = ZeROPrecision(name).convert_input(batch)
    assert (cast["x"].dtype, cast["y"].dtype, cast["name"]) == (dtype, torch.int64, "a")


def test_mixed_precision_leaves_inputs() -> None:
    assert ZeROPrecision("bf16-mixed").convert_input(torch.ones(2)).dtype == torch.float32


def test_a_batch_is_reported_before_it_is_cast() -> None:
    plugin = ZeROPrecision("64-true")
    seen: list[str] = []
    plugin.on_batch = lambda: seen.append("batch")
    plugin.convert_input(torch.ones(1))
    assert seen == ["batch"]


@pytest.mark.parametrize(("name", "dtype"), [("bf16-true", torch.float32), ("64-true", torch.float64)])
def test_weights_are_initialised_unrounded(name: str, dtype: torch.dtype) -> None:
    with ZeROPrecision(name).module_init_context():
        assert nn.Linear(1, 1).weight.dtype == dtype
    assert torch.get_default_dtype() == torch.float32


def test_the_default_dtype_comes_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="mine"), ZeROPrecision("64-true").forward_context():
        raise ValueError("mine")
    assert torch.get_default_dtype() == torch.float32


def test_a_plugin_of_lightning_becomes_ours() -> None:
    for plugin in (MixedPrecision("bf16-mixed", "cpu"), MixedPrecision("16-mixed", "cpu"), DoublePrecision()):
        assert ZeROPrecision.from_plugin(plugin).precision == plugin.precision
    assert ZeROFabricPrecision.from_plugin(ZeROPrecision("16-mixed")).precision == "16-mixed"
    assert ZeROPrecision.from_plugin(HalfPrecision("bf16-true")).policy.cast == torch.bfloat16


class Mine(MixedPrecision):
    """A user's own."""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: object.__new__(BitsandbytesPrecision), r"BitsandbytesPrecision.*frozen='nf4'"),
        (lambda: object.__new__(TransformerEnginePrecision), r"TransformerEnginePrecision.*matmul='fp8'"),
        (lambda: Mine("bf16-mixed", "cpu"), r"Mine \(precision='bf16-mixed'\), a class of your own.*ZeROPrecision"),
        (
            lambda: MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=4.0)),
            "a loss scale of its own.*initial_power",
        ),
    ],
)
@pytest.mark.parametrize("ours", [ZeROPrecision, ZeROFabricPrecision])
def test_what_would_be_dropped_silently_is_refused(make: Any, message: str, ours: type[ZeROPrecision]) -> None:
    with pytest.raises(ConfigError, match=message):
        ours.from_plugin(make())


def test_a_plugin_without_an_equivalent_is_refused() -> None:
    plugin: Any = SimpleNamespace(precision="nf4")
    with pytest.raises(ConfigError, match=r"Got the precision plugin SimpleNamespace .precision='nf4'., but"):
        ZeROPrecision.from_plugin(plugin)


class Scaler:
    """A loss scale of 8, whose state is what was loaded."""

    scale = 8.0

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state


def engine(**more: Any) -> Any:
    return SimpleNamespace(**{"scaler": Scaler(), "stepper": None, "index_of": lambda _: 0, **more})


def test_a_loss_scale_from_a_checkpoint_waits_for_the_engine() -> None:
    plugin, made = ZeROPrecision("16-mixed"), engine()
    plugin.load_state_dict({"scale": 4.0})
    assert plugin.state_dict() == {}
    plugin.attach(made)
    assert made.scaler.state == plugin.state_dict() == {"scale": 4.0}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ({"MixedPrecision": {"scale": 2.0}}, {"scale": 2.0}),
        ({"MixedPrecision": {"scale": 2.0}, "ZeROPrecision": {"scale": 4.0}}, {}),
    ],
    ids=["of another strategy", "unless there is our own"],
)
def test_the_loss_scale_is_loaded(saved: dict[str, Any], loaded: dict[str, Any]) -> None:
    plugin, made = ZeROPrecision("16-mixed"), engine()
    plugin.attach(made)
    plugin.on_load_checkpoint(saved)
    assert made.scaler.state == loaded


@pytest.mark.parametrize(
    ("value", "algorithm", "expected"), [(0.5, "norm", ("norm", 0.5)), (2, "value", ("value", 2.0))]
)
def test_clipping_is_the_engines(value: Any, algorithm: Any, expected: Any) -> None:
    calls: list[Any] = []
    plugin = ZeROPrecision()
    plugin.engine = engine(
        clip_norm_=lambda _, limit: calls.append(("norm", limit)),
        clip_value_=lambda _, limit: calls.append(("value", limit)),
    )
    plugin.clip_gradients(None, value, algorithm)  # type: ignore[arg-type]
    assert calls == [expected]
    plugin.clip_gradients(None, 0, algorithm)  # type: ignore[arg-type]
    assert calls == [expected]


def test_a_backward_that_has_run_is_not_repeated() -> None:
    plugin, loss = ZeROPrecision(), torch.ones(1, requires_grad=True)

    @contextmanager
    def done(_: Any) -> Any:
        yield False

    plugin.around_backward = done
    plugin.backward(loss, None, None)  # type: ignore[arg-type]
    assert loss.grad is None


def step(optimizer: torch.optim.Optimizer, *, takes_closure: bool) -> Any:
    plugin, calls = ZeROPrecision(), []
    sharded = SimpleNamespace(takes_closure=takes_closure)
    plugin.engine = engine(
        scaler=None,
        finish=lambda _: calls.append("finish"),
        optimizers=[SimpleNamespace(sharded=sharded)],
        step=lambda _, run: run(),
    )
    plugin._after_closure = lambda *_: calls.append("clip")  # type: ignore[method-assign]

    def closure() -> str:
        calls.append("closure")
        return "loss"

    return plugin.optimizer_step(optimizer, model=None, closure=closure), calls  # type: ignore[arg-type]


def test_gradients_are_finished_between_the_closure_and_clipping() -> None:
    result, calls = step(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), takes_closure=False)
    assert (result, calls) == ("loss", ["closure", "finish", "clip"])


class Passes(torch.optim.SGD):
    """Calls its closure so many times."""

    def __init__(self, passes: int) -> None:
        super().__init__(nn.Linear(1, 1).parameters(), lr=0.1)
        self.passes = passes
        self.results: list[Any] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.results += [closure() for _ in range(self.passes)]


def test_an_optimizer_gets_the_result_of_the_closure_that_has_run() -> None:
    optimizer = Passes(1)
    _, calls = step(optimizer, takes_closure=True)
    assert optimizer.results == ["loss"]
    assert calls.count("closure") == 1


def test_an_optimizer_that_calls_its_closure_again_is_refused() -> None:
    with pytest.raises(PlanError, match="calls its closure several times"):
        step(Passes(2), takes_closure=True)
