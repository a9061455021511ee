"""Make a small base model to try the recipe with: ``python -m recipes.finetune make-base FOLDER``.

A byte-level Llama that has learned some Python from the standard library, in the format of transformers. Nothing is
downloaded. It is trained by the GPT recipe, and exported as `recipes.gpt.huggingface` does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl

from ls_strategy.errors import LSError
from recipes.gpt.data import TextData
from recipes.gpt.huggingface import export
from recipes.gpt.model import GPTModule, OptimConfig, SampleConfig
from recipes.gpt.network import GPTConfig


def make_base(folder: Path, *, layers: int, width: int, steps: int, block_size: int, seed: int = 1) -> None:
    """Train a small GPT for ``steps`` steps on one device, and write it to ``folder``.

    Args:
        folder: folder to create.
        layers: number of blocks.
        width: width of the residual stream, a multiple of 32.
        steps: optimizer steps; 0 keeps random weights.
        block_size: maximum tokens of a sequence, with which it is trained.
        seed: seed of weights and text.

    Raises:
        LSError: ``folder`` exists.
    """
    pl.seed_everything(seed, workers=True)
    module = GPTModule(
        GPTConfig(num_layers=layers, num_heads=width // 32, width=width, vocab_size=256, block_size=block_size),
        OptimConfig(lr=3e-3, warmup_steps=max(min(steps // 10, 50), 1)),
        SampleConfig(max_new_tokens=0),
    )
    trainer = pl.Trainer(
        accelerator="auto",
        devices=1,
        max_steps=max(steps, 1),
        limit_train_batches=None if steps else 0,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
    )
    trainer.fit(module, datamodule=TextData(block_size=block_size, batch_size=max(4096 // block_size, 1)))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        checkpoint = Path(work) / "base.ckpt"
        trainer.save_checkpoint(checkpoint, weights_only=True)
        export(checkpoint, folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.finetune make-base",
        description="Train a small byte-level Llama on the source of the Python standard library, on one device.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder to create")
    parser.add_argument("--layers", type=int, default=4, help="number of blocks")
    parser.add_argument("--width", type=int, default=128, help="width of the model, a multiple of 32")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps; 0 keeps random weights")
    parser.add_argument("--block_size", type=int, default=512, help="maximum tokens of a sequence")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights and text")
    args = parser.parse_args(argv)
    if args.folder.exists():
        print(f"error: {args.folder} exists. Remove it, or give another folder.", file=sys.stderr)
        return 1
    try:
        make_base(
            args.folder,
            layers=args.layers,
            width=args.width,
            steps=args.steps,
            block_size=args.block_size,
            seed=args.seed,
        )
    except (LSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {args.folder}: AutoModelForCausalLM.from_pretrained({str(args.folder)!r}) loads it")
    return 0
