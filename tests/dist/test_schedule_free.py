"""Optimizers that swap weights in `train()` and `eval()`: validation and checkpoints see what they see under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy import StateError, ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist.fabric_ranks import make_fabric
from tests.dist.ranks import on_ranks
from tests.marks import few_or_all
from tests.models import Curve, quiet
from tests.trainers import bare_trainer

pytestmark = pytest.mark.dist


class ScheduleFree(Optimizer):
    """SGD of Defazio et al., arXiv:2405.15682: trains at y, and is used at x, of which it keeps z."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    @torch.no_grad()
    def _swap(self, train: bool) -> None:
        for group in self.param_groups:
            weight = 1 - group["beta"] if train else 1 - 1 / group["beta"]
            for p in group["params"] if group["train_mode"] != train else ():
                state = self.state[p]
                if "z" in state:
                    p.lerp_(state["z"], weight)
            group["train_mode"] = train

    def train(self) -> None:
        self._swap(True)

    def eval(self) -> None:
        self._swap(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("call train() first")
            weight = 1 / (group["k"] + 1)
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    p.lerp_(z, weight).sub_(p.grad, alpha=group["lr"] * (1 - group["beta"] * (1 - weight)))
                    z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1
        return loss


class Swaps(Curve):
    """Swaps by Lightning's wrapper and by the optimizer itself, in the middle of accumulating too."""

    def __init__(self) -> None:
        super().__init__(ScheduleFree)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.never = nn.Parameter(torch.ones(5))
        self.double()
        self.validated: list[Tensor] = []

    def loss(self, x: Tensor) -> Tensor:
        y = x
        for block in self.blocks:
            y = block(y).tanh()
        return (y - x).square().mean()

    def on_train_epoch_start(self) -> None:
        self.optimizers().train()  # type: ignore[union-attr]

    def on_validation_start(self) -> None:
        self.optimizers(use_pl_optimizer=False).eval()  # type: ignore[union-attr]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.loss(batch[0]).detach())

    def on_validation_end(self) -> None:
        self.optimizers().train()  # type: ignore[union-attr]

    def on_train_end(self) -> None:
        self.optimizers().eval()  # type: ignore[union-attr]


def fit(rank: int, world_size: int, strategy: Any, saved: Path, start: Path | None = None) -> list[Tensor]:
    """Return losses, those of validation, and final weights, of three epochs or of the last two of them."""
    module = Swaps()
    data = torch.randn(24, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1 + rank))
    options: dict[str, Any] = {"precision": "64-true", "use_distributed_sampler": False, "num_sanity_val_steps": 0}
    trainer = bare_trainer(
        strategy,
        world_size,
        max_epochs=1 if start is None else 3,
        accumulate_grad_batches=2,
        val_check_interval=3,
        **options,
    )
    loaders = [DataLoader(TensorDataset(part), batch_size=4) for part in (data, data[:4])]
    trainer.fit(module, *loaders, ckpt_path=start)
    trainer.save_checkpoint(saved)
    return [*module.results(), torch.stack(module.validated)]


DDP = "ddp_find_unused_parameters_true"

STRATEGIES: list[dict[str, Any]] = [
    *({"stage": stage} for stage in (0, 1, 2, 3)),
    {"stage": 1, "offload": {"optimizer": "cpu"}},
    {"stage": 3, "offload": "cpu"},
]


def curves(rank: int, world_size: int, strategies: list[dict[str, Any]], folder: Path) -> list[Any]:
    """Return what was run, its results, and those of DDP. Every second part begins with the checkpoint of another."""
    quiet()
    first, last, before = folder / "ddp.ckpt", folder / "ddp2.ckpt", folder / "ddp.ckpt"
    trusted = [fit(rank, world_size, DDP, first), fit(rank, world_size, DDP, last, start=first)]
    found = []
    for i, options in enumerate(strategies):
        ours, after = folder / f"{i}.ckpt", folder / f"{i}b.ckpt"
        found.append((f"{options}", fit(rank, world_size, ZeROStrategy(**options), ours), trusted[0]))
        again = fit(rank, world_size, ZeROStrategy(**options), after, start=before)
        found.append((f"{options}, resumed", again, trusted[1]))
        before = ours
    return found


@pytest.mark.parametrize("strategies", few_or_all([STRATEGIES[2], STRATEGIES[5]], STRATEGIES))
def test_validation_and_checkpoints_see_the_weights_of_eval(strategies: list[dict[str, Any]], tmp_path: Path) -> None:
    for rank in spawn(curves, 2, strategies, tmp_path, init_process_group=False, timeout_s=200):
        for where, found, expected in rank:
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13, msg=lambda m, w=where: f"{w}: {m}")


def in_fabric(rank: int, world_size: int, name: str) -> list[Any]:
    """Train, evaluate with the other weights, and train on, in a loop of Fabric's; return losses and weights."""
    fabric = make_fabric(name, world_size, precision="64-true")
    module: Any = Swaps()
    module, optimizer = fabric.setup(nn.Sequential(*module.blocks), ScheduleFree(module.blocks.parameters()))
    found: list[Any] = []
    for x in torch.randn(6, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1 + rank)):
        optimizer.train()
        loss = (module(x) - x).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.eval()
        with torch.no_grad():
            found += [loss.detach(), module(x).sum()]
    return [*found, *(value.clone() for value in module.state_dict().values())]


@on_ranks(2, timeout_s=120)
def test_the_optimizer_that_a_fabric_returns_swaps_weights(rank: int, world_size: int) -> None:
    expected = in_fabric(rank, world_size, "ddp")
    for name in ("zero0", "zero2", "zero3_offload", "zero3, small units"):
        torch.testing.assert_close(in_fabric(rank, world_size, name), expected, rtol=1e-10, atol=1e-13)


class Full(ScheduleFree):
    whole_tensors = True


@on_ranks(2, timeout_s=120)
def test_states_that_train_and_eval_cannot_reach_are_an_error(rank: int, world_size: int) -> None:
    module = Swaps()
    module.make_optimizer = Full
    trainer = bare_trainer(ZeROStrategy(1), world_size, precision="64-true", limit_val_batches=0)
    with pytest.raises(StateError, match=r"Full.train\(\) and eval\(\).*Use stage 0"):
        trainer.fit(module, DataLoader(TensorDataset(torch.ones(8, 6, dtype=torch.float64)), batch_size=4))
