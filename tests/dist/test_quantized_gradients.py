"""Gradients that are sent in few bits: the averages of terms rounded by hand, on every stage and tier alike."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ls_strategy import ConfigError, StateError
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from ls_strategy.zero.flat.parameters import grad_of
from tests.dist.ranks import on_ranks
from tests.dist.test_quantized_reduce import by_hand
from tests.dist.test_shard_groups import BOTH, NORM, NVME, VALUE, measure, on_nodes
from tests.models import Case, Net, assert_same_bits, loader, quiet, trainer_of


def rounding(case: Case, form: str, *more: tuple[str, Any]) -> Case:
    return replace(case, options=(*case.options, ("sharding.quantized_gradients", form), *more))


# --- by hand ---------------------------------------------------------------------------------------------------------


class Checks(Net):
    """Stage 1, where ``p.grad`` is a rank's own gradient: compares the averages with those computed from it by hand."""

    group, checked = 0, 0

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy: Any = self.trainer.strategy
        engine = strategy.require_engine()
        form = strategy.config.sharding.quantized_gradients
        averages = dict(strategy.full_gradients())
        names = {id(p): n for n, p in self.named_parameters()}
        for flat in engine.flats:
            own = torch.zeros(flat.layout.numel)
            for p, slot in zip(flat.params, flat.layout.slots, strict=True):
                if (grad := grad_of(p)) is not None:
                    own[slot.offset : slot.end] = grad.flatten().float()
            terms: list[Any] = [None] * self.trainer.world_size
            dist.all_gather_object(terms, own)
            shards = by_hand(terms, form, node=2 if len(terms) > 2 else 0, group=self.group or len(terms))
            expected = torch.cat(shards[: self.group or len(terms)])
            for p, slot in zip(flat.params, flat.layout.slots, strict=True):
                name = names[id(p)]
                if name in averages:
                    assert torch.equal(expected[slot.offset : slot.end], averages[name].flatten().float()), name
                    self.checked += 1
        if hasattr(self, "scale"):
            assert self.scale.grad.shape == ()  # type: ignore[union-attr]
        error = strategy.gradient_error()
        assert 0.0 < error < (0.02 if form == "int8" else 0.3)
        assert strategy.gradient_error() == 0.0  # nothing since


def check(rank: int, world_size: int, cases: list[Case]) -> list[int]:
    quiet()
    found = []
    if world_size > 2:
        on_nodes(rank, 2)
    for case in cases:
        module = Checks(case)
        module.group = dict(case.options).get("sharding.shard_size", 0)
        trainer: Any = trainer_of(case, 2, num_nodes=world_size // 2)
        trainer.fit(module, loader(case, world_size))
        assert trainer.global_step == case.steps
        found.append(module.checked)
    return found


def test_averages_are_those_of_terms_rounded_by_hand() -> None:
    cases = [
        rounding(Case(stage=1, steps=2, traits=("uneven", "tied"), accumulate=2), "int4"),
        rounding(Case(stage=1, steps=2, traits=("unused_here", "empty"), precision="bf16-true"), "int8"),
    ]
    for checked in spawn(check, 2, cases, init_process_group=False, timeout_s=60):
        assert min(checked) > 30


@pytest.mark.wide
def test_averages_on_two_nodes() -> None:
    case = Case(stage=1, steps=2, traits=("frozen",))
    cases = [rounding(case, "int8"), rounding(case, "int4", ("sharding.shard_size", 2))]
    for checked in spawn(check, 4, cases, init_process_group=False, timeout_s=120):
        assert min(checked) > 20


# --- everywhere the same ---------------------------------------------------------------------------------------------


def alike(case: Case, form: str, *options: tuple[tuple[str, Any], ...]) -> list[Case]:
    """Return runs that must have the same bits: stages, as far as they send equally often, and options."""
    # Our own kernel, on every tier; and everything gathered in fp32, since buffers that are gathered in 16 bits have
    # other parameters in a block that is rounded together.
    case = replace(case, fused=None, options=(*case.options, ("precision.gather", "fp32")))
    stages = (1, 2, 3) if case.accumulate == 1 else (2, 3)
    runs = [rounding(case.at(stage), form) for stage in stages]
    return runs + [rounding(case.at(3), form, *more) for more in options]


FIRST = [alike(Case(steps=4, traits=("uneven", "frozen", "tied"), **NORM), "int8", BOTH)]
MORE = [
    alike(
        Case(steps=5, precision=precision, optimizer=optimizer, traits=traits, accumulate=accumulate, **clip),
        form, BOTH, NVME, (("sharding.prefetch_units", 0),), (("sharding.overlap_step", False),),
    )
    for precision in ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "32-scaled")
    for optimizer, traits, accumulate, clip, form in (
        ("adamw", ("unused_here", "empty"), 3, VALUE, "int8"),
        ("two", ("uneven", "tied"), 2, {}, "int4"),
        ("sgd", ("buffers", "private"), 1, NORM, "int4"),
    )
]  # fmt: skip
ON_FOUR = [
    alike(Case(steps=4, traits=("uneven", "tied"), **NORM), "int4", (("sharding.hpz", 2),)),
    [
        rounding(
            Case(stage=stage, steps=4, precision="bf16-mixed", options=(("precision.gather", "fp32"),)),
            "int8",
            ("sharding.shard_size", 2),
        )
        for stage in (1, 2, 3)
    ],
]


def test_the_bits_are_those_of_every_stage() -> None:
    assert_same_bits(2, FIRST)


@pytest.mark.wide
def test_the_bits_on_four_ranks() -> None:
    assert_same_bits(4, ON_FOUR)


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_every_case_has_the_same_bits(tmp_path: Path) -> None:
    assert_same_bits(2, MORE, tmp_path, timeout_s=900)


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.wide
def test_bytes_between_nodes_are_a_quarter_at_most() -> None:
    """Two nodes of two ranks. Without, a rank sends half of the gradients to the other node; with, a shard, in int8 of
    1.03 bytes per element or int4 of 0.53. All that it sends are the shards of the other ranks, in both."""
    case = Case(stage=3, steps=3, width=32)
    half = replace(case, stage=2, precision="bf16-true")
    groups = ("sharding.shard_size", "node")
    runs = [
        case, rounding(case, "int8"), rounding(case, "int4", ("sharding.hpz", 2)),
        half, rounding(half, "int4"), rounding(half, "int8", groups),
    ]  # fmt: skip
    for found in spawn(measure, 4, runs, init_process_group=False, timeout_s=120):
        for each in found:
            assert sum(each["elements"].values()) == each["planned"]
            assert sum(each["bytes"].values()) == each["traffic"].sent
            assert sum(each["bytes_between_nodes"].values()) == each["traffic"].between_nodes
        for flat, ours, tile in ((found[0], found[1], 528), (found[0], found[2], 272), (found[3], found[4], 272)):
            p = ours["numel"]
            assert p % 2048 == 0
            assert ours["bytes"]["reduce_scatter"] == p * 3 // 4 // 512 * tile
            assert ours["bytes_between_nodes"]["reduce_scatter"] == p // 4 // 512 * tile
            itemsize = 4 if flat is found[0] else 2
            assert flat["bytes_between_nodes"]["reduce_scatter"] == flat["numel"] // 2 * itemsize
            assert ours["bytes_between_nodes"]["reduce_scatter"] * 4 <= p // 2 * itemsize
        p = found[5]["numel"]
        assert found[5]["bytes"]["reduce_scatter"] == p // 2 // 512 * 528
        assert found[5]["bytes_between_nodes"] == {"all_reduce": p // 2 // 512 * 528}


# --- overflow --------------------------------------------------------------------------------------------------------


class Overflows(Net):
    """One element of one gradient of the last rank is not finite in the second step."""

    value = float("inf")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and self.global_rank == self.trainer.world_size - 1:
            block: Any = self.blocks[1]
            weight = block.up.weight
            weight.register_hook(
                lambda grad: grad.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(self.value).to(grad))
            )
        return loss


def overflow(rank: int, world_size: int) -> list[tuple[int, list[float], bool]]:
    quiet()
    found = []
    for stage, form in ((1, "int8"), (2, "int4"), (3, "int8")):
        for value in (float("inf"), float("nan")):
            case = rounding(Case(stage=stage, steps=4, precision="16-mixed"), form)
            module = Overflows(case)
            module.value = value
            trainer: Any = trainer_of(case, world_size)
            trainer.fit(module, loader(case, world_size))
            weights = trainer.strategy.lightning_module_state_dict().values()
            found.append(
                (trainer.strategy.skipped_steps, module.result.losses, all(w.isfinite().all() for w in weights))
            )
    return found


@pytest.mark.wide
def test_an_overflow_skips_the_step_on_all_ranks() -> None:
    for results in spawn(overflow, 2, init_process_group=False, timeout_s=60):
        for skipped, losses, finite in results:
            assert skipped >= 1
            assert finite
            assert all(map(math.isfinite, losses))


# --- checkpoints and options -----------------------------------------------------------------------------------------


def resume(rank: int, world_size: int, folder: Path) -> list[bool]:
    quiet()
    found = []
    for stage in (1, 3):
        case = rounding(Case(stage=stage, steps=6), "int4")
        full: Any = Net(case)
        path = str(folder / str(stage))
        trainer: Any = trainer_of(case, world_size)
        full.on_train_batch_end = lambda *_, t=trainer, path=path: t.global_step == 3 and t.save_checkpoint(path)
        trainer.fit(full, loader(case, world_size))
        resumed = Net(case)
        trainer_of(case, world_size).fit(resumed, loader(case, world_size), ckpt_path=path)
        assert len(resumed.result.losses) == 3
        found.append(full.result.losses[-3:] == resumed.result.losses)
    return found


@pytest.mark.wide
def test_a_run_continues_with_the_same_bits(tmp_path: Path) -> None:
    assert all(all(found) for found in spawn(resume, 2, tmp_path, init_process_group=False, timeout_s=100))


@on_ranks(1)
def test_without_rounding_there_is_no_error_to_measure(rank: int, world_size: int) -> None:
    case = Case(stage=2, steps=1)
    trainer: Any = trainer_of(case, world_size)
    trainer.fit(Net(case), loader(case, world_size))
    with pytest.raises(StateError, match="nothing is rounded"):
        trainer.strategy.gradient_error()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"stage": 0, "sharding": {"quantized_gradients": "int8"}}, "Set stage=1"),
        ({"sharding": {"quantized_gradients": "nf4"}}, "must be"),
        ({"sharding": {"quantized_gradients": 8}}, "must be"),
        ({"sharding": {"quantized_gradients": "int8"}, "parallel": {"virtual_ranks": 4}}, "Leave one of them out"),
    ],
)
def test_contradictions(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ZeROStrategy(**options)
