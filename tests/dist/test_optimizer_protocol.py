"""An optimizer's own `state_dict`, `load_state_dict`, hooks and writes to `state` count, as in plain torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy import StateError, ZeROStrategy
from ls_strategy.testing import spawn
from tests.marks import few_or_all
from tests.models import Curve, quiet
from tests.trainers import bare_trainer

pytestmark = pytest.mark.dist

STEPS = 8
PRECISIONS: dict[torch.dtype, Any] = {torch.float64: "64-true", torch.float32: "32-true"}


class Counting(torch.optim.AdamW):
    """Has an entry of its own in its state dict, and a rate that follows it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, 1e-2, amsgrad=True)
        self.count = torch.zeros(1)

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.05 / (1 + float(self.count))
        return result

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"].clone()
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "count"})


class Shared(torch.optim.SGD):
    """Keeps a state that belongs to no parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, 1e-2, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        shared = self.state["shared"]  # type: ignore[index]
        shared["n"] = shared.get("n", 0) + 1
        for group in self.param_groups:
            group["lr"] = 0.05 / (1 + shared["n"])
        return super().step(closure)


class Restoring(torch.optim.AdamW):
    """Sets its rate again whenever a state was loaded."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, 1e-2)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["lr"] = 3e-2


def hooked(params: Any) -> torch.optim.Optimizer:
    optimizer: Any = torch.optim.AdamW(params, 1e-2)
    optimizer.scale = 1.0
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "scale": o.scale * 0.5})

    def load(o: Any, state: dict[str, Any]) -> dict[str, Any]:
        o.scale = state["scale"]
        halved = {k: {**v, "exp_avg": v["exp_avg"] / 2} for k, v in state["state"].items()}
        return {"state": halved, "param_groups": state["param_groups"]}

    optimizer.register_load_state_dict_pre_hook(load)
    optimizer.register_step_pre_hook(
        lambda o, *_: [group.__setitem__("lr", 1e-2 * o.scale) for group in o.param_groups] and None
    )
    return optimizer


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "counting": Counting, "shared": Shared, "restoring": Restoring, "hooked": hooked,
}  # fmt: skip


def removes(optimizer: Any, module: Net) -> None:
    for p in module.net[0].parameters():
        optimizer.state.pop(p, None)
    del optimizer.state[module.net[2].weight]


def assigns(optimizer: Any, module: Net) -> None:
    for p in module.parameters():
        values = torch.linspace(0, 1, p.numel(), dtype=p.dtype).view(p.shape)
        optimizer.state[p] = {"step": torch.tensor(3.0), "exp_avg": values - 0.5, "exp_avg_sq": values + 0.1}


def replaces(optimizer: Any, module: Net) -> None:
    assigned: Any = defaultdict(dict)
    weight = module.net[0].weight
    values = torch.linspace(0, 1, weight.numel(), dtype=weight.dtype).view(weight.shape)
    assigned[weight] = {"step": torch.tensor(2.0), "exp_avg": values, "exp_avg_sq": values + 0.2}
    optimizer.state = assigned


CHANGES: dict[str, Callable[[Any, Net], None]] = {
    "clear": lambda optimizer, _: optimizer.state.clear(),
    "defaultdict": lambda optimizer, _: setattr(optimizer, "state", defaultdict(dict)),
    "removes": removes,
    "assigns": assigns,
    "replaces": replaces,
    "torch's load_state_dict": lambda optimizer, _: torch.optim.Optimizer.load_state_dict(
        optimizer, {"state": {}, "param_groups": [{**optimizer.param_groups[0], "params": [0, 1, 2, 3], "lr": 0.02}]}
    ),
}


class Net(Curve):
    net: Any

    def __init__(
        self, make: Callable[[Any], torch.optim.Optimizer], change: Callable[[Any, Net], None] | None, dtype: Any
    ) -> None:
        super().__init__(make)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)
        self.change = change

    def loss(self, x: Tensor) -> Tensor:
        return (self.net(x) - x.roll(1, -1)).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.change is not None and self.global_step == STEPS // 2:
            optimizer: Any = self.optimizers()
            self.change(optimizer.optimizer, self)


def fit(module: Net, strategy: Any, devices: int, steps: int = STEPS, **resume: Any) -> pl.Trainer:
    """Every rank sees the same batches."""
    data = torch.randn(2 * STEPS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    dtype = module.net[0].weight.dtype
    trainer = bare_trainer(
        strategy, devices, precision=PRECISIONS[dtype], max_steps=steps, max_epochs=-1, use_distributed_sampler=False
    )
    trainer.fit(module, DataLoader(TensorDataset(data.to(dtype)), batch_size=2), **resume)
    return trainer


def resumed(name: str, strategy: Callable[[], Any], devices: int, folder: Any, dtype: Any) -> Tensor:
    fit(Net(OPTIMIZERS[name], None, dtype), strategy(), devices, STEPS // 2).save_checkpoint(f"{folder}/{name}.ckpt")
    module = Net(OPTIMIZERS[name], None, dtype)
    fit(module, strategy(), devices, ckpt_path=f"{folder}/{name}.ckpt")
    return torch.stack(module.losses)


def changed(name: str, strategy: Callable[[], Any], devices: int, dtype: Any) -> Tensor:
    module = Net(lambda params: torch.optim.AdamW(params, 1e-2), CHANGES[name], dtype)
    fit(module, strategy(), devices)
    return torch.stack(module.losses)


CASES: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float64, {"stage": 0, "checkpoint": "file"}),
    (torch.float64, {"stage": 1, "checkpoint": "sharded"}),
    (torch.float64, {"stage": 3, "checkpoint": "sharded"}),
    (torch.float32, {"stage": 1, "checkpoint": "sharded"}),  # fused updates
    (torch.float32, {"stage": 2, "checkpoint": "file", "offload": {"optimizer": "cpu"}}),
]


NAMES = (*OPTIMIZERS, *CHANGES)
Names = tuple[tuple[str, ...], ...]
"""For each of the cases, which optimizers and which changes."""


def run(name: str, strategy: Callable[[], Any], devices: int, folder: str, dtype: Any) -> Tensor:
    if name in OPTIMIZERS:
        return resumed(name, strategy, devices, folder, dtype)
    return changed(name, strategy, devices, dtype)


def on_ranks(rank: int, world_size: int, folder: str, names: Names) -> list[dict[str, Tensor]]:
    quiet()
    return [
        {name: run(name, partial(ZeROStrategy, **options), world_size, f"{folder}/{i}", dtype) for name in of_case}
        for i, ((dtype, options), of_case) in enumerate(zip(CASES, names, strict=True))
    ]


@pytest.mark.parametrize(
    "names",
    few_or_all(tuple(NAMES[i :: len(CASES)] for i in range(len(CASES))), tuple(NAMES for _ in CASES)),
)
def test_what_an_optimizer_saves_loads_and_holds_is_its_own(names: Names, tmp_path: Any):
    expected: dict[tuple[torch.dtype, str], Tensor] = {}
    found = spawn(on_ranks, 2, str(tmp_path), names, init_process_group=False, timeout_s=300)[0]
    for case, own in zip(CASES, found, strict=True):
        dtype = case[0]
        for name, losses in own.items():
            if (dtype, name) not in expected:
                expected[dtype, name] = run(name, lambda: "auto", 1, f"{tmp_path}/{dtype}", dtype)
            torch.testing.assert_close(
                losses,
                expected[dtype, name],
                rtol=1e-10 if dtype == torch.float64 else 1e-5,
                atol=0,
                msg=lambda m, of=(case, name): f"{of}: {m}",
            )


READS: list[Callable[[Any, Any], Any]] = [
    lambda state, p: [value["exp_avg"].mul_(-1) for value in state.values()],
    lambda state, p: state[p]["exp_avg"],
    lambda state, p: list(state.items()),
    lambda state, p: len(state),
    lambda state, p: p in state,
    lambda state, p: state.get(p),
    lambda state, p: state.setdefault(p, {}),
    lambda state, p: [key for key in state],
    lambda state, p: state.pop(p)["exp_avg"],
    lambda state, p: state.popitem(),
]


@pytest.mark.parametrize("read", READS)
def test_values_that_no_rank_has_are_refused_with_the_cure(read: Callable[[Any, Any], Any]):
    module = Net(
        lambda params: torch.optim.AdamW(params, 1e-2), lambda o, m: read(o.state, m.net[0].weight), torch.float64
    )
    with pytest.raises(StateError, match="optimizer_state"):
        fit(module, "zero1", 1)


def test_without_a_state_reading_finds_none():
    found: list[Any] = []

    class Begins(Net):
        def on_train_start(self) -> None:
            optimizer: Any = self.optimizers()
            state, p = optimizer.optimizer.state, self.net[0].weight
            found.extend([len(state), list(state.items()), p in state, state.get(p), bool(state)])

    fit(Begins(lambda params: torch.optim.AdamW(params, 1e-2), None, torch.float64), "zero3", 1)
    assert found == [0, [], False, None, False]


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_a_loading_that_goes_past_torch_is_refused(stage: str, tmp_path: Any):
    class Past(torch.optim.SGD):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.param_groups[0]["lr"] = state_dict["param_groups"][0]["lr"]

    make = partial(Past, lr=1e-2, momentum=0.9)
    fit(Net(make, None, torch.float64), stage, 1, 2).save_checkpoint(tmp_path / "c.ckpt")
    with pytest.raises(StateError, match=r"Past\.load_state_dict"):
        fit(Net(make, None, torch.float64), stage, 1, 4, ckpt_path=tmp_path / "c.ckpt")


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_states_that_a_hook_has_removed_start_afresh(stage: str, tmp_path: Any):
    class Forgets(Net):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["optimizer_states"] = []

    losses = []
    for number, strategy in enumerate(("auto", stage)):
        make = partial(torch.optim.AdamW, lr=1e-2)
        fit(Net(make, None, torch.float64), strategy, 1, 4).save_checkpoint(tmp_path / f"{number}.ckpt")
        module = Forgets(make, None, torch.float64)
        fit(module, strategy, 1, ckpt_path=tmp_path / f"{number}.ckpt")
        losses.append(torch.stack(module.losses))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=0)
