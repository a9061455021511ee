"""`load_state_dict` and all that a module may override or hook of it runs when a checkpoint is loaded, as under DDP."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy import StateError, ZeROFabricStrategy, ZeROStrategy
from ls_strategy.checkpoint.source import read_full
from ls_strategy.testing import spawn
from tests.marks import few_or_all
from tests.models import Curve, quiet
from tests.trainers import bare_trainer

pytestmark = pytest.mark.dist


class Counts(nn.Module):
    """Keeps an object in its extra state, as fp8 scales are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return x * (1 + self.n / 10)

    def get_extra_state(self) -> dict[str, int]:
        return {"n": self.n}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.n = state["n"]


class Cache(nn.Module):
    """Computes a buffer, which is not saved, from its weights after every load."""

    cached: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.register_buffer("cached", torch.eye(4), persistent=False)
        self.register_load_state_dict_post_hook(Cache.refresh)

    def refresh(self, _: Any) -> None:
        self.cached.copy_(self.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + x @ self.cached


class Renames(nn.Linear):
    """Saves and reads another name."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self._register_state_dict_hook(
            lambda m, state, prefix, _: state.update({f"{prefix}w": state.pop(f"{prefix}weight")})
        )

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if f"{prefix}w" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}w")
        super()._load_from_state_dict(state, prefix, *args)


class Transposes(nn.Module):
    """Reads its weights transposed and halved, in a pre-hook: they were saved by an older version."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, generator=torch.Generator().manual_seed(2)))
        self._register_load_state_dict_pre_hook(self._read_older)

    def _read_older(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].flip(0) / 2

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight @ self.weight.t()


class Doubles(nn.Linear):
    """Saves more than its parameters, computed from them, and trains on what it reads; has a version."""

    _version = 3

    def __init__(self) -> None:
        super().__init__(4, 4)
        self._register_state_dict_hook(Doubles.add)
        self.twice, self.norm = torch.ones(4, 4, dtype=torch.float64), torch.ones((), dtype=torch.float64)

    def add(self, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}twice"] = state[f"{prefix}weight"] * 2
        state[f"{prefix}norm"] = self.weight.detach().norm()

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *args: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert metadata["version"] == 3
        self.twice, self.norm = state.pop(f"{prefix}twice").clone(), state.pop(f"{prefix}norm").clone()
        super()._load_from_state_dict(state, prefix, metadata, *args)

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x) @ self.twice / self.norm


class Queue(nn.Module):
    """A buffer that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.queue = torch.cat([self.queue, x.detach()])
        return x + self.queue.mean(0)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.queue = torch.empty_like(state[f"{prefix}queue"])
        super()._load_from_state_dict(state, prefix, *args)


class Metric(nn.Module):
    """Keeps a metric whose states are saved with the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()
        self.mean.persistent(True)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.update(x.mean().detach())
        return x * (1 + self.mean.compute().to(x))


class Normed(nn.Sequential):
    """Adds its count of batches to checkpoints that lack it, by their version."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(4, momentum=None))


class Net(Curve):
    def __init__(self, part: str) -> None:
        super().__init__(partial(torch.optim.SGD, lr=0.05))
        self.first = nn.Linear(4, 4)
        self.part = PARTS[part]()
        self.anchor: Tensor | None = None

    def loss(self, x: Tensor) -> Tensor:
        loss = (self.part(self.first(x)) - x).square().mean()
        return loss if self.anchor is None else loss + (self.first.weight - self.anchor).square().sum()


class Anchored(Net):
    """Overrides `load_state_dict`, and reads its weights there."""

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        result = super().load_state_dict(*args, **kwargs)
        self.anchor = self.first.weight.detach().clone()
        return result


PARTS = {
    each.__name__: each for each in (Counts, Cache, Renames, Transposes, Doubles, Queue, Metric, Normed, nn.Identity)
}
OPTIONS: list[dict[str, Any]] = [
    {"stage": 0, "checkpoint": "file"},
    {"stage": 1, "checkpoint": "sharded"},
    {"stage": 3, "checkpoint": "sharded"},
    {"stage": 3, "checkpoint": "file", "offload": "cpu"},
]


def resumed(part: str, strategy: Any, devices: int, folder: str) -> Tensor:
    """Train four steps, and four more from the checkpoint in a new module; every rank sees the same batches."""
    make = Anchored if part == "Identity" else Net
    data = TensorDataset(torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))

    def fit(module: Net, steps: int, **resume: Any) -> pl.Trainer:
        trainer = bare_trainer(
            strategy(), devices, precision="64-true", max_steps=steps, max_epochs=-1, use_distributed_sampler=False
        )
        trainer.fit(module.double(), DataLoader(data, batch_size=2), **resume)
        return trainer

    fit(make(part), 4).save_checkpoint(f"{folder}/{part}.ckpt")
    module = make(part)
    fit(module, 8, ckpt_path=f"{folder}/{part}.ckpt")
    return torch.stack(module.losses)


Cases = list[tuple[int, str]]
"""Numbers of options, each with a part."""

ALL: Cases = [(number, part) for number in range(len(OPTIONS)) for part in PARTS]
FEW: Cases = [(number, part) for number, part in ALL if list(PARTS).index(part) % len(OPTIONS) == number]
FEW += [(2, "Identity")]
"""Every part once, and the override of `load_state_dict` itself at stage 3 too."""


def runs(rank: int, world_size: int, folder: str, cases: Cases) -> list[Tensor]:
    quiet()
    return [
        resumed(part, lambda o=OPTIONS[number]: ZeROStrategy(**o), world_size, f"{folder}/{number}")
        for number, part in cases
    ]


@pytest.mark.parametrize("cases", few_or_all(FEW, ALL))
def test_what_a_module_does_when_it_is_loaded_is_done(cases: Cases, tmp_path: Path):
    warnings.filterwarnings("ignore")
    expected = {part: resumed(part, lambda: "auto", 1, str(tmp_path / "auto")) for part in PARTS}
    found = spawn(runs, 2, str(tmp_path), cases, init_process_group=False, timeout_s=300)[0]
    for (number, part), losses in zip(cases, found, strict=True):
        of = OPTIONS[number], part
        torch.testing.assert_close(losses, expected[part], rtol=1e-12, atol=0, msg=lambda m, of=of: f"{of}: {m}")


def test_the_names_that_do_not_fit_are_refused(tmp_path: Path):
    def fit(part: str, **resume: Any) -> pl.Trainer:
        trainer = bare_trainer(ZeROStrategy(1, checkpoint="sharded"), max_steps=1)
        trainer.fit(Net(part), DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2), **resume)
        return trainer

    fit("Normed").save_checkpoint(tmp_path / "c.ckpt")
    with pytest.raises(StateError, match=r"part\.weight"):
        fit("Renames", ckpt_path=tmp_path / "c.ckpt")


def of_fabric(rank: int, world_size: int, strategy: Any, folder: str) -> list[Tensor]:
    """Train two steps, load that into new modules, and train two more."""
    from lightning.fabric import Fabric

    quiet()
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy() if strategy else "auto")
    fabric.launch()
    data = torch.randn(4, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    losses: list[Tensor] = []
    for part in ("Counts", "Doubles", "Queue"):
        for resume in (False, True):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(4, 4), PARTS[part]()).double()
            model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.05))
            path = f"{folder}/{part}"
            if resume:
                fabric.load(path, {"model": model, "optimizer": optimizer})
            for x in data[2:] if resume else data[:2]:
                loss = (model(x) - x).square().mean()
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach().clone())
            if not resume:
                fabric.save(path, {"model": model, "optimizer": optimizer})
    return losses


@pytest.mark.wide
@pytest.mark.parametrize(("stage", "kind"), [(1, "sharded"), (3, "sharded"), (3, "file")])
def test_fabric_loads_by_the_same_code(stage: Any, kind: Any, tmp_path: Path):
    (tmp_path / "plain").mkdir()
    expected = of_fabric(0, 1, None, str(tmp_path / "plain"))
    strategy = partial(ZeROFabricStrategy, stage=stage, checkpoint=kind)
    for losses in spawn(of_fabric, 2, strategy, str(tmp_path), init_process_group=False):
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)


class Halves(pl.LightningModule):
    """A layer that tensor parallelism splits, of which a hook saves what it computes from the full weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.up._register_state_dict_hook(
            lambda m, state, prefix, _: state.update({f"{prefix}norm": state[f"{prefix}weight"].norm()})
        )
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.down(torch.tanh(self.up(batch[0]))) - batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def saved_by(rank: int, world_size: int, strategy: Any, folder: str) -> None:
    quiet()
    data = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    trainer = bare_trainer(
        strategy() if strategy else "auto", world_size, precision="64-true", max_epochs=1, use_distributed_sampler=False
    )
    trainer.fit(Halves(), DataLoader(TensorDataset(data), batch_size=2))
    trainer.save_checkpoint(f"{folder}/c.ckpt")


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["file", "sharded"])
def test_hooks_see_full_weights_where_layers_are_split(kind: Any, tmp_path: Path):
    parallel = {"tensor": {"size": 2, "plan": {"up": "column", "down": "row"}}}
    strategy = partial(ZeROStrategy, stage=1, checkpoint=kind, parallel=parallel)
    saved_by(0, 1, None, str(tmp_path / "plain"))
    spawn(saved_by, 2, strategy, str(tmp_path), init_process_group=False)
    expected = torch.load(tmp_path / "plain" / "c.ckpt")["state_dict"]
    found = read_full(tmp_path / "c.ckpt")["state_dict"]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14)
