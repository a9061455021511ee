"""The two networks: the one of DeepSpeed's CIFAR-10 tutorial, and a residual one that learns far more.

Both take normalised images. Shapes: N images, C channels, H rows, W columns, K classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

NUM_CLASSES = 10
IMAGE_SIZE = 32


class TutorialNet(nn.Module):
    """DeepSpeed's CIFAR-10 tutorial network, a LeNet with 62,006 parameters.

    Source: ``Net`` in DeepSpeedExamples, training/cifar/cifar10_deepspeed.py, without its mixture of experts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, NUM_CLASSES)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Logits (N, K)."""
        x_NCHW = functional.max_pool2d(functional.relu(self.conv1(x_NCHW)), 2)
        x_NCHW = functional.max_pool2d(functional.relu(self.conv2(x_NCHW)), 2)
        x_NC = functional.relu(self.fc1(x_NCHW.flatten(1)))
        return self.fc3(functional.relu(self.fc2(x_NC)))


class ConvBlock(nn.Module):
    """Convolution 3x3, pooling 2x2 where asked for, batch norm, ReLU."""

    def __init__(self, in_channels: int, out_channels: int, *, pool: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(out_channels)
        self.pool = pool

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Activations with ``out_channels``, of half the height and width with ``pool``."""
        x_NCHW = self.conv(x_NCHW)
        if self.pool:
            x_NCHW = functional.max_pool2d(x_NCHW, 2)
        return functional.relu(self.norm(x_NCHW))


class ResidualBlock(nn.Module):
    """Two `ConvBlock` added to what goes in."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = ConvBlock(channels, channels)
        self.second = ConvBlock(channels, channels)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Activations of the same shape."""
        return x_NCHW + self.second(self.first(x_NCHW))


class ResNet9(nn.Module):
    """The nine-layer residual network of the DAWNBench CIFAR-10 entries, ``width`` channels after the first layer.

    ::

        image -> w -> 2w, pool -> res 2w -> 4w, pool -> 8w, pool -> res 8w -> max over the 4 x 4 left -> 10 logits

    Source: D. Page, "How to train your ResNet", part 4 (2018); there ``width`` is 64.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        # A Sequential: each of its children is a unit of ZeROStrategy, if it is large enough to be one.
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
        """Logits (N, K)."""
        # The layout in which CPU kernels and tensor cores compute; others are converted at every layer.
        x_NCHW = x_NCHW.contiguous(memory_format=torch.channels_last)
        x_NC = self.blocks(x_NCHW).amax(dim=(2, 3))
        # The maximum over positions is large; logits of that size make the first steps too sure.
        return 0.125 * self.head(x_NC)
