"""``activations``: what backward needs from the forward is recomputed, or stored elsewhere until then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ls_strategy.checked import at_least, check_fields
from ls_strategy.config.group import Group
from ls_strategy.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig(Group):
    """Which modules run their forward again in backward instead of keeping its results."""

    policy: Literal["full", "selective"]
    """``full`` keeps a module's inputs only, ``selective`` also the outputs of the operations in ``keep``."""

    block_classes: tuple[str, ...] = ()
    """Classes (``["Block"]``) of modules to recompute; inside one of them no other is. Empty: the children of every
    ModuleList and Sequential."""

    every: int = 1
    """Recompute the first module and every ``every``-th after it; the others keep their activations."""

    keep: tuple[str, ...] = ("matmul", "attention", "collective")
    """``selective``: operations that are expensive to run twice: ``matmul attention convolution collective``, or names
    of operations (``aten.gelu``)."""

    def __post_init__(self) -> None:
        check_fields(self, every=at_least(1))
        if self.policy == "selective" and not self.keep:
            raise ConfigError("policy='selective' with an empty keep keeps nothing: use policy='full'.")


@dataclass(frozen=True, kw_only=True)
class ActivationOffloadConfig(Group):
    """Where tensors that backward needs are stored between forward and backward."""

    tier: Literal["cpu", "nvme"]
    """``cpu``: host memory, pinned with CUDA. ``nvme``: a file on a local NVMe device."""

    min_bytes: int = 1 << 20
    """Smaller tensors stay on the device: each copy costs a kernel launch."""

    in_flight_bytes: int = 256 << 20
    """Limit of device memory in flight in either direction. As many bytes of the forward's last tensors stay on the
    device. A larger tensor is copied alone, and training waits for it."""

    staging_bytes: int = 256 << 20
    """``nvme``: limit of host memory between device and file, in either direction."""

    def __post_init__(self) -> None:
        size = at_least(0)
        check_fields(self, min_bytes=size, in_flight_bytes=size, staging_bytes=size)


@dataclass(frozen=True, kw_only=True)
class ChunkedLossConfig(Group):
    """The output layer's logits are computed in chunks by the loss, and again in backward."""

    head: str | None = None
    """Name of the output layer. None: the model's ``get_output_embeddings()``, or a layer of the vocabulary's size
    named ``head``, ``lm_head`` or alike."""

    chunk_bytes: int | None = None
    """Bytes of fp32 logits held at a time. None: 1/32 of all, between 1 MiB and 256 MiB."""

    def __post_init__(self) -> None:
        check_fields(self, group="activations.loss", chunk_bytes=at_least(1))


@dataclass(frozen=True, kw_only=True)
class TilingConfig(Group):
    """Which layers run on some tokens at a time, and again in backward."""

    modules: tuple[str, ...] = ()
    """Names of modules that treat every token alone, with ``*`` for anything (``["*.mlp"]``). Empty: the feed-forwards
    of the blocks, by usual names (``mlp``, ``feed_forward``, ``ffn``)."""

    tokens: int = 1024
    """Tokens of each sequence that a layer runs on at a time."""

    def __post_init__(self) -> None:
        check_fields(self, group="activations.tiling", tokens=at_least(1))


@dataclass(frozen=True, kw_only=True)
class ActivationsConfig(Group):
    """Memory of activations. The short form ``"full"`` or ``"selective"`` sets ``checkpointing``."""

    checkpointing: Literal["full", "selective"] | RecomputeConfig | None = None
    """``full`` keeps the inputs of every block and recomputes the rest in backward; ``selective`` also keeps what is
    expensive (matrix products, attention, communication). ``RecomputeConfig(...)`` chooses classes, blocks and
    operations."""

    offload: Literal["cpu", "nvme"] | ActivationOffloadConfig | None = None
    """Tier of tensors that backward needs; with ``checkpointing``, of the blocks' inputs.
    ``ActivationOffloadConfig(...)`` sets sizes; the folder of ``nvme`` is ``offload.nvme_path``."""

    partitioning: bool = False
    """Partition inputs of recomputed blocks over the tensor-parallel ranks."""

    loss: Literal["chunked"] | ChunkedLossConfig | None = None
    """``chunked``: ``cross_entropy`` computes the output layer and the loss for some tokens at a time, and again in
    backward, and never holds the logits of all. ``ChunkedLossConfig(...)`` sets layer and size."""

    tiling: Literal["mlp"] | TilingConfig | None = None
    """``mlp``: feed-forwards run on 1,024 tokens of each sequence at a time, and again in backward.
    ``TilingConfig(...)`` sets layers and tokens."""

    @staticmethod
    def short_form(value: Any, stage: Any) -> dict[str, Any]:
        """Return the options that ``"full"``, ``"selective"`` or None sets."""
        return {"checkpointing": value, **({"offload": None} if value is None else {})}

    @property
    def recompute(self) -> RecomputeConfig | None:
        """What is recomputed in backward."""
        assert not isinstance(self.checkpointing, str)
        return self.checkpointing

    @property
    def chunked_loss(self) -> ChunkedLossConfig | None:
        """How logits are computed in chunks; None: all at once."""
        assert not isinstance(self.loss, str)
        return self.loss

    @property
    def tiles(self) -> TilingConfig | None:
        """Which layers run on some tokens at a time; None: none."""
        assert not isinstance(self.tiling, str)
        return self.tiling

    @property
    def stored(self) -> ActivationOffloadConfig | None:
        """Where tensors are stored until backward; None: on the device."""
        assert not isinstance(self.offload, str)
        return self.offload

    def __post_init__(self) -> None:
        check_fields(self, group="activations")
        if isinstance(self.checkpointing, str):
            self._set("checkpointing", RecomputeConfig(policy=self.checkpointing))
        if isinstance(self.offload, str):
            self._set("offload", ActivationOffloadConfig(tier=self.offload))
        if self.loss == "chunked":
            self._set("loss", ChunkedLossConfig())
        if self.tiling == "mlp":
            self._set("tiling", TilingConfig())
        if self.partitioning and self.checkpointing is None:
            raise ConfigError(
                "Got activations.partitioning=True without activations.checkpointing, but only the inputs of "
                "recomputed blocks are partitioned over the tensor-parallel ranks. Set "
                "activations.checkpointing='full' too."
            )
