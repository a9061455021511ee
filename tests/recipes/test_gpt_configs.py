"""Every configuration on disk is one the program takes, and an overlay says only what it changes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

pytest.importorskip("jsonargparse")

import torch

from recipes.gpt.main import GPTCLI, main
from recipes.gpt.network import GPT, GPTConfig
from tests.recipes.programs import assert_names_no_place, flatten, stem

CONFIGS = Path(__file__).parents[2] / "recipes" / "gpt" / "configs"
STANDALONE = {"base.yaml", "quickstart.yaml"}
FILES = sorted(CONFIGS.glob("*.yaml"))
OVERLAYS = [f for f in FILES if f.name not in STANDALONE]


def config_args(file: Path) -> list[str]:
    files = [file] if file.name in STANDALONE else [CONFIGS / "base.yaml", file]
    return [f"--config={f}" for f in files]


def build(args: list[str], folder: Path) -> GPTCLI:
    """The objects, from arguments alone and not from those of pytest."""
    options = ["--trainer.devices=1", f"--trainer.logger.init_args.save_dir={folder}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["recipes.gpt"])
        return main([*args, *options], run=False)


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> GPTCLI:
    """The program on base.yaml, for a smaller network and sequence."""
    smaller = ["--model.config.num_layers=1", "--data.block_size=64"]
    return build([*config_args(CONFIGS / "base.yaml"), *smaller], tmp_path_factory.mktemp("runs"))


@pytest.mark.wide
@pytest.mark.sample(2)
@pytest.mark.parametrize("file", FILES, ids=stem)
def test_parses(cli: GPTCLI, file: Path) -> None:
    """Every name and type is checked; nothing is built."""
    parsed = cli.parser.parse_args(config_args(file))
    assert parsed.trainer.max_steps > 0
    assert parsed.model.config.vocab_size >= 256
    assert parsed.model.config.block_size == parsed.data.block_size


@pytest.mark.wide
@pytest.mark.parametrize("name", ["zero0", "zero1", "zero2", "zero3", "ddp"])
def test_a_strategy_goes_on_top_of_any_size(cli: GPTCLI, name: str) -> None:
    args = [*config_args(CONFIGS / "gpt_7b.yaml"), f"--config={CONFIGS / name}.yaml"]
    parsed = cli.parser.parse_args(args)
    assert parsed.trainer.strategy == name
    assert parsed.model.config.width == 4096
    monitors = [
        c for c in parsed.trainer.callbacks if c.class_path.endswith("Monitor") and "ls_strategy" in c.class_path
    ]
    assert len(monitors) == (name != "ddp")  # Monitor reads shards and refuses other strategies


@pytest.mark.parametrize("file", OVERLAYS, ids=stem)
def test_overlays_say_only_what_they_change(file: Path) -> None:
    """But for the strategy: its overlays go on top of others, too."""
    base = flatten(yaml.safe_load((CONFIGS / "base.yaml").read_text()))
    overlay = flatten(yaml.safe_load(file.read_text()))
    assert not {k for k, v in overlay.items() if k in base and base[k] == v} - {"trainer.strategy"}


@pytest.mark.parametrize("file", FILES, ids=stem)
def test_names_no_place_on_this_machine(file: Path) -> None:
    assert_names_no_place(file)


def test_builds_what_the_base_says(cli: GPTCLI) -> None:
    assert type(cli.trainer.strategy).__name__ == "ZeROStrategy"
    assert {type(c).__name__ for c in cli.trainer.callbacks} >= {"Monitor", "LearningRateMonitor", "ModelCheckpoint"}  # type: ignore[attr-defined]
    assert cli.model.config.width == 128


def test_the_data_decides_vocabulary_and_length(cli: GPTCLI) -> None:
    assert (cli.model.config.vocab_size, cli.model.config.block_size) == (256, 64)
    parsed = cli.parser.parse_args(config_args(CONFIGS / "gpt2_124m.yaml"))
    assert (parsed.model.config.vocab_size, parsed.model.config.block_size) == (50304, 1024)


def test_a_misspelt_option_is_refused(cli: GPTCLI, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parser.parse_args([*config_args(CONFIGS / "base.yaml"), "--model.config.layers=2"])
    assert "layers" in capsys.readouterr().err


def test_no_progress_bar_needs_no_other_change(tmp_path: Path) -> None:
    """The base file has one in its callbacks, which Lightning refuses beside the option."""
    cli = build([*config_args(CONFIGS / "base.yaml"), "--trainer.enable_progress_bar=false"], tmp_path)
    assert cli.trainer.progress_bar_callback is None
    assert len(cli.trainer.callbacks) > 2


@pytest.mark.wide
def test_print_config_is_the_manual(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["recipes.gpt"])
    with pytest.raises(SystemExit) as end:
        main(["fit", *config_args(CONFIGS / "quickstart.yaml"), "--print_config"])
    assert end.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["trainer"]["strategy"] == "zero3"
    assert printed["model"]["config"]["rotary_base"] == 10000.0


def test_help_shows_the_docstrings_of_options(cli: GPTCLI, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parser.parse_args(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "Width of the residual stream" in shown
    assert "sequences per rank and step" in shown


@pytest.mark.parametrize(
    ("overlay", "billions"), [("gpt2_124m", 0.124), ("gpt_1b3", 1.3), ("gpt_7b", 6.7), ("gpt_13b", 13.0)]
)
def test_sizes_are_what_their_names_say(overlay: str, billions: float) -> None:
    """Within 4 %: names are rounded, and so is SwiGLU's width."""
    content = yaml.safe_load((CONFIGS / f"{overlay}.yaml").read_text())
    shape = content["model"]["config"] | {"block_size": content["data"]["block_size"], "vocab_size": 50304}
    with torch.device("meta"):
        model = GPT(GPTConfig(**shape))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.04)
