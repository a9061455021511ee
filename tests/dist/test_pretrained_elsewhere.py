"""Pretrained weights read in parts by tiers, tensor-parallel, expert-parallel and pipeline ranks.

The trusted run has the same options, and loads the full model on every rank.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ls_strategy.lightning.strategy import ZeROStrategy
from tests.dist.ranks import assert_equal, fit, on_ranks, weights
from tests.dist.test_pretrained import Pretrained, Reads, bytes_of, save, tokens

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")


class OnHost(Pretrained):
    """The full model on every rank."""

    def load(self) -> Any:
        with torch.device("cpu"):
            return super().load()


def here(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without what other pipeline ranks have."""
    return {name: value for name, value in state.items() if not value.is_meta}


def parted(place: Path, what: str, **options: Any) -> int:
    """A fit from files against one from full models. Returns bytes read by all ranks. Collective."""
    converts = options.pop("converts", False)

    def run(kind: type[Pretrained]) -> Pretrained:
        class Converted(kind):  # type: ignore[misc, valid-type]
            def load(self) -> Any:
                from ls_strategy import convert_moe

                model = super().load()
                convert_moe(model)
                return model

        module = (Converted if converts else kind)(place)
        fit(ZeROStrategy(sharding={"min_unit_numel": 0}, **options), module, tokens(), max_epochs=1)
        return module

    with pytest.MonkeyPatch.context() as patch:
        reads = Reads(patch)
        ours = run(Pretrained)
        total = reads.total()
    trusted = run(OnHost)
    assert ours.was_on_meta
    assert not trusted.was_on_meta
    assert_equal(here(ours.at_start), here(trusted.at_start), f"{what}, at the start")
    assert_equal(ours.losses, trusted.losses, f"{what}, losses")
    assert_equal(here(weights(ours)), here(weights(trusted)), f"{what}, at the end")
    return total


@on_ranks(2)
def _tiers(rank: int, world_size: int, folder: str) -> None:
    place = Path(folder) / "llama, tied"
    tiers: dict[str, Any] = {
        "cpu": "cpu",
        "nvme": {"optimizer": "nvme", "parameters": "nvme", "nvme_path": f"{folder}/nvme", "nvme_allow_ram": True},
    }
    for name, offload in tiers.items():
        assert parted(place, name, stage=3, offload=offload) <= 1.1 * bytes_of(place)


def test_offload_tiers(tmp_path: Path) -> None:
    save(tmp_path, "llama, tied")
    _tiers(folder=str(tmp_path))


@on_ranks(2)
def _tensor(rank: int, world_size: int, folder: str) -> None:
    for name in ("llama", "llama, tied", "gpt2", "qwen2-moe"):
        place = Path(folder) / name
        for stage in (3,):
            total = parted(place, f"{name}, stage {stage}", stage=stage, parallel={"tensor": 2})
            assert total <= 1.3 * bytes_of(place), name  # both ranks hold the norms and biases


def test_tensor_parallel_ranks(tmp_path: Path) -> None:
    for name in ("llama", "llama, tied", "gpt2", "qwen2-moe"):
        save(tmp_path, name)
    _tensor(folder=str(tmp_path))


@on_ranks(2)
def _experts(rank: int, world_size: int, folder: str) -> None:
    place = Path(folder) / "qwen2-moe"
    total = parted(place, "experts", stage=3, parallel={"expert": 2}, converts=True)
    assert total <= 1.1 * bytes_of(place)


def test_expert_parallel_ranks(tmp_path: Path) -> None:
    save(tmp_path, "qwen2-moe")
    _experts(folder=str(tmp_path))


@on_ranks(2)
def _pipeline(rank: int, world_size: int, folder: str) -> None:
    for name in ("llama", "gpt2"):
        place = Path(folder) / name
        for stage in (1, 3):
            parallel = {"pipeline": {"size": 2, "micro_batches": 2}}
            total = parted(place, f"{name}, stage {stage}", stage=stage, parallel=parallel)
            assert total <= 1.2 * bytes_of(place), (name, total, bytes_of(place))


def test_pipeline_ranks(tmp_path: Path) -> None:
    for name in ("llama", "gpt2"):
        save(tmp_path, name)
    _pipeline(folder=str(tmp_path))
