"""`MoEGPTModule`: the GPT recipe's module with experts; their balance losses are added to its loss."""

from __future__ import annotations

from dataclasses import asdict

from torch import Tensor

from ls_strategy.moe.losses import moe_losses
from recipes.gpt.model import GPTModule, OptimConfig, SampleConfig
from recipes.gpt.network import GPTConfig
from recipes.moe.network import MoEConfig, MoEGPT


class MoEGPTModule(GPTModule):
    """Trains a `MoEGPT` to predict the next token. Everything except the experts is inherited from `GPTModule`."""

    def __init__(
        self,
        config: GPTConfig = GPTConfig(),  # noqa: B008 - frozen
        moe: MoEConfig = MoEConfig(),  # noqa: B008 - frozen
        optim: OptimConfig = OptimConfig(),  # noqa: B008 - frozen
        sample: SampleConfig = SampleConfig(),  # noqa: B008 - frozen
    ) -> None:
        """Store the configuration; `configure_model` builds the network.

        Args:
            config: shape of the network without the experts.
            moe: which layers have experts, how many, and how tokens are routed.
            optim: optimizer and schedule.
            sample: the text that is generated after every validation.
        """
        super().__init__(config, optim, sample)
        # Checkpoints store plain values.
        self.moe = moe if isinstance(moe, MoEConfig) else MoEConfig(**moe)
        self.save_hyperparameters({"moe": asdict(self.moe)})

    def configure_model(self) -> None:
        """Build the network, once. At stage 3 it gets memory later, one parameter after another."""
        if self.model is None:
            self.model = MoEGPT(self.config, self.moe)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross-entropy in nats per token plus the weighted losses of the experts.

        They are logged separately: ``train/loss`` is the cross-entropy alone.
        """
        loss = super().training_step(batch, batch_idx)
        experts = moe_losses(self)
        self.log("train/expert_loss", experts)
        return loss + experts
