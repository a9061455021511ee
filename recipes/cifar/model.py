"""`CIFARModule`: loss, accuracy and optimizer. A plain LightningModule, without collectives or ranks."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.flop_counter import FlopCounterMode
from torchmetrics.classification import MulticlassAccuracy

from ls_strategy.moe.losses import moe_losses
from recipes.cifar.augment import augment
from recipes.cifar.data import NO_LABEL
from recipes.cifar.network import IMAGE_SIZE, NUM_CLASSES, MoEConfig, ResNet9, TutorialNet

Network = Literal["resnet", "tutorial"]

# Statistics of CIFAR-10's 50,000 training images, per channel, in [0, 255].
PIXEL_MEAN = (125.3, 123.0, 113.9)
PIXEL_STD = (63.0, 62.1, 66.7)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """SGD with Nesterov momentum; the learning rate rises linearly, then falls linearly to zero."""

    lr: float = 0.2
    """Peak learning rate."""

    warmup_fraction: float = 0.25
    """Fraction of the optimizer steps in which the learning rate rises."""

    momentum: float = 0.9
    """Momentum of SGD."""

    weight_decay: float = 5e-4
    """For kernels and matrices; norms and biases do not decay."""

    label_smoothing: float = 0.1
    """Probability that is taken from the correct class and spread over all classes."""


def one_cycle(step: int, *, peak_step: float, total_steps: int) -> float:
    """Return the learning rate at ``step`` as a fraction of the peak.

    >>> [round(one_cycle(s, peak_step=2, total_steps=6), 2) for s in range(8)]
    [0.33, 0.67, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    if step < peak_step:
        return (step + 1) / (peak_step + 1)
    return max(total_steps - step, 0) / max(total_steps - peak_step, 1)


class CIFARModule(pl.LightningModule):
    """Trains one of two networks to classify CIFAR-10."""

    def __init__(
        self,
        network: Network = "resnet",
        width: int | None = None,
        optim: OptimConfig = OptimConfig(),
        augmentation: bool = True,
        moe: MoEConfig | None = None,
    ) -> None:
        """Build the network; it is small enough for every rank until the strategy shards it.

        Args:
            network: ``resnet``, the more accurate one, or ``tutorial``, that of DeepSpeed's CIFAR-10 tutorial.
            width: channels after the first layer of ``resnet``. None: 64. Must be None for ``tutorial``.
            optim: optimizer and schedule.
            augmentation: shift and mirror training images randomly.
            moe: expert layers before the last layer, for ``tutorial``.

        Raises:
            ValueError: a width for ``tutorial``, or one below 1; experts for ``resnet``.
        """
        super().__init__()
        if width is not None and (network == "tutorial" or width < 1):
            raise ValueError(
                f"Got network={network!r} with width={width}, but width is an option of 'resnet' and must be at "
                "least 1. Omit model.width (null) for 'tutorial'."
            )
        if moe is not None and network != "tutorial":
            raise ValueError(f"Got model.moe with network={network!r}, which has no experts. Set network: tutorial.")
        self.network: Network = network
        self.width = width
        self.moe = MoEConfig(**moe) if isinstance(moe, dict) else moe  # a checkpoint holds plain values
        self.optim = optim
        self.augmentation = augmentation
        # Plain values: torch.load(weights_only=True), the default for resuming, rejects other classes.
        plain = {"network": network, "width": width, "optim": asdict(optim), "augmentation": augmentation}
        self.save_hyperparameters(plain | ({"moe": asdict(self.moe)} if self.moe else {}))
        self.net = self._build()
        self.register_buffer("pixel_mean", torch.tensor(PIXEL_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("pixel_std", torch.tensor(PIXEL_STD).view(3, 1, 1), persistent=False)
        # Sums counts over all batches and ranks, and divides once.
        self.train_accuracy = _accuracy()
        self.val_accuracy = _accuracy()
        self.test_accuracy = _accuracy()

    def _build(self) -> nn.Module:
        if self.network == "tutorial":
            return TutorialNet(self.moe)
        return ResNet9(64 if self.width is None else self.width)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        """Return logits (N, K) of uint8 ``images`` (N, 3, 32, 32)."""
        # The buffers have the strategy's compute dtype.
        mean, std = self.get_buffer("pixel_mean"), self.get_buffer("pixel_std")
        return self.net((images_NCHW.to(mean.dtype) - mean) / std)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross-entropy in nats per image, with smoothed labels."""
        images_NCHW, labels_N = batch
        logits_NK = self(augment(images_NCHW) if self.augmentation else images_NCHW).float()
        loss = functional.cross_entropy(logits_NK, labels_N, label_smoothing=self.optim.label_smoothing)
        self.log("train/loss", loss, prog_bar=True)  # of this rank; averaging would need a collective in every step
        self.train_accuracy(logits_NK, labels_N)
        self.log("train/accuracy", self.train_accuracy, on_step=False, on_epoch=True, prog_bar=True)
        if self.moe is None:
            return loss
        experts = moe_losses(self)
        self.log("train/expert_loss", experts)
        return loss + experts

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log loss and accuracy over the images of all ranks."""
        self._evaluate(batch, "val", self.val_accuracy)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """See `validation_step`."""
        self._evaluate(batch, "test", self.test_accuracy)

    def _evaluate(self, batch: tuple[Tensor, Tensor], name: str, accuracy: MulticlassAccuracy) -> None:
        images_NCHW, labels_N = batch
        logits_NK = self(images_NCHW).float()
        # Padding images have NO_LABEL and are not counted.
        count = int((labels_N != NO_LABEL).sum())
        loss = functional.cross_entropy(logits_NK, labels_N, ignore_index=NO_LABEL, reduction="sum") / max(count, 1)
        accuracy.update(logits_NK, labels_N)
        self.log(f"{name}/loss", loss, prog_bar=True, sync_dist=True, batch_size=count)
        self.log(f"{name}/accuracy", accuracy, prog_bar=True)  # the metric adds up its counts over ranks by itself

    def flops_per_sample(self) -> int:
        """Return the training FLOPs per image; a monitor computes the utilization from it."""
        return self._flops_per_sample

    @cached_property
    def _flops_per_sample(self) -> int:
        # On meta; but routing to experts depends on values, so draw them without changing the random state.
        device = "meta" if self.moe is None else "cpu"
        with torch.device(device), torch.random.fork_rng(devices=[]):
            network = self._build().eval()
            image = torch.ones(1, 3, IMAGE_SIZE, IMAGE_SIZE)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            network(image)
        return 3 * counter.get_total_flops()  # backward: gradients of activations and of weights

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Return SGD with two parameter groups, and one schedule per optimizer step for both."""
        c = self.optim
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": c.weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = SGD(groups, lr=c.lr, momentum=c.momentum, nesterov=c.momentum > 0)
        total_steps = self._total_steps()

        def factor(step: int) -> float:
            return one_cycle(step, peak_step=c.warmup_fraction * total_steps, total_steps=total_steps)

        scheduler = LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "name": "train/lr"},
        }

    def _total_steps(self) -> int:
        steps = self.trainer.estimated_stepping_batches
        if not math.isfinite(steps) or steps < 1:
            raise ValueError(
                f"the Trainer will make {steps} steps, but the learning rate cycle needs a known end. Set "
                "trainer.max_epochs or trainer.max_steps."
            )
        return int(steps)


def _accuracy() -> MulticlassAccuracy:
    return MulticlassAccuracy(NUM_CLASSES, average="micro", ignore_index=NO_LABEL)
