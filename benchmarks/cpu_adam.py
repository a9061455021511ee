"""AdamW of a flat buffer on the CPU against its peers, interleaved in one run.

``python -m benchmarks.cpu_adam --record benchmarks/records/cpu_adam.json``

Two jobs. *fp32*: fp32 gradients, nothing else. *mixed*: what a mixed-precision step asks for, a bf16 gradient, unscaled
and clipped, and a bf16 copy of the new parameters. The peers get their casts in as few passes as they can: one copy of
the gradient to a buffer that is kept, and one of the parameters (torch takes the factor into its fused kernel,
DeepSpeed needs a pass). The buffers are far larger than the last-level cache; every contender takes its turn in every
round, and what is reported is the median of the ratios round by round, with quartiles.

Bandwidth is of the bytes an update has to move, each read and written once; what else the caches fetch (write-allocate)
does not count, neither for the updates nor for the triad ``a = b + s * c`` that they are compared with (12 bytes each).
"""

from __future__ import annotations

import importlib.util
import os
import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import record
from benchmarks.contest import clocked, ratios, spread
from ls_strategy.ops import moments, native, update

MINUTES = 1
SPREAD = "quartiles over rounds"
SEEDS = "none set: times do not depend on the values"
QUICK = ("--numel", "65536", "--rounds", "2", "--threads", "1")

SETTINGS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
UNSCALE, CLIP = 1 / 3, 0.7
# Per element: parameter and two moments read and written, gradient read, copy written.
BYTES = {
    "fp32": 3 * 8 + 4,
    "mixed": 3 * 8 + 2 + 2,
    "mixed, bf16 moments": 8 + 2 * 4 + 2 + 2,
    "mixed, int8 moments": 8 + 2 * 2 + 2 + 2,
}


class Buffers:
    """What all contenders share; values do not matter, as no branch depends on them."""

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.param = torch.randn(numel)
        self.grad = torch.randn(numel)
        self.grad_bf16 = self.grad.bfloat16()
        self.out = torch.empty(numel, dtype=torch.bfloat16)
        self.exp_avg, self.exp_avg_sq = torch.randn(numel) * 0.1, torch.rand(numel)
        self.step = 0


def ours(b: Buffers, moment_format: moments.MomentFormat, mixed: bool) -> Callable[[], None]:
    if moment_format == "fp32":
        stored = moments.Moment(b.exp_avg, None, True), moments.Moment(b.exp_avg_sq, None, False)
    else:
        stored = moments.empty(b.numel, moment_format, True), moments.empty(b.numel, moment_format, False)
    job: dict[str, Any] = {"unscale": UNSCALE, "clip": torch.tensor(CLIP), "out": b.out} if mixed else {}
    grad = b.grad_bf16 if mixed else b.grad

    def step() -> None:
        b.step += 1
        update.adamw_(b.param, *stored, grad, **SETTINGS, step=b.step, decoupled=True, seed=b.step, **job)

    return step


def torch_fused(b: Buffers, mixed: bool) -> Callable[[], None]:
    """torch's fused kernel on the same flat buffers."""
    count = torch.ones(())
    factor = torch.tensor(1 / (UNSCALE * CLIP))

    def step() -> None:
        if mixed:
            b.grad.copy_(b.grad_bf16)
        torch._fused_adamw_(
            [b.param], [b.grad], [b.exp_avg], [b.exp_avg_sq], [], [count],
            lr=SETTINGS["lr"], beta1=SETTINGS["beta1"], beta2=SETTINGS["beta2"], eps=SETTINGS["eps"],
            weight_decay=SETTINGS["weight_decay"], amsgrad=False, maximize=False,
            grad_scale=factor if mixed else None, found_inf=None,
        )  # fmt: skip
        if mixed:
            b.out.copy_(b.param)

    return step


def deepspeed(b: Buffers, mixed: bool) -> Callable[[], None]:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # pyright: ignore[reportMissingImports]

    param = torch.nn.Parameter(b.param)
    param.grad = b.grad
    optimizer = DeepSpeedCPUAdam(
        [param], lr=SETTINGS["lr"], betas=(SETTINGS["beta1"], SETTINGS["beta2"]), weight_decay=0.1, adamw_mode=True
    )

    def step() -> None:
        if mixed:
            b.grad.copy_(b.grad_bf16).mul_(UNSCALE * CLIP)
        optimizer.step()
        if mixed:
            b.out.copy_(b.param)

    return step


def triad(b: Buffers) -> Callable[[], object]:
    """The bandwidth to compare with: torch, two streams read and one written."""
    return lambda: torch.add(b.param, b.exp_avg, alpha=0.5, out=b.grad)


def jobs(b: Buffers) -> dict[str, Callable[[], None]]:
    table = {
        "triad": triad(b),
        "fp32": ours(b, "fp32", mixed=False),
        "fp32, torch": torch_fused(b, mixed=False),
        "mixed": ours(b, "fp32", mixed=True),
        "mixed, bf16 moments": ours(b, "bf16", mixed=True),
        "mixed, int8 moments": ours(b, "int8", mixed=True),
        "mixed, torch": torch_fused(b, mixed=True),
    }
    if importlib.util.find_spec("deepspeed"):
        table |= {"fp32, deepspeed": deepspeed(b, mixed=False), "mixed, deepspeed": deepspeed(b, mixed=True)}
    return table


def summarise(times: dict[str, list[float]], numel: int) -> dict[str, Any]:
    """Milliseconds, share of the triad's bandwidth, and how many times faster than the peers."""
    results: dict[str, Any] = {}
    triad_rate = 12 / statistics.median(times["triad"])
    for name, seconds in times.items():
        row: dict[str, Any] = {"milliseconds": spread([1e3 * s for s in seconds])}
        rate = BYTES.get(name, 12) / statistics.median(seconds)
        if name in BYTES or name == "triad":
            row |= {"gb_per_s": round(rate * numel / 1e9, 1), "share_of_triad": round(rate / triad_rate, 2)}
        job = name.split(",")[0]
        for peer in ("torch", "deepspeed"):
            other = times.get(f"{job}, {peer}")
            if name in BYTES and other:
                row[f"times_faster_than_{peer}"] = spread(ratios(other, seconds))
        if name.endswith("moments"):
            row["times_faster_than_fp32_moments"] = spread(ratios(times["mixed"], seconds))
        results[name] = row
    return results


def main() -> None:
    parser = record.parser(__doc__, rounds=15)
    parser.add_argument("--numel", type=int, default=1 << 26, help="elements of the flat buffer")
    parser.add_argument("--threads", type=int, default=2, help="compute threads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not native.available("cpu"):
        raise SystemExit("no compiled kernels to measure")
    buffers = Buffers(args.numel)
    results = summarise(clocked(jobs(buffers), args.rounds), args.numel)
    for name, row in results.items():
        ratios = {k.removeprefix("times_"): v["median"] for k, v in row.items() if k.startswith("times")}
        print(f"{name:22}{row['milliseconds']['median']:>8.1f} ms  {row.get('share_of_triad', '')!s:>5}  {ratios}")
    found = {
        **record.header("cpu_adam"),
        "threads": args.threads,
        "numel": args.numel,
        "rounds": args.rounds,
        "instruction_set": ("portable", "AVX2", "AVX-512")[native.limit_isa(2)],
        "results": results,
    }
    record.write(args.record, found)


if __name__ == "__main__":
    main()
