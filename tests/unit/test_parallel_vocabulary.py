"""The token embedding, the output head, and what shares parameters with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ls_strategy.parallel.styles import Features, Vocab
from ls_strategy.parallel.tensor.vocabulary import output_heads, vocabulary

ROWS, WIDTH = 8, 4


class Model(nn.Module):
    def __init__(self, rows: int = ROWS, tied: bool = False, head: str = "lm_head", **options: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(rows, WIDTH, **options)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2)])
        self.add_module(head, nn.Linear(WIDTH, rows))
        if tied:
            self.get_submodule(head).weight = self.embed_tokens.weight


def test_embedding_and_head_are_found_by_name() -> None:
    assert vocabulary(Model(), 2) == {"embed_tokens": Vocab(), "lm_head": Vocab()}


def test_an_embedding_without_a_head_module_is_replicated() -> None:
    assert vocabulary(Model(head="classifier"), 2) == {}


def test_modules_in_blocks_are_skipped() -> None:
    model = Model()
    for layer in model.layers:
        layer.add_module("lm_head", nn.Linear(WIDTH, ROWS))
    assert list(vocabulary(model, 2)) == ["embed_tokens", "lm_head"]


def test_accessors_come_before_names() -> None:
    class Accessors(Model):
        def get_input_embeddings(self) -> nn.Module:
            return self.embed_tokens

        def get_output_embeddings(self) -> nn.Module:
            return self.get_submodule("classifier")

    assert vocabulary(Accessors(head="classifier"), 2) == {"embed_tokens": Vocab(), "classifier": Vocab()}


def test_an_accessor_that_a_model_does_not_implement_is_ignored() -> None:
    class Encoder(Model):
        def get_input_embeddings(self) -> nn.Module:
            raise NotImplementedError

    assert vocabulary(nn.ModuleDict({"net": Encoder()}), 2) == {}


def test_a_bias_that_another_module_owns_is_sharded_too() -> None:
    model = Model(tied=True)
    model.bias = model.lm_head.bias  # type: ignore[assignment, union-attr]
    assert vocabulary(model, 2) == {"embed_tokens": Vocab(), "lm_head": Vocab(), "bias": Features(dim=0)}


def test_a_bias_of_indivisible_length_keeps_all_of_them_replicated() -> None:
    model = Model(9, tied=True)
    model.bias = model.lm_head.bias  # type: ignore[assignment, union-attr]
    assert vocabulary(model, 2) == {}


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}], ids=str)
def test_a_special_embedding_is_replicated_with_its_tied_head(options: dict[str, Any]) -> None:
    assert vocabulary(Model(tied=True, **options), 2) == {}


def test_fewer_rows_than_ranks_are_replicated() -> None:
    assert vocabulary(Model(), ROWS + 1) == {}


def test_names_are_those_without_compile() -> None:
    compiled: Any = torch.compile(Model(), backend="eager")
    assert list(vocabulary(nn.ModuleDict({"net": compiled}), 2)) == ["net.embed_tokens", "net.lm_head"]


def test_output_heads_are_listed_once() -> None:
    model = Model(tied=True)
    model.output = model.lm_head  # type: ignore[assignment]
    assert output_heads(model) == [model.lm_head]
