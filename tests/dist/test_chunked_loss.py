"""``activations.loss="chunked"``: the losses, norms and weights of one process, at every stage and on every axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.nn import functional

from ls_strategy import ZeROFabricStrategy, linear_cross_entropy
from ls_strategy.losses.deferred import DeferredLogits
from ls_strategy.testing import spawn
from tests.dist.parallel_runs import Module, Run, assert_as_plain, plain, start, unequal
from tests.marks import slow

pytestmark = pytest.mark.dist

CHUNKED: dict[str, Any] = {"activations.loss": {"chunk_bytes": 4 * 61 * 5}}
"""Five tokens at a time: no divisor of a batch."""


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"sharding.block_classes": ["Block", "Head"], "sharding.min_unit_numel": 0},
        slow({"parallel.tensor": 2}),
        slow({"parallel.context": 2}),
        slow({"activations.checkpointing": "full", "activations.offload": "cpu"}),
        slow({"offload.optimizer": "cpu"}),
    ],
    ids=str,
)
def test_it_changes_no_number(more):
    runs = [Run({"stage": s, **CHUNKED, **more}, steps=4) for s in (1, 2, 3)]
    runs.append(Run({"stage": 3, **CHUNKED, **more}, {"tied_embeddings": False}, steps=4))
    assert_as_plain(2, runs)


@pytest.mark.wide
def test_of_vocabulary_and_context_parallel_logits():
    assert_as_plain(4, [Run({"stage": 3, **CHUNKED, "parallel.tensor": 2, "parallel.context": 2}, steps=8)])


@pytest.mark.wide
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
def test_in_16_bits_it_is_as_close_to_fp32_as_all_logits(precision):
    exact = plain(Run(steps=8))
    trainer = {"precision": precision}
    runs = [Run({"stage": 3, **more}, steps=8, trainer=trainer) for more in ({}, CHUNKED)]
    full, chunked = (
        max(abs(a - b) for a, b in zip(outcome.losses, exact.losses, strict=True)) for outcome in start(2, runs)
    )
    assert chunked <= 2 * full + 1e-6


class Explicit(Module):
    """Calls the function with its head, and keeps logits that nothing needed in time."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        network = self.model
        x, rotation = network.token_embedding(tokens), network.rotary(tokens.shape[1])
        for block in network.blocks:
            x = block(x, rotation)
        return linear_cross_entropy(network.norm(x), network.head, targets)


@pytest.mark.wide
@pytest.mark.parametrize("head", [[], ["Head"]], ids=["root", "unit"])
def test_the_function_works_where_a_head_is_sharded(head):
    options = {"stage": 3, "sharding.block_classes": ["Block", *head], "sharding.min_unit_numel": 0}
    run = Run(options, steps=4)
    assert not unequal(plain(run), [run], start(2, [run], Explicit))


class Returns(Module):
    """Returns its logits, and reads them after the optimizer step; validates in the same way."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(batch[0])
        assert type(logits) is DeferredLogits
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        return {"loss": loss, "logits": logits.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        again = functional.cross_entropy(outputs["logits"].flatten(0, 1), batch[1].flatten())
        self.outcome.notes[f"step {batch_idx}"] = abs(again.item() - outputs["loss"].item())
        assert type(outputs["logits"]) is Tensor

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.model(batch[0])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        full = functional.cross_entropy(torch.cat([logits.flatten(0, 1)]), batch[1].flatten())
        self.outcome.notes[f"validation {batch_idx}"] = (loss - full).abs().item()


@pytest.mark.parametrize("stage", [slow(1), 3])
def test_logits_that_leave_the_step_are_those_of_the_step(stage):
    options = {"stage": stage, "sharding.block_classes": ["Block", "Head"], "sharding.min_unit_numel": 0, **CHUNKED}
    run = Run(options, steps=4, trainer={"limit_val_batches": 2})
    notes = start(2, [run], Returns)[0].notes
    assert len([n for n in notes if n.startswith(("step", "validation"))]) >= 6
    assert max(v for k, v in notes.items() if k.startswith(("step", "validation"))) <= 1e-6, notes


def in_fabric(rank: int, world_size: int, options: dict[str, Any] | None) -> list[float]:
    from recipes.gpt.network import GPT, GPTConfig
    from tests.dist.parallel_runs import SHAPE

    strategy = ZeROFabricStrategy(**options) if options else "ddp"
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    with fabric.init_module():
        model = GPT(GPTConfig(**SHAPE))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-2))
    losses = []
    for step in range(6):
        text = torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(2 * step + rank))
        logits = model(text[:, :-1])
        assert (type(logits) is DeferredLogits) == (options is not None)
        loss = functional.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.wide
@pytest.mark.parametrize("stage", [slow(2), 3])
def test_in_fabric(stage):
    options = {"stage": stage, "activations": {"loss": {"chunk_bytes": 4 * 61 * 5}}}
    found, ddp = (spawn(in_fabric, 2, o, init_process_group=False, timeout_s=100) for o in (options, None))
    assert torch.tensor(found).sub(torch.tensor(ddp)).abs().max() <= 2e-6
