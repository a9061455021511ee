"""Whole tensors with experts, in pipelines and under tensor parallelism, and parameters that join during a fit.

Trusted runs: one process, or DDP. The iteration of Muon runs in fp32 here: in bf16 it shows the order of every sum.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from torch.utils.flop_counter import FlopCounterMode

import ls_strategy
from ls_strategy.config import nested
from ls_strategy.errors import PlanError
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from ls_strategy.zero.step.owner import split_jobs
from ls_strategy.zero.step.owner.split_jobs import Directions
from tests.dist.parallel_runs import (
    Module,
    Outcome,
    Run,
    assert_as_plain,
    assert_resumed,
    plain,
    start,
    train,
    train_all,
    unequal,
)
from tests.dist.ranks import Net, assert_close, assert_equal, fit, global_batches, on_ranks, quiet, weights
from tests.dist.whole_optimizers import Shampoo, matrices, vectors
from tests.marks import slow, wide

pytestmark = pytest.mark.dist
STEPS = 6
EXPERTS = {"drop_tokens": False, "k": 2, "balance_loss": 0.0, "second_expert_sampling": False}
LIMITS: dict[str, Any] = {"losses": 1e-5, "norms": 1e-4, "weights": 1e-5}


class WithLamb(Module):
    def configure_optimizers(self) -> Any:
        return ls_strategy.Lamb([{"params": matrices(self)}, {"params": vectors(self), "lr": 1e-3}], lr=2e-3, eps=1e-2)


class WithMuon(Module):
    """The blocks' matrices and stacks of experts by Muon."""

    def configure_optimizers(self) -> Any:
        hidden = [p for p in self.model.blocks.parameters() if p.dim() >= 2]
        taken = set(map(id, hidden))
        others = [p for p in self.parameters() if id(p) not in taken]
        return ls_strategy.Muon(
            [{"params": hidden}, {"params": others, "use_muon": False}], lr=2e-3, eps=1e-2, ns_dtype="fp32"
        )


@pytest.mark.parametrize(
    ("size", "tier", "stages"),
    [(2, None, (3,)), wide(2, None, (1, 3)), slow(1, "cpu", (1, 3))],
)
def test_stacks_of_experts_are_stepped_expert_by_expert(size: int, tier: str | None, stages: tuple[int, ...]) -> None:
    offload = {} if tier is None else {"offload.optimizer": tier}
    cases = [
        Run({"stage": stage, "parallel.expert": size, **offload}, experts=EXPERTS, steps=STEPS) for stage in stages
    ]
    assert_as_plain(2, cases, WithMuon, **LIMITS)


@pytest.mark.slow
def test_pipelines_and_experts_on_four_ranks() -> None:
    pipeline = [Run({"stage": 1, "parallel.pipeline": 2}, steps=STEPS), Run({"stage": 2}, steps=STEPS)]
    alone = plain(Run(steps=STEPS), WithLamb)
    found = start(4, pipeline, WithLamb)
    for outcome in found:
        outcome.losses, outcome.norms = outcome.losses or alone.losses, outcome.norms or alone.norms
    assert not unequal(alone, pipeline, found, **LIMITS)
    experts = [Run({"stage": 3, "parallel.expert": 2}, experts=EXPERTS, steps=STEPS)]
    assert_as_plain(4, experts, WithMuon, **LIMITS)


@pytest.mark.parametrize(
    ("ranks", "stages", "kinds"),
    [(2, (1,), [WithMuon]), wide(2, (1,), [WithMuon, WithLamb]), slow(4, (0, 1, 3), [WithMuon, WithLamb])],
)
def test_matrices_that_tensor_parallelism_splits_are_stepped_in_full(
    ranks: int, stages: tuple[int, ...], kinds: list[type[Module]]
) -> None:
    for kind in kinds:
        cases = [Run({"stage": stage, "parallel.tensor": 2}, steps=STEPS) for stage in stages]
        assert_as_plain(ranks, cases, kind, **LIMITS)


class Unwatched(WithMuon):
    """No hook can see gradients, so that directions begin in backward."""

    on_before_optimizer_step = pl.LightningModule.on_before_optimizer_step
    on_train_batch_end = pl.LightningModule.on_train_batch_end


def early_and_in_turn(rank: int, world_size: int, cases: list[Run]) -> list[tuple[Outcome, Outcome, int]]:
    """Per case: the run, the same with everything in turn, and how many buffers' directions began in backward."""
    found = []
    for run in cases:
        begun = [0]
        outcomes = []
        for overlap in (True, False):
            options = {**(run.options or {}), "offload.optimizer": "cpu", "sharding.overlap_step": overlap}

            def counted(*args: Any) -> Directions:
                begun[0] += 1  # noqa: B023
                return Directions(*args)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(split_jobs, "Directions", counted)  # those of the step have another name
                outcomes.append(train(rank, world_size, replace(run, options=options), Unwatched))
        found.append((*outcomes, begun[0]))
    return found


@pytest.mark.wide
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_directions_begin_in_backward_with_other_kinds_of_parallelism(ranks: int) -> None:
    """With the bits of a run in turn."""
    kinds: list[tuple[dict[str, Any], Any]] = [
        ({"parallel.tensor": 2}, None), ({"parallel.expert": 2}, EXPERTS), ({"parallel.context": 2}, None),
    ]  # fmt: skip
    cases = [
        Run({"stage": stage, **options}, experts=experts, steps=STEPS) for options, experts in kinds for stage in (1, 3)
    ]
    for results in spawn(early_and_in_turn, ranks, cases, init_process_group=False):
        for run, (early, in_turn, begun) in zip(cases, results, strict=True):
            assert begun > 0, str(run)
            assert_equal(early.weights, in_turn.weights, str(run))


class CountsFlops(WithMuon):
    """FLOPs of the step, and elements that this rank sends for it."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        closure = kwargs.get("optimizer_closure") or args[3]
        optimizer = args[2]
        closure()
        strategy: Any = self.trainer.strategy
        traffic = strategy.traffic if isinstance(strategy, ZeROStrategy) else None
        before = traffic.elements["all_to_all"] if traffic else 0
        with FlopCounterMode(display=False) as counter:
            optimizer.step()
        sent = traffic.elements["all_to_all"] - before if traffic else 0
        self.outcome.notes["flops"] = counter.get_total_flops()
        self.outcome.notes["sent"] = sent
        if traffic:
            members = strategy.require_engine().optimizers[0].sharded.owner.members
            self.outcome.notes["formula"] = strategy.require_engine().optimizers[0].sharded.owner.elements_sent
            self.outcome.notes["steps"] = sorted(m.number for m in members if m.is_mine)


@pytest.mark.parametrize(("ranks", "stages"), [(2, (2,)), pytest.param(4, (1, 3), marks=pytest.mark.slow)])
def test_tensor_parallel_ranks_step_every_matrix_once(ranks: int, stages: tuple[int, ...]) -> None:
    """Newton-Schulz FLOPs of all ranks are those of one process, and no rank has more than 1.15 of the mean."""
    one = plain(Run(steps=2), CountsFlops).notes
    cases = [Run({"stage": stage, "parallel.tensor": 2}, steps=2) for stage in stages]
    by_rank = spawn(train_all, ranks, cases, CountsFlops, init_process_group=False)
    for n in range(len(cases)):
        notes = [outcomes[n].notes for outcomes in by_rank]
        flops = [note["flops"] for note in notes]
        assert sum(flops) == one["flops"] > 0
        assert max(flops) <= 1.15 * sum(flops) / ranks
        assert sum(note["sent"] for note in notes) == notes[0]["formula"] > 0
        stepped = [number for note in notes for number in note["steps"]]
        assert len(stepped) == len(set(stepped))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [WithMuon, WithLamb])
@pytest.mark.parametrize("save_as", ["sharded", "file"])
def test_states_go_between_splits(kind: type[Module], save_as: str, tmp_path: Path) -> None:
    """Saved under tensor parallelism at stage 1, resumed at stage 3 without; and the other way round."""
    layouts = [{"stage": 1, "parallel.tensor": 2}, {"stage": 3, "offload.optimizer": "cpu"}]
    alone = plain(Run(steps=STEPS), kind)
    for n, layout in enumerate(layouts):
        file = str(tmp_path / f"{n}.ckpt")
        first = Run({**layout, "checkpoint": save_as}, steps=STEPS, save=(STEPS // 2, file))
        start(2, [first], kind)
        later = [Run({**other, "checkpoint": save_as}, steps=STEPS, resume=file) for other in layouts]
        assert_resumed(2, later, alone, STEPS // 2, kind, **LIMITS)


@on_ranks(2)
def test_a_stack_of_experts_is_refused_by_optimizers_that_take_it_for_one_tensor(rank: int, world_size: int) -> None:
    with pytest.raises(PlanError, match=r"Lamb is not element-wise.*expert parallelism splits 'model\.blocks"):
        train(rank, world_size, Run({"stage": 1, "parallel.expert": 2}, experts=EXPERTS), WithLamb)


class Joins(Net):
    """A block begins to train in the second epoch."""

    def build(self) -> None:
        super().build()
        self.blocks[1].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return Shampoo([p for p in self.parameters() if p.requires_grad])

    def on_train_epoch_start(self) -> None:
        if self.trainer.current_epoch == 1:
            self.blocks[1].requires_grad_(True)
            self.trainer.optimizers[0].add_param_group({"params": list(self.blocks[1].parameters()), "lr": 0.02})


@pytest.mark.wide
@on_ranks(2)
def test_parameters_that_join_keep_the_states_of_the_others(rank: int, world_size: int) -> None:
    quiet()
    found: dict[str, Any] = {}
    for name, options in {"0": {"stage": 0}, "1": {"stage": 1, "offload.optimizer": "cpu"}, "3": {"stage": 3}}.items():
        module = Joins()
        data = global_batches(rank, world_size, 4)
        strategy = ZeROStrategy(**nested({"sharding.min_unit_numel": 0, **options}))
        fit(strategy, module, data, use_distributed_sampler=False, max_epochs=3)
        found[name] = weights(module)
    assert_equal(found["3"], found["1"], "stage 3 and stage 1")
    assert_close(found["1"], found["0"], "stage 1 and stage 0", 1e-6)
