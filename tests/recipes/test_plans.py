"""Every configuration of the recipes that train from scratch can be planned, and each recipe trains by `zero_auto`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("jsonargparse")

from ls_strategy.extras.cli import main
from recipes.cifar import stand_in
from tests.recipes import programs
from tests.recipes.programs import ROOT

ALONE = {"gpt/quickstart"}
"""Not an overlay of base.yaml."""

CONFIGS = {
    f"{recipe}/{file.stem}": file
    for recipe in ("cifar", "gpt", "moe")
    for file in sorted((ROOT / "recipes" / recipe / "configs").glob("*.yaml"))
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images, and for the caches of texts."""
    folder = tmp_path_factory.mktemp("data")
    stand_in.write(folder)
    return folder


def of_data(recipe: str, data: Path) -> list[str]:
    """Options that need neither the network nor a package for the vocabulary."""
    if recipe == "cifar":
        return [f"--data.data_dir={data}"]
    return [f"--data.corpus.cache_dir={data / 'cache'}", "--data.corpus.tokenizer=bytes"]


@pytest.mark.wide
@pytest.mark.parametrize("name", CONFIGS)
def test_every_configuration_is_planned(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = name.partition("/")[0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ls-strategy"])
    base = [] if name in ALONE or name.endswith("/base") else [CONFIGS[f"{recipe}/base"]]
    files = map(str, [*base, CONFIGS[name]])
    words = ["--gpus", "8", "--gpu-memory", "80GB", "--host-memory", "2TB", "--module", f"recipes.{recipe}", "--json"]
    assert main(["plan", *files, *words, "--", *of_data(recipe, data)]) == 0
    told = json.loads(capsys.readouterr().out)
    by_name = {each["name"]: each for each in told["strategies"]}
    assert by_name[told["first_that_fits"]]["fits"]
    assert all(each["states"]["device"]["optimizer"] > 0 for each in told["strategies"] if each["name"] == "zero0")
    assert told["parameters"] > 1000
    assert not list(tmp_path.iterdir()), "a plan writes nothing"


SMALL = {
    "cifar": ["--data.batch_size=8", "--model.width=8"],
    "gpt": ["--model.config.num_layers=1", "--data.block_size=32", "--data.batch_size=2"],
    "moe": ["--model.config.num_layers=2", "--data.block_size=32", "--data.batch_size=2"],
}


@pytest.mark.wide
@pytest.mark.parametrize("recipe", SMALL)
def test_zero_auto_plans_and_trains(recipe: str, data: Path, tmp_path: Path) -> None:
    options = [
        "strategy=zero_auto",
        "max_steps=1",
        "log_every_n_steps=1",
        "limit_val_batches=0",
        "enable_progress_bar=false",
        "devices=1",
    ]
    words = [*(f"--trainer.{option}" for option in options), *of_data(recipe, data), *SMALL[recipe]]
    programs.fit(tmp_path, ["base"], *words, recipe=recipe)
    (events,) = tmp_path.rglob("events.out.tfevents.*")
    assert events.stat().st_size > 100, "the loss of a step"
