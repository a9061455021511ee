"""What the host does for a split step overlaps the next forward, with the bits of a run without overlap."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ls_strategy
from ls_strategy.config import nested
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.zero.step.owner import owner_updater
from ls_strategy.zero.step.owner.split_tensors import SplitTensors
from tests.dist.ranks import Net, assert_equal, fit, global_batches, on_ranks, saved, weights
from tests.dist.test_whole_steps import WithMuon, total
from tests.dist.whole_optimizers import matrices

STEPS = 4
APPLYING_S = 0.05


class Watched(WithMuon):
    """Counts the buffers whose updates are in flight when the first layer of a later step has run.

    That layer and the last one are stepped by AdamW, as embeddings and the head of a language model are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.in_flight: list[int] = []
        self.seen_in_flight = threading.Event()
        """The last matrix is not changed before."""

    def configure_optimizers(self) -> Any:
        hidden = matrices(self.blocks)
        others = [p for p in self.parameters() if all(p is not h for h in hidden)]
        optimizer = ls_strategy.Muon([{"params": hidden}, {"params": others, "use_muon": False}], lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]

    def on_fit_start(self) -> None:
        self.first.register_forward_hook(self.look)

    def look(self, *_: Any) -> None:
        if self.trainer.training and self.trainer.global_step:
            strategy: Any = self.trainer.strategy
            flats = strategy.require_engine().flats
            self.in_flight.append(sum(f.updating is not None and not f.updating.done for f in flats))
            self.seen_in_flight.set()

    def training_step(self, batch: Any, i: int) -> Any:
        loss = super().training_step(batch, i)
        self.seen_in_flight.clear()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEPS - 1:
            self.seen_in_flight.set()

    def on_train_end(self) -> None:
        pass


@contextmanager
def held_back(module: Watched) -> Iterator[None]:
    """Every matrix is a bucket of its own, and the last one is changed when the next forward has begun."""
    with pytest.MonkeyPatch.context() as patch:
        plain = SplitTensors.write

        def write(self: SplitTensors, member: Any, *args: Any) -> None:
            strategy: Any = module.trainer.strategy
            if member.number == strategy.require_engine().optimizers[0].sharded.owner.members[-1].number:
                assert module.seen_in_flight.wait(30)
            plain(self, member, *args)

        patch.setattr(SplitTensors, "write", write)
        patch.setattr(owner_updater, "BUCKET", 1)
        yield


def trained(rank: int, world_size: int, module: Net, options: dict[str, Any], **trainer: Any) -> dict[str, Tensor]:
    given = {"offload.optimizer": "cpu", "sharding.min_unit_numel": 0, **options}
    batches = global_batches(rank, world_size, STEPS)
    fit(ZeROStrategy(**nested(given)), module, batches, use_distributed_sampler=False, max_epochs=1, **trainer)
    return weights(module)


@contextmanager
def slowly_applied() -> Iterator[None]:
    """Every matrix is a bucket of its own, and takes long to apply."""
    with pytest.MonkeyPatch.context() as patch:
        plain = SplitTensors.write

        def write(self: SplitTensors, *args: Any) -> None:
            time.sleep(APPLYING_S)
            plain(self, *args)

        patch.setattr(SplitTensors, "write", write)
        patch.setattr(owner_updater, "BUCKET", 1)
        yield


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.wide), 2, pytest.param(3, marks=pytest.mark.wide)])
@on_ranks(2, timeout_s=150)
def test_updates_are_applied_while_the_next_forward_runs(rank: int, world_size: int, stage: int) -> None:
    """The scheduler halves the rate after every second step: what is applied later has the rate of its own step."""
    overlapped, in_turn = Watched(), Watched()
    with held_back(overlapped):
        found = trained(rank, world_size, overlapped, {"stage": stage})
    expected = trained(rank, world_size, in_turn, {"stage": stage, "sharding.overlap_step": False})
    assert_equal(found, expected, f"stage {stage}")
    assert overlapped.losses == in_turn.losses
    assert len(overlapped.in_flight) == len(in_turn.in_flight) == STEPS - 1
    assert all(total(n) > 0 for n in overlapped.in_flight), overlapped.in_flight
    assert not any(in_turn.in_flight)


class Reads(WithMuon):
    """Looks at the weights where users do: after the step, and in a hook of the optimizer."""

    def __init__(self, hooked: bool) -> None:
        super().__init__()
        self.hooked = hooked
        self.read: list[float] = []

    def note(self, *_: Any) -> None:
        self.read += [p.detach().double().sum().item() for p in self.parameters()]

    def configure_optimizers(self) -> Any:
        optimizers, schedulers = super().configure_optimizers()
        if self.hooked:
            optimizers[0].register_step_post_hook(self.note)
        return optimizers, schedulers

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note()


@pytest.mark.wide
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2, timeout_s=150)
def test_who_reads_weights_after_the_step_gets_the_new_ones(
    rank: int, world_size: int, stage: int, hooked: bool
) -> None:
    runs = []
    for options in ({}, {"sharding.overlap_step": False}):
        module = Reads(hooked)
        with slowly_applied():
            trained(rank, world_size, module, {"stage": stage, **options})
        runs.append(module.read)
    assert runs[0] == runs[1]
    assert len(runs[0]) >= STEPS * (1 + hooked)


class Saving(WithMuon):
    """Saves right after a step."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.trainer.save_checkpoint(self.path)


@pytest.mark.wide
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2, timeout_s=150)
def test_a_checkpoint_has_the_weights_that_are_still_being_changed(
    rank: int, world_size: int, stage: int, background: bool, tmp_path: Path
) -> None:
    """And the momentum of the same step."""
    found = []
    for name, overlap in (("overlapped", True), ("in_turn", False)):
        options = {"stage": stage, "sharding.overlap_step": overlap, "checkpoint.background": background}
        with slowly_applied():
            trained(rank, world_size, Saving(tmp_path / name), options)
        found.append(saved(tmp_path / name))
    assert_equal(found[0]["state_dict"], found[1]["state_dict"], "weights")
    states = [each["optimizer_states"][0]["state"] for each in found]
    assert any("momentum_buffer" in state for state in states[0].values())
    assert_equal(states[0], states[1], "states")
