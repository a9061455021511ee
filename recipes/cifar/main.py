"""The command line: all options of the model, the data and the Trainer, on the command line or in YAML."""

from __future__ import annotations

from lightning.pytorch.cli import ArgsType, LightningCLI

from recipes.cifar.data import CIFARData
from recipes.cifar.model import CIFARModule
from recipes.command_line import run_cli


def main(args: ArgsType = None, *, run: bool = True) -> LightningCLI:
    """Run the subcommand in ``args`` (None: the process's arguments); with ``run=False`` only build the objects."""
    return run_cli(LightningCLI, CIFARModule, CIFARData, args=args, run=run, prog="python -m recipes.cifar")
