"""Muon's directions begin in backward where nobody looks, with the bits of a run that does everything in turn."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ls_strategy.errors import StateError
from ls_strategy.lightning.precision import ZeROPrecision
from ls_strategy.tiers.stream import Stream
from ls_strategy.zero.step.owner.split_jobs import EarlyDirections, _Application
from ls_strategy.zero.step.owner.split_tensors import SplitTensors
from tests.dist.ranks import assert_equal, batches, fit, on_ranks, saved
from tests.dist.test_early_update import strategy, updates_begun_in_backward
from tests.dist.test_whole_overlap import STEPS, Watched, slowly_applied, trained
from tests.dist.whole_optimizers import matrices
from tests.marks import slow

WIDE = pytest.mark.wide


class Plain(Watched):
    """The matrices of three blocks by Muon, each block a buffer; first and last layer by AdamW."""

    def on_fit_start(self) -> None:
        """Watch nothing."""


class Looks(Plain):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Anything may be read here."""


class LooksAfterTheStep(Plain):
    """At gradients, of which early directions leave the averages."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx == 2:
            self.seen += [p.grad.double().sum().item() for p in self.parameters() if p.grad is not None]


@pytest.mark.parametrize("stage", [slow(1), 2, slow(3)])
@on_ranks(2, timeout_s=150)
def test_directions_begin_in_backward_where_nobody_looks(rank: int, world_size: int, stage: int) -> None:
    """Of three blocks; first and last layer have no directions."""
    assert updates_begun_in_backward(Plain(), stage) == 3
    assert updates_begun_in_backward(Plain(), stage, accumulate_grad_batches=2) == 3
    assert updates_begun_in_backward(Looks(), stage) == 0
    assert updates_begun_in_backward(Plain(), stage, gradient_clip_val=0.1) == 0


class Overflows(Plain):
    """The gradients of the third step are infinite."""

    def training_step(self, batch: Any, i: int) -> Tensor:
        return super().training_step(batch, i) * (float("inf") if i == 2 else 1.0)


@WIDE
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2, timeout_s=150)
def test_nothing_begins_where_a_step_may_be_skipped(rank: int, world_size: int, stage: int) -> None:
    """In fp16, whether a step takes place is known when the last gradient has been seen: no momentum moves before."""
    assert updates_begun_in_backward(Plain(), stage, plugins=[ZeROPrecision("16-mixed")]) == 0
    early, in_turn, without = Overflows(), Overflows(), Plain()
    found = trained(rank, world_size, early, {"stage": stage}, plugins=[ZeROPrecision("16-mixed")])
    options = {"stage": stage, "sharding.overlap_step": False}
    expected = trained(rank, world_size, in_turn, options, plugins=[ZeROPrecision("16-mixed")])
    assert_equal(found, expected, f"stage {stage}")
    assert early.losses == in_turn.losses
    assert all(torch.isfinite(v).all() for v in found.values())
    other = trained(rank, world_size, without, {"stage": stage}, plugins=[ZeROPrecision("16-mixed")])
    assert without.losses[:2] == early.losses[:2]
    assert any(not torch.equal(v, found[k]) for k, v in other.items()), "no step was skipped"


class Warmed(Plain):
    """Changes the momentum before every backward, as warm-ups of Muon do."""

    def training_step(self, batch: Any, i: int) -> Tensor:
        for group in self.trainer.optimizers[0].param_groups:
            if group.get("use_muon", True):
                group["momentum"] = 0.85 + 0.02 * i
        return super().training_step(batch, i)


class Unused(Plain):
    """A block has no gradient in every second step, and a matrix of another one in the other steps."""

    def training_step(self, batch: Any, i: int) -> Tensor:
        for p in self.blocks[1].parameters():
            p.requires_grad_(i % 2 == 0)
        matrices(self.blocks[2])[0].requires_grad_(i % 2 == 1)
        return super().training_step(batch, i)


CASES: dict[str, tuple[type[Plain], dict[str, Any]]] = {
    "plain": (Plain, {}),
    "momentum changes": (Warmed, {}),
    "parts are left out": (Unused, {}),
    "accumulated": (Plain, {"accumulate_grad_batches": 2}),
    "bf16-mixed": (Plain, {"precision": "bf16-mixed"}),
    "bf16-true": (Plain, {"precision": "bf16-true"}),
    "looked at later": (LooksAfterTheStep, {}),
}


@WIDE
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2, timeout_s=240)
def test_the_bits_are_those_of_a_step_in_turn(rank: int, world_size: int, stage: int) -> None:
    """Slow directions are still computed when backward is over."""

    def late(self: SplitTensors, *args: Any) -> Tensor:
        time.sleep(0.005)
        return plain(self, *args)

    plain = SplitTensors.direction
    for name, (net, case) in CASES.items():
        early, in_turn = net(), net()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SplitTensors, "direction", late)
            found = trained(rank, world_size, early, {"stage": stage}, **case)
        expected = trained(rank, world_size, in_turn, {"stage": stage, "sharding.overlap_step": False}, **case)
        assert_equal(found, expected, f"stage {stage}, {name}")
        assert early.losses == in_turn.losses, name
        assert early.seen == in_turn.seen, name


@WIDE
@pytest.mark.parametrize("early", [True, False])
@on_ranks(2, timeout_s=150)
def test_few_updates_wait_to_be_applied(rank: int, world_size: int, early: bool) -> None:
    """They are in the device's memory; with directions from backward, nothing else would hold them back."""
    waiting: list[int] = []
    tickets: list[Any] = []
    submit = Stream.submit

    def noted(self: Stream, jobs: Any) -> Any:
        if not isinstance(jobs[0], _Application):
            return submit(self, jobs)
        waiting.append(sum(not ticket.done for ticket in tickets))
        tickets.append(submit(self, jobs))
        return tickets[-1]

    with pytest.MonkeyPatch.context() as patch, slowly_applied():
        patch.setattr(Stream, "submit", noted)
        trained(rank, world_size, Plain() if early else Looks(), {"stage": 2})
    assert len(waiting) > 2 * STEPS, waiting  # of six matrices a rank has parts of three or more
    assert max(waiting) <= 1, waiting  # and the new one


class SavesEveryStep(Plain):
    """So that no step finds the momentum where directions are computed; but for the last one."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != STEPS - 2:
            self.trainer.save_checkpoint(self.folder / f"{batch_idx}")


@WIDE
@pytest.mark.parametrize("background", [False, True])
@on_ranks(2, timeout_s=150)
def test_a_step_after_a_checkpoint(rank: int, world_size: int, background: bool, tmp_path: Path) -> None:
    found = []
    for overlap in (True, False):
        folder = tmp_path / str(overlap)
        options = {"stage": 2, "sharding.overlap_step": overlap, "checkpoint.background": background}
        trained(rank, world_size, SavesEveryStep(folder), options)
        found.append(saved(folder / f"{STEPS - 1}"))
    assert_equal(found[0]["state_dict"], found[1]["state_dict"], "weights")
    states = [each["optimizer_states"][0]["state"] for each in found]
    assert any("momentum_buffer" in state for state in states[0].values())
    assert_equal(states[0], states[1], "states")


class Twice(Plain):
    """The first block twice, by checkpoints whose gradients come in two parts."""

    def forward(self, x: Tensor) -> Tensor:
        again = checkpoint(self.blocks[0], self.first(x), use_reentrant=True)
        return super().forward(x) + again


@WIDE
@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2, timeout_s=150)
def test_gradients_that_come_in_two_parts(rank: int, world_size: int, stage: int) -> None:
    """Right, or refused with the cure; never wrong."""
    in_turn, early = Twice(), Twice()
    expected = trained(rank, world_size, in_turn, {"stage": stage, "sharding.overlap_step": False})
    refusal = ""
    try:
        found = trained(rank, world_size, early, {"stage": stage})
    except StateError as error:
        refusal = str(error)
    if refusal:
        assert "sharding.overlap_step=False" in refusal
    else:
        assert_equal(found, expected, f"stage {stage}")


class Fails(Plain):
    """Raises in the middle of the third backward pass, when some directions have begun."""

    def training_step(self, batch: Any, i: int) -> Tensor:
        loss = super().training_step(batch, i)
        if i == 2:
            self.first.weight.register_hook(self.fail)
        return loss

    def fail(self, _: Tensor) -> None:
        raise RuntimeError("in the middle")


@WIDE
@pytest.mark.parametrize("overlap", [True, False])
@on_ranks(2)
def test_a_momentum_of_no_step_is_not_saved(rank: int, world_size: int, overlap: bool) -> None:
    ours = strategy(2, **{"sharding.overlap_step": overlap})
    with pytest.raises(RuntimeError, match="in the middle"):
        fit(ours, Fails(), batches(numel=64))
    if overlap:
        with pytest.raises(StateError, match="do not belong to one step"):
            ours.lightning_module_state_dict()
    else:
        assert ours.lightning_module_state_dict() or rank


@WIDE
@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_gradients_that_change_after_their_directions_began(rank: int, world_size: int, stage: int) -> None:
    """No hook of Lightning may do so unseen; code that reaches into the engine is told."""
    begin = EarlyDirections.begin

    def change(self: EarlyDirections, flat: Any, *args: Any) -> None:
        begin(self, flat, *args)
        flat.averages.change(lambda grads: grads.mul_(2))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EarlyDirections, "begin", change)
        with pytest.raises(StateError, match=r"was changed after its step had begun.*sharding.overlap_step=False"):
            fit(strategy(stage), Plain(), batches(numel=64))


class ByTorch(Plain):
    """torch's own Muon, whose step is split as ours is; the vectors are frozen, since it takes matrices only."""

    def configure_optimizers(self) -> Any:
        hidden = matrices(self)
        for p in self.parameters():
            p.requires_grad_(any(p is h for h in hidden))
        return torch.optim.Muon(hidden, lr=0.01)


@WIDE
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_muon_of_torch(rank: int, world_size: int, stage: int) -> None:
    early, in_turn = ByTorch(), ByTorch()
    found = trained(rank, world_size, early, {"stage": stage})
    expected = trained(rank, world_size, in_turn, {"stage": stage, "sharding.overlap_step": False})
    assert_equal(found, expected, f"stage {stage}")
    assert updates_begun_in_backward(ByTorch(), stage) > 0
