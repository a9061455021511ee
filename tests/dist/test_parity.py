"""Training is what Lightning's DDP makes of the same model and data; and all stages make the same of it.

The trusted run of every parity test is ``Trainer(strategy="ddp")`` (with the search for unused parameters where some
are unused) on the same number of ranks, the same data, the same fused optimizer kernels.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ls_strategy.testing import spawn
from tests.marks import covering, wide
from tests.models import Case, Result, buffer_difference, loss_difference, run_all, same_bits, weight_difference

STAGES = (0, 1, 2, 3)
BOUND = 1e-6  # equal up to the order of sums

# Gradient norms of these models are 0.1 to 1, their largest elements 0.02 to 0.1: `check_parity` sees that clips bite.
NORM = {"clip": "norm", "clip_at": 0.05}
VALUE = {"clip": "value", "clip_at": 0.01}

# Every value of accumulation, clip, optimizer and trait, each crossed with several values of the others.
ROWS = {
    "a": Case(optimizer="adamw", traits=("tied",)),
    "b": Case(optimizer="adamw", traits=("uneven", "frozen"), accumulate=3, **NORM),
    "c": Case(optimizer="sgd", traits=("frozen", "empty"), **NORM),
    "d": Case(optimizer="sgd", traits=("unused", "buffers"), accumulate=3, **VALUE),
    "e": Case(optimizer="adamw", traits=("unused_here", "uneven"), **VALUE),
    "f": Case(optimizer="two", traits=("frozen", "empty")),
    "g": Case(optimizer="two", traits=("uneven", "unused", "tied"), accumulate=3, **NORM),
    "h": Case(optimizer="sgd", traits=("unused_here", "frozen"), accumulate=3),
    "i": Case(optimizer="adamw", traits=("empty", "tied"), accumulate=3),
    # Every value once.
    "x": Case(optimizer="adamw", traits=("tied", "uneven", "buffers"), steps=10, **NORM),
    "y": Case(optimizer="sgd", traits=("unused", "frozen", "empty"), accumulate=3, steps=5, **VALUE),
    "z": Case(optimizer="two", traits=("unused_here",), accumulate=3, steps=5),
}

Rows = tuple[tuple[str, tuple[int, ...]], ...]
"""Rows, each with stages."""

FEW: Rows = (("x", STAGES), ("y", (1, 3)), ("z", (0, 2)))
COVERING: list[tuple[int, Rows, Any]] = [
    (2, FEW, ()),
    *(
        (world_size, tuple((row, STAGES) for row in rows), mark)
        for world_size, rows, mark in (
            (1, "abcdefghi", pytest.mark.wide),
            (2, "abcdefghi", pytest.mark.wide),
            (3, "beg", pytest.mark.slow),
            (4, "dfi", pytest.mark.slow),
        )
    ),
]
"""World size, rows that one start of the ranks trains, and their mark."""

PARAMETERS = [
    pytest.param(world_size, rows, row, id=f"{world_size}-{ROWS[row]}", marks=mark)
    for world_size, rows, mark in COVERING
    for row, _ in rows
]
WITH_STAGES = [
    pytest.param(world_size, rows, row, stage, id=f"{world_size}-{ROWS[row]}-{stage}", marks=mark)
    for world_size, rows, mark in COVERING
    for row, stages in rows
    for stage in stages
]
TIMEOUT_S = 170

Group = tuple[Result, ...]
"""One case's result of every rank."""


@functools.cache
def results(world_size: int, rows: Rows) -> dict[tuple[str, int | None], Group]:
    """``(row, stage) -> result of every rank``; every row on its stages and on DDP, in one start of the ranks."""
    keys = [(row, stage) for row, stages in rows for stage in (None, *stages)]
    cases = [ROWS[row].at(stage) for row, stage in keys]
    ranks = spawn(run_all, world_size, cases, init_process_group=False, timeout_s=TIMEOUT_S)
    return dict(zip(keys, zip(*ranks, strict=True), strict=True))


def check_parity(case: Case, trusted: Group, ours: Group) -> None:
    assert len(ours[0].losses) == case.steps * case.accumulate >= 10
    assert loss_difference(list(trusted), list(ours)) <= BOUND
    assert weight_difference(trusted[0], ours[0]) <= BOUND
    for here, there in zip(trusted, ours, strict=True):
        assert buffer_difference(here, there) <= BOUND
    for a, b in zip(trusted[0].norms, ours[0].norms, strict=True):
        assert abs(a - b) <= BOUND * a
    if case.clip == "norm":
        assert min(trusted[0].norms) > case.clip_at
    if case.clip == "value":
        assert min(trusted[0].largest) > case.clip_at


@pytest.mark.parametrize(("world_size", "rows", "row", "stage"), WITH_STAGES)
def test_training_is_ddp_up_to_the_order_of_sums(world_size: int, rows: Rows, row: str, stage: int) -> None:
    """Losses and buffers of all ranks, weights and gradient norms; trusted run: DDP.

    Weights are those of rank 0, and `run` has compared what every other rank has with them.
    """
    group = results(world_size, rows)
    check_parity(ROWS[row], group[row, None], group[row, stage])


@pytest.mark.parametrize(("world_size", "rows", "row"), PARAMETERS)
def test_stages_are_equal_bit_for_bit(world_size: int, rows: Rows, row: str) -> None:
    """All four without accumulation (and on one rank, which has nothing to shard); with it, 0 and 1, and 2 and 3.

    Stages 0 and 1 add micro-batches on each rank and average once; stages 2 and 3 average every micro-batch and add
    averages. The same numbers are added in another order, so between the pairs only the bound can hold.
    """
    group = results(world_size, rows)
    found = {stage: group[row, stage] for stage in dict(rows)[row]}
    by_micro_batch = ROWS[row].accumulate > 1 and world_size > 1
    for (before, first), (stage, second) in itertools.pairwise(found.items()):
        if by_micro_batch and before < 2 <= stage:
            assert loss_difference(list(first), list(second)) <= BOUND
            assert weight_difference(first[0], second[0]) <= BOUND
        else:
            assert all(map(same_bits, first, second))


AXES: dict[str, Sequence[Any]] = {
    "optimizer": ("adamw", "sgd", "two"),
    "traits": ((), ("frozen",), ("tied",), ("unused",), ("unused_here",), ("uneven",), ("empty",), ("buffers",)),
    "accumulate": (1, 3),
    "clip": ({}, NORM, VALUE),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("optimizer", AXES["optimizer"])
@pytest.mark.parametrize(("world_size", "together"), [(2, 3), (3, 2)])
def test_every_three_settings(world_size: int, together: int, optimizer: str) -> None:
    """Every stage with every three values of these axes, on three ranks with every two; trusted run: DDP."""
    rows = [
        Case(optimizer=optimizer, traits=row["traits"], accumulate=row["accumulate"], **row["clip"])
        for row in covering(AXES, together)
        if row["optimizer"] == optimizer
    ]
    failed: list[str] = []
    for begin in range(0, len(rows), 6):
        few = rows[begin : begin + 6]
        cases = [row.at(stage) for row in few for stage in (None, *STAGES)]
        ranks = spawn(run_all, world_size, cases, init_process_group=False, timeout_s=300)
        groups = iter(zip(*ranks, strict=True))
        for row in few:
            trusted = next(groups)
            for stage in STAGES:
                try:
                    check_parity(row, trusted, next(groups))
                except AssertionError as error:
                    failed.append(f"stage {stage} {row}: {error}")
    assert not failed, "\n".join(failed)


# --- 16 bit ----------------------------------------------------------------------------------------------------------

# DDP's 16-true has no masters and no loss scale: Adam's second moments vanish in fp16, so there SGD is compared.
LOW = {
    "bf16-true": Case(precision="bf16-true", optimizer="adamw", steps=30),
    "bf16-mixed": Case(precision="bf16-mixed", optimizer="adamw", steps=30),
    "16-mixed": Case(precision="16-mixed", optimizer="adamw", steps=30),
    "16-true": Case(precision="16-true", optimizer="sgd", steps=30),
}


# `test_parity_precision` has all of them in the default run, with other settings.
CHOICES = [("bf16-true", (1, 3)), *(wide(precision, STAGES) for precision in LOW)]
CHOICES_WITH_STAGES = [
    *(("bf16-true", (1, 3), stage) for stage in (1, 3)),
    *(wide(precision, STAGES, stage) for precision in LOW for stage in STAGES),
]


@functools.cache
def low_results(precision: str, stages: tuple[int, ...]) -> dict[int | str | None, Group]:
    """``stage -> results`` on 2 ranks; stage "fp32" is DDP in fp32."""
    case = LOW[precision]
    keys: list[int | str | None] = ["fp32", None, *stages]
    cases = [replace(case, precision="32-true"), case, *(case.at(s) for s in stages)]
    ranks = spawn(run_all, 2, cases, init_process_group=False, timeout_s=TIMEOUT_S)
    return dict(zip(keys, zip(*ranks, strict=True), strict=True))


def error_of(reference: Group, other: Group) -> tuple[float, float]:
    """Mean absolute difference of losses over ranks and steps; root of the summed squares of weight differences."""
    pairs = [zip(r.losses, o.losses, strict=True) for r, o in zip(reference, other, strict=True)]
    losses = [abs(a - b) for pair in pairs for a, b in pair]
    squares = [(v.double() - other[0].weights[k].double()).square().sum() for k, v in reference[0].weights.items()]
    return sum(losses) / len(losses), float(sum(squares)) ** 0.5


@pytest.mark.parametrize(("precision", "stages", "stage"), CHOICES_WITH_STAGES)
def test_16_bit_error_is_at_most_twice_ddps(precision: str, stages: tuple[int, ...], stage: int) -> None:
    """Reference: DDP in fp32. Trusted run: DDP in the same precision; for fp16 with Lightning's own plugins."""
    group = low_results(precision, stages)
    loss, weight = error_of(group["fp32"], group[stage])
    ddp_loss, ddp_weight = error_of(group["fp32"], group[None])
    assert 0 < loss <= 2 * ddp_loss
    assert 0 < weight <= 2 * ddp_weight


@pytest.mark.parametrize(("precision", "stages"), CHOICES)
def test_stages_are_equal_bit_for_bit_in_16_bit(precision: str, stages: tuple[int, ...]) -> None:
    group = low_results(precision, stages)
    zero, *others = [group[s] for s in stages]
    for other in others:
        assert all(map(same_bits, zero, other))
