"""The names of Ray Train that this package uses, checked once: version, and the package of Lightning that Ray chose.

All of them are public in Ray.
"""

from __future__ import annotations

from typing import Any

from ls_strategy import host
from ls_strategy.errors import ConfigError
from ls_strategy.host.pytorch import DDPStrategy

try:
    from ray import train
    from ray.train import lightning as ray_lightning
    from ray.train import torch as ray_torch
except ImportError as error:
    raise ConfigError(
        f'ls_strategy.ray needs Ray Train, but it cannot be imported: {error}. Run pip install "ls_strategy[ray]".'
    ) from error


def _check() -> None:
    if not hasattr(train, "CheckpointUploadMode"):
        raise ConfigError(
            "Got the first version of Ray Train, but ls_strategy.ray needs the second one. Unset RAY_TRAIN_V2_ENABLED, "
            'and run pip install "ls_strategy[ray]".'
        )
    if not issubclass(ray_lightning.RayDDPStrategy, DDPStrategy):
        raise ConfigError(
            f"Got ls_strategy.ray in a process that trains with {host.name()}, but Ray Train takes lightning wherever "
            "it is installed. Import the Trainer from lightning.pytorch, or uninstall lightning."
        )


_check()

RayDDPStrategy: Any = ray_lightning.RayDDPStrategy
RayLightningEnvironment: Any = ray_lightning.RayLightningEnvironment
Checkpoint = train.Checkpoint
CheckpointUploadMode: Any = train.CheckpointUploadMode  # pyright: ignore[reportAttributeAccessIssue]

__all__ = ["Checkpoint", "CheckpointUploadMode", "RayDDPStrategy", "RayLightningEnvironment", "ray_torch", "train"]
