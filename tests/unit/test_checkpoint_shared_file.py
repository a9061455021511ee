"""One file that several ranks write together: it is the one that ``torch.save`` would write."""

from __future__ import annotations

import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ls_strategy.checkpoint.describe import verify_all
from ls_strategy.checkpoint.shared_file import Piece, SharedArchive, SharedFile, combined
from ls_strategy.checkpoint.torch_file import ALIGNMENT
from ls_strategy.errors import CheckpointError

VALUES = {
    "matrix": torch.randn(70, 9),
    "bf16": torch.randn(13).bfloat16(),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 4),
    "large": torch.randn(600, 700),
}


def stand_ins() -> dict[str, Tensor]:
    return {name: torch.empty_like(value, device="meta") for name, value in VALUES.items()}


def contents(sharded: dict[str, Tensor]) -> dict[str, Any]:
    """With a tied tensor, versions of modules, views that share memory, and what is no tensor."""
    state: Any = OrderedDict(sharded, tied=sharded["matrix"])
    state._metadata = OrderedDict({"": {"version": 1}})
    whole = torch.arange(10)
    return {"state_dict": state, "whole": whole, "half": whole[5:], "rate": 0.1, "names": ["a", ("b", 2)]}


def written(path: Path, ranks: int, leave_out: int | None = None) -> Path:
    """Every rank writes a range of every tensor, in two parts."""
    sharded = stand_ins()
    archive = SharedArchive(contents(sharded), list(sharded.values()))
    archive.create(str(path))
    pieces: list[Piece] = []
    for rank in range(ranks):
        file = SharedFile(str(path))
        for number, value in enumerate(VALUES.values()):
            flat = value.flatten()
            start, stop = (flat.numel() * r // ranks for r in (rank, rank + 1))
            for first, last in ((start, (start + stop) // 2), ((start + stop) // 2, stop)):
                file.write(number, archive.places[number], first * flat.element_size(), flat[first:last])
        own = file.close()
        pieces += own if rank != leave_out else own[1:]
    assert archive.complete(str(path), pieces) == path.stat().st_size
    return path


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("mapped", [False, True])
def test_the_ranks_write_what_torch_would(tmp_path: Path, ranks: int, mapped: bool) -> None:
    path = written(tmp_path / "x.ckpt", ranks)
    trusted = tmp_path / "trusted.ckpt"
    torch.save(contents(VALUES), trusted)
    found, expected = (torch.load(each, mmap=mapped, weights_only=True) for each in (path, trusted))
    state = found["state_dict"]
    assert list(state) == list(expected["state_dict"])
    assert state._metadata == expected["state_dict"]._metadata
    for name, value in expected["state_dict"].items():
        assert (type(state[name]), state[name].dtype) == (Tensor, value.dtype)
        assert torch.equal(state[name], value), name
    assert state["tied"].data_ptr() == state["matrix"].data_ptr()
    assert found["half"].untyped_storage().data_ptr() == found["whole"].untyped_storage().data_ptr()
    assert {k: found[k] for k in ("rate", "names")} == {k: expected[k] for k in ("rate", "names")}
    assert zipfile.ZipFile(path).namelist()[0] == "archive/data.pkl"


def test_every_record_is_aligned_and_has_its_checksum(tmp_path: Path) -> None:
    path = written(tmp_path / "x.ckpt", 3)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        for info in archive.infolist():
            header = path.read_bytes()[info.header_offset : info.header_offset + 30]
            sizes = (int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little"))
            assert (info.header_offset + 30 + sum(sizes)) % ALIGNMENT == 0
    assert verify_all(path) == []


def test_what_no_rank_wrote_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"other parts of archive/data/0 than its 2520 bytes"):
        written(tmp_path / "x.ckpt", 3, leave_out=0)


@pytest.mark.parametrize("other", [torch.int32, torch.bfloat16])
def test_memory_in_two_dtypes_is_refused_as_torch_does(tmp_path: Path, other: torch.dtype) -> None:
    values = torch.randn(4)
    shared = {"a": values, "b": values.view(other)}
    with pytest.raises(RuntimeError) as expected:
        torch.save(shared, tmp_path / "trusted.ckpt")
    with pytest.raises(RuntimeError, match=str(expected.value)):
        SharedArchive(shared, [])


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_checksums_of_adjacent_pieces(first: bytes, second: bytes) -> None:
    assert combined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)
