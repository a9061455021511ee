"""The GPT recipe as several benchmarks train it: on random tokens, where time is measured, and on its text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from recipes.gpt.corpus import CorpusConfig
from recipes.gpt.data import TextData
from recipes.gpt.model import GPTModule, OptimConfig, SampleConfig
from recipes.gpt.network import GPTConfig
from tests.trainers import bare_trainer


def random_tokens(sequences: int, block: int) -> TensorDataset:
    """Inputs and targets of ``block`` tokens each; the same ones on every rank."""
    tokens = torch.randint(256, (sequences, block + 1), generator=torch.Generator().manual_seed(0))
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def config_of(network: dict[str, Any], block: int) -> GPTConfig:
    """Of bytes; ``network``: the other options."""
    return GPTConfig(vocab_size=256, block_size=block, **network)


def gpt(network: dict[str, Any], block: int, **optimizer: Any) -> GPTModule:
    """The recipe's module, which generates nothing; with options of `GPTConfig` and of `OptimConfig`."""
    return GPTModule(config_of(network, block), OptimConfig(**optimizer), SampleConfig(max_new_tokens=0))


def text(cache: Path | str, seed: int, *, block: int, batch: int, short: bool = False) -> TextData:
    """The recipe's text, in an order that the seed decides. ``short``: 4 MB of it, with a quarter of the validation."""
    corpus = CorpusConfig(cache_dir=str(cache), **({"max_bytes": 4_000_000} if short else {}))
    return TextData(corpus=corpus, block_size=block, batch_size=batch, val_crops=128 if short else 512, seed=seed)


def fit(module: Any, data: TextData, strategy: Any, steps: int, *ranks: int, **options: Any) -> Any:
    """Return the Trainer after a fit with clipping, which has validated once, at its end."""
    trainer = bare_trainer(
        strategy, *ranks, max_steps=steps, val_check_interval=steps, check_val_every_n_epoch=None,
        num_sanity_val_steps=0, gradient_clip_val=1.0, **options,
    )  # fmt: skip
    trainer.fit(module, data)
    return trainer
