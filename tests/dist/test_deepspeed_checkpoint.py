"""Checkpoints that DeepSpeed 0.19.8 wrote (tests/golden/deepspeed/make_checkpoints.py): read, consolidated, resumed.

The oracle of weights is DeepSpeed's own ``zero_to_fp32``, bit for bit; that of moments is the same training in plain
torch. The slow test makes the checkpoints anew with the DeepSpeed that is installed.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from ls_strategy import CheckpointError, ConfigError, ZeROStrategy
from ls_strategy.extras.cli import main
from ls_strategy.extras.deepspeed.checkpoint import consolidate_deepspeed, is_deepspeed, read_deepspeed
from ls_strategy.extras.deepspeed.schedules import WarmupLR
from ls_strategy.testing import free_port, spawn
from tests.golden.deepspeed.make_checkpoints import CASES, STEPS, Net, batch, groups
from tests.pickles import Runs
from tests.trainers import bare_trainer

pytestmark = pytest.mark.wide

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "deepspeed"
RATES = {"warmup_max_lr": 1e-2, "warmup_num_steps": 6}
ZERO = [case for case in CASES if case != "stage0"]


@pytest.fixture(params=list(CASES))
def case(request):
    return request.param


def expected_of(folder):
    return torch.load(folder / "expected.pt", weights_only=True)


def trained(steps):
    """The same training in plain torch: replicas that average gradients."""
    model = Net()
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    schedule = WarmupLR(optimizer, **RATES)
    for step in range(steps):
        sums = {}
        for rank in range(2):
            replica = copy.deepcopy(model)
            replica(batch(step, rank)).float().pow(2).mean().backward()
            for name, p in replica.named_parameters():
                if p.requires_grad:
                    sums[name] = sums.get(name, 0) + p.grad / 2
        for name, p in model.named_parameters():
            p.grad = sums.get(name)
        optimizer.step()
        schedule.step()
    return model, optimizer


def check_weights(found, expected):
    """All of them, although DeepSpeed's own tool leaves the frozen ones of stage 1 out."""
    initial = Net().state_dict()
    assert found.keys() == initial.keys()
    assert initial.keys() - expected.keys() <= {"frozen.weight"}
    for name, value in {"frozen.weight": initial["frozen.weight"], **expected}.items():
        assert torch.equal(found[name], value.float()), name


def check_case(folder, case):
    checkpoint = read_deepspeed(folder)
    expected = expected_of(folder)
    check_weights(checkpoint["state_dict"], expected["weights"])
    assert checkpoint["note"] == "from the caller"
    assert checkpoint["global_step"] == STEPS
    assert checkpoint["lr_schedulers"] == [{"last_batch_iteration": STEPS - 1}]
    if case == "stage0":
        assert "optimizer_states" not in checkpoint
        return
    (states,) = checkpoint["optimizer_states"]
    assert [group["lr"] for group in states["param_groups"]] == expected["rates"]
    assert [group["weight_decay"] for group in states["param_groups"]] == [0.1, 0.0]
    _, optimizer = trained(STEPS)
    # The oracle computes in fp32; in bf16, which keeps 8 bits, the bound tells whose moments they are, and no more.
    bound = {"rtol": 0.05, "atol": 1e-4} if "bf16" in case else {"rtol": 1e-5, "atol": 1e-8}
    numbered = optimizer.state_dict()["state"]
    assert states["state"].keys() == numbered.keys()
    for number, entries in numbered.items():
        assert float(states["state"][number]["step"]) == STEPS
        for key in ("exp_avg", "exp_avg_sq"):
            found = states["state"][number][key]
            torch.testing.assert_close(found.clone().float(), entries[key], **bound)
    optimizer.load_state_dict(states)  # torch takes it


def test_weights_and_moments(case):
    check_case(GOLDEN / case, case)


def test_what_is_deepspeeds(tmp_path):
    assert is_deepspeed(GOLDEN / "stage1")
    assert is_deepspeed(GOLDEN / "stage1" / f"global_step{STEPS}")
    assert not is_deepspeed(tmp_path)
    assert not is_deepspeed(tmp_path / "missing")
    assert not is_deepspeed("s3://bucket/run")


def test_deepspeed_is_not_needed(tmp_path):
    code = (
        "import sys; sys.modules['deepspeed'] = None\n"
        "from ls_strategy.extras.deepspeed.checkpoint import consolidate_deepspeed\n"
        "consolidate_deepspeed(sys.argv[1], sys.argv[2])\n"
    )
    command = [sys.executable, "-c", code, str(GOLDEN / "stage3"), str(tmp_path / "out.ckpt")]
    subprocess.run(command, check=True, timeout=120, env={**os.environ, "PYTHONPATH": str(GOLDEN.parents[2])})
    check_weights(torch.load(tmp_path / "out.ckpt")["state_dict"], expected_of(GOLDEN / "stage3")["weights"])


def test_one_file(case, tmp_path):
    target = tmp_path / "out.ckpt"
    assert main(["consolidate", str(GOLDEN / case), str(target), "--rename", "=net."]) == 0
    found = torch.load(target, weights_only=True)
    weights = {name.removeprefix("net."): value for name, value in found["state_dict"].items()}
    assert all(name.startswith("net.") for name in found["state_dict"])
    check_weights(weights, expected_of(GOLDEN / case)["weights"])
    assert weights["tied.weight"].data_ptr() == weights["embed.weight"].data_ptr()
    assert ("optimizer_states" in found) == (case != "stage0")
    assert main(["consolidate", str(GOLDEN / case), str(target)]) == 1, "it exists"
    assert main(["consolidate", str(GOLDEN / case), str(target), "--force", "--weights-only"]) == 0
    assert "optimizer_states" not in torch.load(target, weights_only=True)
    assert main(["consolidate", str(GOLDEN / case), str(tmp_path / "x"), "--format", "safetensors"]) == 1


def test_what_is_missing_or_divided(tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(GOLDEN / "stage3", folder)
    save = folder / f"global_step{STEPS}"
    (save / "layer_00-model_states.pt").touch()
    with pytest.raises(CheckpointError, match="pipeline"):
        read_deepspeed(folder)
    (save / "layer_00-model_states.pt").unlink()
    part = save / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = part.read_bytes()
    part.unlink()
    with pytest.raises(CheckpointError, match="2 ranks, but has the files of 1"):
        read_deepspeed(folder)
    part.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_deepspeed(folder)
    with pytest.raises(CheckpointError, match="is not a DeepSpeed checkpoint"):
        read_deepspeed(tmp_path)
    with pytest.raises(ConfigError, match="both source and target"):
        consolidate_deepspeed(folder, folder)


@pytest.mark.parametrize("weights_only", [None, True])
def test_objects_that_are_not_safe_are_built_only_on_demand(tmp_path, weights_only):
    folder, marker = tmp_path / "run", tmp_path / "marker"
    shutil.copytree(GOLDEN / "stage1", folder)
    read_deepspeed(folder, weights_only=weights_only)
    file = folder / f"global_step{STEPS}" / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(file, weights_only=True), "callbacks": Runs(marker)}, file)
    with pytest.raises(CheckpointError, match="read it with weights_only=False"):
        read_deepspeed(folder, weights_only=weights_only)
    assert not marker.exists()
    read_deepspeed(folder, weights_only=False)
    assert marker.exists()


class Module(pl.LightningModule):
    """The checkpoints' network as a module whose names are those of DeepSpeed's run."""

    def __init__(self):
        super().__init__()
        for name, child in Net().named_children():
            self.add_module(name, child)
        self.register_buffer("calls", torch.zeros(2))

    def training_step(self, samples, _):
        return Net.forward(self, samples.flatten(0, 1)).pow(2).mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(groups(self), lr=1e-2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": WarmupLR(optimizer, **RATES), "interval": "step"},
        }

    def train_dataloader(self):
        return DataLoader([batch(STEPS + step, self.global_rank) for step in range(3)], batch_size=1)


def go_on(rank, world_size, stage, path):
    strategy = ZeROStrategy(stage=stage, sharding={"min_unit_numel": 0})
    trainer = bare_trainer(strategy, world_size, max_epochs=1, use_distributed_sampler=False)
    module = Module()
    trainer.fit(module, ckpt_path=path)
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return {k: v.clone() for k, v in strategy.lightning_module_state_dict().items()}, rates


def go_on_from_all(rank, world_size, paths):
    return [go_on(rank, world_size, stage, path) for stage, path in paths]


def test_training_goes_on_here():
    """Four steps under DeepSpeed and three here are seven in plain torch; any stage takes any stage's checkpoint."""
    paths = [(3, str(GOLDEN / "stage1")), (1, str(GOLDEN / "stage3")), (2, str(GOLDEN / "stage3"))]
    found = spawn(go_on_from_all, 2, paths, init_process_group=False)[0]
    model, optimizer = trained(STEPS + 3)
    for weights, rates in found:
        assert rates == [group["lr"] for group in optimizer.param_groups]
        for name, value in model.named_parameters():
            torch.testing.assert_close(weights[name], value.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_checkpoints_of_the_installed_deepspeed(tmp_path):
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    command = [sys.executable, str(GOLDEN / "make_checkpoints.py"), str(tmp_path), str(free_port())]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for case in CASES:
        check_case(tmp_path / case, case)
