"""The language of tensor-parallel plans: names of styles, sections, and attributes."""

from __future__ import annotations

import dataclasses
import importlib

import pytest

from ls_strategy.errors import PlanError
from ls_strategy.parallel.styles import (
    NAMES,
    REFUSED,
    Column,
    Divide,
    Features,
    PartialGradient,
    Replicate,
    Row,
    Vocab,
    parse,
    parse_all,
    resolve_sections,
)

QKV = Column(sections=(16, 8, 8), granule=4)


def test_names_are_styles() -> None:
    assert parse("column") == parse("colwise") == Column()
    assert parse("row") == parse("rowwise") == Row()
    assert parse("vocab") == parse("embedding_rowwise") == Vocab()
    assert parse("column_gather") == parse("colwise_rep") == parse("colwise_gather_output") == Column(gather=True)
    assert parse("rowwise_rep") == parse("rowwise_split_input") == Row(split=True)
    assert parse("packed_colwise") == Column(sections=(-1, -1))
    assert parse("replicated_with_grad_allreduce") == PartialGradient()
    assert parse("features") == Features()
    assert parse("replicate") == Replicate()
    assert parse("divide:heads, kv_heads") == Divide(("heads", "kv_heads"))
    assert parse_all(["row", QKV, "divide:heads"]) == (Row(), QKV, Divide(("heads",)))


@pytest.mark.parametrize("name", [*REFUSED, "divide:", "divide", "colwize"])
def test_unknown_names_are_refused_by_name(name: str) -> None:
    with pytest.raises(PlanError, match=name):
        parse(name)


def test_every_name_of_hugging_face_is_known_or_refused_with_a_reason() -> None:
    pytest.importorskip("transformers")
    try:
        module = importlib.import_module("transformers.distributed.parallel_utils")
        importlib.import_module("transformers.integrations.tensor_parallel")
    except ImportError:
        pytest.skip("this version of transformers keeps its styles elsewhere")
    unknown = [name for name in module.ALL_PARALLEL_STYLES if name not in NAMES and name not in REFUSED]
    assert not unknown


def test_other_values_are_refused() -> None:
    with pytest.raises(PlanError, match=r"Got 3 \(int\) as a tensor-parallel style"):
        parse_all(3)  # type: ignore[arg-type]


def test_styles_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        QKV.granule = 2  # type: ignore[misc]


def test_sections_that_do_not_add_up() -> None:
    for sections in ((4, 4), (4, 8), (0, 10), (-1, -1, -1), (10, -1), (-2, 12)):
        with pytest.raises(PlanError, match="do not add up to 10"):
            resolve_sections(sections, 10, "rows")


def test_fewer_heads_than_ranks_become_one() -> None:
    assert Divide(("heads",)).local("attention", "heads", 2, 4) == 1
    assert Divide(("heads",)).local("attention", "heads", 4, 4) == 1
    with pytest.raises(PlanError, match=r"attention.heads=6 is not divisible by the 4 tensor-parallel ranks"):
        Divide(("heads",)).local("attention", "heads", 6, 4)
    with pytest.raises(PlanError, match=r"attention.heads=1.5 must be a positive integer"):
        Divide(("heads",)).local("attention", "heads", 1.5, 4)
