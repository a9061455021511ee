"""``precision``: formats of master weights, sums and moments, in addition to ``Trainer(precision=...)``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ls_strategy.checked import above, at_least, check_fields
from ls_strategy.config.group import Group
from ls_strategy.errors import ConfigError

ReduceDtype = Literal["fp32", "compute"]
MomentFormat = Literal["fp32", "bf16", "int8"]
FrozenFormat = Literal["nf4", "int4", "int8"]
SplitFormat = Literal["split", "24"]
MasterWeights = bool | SplitFormat | Literal[24]


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig(Group):
    """Loss scale of the fp16 modes. The knobs and their defaults are DeepSpeed's (its ``fp16`` section)."""

    static: float | None = None
    """A constant scale. None: dynamic, by the other options."""

    initial_power: int = 16
    """The first dynamic scale is ``2 ** initial_power``."""

    window: int = 1000
    """The scale doubles after this many steps in a row without an overflow."""

    hysteresis: int = 2
    """Overflows before the scale halves; each skips the step."""

    consecutive_hysteresis: bool = False
    """Reset the count of overflows after every good step, not only when the scale doubles."""

    min_scale: float = 1.0
    """The scale never falls below this; an overflow at it is an error."""

    def __post_init__(self) -> None:
        largest = 2.0**127  # the largest power of two in fp32
        check_fields(
            self,
            static=above(0, largest),
            initial_power=at_least(-126, 127),
            window=at_least(1),
            hysteresis=at_least(1),
            min_scale=above(0, largest),
        )


@dataclass(frozen=True, kw_only=True)
class Float8Config(Group):
    """How linear layers multiply in fp8. torchao converts them (``pip install torchao``)."""

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """As in torchao: one scale per tensor, the fastest; or one per row, which rounds less; ``rowwise_with_gw_hp`` also
    computes gradients of weights in the layer's own precision."""

    skip: tuple[str, ...] = ()
    """Modules that are left as they are, named as in ``precision.frozen_except``."""

    def __post_init__(self) -> None:
        check_fields(self, group="precision.matmul")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(Group):
    """Master weights, sums, moments and the loss scale. ``Trainer(precision=...)`` sets the computation's precision."""

    master_weights: MasterWeights = True
    """Keep fp32 master weights with ``bf16-true`` and ``16-true``. ``split``, with ``bf16-true``: the same weights,
    storing only the bits that bf16 weights lack, in 2.125 bytes instead of 4. ``24``: masters of 24 bits, of which 1
    byte is stored. False halves their memory, and the optimizer works in 16 bit."""

    reduce_dtype: ReduceDtype = "fp32"
    """NCCL: sum gradients over ranks in ``fp32``, or with ``compute`` in the dtype of their computation, half the bytes
    in the 16-bit modes. gloo always sums in fp32. At stage 3 with ``bf16-mixed`` and ``16-mixed``, ``compute`` also
    sends the gradients of what is gathered in 16 bits in them, rounded where a weight is used several times."""

    gather: Literal["compute", "fp32"] = "compute"
    """Stage 3: ``compute`` gathers weights as their layers read them: with ``bf16-mixed`` and ``16-mixed`` those of
    linear layers and convolutions in 16 bits, as autocast casts them; with ``matmul`` and its recipe ``tensorwise``
    those of converted layers in fp8. Fewer bytes, same results. ``fp32`` gathers in the dtype of the parameters."""

    fp32_modules: tuple[str, ...] = ()
    """What stays in fp32 with ``bf16-true`` and ``16-true``: classes of modules (``"Router"``), and names, or ends of
    names, of modules, parameters and buffers, with ``*`` for anything (``"layers.*.gate"``). A module stays with all
    that it contains; its inputs are cast to fp32 and its outputs back. Batch norms, and what transformers' models name,
    stay in fp32 anyway."""

    loss_scale: LossScaleConfig | None = None
    """The loss scale of fp16. None: dynamic, with the default options."""

    moments: MomentFormat = "fp32"
    """``bf16`` and ``int8`` store moments in 2 bytes and 1 byte instead of 4, rounded stochastically. For AdamW, Adam,
    SGD, Adagrad and Lion, with or without offload."""

    matmul: Literal["fp8"] | Float8Config | None = None
    """``fp8``: linear layers multiply in fp8, forward and backward, where both sizes are multiples of 16, but for
    output heads, routers and adapters. For GPUs from sm_89 on; other devices emulate it, slower than without. None: the
    Trainer's precision."""

    frozen: FrozenFormat | None = None
    """``nf4``, ``int4`` and ``int8`` store frozen weights of linear layers in 4 or 8 bits (QLoRA), on the device, every
    tier and the wire. Output heads, embeddings and trainable parameters keep their precision."""

    frozen_except: tuple[str, ...] = ()
    """Modules that ``frozen`` leaves as they are, with all that they contain: names, or ends of names, with ``*`` for
    anything (``"vision_tower"``, ``"layers.0.*.down_proj"``)."""

    @property
    def split_masters(self) -> SplitFormat | None:
        """In which format masters are stored that bf16 weights are a part of; None: in one of their own."""
        return None if isinstance(self.master_weights, (bool, int)) else self.master_weights

    @property
    def float8(self) -> Float8Config | None:
        """How linear layers multiply in fp8; None: they do not."""
        assert not isinstance(self.matmul, str)
        return self.matmul

    def __post_init__(self) -> None:
        check_fields(self, group="precision")
        if type(self.master_weights) is int:  # YAML reads it without quotes
            self._set("master_weights", "24")
        if isinstance(self.matmul, str):
            self._set("matmul", Float8Config())
        if self.matmul is not None and self.frozen is not None:
            raise ConfigError(
                f"Got precision.matmul='fp8' with precision.frozen={self.frozen!r}, but quantized weights are rounded "
                "already. Choose one of them."
            )
        if self.frozen_except and self.frozen is None:
            raise ConfigError(
                f"Got precision.frozen_except={list(self.frozen_except)} without precision.frozen, which quantizes "
                'frozen weights. Set precision.frozen="nf4", or leave frozen_except out.'
            )
