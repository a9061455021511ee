"""The command line: every option of the model, the data and the Trainer, by ``--help`` or in YAML."""

from __future__ import annotations

from lightning.pytorch.cli import ArgsType

from recipes.gpt.data import TextData
from recipes.gpt.main import GPTCLI
from recipes.moe.model import MoEGPTModule

ABOUT = {
    "description": "Train and evaluate with Lightning's Trainer. `python -m recipes.moe generate --help` is about "
    "continuing texts from a checkpoint, without a Trainer."
}


def main(args: ArgsType = None, *, run: bool = True) -> GPTCLI:
    """Run the subcommand in ``args`` (default: of the process), or with ``run=False`` only build the objects."""
    return GPTCLI(MoEGPTModule, TextData, args=args, run=run, seed_everything_default=1, parser_kwargs=ABOUT)
