"""On one GPU, whole Trainers: throughput with and without offload, the largest GPT, and CIFAR-10 to 94 %.

``python -m benchmarks gpu --record``                          everything; about two hours on one H200
``python -m benchmarks.gpu --minutes 10 --record PATH``        what says most, within ten minutes
``python -m benchmarks.gpu --parts throughput --sizes 1.3B --contenders zero2 zero2_offload fsdp2 --rounds 1``
``python -m benchmarks.gpu --parts cifar --cifar-data DIR``

Every case is a process of its own: a Trainer that fits the GPT recipe to random tokens, in bf16 with fp32 master
weights, with the norm of all gradients clipped to 1. What does not fit or is not installed is recorded with its reason.

``zero2``, ``zero2_offload``, ``zero3_nvme``  this package: on the device, with states in host memory, on a drive
``fsdp2``, ``fsdp2_offload``                  torch's ``fully_shard``, also with its ``CPUOffloadPolicy``
``deepspeed2``, ``deepspeed2_offload``        DeepSpeed's ZeRO-2 through Lightning, where it is installed

``throughput``  tokens per second, model FLOP utilization and peak memory, for several numbers of tokens per optimizer
                step. What counts are ratios in the same run: offload to none, this package to its peers; and the
                published figures of `benchmarks.bars`, where this is the GPU that they were measured on.
``largest``     the deepest GPT of width 8192 that trains with parameters and states in host memory, and on a drive
``cifar``       seconds of training until the residual network of the recipe reaches 94 % of the test images

MFU is (6 N + 12 L W T) * tokens per second / peak: N the weights that are multiplied (the head is, the embedding table
is not), L layers of width W, T tokens per sequence, recomputation not counted, and the peak that `benchmarks.bars`
lists for dense products in bf16.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from typing import Any

from benchmarks import bars, record
from benchmarks.contest import turns
from benchmarks.gpu_trainers import CONTENDERS, MARK, SIZES, Case, Shape, in_process, line_of, ratios, summary

MINUTES = 120
SPREAD = "quartiles over rounds; the largest model and CIFAR-10: unknown, one run"
SEEDS = "0 for weights and data"
QUICK = (
    "--device", "cpu", "--sizes", "tiny", "--tokens", "64", "--rounds", "1", "--contenders", "zero2", "fsdp2",
    "--tiers", "zero3_offload", "--width", "64", "--most-layers", "1", "--steps", "2",
)  # fmt: skip

PARTS = ("throughput", "largest", "cifar")
TIERS = ("zero3_offload", "zero3_nvme")
GOALS = {"seconds until 94 % of CIFAR-10, on one H200": 5.0}


def throughput(args: argparse.Namespace) -> dict[str, Any]:
    """All contenders in turns, for every size and number of tokens per step."""
    results: dict[str, Any] = {}
    for size in args.sizes:
        for tokens in args.tokens:
            case = Case("", SIZES[size], tokens, args.steps, args.device, args.nvme_path)
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in args.contenders}
            for _, name in turns(args.contenders, args.rounds):
                if not any("failed" in each for each in found[name]):  # what has failed once will do so again
                    found[name].append(in_process(replace(case, contender=name), args.limit_s))
            row = {name: summary(each) for name, each in found.items() if each}
            results.setdefault(size, {})[str(tokens)] = {"contenders": row, "ratios": ratios(row)}
            _print(size, tokens, results[size][str(tokens)])
    return results


def _print(size: str, tokens: int, found: dict[str, Any]) -> None:
    print(f"\n{size}, {tokens} tokens per step")
    for name, each in found["contenders"].items():
        print(line_of(name, each))
    for name, ratio in found["ratios"].items():
        print(f"  {name:40} x {ratio:.3f}")


def largest(args: argparse.Namespace) -> dict[str, Any]:
    """For each tier, double the layers until training fails, then halve the interval."""
    results: dict[str, Any] = {}
    for tier in args.tiers:
        tried: dict[int, dict[str, Any]] = {}

        def trains(layers: int, tier: str = tier, tried: dict[int, dict[str, Any]] = tried) -> bool:
            shape = Shape(layers, args.width, max(args.width // 128, 1), 1, args.block, recompute=True)
            case = Case(tier, shape, args.block, args.steps, args.device, args.nvme_path)
            tried[layers] = in_process(case, args.limit_s)
            print(f"  {tier}, {layers} layers: {tried[layers].get('failed', 'trains')}", flush=True)
            return "failed" not in tried[layers]

        fits = most(trains, args.most_layers)
        results[tier] = {"layers": fits, "width": args.width, **tried.get(fits, {}), "next": tried.get(fits + 1)}
    return results


def most(trains: Any, limit: int) -> int:
    """Return the largest number up to ``limit`` for which ``trains`` holds, by doubling and halving; 0 if none.

    >>> most(lambda layers: layers <= 11, 64), most(lambda layers: True, 5), most(lambda layers: False, 5)
    (11, 5, 0)
    """
    good, bad = 0, 1
    while bad <= limit and trains(bad):
        good, bad = bad, 2 * bad
    bad = min(bad, limit + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if trains(middle) else (good, middle)
    return good


def cifar(args: argparse.Namespace) -> dict[str, Any]:
    """Train the recipe's residual network until it knows 94 % of the test images."""
    from benchmarks.gpu_case import until_accurate

    if args.cifar_data is None:
        return {"failed": "no images: give --cifar-data with a folder that has cifar-10-batches-py"}
    return until_accurate(args.cifar_data, args.device, args.accuracy)


def options() -> argparse.ArgumentParser:
    parser = record.parser(__doc__, rounds=3, rounds_help="Trainers per contender")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: to see that it runs")
    parser.add_argument("--sizes", nargs="+", default=["124M", "1.3B", "7B", "7B-4k"], choices=list(SIZES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 16384, 32768, 65536], help="per optimizer step")
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=[*CONTENDERS, *TIERS])
    parser.add_argument(
        "--steps", type=int, default=20, help="optimizer steps per Trainer; the first four do not count"
    )
    parser.add_argument("--tiers", nargs="+", default=list(TIERS), choices=TIERS, help="for the largest model")
    parser.add_argument("--width", type=int, default=8192, help="of the largest model")
    parser.add_argument("--block", type=int, default=1024, help="tokens per sequence of the largest model")
    parser.add_argument("--most-layers", type=int, default=256, help="of the largest model: where the search ends")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="folder on a local drive")
    parser.add_argument("--cifar-data", default=None, help="folder with cifar-10-batches-py")
    parser.add_argument("--accuracy", type=float, default=0.94, help="of the test images, where CIFAR-10 ends")
    parser.add_argument(
        "--minutes", type=float, default=None, help="in place of all parts, what says most within these"
    )
    parser.add_argument("--limit-s", type=float, default=1200, help="seconds after which a Trainer has failed")
    parser.add_argument("--case", default=None, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    began = time.monotonic()
    parser = options()
    args = parser.parse_args()
    if args.minutes is not None and args.minutes <= 0:
        parser.error(f"--minutes {args.minutes:g} leaves no time: give a positive number.")
    if args.case is not None:
        from benchmarks.gpu_case import run

        given = json.loads(args.case)
        print(MARK + json.dumps(run(Case(**{**given, "shape": Shape(**given["shape"])}))), flush=True)
        return
    head = record.header("gpu", private=tuple(each for each in (args.nvme_path, args.cifar_data) if each))
    if args.minutes is not None:
        from benchmarks import gpu_minutes

        gpu_minutes.Program(args, head, began + 60 * args.minutes).run()
        return
    parts = {"throughput": throughput, "largest": largest, "cifar": cifar}
    results: dict[str, Any] = {}
    for name in args.parts:
        results[name] = parts[name](args)
        if name == "throughput":
            results["bars"] = bars.compared(results[name], str(head.get("gpus", "")))
            print("\n" + "\n".join(bars.lines(results["bars"])), flush=True)
        else:
            print(json.dumps({name: results[name]}), flush=True)
        record.write(
            args.record, {**head, "rounds": args.rounds, "steps": args.steps, "goals": GOALS, "results": results}
        )


if __name__ == "__main__":
    main()
