"""Folders of safetensors files: which file each tensor comes from, and which files an index may name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from ls_strategy import load_safetensors
from ls_strategy.errors import CheckpointError
from ls_strategy.extras.inference.fill import Filler, open_weights
from ls_strategy.pretrained.safetensors import files_of, read_safetensors
from tests.unit.test_inference_fill import write

INDEX = "model.safetensors.index.json"


def index_of(folder: Path, files: object, name: str = INDEX) -> Path:
    path = folder / name
    path.write_text(json.dumps({"metadata": {"total_size": -1}, "weight_map": files}))
    return path


def one(value: float) -> torch.Tensor:
    return torch.tensor([float(value)])


def values(path: Path | list[Path]) -> dict[str, float]:
    return {name: tensor.item() for name, tensor in sorted(read_safetensors(path).items())}


@pytest.fixture
def doubled(tmp_path: Path) -> Path:
    """Both files have both names."""
    write(tmp_path / "x.safetensors", {"a": one(1), "b": one(2)})
    write(tmp_path / "y.safetensors", {"a": one(3), "b": one(4)})
    return tmp_path


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(one(0)), nn.Parameter(one(0))


@pytest.mark.parametrize(("a", "b"), [("x", "y"), ("y", "x"), ("x", "x"), ("y", "y")])
def test_every_tensor_is_of_the_file_that_the_index_names(doubled: Path, a: str, b: str) -> None:
    index = index_of(doubled, {"a": f"{a}.safetensors", "b": f"{b}.safetensors"})
    expected = {"a": {"x": 1.0, "y": 3.0}[a], "b": {"x": 2.0, "y": 4.0}[b]}
    assert values(doubled) == values(index) == values([index]) == expected
    assert files_of(doubled) == files_of(index) == [doubled / f"{name}.safetensors" for name in sorted({a, b})]
    model = Two()
    load_safetensors(model, doubled)
    assert {name: p.item() for name, p in model.named_parameters()} == expected
    for path in (doubled, index):
        assert {name: tensor.item() for name, tensor in sorted(open_weights(path).items())} == expected


def test_a_name_that_the_index_does_not_have_is_not_loaded(doubled: Path) -> None:
    index_of(doubled, {"a": "x.safetensors"})
    assert values(doubled) == {"a": 1.0}
    model = Two()
    with pytest.raises(CheckpointError, match=r"Missing: b\."):
        load_safetensors(model, doubled)
    assert not model.a.any()
    assert load_safetensors(model, doubled, strict=False) == (["b"], [])
    assert (model.a.item(), model.b.item()) == (1.0, 0.0)
    with torch.device("meta"):
        built = Two()
    with pytest.raises(CheckpointError, match="has no b"):
        Filler(built, doubled)


def test_a_name_that_is_not_where_the_index_says(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", {"a": one(1), "b": one(2)})
    write(tmp_path / "y.safetensors", {"c": one(3)})
    index_of(tmp_path, {"a": "x.safetensors", "b": "y.safetensors", "c": "y.safetensors"})
    with pytest.raises(CheckpointError, match=r"says that b is in y\.safetensors, but it is not\. Copy both again"):
        read_safetensors(tmp_path)


def test_without_an_index_a_name_is_in_one_file(doubled: Path) -> None:
    x, y = doubled / "x.safetensors", doubled / "y.safetensors"
    with pytest.raises(CheckpointError, match=r"has a in x\.safetensors and in y\.safetensors, and no index"):
        read_safetensors(doubled)
    assert values([x, y]) == {"a": 3.0, "b": 4.0}
    assert values([y, x]) == {"a": 1.0, "b": 2.0}
    assert values(x) == {"a": 1.0, "b": 2.0}


def test_several_indexes_and_a_file_beside_the_index(doubled: Path) -> None:
    x, y = {"a": "x.safetensors"}, {"a": "y.safetensors"}
    first = index_of(doubled, x, "first.safetensors.index.json")
    assert values(doubled) == {"a": 1.0}
    second = index_of(doubled, y, "second.safetensors.index.json")
    with pytest.raises(CheckpointError, match=r"has the indexes first\.safetensors\.index\.json, second\.safetensors"):
        read_safetensors(doubled)
    assert (values(first), values(second)) == ({"a": 1.0}, {"a": 3.0})
    index_of(doubled, y)
    assert values(doubled) == {"a": 3.0}
    alone = write(doubled / "model.safetensors", {"a": one(5)})
    with pytest.raises(CheckpointError, match=r"has both model\.safetensors and model\.safetensors\.index\.json"):
        read_safetensors(doubled)
    assert (values(alone), values(doubled / INDEX)) == ({"a": 5.0}, {"a": 3.0})
    index_of(doubled, {"a": "./model.safetensors"})
    assert values(doubled) == {"a": 5.0}


OUTSIDE = ("../secret.safetensors", "part/../../secret.safetensors", "..\\secret.safetensors", "C:secret", "\\\\a\\b")


@pytest.mark.parametrize("name", [*OUTSIDE, "{absolute}", "/dev/zero", "x\0y"])
def test_an_index_names_files_in_its_folder(tmp_path: Path, name: str) -> None:
    write(tmp_path / "secret.safetensors", {"a": one(1)})
    folder = tmp_path / "model"
    (folder / "part").mkdir(parents=True)
    index_of(folder, {"a": name.format(absolute=tmp_path / "secret.safetensors")})
    with pytest.raises(CheckpointError, match=r"names the file '.*', which is not in its folder\. Move the file there"):
        read_safetensors(folder)


def test_files_may_be_links_and_in_folders(tmp_path: Path) -> None:
    """As in the cache of huggingface_hub: snapshots/<revision>/name -> ../../blobs/<hash>."""
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / "revision"
    blobs.mkdir()
    (folder / "part").mkdir(parents=True)
    write(blobs / "1f", {"a": one(1)})
    write(folder / "part" / "y.safetensors", {"b": one(2)})
    (folder / "x.safetensors").symlink_to("../../blobs/1f")
    index_of(blobs, {"a": "x.safetensors", "b": "part/y.safetensors"}, "2e")
    (folder / INDEX).symlink_to("../../blobs/2e")
    assert values(folder) == values(folder / INDEX) == {"a": 1.0, "b": 2.0}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        "{}",
        '{"weight_map": null}',
        '{"weight_map": [1]}',
        '{"weight_map": {"a": 5}}',
        '{"weight_map": {"a": ""}}',
        '{"weight_map": {"a": ["x.safetensors"]}}',
        '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
        '{"weight_map": {}, "weight_map": {"a": "x.safetensors"}}',
        "[" * 200_000,
        '{"weight_map": {"\\ud800": "x.safetensors"}}',
    ],
)
def test_a_damaged_index_is_named(doubled: Path, text: str) -> None:
    (doubled / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json cannot be read: .*Copy it again\."):
        read_safetensors(doubled)


def test_a_folder_without_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no \*\.safetensors\. Give a safetensors file"):
        read_safetensors(tmp_path)
    index_of(tmp_path, {"a": "x.safetensors"})
    for read in (read_safetensors, open_weights):
        with pytest.raises(CheckpointError, match=r"x\.safetensors is missing"):
            read(tmp_path)
