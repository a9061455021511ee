"""litgpt: its GPT in a LightningModule, as its tutorial shows (``lightning``)."""

# pyright: reportMissingImports=false

import argparse
import sys
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812 - as the tutorial writes it
import torch
from litgpt import Config
from litgpt.model import GPT
from litgpt.utils import chunked_cross_entropy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.published.losses import recorder


class LitGPT(L.LightningModule):
    """The tutorial's module, on a small Pythia."""

    def __init__(self) -> None:
        super().__init__()
        config = Config.from_name("pythia-14m", n_layer=2, n_embd=64, n_head=4, padded_vocab_size=256, block_size=64)
        self.model = GPT(config)

    def on_train_start(self) -> None:
        """Rotary positions, as in the tutorial."""
        self.model.cos, self.model.sin = self.model.rope_cache(device=self.device)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the loss of the next token."""
        (tokens,) = batch
        return chunked_cross_entropy(self.model(tokens)[..., :-1, :], tokens[..., 1:], chunk_size=0)

    def configure_optimizers(self) -> Any:
        """AdamW with warmup, as in the tutorial."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=0.0, betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 5, 1.0))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main(strategy: str) -> None:
    """Train on the bytes of a module of the standard library."""
    L.seed_everything(1)
    source = Path(argparse.__file__).read_bytes()
    tokens = torch.tensor(list(source[: 64 * 160])).view(160, 64)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, accumulate_grad_batches=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, callbacks=[recorder(L.Callback)],
    )  # fmt: skip
    trainer.fit(LitGPT(), DataLoader(TensorDataset(tokens), batch_size=4, shuffle=True))


if __name__ == "__main__":
    main(sys.argv[1])
