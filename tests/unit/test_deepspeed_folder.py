"""Finding and opening the files of a DeepSpeed save."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ls_strategy.checkpoint.target import MANIFEST
from ls_strategy.errors import CheckpointError
from ls_strategy.extras.deepspeed.folder import is_deepspeed, open_save

STAGE_2 = "zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def write(folder: Path, *, ranks: int = 2, scaler: Any = None) -> Path:
    folder.mkdir(parents=True)
    torch.save({"param_shapes": [{}], "module": {}}, folder / "mp_rank_00_model_states.pt")
    for rank in range(ranks):
        part = {"partition_count": 2, "number": rank, "loss_scaler": scaler}
        torch.save({"optimizer_state_dict": part}, folder / STAGE_2.format(rank=rank))
    return folder


def test_the_folder_of_one_save(tmp_path: Path) -> None:
    assert is_deepspeed(write(tmp_path / "global_step4"))


def test_the_newest_save_of_a_folder_is_opened(tmp_path: Path) -> None:
    write(tmp_path / "global_step4")
    write(tmp_path / "global_step8")
    (tmp_path / "latest").write_text("global_step4\n")
    assert open_save(tmp_path).folder == tmp_path / "global_step4"


def test_a_name_outside_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest").write_text("../elsewhere")
    assert not is_deepspeed(tmp_path / "run")


def test_a_folder_with_a_manifest_is_ours(tmp_path: Path) -> None:
    (write(tmp_path / "x") / MANIFEST).touch()
    assert not is_deepspeed(tmp_path / "x")


def test_other_folders_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not a DeepSpeed checkpoint: it has no \*_model_states\.pt"):
        open_save(tmp_path)


def test_ranks_are_in_numerical_order(tmp_path: Path) -> None:
    folder = write(tmp_path / "x")
    for rank in range(12):
        part = {"partition_count": 12, "number": rank}
        torch.save({"optimizer_state_dict": part}, folder / STAGE_2.format(rank=rank))
    assert [part["number"] for part in open_save(folder).parts] == list(range(12))


def test_missing_ranks_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="was written by 2 ranks, but has the files of 1"):
        open_save(write(tmp_path / "x", ranks=1))


@pytest.mark.parametrize(
    "name", ["mp_rank_01_model_states.pt", "expert_0_mp_rank_00_model_states.pt", "layer_00-model_states.pt"]
)
def test_model_parallelism_is_refused(tmp_path: Path, name: str) -> None:
    torch.save({}, write(tmp_path / "x") / name)
    with pytest.raises(CheckpointError, match="pipeline, tensor or expert parallelism"):
        open_save(tmp_path / "x")


def test_an_older_deepspeed_is_refused(tmp_path: Path) -> None:
    torch.save({"module": {}}, write(tmp_path / "x") / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="no param_shapes"):
        open_save(tmp_path / "x")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (write(tmp_path / "x") / STAGE_2.format(rank=1)).write_bytes(b"PK\x03\x04broken")
    with pytest.raises(CheckpointError, match=r"zero_pp_rank_1_mp_rank_00_optim_states\.pt cannot be read"):
        open_save(tmp_path / "x")


@pytest.mark.parametrize("weights_only", [True, False])
def test_deepspeeds_objects_become_holders(tmp_path: Path, weights_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("deepspeed.scaler")
    made = type("DynamicLossScaler", (), {"__module__": module.__name__})
    module.DynamicLossScaler = made  # type: ignore[attr-defined]
    scaler = made()
    scaler.cur_scale = 128.0
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
        patch.setitem(sys.modules, module.__name__, module)
        folder = write(tmp_path / "x", scaler=scaler)
    found = open_save(folder, weights_only=weights_only).parts[0]["loss_scaler"]
    assert type(found) is not made
    assert vars(found) == {"cur_scale": 128.0}
