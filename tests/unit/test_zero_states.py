"""States of one flat buffer on its tiers: `StateStorage` and `FlatStates`."""

from __future__ import annotations

import pytest
import torch

from ls_strategy.config import MomentFormat, PrecisionConfig
from ls_strategy.ops.moments import BLOCK
from ls_strategy.tiers.base import ResidentTier
from ls_strategy.zero.flat import storage
from ls_strategy.zero.flat.storage import StateStorage, chunks
from ls_strategy.zero.step.states import FlatStates, moment_sizes
from tests.unit.one_rank import ShelfTier, adamw, engine_on, network

NUMEL = 20_000


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "NVME_CHUNK", 4096)


def on_shelf(dtype: torch.dtype = torch.float32) -> tuple[StateStorage, ShelfTier]:
    shelf = ShelfTier({(7, "master"): (NUMEL, dtype)})
    return StateStorage(7, {"nvme": shelf}), shelf


def test_chunks_end_at_multiples() -> None:
    assert list(chunks(5, storage.NVME_CHUNK + 3)) == [
        (5, storage.NVME_CHUNK),
        (storage.NVME_CHUNK, storage.NVME_CHUNK + 3),
    ]
    assert list(chunks(5, 5)) == []


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("start", "stop"), [(0, NUMEL), (0, 4096), (1, 4095), (4095, 8193), (5000, NUMEL), (9, 9)])
def test_a_range_that_is_written_is_read_again_and_changes_nothing_else(start: int, stop: int) -> None:
    place, shelf = on_shelf()
    place.write("master", 0, torch.arange(NUMEL, dtype=torch.float32))
    place.write("master", start, torch.full((stop - start,), -1.0))
    expected = torch.arange(NUMEL, dtype=torch.float32)
    expected[start:stop] = -1.0
    assert torch.equal(shelf.shelf[7, "master"], expected)
    assert torch.equal(place.read("master"), expected)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("start", [0, 1, 4096, 4097, NUMEL - 1])
def test_a_read_begins_anywhere_and_casts(start: int) -> None:
    place, shelf = on_shelf()
    shelf.shelf[7, "master"].copy_(torch.arange(NUMEL) % 100)
    out = torch.empty(NUMEL - start, dtype=torch.bfloat16)
    place.read_into("master", out, start)
    assert torch.equal(out, shelf.shelf[7, "master"][start:].bfloat16())


def test_a_state_of_another_buffer_is_resident() -> None:
    place, _ = on_shelf()
    assert not place.is_resident("master")
    assert place.is_resident("exp_avg")
    assert StateStorage().is_resident("master")


def test_a_resident_state_is_the_tiers_tensor() -> None:
    tier = ResidentTier({(0, "master"): (3, torch.float32)}, lambda n, dtype: torch.empty(n, dtype=dtype), "cpu")
    place = StateStorage(0, {"cpu": tier})
    place.resident("cpu", "master", 3, torch.float32).fill_(2.0)
    assert tier.tensor((0, "master")).tolist() == [2.0] * 3
    assert place.resident("cpu", "other", 4, torch.float32).tolist() == [0.0] * 4
    assert place.resident("device", "master", 2, torch.float64).dtype == torch.float64


def test_work_without_a_thread_is_done_at_once() -> None:
    assert StateStorage().in_background(lambda: 3).done()


def test_sizes_of_moments() -> None:
    assert moment_sizes(1, BLOCK + 1, {"exp_avg": True}, "fp32") == {(1, "exp_avg"): (BLOCK + 1, torch.float32)}
    assert moment_sizes(1, BLOCK + 1, {"exp_avg": True}, "int8") == {
        (1, "exp_avg"): (BLOCK + 1, torch.uint8),
        (1, "exp_avg.scales"): (2, torch.float32),
    }


def states_on(moment_format: MomentFormat, offload: str | None) -> tuple[FlatStates, object]:
    model = network(32)
    engine = engine_on(
        model, [adamw(model.parameters())], stage=1, offload=offload, precision=PrecisionConfig(moments=moment_format)
    )
    return engine.optimizers[0].sharded.states.store[0], model


@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize("moment_format", ["fp32", "bf16", "int8"])
def test_values_that_a_format_holds_come_back_exactly(moment_format: MomentFormat, offload: str | None) -> None:
    states, _model = states_on(moment_format, offload)
    values = torch.tensor([0.0, 1.0, -2.0, 0.5]).repeat(states.numel // 4 + 1)[: states.numel]
    states.write("exp_avg", 0, values)
    assert torch.equal(states.read("exp_avg", torch.float32), values)
    assert torch.equal(states.range("exp_avg", 3, 300), values[3:300])
    assert states.dtypes() == {"exp_avg": torch.float32}


def test_a_state_without_a_fused_update_keeps_its_dtype() -> None:
    states, _model = states_on("fp32", "cpu")
    states.write("history", 2, torch.tensor([1.5, 2.5], dtype=torch.float64))
    assert states.dtypes() == {"history": torch.float64}
    assert states.range("history", 1, 5).tolist() == [0.0, 1.5, 2.5, 0.0]


def test_bytes_in_memory() -> None:
    states, _model = states_on("fp32", "cpu")
    assert states.nbytes() == 0
    states.ensure("exp_avg", torch.float32)
    assert states.nbytes() == states.numel * 4
