"""`MoEGPTModule`: the GPT recipe's module with experts, and their balance losses in its loss."""

from __future__ import annotations

from dataclasses import asdict

from torch import Tensor

from ls_strategy.moe.losses import moe_losses
from recipes.gpt.model import GPTModule, OptimConfig, SampleConfig
from recipes.gpt.network import GPTConfig
from recipes.moe.network import MoEConfig, MoEGPT


class MoEGPTModule(GPTModule):
    """Trains a `MoEGPT` to predict the next token; everything but the experts is `GPTModule`'s."""

    def __init__(
        self,
        config: GPTConfig = GPTConfig(),  # noqa: B008 - frozen
        moe: MoEConfig = MoEConfig(),  # noqa: B008 - frozen
        optim: OptimConfig = OptimConfig(),  # noqa: B008 - frozen
        sample: SampleConfig = SampleConfig(),  # noqa: B008 - frozen
    ) -> None:
        """Only records: `configure_model` builds the network, where the strategy wants it.

        Args:
            config: shape of the network around the experts.
            moe: which layers have experts, how many, and how tokens come to them.
            optim: how it learns.
            sample: what it writes after every validation.
        """
        super().__init__(config, optim, sample)
        # A checkpoint holds plain values, and gives them back.
        self.moe = moe if isinstance(moe, MoEConfig) else MoEConfig(**moe)
        self.save_hyperparameters({"moe": asdict(self.moe)})

    def configure_model(self) -> None:
        """Build the network, once. Stage 3 calls this on the meta device, and `reset_parameters` of its parts later."""
        if self.model is None:
            self.model = MoEGPT(self.config, self.moe)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean cross-entropy in nats per token, plus the losses that keep experts equally busy, already weighted.

        They are logged apart: ``train/loss`` is that of the text alone.
        """
        loss = super().training_step(batch, batch_idx)
        experts = moe_losses(self)
        self.log("train/expert_loss", experts)
        return loss + experts
