"""On one GPU, whole Trainers: throughput with and without offload, the largest GPT, and CIFAR-10 to 94 %.

``python -m benchmarks gpu --record``                          everything; about two hours on one H200
``python -m benchmarks.gpu --parts throughput --sizes 1.3B --contenders zero2 zero2_offload fsdp2 --rounds 1``
``python -m benchmarks.gpu --parts cifar --cifar-data DIR``

Every case is a process of its own: a Trainer that fits the GPT recipe to random tokens, in bf16 with fp32 master
weights, with the norm of all gradients clipped to 1. What does not fit or is not installed is recorded with its reason.

``zero2``, ``zero2_offload``, ``zero3_nvme``  this package: on the device, with states in host memory, on a drive
``fsdp2``, ``fsdp2_offload``                  torch's ``fully_shard``, also with its ``CPUOffloadPolicy``
``deepspeed2``, ``deepspeed2_offload``        DeepSpeed's ZeRO-2 through Lightning, where it is installed

``throughput``  tokens per second, model FLOP utilization (FLOPs of the model, recomputation not counted, over the
                device's peak) and peak memory, for several numbers of tokens per optimizer step. What counts is the
                ratio of offload to none in the same run.
``largest``     the deepest GPT of width 8192 that trains with parameters and states in host memory, and on a drive
``cifar``       seconds of training until the residual network of the recipe reaches 94 % of the test images
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks import record
from benchmarks.contest import spread, turns
from benchmarks.record import ROOT

MINUTES = 120
SPREAD = "quartiles over rounds; the largest model and CIFAR-10: unknown, one run"
SEEDS = "0 for weights and data"
QUICK = (
    "--device", "cpu", "--sizes", "tiny", "--tokens", "64", "--rounds", "1", "--contenders", "zero2", "fsdp2",
    "--tiers", "zero3_offload", "--width", "64", "--most-layers", "1", "--steps", "2",
)  # fmt: skip

PARTS = ("throughput", "largest", "cifar")
CONTENDERS = ("zero2", "zero2_offload", "fsdp2", "fsdp2_offload", "deepspeed2", "deepspeed2_offload")
TIERS = ("zero3_offload", "zero3_nvme")
GOALS = {
    "zero2_offload/zero2 at 16384 tokens, on one H200": 0.85,
    "zero2_offload/zero2 at 65536 tokens, on one H200": 0.95,
    "seconds until 94 % of CIFAR-10, on one H200": 5.0,
}
MARK = "RESULT "
"""Begins the line in which a case says what it found."""


@dataclass(frozen=True)
class Shape:
    """A GPT, and how its batches are cut."""

    layers: int
    width: int
    heads: int
    micro_batch: int
    block: int = 1024
    mlp: str = "gelu"
    positions: str = "learned"
    recompute: bool = False


SIZES = {
    "tiny": Shape(2, 32, 2, micro_batch=2, block=16),
    "124M": Shape(12, 768, 12, micro_batch=8),
    "1.3B": Shape(24, 2048, 16, micro_batch=8, recompute=True),
    "7B": Shape(32, 4096, 32, micro_batch=8, mlp="swiglu", positions="rotary", recompute=True),
}
"""GPT-2 small, and sizes of GPT-3 (Brown et al. 2020, table 2.1) without biases."""

VOCABULARY = 50304
"""GPT-2's 50257, rounded up to a multiple of 64."""


@dataclass(frozen=True)
class Case:
    """One Trainer."""

    contender: str
    shape: Shape
    tokens: int
    """Per optimizer step: a multiple of a micro-batch."""

    steps: int
    device: str
    nvme_path: str

    @property
    def accumulate(self) -> int:
        """Micro-batches per step.

        Raises:
            ValueError: the step is not a whole number of them.
        """
        one = self.shape.micro_batch * self.shape.block
        if self.tokens % one:
            raise ValueError(f"Got {self.tokens} tokens per step, but a micro-batch has {one}: give a multiple of it.")
        return self.tokens // one


def in_process(case: Case, limit_s: float) -> dict[str, Any]:
    """Run a case in a process of its own, which the system ends first if memory is short; return what it found."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--case", json.dumps(asdict(case))]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"failed": f"not over after {limit_s:.0f} s"}
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            found: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return found
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return {"failed": "killed, as by a lack of memory" if done.returncode < 0 else last[:300]}


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
            row = {name: _summary(each) for name, each in found.items() if each}
            results.setdefault(size, {})[str(tokens)] = {"contenders": row, "ratios": _ratios(row)}
            _print(size, tokens, results[size][str(tokens)])
    return results


def _summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    failed = next((each for each in found if "failed" in each), None)
    if failed is not None:
        return failed
    return {**found[-1], "tokens_per_s": spread([each["tokens_per_s"] for each in found])}


def _ratios(row: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Tokens per second with offload over those without, for each that has both; and ours over each peer's."""
    speed = {name: each["tokens_per_s"]["median"] for name, each in row.items() if "failed" not in each}
    ratios = {f"{n}/{n[:-8]}": speed[n] / speed[n[:-8]] for n in speed if n.endswith("_offload") and n[:-8] in speed}
    for ending in ("", "_offload"):
        ours = speed.get(f"zero2{ending}")
        for peer in (f"fsdp2{ending}", f"deepspeed2{ending}"):
            if ours is not None and peer in speed:
                ratios[f"zero2{ending}/{peer}"] = ours / speed[peer]
    return ratios


def _print(size: str, tokens: int, found: dict[str, Any]) -> None:
    print(f"\n{size}, {tokens} tokens per step")
    for name, each in found["contenders"].items():
        if "failed" in each:
            print(f"  {name:20} {each['failed']}")
            continue
        speed = each["tokens_per_s"]
        mfu = "" if each["mfu"] is None else f"MFU {each['mfu']:.3f}  "
        memory = f"peak {each['peak_device_gib']:.1f} GiB, host {each['peak_host_gib']:.1f} GiB"
        between = f"[{speed['q1']:.0f}, {speed['q3']:.0f}]"
        print(f"  {name:20} {speed['median']:12.0f} tokens/s {between}  {mfu}{memory}  loss {each['loss']:.6f}")
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
    """The command line."""
    parser = record.parser(__doc__, rounds=3, rounds_help="Trainers per contender")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: to see that it runs")
    parser.add_argument("--sizes", nargs="+", default=["124M", "1.3B", "7B"], choices=list(SIZES))
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
    parser.add_argument("--limit-s", type=float, default=1200, help="seconds after which a Trainer has failed")
    parser.add_argument("--case", default=None, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Parse, measure, print, write the record."""
    args = options().parse_args()
    if args.case is not None:
        from benchmarks.gpu_case import run

        given = json.loads(args.case)
        print(MARK + json.dumps(run(Case(**{**given, "shape": Shape(**given["shape"])}))), flush=True)
        return
    head = record.header("gpu", private=tuple(each for each in (args.nvme_path, args.cifar_data) if each))
    parts = {"throughput": throughput, "largest": largest, "cifar": cifar}
    results: dict[str, Any] = {}
    for name in args.parts:
        results[name] = parts[name](args)
        print(json.dumps({name: results[name]}) if name != "throughput" else "", flush=True)
        record.write(
            args.record, {**head, "rounds": args.rounds, "steps": args.steps, "goals": GOALS, "results": results}
        )


if __name__ == "__main__":
    main()
