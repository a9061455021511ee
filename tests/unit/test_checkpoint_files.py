"""One rank's file, and the reader that verifies what it reads."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ls_strategy._torch import without_crc32
from ls_strategy.checkpoint import files
from ls_strategy.checkpoint.files import RankFile, Reader, read_box, read_range
from ls_strategy.checkpoint.manifest import FileRecord, read_manifest
from ls_strategy.checkpoint.metadata import write_metadata
from ls_strategy.checkpoint.place import CheckpointPath
from ls_strategy.checkpoint.reshard import CheckpointEntry, write_entries
from ls_strategy.errors import CheckpointError
from tests.unit.checkpoint_folders import damage, small_folder, small_tensors

TABLE = ("model", "table.weight")
COLUMNS = ("optimizer_1", "state", "blocks.10.bias", "momentum_buffer")


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    path = small_folder(tmp_path / "x.ckpt")
    return Reader(path, read_manifest(path))


def written(tmp_path: Path, numel: int) -> tuple[bytes, FileRecord]:
    file = RankFile(CheckpointPath(tmp_path), "f")
    file.add_tensor(("a",), (numel,), (0,), torch.arange(float(numel)))
    file.add_object(("b",), {"x": 1})
    record = file.close()
    return (tmp_path / "f").read_bytes(), record


@pytest.mark.parametrize("numel", [3, 1 << 19], ids=["small", "checksummed in parallel"])
def test_the_record_covers_the_file_without_gaps_and_has_its_checksums(tmp_path: Path, numel: int) -> None:
    data, record = written(tmp_path, numel)
    assert [start for start, _, _ in record.parts] == [0, record.parts[0][1]]
    assert record.bytes == len(data) == sum(length for _, length, _ in record.parts)
    assert all(zlib.crc32(data[start : start + length]) == crc for start, length, crc in record.parts)


def test_a_view_is_written_without_the_rest_of_its_storage(tmp_path: Path) -> None:
    file = RankFile(CheckpointPath(tmp_path), "f")
    file.add_tensor(("a",), (1 << 20,), (8,), torch.zeros(1 << 20)[8:16])
    assert file.close().bytes < 10_000


@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (1 << 20,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.complex64])
def test_chunks_are_what_torch_save_writes_and_it_runs_once_per_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Its Python code would compete for the GIL with the step that runs while a save is written."""
    chunks = [torch.full(shape, value).to(dtype) for value in (1, 2, 3)]
    expected, calls, save = io.BytesIO(), [], torch.save
    for chunk in chunks:
        with without_crc32():
            save(chunk, expected)
    monkeypatch.setattr(torch, "save", lambda *args: (calls.append(args), save(*args)))
    file = RankFile(CheckpointPath(tmp_path), "f")
    for chunk in chunks:
        file.add_tensor(("a",), shape, (0,) * len(shape), chunk)
    file.close()
    assert len(calls) == 1
    assert (tmp_path / "f").read_bytes() == expected.getvalue()


@pytest.mark.parametrize("view", [torch.conj, torch._neg_view], ids=["conjugate", "negative"])
def test_what_torch_computes_lazily_is_written_as_it_reads(tmp_path: Path, view: Callable[[Tensor], Tensor]) -> None:
    values = view(torch.tensor([1 + 2j, 3 - 4j]))
    file = RankFile(CheckpointPath(tmp_path), "f")
    file.add_tensor(("a",), (2,), (0,), values)
    file.close()
    assert torch.load(tmp_path / "f", weights_only=True).tolist() == values.tolist()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_tensor_is_written_with_its_scales(tmp_path: Path) -> None:
    values = torch.quantize_per_tensor(torch.tensor([0.1, -0.2]), 0.1, 3, torch.qint8)
    file = RankFile(CheckpointPath(tmp_path), "f")
    write_entries(file, [CheckpointEntry(("a",), values, None)], lambda _: True)
    file.close()
    assert torch.equal(torch.load(tmp_path / "f", weights_only=True), values)


def test_the_disks_error_is_raised_not_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RankFile(CheckpointPath(tmp_path), "f")

    class Full:
        def write(self, data: object) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(file, "_file", Full())
    with pytest.raises(OSError, match="No space left"):
        file.add_tensor(("a",), (3,), (0,), torch.zeros(3))
    file.abandon()


@pytest.mark.parametrize(("start", "stop"), [(0, 66), (5, 17), (30, 31), (9, 9)])
def test_ranges_cross_chunks(reader: Reader, start: int, stop: int) -> None:
    assert torch.equal(read_range(reader, TABLE, start, stop), small_tensors()[TABLE].flatten()[start:stop])


@pytest.mark.parametrize(("offsets", "sizes"), [((0, 0), (5, 4)), ((1, 1), (3, 2)), ((4, 3), (1, 1))])
def test_boxes_cross_column_shards(reader: Reader, offsets: tuple[int, int], sizes: tuple[int, int]) -> None:
    (row, column), (rows, columns) = offsets, sizes
    expected = small_tensors()[COLUMNS][row : row + rows, column : column + columns]
    assert torch.equal(read_box(reader, COLUMNS, offsets, sizes), expected)


def test_each_chunk_is_read_once(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    plain = files.Reader._load
    monkeypatch.setattr(Reader, "_load", lambda self, index, **k: [read.append(index), plain(self, index, **k)][1])
    read_range(reader, TABLE, 5, 40)
    assert len(read) == len(set(read)) > 1


def test_a_missing_chunk_is_an_error(tmp_path: Path) -> None:
    file = RankFile(CheckpointPath(tmp_path), "f")
    file.add_tensor(("a",), (6,), (0,), torch.zeros(4))
    file.close()
    write_metadata(CheckpointPath(tmp_path), [("f", item) for item in file.items], {})
    with pytest.raises(CheckpointError, match="a is incomplete: it has 4 of the 6 elements"):
        read_range(Reader(tmp_path, None), ("a",), 0, 6)


def read_everything(reader: Reader) -> None:
    for path in reader.paths:
        if reader.tensor_metadata(path) is None:
            reader.read_object(path)
        else:
            read_range(reader, path, 0, small_tensors().get(path, small_tensors()[TABLE]).numel())


def test_a_damaged_chunk_is_an_error(reader: Reader, tmp_path: Path) -> None:
    for rank in range(3):
        damage(tmp_path / "x.ckpt", f"__{rank}_0.distcp")
    with pytest.raises(CheckpointError, match=r"__\d_0\.distcp is damaged: bytes \["):
        read_everything(reader)


def test_a_missing_file_is_an_error(reader: Reader, tmp_path: Path) -> None:
    (tmp_path / "x.ckpt" / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp is missing"):
        read_range(reader, TABLE, 0, 66)


def test_objects_come_back_and_paths_below_a_prefix(reader: Reader) -> None:
    groups = ("optimizer_1", "param_groups")
    assert reader.read_object(groups) == [{"lr": 0.3, "params": ["blocks.10.bias"]}]
    assert set(reader.under("optimizer_1")) == {COLUMNS, groups}
