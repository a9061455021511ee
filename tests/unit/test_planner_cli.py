"""``ls-strategy plan`` on a small LightningCLI program."""

from __future__ import annotations

import argparse
import json
import os
import sys

import pytest
import torch

from ls_strategy.errors import ConfigError, PlanError
from ls_strategy.extras import cli
from ls_strategy.extras.cli import plan
from ls_strategy.extras.planner import learned
from ls_strategy.extras.planner.hardware import Hardware
from ls_strategy.extras.planner.learned import add
from tests.unit.test_cli_json import check
from tests.unit.test_planner_learned import HERE, STEP, measured

pytest.importorskip("jsonargparse")
PROGRAM = """
import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(pl.LightningModule):
    def __init__(self, width: int = 64):
        super().__init__()
        self.early = nn.Linear(8, width)
        assert self.early.weight.is_meta  # never built
        self.width = width

    def configure_model(self):
        block = lambda: nn.Sequential(nn.Linear(self.width, self.width), nn.Tanh())
        self.blocks = nn.ModuleList(block() for _ in range(3))
        assert next(self.blocks.parameters()).is_meta

    def training_step(self, batch, batch_idx):
        x = self.early(batch[0])
        for block in self.blocks:
            x = block(x)
        loss = x.square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        steps = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.AdamW(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)]


class Data(pl.LightningDataModule):
    def __init__(self, source: str = "here", batch_size: int = 4):
        super().__init__()
        self.source, self.batch_size = source, batch_size

    def prepare_data(self):
        if self.source != "here":
            raise OSError(f"cannot download {self.source}")

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.zeros(40, 8)), batch_size=self.batch_size)


if __name__ == "__main__":
    LightningCLI(Model, Data)
"""
CONFIG = """
trainer:
  accelerator: gpu
  devices: 2
  max_steps: 7
  precision: bf16-true
  strategy:
    class_path: ls_strategy.ZeROStrategy
    init_args: {stage: 3, sharding: {min_unit_numel: 0}, parallel: {pipeline: {size: 2, micro_batches: 6}}}
model:
  width: 128
"""

BLOCK = "nn.TransformerEncoderLayer(self.width, 1, self.width, batch_first=True)"


def run(*words):
    parser = argparse.ArgumentParser()
    plan.add(parser.add_subparsers())
    args = parser.parse_args(["plan", *map(str, words)])
    return args.run(args)


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prog").mkdir()
    (tmp_path / "prog" / "__init__.py").touch()
    (tmp_path / "prog" / "__main__.py").write_text(PROGRAM)
    (tmp_path / "prog" / "base.yaml").write_text(CONFIG)
    variables = dict(os.environ)
    yield "prog/base.yaml"
    for name in [name for name in sys.modules if name.split(".")[0] == "prog"]:
        del sys.modules[name]
    for name in os.environ.keys() - variables.keys():  # Lightning's
        del os.environ[name]


def test_every_option_of_the_machine_reaches_the_plan():
    machine = "--gpus 16 --node-size 8 --gpu-memory 80GB --host-memory 1TB --nvme 4TB"
    speeds = "--tflops 300 --link 50 --inter-node 100Gbit --bus 20 --drive 3"
    args = cli.parse(f"plan x.yaml {machine} {speeds}".split())
    assert plan.hardware_of(args, {}) == Hardware(
        ranks=16, ranks_per_node=8, device="cuda", device_memory=80 * 10**9, host_memory=10**12, drive=4 * 10**12,
        tflops=300, link_gbs=50, node_gbs=12.5, bus_gbs=20, drive_gbs=3,
    )  # fmt: skip


@pytest.mark.wide
def test_a_plan_in_json(config, capsys):
    """It has one amount of states and of traffic, in both of its tables."""
    more = ("--scaling", "--", "--trainer.accumulate_grad_batches=2")
    assert run(config, "--gpus", 8, "--gpu-memory", "2GB", "--json", *more) == 0
    told = check("plan", capsys.readouterr().out)
    assert told["parameters"] == 8 * 128 + 128 + 3 * (128 * 128 + 128)
    assert told["ranks"] == 8
    assert told["batch"] == "(4, 8) float32"
    assert told["first_that_fits"] == "zero0"
    assert "lightest" not in told
    assert told["pipeline_bubbles"]["1f1b"] == pytest.approx(1 / 7)
    first = told["strategies"][0]
    assert first["fits"]
    assert first["states"]["device"]["optimizer"] >= 8 * told["parameters"]
    table = {row["name"]: row for row in told["strategies"]}
    rows = [row for row in told["scaling"] if row["ranks"] == 8]
    assert len(rows) == 4
    for row in rows:
        same = table[f"zero{row['stage']}"]
        assert row["sent_bytes"] == same["sent_bytes_per_step"]
        assert row["state_bytes"] == sum(sum(kinds.values()) for kinds in same["states"].values())


@pytest.mark.wide
def test_a_plan_follows_what_was_measured_here_until_it_is_forgotten(config, capsys, tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir(mode=0o700)
    monkeypatch.setattr(learned, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setenv(learned.SWITCH, "1")
    here = learned.machine_of(torch.device("cpu"), 2, 2, "32-true")
    assert add(measured(STEP, HERE, machine=here))
    assert add(measured(STEP, HERE, machine=here.replace("2 ranks", "3 ranks")))
    words = (config, "--host-memory", "8GB", "--json", "--", "--trainer.accelerator=cpu", "--trainer.precision=32-true")
    assert run(*words) == 0
    told = check("plan", capsys.readouterr().out)
    assert told["earlier_runs"] == 1
    seconds = {each["name"]: each["seconds_per_step"] for each in told["strategies"]}
    assert seconds[told["fastest"]][1] == min(each[1] for each in seconds.values())
    assert run("--forget") == 0
    assert capsys.readouterr().out.startswith("removed 2 measured run(s): ")
    assert run(*words) == 0
    told = check("plan", capsys.readouterr().out)
    assert told["earlier_runs"] == 0
    assert all(each["seconds_per_step"] is None for each in told["strategies"])


@pytest.mark.wide
def test_a_plan_for_slow_links_between_nodes(config, capsys):
    """What sends least between nodes is fastest on a slow network, and the bytes of a node share its link."""
    words = ("--gpus=16", "--node-size=8", "--gpu-memory=80GB", "--tflops=300", "--link=100", "--inter-node=1Gbit")
    assert run(config, *words, "--json") == 0
    result = check("plan", capsys.readouterr().out)
    by_name = {s["name"]: s for s in result["strategies"]}
    assert result["fastest"].endswith("shard_size=node")
    between = {name: s["sent_bytes_between_nodes_per_step"] for name, s in by_name.items()}
    assert between["zero1, shard_size=node"] < between["zero1"] / 4
    assert by_name["zero1"]["seconds_per_step"][0] >= between["zero1"] * 8 / 0.125e9
    assert run(config, *words) == 0
    out = capsys.readouterr().out
    assert "between nodes" in out
    assert "the fastest that fits, at most" in out


@pytest.mark.wide
def test_a_search_needs_blocks(config):
    with pytest.raises(PlanError, match="no single ModuleList or Sequential of two or more blocks"):
        run(config, "--gpus=8", "--gpu-memory=80GB", "--tflops=300", "--link=50", "--search")


@pytest.mark.slow
def test_a_search_prints_and_tells_what_to_set(config, capsys, tmp_path):
    program = tmp_path / "prog" / "__main__.py"
    program.write_text(PROGRAM.replace("nn.Sequential(nn.Linear(self.width, self.width), nn.Tanh())", BLOCK))
    words = (config, "--gpus=8", "--gpu-memory=80GB", "--tflops=300", "--link=50", "--search")
    assert run(*words, "--json") == 0
    found = check("plan", capsys.readouterr().out)["search"]
    assert found["global_batch"] == 4 * 8
    assert found["front"]
    assert run(*words) == 0
    out = capsys.readouterr().out
    assert "memory against time, with a global batch of 32 samples" in out
    assert "the global batch stays 32." in out


@pytest.mark.slow
def test_the_longest_samples_and_the_largest_micro_batch(config, capsys, tmp_path):
    program = tmp_path / "prog" / "__main__.py"
    longer = PROGRAM.replace("torch.zeros(40, 8)", "torch.zeros(40, 16, 8)")
    program.write_text(longer.replace("nn.Sequential(nn.Linear(self.width, self.width), nn.Tanh())", BLOCK))
    words = (config, "--gpus=8", "--gpu-memory=1.2GB", "--longest")
    assert run(*words, "--json") == 0
    told = check("plan", capsys.readouterr().out)
    found = told["longest"]
    assert (found["tokens_per_sample_now"], found["samples_now"]) == (16, 4)
    assert found["model_accepts_the_longest"]
    by_name = {row["name"]: row for row in found["strategies"]}
    assert by_name.keys() == {row["name"] for row in told["strategies"]}
    plain, recomputed = by_name["zero0"], by_name["zero0, full recompute"]
    assert 16 < plain["longest_sample_tokens"] < recomputed["longest_sample_tokens"]
    assert 4 < plain["largest_micro_batch_samples"] < recomputed["largest_micro_batch_samples"]
    assert plain["bytes_per_added_token"] > recomputed["bytes_per_added_token"] > 0
    assert run(*words) == 0
    out = capsys.readouterr().out
    assert "what fits: longer samples, with 4 in a batch, or more samples, of 16 tokens:" in out
    assert f"{plain['longest_sample_tokens']:,} tokens" in out


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (("--gpus=8", "--longest"), ConfigError, "Got --longest without a limit of memory. Give --gpu-memory"),
        (("--gpus=8", "--gpu-memory=4GB", "--longest"), PlanError, "no length of a sequence"),
    ],
)
def test_what_the_longest_samples_need(config, words, error, message, tmp_path):
    program = tmp_path / "prog" / "__main__.py"
    program.write_text(
        PROGRAM.replace("torch.zeros(40, 8)", "torch.zeros(40)").replace("batch[0]", "batch[0][:, None].expand(-1, 8)")
    )
    with pytest.raises(error, match=message):
        run(config, *words)


@pytest.mark.wide
def test_a_plan_for_too_small_a_machine(config, capsys):
    assert run("--config", config, "--gpus", 8, "--gpu-memory", "1GB", "--scaling") == 1
    text = capsys.readouterr().out
    assert "nothing fits." in text
    assert "prog: 50,688 parameters in bf16-true" in text
    assert "4,096 ranks" in text


@pytest.mark.wide
def test_options_of_the_program_count_over_its_files(config, capsys):
    more = ("--", "--model.width=64", "--data.batch_size", 5, "--trainer.devices=3", "--trainer.accelerator=cpu")
    assert run(config, "--json", *more) == 0
    told = check("plan", capsys.readouterr().out)
    assert told["parameters"] == 8 * 64 + 64 + 3 * (64 * 64 + 64)
    assert told["batch"] == "(5, 8) float32"
    assert told["ranks"] == 3
    assert run(config, "--json", "--", "--trainer.strategy.init_args.parallel.pipeline.micro_batches=8") == 0
    assert json.loads(capsys.readouterr().out)["pipeline_bubbles"]["1f1b"] == pytest.approx(1 / 9)


@pytest.mark.parametrize(
    ("devices", "number"), [(3, 3), ("3", 3), ([0, 2], 2), ("0,2", 2), ("auto", 0), (-1, 0), ("-1", 0), (None, 0)]
)
def test_devices_that_a_trainer_takes(devices, number):
    assert plan.devices_named(devices) == number


@pytest.mark.wide
def test_a_program_that_cannot_begin_says_so_and_how_to_change_it(config):
    with pytest.raises(ConfigError, match=r"prog ended with OSError .*: cannot download there\. Raised at .* after --"):
        run(config, "--", "--data.source=there")
    assert run(config, "--json", "--", "--data.source=here") == 0


@pytest.mark.wide
def test_what_is_no_program(config, tmp_path):
    with pytest.raises(ConfigError, match="is no file"):
        run("nowhere.yaml")
    with pytest.raises(ConfigError, match="Got no YAML file"):
        run()
    (tmp_path / "prog" / "other.py").write_text("print('hello')")
    with pytest.raises(ConfigError, match="made no LightningCLI"):
        run(config, "--module", "prog.other")
    (tmp_path / "prog" / "base.yaml").write_text("model: {height: 3}")
    with pytest.raises(ConfigError, match="ended with status"):
        run(config)
