"""Argument types: they check values before anything is loaded; argparse adds the argument's name to the error."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ls_strategy.checked import Range, above, accept, at_least
from ls_strategy.errors import CheckpointError, ConfigError
from ls_strategy.extras.planner.sizes import parse_bytes, parse_rate

_MOST = 1 << 20


def integer(least: int = 1, most: int = _MOST) -> Callable[[str], int]:
    """Return a type for integers from ``least`` to ``most``."""
    return _number(int, at_least(least, most))


def number(limits: Range | None = None) -> Callable[[str], float]:
    """Return a type for finite numbers; without ``limits`` above 0."""
    return _number(float, limits or above(0, 1e12))


def _number(kind: type[Any], limits: Range) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = text
        try:
            return accept("it", value, kind, limits)
        except ConfigError as error:
            message = str(error).removeprefix("Got it=").replace(", but it must", " is given; it must", 1)
            raise argparse.ArgumentTypeError(message.split(" Set it=")[0]) from None

    return parse


def path(text: str) -> Path:
    """Return a path on this machine."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def host(text: str) -> str:
    """Return the name or address of a host."""
    if not text or len(text) > 253 or not text.isascii() or not text.isprintable() or set(text) & set(" /@"):
        raise argparse.ArgumentTypeError(f"{text!r} is not the name or address of a host")
    return text.strip("[]")


def location(text: str) -> str:
    """Return a checkpoint's path or address, if its protocol is available in fsspec."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the path is empty")
    protocol, separator, _ = text.partition("://")
    if separator:
        import fsspec

        try:
            fsspec.get_filesystem_class(protocol)
        except (ValueError, ImportError) as error:
            raise argparse.ArgumentTypeError(
                f"{text!r} cannot be opened: {error}. Give a path on this machine"
            ) from None
    return text


def require_checkpoint(path: str) -> None:
    """Refuse a path on this machine where nothing is, before torch is imported.

    Raises:
        CheckpointError: as reading it would raise.
    """
    if "://" not in path and not os.path.lexists(path):
        raise CheckpointError(f"{Path(path).absolute()} does not exist. Give a checkpoint: a folder, or a .ckpt file.")


def line(text: str) -> str:
    """Return a text that is a single line and not empty."""
    if not text.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} is given; it must be a text of one line")
    return text


def size(text: str) -> str:
    """Return a size such as 80GB."""
    try:
        nbytes = parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not 0 < nbytes < 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} is given; it must be above 0 and below 2**63 bytes")
    return text


def rate(text: str) -> float:
    """Return a bandwidth such as 100Gbit, in 10**9 bytes per second."""
    try:
        return parse_rate(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def yaml_files(names: Iterable[str]) -> list[Path]:
    """Return the paths of a program's YAML files.

    Raises:
        ConfigError: one is not a file.
    """
    files = [Path(name) for name in names]
    for file in files:
        if not file.is_file():
            raise ConfigError(f"Got {str(file)!r}, which is no file in {Path.cwd()}. Give the program's YAML files.")
    return files


def read_yaml(file: Path) -> dict[str, Any]:
    """Return the content of a YAML file of a LightningCLI program.

    Raises:
        ConfigError: the file cannot be read, or is not YAML with sections.
    """
    import yaml

    try:
        loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"Got {str(file)!r}, but it cannot be read: {error.strerror}. Give a readable file."
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not in UTF-8: {error}. Save it as UTF-8.") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from error
    if loaded is not None and not isinstance(loaded, dict):
        raise ConfigError(
            f"Got {str(file)!r}, but its outermost value must be a mapping with sections such as trainer and model. It "
            f"is a {type(loaded).__name__}. Give a YAML file of the program."
        )
    return loaded or {}


def read_section(file: Path, name: str) -> dict[str, Any]:
    """Return a section of a YAML file; empty if it is missing.

    Raises:
        ConfigError: the file cannot be read, or the section is not a mapping.
    """
    section = read_yaml(file).get(name)
    if section is not None and not isinstance(section, dict):
        raise ConfigError(
            f"Got {name}: {section!r} in {file}, but {name} must be a mapping of options. Write them below it: "
            f"{name}: {{...}}."
        )
    return section or {}


def keep_what_follows_two_dashes(parser: argparse.ArgumentParser) -> None:
    """Parse the words after ``--``, options for the program, into ``extra``; argparse would take them for configs."""
    parse = parser.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        argv = list(args)
        cut = argv.index("--") if "--" in argv else len(argv)
        namespace, unknown = parse(argv[:cut], namespace)
        namespace.extra = argv[cut + 1 :]
        return namespace, unknown

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def print_json(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Print a result where `ls_strategy.extras.cli.main` keeps standard output free for it.

    Numbers that JSON does not have, NaN and infinity, are null.
    """
    print(json.dumps(_finite(result), indent=2, allow_nan=False), file=getattr(args, "out", None), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
