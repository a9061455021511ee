"""The command line: all options of the model, the data and the Trainer, on the command line or in YAML."""

from __future__ import annotations

from typing import Any

from jsonargparse import ArgumentParser
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from recipes.command_line import run_cli
from recipes.gpt.corpus import vocab_size
from recipes.gpt.data import TextData
from recipes.gpt.model import GPTModule


class Parser(LightningArgumentParser):
    """A parser with Lightning's subcommands and ``generate``, which `recipes.gpt.generate` runs."""

    def add_subcommands(self, *args: Any, **kwargs: Any) -> Any:
        """Add ``generate`` to the list of subcommands."""
        commands = super().add_subcommands(*args, **kwargs)
        about = "Continue texts from a checkpoint, without a Trainer."
        commands.add_subcommand("generate", ArgumentParser(description=about), help=about)
        return commands


class GPTCLI(LightningCLI):
    """A LightningCLI in which the data sets the vocabulary size and the sequence length."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link the model's options to the data's."""
        parser.link_arguments("data.corpus.tokenizer", "model.config.vocab_size", compute_fn=vocab_size)
        parser.link_arguments("data.block_size", "model.config.block_size")


def main(args: ArgsType = None, *, run: bool = True) -> GPTCLI:
    """Run the subcommand in ``args`` (None: the process's arguments); with ``run=False`` only build the objects."""
    return run_cli(GPTCLI, GPTModule, TextData, args=args, run=run, parser_class=Parser, prog="python -m recipes.gpt")
