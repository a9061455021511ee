"""Migration from DeepSpeed: its configuration, learning-rate schedules and checkpoints. Does not need DeepSpeed.

from ls_strategy.extras.deepspeed import translate

print(translate("ds_config.json").report())
"""

from __future__ import annotations

from ls_strategy.extras.deepspeed.config import Translation, translate
from ls_strategy.extras.deepspeed.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "LRRangeTest",
    "OneCycle",
    "Translation",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "translate",
]
