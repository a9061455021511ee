"""Loss of the GPT recipe on real text with products in bf16 and in fp8, several seeds each.

``python -m benchmarks.fp8_losses --record benchmarks/records/fp8_losses.json``

As `moments` does it: a seed decides initial weights and order of the text, the same for every format, so losses are
compared in pairs; what a difference is worth is judged by the spread of the bf16 runs over seeds. On a CPU torchao
emulates the products of fp8 with the same rounding, so the losses are those of a GPU up to the order of summation.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.moments import bench, train
from ls_strategy import Float8Config
from ls_strategy.lightning.strategy import ZeROStrategy

MINUTES = 12
SPREAD = "over seeds"
SEEDS = "1 to --seeds, for weights and the order of the text"
QUICK = ("--seeds", "1", "--steps", "2")

FORMATS = ("bf16", "fp8 tensorwise", "fp8 rowwise", "fp8 rowwise_with_gw_hp")


def with_products(steps: int, name: str, seed: int, cache: Path) -> dict[str, float]:
    """One run whose linear layers multiply in this format; all else is bf16-true at stage 3, with fp32 masters."""
    _, _, recipe = name.partition("fp8 ")
    precision = {"matmul": Float8Config(recipe=recipe)} if recipe else {}  # type: ignore[arg-type]
    return train(ZeROStrategy(3, precision=precision), seed, steps, cache, precision="bf16-true")


def main() -> None:
    bench("fp8_losses", __doc__, FORMATS, with_products, steps=300, baseline="bf16")


if __name__ == "__main__":
    main()
