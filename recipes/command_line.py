"""How the recipes make and run their LightningCLI: help from docstrings, and errors as a line, not a traceback."""

from __future__ import annotations

import re
import sys
from typing import Any, TypeVar

from jsonargparse import set_parsing_settings
from lightning.pytorch.cli import LightningCLI

from ls_strategy.errors import ConfigError, LSError

# The docstring under a field of a configuration is its help text.
set_parsing_settings(docstring_parse_attribute_docstrings=True)

CLI = TypeVar("CLI", bound=LightningCLI)


def run_cli(kind: type[CLI], *classes: type, prog: str, run: bool, **options: Any) -> CLI:
    """Return ``kind(*classes, ...)``, which runs a subcommand if ``run``; a wrong option ends the process with a line.

    Args:
        kind: LightningCLI, or derived.
        classes: of module and data.
        prog: how the program is started.
        run: False only builds the objects, and raises what is wrong.
        options: of ``kind``.
    """
    make: Any = kind
    try:
        return make(*classes, run=run, seed_everything_default=1, parser_kwargs={"prog": prog}, **options)
    except (LSError, ValueError) as error:
        message = _message(error)
        if not run or message is None:
            raise
        print(f"{prog}: error: {message}", file=sys.stderr)
        sys.exit(1)


def _message(error: Exception) -> str | None:
    """Return what a user did wrong; None for any other error.

    jsonargparse puts what a constructor raises into an error of its own, a line of which it then is.
    """
    if isinstance(error, ConfigError):
        return str(error)
    found = re.findall(r"^ *- (Got .*)$", str(error), re.MULTILINE)
    return found[0] if found else None
