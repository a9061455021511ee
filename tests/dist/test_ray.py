"""`RayZeROStrategy` in train functions of Ray, in Ray's local mode: no cluster is started (see test_ray_cluster.py)."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from ls_strategy.errors import ConfigError, StateError
from ls_strategy.testing import spawn
from tests.dist import ray_program
from tests.dist.ranks import on_ranks

pytestmark = pytest.mark.wide


@pytest.fixture(autouse=True, scope="module")
def ray() -> None:
    """Not at the top of the module: a run that leaves these tests out would import it, too."""
    pytest.importorskip("ray.train", exc_type=ImportError)


@functools.cache
def trained() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Results of every case on two ranks: of Ray's local mode, and of a Trainer's own ranks."""
    names = list(ray_program.CASES)
    config = {"cases": names}
    ours = spawn(ray_program.in_local_mode, 2, ray_program.train_cases, config, init_process_group=False, timeout_s=170)
    trusted = spawn(ray_program.run_cases, 2, names, init_process_group=False, timeout_s=170)
    return ours, trusted


@pytest.mark.parametrize("name", ray_program.CASES)
def test_a_train_function_computes_the_bits_of_a_trainers_own_ranks(name: str) -> None:
    ours, trusted = trained()
    for mine, other in zip(ours, trusted, strict=True):
        assert mine[name]["world_size"] == 2
        assert mine[name]["losses"] == other[name]["losses"]
        assert len(set(other[name]["losses"])) >= 4
        assert mine[name]["weights"].keys() == other[name]["weights"].keys()
        assert all(torch.equal(mine[name]["weights"][k], v) for k, v in other[name]["weights"].items())
    assert trusted[0][name]["weights"]


def announced(config: dict[str, Any]) -> list[dict[str, Any]]:
    return spawn(
        ray_program.in_local_mode, 2, ray_program.train_announced, config, init_process_group=False, timeout_s=170
    )


@pytest.mark.parametrize(
    "what",
    [
        {"alias": "zero1_offload"},
        {"options": {"stage": 3, "checkpoint": {"background": True}}},
        {"options": {"stage": 2, "checkpoint": {"format": "file"}}},
    ],
    ids=["alias", "in the background", "files"],
)
def test_an_announced_loss_of_a_node_is_saved_and_reported_and_training_goes_on(
    tmp_path: Path, what: dict[str, Any]
) -> None:
    for each in announced({"folder": str(tmp_path), **what}):
        assert each["asked"] == [1, 2, 3, 4, 5, 6, 7], "after every step"
        assert each["reported"] == [3, 4, 5, 7], "the first notice, a due step, another notice, the end of the epoch"
        assert len(each["names"]) == 4
        assert all(each["complete"])
        assert each["end"] == 7
        assert each["strategy"] == "RayZeROStrategy"


def test_the_last_step_of_a_fit_is_reported_once(tmp_path: Path) -> None:
    """It is due as a step, and ends an epoch that is due."""
    for each in announced({"folder": str(tmp_path), "alias": "zero2", "max_steps": 4}):
        assert each["reported"] == [3, 4]


def test_a_save_that_failed_is_not_reported_as_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    options = {"stage": 3, "checkpoint": {"on_error": "continue"}}
    for each in announced({"folder": str(tmp_path / "file"), "options": options}):
        assert each["reported"] == [3, 4, 5, 7], "metrics are"
        assert each["names"] == []


@on_ranks(2, timeout_s=170)
def test_the_example_of_the_guide_runs(rank: int, world_size: int) -> None:
    from docs.examples import ray_train

    ray_program.in_local_mode(rank, world_size, ray_train.train, {"epochs": 1})


# --- no ranks --------------------------------------------------------------------------------------------------------


def test_outside_of_a_train_function_the_cure_is_named() -> None:
    from lightning.pytorch import Trainer

    from ls_strategy.extras.ray import RayZeROStrategy, latest_checkpoint

    with pytest.raises(ConfigError, match="Make the Trainer inside the function"):
        Trainer(accelerator="cpu", strategy=RayZeROStrategy(), logger=False)
    with pytest.raises(StateError, match="train functions of Ray Train"):
        latest_checkpoint()


def test_reports_need_a_strategy_of_ours() -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    from ls_strategy.extras.ray import RayReportCallback

    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[RayReportCallback()])
    with pytest.raises(ConfigError, match="RayTrainReportCallback for its own"):
        trainer.fit(BoringModel())
    with pytest.raises(ConfigError, match="every_n_steps=-1"):
        RayReportCallback(every_n_steps=-1)


def test_storages_have_the_address_that_fsspec_knows(tmp_path: Path) -> None:
    import fsspec
    from pyarrow import fs

    from ls_strategy.extras.ray.storage import address

    assert address(fs.LocalFileSystem(), str(tmp_path)) == str(tmp_path)
    in_memory = fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem("memory")))
    assert address(in_memory, "/runs/a") == "memory:///runs/a"
    on_disk = fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem("file")))
    assert address(on_disk, str(tmp_path)) == str(tmp_path)
    with pytest.raises(ConfigError, match="of the kind 'subtree'"):
        address(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "a")


def test_a_name_that_ray_may_count_on_is_not_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from pyarrow import fs

    from ls_strategy.extras.ray import storage

    ray = SimpleNamespace(
        storage_filesystem=fs.LocalFileSystem(),
        experiment_fs_path=str(tmp_path),
        build_checkpoint_path_from_name=lambda name: str(tmp_path / name),
    )
    monkeypatch.setattr(storage.train, "get_context", lambda: SimpleNamespace(get_storage=lambda: ray))
    ours = storage.RunStorage()
    assert ours.free_name("a") == "a"
    (tmp_path / "a" / "checkpoint.ckpt").mkdir(parents=True)
    assert ours.free_name("a") == "a-1"
    assert ours.checkpoint("a-1").path == str(tmp_path / "a-1")
