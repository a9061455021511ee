"""Adapters of PEFT that leave their weights alone on meta, where nobody would notice: the one file that knows which."""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any

from ls_strategy.errors import PlanError

_SKIPPED_ON_META = {
    "peft.tuners.lora.layer": {"LoraLayer.mica_init": "MiCA", "Embedding.mica_init": "MiCA"},
    "peft.tuners.lora.variants": {"KasaLinearVariant.init": "KaSA", "MontecloraLinearVariant.init": "MonteCLoRA"},
}
"""Functions that ask whether a tensor is on meta and then do something else, by module."""


def refuse_skipped(module: str, code: CodeType) -> None:
    """Refuse an adapter whose initialization asks for the device of a tensor, if it does nothing on meta.

    Raises:
        PlanError: it does nothing on meta.
    """
    for path, kind in _SKIPPED_ON_META.get(module, {}).items():
        function: Any = sys.modules[module]
        for name in path.split("."):
            function = getattr(function, name, None)
        if getattr(function, "__code__", None) is code:
            raise PlanError(
                f"Got adapters of kind {kind} in configure_model, which runs on the meta device at stage 3 and with "
                "model parallelism, but PEFT does not initialize them there. Add them to a model that was built under "
                "`with torch.device('cpu'):`, or take another kind."
            )
