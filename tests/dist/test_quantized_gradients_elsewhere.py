"""Gradients that are sent in few bits, together with other kinds of parallelism and options, and with Fabric.

Runs come in pairs with the same options: exact, and rounded. The first averages of both belong to the same weights.
Their difference is what `gradient_error` reports, and the rounded run trains on, the same on every rank.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ls_strategy.testing import spawn
from tests.dist import fabric_ranks
from tests.dist.parallel_runs import Module, Outcome, Run, train_all
from tests.dist.ranks import on_ranks
from tests.dist.test_quantized_gradients import rounding
from tests.dist.test_shard_groups import NORM, NVME, VALUE, on_nodes
from tests.models import Case, Net, loader, placed, quiet, trainer_of

ROUNDED = "sharding.quantized_gradients"


def note(module: Any, notes: dict[str, Any]) -> None:
    """Keep the first averages of a run, and what rounding has changed of them."""
    strategy = module.trainer.strategy
    if "gradients" in notes:
        return
    notes["gradients"] = {name: grad.float().clone() for name, grad in strategy.full_gradients()}
    if strategy.config.sharding.quantized_gradients is not None:
        notes["error"] = strategy.gradient_error()


class Notes(Module):
    """Of `parallel_runs`."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        note(self, self.outcome.notes)


def compare(exact: list[Any], ours: list[Any], what: Any) -> None:
    """Results of all ranks: in a pipeline, each has the gradients of its stage."""
    trusted, found = ({k: v for rank in ranks for k, v in rank.notes["gradients"].items()} for ranks in (exact, ours))
    assert trusted.keys() == found.keys(), what
    assert len({rank.notes["error"] for rank in ours}) == 1, what
    for rank in ours:
        for name, grad in rank.notes["gradients"].items():
            assert torch.equal(grad, found[name]), f"{what}: ranks have different averages of {name}"
    change = math.sqrt(sum(float((found[k] - v).double().square().sum()) for k, v in trusted.items()))
    full = math.sqrt(sum(float(v.double().square().sum()) for v in trusted.values()))
    reported = ours[0].notes["error"]
    ratio = reported * full / change  # errors of messages count as independent of each other, which they nearly are
    assert 0.8 < ratio < 1.25, f"{what}: averages change by {change / full:.2%}, and {reported:.2%} is reported"
    for a, b in zip(exact, ours, strict=True):
        assert a.losses[0] == b.losses[0], what
        assert a.losses != b.losses, f"{what}: nothing was rounded"
        assert len(a.losses) == len(b.losses)
        # Steps are of one size, and what is lost in each is a part of it.
        far = max(abs(x - y) / abs(x) for x, y in zip(a.losses, b.losses, strict=True))
        assert far < max(reported, 1e-3), f"{what}: losses differ by {far:.2%}, gradients by {reported:.2%}"


# --- other kinds of parallelism --------------------------------------------------------------------------------------

MOE = {"drop_tokens": False, "k": 2}
TWO_STAGES = {"parallel.pipeline.size": 2, "parallel.pipeline.micro_batches": 2}
ON_TWO: list[tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any]]] = [
    ({"stage": 2, "parallel.context": 2}, None, {}),
    ({"stage": 3, "parallel.expert": 2}, MOE, {}),
]
ON_FOUR: list[tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any]]] = [
    ({"stage": 3, "parallel.tensor": 2}, None, {}),
    ({"stage": 1, "parallel.tensor": 2}, None, {"accumulate_grad_batches": 2}),
    ({"stage": 2, "parallel.tensor.size": 2, "parallel.tensor.sequence_parallel": True}, None, {}),
    ({"stage": 3, **TWO_STAGES}, None, {"gradient_clip_val": 0.5}),
    ({"stage": 1, **TWO_STAGES, "parallel.pipeline.schedule": "zero_bubble"}, None, {"accumulate_grad_batches": 2}),
    ({"stage": 2, "parallel.expert": 2}, MOE, {}),
    ({"stage": 3, "parallel.expert": 4}, MOE, {"accumulate_grad_batches": 2}),
    ({"stage": 3, "parallel.context": 2}, None, {}),
    ({"stage": 2, "parallel.context": 4, "parallel.ring": 2}, None, {"gradient_clip_val": 0.5}),
    ({"stage": 3, "parallel.context": 2, "sharding.shard_size": 2}, None, {}),
    ({"stage": 3, "parallel.tensor": 2, "sharding.shard_size": 1}, None, {}),
    ({"stage": 3, "parallel.context": 2, "sharding.hpz": 2, "sharding.quantized_gathers": "int8"}, None, {}),
    ({"stage": 3, "activations.checkpointing": "full", "offload.optimizer": "cpu"}, None, {}),
]  # fmt: skip


def on_two_nodes(rank: int, world_size: int, runs: list[Run]) -> list[Outcome]:
    if world_size > 2:
        on_nodes(rank, 2)
    return train_all(rank, world_size, runs, Notes)


def parallel(world_size: int, cases: list[Any], form: str) -> None:
    runs = [
        Run({**options, **more}, experts=experts, steps=4, trainer=trainer)
        for options, experts, trainer in cases
        for more in ({}, {ROUNDED: form})
    ]
    ranks = spawn(on_two_nodes, world_size, runs, init_process_group=False, timeout_s=170)
    for i, run in enumerate(runs[1::2]):
        compare([rank[2 * i] for rank in ranks], [rank[2 * i + 1] for rank in ranks], run)


@pytest.mark.wide
def test_on_two_ranks() -> None:
    parallel(2, ON_TWO, "int8")


@pytest.mark.wide
@pytest.mark.parametrize("form", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("half", [0, 1])
def test_on_four_ranks(half: int, form: str) -> None:
    """Two nodes of two ranks."""
    parallel(4, ON_FOUR[half::2], form)


# --- options ---------------------------------------------------------------------------------------------------------


class NotesOfNet(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        note(self, self.result.notes)


def uneven(*weights: float) -> tuple[tuple[str, Any], ...]:
    return (("sharding.rank_weights", weights),)


FIRST = [
    (Case(stage=3, steps=3, width=32, options=uneven(2, 1), accumulate=2, **NORM), "int8"),
    (Case(stage=2, steps=3, width=32, traits=("unused", "unused_here"), precision="16-mixed"), "int8"),
]
OPTIONS = [
    (Case(stage=1, steps=3, width=32, options=uneven(1, 3), **NORM), "int4"),
    (Case(stage=2, steps=3, width=32, options=uneven(1, 40), traits=("uneven", "tied"), optimizer="two"), "int8"),
    (Case(stage=3, steps=3, width=32, traits=("unused", "frozen"), accumulate=2, **VALUE), "int8"),
    (Case(stage=3, steps=3, width=32, optimizer="two", traits=("unused",), accumulate=2, **NORM), "int8"),
    (Case(stage=1, steps=3, width=32, precision="16-mixed", accumulate=2, **NORM), "int4"),
    (Case(stage=3, steps=3, width=32, precision="16-true", **NORM), "int8"),
    (Case(stage=3, steps=3, width=32, options=(*NVME, ("offload.parameters", "nvme")), fused=None, **NORM), "int8"),
    (Case(stage=2, steps=3, width=32, options=NVME, fused=None, precision="bf16-mixed", accumulate=2), "int8"),
    (Case(stage=2, steps=3, width=32, options=(("precision.moments", "int8"),), fused=None), "int8"),
]


def with_options(rank: int, world_size: int, cases: list[Case]) -> list[Any]:
    quiet()
    found = []
    for case in cases:
        module = NotesOfNet(case)
        trainer_of(case, world_size).fit(module, loader(case, world_size))
        found.append(module.result)
    return found


def options(cases: list[tuple[Case, str]], folder: Path) -> None:
    runs = [each for case, form in cases for each in (placed(case, folder), rounding(placed(case, folder), form))]
    ranks = spawn(with_options, 2, runs, init_process_group=False, timeout_s=170)
    for i, case in enumerate(runs[1::2]):
        compare([rank[2 * i] for rank in ranks], [rank[2 * i + 1] for rank in ranks], f"stage {case.stage} {case}")


def test_with_uneven_shards_and_unused_parameters(tmp_path: Path) -> None:
    options(FIRST, tmp_path)


@pytest.mark.wide
def test_with_other_options(tmp_path: Path) -> None:
    options(OPTIONS, tmp_path)


# --- code that reads and changes gradients ---------------------------------------------------------------------------


class Reads(Net):
    """Hooks of the user's read ``p.grad``, which is the average at every stage, and double one of them."""

    read = 0

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy: Any = self.trainer.strategy
        averages = {name: grad.clone() for name, grad in strategy.full_gradients()}
        for name, p in self.named_parameters():
            assert p.grad is not None
            assert torch.equal(p.grad.float(), averages[name]), name
            self.read += 1
        weight: Any = self.blocks[1].up.weight
        weight.grad.mul_(2.0)


def reads(rank: int, world_size: int, cases: list[Case]) -> list[Any]:
    quiet()
    found = []
    for case in cases:
        module = Reads(case)
        trainer: Any = trainer_of(case, world_size)
        trainer.fit(module, loader(case, world_size))
        weights = {k: v.clone() for k, v in trainer.strategy.lightning_module_state_dict().items()}
        found.append((module.result.losses, weights, module.read))
    return found


@pytest.mark.wide
def test_hooks_read_and_change_what_is_averaged() -> None:
    case = rounding(Case(steps=3, fused=None, **NORM), "int4")
    runs = [case.at(stage) for stage in (1, 2, 3)]
    for found in spawn(reads, 2, runs, init_process_group=False, timeout_s=60):
        for losses, weights, read in found[1:]:
            assert losses == found[0][0]
            assert all(torch.equal(v, found[0][1][k]) for k, v in weights.items())
            assert read > 0


# --- Fabric ----------------------------------------------------------------------------------------------------------


@pytest.mark.wide
@on_ranks(2)
def test_with_fabric(rank: int, world_size: int) -> None:
    fabric_ranks.quiet()
    found = []
    for stage, more in ((3, {}), *((stage, {"quantized_gradients": "int8"}) for stage in (1, 2, 3))):
        fabric_ranks.OPTIONS["rounded"] = {"stage": stage, "sharding": {"min_unit_numel": 0, **more}}
        found.append(fabric_ranks.train(rank, world_size, "rounded", {"max_norm": 0.3, "optimizer": "sgd"}))
    exact, *rounded = found
    for ours in rounded:
        assert ours["losses"] == rounded[0]["losses"]
        assert ours["norms"] == rounded[0]["norms"]
        assert all(torch.equal(v, rounded[0]["weights"][k]) for k, v in ours["weights"].items())
    assert exact["losses"][0] == rounded[0]["losses"][0]
    assert exact["losses"][1:] != rounded[0]["losses"][1:]
    assert rounded[0]["losses"] == pytest.approx(exact["losses"], rel=5e-3)
    assert rounded[0]["norms"] == pytest.approx(exact["norms"], rel=2e-2)
