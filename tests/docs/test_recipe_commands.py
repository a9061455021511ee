"""Commands in the READMEs of recipes: every program, option and file that they name is there."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import ROOT, blocks_of
from tests.docs.test_blocks import check_install, check_own
from tests.processes import output_of

pytestmark = pytest.mark.slow  # three programs' parsers

PAGES = sorted((ROOT / "recipes").glob("*/README.md"))
PROGRAMS = ("python", "pip", "ls-strategy", "tensorboard", "tar")
SHOW = "".join(f'{name}() {{ printf "%s\\0" {name} "$@" $\'\\n\'; }}\n' for name in PROGRAMS)
"""In place of the programs: their arguments, as the shell gives them."""


def commands(page: Path) -> list[list[str]]:
    """What a shell would run of all blocks of a page, one after the other."""
    blocks = [block for block in blocks_of(page) if block.language == "bash"]
    assert blocks, f"{page} has no command"
    script = SHOW + "\n".join(block.text for block in blocks)
    printed = output_of(["bash", "-eu", "-c", script], timeout=20)
    return [line.split("\0") for line in printed.removesuffix("\0\n\0").split("\0\n\0")]


@pytest.fixture(scope="module")
def parsers() -> dict[str, Any]:
    """Of the recipes' programs, by name."""
    pytest.importorskip("jsonargparse")
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["recipe"])
        for page in PAGES:
            program = f"recipes.{page.parent.name}"
            small = ["--trainer.devices=1", "--trainer.logger=false"]
            if program in ("recipes.gpt", "recipes.moe"):
                small += ["--model.config.num_layers=1", "--data.block_size=64"]
            base = page.parent / "configs" / "base.yaml"
            found[program] = (
                importlib.import_module(f"{program}.main").main([f"--config={base}", *small], run=False).parser
            )
    return found


def check(words: list[str], parsers: dict[str, Any]) -> None:
    if words[:2] == ["pip", "install"]:
        check_install(words)
    elif words[0] == "ls-strategy":
        check_own(words)
    elif words[:2] == ["python", "-m"] and words[2] in parsers and words[3] in ("fit", "validate", "test", "predict"):
        if "..." not in words:
            options = [word for word in words[4:] if not word.startswith("--ckpt_path")]
            parsers[words[2]].parse_args(_without_checkpoint(options))
    elif words[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(words[2]), words
    else:
        assert words[0] in ("tensorboard", "tar"), f"no test for {words}"


def _without_checkpoint(words: list[str]) -> list[str]:
    """Its path is an argument of the subcommand, and not of the parser without one."""
    return [word for i, word in enumerate(words) if word != "PATH" and not (i and words[i - 1] == "--ckpt_path")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_commands_are_taken(page: Path, parsers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for words in commands(page):
        check(words, parsers)


def test_generate_has_the_options_that_the_readme_names() -> None:
    page = ROOT / "recipes" / "gpt" / "README.md"
    printed = output_of([sys.executable, "-m", "recipes.gpt", "generate", "--help"], cwd=ROOT, timeout=170)
    section = page.read_text().split("## Writing text")[1].split("\n## ")[0]
    named = set(re.findall(r"^\| .*?`(--\w+)", section, re.MULTILINE)) | set(
        re.findall(r"generate .*?(--\w+)", section)
    )
    assert len(named) >= 8
    assert not [option for option in named if option not in printed]


def test_a_wrong_option_is_noticed(parsers: dict[str, Any]) -> None:
    for words in (["ls-strategy", "plan", "--nothing"], ["python", "-m", "recipes.gpt", "fit", "--nothing=1"]):
        with pytest.raises((SystemExit, argparse.ArgumentError)):
            check(words, parsers)
