"""Every code block of README.md and of the guides is run, or is a copy of a file that tests run.

By default Python and JSON run, YAML is parsed by the GPT recipe's LightningCLI, and commands by the programs that they
call; ``-m slow`` runs each page and each command by itself, as a reader would.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import LANGUAGES, PAGES, ROOT, Block, blocks_of, program_of, render
from tests.processes import output_of

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PROGRAMS = [page for page in PAGES if program_of(page).strip()]
BASH = [block for block in BLOCKS if block.language == "bash" and block.page.stem != "tutorial"]
"""The tutorial's commands are one session: `tests.docs.test_tutorial`."""
TEST_COMMAND = "python -m pytest -n 2"
SHORTER = {  # options that end a recipe's run after a few steps
    "recipes.gpt": [
        "--trainer.max_steps=2", "--trainer.limit_val_batches=1", "--model.sample.max_new_tokens=4",
        "--data.corpus.max_bytes=200000", "--data.corpus.cache_dir=cache",
    ],
}  # fmt: skip


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def environment(folder: Path) -> dict[str, str]:
    """For programs that start ranks of their own: nothing of a launcher, the checkout's modules, and its commands."""
    launcher = ("WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in launcher}
    path = f"{folder / 'bin'}{os.pathsep}{kept['PATH']}"
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": path}


def run(command: list[str], folder: Path, timeout_s: float = 170) -> str:
    return output_of(command, cwd=folder, env=environment(folder), timeout=timeout_s)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder like the root of a checkout, in which pages leave their files; and this Python's commands."""
    for name in ("docs", "recipes", "tests", "pyproject.toml", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, arguments in (("python", ""), ("ls-strategy", "-m ls_strategy.cli")):
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (commands / name).chmod(0o755)
    for block in BLOCKS:
        if block.saved_as is not None:
            (tmp_path / block.saved_as).write_text(block.text)
    for page in PROGRAMS:
        (tmp_path / f"page_{page.stem}.py").write_text(program_of(page))
    return tmp_path


# --- what there is ------------------------------------------------------------------------------------------------


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    assert len(BLOCKS) > 40
    for page in PAGES:
        found = blocks_of(page)
        assert 2 * len(found) == page.read_text().count("```"), f"{page}: a fence is not closed, or in a line of text"
        for block in found:
            assert block.language in LANGUAGES, f"{block}: no test for {block.language!r}"
            assert block.language or "$ " not in block.text, f"{block}: a command without a language"


def test_quoted_files_are_as_quoted() -> None:
    quoting = [block for block in BLOCKS if block.quotes]
    assert quoting
    for page in {block.page for block in quoting}:
        assert render(page.read_text()) == page.read_text(), f"{page}: run python -m tests.docs.blocks"


def test_only_places_and_sizes_are_replaced() -> None:
    """A reader's program differs from the tested one in numbers, devices, and the folder of a drive."""
    number = re.compile(r'(\w+)=\d+ -> \1=\d+|accelerator="gpu" -> accelerator="cpu"')
    allowed = {
        'nvme_path="nvme" -> nvme_path="nvme", nvme_allow_ram=True',  # a test's folder may be in memory
        'path="nvme" -> path="nvme", allow_ram=True',
        # One island, and its hub in the same process.
        '"10.0.0.1:29400" -> __import__("tests.docs.hub", fromlist=["address"]).address()',
        'secret="secret" -> secret=None',
    }
    for block in of("python", "diff"):
        for old, new in block.replacements:
            assert number.fullmatch(f"{old} -> {new}") or f"{old} -> {new}" in allowed, f"{block}: {old} -> {new}"


# --- Python -----------------------------------------------------------------------------------------------------------


@pytest.mark.wide
@pytest.mark.dist
@pytest.mark.timeout(300)
def test_python_runs(checkout: Path) -> None:
    """All pages, one after the other in one pair of ranks."""
    run(
        [sys.executable, str(ROOT / "tests/docs/run_pages.py"), *(f"page_{p.stem}.py" for p in PROGRAMS)], checkout, 280
    )
    assert (checkout / "runs" / "last.ckpt").is_file()


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: page.stem)
def test_a_page_runs_by_itself(page: Path, checkout: Path) -> None:
    run([sys.executable, f"page_{page.stem}.py"], checkout)


# --- YAML and JSON ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parser() -> Iterator[Any]:
    """LightningCLI of the GPT recipe."""
    pytest.importorskip("jsonargparse")
    from recipes.gpt.main import main

    base = ROOT / "recipes" / "gpt" / "configs" / "base.yaml"
    small = ["--trainer.devices=1", "--model.config.num_layers=1", "--trainer.logger=false", "--data.block_size=64"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["recipes.gpt"])
        yield main([f"--config={base}", *small], run=False).parser


@pytest.mark.sample(3)
@pytest.mark.parametrize("block", of("yaml"), ids=str)
def test_yaml_is_taken_by_the_recipe(block: Block, parser: Any, tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    given = yaml.safe_load(block.code)
    assert "trainer" in given
    if block.saved_as is not None:  # of a program of the page's own: the rest is its model's
        given = {"trainer": given["trainer"]}
    (tmp_path / "block.yaml").write_text(yaml.safe_dump(given))
    parsed = parser.parse_args([f"--config={tmp_path / 'block.yaml'}"])
    strategy = given["trainer"].get("strategy")
    taken = parsed.trainer.strategy
    assert strategy in (None, taken) or taken.class_path == strategy["class_path"]


@pytest.mark.parametrize("block", of("json"), ids=str)
def test_json_is_a_deepspeed_configuration(block: Block) -> None:
    from ls_strategy.extras.deepspeed import translate

    assert translate(json.loads(block.code)).report()


# --- commands ---------------------------------------------------------------------------------------------------------


def commands_of(block: Block) -> list[list[str]]:
    lines = block.code.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def extras(names: list[str]) -> set[str]:
    """With those that they stand for."""
    tomllib = pytest.importorskip("tomllib")
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found: set[str] = set()
    while names:
        name = names.pop()
        assert name in table, f"pyproject.toml has no extra {name!r}"
        found.add(name)
        for requirement in table[name]:
            if inner := re.fullmatch(r"ls_strategy\[(.*)\]", requirement):
                names += inner[1].split(",")
    return found


def check_install(words: list[str]) -> None:
    """``.ci/run`` installs as much."""
    asked = re.fullmatch(r"\.\[(.*)\]", words[-1])
    assert asked, words
    assert words[2:-1] == ["-e"], words
    in_ci = re.search(r'pip install .*-e "\.\[(.*)\]"', (ROOT / ".ci" / "run").read_text())
    assert in_ci
    assert extras(asked[1].split(",")) <= extras(in_ci[1].split(","))


def check_make(words: list[str]) -> None:
    """What a target runs stands in the README, for those who have an environment of their own."""
    (target,) = words[1:]
    found = re.search(rf"^{target}: environment\n\t\$\(VENV\)/bin/(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found, f"no target {target} in Makefile"
    assert f"\n{found[1]}\n" in (ROOT / "README.md").read_text()


def check_own(words: list[str]) -> None:
    """Our own commands take these arguments."""
    from ls_strategy.extras import cli

    parser = argparse.ArgumentParser(prog="ls-strategy")
    subcommands = parser.add_subparsers(required=True)
    for module in cli.SUBCOMMANDS:
        module.add(subcommands)
    parser.parse_args(words[1:])


def check_module(words: list[str], parser: Any) -> None:
    """``python -m``: the tests, a recipe, or the benches."""
    program = words[2]
    if program == "pytest":
        assert shlex.join(words) == TEST_COMMAND
    elif program == "recipes.gpt":
        assert words[3] == "fit"
        parser.parse_args(words[4:])
    elif program == "benchmarks":
        from benchmarks.catalogue import benches

        names = itertools.takewhile(lambda word: not word.startswith("-"), words[3:])
        assert set(names) <= {*benches(), "all"}, words
    elif program == "ls_strategy.conformance":
        from ls_strategy.extras.conformance.__main__ import check

        check(words[3:])
    else:
        raise AssertionError(f"no test for {shlex.join(words)}")


@pytest.mark.parametrize("block", BASH, ids=str)
def test_commands_are_taken(block: Block, parser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installation is as in ``.ci/run``; programs and options exist."""
    monkeypatch.chdir(ROOT)
    for words in commands_of(block):
        if words[:2] == ["pip", "install"]:
            check_install(words)
        elif words[0] == "make":
            check_make(words)
        elif words[0] == "ls-strategy":
            check_own(words)
        elif words[:2] == ["python", "-m"]:
            check_module(words, parser)
        elif words[0] == "export":
            assert all(re.fullmatch(r"[A-Z_]+=\S*", word) for word in words[1:])
        elif words[0] == "torchrun":
            from torch.distributed.run import get_args_parser

            assert get_args_parser().parse_args(words[1:]).training_script == "main.py"
        elif words[0] == "sphinx-build":
            assert " ".join(words[:-1]) in (ROOT / ".ci" / "run").read_text()
        else:
            assert words[0] == "mkdir" or words[:3] == ["python", "train.py", "fit"], f"no test for {words}"


def runs(block: Block) -> bool:
    """Not installation, tests and site, which are steps of ``.ci/run``; nor benches, which have a test of their own.

    Nor a command for each of several nodes, nor one that serves until it is interrupted.
    """
    return not re.match(
        r"ls-strategy meet|make |pip install|python -m pytest|python -m benchmarks|sphinx-build|(export .*\n)?torchrun",
        block.code,
    )


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(400)
@pytest.mark.parametrize("block", [block for block in BASH if runs(block)], ids=str)
def test_commands_run(block: Block, checkout: Path) -> None:
    pytest.importorskip("jsonargparse")
    if "runs/last.ckpt" in block.code:
        run([sys.executable, "page_checkpoints.py"], checkout)
    if "lightning_logs/version_0" in block.code:
        run([sys.executable, "page_monitoring.py"], checkout)
    code = block.code
    for program, shorter in SHORTER.items():
        code = re.sub(
            rf"^(python -m {re.escape(program)} fit .*)$", rf"\1 {' '.join(shorter)}", code, flags=re.MULTILINE
        )
    run(["bash", "-euo", "pipefail", "-c", code], checkout, 380)
