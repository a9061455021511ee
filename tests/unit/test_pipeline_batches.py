"""Splitting a batch into micro-batches, and merging the results of their steps."""

from __future__ import annotations

import pytest
import torch

from ls_strategy.parallel.pipeline.batches import has_rows, merge, reduced, split

BATCH = {"x": torch.arange(10).view(5, 2), "pair": (torch.arange(5), "text"), "scale": torch.tensor(3.0)}


def test_has_rows_looks_at_all_leaves() -> None:
    assert has_rows(BATCH, 5)
    assert not has_rows(BATCH, 4)
    assert not has_rows(torch.tensor(5.0), 5)


def test_micro_batches_differ_by_at_most_one_sample() -> None:
    _, sizes = split(BATCH, 5, 3)
    assert sizes == [2, 2, 1]


def test_micro_batches_hold_all_rows_in_order() -> None:
    parts, _ = split(BATCH, 5, 3)
    assert torch.equal(torch.cat([part["x"] for part in parts]), BATCH["x"])
    assert torch.equal(torch.cat([part["pair"][0] for part in parts]), BATCH["pair"][0])


def test_leaves_without_rows_are_in_every_micro_batch() -> None:
    parts, _ = split(BATCH, 5, 2)
    assert [part["pair"][1] for part in parts] == ["text", "text"]
    assert all(part["scale"] is BATCH["scale"] for part in parts)


def test_logged_values_are_weighted_by_samples() -> None:
    values = [torch.tensor(1.0), torch.tensor(4.0)]
    assert reduced(values, None, [0.75, 0.25], "mean") == pytest.approx(1.75)


@pytest.mark.parametrize(("how", "expected"), [("sum", 5.0), (torch.max, 4.0), ("min", 1.0)])
def test_logged_values_are_reduced_as_asked(how: object, expected: float) -> None:
    assert reduced([1.0, torch.tensor(4.0)], None, [0.75, 0.25], how) == expected


def test_known_shares_count_however_values_are_reduced() -> None:
    assert reduced([1.0, 4.0], [0.25, 0.75], [0.5, 0.5], "max") == pytest.approx(3.25)


def test_values_logged_in_some_micro_batches_have_equal_weights() -> None:
    assert reduced([1.0, 4.0], None, [0.5, 0.25, 0.25], "mean") == pytest.approx(2.5)


def test_logged_vectors_keep_their_shape() -> None:
    result = reduced([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])], None, [0.5, 0.5], "mean")
    assert torch.equal(result, torch.tensor([2.0, 4.0]))


def test_merge_concatenates_rows_and_averages_numbers() -> None:
    results = [
        {"loss": torch.tensor(1.0, requires_grad=True), "logits": torch.ones(2, 3), "name": "a"},
        {"loss": torch.tensor(4.0), "logits": torch.zeros(1, 3), "name": "b"},
    ]
    merged = merge(results, [2, 1], lambda values, _: reduced(values, None, [2 / 3, 1 / 3], "mean"))
    assert merged["loss"].item() == pytest.approx(2.0)
    assert not merged["loss"].requires_grad
    assert torch.equal(merged["logits"], torch.cat([torch.ones(2, 3), torch.zeros(1, 3)]))
    assert merged["name"] == "a"


@pytest.mark.parametrize("results", [[], [None, None]])
def test_merge_of_nothing_is_none(results: list[None]) -> None:
    assert merge(results, [2, 1], lambda *_: torch.zeros(())) is None


BOXES = [{"box": torch.ones(count, 4)} for count in (1, 2, 3, 4, 5)]


@pytest.mark.parametrize(
    ("given", "per_sample"),
    [
        (["a", "b", "c", "d", "e"], True),
        (("a", "b", "c", "d", "e"), True),
        ([1, 2, 3, 4, 5], True),
        (BOXES, True),
        ((1, 2, 3, 4, 5), False),  # may be a size
        (["a", "b"], False),
        ([torch.zeros(5)] * 5, False),  # tensors with rows
    ],
)
def test_lists_with_one_entry_per_sample_are_cut_and_joined(given: object, per_sample: bool) -> None:
    parts, sizes = split({"x": BATCH["x"], "list": given}, 5, 2)
    lists = [part["list"] for part in parts]
    assert (list(map(len, lists)) == sizes) == per_sample
    if per_sample:
        merged = merge(lists, sizes, lambda *_: torch.zeros(()))
        assert type(merged) is type(given)
        assert str(merged) == str(given)
