"""The command line: every option of the model, the data and the Trainer, by ``--help`` or in YAML."""

from __future__ import annotations

from jsonargparse import set_parsing_settings
from lightning.pytorch.cli import ArgsType, LightningCLI

import ls_strategy  # noqa: F401 - makes the names zero0 to zero3 known to the Trainer
from recipes.cifar.data import CIFARData
from recipes.cifar.model import CIFARModule

# The docstring under a field of a configuration is its help text.
set_parsing_settings(docstring_parse_attribute_docstrings=True)


def main(args: ArgsType = None, *, run: bool = True) -> LightningCLI:
    """Run the subcommand in ``args`` (default: of the process), or with ``run=False`` only build the objects."""
    return LightningCLI(CIFARModule, CIFARData, args=args, run=run, seed_everything_default=1)
