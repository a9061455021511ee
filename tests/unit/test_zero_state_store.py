"""The states of a flat buffer: the same to callers on every tier, also on one of another package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ls_strategy.tiers.base import ResidentTier, Sizes, Tier
from ls_strategy.tiers.nvme import NVMeTier
from ls_strategy.zero.flat import state_store
from ls_strategy.zero.flat.state_store import StateStore, chunks
from tests.unit.one_rank import ShelfTier

NUMEL = 3 * 4096 + 100
CHUNK = 4096
HOST = torch.device("cpu")


def on_device(_sizes: Sizes, _folder: Path) -> dict[str, Tier]:
    return {}


def in_host_memory(sizes: Sizes, _folder: Path) -> dict[str, Tier]:
    return {"cpu": ResidentTier(sizes, lambda numel, dtype: torch.empty(numel, dtype=dtype), "cpu")}


def on_nvme(sizes: Sizes, folder: Path) -> dict[str, Tier]:
    return {"nvme": NVMeTier(folder, sizes, buffer_bytes=CHUNK * 4, buffers=4)}


def on_a_shelf(sizes: Sizes, _folder: Path) -> dict[str, Tier]:
    return {"nvme": ShelfTier(sizes)}


TIERS: dict[str, Callable[[Sizes, Path], dict[str, Tier]]] = {
    "device": on_device, "cpu": in_host_memory, "nvme": on_nvme, "of another package": on_a_shelf
}  # fmt: skip


@pytest.fixture(params=TIERS)
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StateStore]:
    monkeypatch.setattr(state_store, "NVME_CHUNK", CHUNK)
    sizes = {(0, "master"): (NUMEL, torch.float32), (0, "param"): (NUMEL, torch.bfloat16)}
    tiers = TIERS[request.param](sizes, tmp_path)
    yield StateStore(0, tiers)  # type: ignore[arg-type]
    for tier in tiers.values():
        tier.close()


def begun(store: StateStore) -> Tensor:
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    tier = next(iter(store.tiers), "device")
    store.create("master", tier, values.clone(), torch.float32)
    return values


def test_reads_are_what_was_stored_first(store: StateStore) -> None:
    values = begun(store)
    assert torch.equal(store.read("master"), values)
    for start, stop in ((0, NUMEL), (5, 9), (CHUNK - 1, CHUNK + 1), (2 * CHUNK, 3 * CHUNK), (7, 7), (NUMEL, NUMEL)):
        assert torch.equal(store.view("master", start, stop), values[start:stop])
        out = torch.empty(stop - start, dtype=torch.bfloat16)
        store.read_into("master", out, start)
        assert torch.equal(out, values[start:stop].bfloat16())


def test_writes_replace_their_elements_only(store: StateStore) -> None:
    expected = begun(store)
    for number, (start, stop) in enumerate(((0, 3), (CHUNK - 1, 2 * CHUNK + 1), (NUMEL - 1, NUMEL), (9, 9))):
        store.write("master", start, torch.full((stop - start,), float(number)))
        expected[start:stop] = number
        assert torch.equal(store.read("master"), expected)


def test_what_is_changed_in_a_view_is_stored_when_it_is_written(store: StateStore) -> None:
    expected = begun(store)
    view = store.view("master", 10, CHUNK + 10)
    view.mul_(2)
    store.write("master", 10, view)
    expected[10 : CHUNK + 10] *= 2
    assert torch.equal(store.read("master"), expected)


def test_a_copy_to_the_device_is_in_the_dtype_of_its_target(store: StateStore) -> None:
    values = begun(store)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(NUMEL, dtype=dtype)
        store.read_to_device("master", out, None).wait_on_host()
        assert torch.equal(out, values.to(dtype))


def test_a_state_is_stored_in_its_own_dtype(store: StateStore) -> None:
    values = begun(store)
    tier = next(iter(store.tiers), "device")
    stored = store.create("param", tier, values.bfloat16(), torch.bfloat16)
    assert stored.shape == (NUMEL,)
    assert torch.equal(store.read("param"), values.bfloat16())
    assert torch.equal(store.read("master"), values)


def test_a_placeholder_stands_for_what_is_not_in_memory(store: StateStore) -> None:
    begun(store)
    tier = next(iter(store.tiers), "device")
    stored = store.create("master", tier, torch.ones(NUMEL), torch.float32)
    assert (store.in_memory("master") is None) == bool(stored.isnan().all())
    assert store.in_memory("master") is None or torch.equal(stored, torch.ones(NUMEL))


def test_chunks_that_are_not_in_memory_are_leased(store: StateStore) -> None:
    expected = begun(store)
    if store.is_resident("master"):
        assert store.in_memory("master") is not None
        return
    for start, stop in chunks(0, NUMEL):
        lease = store.get("master", start, stop)
        lease.wait().add_(1)
        store.put("master", lease, start)
    assert torch.equal(store.read("master"), expected + 1)
