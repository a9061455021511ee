"""Which arguments of a block have a token dimension, and their slices."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ls_strategy.errors import PlanError
from ls_strategy.parallel.context.tokens import crop, hidden_states, map_tensors, narrow, token_dim

TOKENS = 6
HIDDEN = torch.arange(24.0).view(2, TOKENS, 2)


@pytest.mark.parametrize(
    ("shape", "dtype", "dim"),
    [
        ((TOKENS, 4), torch.float, 0),
        ((1, TOKENS, 4), torch.complex64, 1),
        ((2, 4, TOKENS, 3), torch.float, 2),
        ((2, TOKENS, 4, 3), torch.float, 1),
        ((TOKENS,), torch.long, 0),
        ((2, TOKENS), torch.long, 1),
        ((2, 1, TOKENS, TOKENS), torch.float, None),
        ((2, 1, 1, TOKENS), torch.float, None),
        ((2, TOKENS), torch.bool, None),
        ((TOKENS,), torch.float, None),
        ((2, 4), torch.long, None),
        ((), torch.long, None),
    ],
    ids=str,
)
def test_token_dimensions(shape: tuple[int, ...], dtype: torch.dtype, dim: int | None) -> None:
    assert token_dim(torch.zeros(shape, dtype=dtype), TOKENS) == dim


def test_hidden_states_are_the_first_floating_tensor_of_three_dimensions() -> None:
    call = (torch.zeros(2, 3), torch.zeros(1, 1, 1, dtype=torch.long)), {"mask": None, "x": HIDDEN}
    assert hidden_states(*call) is HIDDEN


def test_a_call_without_hidden_states_is_refused() -> None:
    with pytest.raises(PlanError, match=r"without a floating tensor \(batch, tokens, width\)"):
        hidden_states((torch.zeros(2, 3),), {})


def test_tokens_are_sliced_also_in_tuples() -> None:
    positions = torch.arange(TOKENS)
    args, kwargs = narrow(((HIDDEN,), {"rotary": (positions, 3)}), TOKENS, 2, 3)
    assert torch.equal(args[0], HIDDEN[:, 2:5])
    assert kwargs["rotary"][0].tolist() == [2, 3, 4]
    assert kwargs["rotary"][1] == 3


def test_slices_do_not_keep_the_full_tensor() -> None:
    (local,), _ = narrow(((HIDDEN,), {}), TOKENS, 0, 3)
    assert local.untyped_storage().nbytes() == local.numel() * 4


def test_masks_keep_all_tokens() -> None:
    mask = torch.ones(2, 1, TOKENS, TOKENS)
    _, kwargs = narrow(((HIDDEN,), {"mask": mask}), TOKENS, 0, 3)
    assert kwargs["mask"] is mask


def test_hidden_states_that_are_sharded_already_stay() -> None:
    sharded, positions = HIDDEN[:, :3], torch.arange(TOKENS)
    args, _ = narrow(((sharded, positions), {}), TOKENS, 0, 3)
    assert args[0] is sharded
    assert args[1].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("shape", "cropped"),
    [((2, 1, TOKENS, TOKENS), (2, 1, 4, 4)), ((2, 1, 1, TOKENS), (2, 1, 1, 4)), ((2, 3, 5, 7), (2, 3, 5, 7))],
)
def test_masks_are_cropped(shape: tuple[int, ...], cropped: tuple[int, ...]) -> None:
    args, kwargs = crop(((HIDDEN,), {"mask": torch.ones(shape)}), TOKENS, 4)
    assert torch.equal(args[0], HIDDEN[:, :4])
    assert kwargs["mask"].shape == cropped


def test_a_call_of_all_tokens_keeps_its_masks() -> None:
    mask = torch.ones(2, TOKENS, dtype=torch.bool)
    assert crop(((HIDDEN,), {"mask": mask}), TOKENS, TOKENS)[1]["mask"] is mask


class Pair(NamedTuple):
    x: Tensor
    n: int


def test_trees_keep_their_types() -> None:
    tree = {"a": [Pair(torch.ones(1), 2)], "b": (torch.ones(1),)}
    changed = map_tensors(tree, lambda t: t + 1, lambda leaf: leaf * 10)
    assert changed == {"a": [Pair(torch.full((1,), 2.0), 20)], "b": (torch.full((1,), 2.0),)}
