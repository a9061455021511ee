"""`benchmarks.gpu` in a given time: the cases that say most first, none that would not end in what is left."""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from benchmarks import bars, record
from benchmarks.gpu_case import config_of
from benchmarks.gpu_trainers import SIZES, Case, in_process, line_of, ratios, summary
from recipes.gpt.network import GPT, GPTConfig

START_S = 30.0  # assumed for what a Trainer does before its first step: imports, the device, kernels
INIT_PER_S = 1e8  # assumed parameters that the host initializes per second
SHARE = 0.4  # assumed share of the device's peak, until cases have been measured
CPU_FLOPS, OTHER_FLOPS = 1e10, 100e12  # assumed peak of the host, and of a GPU that `benchmarks.bars` does not list
WRITE_S = 1.0  # left for the record when a case has to be ended


@dataclass(frozen=True)
class Planned:
    contender: str
    size: str
    tokens: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.contender}, {self.size} at {self.tokens}"


ON_GPU = (
    Planned("zero2", "1.3B", 16384, 12),
    Planned("zero2_offload", "1.3B", 16384, 12),
    Planned("zero2", "7B-4k", 32768, 8),
    Planned("fsdp2", "1.3B", 16384, 12),
    Planned("zero2_offload", "1.3B", 32768, 12),
    Planned("zero2", "1.3B", 32768, 12),
    Planned("fsdp2", "7B-4k", 32768, 8),
    Planned("fsdp2_offload", "1.3B", 16384, 12),
    Planned("deepspeed2", "1.3B", 16384, 12),
    Planned("deepspeed2_offload", "1.3B", 16384, 12),
    Planned("deepspeed2", "7B-4k", 32768, 8),
)
ON_CPU = tuple(Planned(contender, "tiny", 64, 3) for contender in ("zero2", "zero2_offload", "fsdp2"))
"""To see that it runs."""


def work_of(case: Case) -> tuple[int, float]:
    """Return the parameters of a case, and the FLOPs of all of its steps, recomputation included."""
    parameters, per_token = _network(config_of(case))
    return parameters, (4 / 3 if case.shape.recompute else 1) * per_token * case.tokens * case.steps


@cache
def _network(config: GPTConfig) -> tuple[int, int]:
    """Return the parameters of a network, and its FLOPs per token."""
    with torch.device("meta"):
        network = GPT(config)
    return sum(p.numel() for p in network.parameters()), network.flops_per_token()


def seconds_of(case: Case, peak: float) -> float:
    """Return how long a case is assumed to take on a device with this peak, in FLOP/s."""
    parameters, flops = work_of(case)
    slower = 1.5 if case.contender.endswith("_offload") else 1.0
    return START_S + parameters / INIT_PER_S + slower * flops / (SHARE * peak)


class Program:
    """Runs cases until the time is over, with a record that is valid whenever this process is killed."""

    def __init__(self, args: argparse.Namespace, head: dict[str, Any], end: float) -> None:
        """``args`` of `benchmarks.gpu`; ``head`` of the record; ``end`` as `time.monotonic` says it."""
        self._end = end
        self._args = args
        self._head = {**head, "spread": "unknown: one run of each case", "rounds": 1}
        self._gpu = "" if args.device == "cpu" else str(head.get("gpus", [""])[0])
        self._peak = CPU_FLOPS if args.device == "cpu" else bars.peak_flops(self._gpu) or OTHER_FLOPS
        self._paces: list[float] = []
        self._throughput: dict[str, Any] = {}
        self._seconds: dict[str, dict[str, float]] = {}
        self._left_out: dict[str, str] = {}

    def run(self) -> None:
        """Run what fits, in this order, and print what was found."""
        program = ON_CPU if self._args.device == "cpu" else ON_GPU
        self._left_out = {each.name: "not begun" for each in program}
        self._write()
        for planned in program:
            self._try(planned)
            self._write()
        print("\n" + "\n".join(bars.lines(bars.compared(self._throughput, self._gpu))))
        for name, reason in self._left_out.items():
            print(f"left out: {name}: {reason}")

    def _try(self, planned: Planned) -> None:
        args = self._args
        case = Case(planned.contender, SIZES[planned.size], planned.tokens, planned.steps, args.device, args.nvme_path)
        assumed = seconds_of(case, self._peak)
        needed = assumed * (statistics.median(self._paces) if self._paces else 1.0)
        left = self._end - time.monotonic() - WRITE_S
        if needed > left:
            self._left_out[planned.name] = f"needs about {needed:.0f} s, and {max(left, 0):.0f} s were left"
            return
        self._left_out[planned.name] = "was running when this was written"
        self._write()
        began = time.monotonic()
        found = summary([in_process(case, min(left, args.limit_s))])
        took = time.monotonic() - began
        del self._left_out[planned.name]
        if "failed" not in found:
            self._paces.append(took / assumed)
        self._seconds[planned.name] = {"assumed": round(needed, 1), "took": round(took, 1)}
        row = self._throughput.setdefault(planned.size, {}).setdefault(str(planned.tokens), {"contenders": {}})
        row["contenders"][planned.contender] = found
        row["ratios"] = ratios(row["contenders"])
        print(f"{planned.name}, {took:.0f} s\n{line_of(planned.contender, found)}", flush=True)

    def _write(self) -> None:
        results = {
            "throughput": self._throughput,
            "bars": bars.compared(self._throughput, self._gpu),
            "seconds": self._seconds,
            "left_out": self._left_out,
        }
        record.write(self._args.record, {**self._head, "minutes": self._args.minutes, "results": results})
