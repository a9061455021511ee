"""Names of strategies: what is nearly one of ours is an error that says so; in a LightningCLI they take options."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from ls_strategy import ZeROStrategy
from ls_strategy.autoload import ALIASES
from ls_strategy.config import nested
from ls_strategy.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
NAMES = [name for name in ALIASES if "strategy" not in name]


@pytest.mark.parametrize(
    ("name", "cure"), [("zero3_ofload", "zero3_offload"), ("ZERO4", "zero3"), ("zer1", "zero1"), ("zero-2", "zero2")]
)
def test_a_misspelt_name_is_an_error_with_the_nearest(name: str, cure: str) -> None:
    with pytest.raises(ConfigError, match=rf"Got strategy='{name.lower()}'.*Set strategy='{cure}'.*zero3_nvme"):
        Trainer(strategy=name, accelerator="cpu")


@pytest.mark.parametrize("name", ["dpp", "ddp_sprawn"])
def test_names_that_are_not_ours_are_lightnings_to_refuse(name: str) -> None:
    with pytest.raises(ValueError, match="invalid strategy name"):
        Trainer(strategy=name, accelerator="cpu")


def build(folder: Path, *arguments: str, **trainer: Any) -> Any:
    path = folder / "base.yaml"
    quiet = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    path.write_text(yaml.safe_dump({"trainer": {**quiet, **trainer}}))
    words = ["--config", str(path), *arguments]
    return LightningCLI(BoringModel, args=words, run=False, save_config_callback=None).trainer.strategy


@pytest.fixture(autouse=True)
def plain_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program"])


@pytest.mark.wide
def test_options_on_top_of_a_name(tmp_path: Path) -> None:
    """The base file says ``strategy: zero0``."""
    strategy = build(tmp_path, "--trainer.strategy.stage", "3", strategy="zero0")
    assert isinstance(strategy, ZeROStrategy)
    assert strategy.config.stage == 3
    strategy = build(tmp_path, "--trainer.strategy.offload.optimizer.ratio", "0.5", strategy="zero2_offload")
    assert strategy.config == ZeROStrategy(2, offload={"optimizer": {"tier": "cpu", "ratio": 0.5}}).config
    strategy = build(tmp_path, strategy={"class_path": "zero1_offload", "init_args": {"precision.moments": "bf16"}})
    assert strategy.config == ZeROStrategy(1, offload={"optimizer": "cpu"}, precision={"moments": "bf16"}).config


@pytest.mark.parametrize("name", NAMES)
def test_a_name_as_a_class_is_the_name(name: str) -> None:
    from ls_strategy import aliases

    assert getattr(aliases, name)().config == ZeROStrategy(**nested(ALIASES[name])).config
    assert getattr(aliases, name)(checkpoint={"frozen": False}).config.checkpoint.frozen is False


@pytest.mark.wide
def test_a_misspelt_name_in_yaml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Set strategy='zero3_offload'"):
        build(tmp_path, strategy="zero3_ofload")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=150, check=False
    )


@pytest.mark.slow
def test_the_recipe_lists_its_commands_and_strategies() -> None:
    top = run("recipes.gpt", "--help").stdout
    assert top.startswith("usage: python -m recipes.gpt ")
    assert "{generate,fit,validate,test,predict}" in top
    listed = run("recipes.gpt", "fit", "--help").stdout
    assert "ls_strategy.ZeROStrategy" in listed
    assert all(f"ls_strategy.aliases.{name}" in listed for name in NAMES)


@pytest.mark.wide
def test_a_wrong_option_of_a_recipe_is_a_line() -> None:
    base = ("fit", "--config", "recipes/gpt/configs/base.yaml")
    done = run("recipes.gpt", *base, "--trainer.strategy.sharding.prefetch_units=-1")
    assert (done.returncode, done.stdout) == (1, "")
    assert "python -m recipes.gpt: error: Got sharding.prefetch_units=-1" in done.stderr
    assert "Traceback" not in done.stderr
