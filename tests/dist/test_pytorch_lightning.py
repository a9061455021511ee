"""A program that imports only `pytorch_lightning` trains as under its own DDP."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import output_of

# Not importorskip: in this process the import would change the logger of other tests.
pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(importlib.util.find_spec("pytorch_lightning") is None, reason="needs pytorch_lightning"),
]

PROGRAM = Path(__file__).with_name("pytorch_lightning_program.py")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("pytorch_lightning")
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LS_STRATEGY_LIGHTNING")}
    done = subprocess.run(
        [sys.executable, PROGRAM, folder], capture_output=True, text=True, timeout=170, check=False, env=inherited
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, json.loads((folder / "rank_0.json").read_text())


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3_offload"])
def test_losses_are_those_of_ddp(ran: tuple[Path, dict[str, Any]], strategy: str) -> None:
    losses = ran[1]["losses"]
    assert losses[strategy] == pytest.approx(losses["ddp"], rel=1e-6)
    assert len(set(losses["ddp"])) == 4


def test_its_callbacks_and_loggers_work(ran: tuple[Path, dict[str, Any]]) -> None:
    folder, found = ran
    assert found["counts"] == 2
    with (folder / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows if row["loss"]] == pytest.approx(found["losses"]["ddp"][:2], rel=1e-5)
    assert any(name.startswith("zero/") for name in rows[0]), "Monitor"


def test_ddp_and_another_stage_resume(ran: tuple[Path, dict[str, Any]]) -> None:
    resumed = ran[1]["resumed"]
    assert len(resumed["ddp"]) == 2
    assert resumed["zero1"] == pytest.approx(resumed["ddp"], rel=1e-6)
    assert ran[1]["loaded"]


def test_its_cli_knows_the_aliases(ran: tuple[Path, dict[str, Any]]) -> None:
    assert len(ran[1]["cli"]) == 2
    assert ran[1]["cli_offload"] == ["cpu"]


def test_the_other_package_is_not_imported(ran: tuple[Path, dict[str, Any]]) -> None:
    assert not ran[1]["other_package"]


def test_a_trainer_of_the_other_package_is_refused(ran: tuple[Path, dict[str, Any]]) -> None:
    refused = ran[1]["refused"]
    assert set(refused) == {"alias", "object"}, "its own strategies still work"
    for message in refused.values():
        assert message.startswith("ConfigError: Got a strategy of ls_strategy for lightning, but this process uses it")
        assert "import everything from lightning.pytorch" in message


@pytest.mark.slow
def test_ranks_that_are_spawned_choose_as_their_parent() -> None:
    inherited = {k: v for k, v in os.environ.items() if k != "LS_STRATEGY_LIGHTNING"}
    command = [sys.executable, "-m", "tests.dist.spawned_program"]
    printed = output_of(command, timeout=170, env=inherited)
    found = [line for line in printed.splitlines() if line.startswith("FOUND")]
    assert found == ["FOUND spawn finished", "FOUND fork finished", *["FOUND pytorch_lightning 2"] * 2]


@pytest.mark.slow
def test_only_pytorch_lightning_is_installed(tmp_path: Path) -> None:
    program = f"""
import sys
sys.modules["lightning"] = None  # its import is an error, as if it were not there
import ls_strategy
for name in ls_strategy.__all__:
    getattr(ls_strategy, name)
import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import BoringModel
options = {{"devices": 1, "accelerator": "cpu", "max_steps": 2, "default_root_dir": {str(tmp_path)!r}}}
trainer = pl.Trainer(strategy="zero3_offload", **options)
trainer.fit(BoringModel())
assert trainer.global_step == 2
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
