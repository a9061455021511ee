"""Who owns which tensor: balanced by cost, the same everywhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ls_strategy
from ls_strategy.layout import FlatLayout
from ls_strategy.zero.step.owner.full_tensors import balanced
from ls_strategy.zero.step.owner.owner_updater import tensor_cost
from recipes.gpt.network import GPT, GPTConfig


@given(st.lists(st.floats(0, 1e12), max_size=40), st.integers(1, 9))
def test_the_busiest_rank_has_at_most_the_mean_and_the_largest_cost(costs: list[float], ranks: int) -> None:
    owners = balanced(costs, ranks)
    totals = [sum(c for c, o in zip(costs, owners, strict=True) if o == r) for r in range(ranks)]
    assert all(0 <= owner < ranks for owner in owners)
    assert max(totals) <= sum(costs) / ranks + max(costs, default=0.0) + 1e-3


@pytest.mark.parametrize(("layers", "width", "heads", "ranks"), [(4, 128, 4, 2), (4, 128, 4, 4), (12, 768, 12, 8)])
def test_the_busiest_rank_of_the_gpt_recipe(layers: int, width: int, heads: int, ranks: int) -> None:
    """By Newton-Schulz FLOPs: at most 1.15 of the mean."""
    with torch.device("meta"):
        network = GPT(GPTConfig(num_layers=layers, num_heads=heads, width=width, vocab_size=256))
    shapes = [tuple(p.shape) for n, p in network.named_parameters() if p.dim() == 2 and "blocks" in n]
    assert len(shapes) >= 4 * layers
    optimizer = ls_strategy.Muon([torch.nn.Parameter(torch.ones(2, 2))])
    costs = [tensor_cost(optimizer, optimizer.param_groups[0], shape) for shape in shapes]
    owners = balanced(costs, ranks)
    totals = [sum(c for c, o in zip(costs, owners, strict=True) if o == r) for r in range(ranks)]
    assert max(totals) <= 1.15 * sum(totals) / ranks


def test_costs_are_multiplications_of_the_iteration_or_elements() -> None:
    matrix = torch.nn.Parameter(torch.ones(4, 2))
    torchs, ours = torch.optim.Muon([matrix]), ls_strategy.Muon([matrix])
    shape = (300, 200)
    assert tensor_cost(torchs, torchs.param_groups[0], shape) == tensor_cost(ours, ours.param_groups[0], shape)
    lamb = ls_strategy.Lamb([matrix])
    assert tensor_cost(lamb, lamb.param_groups[0], shape) == FlatLayout.pack([("a", shape)], 1).param_numel
