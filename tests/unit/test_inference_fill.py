"""Models on meta are filled from files, by their names and shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ls_strategy.errors import CheckpointError, PlanError
from ls_strategy.extras.inference.fill import Filler, device_of, needs_filling, open_weights
from ls_strategy.pretrained.safetensors import read_safetensors

CPU = torch.device("cpu")


def write(path: Path, tensors: dict[str, Tensor]) -> Path:
    """A file of fp32 safetensors, by hand."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().numpy().tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))


def values(prefix: str = "") -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {f"{prefix}{name}": torch.rand(p.shape, generator=g) for name, p in on_meta().named_parameters()}


def fill(model: nn.Module, filler: Filler) -> None:
    for name, module in model.named_modules():
        filler.fill(name, module, CPU)


def test_tensors_of_a_file_are_read_when_they_are_used(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)})
    found = read_safetensors(path)
    assert {name: tuple(t.shape) for name, t in found.items()} == {"a": (2, 3), "b": (2,)}
    assert found["a"].load(2, 5).tolist() == [2.0, 3.0, 4.0]  # type: ignore[attr-defined]
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        found["b"].load(0, 2)  # type: ignore[attr-defined]


def test_all_files_of_a_folder_are_read(tmp_path: Path) -> None:
    write(tmp_path / "1.safetensors", {"a": torch.ones(1)})
    write(tmp_path / "2.safetensors", {"b": torch.ones(1)})
    assert read_safetensors(tmp_path).keys() == {"a", "b"}


def test_a_cut_file_is_damaged(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"a": torch.ones(4)})
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"is damaged: its header puts a at bytes \[0, 16\) of 12. Copy it again"):
        read_safetensors(path)


@pytest.mark.parametrize("prefix", ["", "network.", "a.b."])
def test_names_in_the_file_may_have_one_more_module(tmp_path: Path, prefix: str) -> None:
    model, weights = on_meta(), values(prefix)
    fill(model, Filler(model, write(tmp_path / "x.safetensors", weights)))
    assert all(torch.equal(p, weights[prefix + name]) for name, p in model.named_parameters())


def test_names_in_the_file_may_have_one_module_less(tmp_path: Path) -> None:
    model = nn.ModuleDict({"transformer": on_meta()})
    weights = values()
    fill(model, Filler(model, write(tmp_path / "x.safetensors", weights)))
    assert all(torch.equal(p, weights[name]) for name, p in model["transformer"].named_parameters())


def test_a_missing_name_is_named(tmp_path: Path) -> None:
    weights = values()
    del weights["1.bias"]
    with pytest.raises(CheckpointError, match=r"has no 1\.bias. It has 0\.weight"):
        Filler(on_meta(), write(tmp_path / "x.safetensors", weights))


def test_another_shape_is_named(tmp_path: Path) -> None:
    weights = {**values(), "0.bias": torch.ones(4)}
    with pytest.raises(CheckpointError, match=r"0\.bias has shape \(4,\) in .*, but \(3,\) in the model"):
        Filler(on_meta(), write(tmp_path / "x.safetensors", weights))


def test_without_a_file_modules_initialize_themselves() -> None:
    model = on_meta()
    torch.manual_seed(1)
    fill(model, Filler(model, None))
    torch.manual_seed(1)
    expected = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_filling_keeps_the_identity_of_parameters() -> None:
    model = on_meta()
    before = list(model.parameters())
    fill(model, Filler(model, None))
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))


def test_only_models_on_meta_need_filling() -> None:
    assert needs_filling(on_meta(), "weights")
    assert not needs_filling(nn.Linear(1, 1), None)
    with pytest.raises(PlanError, match="Got fill_from='weights' for a model that has its weights already"):
        needs_filling(nn.Linear(1, 1), "weights")


def test_the_device_is_that_of_the_first_parameter_with_memory() -> None:
    assert device_of(on_meta()) == CPU
    assert device_of(nn.Sequential(nn.ReLU(), nn.Linear(1, 1))) == CPU


def test_a_file_without_weights_is_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": {"epoch": 3}}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="has no weights"):
        open_weights(tmp_path / "x.pt")
