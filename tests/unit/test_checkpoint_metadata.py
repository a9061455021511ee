"""The index of a checkpoint folder."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata

from ls_strategy.checkpoint.metadata import Item, from_json, from_pickle, merge, to_json

WEIGHT = ("model", "net.weight")
TOP = Item(WEIGHT, (4, 3), torch.float32, (0, 0), (1, 3), 0, 40)
BOTTOM = Item(WEIGHT, (4, 3), torch.float32, (1, 0), (3, 3), 8, 60)
OBJECT = Item(("optimizer_0", "param_groups"), None, None, (), (), 40, 9)
ITEMS = [("a.distcp", TOP), ("b.distcp", BOTTOM), ("a.distcp", OBJECT)]


@pytest.mark.parametrize("item", [TOP, OBJECT])
def test_an_item_survives_json(item: Item) -> None:
    assert Item.from_plain(json.loads(json.dumps(item.to_plain()))) == item


@pytest.mark.parametrize(
    "plain",
    [
        [["a"], [2], "float32", [0], [2], -1, 8],
        [["a"], [True], "float32", [0], [1], 0, 8],
        [["a"], [2], "nn", [0], [2], 0, 8],
        [["a"], [2], "float32", [0], [2], 0],
    ],
    ids=["negative", "bool", "not a dtype", "too short"],
)
def test_malformed_items_are_refused(plain: list[object]) -> None:
    with pytest.raises((ValueError, TypeError)):
        Item.from_plain(plain)


def test_merged_chunks_belong_to_one_tensor() -> None:
    state = merge(ITEMS, {}).state_dict_metadata["model.net.weight"]
    assert isinstance(state, TensorStorageMetadata)
    assert [tuple(chunk.offsets) for chunk in state.chunks] == [(0, 0), (1, 0)]


def test_merge_says_where_each_chunk_is() -> None:
    info = merge(ITEMS, {}).storage_data[MetadataIndex("model.net.weight", torch.Size((1, 0)))]
    assert (info.relative_path, info.offset, info.length) == ("b.distcp", 8, 60)


def test_merge_keeps_the_keys_of_dotted_names_apart() -> None:
    assert merge(ITEMS, {}).planner_data["model.net.weight"] == WEIGHT


def test_objects_have_no_shape() -> None:
    state = merge(ITEMS, {}).state_dict_metadata["optimizer_0.param_groups"]
    assert isinstance(state, BytesStorageMetadata)


def test_an_alias_shares_the_chunks() -> None:
    metadata = merge(ITEMS, {("model", "head.weight"): WEIGHT})
    places = [metadata.storage_data[MetadataIndex(f"model.{name}", (1, 0))] for name in ("net.weight", "head.weight")]
    assert places[0] == places[1]


def test_chunks_of_different_dtypes_are_refused() -> None:
    other = Item(WEIGHT, (4, 3), torch.float16, (1, 0), (3, 3), 8, 60)
    with pytest.raises(ValueError, match="different shapes or dtypes"):
        merge([("a", TOP), ("b", other)], {})


def test_a_chunk_outside_of_its_tensor_is_refused() -> None:
    beyond = Item(WEIGHT, (4, 3), torch.float32, (2, 0), (3, 3), 8, 60)
    with pytest.raises(ValueError, match=r"chunk at \[2, 0\] of sizes \[3, 3\], outside of \[4, 3\]"):
        merge([("a", beyond)], {})


@pytest.mark.parametrize("form", ["json", "pickle"])
def test_both_forms_give_the_metadata_back(form: str) -> None:
    metadata = merge(ITEMS, {("model", "head.weight"): WEIGHT})
    found = from_json(to_json(metadata).encode()) if form == "json" else from_pickle(pickle.dumps(metadata))
    assert found.state_dict_metadata == metadata.state_dict_metadata
    assert found.storage_data == metadata.storage_data
    assert found.planner_data == metadata.planner_data


def test_a_newer_index_is_refused() -> None:
    raw = json.loads(to_json(merge(ITEMS, {}))) | {"format": 2}
    with pytest.raises(ValueError, match="its format is 2"):
        from_json(json.dumps(raw).encode())


def test_a_pickle_that_names_anything_else_is_refused() -> None:
    with pytest.raises(pickle.UnpicklingError, match="which no checkpoint needs"):
        from_pickle(pickle.dumps(print))
