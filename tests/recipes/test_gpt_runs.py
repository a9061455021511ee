"""The program as a user runs it: several ranks, from the command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jsonargparse")
pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.recipes import programs

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "recipes" / "gpt" / "configs"

TINY = [
    "--trainer.max_steps=6", "--trainer.val_check_interval=3", "--trainer.log_every_n_steps=1",
    "--model.config.num_layers=2", "--model.config.width=64", "--model.optim.warmup_steps=2",
    "--model.sample.max_new_tokens=8", "--data.block_size=32", "--data.batch_size=4", "--data.val_crops=16",
    "--data.corpus.max_bytes=200000",
]  # fmt: skip


def fit(folder: Path, configs: list[str], *options: str, **more: Any) -> str:
    """Standard output of a run whose logs and caches are below ``folder``."""
    cache = f"--data.corpus.cache_dir={folder / 'cache'}"
    return programs.fit(folder, configs, cache, *options, recipe="gpt", **more)


def scalars(folder: Path) -> dict[str, list[float]]:
    (run,) = folder.glob("gpt*/version_0")
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    return {tag: [e.value for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_two_ranks_at_stage_3_train_log_sample_and_save(tmp_path: Path) -> None:
    two_steps = ["--trainer.max_steps=2", "--trainer.val_check_interval=1"]
    with programs.warm("jsonargparse", "lightning.pytorch.cli", "torch.utils.tensorboard") as python:
        output = fit(tmp_path, ["base", "zero3"], *TINY, *two_steps, python=python)
    assert re.findall(r"-+ step (\d+) -+\ndef ", output) == ["1", "2"]  # once each, though both ranks generate
    logged = scalars(tmp_path)
    assert len(logged["train/loss"]) == 2
    assert len(logged["val/loss"]) == 2
    groups = sorted({tag.split("/")[0] for tag in logged})  # as TensorBoard shows them; it opens the first two
    assert groups[:2] == ["train", "val"]
    assert all(group.startswith("zero") for group in groups[2:])
    assert logged.keys() >= {"val/bits_per_byte", "train/lr/pg1", "zero/tokens_per_s", "zero_memory_mib/masters"}
    assert {f.stem for f in tmp_path.glob("gpt/version_0/checkpoints/*.ckpt")} >= {"last"}


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, list[float]]]:
    """Options that resume after three steps of Lightning's DDP, and what three more steps of DDP log from there."""
    folder = tmp_path_factory.mktemp("ddp")
    fit(folder / "first", ["base", "ddp"], *TINY, "--trainer.max_steps=3", "--model.optim.total_steps=6")
    (checkpoint,) = folder.glob("first/gpt/version_0/checkpoints/last.ckpt")
    options = [*TINY, "--model.optim.total_steps=6", f"--ckpt_path={checkpoint}"]
    options.append(f"--data.corpus.cache_dir={folder / 'cache'}")
    fit(folder / "second", ["base", "ddp"], *options)
    return options, scalars(folder / "second")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("overlay", ["zero0", "zero1", "zero2", "zero3"])
def test_every_stage_has_the_losses_of_ddp(trusted, tmp_path: Path, overlay: str) -> None:
    """From a checkpoint of DDP, equal but for the order of summation.

    Not from the start: stage 3 fills the network unit by unit, and so draws other initial weights from the same seed.
    """
    options, losses_of_ddp = trusted
    fit(tmp_path, ["base", overlay], *options)
    ours = scalars(tmp_path)
    assert len(ours["train/loss"]) == 3
    for name in ("train/loss", "val/loss"):
        assert ours[name] == pytest.approx(losses_of_ddp[name], rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quickstart_learns(tmp_path: Path) -> None:
    """Well below guessing by frequency alone, which costs about 3.2 nats per byte of Python."""
    output = fit(tmp_path, ["quickstart"], timeout=800)
    assert scalars(tmp_path)["val/loss"][-1] < 2.2
    assert output.count("def ") >= 2
