"""Where the elements of a parameter are in DeepSpeed's flat buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ls_strategy.errors import CheckpointError
from ls_strategy.extras.deepspeed.checkpoint import InParts, places
from ls_strategy.extras.deepspeed.folder import Files

GROUPS = [{"a": (3, 5), "b": (7,)}, {"c": (4,), "scalar": ()}]


def values(name: str) -> Tensor:
    shape = torch.Size({**GROUPS[0], **GROUPS[1]}[name])
    return (torch.arange(float(shape.numel())) + 100 * ord(name[0])).view(shape)


def stage_2(ranks: int, *, padding: int = 0) -> Files:
    """All parameters of a group end to end, each followed by padding, partitioned over the ranks."""
    buffers = []
    for group in GROUPS:
        whole = torch.cat([torch.cat([values(name).flatten(), torch.zeros(padding)]) for name in group])
        each = -(-whole.numel() // ranks)
        whole = torch.cat([whole, torch.full((each * ranks - whole.numel(),), -1.0)])
        buffers.append(whole.split(each))
    parts: list[dict[str, Any]] = [
        {"single_partition_of_fp32_groups": [buffer[rank] for buffer in buffers]} for rank in range(ranks)
    ]
    if padding:
        parts[0]["param_alignment_paddings"] = [[padding] * len(group) for group in GROUPS]
    return Files(Path("x"), [{"param_shapes": GROUPS}], parts)


def stage_3(ranks: int, *, cut: int) -> Files:
    """Every parameter partitioned over the ranks; each rank's partitions end to end, in two buffers."""
    parts: list[dict[str, Any]] = []
    for rank in range(ranks):
        mine = []
        for group in GROUPS:
            for name in group:
                flat = values(name).flatten()
                each = -(-flat.numel() // ranks)
                padded = torch.cat([flat, torch.full((each * ranks - flat.numel(),), -1.0)])
                mine.append(padded[rank * each : (rank + 1) * each])
        whole = torch.cat(mine)
        parts.append({"fp32_flat_groups": [whole[:cut], whole[cut:]]})
    return Files(Path("x"), [{"param_shapes": GROUPS}] * ranks, parts)


def read(files: Files, name: str) -> Tensor:
    key = "fp32_flat_groups" if files.stage == 3 else "single_partition_of_fp32_groups"
    place = places(files)[name]
    return InParts(place.portions(lambda rank, i: files.parts[rank][key][i]), place.shape, torch.float32) + 0


CASES = {
    "stage 2, one rank": stage_2(1),
    "stage 2, three ranks": stage_2(3),
    "stage 2, padded parameters": stage_2(2, padding=3),
    "stage 3, one rank": stage_3(1, cut=9),
    "stage 3, three ranks": stage_3(3, cut=6),
    "stage 3, more ranks than elements": stage_3(9, cut=2),
}


@pytest.mark.parametrize("name", ["a", "b", "c", "scalar"])
@pytest.mark.parametrize("case", CASES)
def test_a_parameter_is_read_back(case: str, name: str) -> None:
    assert torch.equal(read(CASES[case], name), values(name))


@pytest.mark.parametrize("case", CASES)
def test_parameters_know_their_optimizer_group(case: str) -> None:
    assert {name: place.group for name, place in places(CASES[case]).items()} == {"a": 0, "b": 0, "c": 1, "scalar": 1}


def test_a_file_of_another_save_is_an_error() -> None:
    files = stage_2(2)
    files.parts[1]["single_partition_of_fp32_groups"][0] = torch.zeros(2)
    with pytest.raises(CheckpointError, match="parameters of group 0 have 22 elements, but the ranks' files have 13"):
        places(files)


def test_states_that_stayed_on_nvme_are_an_error() -> None:
    files = stage_3(2, cut=6)
    for part in files.parts:
        part["fp32_flat_groups"].pop()
    with pytest.raises(CheckpointError, match=r"files have 6.*offload_optimizer.device = cpu"):
        places(files)


def test_portions_are_read_up_to_the_size() -> None:
    portions = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])]
    assert (InParts(portions, (3,), torch.float32) + 0).tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (1, 3), (2, 2), (3, 4)])
def test_a_range_of_portions(start: int, stop: int) -> None:
    tensor = InParts([torch.tensor([1.0]), torch.tensor([2.0, 3.0]), torch.tensor([4.0])], (4,), torch.float32)
    assert torch.equal(tensor.range(start, stop), torch.tensor([1.0, 2.0, 3.0, 4.0])[start:stop])


def test_elements_are_read_in_the_dtype() -> None:
    assert InParts([torch.ones(2, dtype=torch.float16)], (2,), torch.float32).range(0, 2).dtype == torch.float32
