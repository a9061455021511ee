"""``compile``: which parts of the model run as compiled graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ls_strategy.checked import check_fields
from ls_strategy.config.group import Group

_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes that record addresses of parameters, which stage 3 gives anew with every gather."""


@dataclass(frozen=True, kw_only=True)
class CompileConfig(Group):
    """What ``torch.compile`` compiles, and how. The short form ``"blocks"`` or ``"model"`` sets ``regions``."""

    regions: Literal["blocks", "model"] | None = None
    """``blocks``: every block; equal blocks share a graph. ``model``: also what lies between blocks, below stage 3 in
    one graph. None: only what the module compiles itself."""

    backend: str = "inductor"
    """As in ``torch.compile``. ``inductor`` needs a C++ compiler on CPUs, Triton on GPUs."""

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """As in ``torch.compile``. ``reduce-overhead`` and ``max-autotune`` record CUDA graphs: stages 0 to 2 only."""

    dynamic: bool | None = None
    """As in ``torch.compile``: whether sizes may change between calls. None: once one has."""

    fullgraph: bool = False
    """As in ``torch.compile``: an error where a graph would break."""

    @staticmethod
    def short_form(value: Any, stage: Any) -> dict[str, Any]:
        """Return the options that ``"blocks"``, ``"model"`` or None sets."""
        return {"regions": value}

    @property
    def records_addresses(self) -> bool:
        """Whether the mode records CUDA graphs."""
        return self.regions is not None and self.mode in _CUDA_GRAPHS

    def __post_init__(self) -> None:
        check_fields(self, group="compile")
