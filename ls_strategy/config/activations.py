"""``activations``: what backward needs of the forward, computed again, or stored elsewhere until then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ls_strategy.checked import at_least, check_fields
from ls_strategy.config.group import Group
from ls_strategy.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig(Group):
    """Which modules run their forward a second time in backward, instead of keeping what it computed."""

    RENAMED: ClassVar[dict[str, str]] = {"classes": "block_classes"}

    policy: Literal["full", "selective"] = "full"
    """``full`` keeps a module's inputs alone. ``selective`` also keeps the outputs of the operations in ``keep``."""

    block_classes: tuple[str, ...] = ()
    """Class names (``["Block"]``) of the modules, the outermost of each. Empty: the children of every ModuleList and
    Sequential."""

    every: int = 1
    """Recompute the first of them and each ``every``-th after it; the others keep what they computed."""

    keep: tuple[str, ...] = ("matmul", "attention", "collective")
    """``selective``: what is expensive to compute twice. ``matmul attention convolution collective``, or names of
    operations (``aten.gelu``)."""

    def __post_init__(self) -> None:
        """Refuse values outside their sets."""
        check_fields(self, every=at_least(1))
        if self.policy == "selective" and not self.keep:
            raise ConfigError("policy='selective' with an empty keep keeps nothing: use policy='full'.")


@dataclass(frozen=True, kw_only=True)
class ActivationOffloadConfig(Group):
    """Where tensors that backward will need are stored between forward and backward."""

    tier: Literal["cpu", "nvme"] = "cpu"
    """``cpu``: host memory, pinned where there is CUDA. ``nvme``: a file on a local drive."""

    min_bytes: int = 1 << 20
    """Smaller tensors stay on the device: there are few bytes in them, and each copy costs a launch."""

    in_flight_bytes: int = 256 << 20
    """Bound of what is on its way in either direction, on the device. Also what never leaves: the last tensors of the
    forward, which backward needs first. A tensor above it is alone on its way, and training waits for it."""

    staging_bytes: int = 256 << 20
    """``nvme``: bound of the host memory between the device and the drive, in either direction."""

    def __post_init__(self) -> None:
        """Refuse values outside their sets."""
        size = at_least(0)
        check_fields(self, min_bytes=size, in_flight_bytes=size, staging_bytes=size)


@dataclass(frozen=True, kw_only=True)
class ActivationsConfig(Group):
    """Memory of activations. ``"full"`` or ``"selective"`` alone: ``checkpointing``."""

    checkpointing: Literal["full", "selective"] | RecomputeConfig | None = None
    """``full`` keeps the inputs of every block and computes everything else again in backward; ``selective`` also keeps
    what is expensive to compute (matrix products, attention, communication). ``RecomputeConfig(...)`` names classes,
    every how many blocks, and which operations."""

    offload: Literal["cpu", "nvme"] | ActivationOffloadConfig | None = None
    """Tensors that backward needs are stored there until then; with ``checkpointing``, the blocks' inputs.
    ``ActivationOffloadConfig(...)`` sets sizes; the folder of ``nvme`` is ``offload.nvme_path``."""

    partitioning: bool = False
    """Keep the inputs of recomputed blocks in parts over the tensor-parallel ranks."""

    @classmethod
    def of(cls, option: Literal["full", "selective"] | ActivationsConfig | None) -> ActivationsConfig:
        """Return the group that ``option`` is, or is short for."""
        return option if isinstance(option, ActivationsConfig) else cls(checkpointing=option)

    @property
    def recompute(self) -> RecomputeConfig | None:
        """What is computed again."""
        assert not isinstance(self.checkpointing, str)
        return self.checkpointing

    @property
    def stored(self) -> ActivationOffloadConfig | None:
        """Where the others are stored; None: on the device."""
        assert not isinstance(self.offload, str)
        return self.offload

    def __post_init__(self) -> None:
        """Refuse values outside their sets."""
        check_fields(self, group="activations")
        if isinstance(self.checkpointing, str):
            self._set("checkpointing", RecomputeConfig(policy=self.checkpointing))
        if isinstance(self.offload, str):
            self._set("offload", ActivationOffloadConfig(tier=self.offload))
        if self.partitioning and self.checkpointing is None:
            raise ConfigError(
                "Got activations.partitioning=True without activations.checkpointing, but only the inputs of "
                "recomputed blocks are partitioned over the tensor-parallel ranks. Set "
                "activations.checkpointing='full' too."
            )
