"""Weights as safetensors: bytes as the format says, names, parts, files; read back by the package itself."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ls_strategy.checkpoint.consolidate import consolidate
from ls_strategy.checkpoint.safetensors import FilePart, export_safetensors, rename_prefixes
from ls_strategy.errors import CheckpointError, ConfigError
from ls_strategy.extras import cli
from tests.unit.checkpoint_folders import damage, small_folder, small_tensors, write_folder

NAMES = {"blocks.9.bias", "blocks.10.bias", "empty", "seen", "table.weight"}


def read(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """The format by its description: ``name -> (dtype, shape, bytes)``."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    assert size % 8 == 0
    header = json.loads(data[8 : 8 + size])
    assert header.pop("__metadata__")["format"] == "pt"
    spans = sorted(e["data_offsets"] for e in header.values())
    assert spans[0][0] == 0
    assert spans[-1][1] == len(data) - 8 - size
    assert all(a[1] == b[0] for a, b in itertools.pairwise(spans)), "no gaps, no overlaps"
    body = data[8 + size :]
    return {n: (e["dtype"], e["shape"], body[slice(*e["data_offsets"])]) for n, e in header.items()}


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("single", [False, True])
def test_every_tensor_once_under_its_first_name(tmp_path: Path, single: bool) -> None:
    source = small_folder(tmp_path / "x.ckpt", chunk=7)
    if single:
        consolidate(source, tmp_path / "one.ckpt")
        source = tmp_path / "one.ckpt"
    export_safetensors(source, tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    found = read(tmp_path / "out" / "model.safetensors")
    assert set(found) == NAMES
    tensors = small_tensors()
    for name, (dtype, shape, data) in found.items():
        value = tensors["model", name]
        assert shape == list(value.shape)
        assert data == raw(value), name
        assert dtype == {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}[value.dtype]


@pytest.mark.parametrize("single", [False, True])
def test_experts_one_by_one(tmp_path: Path, single: bool) -> None:
    up, bias, head = torch.randn(3, 4, 2), torch.randn(3, 4), torch.randn(2, 2)
    names = {"model.mlp.experts.up.weight": up, "model.mlp.experts.up.bias": bias, "model.head.weight": head}
    source = write_folder(tmp_path / "x.ckpt", {("model", k): v for k, v in names.items()}, {}, {}, chunk=5)
    if single:
        consolidate(source, tmp_path / "one.ckpt")
        source = tmp_path / "one.ckpt"
    options = ["--format", "safetensors", "--split-experts", "--rename", "model.="]
    assert cli.main(["consolidate", str(source), str(tmp_path / "out"), *options]) == 0
    found = read(tmp_path / "out" / "model.safetensors")
    expected = {"head.weight": head}
    for i in range(3):
        expected |= {f"mlp.experts.{i}.up.weight": up[i], f"mlp.experts.{i}.up.bias": bias[i]}
    assert found == {name: ("F32", list(value.shape), raw(value)) for name, value in expected.items()}


@pytest.mark.wide
def test_the_package_reads_it(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
    dtypes += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint64, torch.bool]
    dtypes += [torch.complex64]
    tensors = {("model", f"t{i}"): torch.arange(15).view(3, 5).to(dtype) for i, dtype in enumerate(dtypes)}
    folder = write_folder(tmp_path / "x.ckpt", tensors, {}, {}, chunk=4)
    export_safetensors(folder, tmp_path / "out")
    found = safetensors.load_file(tmp_path / "out" / "model.safetensors")
    assert len(found) == len(tensors)
    for (_, name), value in tensors.items():
        assert found[name].dtype == value.dtype
        assert found[name].shape == value.shape
        assert raw(found[name]) == raw(value), value.dtype
        assert found[name].data_ptr() % value.element_size() == 0


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "BF16"), (torch.float16, "F16"), (torch.float32, "F32")])
def test_floating_point_is_cast_and_nothing_else(tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    export_safetensors(small_folder(tmp_path / "x.ckpt"), tmp_path / "out", dtype=dtype)
    found = read(tmp_path / "out" / "model.safetensors")
    assert {n: e[0] for n, e in found.items()} == {n: "I64" if n == "seen" else name for n in NAMES}
    for n in ("table.weight", "blocks.9.bias"):
        assert found[n][2] == raw(small_tensors()["model", n].to(dtype))


def test_shards_and_their_index(tmp_path: Path) -> None:
    export_safetensors(small_folder(tmp_path / "x.ckpt"), tmp_path / "out", max_shard_bytes=90)
    files = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert files == [*(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)), "model.safetensors.index.json"]
    index = json.loads((tmp_path / "out" / files[-1]).read_text())
    assert set(index["weight_map"]) == NAMES
    sizes = []
    for name in files[:-1]:
        found = read(tmp_path / "out" / name)
        assert set(found) == {n for n, file in index["weight_map"].items() if file == name}
        sizes.append(sum(len(e[2]) for e in found.values()))
    assert sizes == [264, 86, 8]  # the first is larger than the limit, and alone
    assert index["metadata"]["total_size"] == sum(sizes)


def test_names_and_rows(tmp_path: Path) -> None:
    def rename(name: str, shape: tuple[int, ...]) -> list[FilePart]:
        if name != "table.weight":
            return []
        assert shape == (11, 6)
        return [FilePart("low", (0, 4)), FilePart("high", (4, 11))]

    export_safetensors(small_folder(tmp_path / "x.ckpt", chunk=7), tmp_path / "out", rename=rename)
    found = read(tmp_path / "out" / "model.safetensors")
    value = small_tensors()["model", "table.weight"]
    assert found == {"low": ("F32", [4, 6], raw(value[:4])), "high": ("F32", [7, 6], raw(value[4:]))}
    rename = rename_prefixes([("blocks.1", "layers.1"), ("blocks.", "x.")])
    assert [rename(n, (1,)) for n in ("blocks.10.b", "blocks.9.b", "ablocks.")] == [
        [FilePart("layers.10.b")],
        [FilePart("x.9.b")],
        [FilePart("ablocks.")],
    ]


def test_the_average_in_place_of_the_weights(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "x.ckpt")
    export_safetensors(folder, tmp_path / "out", average=True)
    value = small_tensors()["ema_state_dict", "table.weight"]
    assert read(tmp_path / "out" / "model.safetensors") == {"table.weight": ("F32", [11, 6], raw(value))}
    none = write_folder(tmp_path / "none.ckpt", {("model", "w"): torch.ones(2)}, {}, {})
    with pytest.raises(CheckpointError, match="Train with the ShardedEMA callback"):
        export_safetensors(none, tmp_path / "none", average=True)


def test_mappings_that_cannot_work(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "x.ckpt")
    with pytest.raises(ConfigError, match=r"two tensors 'a'; the second is 'blocks.10.bias'"):
        export_safetensors(folder, tmp_path / "out", rename=lambda name, shape: [FilePart("a")])
    with pytest.raises(CheckpointError, match="no tensor is left"):
        export_safetensors(folder, tmp_path / "out", rename=lambda name, shape: [])
    complex_ = write_folder(tmp_path / "c.ckpt", {("model", "c"): torch.zeros(2, dtype=torch.complex128)}, {}, {})
    with pytest.raises(ConfigError, match="complex128, which safetensors does not support"):
        export_safetensors(complex_, tmp_path / "out")
    with pytest.raises(ConfigError, match="max_shard_bytes=0"):
        export_safetensors(folder, tmp_path / "out", max_shard_bytes=0)
    assert not (tmp_path / "out").exists()


def test_a_folder_appears_in_full_or_not_at_all(tmp_path: Path) -> None:
    folder, target = small_folder(tmp_path / "x.ckpt"), tmp_path / "out"
    target.mkdir()
    (target / "precious").touch()
    with pytest.raises(ConfigError, match="out exists"):
        export_safetensors(folder, target)
    with pytest.raises(ConfigError, match="a folder that no export wrote"):
        export_safetensors(folder, target, force=True)
    (target / "precious").unlink()
    export_safetensors(folder, target, force=True, extra_files={"config.json": "{}"})
    before = (target / "model.safetensors").read_bytes()
    damage(folder, "__1_0.distcp")
    with pytest.raises(CheckpointError, match=r"__1_0.distcp is damaged"):
        export_safetensors(folder, target, force=True)
    assert sorted(p.name for p in target.iterdir()) == ["config.json", "model.safetensors"]
    assert (target / "model.safetensors").read_bytes() == before
    export_safetensors(small_folder(tmp_path / "x.ckpt"), target, force=True)
    assert set(read(target / "model.safetensors")) == NAMES
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "x.ckpt"]


@pytest.mark.parametrize("what", ["another's weights", "a file in an export", "empty weights"])
def test_an_export_replaces_only_exports(tmp_path: Path, what: str) -> None:
    """Also with ``force``: a downloaded model looks almost the same, and a tokenizer may be put into an export."""
    folder, target = small_folder(tmp_path / "x.ckpt"), tmp_path / "out"
    if what == "a file in an export":
        export_safetensors(folder, target)
        (target / "tokenizer.json").write_text("{}")
    else:
        target.mkdir()
        (target / "config.json").write_text("{}")
        header = b'{"__metadata__":{"format":"pt"}}' if what == "another's weights" else b""
        (target / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    before = {p.name: p.read_bytes() for p in target.iterdir()}
    with pytest.raises(ConfigError, match="a folder that no export wrote, or that has other files too"):
        export_safetensors(folder, target, force=True)
    assert {p.name: p.read_bytes() for p in target.iterdir()} == before


def test_the_command(tmp_path: Path, capsys: Any) -> None:
    arguments = [
        "consolidate",
        str(small_folder(tmp_path / "x.ckpt")),
        str(tmp_path / "out"),
        "--format",
        "safetensors",
    ]
    assert cli.main([*arguments, "--dtype", "bf16", "--rename", "blocks.=model.layers.", "table=embed"]) == 0
    found = read(tmp_path / "out" / "model.safetensors")
    assert set(found) == {"model.layers.9.bias", "model.layers.10.bias", "empty", "seen", "embed.weight"}
    assert found["embed.weight"][0] == "BF16"
    assert cli.main([*arguments, "--force", "--max-shard-gb", "1e-7"]) == 0
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert "MB in" in capsys.readouterr().err
