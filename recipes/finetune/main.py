"""The command line: all options of the model, the data and the Trainer, on the command line or in YAML."""

from __future__ import annotations

from typing import Any

from jsonargparse import ArgumentParser
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from recipes.command_line import run_cli
from recipes.finetune.data import InstructionData
from recipes.finetune.model import FinetuneModule

COMMANDS = {
    "make-base": "Train a small base model to try the recipe with.",
    "export": "Write a fine-tuned model or adapter as a folder that transformers or PEFT loads.",
}
"""Subcommands that need no Trainer, which `__main__` runs."""


class Parser(LightningArgumentParser):
    """A parser with Lightning's subcommands and `COMMANDS`."""

    def add_subcommands(self, *args: Any, **kwargs: Any) -> Any:
        """Add `COMMANDS` to the list of subcommands."""
        commands = super().add_subcommands(*args, **kwargs)
        for name, about in COMMANDS.items():
            commands.add_subcommand(name, ArgumentParser(description=about), help=about)
        return commands


class FinetuneCLI(LightningCLI):
    """A LightningCLI in which the data's tokenizer is that of the model."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link the data's options to the model's."""
        parser.link_arguments("model.model", "data.model")


def main(args: ArgsType = None, *, run: bool = True) -> FinetuneCLI:
    """Run the subcommand in ``args`` (None: the process's arguments); with ``run=False`` only build the objects."""
    return run_cli(
        FinetuneCLI,
        FinetuneModule,
        InstructionData,
        args=args,
        run=run,
        parser_class=Parser,
        prog="python -m recipes.finetune",
    )
