"""``torch.save`` that reads lazy tensors while it writes."""

from __future__ import annotations

import math
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ls_strategy.checkpoint.torch_file import StreamedSave
from ls_strategy.meta_init import lazy
from ls_strategy.meta_init.lazy import LazyTensor


class Lazy(LazyTensor):
    """A tensor that counts what is read of it."""

    values: Tensor
    largest: int

    @staticmethod
    def __new__(cls: Any, values: Tensor) -> Lazy:
        self = Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)  # type: ignore[attr-defined]
        self.values, self.largest = values, 0
        return self

    def load(self, start: int, stop: int) -> Tensor:
        self.largest = max(self.largest, stop - start)
        return self.values.reshape(-1)[start:stop]


def written(tmp_path: Path, value: Any) -> Path:
    StreamedSave(value).write(tmp_path / "x.pt")
    return tmp_path / "x.pt"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_a_lazy_tensor_becomes_a_plain_one(tmp_path: Path, dtype: torch.dtype) -> None:
    values = (torch.arange(12) % 3).view(3, 4).to(dtype)
    found = torch.load(written(tmp_path, {"x": Lazy(values)}))["x"]
    assert type(found) is Tensor
    assert (found.dtype, found.tolist()) == (dtype, values.tolist())


@pytest.mark.parametrize("shape", [(), (0, 4), (1,)])
def test_small_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values = torch.ones(shape)
    assert torch.load(written(tmp_path, Lazy(values))).shape == values.shape


def test_large_tensors_are_read_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy, "READ_CHUNK", 64)
    tensor = Lazy(torch.arange(1000.0))
    found = torch.load(written(tmp_path, tensor))
    assert torch.equal(found, torch.arange(1000.0))
    assert 0 < tensor.largest <= 64


def test_nothing_is_read_before_the_writing() -> None:
    tensor = Lazy(torch.arange(4.0))
    StreamedSave({"x": tensor})
    assert tensor.largest == 0


def test_plain_values_are_as_torch_writes_them(tmp_path: Path) -> None:
    value = {"step": 3, "nested": OrderedDict(a=[1.5, "x"]), "tensor": torch.arange(6).view(2, 3).T}
    found = torch.load(written(tmp_path, value))
    assert torch.equal(found.pop("tensor"), value.pop("tensor"))
    assert found == value


def test_one_tensor_under_two_names_stays_one(tmp_path: Path) -> None:
    lazy_one, plain = Lazy(torch.ones(3)), torch.ones(3)
    found = torch.load(written(tmp_path, {"a": lazy_one, "b": lazy_one, "c": plain, "d": plain[1:]}))
    assert found["a"] is found["b"]
    assert found["c"].untyped_storage().data_ptr() == found["d"].untyped_storage().data_ptr()


def test_the_file_can_be_mapped(tmp_path: Path) -> None:
    path = written(tmp_path, {"x": Lazy(torch.arange(5.0)), "y": torch.arange(3)})
    assert torch.equal(torch.load(path, mmap=True)["x"], torch.arange(5.0))


def test_every_record_is_aligned(tmp_path: Path) -> None:
    path = written(tmp_path, [Lazy(torch.ones(n)) for n in (1, 3, 17)])
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for info in archive.infolist():
            file.seek(info.header_offset + 26)
            lengths = int.from_bytes(file.read(2), "little") + int.from_bytes(file.read(2), "little")
            assert (info.header_offset + 30 + lengths) % 64 == 0


def test_checksums_are_valid(tmp_path: Path) -> None:
    with zipfile.ZipFile(written(tmp_path, Lazy(torch.ones(100)))) as archive:
        assert archive.testzip() is None


def test_the_size_is_known_before(tmp_path: Path) -> None:
    save = StreamedSave([Lazy(torch.ones(10_000)), torch.ones(5_000)])
    save.write(tmp_path / "x.pt")
    assert math.isclose(save.nbytes, (tmp_path / "x.pt").stat().st_size, rel_tol=0.1)


def test_progress_ends_at_the_data_that_was_written(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    save = StreamedSave([Lazy(torch.ones(10)), torch.ones(5)])
    save.write(tmp_path / "x.pt", lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == [40, 60]
    assert {total for _, total in seen} == {save.nbytes}


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_text("mine")
    with pytest.raises(FileExistsError):
        StreamedSave(1).write(tmp_path / "x.pt")
