"""What ``ls-strategy submit --to torchrun`` writes runs here as printed, and survives SIGTERM."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.limits import wall
from tests.processes import output_of

pytestmark = [pytest.mark.wide, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]

PROGRAM = '''
"""A program with LightningCLI, slow enough to be interrupted."""

import time
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel


class Model(BoringModel):
    def __init__(self, note: str = "", pause_s: float = 0.0) -> None:
        super().__init__()
        self.note, self.pause_s = note, pause_s

    def training_step(self, batch, batch_idx):
        time.sleep(self.pause_s)
        if self.global_rank == 0:
            Path("step").write_text(str(self.trainer.global_step))
        return super().training_step(batch, batch_idx)

    def on_fit_start(self):
        if self.global_rank == 0:
            print(f"WORLD {self.trainer.world_size} NOTE {self.note!r}", flush=True)

    def on_train_start(self):
        if self.global_rank == 0:
            print(f"BEGINS AT {self.trainer.global_step}", flush=True)

    def on_fit_end(self):
        if self.global_rank == 0:
            print(f"ENDED AT {self.trainer.global_step}", flush=True)


if __name__ == "__main__":
    LightningCLI(Model, BoringDataModule, save_config_callback=None)
'''

CONFIG = """
trainer:
  accelerator: cpu
  strategy: zero3
  max_steps: 60
  max_epochs: 1
  limit_val_batches: 0
  logger: false
  enable_progress_bar: false
"""

NOTE = 'two words, it\'s "so" $HOME'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A program whose path has a space."""
    folder = tmp_path / "my program"
    (folder / "toy" / "configs").mkdir(parents=True)
    (folder / "toy" / "__main__.py").write_text(PROGRAM)
    (folder / "toy" / "configs" / "base run.yaml").write_text(CONFIG)
    return folder


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def written(folder: Path, *words: str) -> list[str]:
    """Write the script as a user does; the command that is printed to start it."""
    options = ["toy/configs/base run.yaml", "--name=toy", "--to=torchrun", "--tasks-per-node=2"]
    printed = output_of(
        [sys.executable, "-m", "ls_strategy.cli", "submit", *options, "--", f"--model.note={NOTE}", *words],
        cwd=folder,
        env=environment(),
        timeout=120,
    )
    (command,) = re.findall(r"start it +(.*)", printed)
    return ["bash", "-c", f"exec {command}"]


def test_a_run_of_two_ranks_ends(folder: Path) -> None:
    printed = output_of(written(folder), cwd=folder, env=environment(), timeout=300)
    assert f"WORLD 2 NOTE {NOTE!r}" in printed
    assert "ENDED AT 32" in printed or "ENDED AT 60" in printed


@pytest.mark.slow
def test_sigterm_saves_and_the_same_command_continues(folder: Path) -> None:
    command = written(folder, "--model.pause_s=0.2")
    first = subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        begin = time.monotonic()
        while not (folder / "step").exists() or int((folder / "step").read_text() or 0) < 3:
            assert first.poll() is None
            assert time.monotonic() - begin < wall(300)
            time.sleep(0.05)
        first.send_signal(signal.SIGTERM)
        said, _ = first.communicate(timeout=180)
    finally:
        first.kill()
    assert first.returncode != 0
    saved = [path.name for path in (folder / "preemption" / "local").glob("step=*.ckpt")]
    assert len(saved) == 1, said[-3000:]
    step = int(saved[0].removeprefix("step=").removesuffix(".ckpt"))
    assert 3 <= step < 32
    again = output_of(command, cwd=folder, env=environment(), timeout=300)
    assert f"BEGINS AT {step}" in again
    assert re.search(r"ENDED AT \d+", again)
