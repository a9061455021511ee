"""An engine on one process, without Lightning and without a process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ls_strategy.config import LossScaleConfig, ShardingConfig, ZeROConfig
from ls_strategy.distributed.comm import Comm
from ls_strategy.distributed.mesh import Mesh
from ls_strategy.engine import Engine
from ls_strategy.precision import resolve_precision
from ls_strategy.tiers import TIERS, TierKind
from ls_strategy.tiers.base import Key, ResidentLease, Sizes


def network(width: int = 24) -> nn.Sequential:
    """Return three blocks with weights that are equal in every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)))


def adamw(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def engine_on(
    model: nn.Module,
    optimizers: list[Optimizer],
    *,
    trainer_precision: str = "32-true",
    loss_scale: LossScaleConfig | None = None,
    **groups: Any,
) -> Engine:
    """Return an engine with the strategy's options ``groups``; every block is a unit."""
    groups.setdefault("sharding", ShardingConfig(min_unit_numel=1))
    config = ZeROConfig.of(groups.pop("stage", 3), **groups)
    engine = Engine(
        model,
        optimizers,
        config=config,
        precision=resolve_precision(trainer_precision, master_weights=config.precision.master_weights),
        mesh=Mesh.data_only(Comm(None, None)),
        device=torch.device("cpu"),
        loss_scale=loss_scale,
    )
    _OPEN.append(engine)
    return engine


_OPEN: list[Engine] = []


def small(**options: Any) -> tuple[nn.Module, Engine]:
    """Return a model and its engine, which refers to the model weakly."""
    model = network()
    return model, engine_on(model, [adamw(model.parameters())], **options)


def close_engines() -> None:
    """End the threads of all engines."""
    while _OPEN:
        _OPEN.pop().offload.close()


def backward(engine: Engine, number: int, factor: float = 1.0) -> None:
    """Run the forward and backward of step ``number``; the loss is multiplied by ``factor`` and the loss scale."""
    model = engine.model
    width = next(m for m in model.modules() if isinstance(m, nn.Linear)).in_features
    batch = torch.randn(4, width, generator=torch.Generator().manual_seed(number))
    batch = batch.to(engine.precision.compute)
    engine.begin_step()
    loss = model(batch).square().mean() * factor
    engine.end_forward()
    engine.begin_backward(eager=True)
    (loss * (1.0 if engine.scaler is None else engine.scaler.scale)).backward()
    engine.end_backward()


def steps(
    engine: Engine, count: int = 3, first: int = 0, between: Callable[[Engine], Any] = lambda _: None
) -> list[Tensor]:
    """Train ``count`` steps and return copies of the weights. ``between`` runs between backward and step."""
    (state,) = engine.optimizers
    for number in range(first, first + count):
        backward(engine, number)
        between(engine)
        engine.step(0, state.sharded.optimizer.step)
        engine.zero_grad(0)
    return weights(engine)


def weights(engine: Engine) -> list[Tensor]:
    with engine.gathered():
        return [p.detach().clone() for p in engine.model.parameters()]


class ShelfTier:
    """A tier that is not resident: the four methods on a dict of tensors."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.shelf: dict[Key, Tensor] = {key: torch.zeros(numel, dtype=dtype) for key, (numel, dtype) in sizes.items()}
        self.closed = False

    def get(self, key: Key, start: int = 0, stop: int | None = None) -> ResidentLease:
        return ResidentLease(self.shelf[key][start:stop].clone())

    def put(self, key: Key, value: Any, start: int = 0) -> None:
        source = value if isinstance(value, Tensor) else value.wait()
        self.shelf[key][start : start + source.numel()].copy_(source)

    def flush(self) -> None:
        """Everything is on the shelf."""

    def close(self) -> None:
        self.closed = True


def register_shelf(monkeypatch: pytest.MonkeyPatch, name: str) -> list[ShelfTier]:
    """Register a tier as another package does; return what is opened."""
    opened: list[ShelfTier] = []

    def open_shelf(sizes: Sizes, *_: Any) -> ShelfTier:
        opened.append(ShelfTier(sizes))
        return opened[-1]

    monkeypatch.setitem(TIERS, name, TierKind("on a shelf", resident=False, open=open_shelf))
    return opened
