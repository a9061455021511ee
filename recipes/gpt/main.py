"""The command line: every option of the model, the data and the Trainer, by ``--help`` or in YAML."""

from __future__ import annotations

from typing import Any

from jsonargparse import ArgumentParser
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from recipes.command_line import run_cli
from recipes.gpt.corpus import vocab_size
from recipes.gpt.data import TextData
from recipes.gpt.model import GPTModule


class Parser(LightningArgumentParser):
    """A parser whose commands are Lightning's and ``generate``, which `recipes.gpt.generate` runs."""

    def add_subcommands(self, *args: Any, **kwargs: Any) -> Any:
        """Add ``generate``, for the list of commands."""
        commands = super().add_subcommands(*args, **kwargs)
        about = "Continue texts from a checkpoint, without a Trainer."
        commands.add_subcommand("generate", ArgumentParser(description=about), help=about)
        return commands


class GPTCLI(LightningCLI):
    """LightningCLI in which the data decides the size of the vocabulary and the length of a sequence."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link what the model must know about the data."""
        parser.link_arguments("data.corpus.tokenizer", "model.config.vocab_size", compute_fn=vocab_size)
        parser.link_arguments("data.block_size", "model.config.block_size")


def main(args: ArgsType = None, *, run: bool = True) -> GPTCLI:
    """Run the subcommand in ``args`` (default: of the process), or with ``run=False`` only build the objects."""
    return run_cli(GPTCLI, GPTModule, TextData, args=args, run=run, parser_class=Parser, prog="python -m recipes.gpt")
