"""Who was wrong, from digests alone."""

from __future__ import annotations

import random

import pytest
import torch

from ls_strategy.extras.callbacks.corruption_digest import bits_of
from ls_strategy.extras.callbacks.corruption_verdict import Repetition, elect, elect_replica, judge

A, B, C = 0, 1, 2


@pytest.mark.parametrize(
    ("votes", "right", "others"),
    [
        ([(A, 1), (A, 1)], 1, set()),
        ([(A, 1), (A, 2)], None, {A}),
        ([(A, 1), (A, 2), (A, 2)], 2, {A}),
        ([(A, 1), (A, 2), (A, 3)], None, {A}),
        ([(A, 1), (B, 2)], None, {A, B}),
        ([(A, 1), (B, 2), (C, 1)], 1, {B}),
        ([(A, 1), (B, 2), (A, 2)], 2, {A}),
        ([(A, 1), (B, 2), (A, 1)], None, {A, B}),
        ([(A, 1), (B, 2), (A, 1), (B, 1)], 1, {B}),
        ([(A, 1), (B, 2), (A, 1), (B, 2)], None, {A, B}),
        ([(A, 1), (B, 2), (A, 3), (B, 2)], 2, {A}),
    ],
)
def test_one_voice_against_two_is_wrong(votes: list[tuple[int, int]], right: int | None, others: set[int]) -> None:
    assert elect(votes) == (right, others)


def test_a_wrong_average_is_not_blamed_on_those_who_received_it() -> None:
    def run(average: int) -> Repetition:
        return Repetition({A: A, B: B}, {A: [1], B: [2]}, {A: [average], B: [5]}, {A: [average], B: [average]})

    verdict = judge([run(9), run(4), run(4)])
    assert (verdict.wrong, verdict.right) == ({A: {0}}, {1, 2})


def test_two_replicas_need_a_third_voice() -> None:
    assert elect_replica({A: 1, B: 2}) == (None, {A, B})
    assert elect_replica({A: 1, B: 2}, [1]) == (1, {B})
    assert elect_replica({A: 1, B: 2, C: 1}) == (1, {B})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_every_bit_of_every_element_is_in_the_digest(dtype: torch.dtype) -> None:
    rng = random.Random(1)
    for _ in range(50):
        full = torch.zeros(40, dtype=dtype)
        start = rng.randrange(20)
        part = full[start : start + rng.randrange(1, 20)]
        before = bits_of(part)
        raw = full.view(torch.uint8)
        raw[start * full.element_size() + rng.randrange(part.nbytes)] ^= 1 << rng.randrange(
            1 if dtype == torch.bool else 8
        )
        assert bits_of(part) != before
