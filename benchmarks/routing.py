"""Routing of tokens to experts: the kernels against torch, interleaved in one run.

``OMP_NUM_THREADS=2 python -m benchmarks.routing --record benchmarks/records/routing.json``

For every operation, shape and dtype: the time of the kernel, and for each way to write it in plain torch, the reference
of the operation among them, the median, with its quartiles, of the ratios of its time to that of the kernel in the same
round: above one, the kernel is faster. Before it is timed, every way is checked against the kernel.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import record
from benchmarks.contest import clocked, quartiles, ratios
from ls_strategy.ops import permute, topk
from ls_strategy.ops.extra_library import routing_library

MINUTES = 3
SPREAD = "quartiles over rounds"
SEEDS = "0 for data"
QUICK = ("--tokens", "64", "--width", "32", "--rounds", "2")

Ways = dict[str, Callable[[], Any]]  # by name, "kernel" first


class Routed:
    """Tokens that chose experts at random, and rows of them."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
        self.tokens, self.width, self.experts, self.k = shape
        generator = torch.Generator().manual_seed(0)
        self.scores = torch.randn(self.tokens, self.experts, generator=generator)
        self.probabilities = self.scores.softmax(1)
        self.weights, self.indices = topk.stable_topk(self.probabilities, self.k)
        self.flat = self.indices.flatten()
        self.order, _ = permute.sort_by_expert(self.indices, None, self.experts)
        self.token = self.order // self.k
        self.position = self.order.argsort()
        self.x = torch.randn(self.tokens, self.width, generator=generator).to(dtype)
        self.y = torch.randn(self.tokens * self.k, self.width, generator=generator).to(dtype)
        self.scale = self.weights.flatten()[self.order, None]

    def by_choice(self, rows: Tensor) -> Tensor:
        """``(S, k, h)`` in fp32 from rows of pairs."""
        return rows.index_select(0, self.position).view(self.tokens, self.k, -1).float()

    def index_add(self, rows: Tensor) -> Tensor:
        """Sums in the dtype of the rows: less exact for 16 bits."""
        return torch.zeros_like(self.x).index_add_(0, self.token, rows)


def chain(r: Routed, kernel: bool) -> list[Tensor]:
    """Permute and combine, forward and backward."""
    x, w = r.x.detach().requires_grad_(), r.weights.detach().requires_grad_()
    if kernel:
        out = permute.combine(permute.permute(x, r.order, r.k), r.order, w)
    else:
        rows = x.index_select(0, r.token) * w.flatten()[r.order, None].to(x.dtype)
        out = torch.zeros_like(x).index_add(0, r.token, rows)
    out.backward(r.x)
    assert x.grad is not None
    assert w.grad is not None
    return [out.detach(), x.grad, w.grad]


def operations(r: Routed) -> dict[str, Ways]:
    """Every way of every operation; results compare within rounding to the dtype of the rows."""
    k, order, weights, dtype = r.k, r.order, r.weights, r.x.dtype
    return {
        "sort_by_expert": {
            "kernel": lambda: permute.sort_by_expert(r.indices, None, r.experts),
            "reference": lambda: permute.sort_by_expert_reference(r.indices, None, r.experts),
            "argsort, bincount": lambda: (r.flat.argsort(stable=True), r.flat.bincount(minlength=r.experts)),
        },
        "permute": {
            "kernel": lambda: permute.permute(r.x, order, k),
            "reference": lambda: permute.permute_reference(r.x, order, None, k),
        },
        "sum_pairs": {
            "kernel": lambda: permute.sum_pairs(r.y, order, None, r.tokens, k),
            "reference": lambda: permute.combine_reference(r.y, order, None, r.tokens, k),
            "gather, sum": lambda: r.by_choice(r.y).sum(1).to(dtype),
            "index_add": lambda: r.index_add(r.y),
        },
        "combine": {
            "kernel": lambda: permute.combine(r.y, order, weights),
            "reference": lambda: permute.combine_reference(r.y, order, weights, r.tokens, k),
            "gather, sum": lambda: (r.by_choice(r.y) * weights[:, :, None]).sum(1).to(dtype),
            "index_add": lambda: r.index_add((r.y * r.scale).to(dtype)),
        },
        "gradients of combine": {
            "kernel": lambda: (permute.permute(r.x, order, k, weights), permute.pair_dots(r.x, r.y, order, k)),
            "reference": lambda: (
                permute.permute_reference(r.x, order, weights, k),
                permute.pair_dots_reference(r.x, r.y, order, k),
            ),
            "products, sum": lambda: (
                (rows := r.x.index_select(0, r.token).float()).mul(r.scale).to(dtype),
                (rows * r.y).sum(1)[r.position].view(r.tokens, k),
            ),
        },
        "permute and combine, both passes": {
            "kernel": lambda: chain(r, True),
            "index_select, index_add": lambda: chain(r, False),
        },
    }


def choices(r: Routed) -> dict[str, Ways]:
    """Choosing experts. Among equal probabilities torch chooses otherwise, so that only values are compared."""
    return {
        "topk": {
            "kernel": lambda: topk.stable_topk(r.probabilities, r.k)[0],
            "reference": lambda: r.probabilities.gather(1, topk.topk_indices_reference(r.probabilities, r.k)),
            "torch.topk": lambda: r.probabilities.topk(r.k)[0],
        },
        "softmax and topk": {
            "kernel": lambda: topk.stable_topk(r.scores.softmax(1), r.k)[0],
            "torch.topk": lambda: r.scores.softmax(1).topk(r.k)[0],
        },
    }


def compare(ways: Ways, rounds: int, tolerance: float) -> dict[str, Any]:
    """Microseconds of the kernel, and the ratios to it."""
    trusted = ways["kernel"]()
    for name, way in ways.items():
        torch.testing.assert_close(way(), trusted, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
    times = clocked(ways, rounds, uncounted=0)
    result: dict[str, Any] = {"kernel_us": round(statistics.median(times["kernel"]) * 1e6, 1)}
    for name in list(ways)[1:]:
        result[name] = quartiles(ratios(times[name], times["kernel"]), 2)
    return result


def bench(tokens: int, width: int, rounds: int) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for experts in (8, 64):
        for k in (1, 2):
            for dtype in (torch.float32, torch.bfloat16):
                routed = Routed((tokens, width, experts, k), dtype)
                tolerance = 1e-4 if dtype == torch.float32 else 0.1
                for name, ways in operations(routed).items():
                    if dtype == torch.float32 or name != "sort_by_expert":
                        row = {"operation": name, "experts": experts, "k": k, "dtype": str(dtype).split(".")[1]}
                        results.append(row | compare(ways, rounds, tolerance))
    for experts in (8, 64, 128, 256):
        for k in (1, 2, 8):
            routed = Routed((tokens, 8, experts, k), torch.float32)
            for name, ways in choices(routed).items():
                row = {"operation": name, "experts": experts, "k": k, "dtype": "float32"}
                results.append(row | compare(ways, rounds, 0.0))
    return results


def line(row: dict[str, Any]) -> str:
    ratios = ", ".join(f"{k} {v[1]:.2f} [{v[0]:.2f}, {v[2]:.2f}]" for k, v in row.items() if isinstance(v, list))
    head = f"{row['operation']:32} E={row['experts']:<4}k={row['k']:<2}{row['dtype']:9}"
    return f"{head}{row['kernel_us']:>9.1f} us  {ratios}"


def main() -> None:
    parser = record.parser(__doc__, rounds=41)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=512)
    args = parser.parse_args()
    if not routing_library.available("cpu"):
        raise SystemExit("There are no kernels to measure: no compiler, or LS_STRATEGY_OPS=0.")
    results = bench(args.tokens, args.width, args.rounds)
    print("\n".join(line(row) for row in results))
    found = {
        **record.header("routing"), "threads": torch.get_num_threads(),
        "tokens": args.tokens, "width": args.width, "rounds": args.rounds, "results": results,
    }  # fmt: skip
    record.write(args.record, found)


if __name__ == "__main__":
    main()
