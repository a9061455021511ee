"""What a module holds besides parameters: the device and dtype that it has under DDP."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ls_strategy.lightning import module_state
from ls_strategy.lightning.strategy import ZeROStrategy
from tests.trainers import bare_trainer
from tests.unit.one_rank import adamw, engine_on

META = torch.device("meta")


class OwnApply(nn.Module):
    """Holds a tensor that is neither parameter nor buffer, and moves it as torchmetrics does."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = torch.arange(4.0)
        self.weight = nn.Parameter(torch.ones(2))
        self.calls: list[str] = []

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        self.calls.append(fn.__qualname__.split(".")[1])
        self.cache = fn(self.cache)
        return self


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.own = OwnApply()
        self.inner = pl.LightningModule()
        self.metric = torchmetrics.MeanMetric()
        self.register_buffer("running", torch.ones(3))
        self.during_fit: dict[str, Any] = {}

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss = self.layer(batch).float().square().mean() + self.own.weight.float().sum()
        self.metric.update(loss.detach())
        self.during_fit = {
            "device": self.device,
            "inner device": self.inner.device,
            "dtype": self.dtype,
            "inner dtype": self.inner.dtype,
            "calls": list(self.own.calls),
            "cache": self.own.cache.dtype,
            "running": self.running.dtype,
            "weight": self.layer.weight.dtype,
        }
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_everything_but_parameters_is_moved() -> None:
    module = Module()
    before = {name: (p, p.data_ptr()) for name, p in module.named_parameters()}
    module_state.move(module, META)
    assert module.device == module.inner.device == META
    assert module.metric.device == module.metric.mean_value.device == META
    assert module.own.cache.device == module.running.device == META
    assert module.own.calls == ["to"]
    assert {name: (p, p.data_ptr()) for name, p in module.named_parameters()} == before
    assert {p.device.type for p in module.parameters()} == {"cpu"}


def test_gradients_stay_with_their_parameters() -> None:
    layer = nn.Linear(2, 2)
    layer.weight.grad = grad = torch.ones(2, 2)
    module_state.move(layer, META)
    assert layer.weight.grad is grad


def test_meta_parameters_and_buffers_wait_for_their_values() -> None:
    with META:
        norm = nn.BatchNorm1d(2)
    module_state.move(norm, torch.device("cpu"))
    assert all(t.is_meta for t in norm.state_dict().values())


def test_recurrent_layers_keep_their_list_of_weights() -> None:
    layer = nn.LSTM(2, 2)
    module_state.move(layer, torch.device("cpu"))
    assert all(a is b for a, b in zip(layer._flat_weights, layer.parameters(), strict=True))


@pytest.mark.parametrize("stage", [2, 3])
def test_parameters_of_an_engine_are_neither_gathered_nor_changed(stage: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), OwnApply())
    engine = engine_on(model, [adamw(model.parameters())], stage=stage, offload="cpu")
    gathered = [flat.is_gathered for flat in engine.flats]
    kinds = [type(p) for p in model.parameters()]
    module_state.move(model, torch.device("cpu"))
    assert [flat.is_gathered for flat in engine.flats] == gathered == [stage == 2] * len(gathered)
    assert [type(p) for p in model.parameters()] == kinds
    assert not any(flat.take_writes() for flat in engine.flats)
    assert model[1].calls == ["to"]


@pytest.mark.parametrize(
    ("dtype", "call"), [(torch.float64, "double"), (torch.float16, "half"), (torch.bfloat16, "bfloat16")]
)
def test_a_conversion_leaves_parameters_buffers_and_metrics(dtype: torch.dtype, call: str) -> None:
    module = Module()
    module_state.convert(module, dtype)
    assert module.dtype == module.inner.dtype == module.own.cache.dtype == dtype
    assert module.own.calls == [call]
    assert {p.dtype for p in module.parameters()} == {module.running.dtype, module.metric.mean_value.dtype}
    assert module.running.dtype == torch.float32


def during_fit(strategy: Any, precision: Any) -> dict[str, Any]:
    module = Module()
    trainer = bare_trainer(strategy, precision=precision, max_steps=1)
    trainer.fit(module, DataLoader(torch.ones(2, 4), batch_size=2))
    return module.during_fit


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
def test_a_module_sees_the_device_and_dtype_of_ddp(precision: str) -> None:
    trusted = during_fit(DDPStrategy(process_group_backend="gloo"), precision)
    found = during_fit(ZeROStrategy(stage=3), precision)
    calls, trusted_calls = found.pop("calls"), trusted.pop("calls")
    assert found == trusted
    assert len(calls) == len(trusted_calls) > 0
    assert calls[-1] == "to"


class WithNetwork(torchmetrics.Metric):
    """Judges by a network of its own, as metrics of images do."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(2, 2)
        self.add_state("total", torch.tensor(3.0))

    def update(self) -> None:
        self.total += 1

    def compute(self) -> Tensor:
        return self.total


def test_states_of_metrics_have_values_where_models_are_built_without_memory() -> None:
    with META, module_state.MetricsOnHost():
        layer, metric = nn.Linear(2, 2), WithNetwork()
    metric.update()
    assert metric.compute() == 4.0
    metric.reset()
    assert metric.total == 3.0
    assert layer.weight.is_meta
    assert metric.network.weight.is_meta, "a network inside a metric is filled like others"
