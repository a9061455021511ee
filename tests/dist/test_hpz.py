"""A second copy of parameters inside each node: the bits of a run without, and backward gathers that stay inside."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ls_strategy import ConfigError
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist.test_shard_groups import BOTH, NORM, NVME, VALUE, measure
from tests.marks import few_or_all
from tests.models import Case, Net, assert_same_bits, loader, quiet, trainer_of

FIRST = [
    Case(stage=3, steps=4, traits=("uneven", "frozen", "tied"), accumulate=2, **NORM),
    Case(stage=3, steps=4, precision="bf16-mixed", options=BOTH),
]
MORE = [
    Case(stage=3, steps=5, precision=precision, optimizer=optimizer, traits=traits, accumulate=accumulate, **clip)
    for precision in ("32-true", "bf16-mixed", "bf16-true", "16-mixed")
    for optimizer, traits, accumulate, clip in (
        ("adamw", ("uneven", "frozen"), 1, NORM),
        ("adamw", ("unused_here", "empty"), 3, VALUE),
        ("two", ("uneven", "tied"), 2, {}),
        ("sgd", ("buffers", "private"), 1, NORM),
    )
] + [
    Case(stage=3, steps=5, options=options, accumulate=accumulate, precision=precision, traits=("private",))
    for options in (BOTH, (*NVME, ("offload.parameters", "nvme")), (("sharding.prefetch_units", 0),))
    for accumulate, precision in ((1, "32-true"), (3, "bf16-mixed"))
]


def copied(case: Case, size: int) -> Case:
    return replace(case, options=(*case.options, ("sharding.hpz", size)))


def compare(world_size: int, cases: list[Case], size: int, folder: Path | None = None) -> None:
    assert_same_bits(world_size, [(case, copied(case, size)) for case in cases], folder)


@pytest.mark.wide
def test_the_bits_are_those_without_a_copy() -> None:
    compare(4, FIRST, 2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world_size", "size"), [(4, 2), (6, 3)])
def test_every_case_has_the_bits_without_a_copy(world_size: int, size: int, tmp_path: Path) -> None:
    compare(world_size, FIRST + MORE, size, tmp_path)


def test_backward_sends_no_parameters_between_nodes() -> None:
    """Two nodes of two ranks. Root units and the last block are gathered once, the other blocks twice: with the copy,
    the second time only inside the node, where each rank sends its half to the other one."""
    case = Case(stage=3, steps=3, width=32, precision="bf16-true")
    runs = [case, copied(case, 2)]
    for plain, ours in spawn(measure, 4, runs, init_process_group=False, timeout_s=120):
        assert sum(ours["elements"].values()) == ours["planned"]
        assert sum(plain["elements"].values()) == plain["planned"]
        for each in (plain, ours):
            assert sum(each["bytes"].values()) == each["traffic"].sent
            assert sum(each["bytes_between_nodes"].values()) == each["traffic"].between_nodes
        p, again = plain["numel"], plain["again"]
        assert 0 < again < p
        assert plain["bytes_between_nodes"]["all_gather"] == (p + again) // 2 * 2
        assert ours["bytes_between_nodes"]["all_gather"] == p // 2 * 2
        assert ours["bytes"]["all_gather"] == (3 * p // 4 + again // 2) * 2
        for kind in ("bytes", "bytes_between_nodes"):
            assert ours[kind]["reduce_scatter"] == plain[kind]["reduce_scatter"]
        assert ours["copy_bytes"] == again + ours["last"]  # two ranks, bf16


# --- writes ----------------------------------------------------------------------------------------------------------


class Writes(Net):
    """Writes to weights in every way, between their gathers in forward and in backward, too."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.blocks[1].norm.register_forward_pre_hook(self.inside)

    def inside(self, module: torch.nn.Module, _: Any) -> None:
        """Read gathered weights on one rank, and write to them on all."""
        weight: Any = module.weight
        if self.global_rank == 0:
            self.largest = weight.data.max().item()
        if self.training and self.global_step == 3:
            weight.data.mul_(1.5)

    def forward(self, x_BT: Tensor, batch_idx: int) -> Tensor:
        out = super().forward(x_BT, batch_idx)
        if self.training:
            self.blocks[0].up.weight.data.mul_(0.99)
            if batch_idx % 2:
                self.blocks[1].up.weight.data.clamp_(-0.3, 0.3)
        return out

    def on_train_batch_end(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.trainer.global_step == 2:
            state = {k: v.clone() * 1.01 for k, v in self.blocks[0].state_dict().items()}
            self.blocks[0].load_state_dict(state)
        with torch.no_grad():  # a forward outside of a step
            h = self.emb.weight[:4].clone()
            for block in self.blocks:
                h = block(h)
            self.result.losses.append(h.sum().item())


def write(rank: int, world_size: int, precisions: tuple[str, ...]) -> list[tuple[list[float], dict[str, Tensor]]]:
    quiet()
    found = []
    gather = ("precision.gather", "fp32")  # in 16 bits, a write between a forward and its backward is an error
    for precision in precisions:
        case = Case(stage=3, steps=5, accumulate=2, precision=precision, options=(gather,))
        for each in (case, copied(case, 2)):
            module = Writes(each)
            trainer: Any = trainer_of(each, world_size)
            trainer.fit(module, loader(each, world_size))
            weights = {k: v.clone() for k, v in trainer.strategy.lightning_module_state_dict().items()}
            found.append((module.result.losses, weights))
    return found


@pytest.mark.wide
@pytest.mark.parametrize("precisions", few_or_all(("bf16-mixed",), ("32-true", "bf16-mixed")))
def test_what_user_code_writes_reaches_the_copy(precisions: tuple[str, ...]) -> None:
    for results in spawn(write, 4, precisions, init_process_group=False, timeout_s=120):
        for (losses, weights), (ours, our_weights) in zip(results[::2], results[1::2], strict=True):
            assert len(losses) == 20
            assert losses == ours
            assert all(torch.equal(v, our_weights[k]) for k, v in weights.items())


# --- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"stage": 2, "sharding": {"hpz": 2}}, "only stage 3 gathers parameters in backward"),
        ({"sharding": {"hpz": 2, "shard_size": 2}}, "no gather leaves the group anyway"),
        ({"sharding": {"hpz": 1}}, "must be"),
        ({"sharding": {"hpz": "host"}}, "must be"),
        ({"sharding": {"hpz": 2, "rank_weights": [1, 2]}}, "cut the states in the same way"),
        ({"sharding": {"shard_size": 2}, "parallel": {"expert": 2}}, "Leave one of them out"),
    ],
)
def test_contradictions(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ZeROStrategy(**options)
