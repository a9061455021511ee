"""Gradients of `nn.Embedding(sparse=True)`: trained as without a strategy."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy import PlanError, ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist.models import quiet

pytestmark = pytest.mark.dist

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1),
    "momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, 0.1),
    "sparse_adam": lambda params: torch.optim.SparseAdam(params, 0.1),
}


class Sparse(pl.LightningModule):
    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.optimizer = optimizer
        self.table = nn.Embedding(16, 4, sparse=True)
        self.last = nn.Linear(4, 4)
        self.double()
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = (self.last(self.table(batch[0])).sin() - 0.5).square().mean()
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())


def fit(optimizer: str, accumulate: int, strategy: Any, devices: int) -> Tensor:
    """Every rank sees the same batches."""
    module = Sparse(optimizer)
    data = torch.randint(16, (64,), generator=torch.Generator().manual_seed(1))
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, precision="64-true", max_epochs=1, logger=False,
        accumulate_grad_batches=accumulate, use_distributed_sampler=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(data), batch_size=4))
    return torch.stack(module.losses)


CASES = [(name, accumulate) for name in ("sgd", "momentum", "adagrad") for accumulate in (1, 3)]
STRATEGIES: list[dict[str, Any]] = [*({"stage": s} for s in (0, 1, 2, 3)), {"stage": 3, "offload": "cpu"}]


def curves(rank: int, world_size: int) -> list[list[Tensor]]:
    quiet()
    return [[fit(*case, ZeROStrategy(**options), world_size) for case in CASES] for options in STRATEGIES]


def test_sparse_gradients_train_as_without_a_strategy():
    trusted = [fit(*case, "auto", 1) for case in CASES]
    for options, found in zip(STRATEGIES, spawn(curves, 2, init_process_group=False, timeout_s=240)[0], strict=True):
        for case, losses, expected in zip(CASES, found, trusted, strict=True):
            where = f"{options} {case}"
            torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0, msg=lambda text, at=where: f"{at}: {text}")


@pytest.mark.parametrize("stage", [0, 2])
def test_an_optimizer_that_updates_rows_is_refused(stage: int):
    with pytest.raises(PlanError, match=r"SparseAdam.*Use torch.optim.Adam"):
        fit("sparse_adam", 1, ZeROStrategy(stage=stage), 1)
