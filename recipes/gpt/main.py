"""The command line: every option of the model, the data and the Trainer, by ``--help`` or in YAML."""

from __future__ import annotations

from jsonargparse import set_parsing_settings
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

import ls_strategy  # noqa: F401 - makes the names zero0 to zero3 known to the Trainer
from recipes.gpt.corpus import vocab_size
from recipes.gpt.data import TextData
from recipes.gpt.model import GPTModule

# The docstring under a field of a configuration is its help text.
set_parsing_settings(docstring_parse_attribute_docstrings=True)

ABOUT = {
    "description": "Train and evaluate with Lightning's Trainer. `python -m recipes.gpt generate --help` is about "
    "continuing texts from a checkpoint, without a Trainer."
}


class GPTCLI(LightningCLI):
    """LightningCLI in which the data decides the size of the vocabulary and the length of a sequence."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link what the model must know about the data."""
        parser.link_arguments("data.corpus.tokenizer", "model.config.vocab_size", compute_fn=vocab_size)
        parser.link_arguments("data.block_size", "model.config.block_size")


def main(args: ArgsType = None, *, run: bool = True) -> GPTCLI:
    """Run the subcommand in ``args`` (default: of the process), or with ``run=False`` only build the objects."""
    return GPTCLI(GPTModule, TextData, args=args, run=run, seed_everything_default=1, parser_kwargs=ABOUT)
