"""Sampling: tokens come as often as their probability says, from one number per row and step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ls_strategy.errors import ConfigError
from ls_strategy.extras.inference.sampling import SamplingConfig, Uniforms, row_seed, sample

GREEDY = SamplingConfig(temperature=0)


def by_hand(logits: Tensor, config: SamplingConfig) -> Tensor:
    """Probabilities ``(V,)`` that the options describe, token by token."""
    likely = sorted(range(len(logits)), key=lambda i: -float(logits[i]))[: config.top_k]
    weights = {i: math.exp(float(logits[i]) / config.temperature) for i in likely}
    total = sum(weights.values())
    kept: dict[int, float] = {}
    for i in likely:
        if config.top_p is None or sum(kept.values()) < config.top_p * total:
            kept[i] = weights[i]
    return torch.tensor([kept.get(i, 0.0) / sum(kept.values()) for i in range(len(logits))])


@pytest.mark.parametrize(
    "options",
    [
        {}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.6}, {"top_p": 1.0}, {"top_k": 4, "top_p": 0.8},
        {"top_k": 100, "temperature": 2.0}, {"top_p": 0.01},
    ],
    ids=str,
)  # fmt: skip
def test_tokens_come_as_often_as_their_probability_says(options: dict[str, Any]) -> None:
    config, count = SamplingConfig(**options), 40_000
    logits = torch.tensor([0.5, -1.0, 2.0, 1.5, 0.0, -3.0, 1.0])
    found = sample(logits.expand(count, 7), config, Uniforms([torch.Generator().manual_seed(0)], count))
    expected = by_hand(logits, config)
    shares = torch.bincount(found, minlength=7) / count
    assert (shares[expected == 0] == 0).all()
    deviation = (expected * (1 - expected) / count).sqrt()
    assert ((shares - expected).abs() <= 4.5 * deviation).all()


def test_the_most_likely_token_needs_no_numbers() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    for config in (GREEDY, SamplingConfig(top_k=1)):
        assert sample(logits, config, None).tolist() == [1, 0]
    with pytest.raises(ConfigError, match="seed"):
        sample(logits, SamplingConfig(), None)


@pytest.mark.parametrize(
    "options", [{"temperature": -1}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}, {"temperature": math.inf}]
)
def test_options_without_a_meaning_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        SamplingConfig(**options)


def test_the_first_row_of_a_batch_draws_like_a_single_row() -> None:
    together, alone = Uniforms.of_seed(7, 3), Uniforms.of_seed(7, 1)
    assert [together.draw()[0].item() for _ in range(3)] == [alone.draw()[0].item() for _ in range(3)]


def test_rows_of_one_seed_draw_different_numbers() -> None:
    assert len(set(Uniforms.of_seed(7, 5).draw().tolist())) == 5


def test_seeds_of_rows_are_distinct_and_fit_a_generator() -> None:
    seeds = [row_seed(1, row) for row in range(100)]
    assert seeds[0] == 1
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_wrong_number_of_generators_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 random generators for 3 rows"):
        Uniforms([torch.Generator(), torch.Generator()], 3)
