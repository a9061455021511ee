"""Build and run the recipes' LightningCLI: help from docstrings, and user errors as one line instead of a traceback."""

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


class _WithoutProgress(LightningCLI):
    """``--trainer.enable_progress_bar=false`` also leaves out the progress bars of the YAML files."""

    def before_instantiate_classes(self) -> None:
        super().before_instantiate_classes()
        config = self.config[self.subcommand] if self.subcommand else self.config
        trainer = config.get("trainer")
        if trainer is not None and trainer.get("enable_progress_bar") is False:
            trainer["callbacks"] = [
                each for each in trainer.get("callbacks") or [] if not each.class_path.endswith("ProgressBar")
            ]


def run_cli(kind: type[CLI], *classes: type, prog: str, run: bool, **options: Any) -> CLI:
    """Return ``kind(*classes, ...)``. With ``run`` it runs a subcommand; a wrong option ends the process with one line.

    Args:
        kind: LightningCLI, or a subclass.
        classes: classes of module and data.
        prog: how the program is started.
        run: False only builds the objects, and raises errors.
        options: options of ``kind``.
    """
    make: Any = type(kind.__name__, (_WithoutProgress, kind), {})
    try:
        return make(*classes, run=run, seed_everything_default=1, parser_kwargs={"prog": prog}, **options)
    except (LSError, ValueError) as error:
        message = _message(error)
        if not run or message is None:
            raise
        print(f"{prog}: error: {message}", file=sys.stderr)
        sys.exit(1)


def _message(error: Exception) -> str | None:
    """Return the message for a user's mistake; None for any other error.

    jsonargparse wraps an error of a constructor; the error is then one line of its message.
    """
    if isinstance(error, ConfigError):
        return str(error)
    found = re.findall(r"^ *- (Got .*)$", str(error), re.MULTILINE)
    return found[0] if found else None
