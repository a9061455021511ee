"""Sequences sharded inside pipelines: the numbers are those of one process."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy import ZeROStrategy, linear_cross_entropy
from ls_strategy.config import nested
from ls_strategy.errors import PlanError, StateError
from ls_strategy.testing import spawn
from tests.dist.parallel_runs import (
    SHAPE,
    Module,
    Outcome,
    Run,
    assert_as_plain,
    assert_less_memory_changes_no_bit,
    assert_resumed,
    plain,
    start,
    train,
)
from tests.dist.ranks import on_ranks, trainer_of
from tests.limits import wall
from tests.marks import few_or_all

pytestmark = pytest.mark.dist

STEPS = 8
TWO = {"parallel.pipeline.size": 2, "parallel.pipeline.micro_batches": 2, "parallel.context": 2}
RING = {"parallel.ring": 2}
CHUNKED: dict[str, Any] = {"activations.loss": {"chunk_bytes": 4 * 61 * 5}}
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipe_v")


def compare(world: int, choices: list[dict[str, Any]], accumulate: int = 1, **shape: Any) -> list[Outcome]:
    trainer = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    runs = [Run({**TWO, **choice}, shape, steps=STEPS, trainer=trainer) for choice in choices]
    return assert_as_plain(world, runs, timeout_s=170)


@pytest.mark.wide
@pytest.mark.parametrize("choices", few_or_all([{"stage": 3, **RING}], [{"stage": 2}, {"stage": 3, **RING}]))
def test_exchanged_heads_and_rings(choices):
    compare(4, choices)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ring", [1, 2])
def test_every_schedule_and_stage(schedule, ring):
    """With clipping, tied embeddings, and gradients added up over two batches."""
    shared = {"parallel.ring": ring, "parallel.pipeline.schedule": schedule, "parallel.pipeline.micro_batches": 4}
    compare(4, [{"stage": stage, **shared} for stage in (0, 1, 2, 3)], 2, num_layers=4)


LESS_MEMORY: list[dict[str, Any]] = [
    {"stage": 3, "activations.checkpointing": "full", **RING},
    {"stage": 2, "activations.checkpointing": "selective", "activations.offload": "cpu"},
    {"stage": 3, "offload.optimizer": "cpu", "offload.parameters": "cpu", "activations.offload": "cpu"},
    {"stage": 3, "activations.checkpointing": "full", "activations.tiling": {"tokens": 3}, **CHUNKED, **RING},
    {"stage": 1, "parallel.pipeline.schedule": "zero_bubble", **CHUNKED},
]


@pytest.mark.slow
def test_with_less_memory():
    compare(4, LESS_MEMORY, num_layers=4)


@pytest.mark.wide
def test_with_less_memory_at_once():
    compare(4, [{**LESS_MEMORY[3], "activations.offload": "cpu"}])


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{"num_kv_heads": 1}, {"positions": "learned"}, {"tied_embeddings": False}], ids=str)
def test_variants_of_the_model(shape):
    compare(4, [{"stage": 2}, {"stage": 1, **RING, **CHUNKED}], **shape)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "choice",
    [
        {"parallel.tensor": 2},
        {"parallel.tensor": 2, "activations.checkpointing": "full", "activations.partitioning": True, **RING},
        {"parallel.tensor.size": 2, "parallel.tensor.sequence_parallel": True},
        {"parallel.tensor.size": 2, "parallel.tensor.sequence_parallel": True, **RING, **CHUNKED},
        {"parallel.context": 4, **RING},
        RING,  # and two replicas
    ],
    ids=str,
)
def test_on_eight_ranks(choice):
    compare(8, [{"stage": 3, **choice}])


@pytest.mark.wide
def test_sequence_parallel_layers():
    shared = {"parallel.context": 1, "parallel.tensor.size": 2, "parallel.tensor.sequence_parallel": True}
    choices = [{"stage": 3, **CHUNKED}, {"stage": 1, "parallel.pipeline.schedule": "zbv"}]
    compare(4, [{**shared, **choice} for choice in choices], num_layers=4)


@pytest.mark.wide
def test_chunked_losses_in_a_pipeline_of_two_ranks():
    shared = {"parallel.context": 1, **CHUNKED}
    schedules = ("1f1b", "zero_bubble", "interleaved_1f1b")
    choices = [{"stage": 3, **shared, "parallel.pipeline.schedule": schedule} for schedule in schedules]
    compare(2, choices, num_layers=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shared", [{}, RING, {"parallel.context": 1, "parallel.tensor": {"size": 2, "sequence_parallel": True}}], ids=str
)
def test_recompute_and_offload_change_no_bit(shared):
    assert_less_memory_changes_no_bit(4, {**TWO, "stage": 3, **shared}, {"num_layers": 4}, steps=5)


@pytest.mark.wide
def test_a_checkpoint_goes_on_in_another_layout(tmp_path):
    steps, half = 6, 3
    uninterrupted = plain(Run(steps=steps))
    path = str(tmp_path / "half.ckpt")
    start(4, [Run({"stage": 3, **TWO, **RING}, steps=steps, save=(half, path))])
    layouts: dict[int, list[dict[str, Any]]] = {2: [{"stage": 1}], 4: [{"stage": 2, **TWO}]}
    for world, choices in layouts.items():
        assert_resumed(world, [Run(o, steps=steps, resume=path) for o in choices], uninterrupted, half)


class Masked(Module):
    """Targets of which other shares are ignored in every sequence, all of them in one."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = functional.cross_entropy(self.model(batch[0]).float().flatten(0, 1), batch[1].flatten())
        self.log("loss", loss, on_step=True)
        self.log("twice", 2 * loss.detach(), on_step=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = functional.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())
        self.log("val_loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        logged = self.trainer.callback_metrics["loss"].item()
        assert logged == pytest.approx(outputs["loss"].item(), rel=1e-6)

    def on_validation_epoch_end(self) -> None:
        self.outcome.losses.append(self.trainer.callback_metrics["val_loss"].item())

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        count = self.run.steps * self.run.batch
        text = torch.randint(0, SHAPE["vocab_size"], (count, SHAPE["block_size"] + 1), generator=generator)
        targets = text[:, 1:].clone()
        for i in range(count):  # 0, 3, 7, 11 or 16 tokens at the front or the back
            ignored = (3, 16, 7, 0, 11)[i % 5]
            targets[i, slice(ignored) if i % 2 else slice(16 - ignored, 16)] = -100
        return DataLoader(TensorDataset(text[:, :-1], targets), batch_size=self.run.batch)

    val_dataloader = train_dataloader


def compare_counts(world: int, options: dict[str, Any], kind: type[Module] = Masked) -> None:
    assert_as_plain(world, [Run(options, steps=6, trainer={"limit_val_batches": 3})], kind, timeout_s=120)


PIPELINE = {"parallel.pipeline.size": 2, "parallel.pipeline.micro_batches": 4, "stage": 2}


class Explicit(Masked):
    """Calls the chunked loss itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        network = self.model
        x, rotation = network.token_embedding(batch[0]), network.rotary(batch[0].shape[1])
        for block in network.blocks:
            x = block(x, rotation)
        loss = linear_cross_entropy(network.norm(x), network.head, batch[1])
        self.log("loss", loss, on_step=True)
        return loss


def test_micro_batches_count_by_their_tokens():
    compare_counts(2, PIPELINE)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("world", "more", "kind"),
    [
        (4, {**RING, "parallel.context": 2}, Masked),
        (4, {**RING, "parallel.context": 2, **CHUNKED, "stage": 3}, Explicit),
        (4, {"parallel.tensor": 2, "parallel.pipeline.schedule": "zero_bubble", **CHUNKED}, Masked),
        (2, {"parallel.pipeline.schedule": "zero_bubble"}, Explicit),
    ],
    ids=str,
)
def test_unequal_counts_on_every_axis(world, more, kind):
    compare_counts(world, {**PIPELINE, **more}, kind)


@pytest.mark.wide
@pytest.mark.parametrize("options", [{"parallel.context": 2}, {"parallel.context": 2, **RING, **CHUNKED}], ids=str)
def test_targets_that_are_ignored_on_one_rank_only_without_a_pipeline(options):
    """Sequences whose first or last half has no loss: one of two ranks has none."""
    compare_counts(2, {"stage": 3, **options})


class Selects(Masked):
    """Selects the tokens that have a loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        chosen = batch[1] != -100
        loss = functional.cross_entropy(self.model(batch[0]).float()[chosen], batch[1][chosen])
        self.log("loss", loss, on_step=True)
        return loss


class ByHand(Masked):
    """Computes the mean itself."""

    def mean(self, batch: Any) -> Tensor:
        losses = functional.cross_entropy(self.model(batch[0]).float().transpose(1, 2), batch[1], reduction="none")
        mask = batch[1] != -100
        return (losses * mask).sum() / mask.sum()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.mean(batch)
        self.log("loss", loss, on_step=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.mean(batch)
        self.log("val_loss", loss.item())
        return loss


@pytest.mark.wide
@pytest.mark.parametrize("kind", [pytest.param(Selects, marks=pytest.mark.wide), ByHand])
def test_means_made_by_hand_count_by_their_tokens(kind):
    """Some micro-batches have none."""
    compare_counts(2, PIPELINE, kind)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("world", "more"),
    [
        (4, {**RING, "parallel.context": 2}),
        (4, {"parallel.tensor": 2, "parallel.pipeline.schedule": "zero_bubble"}),
        (2, {"stage": 3, **CHUNKED}),
        (2, {"stage": 3, "activations.checkpointing": "full", "parallel.pipeline.schedule": "gpipe"}),
    ],
    ids=str,
)
def test_means_made_by_hand_on_every_axis(world, more):
    compare_counts(world, {**PIPELINE, **more}, ByHand)


@pytest.mark.wide
@pytest.mark.parametrize("options", [{"parallel.context": 2}, {"parallel.context": 2, **RING, **CHUNKED}], ids=str)
def test_means_made_by_hand_over_sharded_tokens(options):
    compare_counts(2, {"stage": 3, **options}, ByHand)


class Root(ByHand):
    """Its loss does not follow from those of micro-batches."""

    def mean(self, batch: Any) -> Tensor:
        return super().mean(batch).sqrt()


@on_ranks(2, timeout_s=100)
def test_a_loss_that_does_not_follow_from_micro_batches_is_refused_on_all_ranks(rank: int, world_size: int) -> None:
    with pytest.raises(StateError, match=r"training_step computes sqrt\(\) of a value over all samples"):
        train(rank, world_size, Run(PIPELINE, steps=2), Root)


class Lengths(Module):
    """The third batch has a length that the ranks cannot share."""

    def train_dataloader(self) -> DataLoader:
        batches = [(torch.zeros(8, tokens, dtype=torch.long),) * 2 for tokens in (16, 16, 15, 16)]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def train_lengths(rank: int, world_size: int, options: dict[str, Any]) -> tuple[str, float, int]:
    """Return the error, the seconds from the last step to it, and the number of steps."""
    module, times = Lengths(Run(options, {"num_layers": 8})), [time.monotonic()]
    module.on_train_batch_end = lambda *_: times.append(time.monotonic())  # type: ignore[method-assign]
    strategy = ZeROStrategy(**nested(options))
    trainer = trainer_of(strategy, devices=world_size, max_epochs=1, use_distributed_sampler=False)
    with pytest.raises(PlanError) as error:
        trainer.fit(module)
    return str(error.value), time.monotonic() - times[-1], len(times) - 1


def assert_all_refuse(world: int, options: dict[str, Any]) -> None:
    for message, seconds, steps in spawn(train_lengths, world, options, init_process_group=False, timeout_s=170):
        assert "15 tokens cannot be sharded over the 2 ranks" in message
        assert "Pad the batch to a multiple of" in message
        assert steps == 2
        assert seconds < wall(15)  # ranks that wait in vain end with another error, after 25


@pytest.mark.wide
def test_a_length_that_does_not_divide_is_refused_at_once_on_all_ranks():
    assert_all_refuse(4, {"stage": 3, **TWO})


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_refuses_it_on_all_ranks(schedule):
    """The later ones of four ranks get it from one that does not know the length either."""
    pipeline = {"size": 4, "micro_batches": 8, "schedule": schedule}
    assert_all_refuse(8, {"stage": 1, **TWO, **RING, **{f"parallel.pipeline.{k}": v for k, v in pipeline.items()}})


class Evaluates(Module):
    """Predicts from lengths that shard, that do not, and that look like a shard of the others."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"logits": self.model(batch[0])}


def predict(rank: int, world_size: int, options: dict[str, Any] | None) -> list[Tensor]:
    torch.manual_seed(0)
    module = Evaluates(Run(options))
    strategy: Any = "auto" if options is None else ZeROStrategy(**nested(options))
    trainer = trainer_of(strategy, devices=world_size, max_epochs=1, use_distributed_sampler=False)
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randint(0, SHAPE["vocab_size"], (4, n), generator=generator),) for n in (16, 7, 8, 16, 3, 2)]
    return [each["logits"] for each in trainer.predict(module, DataLoader(batches, batch_size=None))]  # type: ignore[index, union-attr]


@pytest.mark.wide
def test_predictions_of_all_lengths_are_those_of_one_process():
    expected = spawn(predict, 1, None, init_process_group=False)[0]
    options = {"stage": 3, **TWO, **RING, **CHUNKED}
    for found in spawn(predict, 4, options, init_process_group=False, timeout_s=100):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)
