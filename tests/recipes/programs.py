"""How tests of recipes read their configurations and run their programs."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.docs import warm_python
from tests.processes import Program, output_of

ROOT = Path(__file__).parents[2]


def stem(file: Path) -> str:
    return file.stem


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in tree.items():
        result |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return result


def assert_names_no_place(file: Path) -> None:
    """A configuration works on every machine."""
    values = flatten(yaml.safe_load(file.read_text())).values()
    assert not [v for v in values if isinstance(v, str) and v.startswith(("/", "~"))]


SERVER = """
import sys
from tests.docs import warm_python
asked = warm_python._serve(*sys.argv[1:])
if asked is not None:
    asked.enter()
    asked.run()
"""


@contextlib.contextmanager
def warm(*modules: str) -> Iterator[str]:
    """A ``python`` whose programs, and the ranks that these start, are forks of a process with these modules."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Program(SERVER, f"{folder}/socket", *modules) as server,
    ):
        assert server.stdout.readline() == "started\n"
        python = Path(folder, "python")
        python.write_text(f'#!/bin/sh\nexec {shlex.join(warm_python.command(f"{folder}/socket", str(python)))} "$@"\n')
        python.chmod(0o755)
        yield str(python)


def fit(
    folder: Path, configs: list[str], *options: str, recipe: str, timeout: int = 150, python: str = sys.executable
) -> str:
    """Standard output of a run whose logs are below ``folder``."""
    files = (ROOT / "recipes" / recipe / "configs" / f"{name}.yaml" for name in configs)
    command = [python, "-m", f"recipes.{recipe}", "fit", *(f"--config={file}" for file in files)]
    command += [f"--trainer.logger.init_args.save_dir={folder}", *options]
    names = ("WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {k: v for k, v in os.environ.items() if k not in names} | {"OMP_NUM_THREADS": "1"}
    return output_of(command, cwd=ROOT, env=environment, timeout=timeout)
