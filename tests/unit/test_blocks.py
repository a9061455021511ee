"""The blocks of a model: children of containers, and instances of named classes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ls_strategy.blocks import container_children, instances, outermost, repeated_blocks
from ls_strategy.errors import PlanError


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.GELU())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(2, 1, 4) for _ in range(2)])
        self.pairs = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])])
        self.head = nn.Linear(2, 4)


def test_children_of_containers_also_of_nested_ones() -> None:
    assert [name for name, _ in container_children(Net())] == ["layers.0", "layers.1", "pairs.0.0", "pairs.0.1"]


def test_a_model_that_is_a_container_is_searched() -> None:
    assert [name for name, _ in container_children(nn.Sequential(block(), block()))] == ["0.0", "0.1", "1.0", "1.1"]


def test_a_closed_class_is_yielded_wherever_it_is() -> None:
    assert next(container_children(Net(), closed=(nn.Embedding,)))[0] == "embed"


def test_a_child_in_two_places_is_yielded_once() -> None:
    """``self.model = model; self.layers = model.layers`` is a habit, also with one of them compiled."""
    net = Net()
    net.again = nn.ModuleDict({"pairs": net.pairs, "layers": net.layers})
    assert [name for name, _ in container_children(net)] == ["layers.0", "layers.1", "pairs.0.0", "pairs.0.1"]
    net.compiled = nn.ModuleList(torch.compile(layer, backend="eager") for layer in net.layers)
    assert [name for name, _ in container_children(net)] == ["layers.0", "layers.1", "pairs.0.0", "pairs.0.1"]


def test_a_single_layer_is_not_a_block() -> None:
    assert list(repeated_blocks(Net())) == ["layers"]
    assert len(repeated_blocks(Net())["layers"]) == 2


def test_what_is_inside_a_wanted_module_is_not_yielded() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    found = outermost(model, lambda m: isinstance(m, nn.Sequential | nn.Linear) and m is not model)
    assert [name for name, _ in found] == ["0", "1"]


@pytest.mark.parametrize("name", ["Linear", "torch.nn.modules.linear.Linear"])
def test_a_class_is_named_with_or_without_its_module(name: str) -> None:
    found = [n for n, _ in instances(Net(), (name,), option="blocks")]
    assert found[-1] == "head"
    assert "embed" not in found


def test_a_name_that_matches_nothing_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(
        PlanError, match=r"Got blocks=\['Lin'\], but .* class Lin among Linear\. Name .*leave blocks out"
    ):
        list(instances(nn.Linear(2, 2), ("Lin",), option="blocks"))
