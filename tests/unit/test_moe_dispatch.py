"""The order of rows between ranks and experts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ls_strategy.moe.dispatch import by_expert, even_sizes

RECEIVED = [[2, 0, 1], [1, 3, 0]]  # two ranks, three experts
OWNERS = [0, 0, 2, 0, 1, 1, 1]  # expert of each row, as the rows arrive


def rows() -> torch.Tensor:
    return torch.arange(14.0).view(7, 2).requires_grad_()


def test_rows_are_ordered_by_expert_and_stay_in_order_within() -> None:
    ordered, _ = by_expert(rows(), RECEIVED)
    order = sorted(range(7), key=lambda i: OWNERS[i])
    assert torch.equal(ordered, rows()[order])


def test_the_returned_function_restores_the_order() -> None:
    x = rows()
    ordered, by_rank = by_expert(x, RECEIVED)
    assert torch.equal(by_rank(ordered), x)


def test_gradients_of_rows_are_not_scaled() -> None:
    x, weight = rows(), torch.arange(14.0).view(7, 2)
    ordered, by_rank = by_expert(x, RECEIVED, 0.25)
    (by_rank(ordered) * weight).sum().backward()
    assert torch.equal(x.grad, weight)


def test_gradients_of_experts_are_scaled() -> None:
    expert = torch.tensor(1.0, requires_grad=True)
    ordered, by_rank = by_expert(rows(), RECEIVED, 0.25)
    by_rank(ordered * expert).sum().backward()
    assert expert.grad == pytest.approx(0.25 * rows().sum().item())


def test_no_rows() -> None:
    ordered, by_rank = by_expert(torch.empty(0, 2), [[0, 0], [0, 0]])
    assert by_rank(ordered).shape == (0, 2)


@given(tokens=st.integers(0, 1000), ranks=st.integers(1, 64))
def test_sizes_are_even_and_add_up(tokens: int, ranks: int) -> None:
    sizes = even_sizes(tokens, ranks)
    assert sum(sizes) == tokens
    assert len(sizes) == ranks
    assert max(sizes) - min(sizes) <= 1
