"""Which parameters form a unit."""

from __future__ import annotations

import pytest
from torch import nn

from ls_strategy.errors import PlanError
from ls_strategy.moe.layer import MoE
from ls_strategy.zero.setup.partition import partition


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
        self.gain = nn.Parameter(nn.Linear(1, 1).weight.detach())


class Model(nn.Module):
    """Embedding, three blocks in a list, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(3, 5)


def cut(model: nn.Module, *unit_classes: str, min_unit_numel: int = 0) -> dict[str, list[str]]:
    """``unit name -> parameter names``."""
    return {u.name: [n for n, _ in u.params] for u in partition(model, unit_classes, min_unit_numel)}


UNITS = ["root.0", "blocks.0", "blocks.1", "blocks.2", "root.1"]


def test_children_of_a_module_list_are_units_and_the_rest_roots_between_them() -> None:
    model = Model()
    units = partition(model, (), 0)
    assert [(u.name, u.is_root) for u in units] == [(name, name.startswith("root")) for name in UNITS]
    assert [n for n, _ in units[0].params] == ["emb.weight"]
    assert units[1].modules == [model.blocks[0]]
    assert units[4].modules == [model.head]
    params = dict(model.named_parameters())
    assert all(params[n] is p for u in units for n, p in u.params)


@pytest.mark.parametrize("min_unit_numel", [0, 20, 32, 33, 10**6])
@pytest.mark.parametrize("unit_classes", [(), ("Block",), ("Linear", "Embedding")])
def test_every_parameter_is_in_one_unit(unit_classes, min_unit_numel) -> None:
    model = Model()
    names = [n for unit in cut(model, *unit_classes, min_unit_numel=min_unit_numel).values() for n in unit]
    assert sorted(names) == sorted(n for n, _ in model.named_parameters())


def test_blocks_that_the_model_holds_twice_are_units() -> None:
    model = Model()
    model.again = nn.ModuleDict({"blocks": model.blocks})
    assert cut(model) == cut(Model())


def test_a_layer_of_experts_is_one_unit() -> None:
    """Its expert may be a Sequential, of which each layer holds those of all experts."""
    experts = MoE(3, nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)), 2)
    model = nn.ModuleDict({"first": nn.Linear(2, 3), "moe": experts})
    assert list(cut(model)) == ["root.0", "moe"]


def test_nested_containers_are_opened() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), nn.ModuleList([nn.Linear(2, 3)]))
    assert list(cut(model)) == ["0.0", "0.2", "1.0"]


def test_named_classes_replace_the_default_and_the_outermost_of_nested_ones_counts() -> None:
    assert list(cut(Model(), "Embedding")) == ["emb", "root.0"]
    assert list(cut(Model(), f"{__name__}.Block")) == UNITS
    assert list(cut(Model(), "Block", "Linear")) == [*UNITS[:-1], "head"]


def test_an_unknown_class_is_refused_with_the_ones_there_are() -> None:
    with pytest.raises(PlanError, match=r"no module of class Blok.*Block, Embedding, Linear"):
        cut(Model(), "Blok", "Block")


def test_a_parameter_shared_within_a_block_stays_there() -> None:
    model = Model()
    model.blocks[1].again = model.blocks[1].inner[0]
    assert "blocks.1.inner.0.weight" in cut(model)["blocks.1"]


@pytest.mark.parametrize("head", [False, True], ids=["between blocks", "with the rest of the model"])
def test_a_parameter_that_is_shared_outside_of_its_block_goes_to_a_root(head: bool) -> None:
    """A head tied to a block's weight reads it outside the block's forward."""
    model = Model()
    shared, other = model.blocks[0].inner[1], model.head if head else model.blocks[2].inner[1]
    other.weight = shared.weight
    units = partition(model, (), 0)
    (owner,) = [u for u in units if any(n == "blocks.0.inner.1.weight" for n, _ in u.params)]
    assert owner.is_root
    assert head or set(map(id, owner.modules)) == {id(shared), id(other)}
    assert sum(len(u.params) for u in units) == len(list(model.parameters()))


def test_small_blocks_join_the_root() -> None:
    numel = sum(p.numel() for p in Block().parameters())
    assert len(cut(Model(), min_unit_numel=numel)) == 5
    assert list(cut(Model(), min_unit_numel=numel + 1)) == ["root.0"]


def test_a_model_without_parameters_has_no_units() -> None:
    assert partition(nn.Sequential(nn.ReLU()), (), 0) == []
