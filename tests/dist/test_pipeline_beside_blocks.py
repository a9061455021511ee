"""Parameters of the LightningModule itself in a pipeline: class tokens, logit scales, weights of losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist.ranks import assert_close, quiet, trainer_of
from tests.dist.trusted import once
from tests.marks import few_or_all, wide

pytestmark = pytest.mark.dist

NORM = 0.5


class Beside(pl.LightningModule):
    """Its own parameters are the first of `parameters()`, wherever they are used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.head = nn.Linear(4, 4)
        self.shift = nn.Parameter(torch.randn(4))  # before the blocks
        self.scale = nn.Parameter(torch.randn(4))  # after the blocks
        self.both = nn.Parameter(torch.ones(3))
        self.temperature = nn.Parameter(torch.zeros(()))  # in the loss
        self.sometimes = nn.Parameter(torch.ones(5))
        self.never = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.full((4,), 0.9), requires_grad=False)  # before and after the blocks

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.first(batch[0] * self.both[0] * self.frozen) + self.shift
        for block in self.blocks:
            x = torch.tanh(block(x))
        x = self.head(x) * self.scale.exp() * self.frozen + self.both[1:].sum()
        loss = (x - batch[0]).square().mean()
        self.log("read", loss.item())
        if batch_idx % 3 == 1:
            loss = loss + loss * self.sometimes.square().sum()
        loss = loss * torch.exp(-self.temperature) + self.temperature
        self.log("loss", loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


def fit(world_size: int, options: dict[str, Any] | None, ckpt: Any = None, **trainer: Any) -> pl.Trainer:
    quiet()
    strategy: Any = "auto" if options is None else ZeROStrategy(**{"sharding": {"min_unit_numel": 0}, **options})
    data = torch.randn(48, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    made = trainer_of(
        strategy,
        precision="64-true",
        use_distributed_sampler=False,
        gradient_clip_val=NORM,
        **{"max_epochs": 2, **trainer},
    )
    made.fit(Beside(), DataLoader(TensorDataset(data), batch_size=8), ckpt_path=ckpt)
    return made


def state(trainer: pl.Trainer) -> dict[str, Tensor]:
    return {k: v.detach().clone() for k, v in trainer.strategy.lightning_module_state_dict().items()}


def pipeline(stage: int, schedule: str = "1f1b", **more: Any) -> dict[str, Any]:
    parallel = {"pipeline": {"size": 2, "micro_batches": 4, "schedule": schedule, **more}}
    return {"stage": stage, "parallel": parallel}


CASES: list[dict[str, Any]] = [
    *(pipeline(stage) for stage in (0, 1, 2, 3)),
    *(pipeline(1, schedule) for schedule in ("gpipe", "interleaved_1f1b", "zero_bubble", "zbv")),
    pipeline(1, partition="flops"),
    {**pipeline(2), "offload": "cpu"},
    {**pipeline(3), "offload": "cpu"},
]


def trained(
    rank: int, world_size: int, cases: list[dict[str, Any] | None], accumulate: int = 1, epochs: int = 2
) -> list[dict[str, Tensor]]:
    return [state(fit(world_size, options, accumulate_grad_batches=accumulate, max_epochs=epochs)) for options in cases]


FEW = [pipeline(3), {**pipeline(1, "zero_bubble"), "offload": "cpu"}]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("accumulate", "epochs", "cases"),
    [(1, 1, FEW), wide(1, 2, CASES), wide(2, 2, [pipeline(1), pipeline(3)])],
    ids=["few", "all", "accumulated"],
)
def test_they_are_trained_as_in_one_process(accumulate: int, epochs: int, cases: list[Any]) -> None:
    (expected,) = once(trained, 1, [None], accumulate, epochs)[0]
    assert torch.equal(expected["never"], torch.ones(2, dtype=torch.float64))
    for found in spawn(trained, 2, cases, accumulate, epochs, init_process_group=False, timeout_s=200):
        for options, weights in zip(cases, found, strict=True):
            assert_close(weights, expected, str(options), 1e-12)


CHANGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (pipeline(1), pipeline(3)),
    (pipeline(3), {"stage": 0}),
    ({"stage": 2}, pipeline(2)),
]


def resumed(
    rank: int, world_size: int, folder: str, changes: list[tuple[dict[str, Any], dict[str, Any]]]
) -> list[dict[str, Tensor]]:
    results = []
    for save, load in changes:
        path = f"{folder}/{len(results)}"
        fit(world_size, save, max_epochs=1).save_checkpoint(path)
        results.append(state(fit(world_size, load, path)))
    return results


@pytest.mark.parametrize("changes", few_or_all(CHANGES[1:2], CHANGES))
def test_checkpoints_have_them_for_any_layout(changes: list[Any], tmp_path: Path) -> None:
    (expected,) = once(trained, 1, [None])[0]
    for found in spawn(resumed, 2, str(tmp_path), changes, init_process_group=False, timeout_s=200):
        for number, weights in enumerate(found):
            assert_close(weights, expected, f"resumed {number}", 1e-12)
