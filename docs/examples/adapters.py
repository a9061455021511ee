"""The model and the functions of the guide to adapters."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor


class Adapted(pl.LightningModule):
    """A causal model of transformers with adapters."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.model: Any = None

    def configure_model(self) -> None:
        """Load the model once, and add adapters."""
        if self.model is None:
            import peft
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(self.folder)
            self.model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the model's own loss."""
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> Any:
        """AdamW on what trains."""
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-4)


def save(trainer: pl.Trainer, model: Any, folder: str) -> None:
    """Save the adapters as PEFT does. Every rank calls it, and rank 0 writes."""
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with trainer.strategy.gathered_parameters(adapters.values()):  # type: ignore[attr-defined]
        state = {name: p.detach().clone() for name, p in adapters.items()}
    model.save_pretrained(folder, state_dict=state, is_main_process=trainer.is_global_zero)


def save_merged(trainer: pl.Trainer, model: Any, folder: str) -> None:
    """Add the adapters to the weights, and save a model without adapters. Every rank calls it, and rank 0 writes."""
    with trainer.strategy.gathered_parameters(model, modify=True):  # type: ignore[attr-defined]
        merged = model.merge_and_unload()
    merged.save_pretrained(folder, is_main_process=trainer.is_global_zero)
