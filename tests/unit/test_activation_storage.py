"""Storages of activations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ls_strategy.activations.storage import ActivationStorage, NVMeFolder, StoredRegion, make_storage
from ls_strategy.config import ActivationOffloadConfig, NVMeIOConfig
from ls_strategy.tiers.buffers import PAGE
from ls_strategy.tiers.link import Link

CPU = torch.device("cpu")


# storages ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["cpu", "nvme"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ActivationStorage]:
    folder = NVMeFolder(str(tmp_path), NVMeIOConfig(block_bytes=PAGE, parallelism=2), allow_ram=True)
    storage = make_storage(ActivationOffloadConfig(tier=request.param, staging_bytes=4 * PAGE), Link(CPU), folder)
    yield storage
    storage.close()


def stored(storage: ActivationStorage, source: torch.Tensor) -> StoredRegion:
    region = StoredRegion(source.nbytes)
    storage.begin(region, source)
    storage.finish(region)
    return region


def noise(nbytes: int) -> torch.Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8)


def test_bytes_come_back(storage: ActivationStorage) -> None:
    sources = [noise(n) for n in (1, PAGE, 3 * PAGE + 17, 2 * PAGE)]
    regions = [stored(storage, source) for source in sources]
    for region, source in zip(reversed(regions), reversed(sources), strict=True):
        assert torch.equal(storage.host(region), source)
        storage.drop(region)


def test_stored_bytes_are_counted(storage: ActivationStorage) -> None:
    regions = [stored(storage, noise(n)) for n in (100, 200)]
    assert storage.stored_bytes == 300
    for region in regions:
        storage.drop(region)
    assert storage.stored_bytes == 0


def test_dropping_a_region_that_was_never_stored_does_nothing(storage: ActivationStorage) -> None:
    storage.drop(StoredRegion(100))
    assert storage.stored_bytes == 0
