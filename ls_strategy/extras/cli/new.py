"""``ls-strategy new NAME``: write a small project that trains at once.

Nothing that exists is changed: the project is written into a folder of its own beside the target, which is then
renamed. A run that fails or is killed leaves no half of a project under the name.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import keyword
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ls_strategy.errors import ConfigError
from ls_strategy.extras.cli import arguments

TEMPLATES = Path(__file__).with_name("project")
"""Files of the project, each with ``.template`` behind its name: they are not modules of this package."""

_RENAMED = {"package": "{{name}}", "gitignore": ".gitignore"}
_NEEDED = {"jsonargparse": "main.py needs the extra cli", "pytest": "the tests need pytest"}


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``new`` subcommand."""
    parser = subcommands.add_parser(
        "new",
        help="write a small project that trains at once",
        description="Write a folder with a LightningModule, data that needs no download, a LightningCLI program, "
        "configurations for a CPU, two GPUs and two nodes, a test, a SLURM job, and a program for Ray. Nothing that "
        "exists is changed.",
    )
    parser.add_argument(
        "path", metavar="NAME", type=arguments.path, help="folder to create; its last part also names the package"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the project and say how to start."""
    path: Path = args.path
    check_place(path)
    name = check_name(path)
    write(path, name)
    print(f"wrote {path}\n\n  cd {path}\n  python -m pytest -q\n  python main.py fit --config quick.yaml")
    missing = [why for module, why in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(f"\nnote: {', and '.join(missing)}. Install them first: pip install jsonargparse[signatures] pytest")
    return 0


def check_name(path: Path) -> str:
    """Return the package's name, the last part of ``path``.

    Raises:
        ConfigError: Python could not import a package of this name, or would import another one.
    """
    name = path.name
    rule = "The last part of NAME becomes a Python package, so it must"
    if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name):
        cure = f" Use {suggestion(name)}." if suggestion(name) else " Use a name such as my_project."
        raise ConfigError(
            f"Got NAME={str(path)!r}. {rule} consist of ASCII letters, digits and underscores, not begin with a "
            f"digit, and not be a keyword.{cure}"
        )
    if name in ("main", "ray_main", "test_training"):
        raise ConfigError(f"Got NAME={str(path)!r}. {rule} differ from {name}.py of the project. Use my_{name}.")
    if name in sys.stdlib_module_names or _is_installed(name):
        raise ConfigError(
            f"Got NAME={str(path)!r}, but Python already has a module {name!r}. {rule} be a new name, or one would "
            f"hide the other. Use my_{name}."
        )
    return name


def suggestion(name: str) -> str:
    """Return a valid name close to ``name``; empty if there is none.

    >>> suggestion("my-model"), suggestion("7b"), suggestion("class"), suggestion("...")
    ('my_model', 'my_7b', 'my_class', '')
    """
    text = "".join(c if c.isascii() and c.isalnum() else "_" for c in name).strip("_")
    if not text:
        return ""
    return text if text.isidentifier() and not keyword.iskeyword(text) else f"my_{text}"


def _is_installed(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a running program's __main__
        return True
    return spec is not None and spec.origin is not None  # without an origin it is a folder that is no package


def check_place(path: Path) -> None:
    """Check that ``path`` can be created.

    Raises:
        ConfigError: something has this name, or the folder above is missing or cannot be written.
    """
    if os.path.lexists(path):
        raise _exists(path)
    parent = path.parent
    if not parent.is_dir():
        what = "is not a folder" if os.path.lexists(parent) else "does not exist"
        raise ConfigError(f"Got NAME={str(path)!r}, but {parent} {what}. Create it first: mkdir -p {parent}")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(
            f"Got NAME={str(path)!r}, but you may not write into {parent.resolve()}. Choose another folder, or change "
            "its permissions."
        )


def files(name: str) -> Iterator[tuple[Path, str]]:
    """Yield the relative path and the text of every file of the project ``name``."""
    for template in sorted(TEMPLATES.rglob("*.template")):
        parts = template.relative_to(TEMPLATES).with_suffix("").parts
        yield (
            Path(*(_RENAMED.get(part, part).replace("{{name}}", name) for part in parts)),
            template.read_text(encoding="utf-8").replace("{{name}}", name),
        )


def write(path: Path, name: str) -> None:
    """Write the project: all of it to ``path``, or nothing.

    Raises:
        ConfigError: something has got this name in the meantime.
        OSError: a file cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=path.parent) as scratch:
        project = Path(scratch) / name
        project.mkdir()  # with the user's usual permissions, other than the folder around it
        for relative, text in files(name):
            target = project / relative
            target.parent.mkdir(exist_ok=True)
            target.write_text(text, encoding="utf-8")
            if target.suffix == ".sh":
                mode = target.stat().st_mode
                target.chmod(mode | (mode & 0o444) >> 2)  # who may read it may run it
        try:
            path.mkdir()  # takes the name: an error if anything has it, a link too
        except FileExistsError:
            raise _exists(path) from None
        try:
            project.rename(path)  # takes the place of the empty folder, at once
        except OSError:
            with contextlib.suppress(OSError):
                path.rmdir()
            raise


def _exists(path: Path) -> ConfigError:
    return ConfigError(f"Got NAME={str(path)!r}, which exists. It was not changed. Choose another name.")
