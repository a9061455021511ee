"""Loss of the GPT recipe on real text in bf16-true with masters in fp32, in 24 bits and without any, several seeds.

``python -m benchmarks.masters --record benchmarks/records/masters.json``

As `moments` does it: a seed decides initial weights and order of the text, the same for every format, so losses are
compared in pairs; what a difference is worth is judged by the spread of the fp32 runs over seeds. Split masters are not
among them: they have the bits of fp32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.moments import bench, train
from ls_strategy.lightning.strategy import ZeROStrategy

MINUTES = 4
SPREAD = "over seeds"
SEEDS = "1 to --seeds, for weights and the order of the text"
QUICK = ("--seeds", "1", "--steps", "2")

FORMATS: dict[str, Any] = {"fp32": True, "24": "24", "none": False}


def with_masters(steps: int, name: str, seed: int, cache: Path) -> dict[str, float]:
    """One run with masters of this format."""
    strategy = ZeROStrategy(1, precision={"master_weights": FORMATS[name]})
    return train(strategy, seed, steps, cache, precision="bf16-true")


def main() -> None:
    bench("masters", __doc__, tuple(FORMATS), with_masters, steps=300)


if __name__ == "__main__":
    main()
