"""Dtypes of parameters, gradients and masters for ``Trainer(precision=...)``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ls_strategy.config import MasterWeights, ReduceDtype
from ls_strategy.errors import ConfigError

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` are summed and averaged: fp32, or fp64 for fp64."""
    return torch.promote_types(torch.float32, dtype)


@dataclass(frozen=True)
class PrecisionPolicy:
    """The dtypes of the model state for one ``Trainer(precision=...)``."""

    name: str
    compute: torch.dtype
    """Dtype of the parameters that the forward reads."""

    master: torch.dtype
    """Dtype of the weights that the optimizer updates."""

    autocast: torch.dtype | None
    """Dtype of ``torch.autocast`` around the steps, for the ``*-mixed`` modes."""

    loss_scaling: bool
    """Whether the loss is scaled so that fp16 gradients do not underflow."""

    reduce_in_fp32: bool = True
    """Whether gradients are summed over ranks in fp32 even if they were computed in 16 bits."""

    @cached_property  # every batch asks
    def cast(self) -> torch.dtype | None:
        """Return the dtype to cast parameters, buffers and inputs to; None for no cast."""
        return None if self.compute == torch.float32 else self.compute

    @property
    def rounds(self) -> bool:
        """Return whether weights are rounded to 16 bits for the forward."""
        return self.compute.itemsize == 2


def resolve_precision(
    name: str, *, master_weights: MasterWeights = True, reduce_dtype: ReduceDtype = "fp32"
) -> PrecisionPolicy:
    """Return the policy for a Lightning precision string.

    ====================  =========  =======================  ========  ==========
    ``Trainer.precision`` parameter  master                   autocast  loss scale
    ====================  =========  =======================  ========  ==========
    ``32-true``           fp32       the parameter itself     no        no
    ``bf16-mixed``        fp32       the parameter itself     bf16      no
    ``16-mixed``          fp32       the parameter itself     fp16      yes
    ``bf16-true``         bf16       fp32 (switchable)        no        no
    ``16-true``           fp16       fp32 (switchable)        no        yes
    ``64-true``           fp64       the parameter itself     no        no
    ====================  =========  =======================  ========  ==========

    Raises:
        ConfigError: ``name`` is not one of the six, or there are no masters to split.
    """
    if isinstance(master_weights, str) and name != "bf16-true":
        raise ConfigError(
            f"Got precision.master_weights={master_weights!r} with Trainer(precision={name!r}), but it splits masters "
            "of bf16 weights. Set precision='bf16-true' on the Trainer, or leave master_weights out."
        )
    low = {"bf16": torch.bfloat16, "16": torch.float16}
    kind, _, mode = name.partition("-")
    in_fp32 = reduce_dtype == "fp32"
    if name == "32-true":
        return PrecisionPolicy(name, torch.float32, torch.float32, None, False, in_fp32)
    if name == "64-true":
        return PrecisionPolicy(name, torch.float64, torch.float64, None, False, in_fp32)
    if name in PRECISIONS and mode == "mixed":
        return PrecisionPolicy(name, torch.float32, torch.float32, low[kind], kind == "16", in_fp32)
    if name in PRECISIONS:
        master = torch.float32 if master_weights else low[kind]
        return PrecisionPolicy(name, low[kind], master, None, kind == "16", in_fp32)
    raise ConfigError(f"Got precision={name!r}, but ZeROStrategy supports {', '.join(PRECISIONS)}. Set one of these.")
