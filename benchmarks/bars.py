"""Published figures that `benchmarks.gpu` is compared with, and the peak speed of GPUs, each with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

_KEMPNER = "KempnerForge, benchmarks/mfu_scaling, experiment 01_1gpu_7b"
_PRIME = "PrimeIntellect-ai/prime-rl, pull request 3234"


@dataclass(frozen=True)
class Bar:
    of: str  # a contender, or two with a slash between them
    size: str | None  # a key of `SIZES`. None: any.
    tokens: int  # per optimizer step
    quantity: Literal["tokens_per_s", "mfu", "ratio"]
    value: float
    source: str
    differs: str  # what is not the same there
    gpu: str = "H200"  # part of the name of the GPU that it was measured on


BARS = (
    Bar("zero2", "7B-4k", 32768, "tokens_per_s", 10471.0, _KEMPNER,
        "torch.compile; 51.5 GFLOPs per token, here 51.0"),
    Bar("zero2", "7B-4k", 32768, "mfu", 0.545, _KEMPNER,
        "torch.compile; 57.8 % are printed there, for the embedding table was counted as if it were multiplied"),
    Bar("zero2_offload/zero2", None, 16384, "ratio", 0.90, _PRIME,
        "8 GPUs, a mixture of experts of 30B, without clipping; here one GPU, dense, the global norm clipped"),
    Bar("zero2_offload/zero2", None, 32768, "ratio", 1.0, _PRIME,
        "8 GPUs, a mixture of experts of 30B, without clipping; here one GPU, dense, the global norm clipped"),
)  # fmt: skip

_DENSE_BF16 = (
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("RTX 4090", 165e12),
)
"""From NVIDIA's data sheets, without sparsity, by a part of the name that CUDA knows a GPU by."""


def peak_flops(gpu: str) -> float | None:
    """Return the peak of a GPU for dense products in bf16, in FLOP/s; None if it is not listed.

    >>> peak_flops("NVIDIA H200"), peak_flops("NVIDIA H100 NVL"), peak_flops("Radeon")
    (989000000000000.0, 835000000000000.0, None)
    """
    return next((peak for name, peak in _DENSE_BF16 if name.lower() in gpu.lower()), None)


def compared(throughput: Mapping[str, Any], gpu: str) -> list[dict[str, Any]]:
    """Return every bar of this GPU that was measured, with the figure that was, and its ratio to the bar.

    Args:
        throughput: by size and tokens per step, as `benchmarks.gpu` records it.
        gpu: name of the GPU.
    """
    rows: list[dict[str, Any]] = []
    for bar in BARS:
        for size, by_tokens in throughput.items() if bar.gpu in gpu else ():
            found = by_tokens.get(str(bar.tokens)) if bar.size in (None, size) else None
            value = None if found is None else _figure(found, bar)
            if value is not None:
                rows.append({**asdict(bar), "size": size, "measured": value, "of_bar": value / bar.value})
    return rows


def _figure(found: Mapping[str, Any], bar: Bar) -> float | None:
    if bar.quantity == "ratio":
        return found["ratios"].get(bar.of)
    contender = found["contenders"].get(bar.of, {})
    value = contender.get(bar.quantity)
    return value["median"] if isinstance(value, dict) else value


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return a printed table of what `compared` returned."""
    if not rows:
        return ["no published figure for this GPU and these cases"]
    table = [f"{'figure':48}{'measured':>12}{'bar':>12}{'of bar':>8}"]
    for row in rows:
        name = f"{row['of']}, {row['size']} at {row['tokens']}: {row['quantity']}"
        table.append(f"{name:48}{row['measured']:12.4g}{row['value']:12.4g}{row['of_bar']:8.2f}")
    return table
