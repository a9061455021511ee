"""What the steps of a pipeline log and return for batches with ragged targets, and lists of samples that they get."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from ls_strategy.errors import StateError
from tests.dist.parallel_runs import Module, Run, assert_as_plain, train
from tests.dist.ranks import on_ranks
from tests.dist.test_pipeline_context import Masked

pytestmark = pytest.mark.dist

PIPELINE = {"parallel.pipeline.size": 2, "parallel.pipeline.micro_batches": 3, "stage": 2}


class Logs(Masked):
    """Logs and returns more than means, and weighs by names of the samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets, names = batch["tokens"], batch["targets"], batch["names"]
        losses = functional.cross_entropy(self.model(tokens).transpose(1, 2), targets, reduction="none")
        weights = torch.tensor([float(name) for name, _ in zip(names, tokens, strict=True)])
        mask = targets != -100
        loss = (losses.sum(1) * weights).sum() / mask.sum()
        self.log("loss", loss, on_step=True)
        count = int(mask.sum())
        both: dict[str, Any] = {"on_step": True, "on_epoch": True}
        self.log("mean_tokens", float(count), **both)
        self.log("longest", mask.sum(1).max().float(), **both)
        self.log("most", loss, reduce_fx="max", **both)
        self.log("total", loss.detach(), reduce_fx=torch.sum, **both)
        self.log("by_tokens", loss.detach(), batch_size=count, **both)
        self.log("constant", loss.detach(), batch_size=7, **both)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(batch["tokens"])
        mask = batch["targets"] != -100
        loss = functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        self.log("val_loss", loss, batch_size=int(mask.sum()))
        right = (logits.argmax(-1) == batch["targets"]) & mask
        names = [f"{name}: {len(row)}" for name, row in zip(batch["names"], logits, strict=True)]
        rows = list(logits.mean(1))
        return {
            "names": names,
            "rows": rows,
            "loss": loss.item(),
            "count": mask.sum(),
            "n": len(names),
            "r": right.sum(),
        }

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        Module.on_train_batch_end(self, outputs, batch, batch_idx)
        self.outcome.norms.extend(v.item() for _, v in sorted(self.trainer.callback_metrics.items()))

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        assert outputs["names"] == [f"{name}: 16" for name in batch["names"]]
        assert outputs["count"].dtype == outputs["r"].dtype == torch.int64
        assert (outputs["n"], len(outputs["rows"])) == (len(batch["names"]),) * 2
        self.outcome.norms += [outputs["loss"], outputs["count"].item(), 1 + outputs["r"].item()]
        self.outcome.norms += [1 + row.mean().item() for row in outputs["rows"]]

    def train_dataloader(self) -> DataLoader:
        data: Any = super().train_dataloader().dataset
        rows = [
            {"tokens": x, "targets": y, "names": str(i % 4)} for i, (x, y) in enumerate(zip(*data.tensors, strict=True))
        ]
        return DataLoader(rows, batch_size=self.run.batch)  # type: ignore[arg-type]

    val_dataloader = train_dataloader


def test_values_and_lists_of_samples_are_those_of_the_batch():
    """In micro-batches of 2, 1 and 1 samples, whose tokens differ."""
    assert_as_plain(2, [Run(PIPELINE, steps=5, trainer={"limit_val_batches": 3})], Logs)


class Counts(Masked):
    """Counts steps in a buffer, before or after the blocks, in place or by a new tensor."""

    how = "before"

    def configure_model(self) -> None:
        super().configure_model()
        self.register_buffer("count", torch.zeros(()), persistent=self.how != "cache")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.how == "before":
            self.count.add_(1)
        if self.how == "cache":
            self.count = torch.ones(())
        loss = super().training_step(batch, batch_idx)
        if self.how == "after":
            self.count = 0.9 * self.count + 0.1 * loss.detach()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.how == "validation":
            self.count += 1
        return super().validation_step(batch, batch_idx)


@on_ranks(2, timeout_s=100)
def test_buffers_that_steps_change_are_refused_on_all_ranks(rank: int, world_size: int) -> None:
    run = Run(PIPELINE, steps=2, trainer={"limit_val_batches": 1})
    for how in ("before", "after", "validation"):
        with pytest.raises(StateError, match="the step changes the buffer 'count'"):
            train(rank, world_size, run, type("Counting", (Counts,), {"how": how}))
    train(rank, world_size, run, type("Caching", (Counts,), {"how": "cache"}))
