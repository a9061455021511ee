"""The command line: all options of the model, the data and the Trainer, on the command line or in YAML."""

from __future__ import annotations

from lightning.pytorch.cli import ArgsType

from recipes.command_line import run_cli
from recipes.gpt.data import TextData
from recipes.gpt.main import GPTCLI, Parser
from recipes.moe.model import MoEGPTModule


def main(args: ArgsType = None, *, run: bool = True) -> GPTCLI:
    """Run the subcommand in ``args`` (None: the process's arguments); with ``run=False`` only build the objects."""
    return run_cli(
        GPTCLI, MoEGPTModule, TextData, args=args, run=run, parser_class=Parser, prog="python -m recipes.moe"
    )
