"""Where blocks are stored: bytes come back as they were written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ls_strategy.errors import ConfigError, StateError
from ls_strategy.extras.inference.storage import ALIGN, BlockStorage, StoredBlocks, pack

CPU = torch.device("cpu")
TENSORS = [torch.arange(3.0), torch.arange(6, dtype=torch.int8).view(2, 3).T, torch.full((), 7, dtype=torch.int64)]


@pytest.fixture(params=["cpu", "nvme"])
def place(request: Any, tmp_path: Any) -> dict[str, Any]:
    return {"tier": request.param, "path": tmp_path, "allow_ram": True}


def stored(place: dict[str, Any], blocks: list[list[Tensor]], **options: Any) -> tuple[StoredBlocks, list[Any]]:
    packed = [pack(tensors) for tensors in blocks]
    storage = StoredBlocks([n for _, n in packed], BlockStorage(**place, **options), CPU, prefetch=1)
    for i, (tensors, (slots, _)) in enumerate(zip(blocks, packed, strict=True)):
        storage.write(i, slots, tensors)
    return storage, packed


def test_tensors_begin_at_multiples_and_do_not_overlap() -> None:
    slots, nbytes = pack(TENSORS)
    assert [slot.offset for slot in slots] == [0, ALIGN, 2 * ALIGN]
    assert nbytes == 2 * ALIGN + 8


def test_a_transposed_tensor_keeps_its_strides() -> None:
    slots, _ = pack(TENSORS)
    assert slots[1].stride == TENSORS[1].stride()
    assert [slot.is_contiguous for slot in slots] == [True, False, True]


def test_blocks_come_back_as_they_were_written(place: dict[str, Any]) -> None:
    storage, packed = stored(place, [TENSORS, [t + 1 for t in TENSORS]])
    for i in (1, 0):
        slots, nbytes = packed[i]
        lease = storage.start(i, nbytes)
        data = lease.wait()
        assert all(torch.equal(slot.view(data), t + i) for slot, t in zip(slots, TENSORS, strict=True))
        lease.release()
    storage.close()


def test_a_range_of_bytes_is_read_alone(place: dict[str, Any]) -> None:
    storage, _ = stored(place, [[torch.arange(5000, dtype=torch.int16)]])
    assert storage.read(0, 9000, 9004).view(torch.int16).tolist() == [4500, 4501]
    storage.close()


def test_other_bytes_than_were_written_are_an_error() -> None:
    storage, packed = stored({"tier": "cpu"}, [TENSORS], verify=True)
    storage.tier.tensor((0, "block"))[0] += 1  # type: ignore[attr-defined]
    with pytest.raises(StateError, match="block 0 is not what was written"):
        storage.start(0, packed[0][1]).wait()
    storage.close()


def test_on_the_cpu_no_buffers_are_needed() -> None:
    storage, _ = stored({"tier": "cpu"}, [TENSORS])
    assert (storage.buffers_nbytes, storage.bytes_read, storage.closed) == (0, 0, False)
    storage.close()
    storage.close()
    assert storage.closed


def test_a_path_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("LS_STRATEGY_NVME_PATH", str(tmp_path))
    assert BlockStorage("nvme").folder == tmp_path
    monkeypatch.delenv("LS_STRATEGY_NVME_PATH")
    with pytest.raises(ConfigError, match="Got tier='nvme' without a path"):
        BlockStorage("nvme")
