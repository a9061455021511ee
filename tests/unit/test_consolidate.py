"""A sharded checkpoint as one file: what is in it, what it costs, and what happens when it cannot be written."""

from __future__ import annotations

import collections
import os
import shutil
import stat
import sys
import zipfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from ls_strategy.checkpoint import output
from ls_strategy.checkpoint.consolidate import consolidate
from ls_strategy.checkpoint.source import read_checkpoint, read_weights
from ls_strategy.checkpoint.torch_file import StreamedSave
from ls_strategy.errors import CheckpointError, ConfigError
from ls_strategy.extras import cli
from ls_strategy.lightning.checkpointing.loading import load_from_checkpoint
from ls_strategy.meta_init.lazy import LazyTensor
from tests.processes import Program, output_of
from tests.unit.checkpoint_folders import damage, small_folder, small_tensors, uncommit, write_folder

WEIGHTS = ["table.weight", "head.weight", "blocks.10.bias", "blocks.9.bias", "empty", "blocks.9._extra_state", "seen"]


class Opaque:
    """A class that torch does not consider safe."""


@pytest.mark.parametrize("mmap", [False, True])
def test_the_file_is_a_lightning_checkpoint(tmp_path: Path, mmap: bool) -> None:
    consolidate(small_folder(tmp_path / "x.ckpt", chunk=4), tmp_path / "one.ckpt")
    loaded = torch.load(tmp_path / "one.ckpt", weights_only=True, mmap=mmap)
    tensors = small_tensors()
    state = loaded["state_dict"]
    assert list(state) == WEIGHTS
    for name in ("blocks.9.bias", "blocks.10.bias", "empty", "seen", "table.weight"):
        assert state[name].dtype == tensors["model", name].dtype
        assert torch.equal(state[name], tensors["model", name]), name
        assert type(state[name]) is torch.Tensor
    assert state["blocks.9._extra_state"] == {"scale": 2}
    assert state["head.weight"].data_ptr() == state["table.weight"].data_ptr()
    assert torch.equal(loaded["ema_state_dict"]["table.weight"], tensors["ema_state_dict", "table.weight"])
    first, second = loaded["optimizer_states"]
    assert first["param_groups"] == [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}]
    assert list(first["state"]) == [1]  # no gradient has reached the other one
    average = tensors["optimizer_0", "state", "table.weight", "exp_avg"]
    assert torch.equal(first["state"][1]["exp_avg"], average)
    assert first["state"][1]["step"].item() == 7
    momentum = tensors["optimizer_1", "state", "blocks.10.bias", "momentum_buffer"]
    assert torch.equal(second["state"][0]["momentum_buffer"], momentum)
    assert torch.equal(loaded["callbacks"]["Metric"]["values"], torch.arange(4.0).view(2, 2).T)
    assert loaded["lr_schedulers"] == [{"last_epoch": 7}]
    assert "random_states" not in loaded
    states = loaded["ls_strategy"].pop("random_states")
    assert torch.equal(states["rank_0"]["torch"], torch.arange(3, dtype=torch.uint8))
    assert loaded["ls_strategy"] == {"world_size": 3}  # from which ZeROStrategy finds its place in the data
    assert [p.name for p in tmp_path.glob("[.]*")] == []


def test_zip_tools_find_the_archive_in_order(tmp_path: Path) -> None:
    consolidate(small_folder(tmp_path / "x.ckpt"), tmp_path / "one.ckpt")
    with zipfile.ZipFile(tmp_path / "one.ckpt") as archive:
        assert archive.testzip() is None
        with (tmp_path / "one.ckpt").open("rb") as file:
            for info in archive.infolist():
                file.seek(info.header_offset + 26)
                name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
                assert (info.header_offset + 30 + name + extra) % 64 == 0, info.filename


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint64, torch.bool, torch.complex64,
]  # fmt: skip


def test_every_dtype_is_written_as_torch_writes_it(tmp_path: Path) -> None:
    tensors = {("model", f"t{i}"): torch.arange(24).view(4, 6).to(dtype) for i, dtype in enumerate(DTYPES)}
    folder = write_folder(tmp_path / "x.ckpt", tensors, {}, {"epoch": 0}, chunk=5)
    consolidate(folder, tmp_path / "one.ckpt")
    loaded = torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"]
    for (_, name), value in tensors.items():
        assert loaded[name].dtype == value.dtype
        assert torch.equal(loaded[name].view(torch.uint8), value.view(torch.uint8)), value.dtype


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
def test_a_streamed_save_of_plain_objects_is_a_torch_save(tmp_path: Path) -> None:
    base = torch.arange(10.0)
    value = {
        "views": [base[2:5], base[4:8]],
        "parameter": nn.Parameter(torch.ones(2, 2)),
        "ordered": collections.OrderedDict(a=1),
        "sparse": torch.eye(3).to_sparse(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3, dtype=torch.bfloat16),
    }
    StreamedSave(value).write(tmp_path / "ours.pt")
    torch.save(value, tmp_path / "torchs.pt")
    ours, torchs = (torch.load(tmp_path / name, weights_only=True) for name in ("ours.pt", "torchs.pt"))
    assert ours.keys() == torchs.keys()
    for name in ("parameter", "empty", "scalar", "sparse"):
        assert type(ours[name]) is type(torchs[name])
        assert ours[name].dtype == torchs[name].dtype
        assert torch.equal(ours[name].to_dense(), torchs[name].to_dense())
    ours["views"][0][2] = 77.0
    assert ours["views"][1][0] == 77.0, "views of one storage must stay so"


def test_weights_only_leaves_out_what_lightning_leaves_out(tmp_path: Path) -> None:
    consolidate(small_folder(tmp_path / "x.ckpt"), tmp_path / "one.ckpt", weights_only=True)
    loaded = torch.load(tmp_path / "one.ckpt", weights_only=True)
    kept = "epoch global_step pytorch-lightning_version loops state_dict ema_state_dict ls_strategy"
    assert set(loaded) == set(kept.split())


def test_a_single_file_is_a_source_too(tmp_path: Path) -> None:
    consolidate(small_folder(tmp_path / "x.ckpt"), tmp_path / "one.ckpt")
    consolidate(tmp_path / "one.ckpt", tmp_path / "two.ckpt", weights_only=True)
    loaded = torch.load(tmp_path / "two.ckpt", weights_only=True)
    assert list(loaded["state_dict"]) == WEIGHTS
    assert loaded["state_dict"]["head.weight"].data_ptr() == loaded["state_dict"]["table.weight"].data_ptr()
    assert read_weights(tmp_path / "two.ckpt").aliases == {"head.weight": "table.weight"}
    with pytest.raises(ConfigError, match="both source and target"):
        consolidate(tmp_path / "two.ckpt", tmp_path / "two.ckpt", force=True)


MEASURE = """
import sys
from pathlib import Path
from ls_strategy.checkpoint.consolidate import consolidate
from ls_strategy.checkpoint.safetensors import export_safetensors
from ls_strategy.meta_init import lazy

lazy.READ_CHUNK = 1 << 20

def field(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024

for work in (consolidate, export_safetensors):
    Path("/proc/self/clear_refs").write_text("5")  # forgets the highest resident size
    before = field("VmRSS")
    work(sys.argv[1], f"{sys.argv[2]}.{work.__name__}")
    print(field("VmHWM") - before)
"""


@pytest.mark.wide
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_memory_is_some_chunks_however_large_the_tensors_are(tmp_path: Path) -> None:
    big = torch.zeros(6000, 6000)  # 137 MiB
    tensors = {("model", "a"): big, ("optimizer_0", "state", "a", "exp_avg"): big}
    objects = {("optimizer_0", "param_groups"): [{"params": ["a"]}]}
    folder = write_folder(tmp_path / "x.ckpt", tensors, objects, {"epoch": 0}, chunk=1 << 20)
    printed = output_of([sys.executable, "-c", MEASURE, str(folder), str(tmp_path / "out")], timeout=60)
    consolidated, exported = map(float, printed.split())
    assert (tmp_path / "out.consolidate").stat().st_size > 270 << 20
    # Chunks are 4 MiB, of which a few exist at a time; the rest is what the first use of code costs.
    assert consolidated < 60, f"{consolidated} MiB"
    assert exported < 60, f"{exported} MiB"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_of_another_strategy_of_lightning(tmp_path: Path) -> None:
    moment = torch.arange(6.0)
    optimizer = {"state": {"b": {"exp_avg": moment}}, "param_groups": [{"lr": 0.1, "params": ["a", "b"]}]}
    state = {"model": {"a": torch.ones(2, 3), "b": torch.zeros(6)}, "optimizer_0": optimizer}
    dcp.save(state, checkpoint_id=tmp_path / "x.ckpt", no_dist=True)
    torch.save({"epoch": 3}, tmp_path / "x.ckpt" / "meta.pt")
    consolidate(tmp_path / "x.ckpt", tmp_path / "one.ckpt")
    loaded = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert loaded["epoch"] == 3
    assert torch.equal(loaded["state_dict"]["a"], torch.ones(2, 3))
    assert torch.equal(loaded["optimizer_states"][0]["state"][1]["exp_avg"], moment)
    assert loaded["optimizer_states"][0]["param_groups"] == [{"lr": 0.1, "params": [0, 1]}]


def test_an_existing_target_stays_unless_forced(tmp_path: Path) -> None:
    folder, target = small_folder(tmp_path / "x.ckpt"), tmp_path / "one.ckpt"
    target.write_text("precious")
    with pytest.raises(ConfigError, match=r"one.ckpt exists. Give another name, or --force"):
        consolidate(folder, target)
    assert target.read_text() == "precious"
    consolidate(folder, target, force=True)
    assert torch.load(target, weights_only=True)["epoch"] == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.ckpt", "x.ckpt"]
    (tmp_path / "home" / "precious").mkdir(parents=True)
    with pytest.raises(ConfigError, match="a folder that no export wrote"):
        consolidate(folder, tmp_path / "home", force=True)
    assert (tmp_path / "home" / "precious").is_dir()
    with pytest.raises(ConfigError, match="mkdir -p"):
        consolidate(folder, tmp_path / "missing" / "one.ckpt")
    (tmp_path / "link.ckpt").symlink_to("one.ckpt")
    with pytest.raises(ConfigError, match=r"is a link to one\.ckpt"):
        consolidate(folder, tmp_path / "link.ckpt", force=True)
    assert (tmp_path / "link.ckpt").is_symlink()
    os.mkfifo(tmp_path / "pipe.ckpt")
    for device in (Path("/dev/null"), tmp_path / "pipe.ckpt"):
        with pytest.raises(ConfigError, match="is a device, a pipe or a socket"):
            consolidate(folder, device, force=True)
        assert not stat.S_ISREG(device.stat().st_mode)
    with pytest.raises(ConfigError, match="not a local path"):
        consolidate(folder, "s3://bucket/one.ckpt")


def fill_disk(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Every streamed file fails after some writes to it."""
    write, count = zipfile._ZipWriteFile.write, 0  # type: ignore[attr-defined]

    def failing(self: Any, data: Any) -> int:
        nonlocal count
        count += 1
        if count > after:
            raise OSError(28, "No space left on device")
        return write(self, data)

    monkeypatch.setattr(zipfile._ZipWriteFile, "write", failing)  # type: ignore[attr-defined]


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, target = small_folder(tmp_path / "x.ckpt"), tmp_path / "one.ckpt"
    target.write_text("precious")
    with monkeypatch.context() as patch:
        fill_disk(patch, after=7)
        with pytest.raises(CheckpointError, match="No space left on device"):
            consolidate(folder, target, force=True)
    assert target.read_text() == "precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.ckpt", "x.ckpt"]
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(output.shutil, "disk_usage", lambda _: usage._replace(free=100))
    with pytest.raises(CheckpointError, match=r"needs 0.00 GB, .* has 0.00 GB free"):
        consolidate(folder, target, force=True)


def test_what_a_killed_process_left_is_removed_by_the_next_and_by_no_other(tmp_path: Path) -> None:
    folder, target = small_folder(tmp_path / "x.ckpt"), tmp_path / "one.ckpt"
    begin = (
        "import sys; from pathlib import Path; from ls_strategy.checkpoint.output import atomic_output\n"
        "with atomic_output(Path(sys.argv[1]), nbytes=0, force=False) as path:\n"
        "    path.write_text('half'); print('begun', flush=True); sys.stdin.read()"
    )
    with Program(begin, str(target)) as process:
        assert process.stdout.readline() == "begun\n"
        with pytest.raises(CheckpointError, match=rf"by another process \(pid {process.pid} on "):
            consolidate(folder, target)
        small_folder(tmp_path / "y.ckpt")  # a save, which removes what nobody needs
        shutil.rmtree(tmp_path / "y.ckpt")
        assert len(list(tmp_path.glob("[.]*.partial"))) == 1, "of a process that is alive"
    assert len(list(tmp_path.glob("[.]*.partial"))) == 1
    consolidate(folder, target, force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.ckpt", "x.ckpt"]


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consolidate(small_folder(tmp_path / "x.ckpt"), tmp_path / "one.ckpt", progress=interrupt)
    assert [p.name for p in tmp_path.iterdir()] == ["x.ckpt"]


def test_sources_that_are_not_whole(tmp_path: Path) -> None:
    target = tmp_path / "one.ckpt"
    with pytest.raises(CheckpointError, match="does not exist"):
        consolidate(tmp_path / "typo", target)
    folder = small_folder(tmp_path / "damaged.ckpt")
    damage(folder, "__1_0.distcp")
    with pytest.raises(CheckpointError, match=r"__1_0.distcp is damaged: bytes \["):
        consolidate(folder, target)
    folder = small_folder(tmp_path / "meta.ckpt")
    damage(folder, "meta.pt")
    with pytest.raises(CheckpointError, match=r"meta.pt is damaged"):
        consolidate(folder, target)
    folder = small_folder(tmp_path / "uncommitted.ckpt")
    uncommit(folder)
    with pytest.raises(CheckpointError, match="not a committed checkpoint"):
        consolidate(folder, target)
    assert not target.exists()


def test_objects_of_classes_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(
        tmp_path / "x.ckpt", {("model", "w"): torch.ones(2)}, {}, {"hyper_parameters": {"a": Opaque()}}
    )
    with pytest.raises(CheckpointError, match="does not consider safe"):
        read_checkpoint(folder)
    consolidate(folder, tmp_path / "one.ckpt")
    assert isinstance(torch.load(tmp_path / "one.ckpt", weights_only=False)["hyper_parameters"]["a"], Opaque)
    monkeypatch.delattr(sys.modules[Opaque.__module__], "Opaque")
    with pytest.raises(CheckpointError, match="cannot be imported here"):
        consolidate(folder, tmp_path / "two.ckpt")


def test_lazy_tensors_are_pickled_with_their_values(tmp_path: Path) -> None:
    lazy = read_checkpoint(small_folder(tmp_path / "x.ckpt"))["state_dict"]["table.weight"]
    assert isinstance(lazy, LazyTensor)
    buffer = tmp_path / "plain.pt"
    torch.save(lazy + 0, buffer)
    assert torch.equal(torch.load(buffer, weights_only=True), small_tensors()["model", "table.weight"])


# --- into a module ---------------------------------------------------------------------------------------------------


class Toy(pl.LightningModule):
    """What `toy_folder` is a checkpoint of."""

    def __init__(self, width: int, dtype: str = "float32") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(width, width, dtype=getattr(torch, dtype))
        self.frozen = nn.Linear(1, 1)
        self.seen: list[str] = []

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        self.seen = sorted(state)
        if "old.bias" in state:
            state["layer.bias"] = state.pop("old.bias")


def toy_folder(path: Path, *, bias: str = "layer.bias", left_out: tuple[str, ...] = ()) -> Path:
    tensors = {("model", "layer.weight"): torch.arange(9.0).view(3, 3), ("model", bias): torch.ones(3)}
    if not left_out:
        tensors |= {("model", "frozen.weight"): torch.zeros(1, 1), ("model", "frozen.bias"): torch.zeros(1)}
    meta = {"pytorch-lightning_version": "2.6.0", "hyper_parameters": {"width": 3, "dtype": "float32"}}
    return write_folder(path, tensors, {}, meta, left_out=left_out)


@pytest.mark.parametrize("bias", ["layer.bias", "old.bias"])
def test_load_from_checkpoint_reads_a_folder_as_lightning_reads_a_file(tmp_path: Path, bias: str) -> None:
    folder = toy_folder(tmp_path / "x.ckpt", bias=bias)
    consolidate(folder, tmp_path / "one.ckpt")
    expected = Toy.load_from_checkpoint(tmp_path / "one.ckpt")
    for path in (folder, tmp_path / "one.ckpt"):
        module = load_from_checkpoint(Toy, path, map_location="cpu")
        assert dict(module.hparams) == {"width": 3, "dtype": "float32"}
        assert module.seen == expected.seen
        for name, value in expected.state_dict().items():
            assert torch.equal(module.state_dict()[name], value), name
    half = load_from_checkpoint(Toy, folder, dtype="bfloat16")
    assert half.layer.weight.dtype == torch.bfloat16
    assert torch.equal(half.layer.weight.float(), torch.arange(9.0).view(3, 3))
    assert type(half.layer.weight) is nn.Parameter


def test_load_from_checkpoint_is_as_strict_as_lightning(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*layer.bias.*[\s\S]*Unexpected key\(s\).*other.bias"):
        load_from_checkpoint(Toy, toy_folder(tmp_path / "x.ckpt", bias="other.bias"))
    with pytest.warns(UserWarning, match="Found keys that are"):
        module = load_from_checkpoint(Toy, tmp_path / "x.ckpt", strict=False)
    assert module.layer.weight[2, 2] == 8
    with pytest.raises(RuntimeError, match="size mismatch"):
        load_from_checkpoint(Toy, toy_folder(tmp_path / "y.ckpt"), width=4)


def test_frozen_parameters_that_were_left_out_are_not_missing(tmp_path: Path) -> None:
    frozen = ("frozen.weight", "frozen.bias")
    module = load_from_checkpoint(Toy, toy_folder(tmp_path / "x.ckpt", left_out=frozen))
    assert module.layer.weight[2, 2] == 8
    assert module.frozen.weight.abs().sum() > 0  # as the class made it
    folder = toy_folder(tmp_path / "y.ckpt", bias="other.bias", left_out=frozen)
    with pytest.raises(CheckpointError, match=r"missing: layer.bias; unexpected: other.bias"):
        load_from_checkpoint(Toy, folder)


# --- the command -----------------------------------------------------------------------------------------------------


def run(*arguments: object) -> int:
    return cli.main(["consolidate", *map(str, arguments)])


def test_the_command_writes_a_file_and_says_so(tmp_path: Path, capsys: Any) -> None:
    folder, target = small_folder(tmp_path / "x.ckpt"), tmp_path / "one.ckpt"
    assert run(folder, target) == 0
    out, err = capsys.readouterr()
    assert err.startswith(f"{target}: 0.00 of 0.00 MB in ")
    assert out.startswith(f"wrote {target}: all of the checkpoint in one file of torch.save\n")
    assert "optimizer_states" in torch.load(target, weights_only=True)
    assert run(folder, target) == 1
    assert f"error: {target} exists" in capsys.readouterr().err
    assert run(folder, target, "--force", "--weights-only") == 0
    assert "optimizer_states" not in torch.load(target, weights_only=True)


def test_what_the_command_prints_loads_what_it_wrote(tmp_path: Path, capsys: Any) -> None:
    """Every line of code that it prints for torch is run as it stands there."""
    pytest.importorskip("safetensors.torch")
    folder, expected = small_folder(tmp_path / "x.ckpt"), small_tensors()["model", "table.weight"]
    assert run(folder, tmp_path / "one.ckpt") == 0
    assert run(folder, tmp_path / "weights", "--format", "safetensors") == 0
    assert run(folder, tmp_path / "parts", "--format", "safetensors", "--max-shard-gb", "2e-7") == 0
    out = capsys.readouterr().out
    loads = [line.split(maxsplit=2)[2].split(", and so on")[0] for line in out.splitlines() if "  in torch " in line]
    for code in loads:
        names: dict[str, Any] = {}
        exec(f"import torch, safetensors.torch\nfound = {code}", names)
        found = names["found"]
        assert "table.weight" not in found or torch.equal(found["table.weight"], expected)
    assert len(loads) == 3
    assert "trainer.fit(..., ckpt_path=" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "bf16"], "--dtype, --rename and --ema need --format safetensors"),
        (["--rename", "a=b"], "--dtype, --rename and --ema need --format safetensors"),
        (["--ema"], "--dtype, --rename and --ema need --format safetensors"),
        (["--format", "safetensors", "--weights-only"], "--weights-only needs --format ckpt"),
        (["--format", "safetensors", "--rename", "model."], "needs OLD=NEW"),
    ],
)
def test_options_that_do_not_go_together(tmp_path: Path, capsys: Any, options: list[str], message: str) -> None:
    assert run(tmp_path, tmp_path / "out", *options) == 1
    assert message in capsys.readouterr().err
