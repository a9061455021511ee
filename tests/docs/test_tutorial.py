"""docs/tutorial.md is one session: its files and commands in order, and what they print is what the page shows.

By default files and options are checked without a run; ``-m wide`` walks through the page. Its processes share the
imports of torch and Lightning, which would take most of the time: see `tests.docs.warm_python`. That such a program
runs with an ordinary Python, too, is a test of ``ls-strategy new``.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch  # noqa: F401  (sets environment variables when it is imported)
import pytest

from ls_strategy.extras import cli
from tests.docs import warm_python
from tests.docs.blocks import ROOT, Block, blocks_of
from tests.docs.test_blocks import check_own, commands_of, environment
from tests.limits import wall

PAGE = ROOT / "docs" / "tutorial.md"
BLOCKS = blocks_of(PAGE)
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?")


# --- what the page shows against what is printed ----------------------------------------------------------------------


def numbers_agree(shown: str, printed: str) -> bool:
    """Whether two numbers differ by at most one in the last digit that is shown; integers must be equal."""
    decimals = len(shown.partition(".")[2])
    difference = abs(float(shown.replace(",", "")) - float(printed.replace(",", "")))
    return shown == printed or (decimals > 0 and difference < 1.5 * 10**-decimals)


def lines_agree(shown: str, printed: str) -> bool:
    """Whether a printed line begins with the shown one; spaces between words do not count."""
    shown, printed = " ".join(shown.split()), " ".join(printed.split())
    numbers = NUMBER.findall(shown)
    pattern = r"(?<![\w.])(\d+(?:,\d{3})*(?:\.\d+)?)".join(re.escape(text) for text in NUMBER.split(shown))
    match = re.match(pattern, printed)
    return match is not None and all(numbers_agree(a, b) for a, b in zip(numbers, match.groups(), strict=True))


def first_missing(shown: str, printed: str) -> str | None:
    """The first shown line that is not printed, in this order; ``...`` stands for any lines."""
    rest = iter(printed.splitlines())
    for line in shown.splitlines():
        if line.strip() != "..." and not any(lines_agree(line, other) for other in rest):
            return line
    return None


@pytest.mark.parametrize(
    ("shown", "printed", "agree"),
    [
        ("val/loss: 0.1405", "val/loss: 0.1405", True),
        ("val/loss: 0.1405", "val/loss: 0.1406", True),
        ("val/loss: 0.1405", "val/loss: 0.1407", False),
        ("val/loss: 0.1405", "val/loss: 1.1405", False),
        ("val/loss: 0.1405", "val/accuracy: 0.1405", False),
        ("step              30", "step 30", True),
        ("step              30", "step 31", False),
        ("step              30", "step 300", False),
        ("796,938 parameters", "796,938 parameters in 6 units", True),
        ("796,938 parameters", "796,939 parameters in 6 units", False),
        ("  a  b", "a b c", True),
        ("a", "b a", False),
    ],
)
def test_a_line_agrees_with_what_it_shows_only(shown: str, printed: str, agree: bool) -> None:
    assert lines_agree(shown, printed) is agree


def test_lines_have_an_order() -> None:
    assert first_missing("a\n...\nc\n", "a\nb\nc\n") is None
    assert first_missing("c\n...\na\n", "a\nb\nc\n") == "a"
    assert first_missing("a\na\n", "a\n") == "a"


# --- without a run ----------------------------------------------------------------------------------------------------


def edited(text: str, block: Block) -> str:
    """A file after the change that a diff block shows."""
    lines = block.text.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if not line.startswith("+"))
    new = "".join(line[1:] for line in lines if not line.startswith("-"))
    assert text.count(old) == 1, f"{block}: what it changes stands in the file {text.count(old)} times"
    return text.replace(old, new)


def test_every_block_is_part_of_the_session() -> None:
    steps = re.findall(r"^## (?:Before|Step (\d)):", PAGE.read_text(), re.MULTILINE)
    assert steps == ["", *"1234567"]
    for block, after in zip(BLOCKS, [*BLOCKS[1:], None], strict=True):
        kind = (block.language, bool(block.saved_as or block.edits or block.marker in ("output", "serve")))
        assert kind in {("bash", False), ("bash", True), ("python", True), ("yaml", True), ("diff", True), ("", True)}
        if block.language == "bash" and block.marker != "serve" and not block.code.startswith("ls-strategy new"):
            assert after is not None, f"{block}: the page does not say what one sees"
            assert after.marker == "output", f"{block}: the page does not say what one sees"


def test_each_step_shows_a_number() -> None:
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[2:8]:
        if section.startswith(("Step 6",)):
            continue
        assert re.search(r"<!-- test: output -->\n```\n(?:.*\n)*?.*\d.*\n(?:.*\n)*?```", section), section[:40]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "sorting"]) == 0
    folder = tmp_path / "sorting"
    for block in BLOCKS:
        if block.saved_as:
            (folder / block.saved_as).write_text(block.text)
        if block.edits:
            (folder / block.edits).write_text(edited((folder / block.edits).read_text(), block))
    monkeypatch.chdir(folder)
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("sorting", "main"):
            del sys.modules[name]


def program_options(words: list[str]) -> list[str]:
    """The words that the program ``main.py`` gets, without the subcommand."""
    options = words[words.index("main.py") + 2 :]
    return options[: options.index("&")] if "&" in options else options


@pytest.mark.wide
def test_files_and_options_are_taken(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse")
    compile((project / "plain.py").read_text(), "plain.py", "exec")
    monkeypatch.setattr(sys, "argv", ["main.py"])
    from importlib import import_module

    parser: Any = import_module("main").main(["--config=quick.yaml", "--trainer.devices=1"], run=False).parser
    fits = 0
    for block in BLOCKS:
        for words in commands_of(block) if block.language == "bash" else []:
            if words[0] == "ls-strategy":
                check_own(words)
            elif "main.py" in words:
                assert words[words.index("main.py") + 1] == "fit"
                options = [word for word in program_options(words) if "ckpt_path" not in word and "saved/" not in word]
                parser.parse_args(options)
                fits += 1
            else:
                assert shlex.join(words[:2]) in {
                    "cd sorting", "python plain.py", "wait", "tensorboard --logdir", "bash submit.sh"
                }  # fmt: skip
    assert fits == 10


# --- the walk ---------------------------------------------------------------------------------------------------------


IMPORTED = (
    "lightning.pytorch.cli", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.pipelining",
    "torch.distributed.run", "torch.distributed.tensor.parallel", "torch.utils.tensorboard",
)  # fmt: skip
"""What the page's programs need of other packages. They import `ls_strategy` by themselves, as it is the one tested."""


class Session:
    """A shell whose folder persists from one block to the next; a context."""

    def __init__(self, folder: Path) -> None:
        self.commands = folder / "bin"
        self.environment = environment(folder) | {"COLUMNS": "200"}
        # A reader's Python keeps what it has compiled, so that the next command need not do it again.
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self.folder = folder
        self.place = folder / "place"
        self.ends = contextlib.ExitStack()

    def __enter__(self) -> Session:
        """Start the server of `warm_python`, and write the page's commands."""
        # Not in the test's folder, whose path may be too long for a socket.
        address = str(Path(self.ends.enter_context(tempfile.TemporaryDirectory())) / "socket")
        self.ends.enter_context(warm_python.serving(address, IMPORTED, self.environment))
        self.commands.mkdir()
        warm = warm_python.command(address, str(self.commands / "python"))
        for name, words in (
            ("python", warm), ("ls-strategy", [*warm, "-m", "ls_strategy.cli"]),
            ("torchrun", [*warm, "-m", "torch.distributed.run"]),
            ("tensorboard", [sys.executable, "-m", "tensorboard.main"]),
        ):  # fmt: skip
            (self.commands / name).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
            (self.commands / name).chmod(0o755)
        return self

    def __exit__(self, *error: object) -> None:
        """End the server, and what still runs."""
        self.ends.close()

    def run(self, code: str) -> str:
        """Run commands; what they print on both streams."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f"{code}\npwd > {shlex.quote(str(self.place))}"],
            cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{code}\n{done.stdout[-6000:]}"
        self.folder = Path(self.place.read_text().strip())
        return done.stdout

    def tensorboard(self, code: str) -> tuple[str, str]:
        """What the server that ``code`` starts says about scalars and images."""
        port = free_port()
        command = [*shlex.split(code), "--port", str(port), "--host", "127.0.0.1", "--load_fast=false"]
        server = subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            end = time.monotonic() + wall(120)
            while True:
                try:
                    scalars, images = (self._get(port, plugin) for plugin in ("scalars", "images"))
                    if "zero_memory/step" in images and "val/loss" in scalars:
                        return scalars, images
                except OSError:
                    pass
                assert server.poll() is None, "TensorBoard has ended"
                assert time.monotonic() < end, "TensorBoard does not show the runs"
                time.sleep(0.5)
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()

    @staticmethod
    def _get(port: int, plugin: str) -> str:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://127.0.0.1:{port}/data/plugin/{plugin}/tags", timeout=30) as answer:
            return answer.read().decode()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.wide
@pytest.mark.dist
@pytest.mark.timeout(1500)
def test_the_page_from_beginning_to_end(tmp_path: Path) -> None:
    """Every command as printed, but for the port; every number as shown."""
    pytest.importorskip("jsonargparse")
    pytest.importorskip("tensorboard")
    with Session(tmp_path) as session:
        walk(session)
    assert (session.folder / "runs" / "tutorial" / "version_2" / "report.html").is_file()


def walk(session: Session) -> None:
    printed, port = "", str(free_port())
    for block in BLOCKS:
        if block.saved_as:
            (session.folder / block.saved_as).write_text(block.text)
        elif block.edits:
            file = session.folder / block.edits
            file.write_text(edited(file.read_text(), block))
        elif block.marker == "serve":
            scalars, images = session.tensorboard(block.code)
            for tag in ("train/loss", "zero_time/step_ms", "zero_memory_mib/", "zero_traffic/"):
                assert tag in scalars, scalars
            assert "zero_time/step" in images
        elif block.marker == "output":
            missing = first_missing(block.text, printed)
            assert missing is None, f"{block}: {missing!r} is not in\n{printed}"
        else:
            printed = session.run(block.code.replace("PORT", port))
