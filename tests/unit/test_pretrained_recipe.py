"""Recipes: every part of a result is the part of the value, and needs no more of the files than it should."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ls_strategy.errors import CheckpointError
from ls_strategy.layout import TensorPart
from ls_strategy.meta_init.lazy import LazyTensor, parts_of
from ls_strategy.meta_init.recipe import Computed, RecordedTensor, recipe_of
from ls_strategy.pretrained import safetensors
from ls_strategy.pretrained.safetensors import Stored, read_safetensors
from ls_strategy.zero.parts import part_of

Values = dict[str, Tensor]


def stored(folder: Path, values: Values) -> dict[str, Any]:
    """The tensors in files without header, one each."""
    found = {}
    for name, value in values.items():
        path = folder / name
        path.write_bytes(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        found[name] = RecordedTensor(Stored(tuple(value.shape), value.dtype, path, name, 0))
    return found


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each read."""
    sizes: list[int] = []
    plain = safetensors.read_into

    def read_into(path: Path, first: int, target: memoryview, what: str) -> None:
        sizes.append(len(target))
        plain(path, first, target, what)

    monkeypatch.setattr(safetensors, "read_into", read_into)
    return sizes


def values_of(seed: int = 0) -> Values:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (6, 10), "b": (6, 10), "c": (3, 4, 10), "d": (10,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


OPERATIONS: dict[str, Callable[[Any], Tensor]] = {
    "as it is": lambda v: v["c"],
    "indexed": lambda v: v["c"][...],
    "cast": lambda v: v["a"].to(device="cpu", dtype=torch.bfloat16),
    "transposed": lambda v: torch.transpose(v["a"], 0, 1).contiguous(),
    "permuted": lambda v: v["c"].permute(2, 0, -2),
    "t": lambda v: v["b"].t(),
    "narrowed": lambda v: v["c"].narrow(1, 1, 2),
    "strided": lambda v: v["a"][1:6:2, -7:],
    "selected": lambda v: v["c"][1, :, -1],
    "joined": lambda v: torch.cat([v["a"], v["b"][:4]], dim=0),
    "joined along columns": lambda v: torch.cat([v["a"], v["b"][:, 3:5]], dim=-1),
    "stacked": lambda v: torch.stack([v["a"], v["b"]], dim=0),
    "stacked inside": lambda v: torch.stack([v["a"], v["b"]], dim=1),
    "merged experts": lambda v: torch.cat([torch.stack([v["a"], v["b"]]), torch.stack([v["b"], v["a"]])], dim=1),
    "chunk": lambda v: torch.chunk(v["a"], 3, dim=0)[1].contiguous(),
    "split": lambda v: torch.split(v["c"], [1, 3], dim=1)[1],
    "unbound": lambda v: torch.unbind(v["c"], dim=1)[2],
    "squeezed": lambda v: torch.chunk(v["c"], 3, dim=0)[2].squeeze(0),
    "unsqueezed": lambda v: v["a"].unsqueeze(1),
    "reshaped": lambda v: v["c"].reshape(12, 10),
    "reshaped across": lambda v: v["a"].reshape(4, 15),
    "flat": lambda v: v["c"].flatten(1),
    "rope": lambda v: v["a"].view(1, 3, 2, 10).transpose(1, 2).reshape(6, 10),
    "interleaved": lambda v: v["a"].reshape(3, 2, 10).transpose(0, 1).reshape(6, 10).contiguous(),
    "scaled": lambda v: v["a"] * 2 + v["d"],
    "with a tensor in memory": lambda v: torch.cat([v["a"], torch.ones(2, 10)]),
    "several": lambda v: torch.stack([v["a"].t(), v["b"].t()]).to(torch.float16)[:, 2:7].transpose(1, 2),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_part_is_that_of_the_value(name: str, tmp_path: Path) -> None:
    plain = values_of()
    expected = OPERATIONS[name](plain)
    recorded = OPERATIONS[name](stored(tmp_path, plain))
    assert isinstance(recorded, RecordedTensor)
    assert recorded.shape == expected.shape
    assert recorded.dtype == expected.dtype
    torch.testing.assert_close(recorded.materialize(), expected, rtol=0, atol=0)
    flat = expected.reshape(-1)
    for start, stop in itertools.combinations(range(0, flat.numel() + 1, 7), 2):
        assert torch.equal(recorded.range(start, stop), flat[start:stop]), (start, stop)
    corner = tuple(size // 3 for size in expected.shape)
    size = tuple(n - at for n, at in zip(expected.shape, corner, strict=True))
    box = expected[tuple(slice(at, None) for at in corner)]
    assert torch.equal(recorded.box(corner, size), box)


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_boxes_of_a_file(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=4)))
    value = torch.arange(math.prod(shape), dtype=torch.int16).view(shape)
    tensor = stored(tmp_path_factory.mktemp("box"), {"x": value})["x"]
    offsets = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    sizes = tuple(data.draw(st.integers(0, n - at)) for n, at in zip(shape, offsets, strict=True))
    expected = value[tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))]
    assert torch.equal(tensor.box(offsets, sizes), expected.view(sizes))


def test_two_halves_of_merged_experts_read_every_byte_once(tmp_path: Path, reads: list[int]) -> None:
    experts = {f"{kind}{e}": torch.randn(8, 16) for e in range(4) for kind in ("gate", "up")}
    tensors = stored(tmp_path, experts)

    def merge(v: Any) -> Tensor:
        both = [torch.stack([v[f"{kind}{e}"] for e in range(4)]) for kind in ("gate", "up")]
        return torch.cat(both, dim=1)

    merged, expected = merge(tensors), merge(experts)
    half = expected.numel() // 2 + 5
    assert torch.equal(merged.range(0, half), expected.view(-1)[:half])
    assert torch.equal(merged.range(half, expected.numel()), expected.view(-1)[half:])
    assert sum(reads) == expected.nbytes


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_tensor_parallel_ranks_read_every_byte_once(dim: int, tmp_path: Path, reads: list[int]) -> None:
    value = torch.randn(12, 400)
    tensor = stored(tmp_path, {"x": value})["x"]
    for rank in range(2):
        part = TensorPart.cut(value.shape, dim, rank, 2)
        assert torch.equal(part_of(tensor, part), part_of(value, part))
    assert sum(reads) == value.nbytes


def test_small_gaps_are_read_along(tmp_path: Path, reads: list[int]) -> None:
    value = torch.randn(100, 8)
    tensor = stored(tmp_path, {"x": value})["x"]
    assert torch.equal(tensor.box((0, 2), (100, 4)), value[:, 2:6])
    assert len(reads) == 1


def test_other_functions_wait_until_they_are_needed(tmp_path: Path, reads: list[int]) -> None:
    value = torch.randn(6, 8)
    tensor = stored(tmp_path, {"x": value})["x"]
    scaled = (tensor.float() / 3).t()
    assert not reads
    assert torch.equal(scaled.range(10, 20), (value / 3).t().reshape(-1)[10:20])


def test_what_is_computed_in_full_is_computed_once(tmp_path: Path, reads: list[int]) -> None:
    value = torch.randn(6, 8)
    flipped = stored(tmp_path, {"x": value})["x"].flip(0).t()
    expected = value.flip(0).t().reshape(-1)
    assert torch.equal(torch.cat([part for _, part in parts_of(flipped, 5, 41)]), expected[5:41])
    assert sum(reads) == value.nbytes


def test_writes_count(tmp_path: Path) -> None:
    value = torch.randn(6, 8)
    tensor = stored(tmp_path, {"x": value})["x"]
    tensor.mul_(2)
    assert torch.equal(tensor.t().materialize(), (value * 2).t())
    assert not isinstance(recipe_of(tensor), (Stored, Computed))


def test_random_functions_are_not_repeated(tmp_path: Path) -> None:
    tensor = stored(tmp_path, {"x": torch.ones(6, 8)})["x"]
    noise = torch.rand_like(tensor)
    assert not isinstance(noise, LazyTensor)


def test_chunks_of_a_range(tmp_path: Path) -> None:
    value = torch.randn(6, 8)
    tensor = stored(tmp_path, {"x": value})["x"].t()
    assert torch.equal(torch.cat([part for _, part in parts_of(tensor, 5, 41)]), value.t().reshape(-1)[5:41])


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    from ls_strategy.checkpoint.safetensors import DTYPES

    header = b'{"x":{"dtype":"' + DTYPES[torch.float32].encode() + b'","shape":[4],"data_offsets":[0,16]}}'
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    tensor = read_safetensors(tmp_path)["x"]
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="ends inside x"):
        tensor.sum()
