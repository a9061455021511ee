"""Two networks: that of DeepSpeed's CIFAR-10 tutorial, and a more accurate residual network.

Both take normalized images. Shapes: N images, C channels, H rows, W columns, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ls_strategy.moe.layer import MoE

NUM_CLASSES = 10
IMAGE_SIZE = 32


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The tutorial's expert layers, with its option names and defaults, and a balance loss, which it omits."""

    num_experts: list[int] = field(default_factory=lambda: [2])
    """Experts per layer, one layer per number."""

    mlp_type: Literal["standard", "residual"] = "standard"
    """``residual``: every image also visits one dense expert (PR-MoE, arXiv:2201.05596)."""

    top_k: int = 1
    """Experts that an image visits."""

    min_capacity: int = 0
    """Minimum capacity of an expert, images."""

    noisy_gate_policy: Literal["RSample", "Jitter"] | None = None
    """Noise on the choice of experts in training, with ``top_k: 1``."""

    balance_loss: float = 0.01
    """Weight of the load-balancing loss. The tutorial drops it: 0."""

    def __post_init__(self) -> None:
        if not self.num_experts or min(self.num_experts) < 1:
            raise ValueError(f"Got num_experts={self.num_experts}. Give at least one number, each at least 1.")


class TutorialNet(nn.Module):
    """DeepSpeed's CIFAR-10 tutorial network, a LeNet with 62,006 parameters; with ``moe`` its Mixture of Experts.

    Source: ``Net`` in DeepSpeedExamples, training/cifar/cifar10_deepspeed.py. As there, ``fc3`` becomes the expert (84
    to 84) of every layer, and ``fc4`` computes the logits.
    """

    def __init__(self, moe: MoEConfig | None = None) -> None:
        """None: without experts."""
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        if moe is None:
            self.fc3 = nn.Linear(84, NUM_CLASSES)
            return
        self.moe_layer_list = nn.ModuleList(_moe_layer(moe, num_experts) for num_experts in moe.num_experts)
        self.fc4 = nn.Linear(84, NUM_CLASSES)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Return logits (N, K)."""
        x_NCHW = functional.max_pool2d(functional.relu(self.conv1(x_NCHW)), 2)
        x_NCHW = functional.max_pool2d(functional.relu(self.conv2(x_NCHW)), 2)
        x_NC = functional.relu(self.fc1(x_NCHW.flatten(1)))
        x_NC = functional.relu(self.fc2(x_NC))
        if not hasattr(self, "moe_layer_list"):
            return self.fc3(x_NC)
        for layer in self.moe_layer_list:
            x_NC = layer(x_NC)
        return self.fc4(x_NC)


def _moe_layer(moe: MoEConfig, num_experts: int) -> MoE:
    """Return one layer, with each image as a token."""
    return MoE(
        84,
        lambda: nn.Linear(84, 84),
        num_experts,
        k=moe.top_k,
        min_capacity=moe.min_capacity,
        noisy_gate_policy=moe.noisy_gate_policy,
        use_residual=moe.mlp_type == "residual",
        balance_loss=moe.balance_loss,
    )


class ConvBlock(nn.Module):
    """3x3 convolution, optional 2x2 pooling, batch norm, ReLU."""

    def __init__(self, in_channels: int, out_channels: int, *, pool: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(out_channels)
        self.pool = pool

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Return activations with ``out_channels``, of half the height and width with ``pool``."""
        x_NCHW = self.conv(x_NCHW)
        if self.pool:
            x_NCHW = functional.max_pool2d(x_NCHW, 2)
        return functional.relu(self.norm(x_NCHW))


class ResidualBlock(nn.Module):
    """Two `ConvBlock` with a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = ConvBlock(channels, channels)
        self.second = ConvBlock(channels, channels)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Return activations of the same shape."""
        return x_NCHW + self.second(self.first(x_NCHW))


class ResNet9(nn.Module):
    """The nine-layer residual network of the DAWNBench CIFAR-10 entries, with ``width`` channels after the first layer.

    ::

        image -> w -> 2w, pool -> res 2w -> 4w, pool -> 8w, pool -> res 8w -> max over the 4 x 4 left -> 10 logits

    Source: D. Page, "How to train your ResNet", part 4 (2018), with a ``width`` of 64.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        # A Sequential: each child that is large enough becomes a unit of ZeROStrategy.
        self.blocks = nn.Sequential(
            ConvBlock(3, width),
            ConvBlock(width, 2 * width, pool=True),
            ResidualBlock(2 * width),
            ConvBlock(2 * width, 4 * width, pool=True),
            ConvBlock(4 * width, 8 * width, pool=True),
            ResidualBlock(8 * width),
        )
        self.head = nn.Linear(8 * width, NUM_CLASSES, bias=False)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Return logits (N, K)."""
        # CPU kernels and tensor cores use this layout; others would be converted in every layer.
        x_NCHW = x_NCHW.contiguous(memory_format=torch.channels_last)
        x_NC = self.blocks(x_NCHW).amax(dim=(2, 3))
        # The maximum over positions is large, and unscaled logits would be overconfident in the first steps.
        return 0.125 * self.head(x_NC)
