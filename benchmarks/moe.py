"""Forward and backward of a Mixture-of-Experts layer against DeepSpeed's, interleaved in one run.

``python -m benchmarks.moe --ranks 2 --record benchmarks/records/moe.json``

Both layers have the same weights of the experts and of the router, and get the same tokens. ``capacity``: at most
``tokens / experts * k`` pairs per expert, the rest is dropped; DeepSpeed pads every expert to that. ``dropless``: all
pairs; DeepSpeed pads every expert to the load of the busiest. ``uneven``: tokens have a common part, as those of a
model have, which makes some experts popular.

*busiest* is the highest load over the mean one, before any pair is dropped. *time* is the median of the ratios to
DeepSpeed in the same round, with its quartiles, on the slowest rank. Needs DeepSpeed (the ``bench`` extra).
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import record
from benchmarks.contest import quartiles, ratios, turns
from ls_strategy.distributed.axis import Axis
from ls_strategy.distributed.comm import make_comm
from ls_strategy.moe.feed_forward import FeedForward
from ls_strategy.moe.layer import MoE
from ls_strategy.moe.losses import moe_losses
from ls_strategy.moe.parallel import apply_expert_parallel
from ls_strategy.testing import spawn

MINUTES = 3
SPREAD = "quartiles over rounds"
SEEDS = "0 for weights, the rank for data"
QUICK = (
    "--ranks", "1", "2", "--tokens", "64", "--hidden", "16", "--ffn", "32", "--experts", "4", "--rounds", "2",
    "--cases", "capacity, k=1", "dropless, k=1",
)  # fmt: skip

CASES = {
    "capacity, k=1": {"k": 1, "drop_tokens": True},
    "capacity, k=2": {"k": 2, "drop_tokens": True},
    "dropless, k=1": {"k": 1, "drop_tokens": False},
    "dropless, k=2": {"k": 2, "drop_tokens": False},
    "capacity, k=2, uneven": {"k": 2, "drop_tokens": True},
    "dropless, k=1, uneven": {"k": 1, "drop_tokens": False},
    "dropless, k=2, uneven": {"k": 2, "drop_tokens": False},
}

Step = Callable[[Tensor, Tensor], Tensor]


def build(sizes: dict[str, int], options: dict[str, Any]) -> MoE:
    """This package's layer; all ranks draw the same weights."""
    torch.manual_seed(0)
    expert = FeedForward(sizes["hidden"], sizes["ffn"])
    return MoE(sizes["hidden"], expert, sizes["experts"], balance_loss=0.01, **options)


def ours(sizes: dict[str, int], options: dict[str, Any]) -> Step:
    """The layer, its experts over all ranks."""
    layer = build(sizes, options)
    if dist.get_world_size() > 1:
        apply_expert_parallel(layer, Axis("expert", make_comm()))

    def step(x: Tensor, grad: Tensor) -> Tensor:
        layer.zero_grad()
        y = layer(x)
        torch.autograd.backward([y, moe_losses(layer)], [grad, None])
        return y.detach()

    return step


def deepspeeds(sizes: dict[str, int], options: dict[str, Any]) -> Step:
    """DeepSpeed's, with the same weights."""
    from deepspeed.moe.layer import MoE as DeepSpeedMoE  # pyright: ignore[reportMissingImports]

    source = build(sizes, options)
    expert = FeedForward(sizes["hidden"], sizes["ffn"])
    layer: Any = DeepSpeedMoE(
        sizes["hidden"], expert, sizes["experts"], ep_size=dist.get_world_size(),
        k=options["k"], drop_tokens=options["drop_tokens"],
    )  # fmt: skip
    layer.set_deepspeed_parallelism()
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.copy_(source.router.weight)
        for own in layer.deepspeed_moe.experts.deepspeed_experts:
            for name, parameter in own.named_parameters():
                parameter.copy_(source.experts.get_parameter(name)[0])

    def step(x: Tensor, grad: Tensor) -> Tensor:
        layer.zero_grad()
        y, loss, _ = layer(x)
        torch.autograd.backward([y, 0.01 * loss], [grad, None])
        return y.detach()

    return step


def tokens(name: str, sizes: dict[str, int], rank: int) -> tuple[Tensor, Tensor]:
    """One rank's ``(1, tokens, hidden)``, and the gradient from above."""
    generator = torch.Generator().manual_seed(rank)
    x, grad = torch.randn(2, 1, sizes["tokens"], sizes["hidden"], generator=generator)
    if "uneven" in name:
        x += torch.randn(sizes["hidden"], generator=torch.Generator().manual_seed(1))
    return x.requires_grad_(), grad


def busiest(name: str, sizes: dict[str, int], x: Tensor) -> float:
    """Highest load of an expert over the mean one, of all ranks' tokens."""
    layer = build(sizes, CASES[name])
    layer(x)
    load = layer.statistics().routed
    dist.all_reduce(load)
    return float(load.max() / load.float().mean())


def contend(rank: int, world: int, sizes: dict[str, int], rounds: int, names: list[str]) -> dict[str, Any]:
    """Seconds by case and contender, and how uneven the loads were."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # pyright: ignore[reportMissingImports]

    deepspeed.init_distributed("gloo", verbose=False)
    found: dict[str, Any] = {}
    for name in names:
        x, grad = tokens(name, sizes, rank)
        steps = {"ours": ours(sizes, CASES[name]), "DeepSpeed": deepspeeds(sizes, CASES[name])}
        seconds: dict[str, list[float]] = {who: [] for who in steps}
        if CASES[name] == {"k": 1, "drop_tokens": False}:  # nothing random, nothing dropped
            torch.testing.assert_close(steps["ours"](x, grad), steps["DeepSpeed"](x, grad), rtol=1e-4, atol=1e-5)
        for counts, who in turns(list(steps), rounds, uncounted=2):
            dist.barrier()
            begin = time.perf_counter()
            steps[who](x, grad)
            slowest = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if counts:
                seconds[who].append(float(slowest))
        found[name] = {"seconds": seconds, "busiest": round(busiest(name, sizes, x), 2)}
    return found


def bench(ranks: int, sizes: dict[str, int], rounds: int, names: list[str]) -> dict[str, Any]:
    """Quartiles of the ratios, median milliseconds, loads, by case."""
    summary: dict[str, Any] = {}
    for name, found in spawn(contend, ranks, sizes, rounds, names, timeout_s=1200)[0].items():
        seconds = found["seconds"]
        summary[name] = {
            "time": quartiles(ratios(seconds["ours"], seconds["DeepSpeed"])),
            "ms": {who: round(1e3 * statistics.median(values), 2) for who, values in seconds.items()},
            "busiest": found["busiest"],
        }
    return summary


def main() -> None:
    parser = record.parser(__doc__, rounds=15)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokens", type=int, default=2048, help="per rank")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--ffn", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    args = parser.parse_args()
    sizes = {name: getattr(args, name) for name in ("tokens", "hidden", "ffn", "experts")}
    results = {f"{n} ranks" if n > 1 else "1 rank": bench(n, sizes, args.rounds, args.cases) for n in args.ranks}
    print(json.dumps(results, indent=1))
    record.write(args.record, {**record.header("moe"), **sizes, "rounds": args.rounds, "results": results})


if __name__ == "__main__":
    main()
