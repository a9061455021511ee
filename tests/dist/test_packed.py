"""Packed documents on several ranks: the numbers of one process, and no bit that crosses documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from ls_strategy import PackedDocuments, document_mask
from ls_strategy.testing import spawn
from tests.dist.parallel_runs import SHAPE, Module, Run, plain, train, unequal
from tests.marks import slow, wide

pytestmark = pytest.mark.dist


class Packed(Module):
    """Trains on packed documents, and looks at the logits of the last batch with another first document."""

    def logits(self, batch: Any, tokens: Tensor) -> Tensor:
        return self.model(tokens, positions=batch["positions"], documents=batch["documents"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            first = batch["documents"] == 0
            before = self.logits(batch, batch["tokens"]).clone()
            after = self.logits(batch, torch.where(first, (batch["tokens"] + 1) % 61, batch["tokens"])).clone()
            self.outcome.notes["same"] = torch.equal(before[~first], after[~first])
            self.outcome.notes["changed"] = not torch.equal(before[first], after[first])
        logits = self.logits(batch, batch["tokens"]).float().flatten(0, 1)
        return functional.cross_entropy(logits, batch["targets"].flatten(), reduction="sum") / 64

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        documents = [torch.randint(0, 61, (2 + i % 11,), generator=generator) for i in range(220)]
        packed = PackedDocuments(documents, SHAPE["block_size"])
        shard = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        mine = self.run.batch // shard["num_replicas"]
        count = self.run.steps * self.run.batch
        index = torch.arange(count).view(-1, shard["num_replicas"], mine)[:, shard["rank"]].flatten()
        return DataLoader([packed[int(i)] for i in index], batch_size=mine)  # type: ignore[arg-type]


class Masked(Packed):
    """The same with a mask."""

    def logits(self, batch: Any, tokens: Tensor) -> Tensor:
        return self.model(tokens, positions=batch["positions"], mask=document_mask(batch["documents"]))


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {"parallel.context": 2}),
        wide(2, {"parallel.context": 2, "parallel.ring": 2}),
        wide(2, {"parallel.context": 2, "activations.checkpointing": "full"}),
        slow(4, {"parallel.context": 4, "parallel.ring": 2}),
        slow(4, {"parallel.context": 4, "parallel.ring": 4}),
        slow(2, {"parallel.context": 2, "parallel.ring": 2, "activations.checkpointing": "full"}),
    ],
    ids=str,
)
def test_documents_stay_apart(world, options):
    run = Run({"stage": 3, **options}, steps=8)
    found = spawn(train, world, run, Packed, init_process_group=False, timeout_s=150)
    assert all(outcome.notes["same"] and outcome.notes["changed"] for outcome in found)
    assert not unequal(plain(run, Packed), [run], found[:1])


@pytest.mark.parametrize("ring", [wide(1), 2])
def test_documents_stay_apart_by_a_mask(ring):
    run = Run({"stage": 3, "parallel.context": 2, "parallel.ring": ring}, steps=8)
    found = spawn(train, 2, run, Masked, init_process_group=False, timeout_s=150)
    assert all(outcome.notes["same"] and outcome.notes["changed"] for outcome in found)
    assert not unequal(plain(run, Packed), [run], found[:1])
