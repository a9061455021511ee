"""Which modules are streamed together, and which tensors stay."""

from __future__ import annotations

import pytest
from torch import nn

from ls_strategy.errors import PlanError
from ls_strategy.extras.inference.blocks import followers, streamed_modules, with_own_weights


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embedding.weight


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.ModuleList(Block() for _ in range(2))


def names(model: nn.Module, stream_all: bool = False) -> list[list[str]]:
    return [list(unit.modules) for unit in streamed_modules(model, None, stream_all=stream_all)]


def test_blocks_are_the_children_of_module_lists() -> None:
    assert names(Decoder()) == [["blocks.0"], ["blocks.1"], ["blocks.2"]]


def test_modules_outside_are_streamed_in_order_with_tied_ones_together() -> None:
    assert names(Decoder(), stream_all=True) == [
        ["embedding", "head"], ["blocks.0"], ["blocks.1"], ["blocks.2"], ["norm"],
    ]  # fmt: skip


def test_given_blocks_keep_their_order() -> None:
    model = Decoder()
    given = [model.blocks[2], model.blocks[0]]
    assert [unit.name for unit in streamed_modules(model, given, stream_all=False)] == ["blocks.2", "blocks.0"]


@pytest.mark.parametrize(("model", "expected"), [(Decoder(), [1, 2, 0]), (EncoderDecoder(), [1, 2, 3, 2])])
def test_after_the_last_block_the_first_one_of_its_list_is_expected(model: nn.Module, expected: list[int]) -> None:
    assert followers(streamed_modules(model, None, stream_all=False)) == expected


def test_shared_tensors_are_named_and_stay() -> None:
    model = Decoder()
    model.blocks[0].layer.bias = model.blocks[1].layer.bias
    units, shared = with_own_weights(model, streamed_modules(model, None, stream_all=False))
    assert shared == {id(model.blocks[0].layer.bias)}
    assert [unit.index for unit in units] == [0, 1, 2]


def test_blocks_without_weights_of_their_own_are_dropped() -> None:
    model = Decoder()
    model.blocks[1].layer = model.blocks[0].layer
    units, _ = with_own_weights(model, streamed_modules(model, None, stream_all=False))
    assert [(unit.index, unit.name) for unit in units] == [(0, "blocks.2")]


def test_a_block_inside_another_is_refused() -> None:
    model = Decoder()
    with pytest.raises(PlanError, match=r"Got block 'blocks.0.layer', but it is inside 'blocks.0'"):
        streamed_modules(model, [model.blocks[0], model.blocks[0].layer], stream_all=False)
