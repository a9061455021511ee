"""Tests whose body runs on several ranks with real Trainers, and the small model that most of them train.

Trusted runs: DDP on the same ranks (`fit("ddp")`), or a plain Trainer on one process that sees the same global batches
(`global_batches`), for what DDP cannot do.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy.lightning.checkpointing import contents as lightning_checkpoints
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.meta_init.lazy import LazyTensor
from ls_strategy.testing import spawn
from tests.models import quiet
from tests.trainers import bare_trainer

WIDTH = 8
STAGES = (0, 1, 2, 3)
OPTIONS: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero3, small units": {"stage": 3, "sharding.min_unit_numel": 0},
    "zero3_offload": {
        "stage": 3,
        "sharding.min_unit_numel": 0,
        "offload.optimizer": "cpu",
        "offload.parameters": "cpu",
    },
    "zero1_offload": {"stage": 1, "offload.optimizer": "cpu"},
}
"""Configurations that come to the same numbers."""


def on_ranks(
    world_size: int, *, timeout_s: float = 60, init_process_group: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make ``test(rank, world_size, **fixtures)`` a test whose body runs on every one of ``world_size`` ranks.

    They have no process group unless it is asked for: a Trainer makes its own.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        def test(**fixtures: Any) -> None:
            spawn(
                _call,
                world_size,
                body.__module__,
                body.__name__,
                fixtures,
                init_process_group=init_process_group,
                timeout_s=timeout_s,
            )

        functools.update_wrapper(test, body)
        parameters = list(inspect.signature(body).parameters.values())[2:]
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        )
        return test

    return decorate


def _call(rank: int, world_size: int, module: str, name: str, fixtures: dict[str, Any]) -> None:
    quiet()
    getattr(importlib.import_module(module), name).__wrapped__(rank, world_size, **fixtures)


class Block(nn.Module):
    """A unit: normalise, widen, narrow, add. 27 * WIDTH + 1 columns make shards that cut parameters anywhere."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 2 * width + 1)
        self.narrow = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(self.wide(self.norm(x))))


class Net(pl.LightningModule):
    """A linear layer, three blocks, a linear layer; regression. Remembers what each step saw."""

    blocks: Any
    manual = False
    """Manual optimization."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lr = lr
        self.automatic_optimization = not self.manual
        self.losses: list[float] = []
        self.seen: list[float] = []
        """Other numbers that are compared."""
        self.build()

    def build(self) -> None:
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return self.last(h)

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        return functional.mse_loss(self(batch[0]), batch[1])

    def noted(self, loss: Tensor) -> Tensor:
        self.losses.append(loss.item())
        return loss

    def noted_loss(self, batch: Sequence[Tensor]) -> Tensor:
        return self.noted(self.loss(batch))

    def training_step(self, batch: Any, i: int) -> Any:
        if not self.manual:
            return self.noted_loss(batch)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.noted_loss(batch))
        optimizer.step()
        return None

    def total_norm(self, optimizer: Any) -> float:
        """Of the averaged gradients."""
        strategy: Any = self.trainer.strategy
        if hasattr(strategy, "grad_norm"):
            return strategy.grad_norm(optimizer=optimizer).item()
        grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        return torch.nn.utils.get_total_norm(grads).item()

    def validation_step(self, batch: Sequence[Tensor], i: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Sequence[Tensor], i: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Sequence[Tensor], i: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        """The fused kernel, which ZeROStrategy picks by itself: rounding is then the same under DDP."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-4, fused=True)


class Sgd(Net):
    """Momentum and decay, so that a gradient that is lost, or zero instead of None, shows in the weights."""

    def configure_optimizers(self) -> Any:
        params = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)


def samples(numel: int = 32, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, WIDTH, generator=generator)
    return x, torch.sin(x.roll(1, 1)) + 0.1 * torch.randn(numel, WIDTH, generator=generator)


def batches(numel: int = 32, batch_size: int = 4, seed: int = 1) -> DataLoader:
    """A loader for Lightning's own sampler: ``numel / 2 / batch_size`` batches on each of two ranks."""
    return DataLoader(TensorDataset(*samples(numel, seed)), batch_size=batch_size)


def global_batches(rank: int, world_size: int, steps: int, *, batch: int = 12) -> DataLoader:
    """Every step sees the same ``batch`` samples on any world size; use with ``use_distributed_sampler=False``."""
    x, y = samples(steps * batch)
    mine = batch // world_size
    index = torch.arange(steps * batch).view(steps, world_size, mine)[:, rank].flatten()
    return DataLoader(TensorDataset(x[index], y[index]), batch_size=mine)


def trainer_of(strategy: str | int | ZeROStrategy, *, save_as: Any = "sharded", **options: Any) -> Any:
    """A quiet Trainer on the CPU. A number is a ZeRO stage, with every block as a unit."""
    if isinstance(strategy, int):
        strategy = ZeROStrategy(strategy, sharding={"min_unit_numel": 0}, checkpoint=save_as)  # type: ignore[arg-type]
    devices = int(os.environ.get("WORLD_SIZE", "1"))
    return bare_trainer(strategy, **{"devices": devices, "max_epochs": 2, **options})


def folders(stage: Any, **checkpoint: Any) -> ZeROStrategy:
    """A strategy whose checkpoints are folders, with every block as a unit."""
    return ZeROStrategy(stage, sharding={"min_unit_numel": 0}, checkpoint={"format": "sharded", **checkpoint})


def fit(strategy: str | int | ZeROStrategy, module: Net, data: Any = None, ckpt: Any = None, **options: Any) -> Any:
    """Train ``module``; by default for two epochs of four batches."""
    trainer = trainer_of(strategy, **options)
    trainer.fit(module, data if data is not None else batches(), ckpt_path=ckpt)
    return trainer


def saved(path: Any) -> dict[str, Any]:
    """A checkpoint, folder or file, with its weights and averages in memory."""
    if Path(path).is_file():
        return torch.load(path, weights_only=True)
    checkpoint = lightning_checkpoints.read(path, TorchCheckpointIO(), True)
    for value in list(checkpoint.values()):
        if isinstance(value, dict):
            value.update({k: v.materialize() for k, v in value.items() if isinstance(v, LazyTensor)})
    return checkpoint


def weights(module: nn.Module) -> dict[str, Tensor]:
    """A copy of the module's full weights and buffers, on every rank. Collective at stage 3."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def mean_over_ranks(values: list[float]) -> list[float]:
    """Element-wise."""
    total = torch.tensor(values, dtype=torch.float64).to("cpu:0")  # the device of `tests.native_ranks`
    if dist.is_initialized():
        if dist.get_backend() == "nccl":  # which has no collectives on the host
            total = total.cuda()
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return total.tolist()


def assert_close(actual: Any, expected: Any, what: str, limit: float = 1e-6) -> None:
    """Lists of numbers, tensors and dicts of tensors, each relative to the largest value expected."""
    if isinstance(expected, Mapping):
        assert list(actual) == list(expected), f"{what}: names {list(actual)} instead of {list(expected)}"
        for name, value in expected.items():
            assert_close(actual[name], value, f"{what}: {name}", limit)
        return
    actual, expected = torch.as_tensor(actual).cpu().double(), torch.as_tensor(expected).cpu().double()
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    if expected.numel() == 0:
        return
    assert expected.isfinite().all(), f"{what}: the trusted run is not finite"
    error = ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()
    assert error <= limit, f"{what}: relative error {error:.3g} (limit {limit:g})\n  is   {actual}\n  must {expected}"


def assert_equal(actual: Any, expected: Any, what: str) -> None:
    """Bit for bit."""
    if isinstance(expected, Mapping):
        assert list(actual) == list(expected), f"{what}: names {list(actual)} instead of {list(expected)}"
        for name, value in expected.items():
            assert_equal(actual[name], value, f"{what}: {name}")
        return
    if isinstance(expected, Tensor):
        same = actual.dtype == expected.dtype and torch.equal(actual.cpu(), expected.cpu())
        assert same, f"{what}: differs\n  is   {actual}\n  must {expected}"
        return
    assert actual == expected, f"{what}: {actual!r} instead of {expected!r}"


def differences(run: Callable[[str], Sequence[Any]], expected: Sequence[Any], names: Iterable[str]) -> dict[str, str]:
    """How losses, what was seen and weights of a configuration's run differ from those expected, by name. Collective.

    What a run raises is a difference too.
    """
    found: dict[str, str] = {}
    for name in names:
        try:
            for what, ours, theirs in zip(("losses", "seen", "weights"), run(name), expected, strict=True):
                assert_close(ours, theirs, what)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


# --- cases against one process ----------------------------------------------------------------------------------------

CASE_STEPS = 8
Result = tuple[list[float], dict[str, Tensor]]


def train_case(rank: int, world_size: int, case: type[Net], strategy: str | int) -> Result:
    """Losses averaged over ranks, and final weights."""
    module = case()
    data = global_batches(rank, world_size, CASE_STEPS)
    fit(strategy, module, data, use_distributed_sampler=False, max_epochs=1)
    return mean_over_ranks(module.losses), weights(module)


def train_all(rank: int, world_size: int, cases: list[type[Net]]) -> dict[str, Result]:
    """The trusted runs: a plain Trainer on one process."""
    quiet()
    return {case.__name__: train_case(rank, world_size, case, "auto") for case in cases}


def compare(
    rank: int, world_size: int, cases: list[type[Net]], trusted: dict[str, Result], stages: tuple[int, ...] = STAGES
) -> None:
    """Every case at every stage; reports all that differ."""
    quiet()
    problems: list[str] = []
    for case in cases:
        losses, expected = trusted[case.__name__]
        for stage in stages:
            what = f"{case.__name__}, stage {stage}"
            ours, actual = train_case(rank, world_size, case, stage)
            try:
                assert_close(ours, losses, f"{what}, losses")
                assert_close(actual, expected, what)
            except AssertionError as error:
                problems.append(str(error))
    assert not problems, "\n".join(problems)
