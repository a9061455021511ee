"""What a program did: every training loss of rank 0, as the last line of its output."""

from __future__ import annotations

import json
import os
from typing import Any

import torch

MARK = "LOSSES "  # start of the line
NUDGE = "LS_BENCH_NUDGE"
"""Variable: with 1, all weights change by a unit in the last place before training. What comes of that is rounding."""


def recorder(callback: type) -> Any:
    """Return a callback that prints the losses at the end. ``callback``: the base class of the Lightning package."""

    class Losses(callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.losses: list[float] = []

        def on_train_start(self, trainer: Any, module: Any) -> None:
            if os.environ.get(NUDGE) == "1":
                with torch.no_grad():
                    for p in module.parameters():
                        p.copy_(torch.nextafter(p, torch.full_like(p, torch.inf)))

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            self.losses.append(float(outputs["loss"]))

        def on_train_end(self, trainer: Any, module: Any) -> None:
            if trainer.global_rank == 0:
                print(f"\n{MARK}{json.dumps(self.losses)}", flush=True)

    return Losses()
