"""Recompute and offload of activations: what a step costs and what it saves, interleaved in one run.

``python -m benchmarks.activations --record benchmarks/records/activations.json``

One process runs forward and backward of the GPT recipe model, on one batch, with each choice in turn:

``none``                   everything that backward needs is kept
``full``                   the blocks' inputs are kept
``selective``              also the outputs of matrix products and of attention
``offload to NVMe``        everything that backward needs is written to a file and read back
``full, offload to NVMe``  the blocks' inputs are

*time* is the median of the ratios to ``none`` in the same round, with its quartiles. *kept* is what is in memory at the
end of the forward: what autograd and the selective policy hold, without parameters, and what is in flight and staged.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import record
from benchmarks.contest import quartiles, ratios, turns
from benchmarks.step_time import loss_of
from ls_strategy.activations.apply import Activations
from ls_strategy.activations.storage import NVMeFolder
from ls_strategy.config import ActivationOffloadConfig, RecomputeConfig
from ls_strategy.tiers.link import trim_heap
from tests.processes import anonymous_bytes

MINUTES = 4
SPREAD = "quartiles over rounds"
SEEDS = "0 for weights and data"
QUICK = ("--width", "64", "--layers", "2", "--length", "64", "--batch", "1", "--rounds", "2")

CPU = torch.device("cpu")
UNCOUNTED = 2  # rounds that allocate


def build(width: int, layers: int, length: int) -> nn.Module:
    from recipes.gpt.network import GPT, GPTConfig

    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=256, block_size=length, width=width, num_layers=layers, num_heads=width // 64))


def choices(in_flight_bytes: int) -> dict[str, dict[str, Any]]:
    offload = ActivationOffloadConfig(
        tier="nvme", min_bytes=1 << 16, in_flight_bytes=in_flight_bytes, staging_bytes=in_flight_bytes
    )
    return {
        "none": {},
        "full": {"recompute": RecomputeConfig(policy="full")},
        "selective": {"recompute": RecomputeConfig(policy="selective")},
        "offload to NVMe": {"offload": offload},
        "full, offload to NVMe": {"recompute": RecomputeConfig(policy="full"), "offload": offload},
    }


class Contender:
    """A model with one choice; all begin with the same weights."""

    def __init__(self, sizes: tuple[int, int, int], chosen: dict[str, Any], folder: str) -> None:
        self.model = build(*sizes)
        self.activations = Activations(self.model, CPU, drive=NVMeFolder(folder), **chosen)
        self.seconds: list[float] = []

    def kept_bytes(self, x: Tensor, y: Tensor) -> int:
        """Growth of memory in a forward, from a heap without holes."""
        self.model.zero_grad()
        trim_heap()
        before = anonymous_bytes()
        with self.activations.around_forward():
            loss = loss_of(self.model, x, y)
        trim_heap()
        kept = anonymous_bytes() - before
        loss.backward()
        return kept

    def step(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Forward and backward; returns loss and gradients."""
        self.model.zero_grad()
        begin = time.perf_counter()
        with self.activations.around_forward():
            loss = loss_of(self.model, x, y)
        loss.backward()
        self.seconds.append(time.perf_counter() - begin)
        return [loss.detach(), *(p.grad for p in self.model.parameters() if p.grad is not None)]


def bench(sizes: tuple[int, int, int], batch: int, rounds: int, in_flight_bytes: int, folder: str) -> dict[str, Any]:
    """Ratios, bytes and counters by choice."""
    contenders = {name: Contender(sizes, chosen, folder) for name, chosen in choices(in_flight_bytes).items()}
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 256, (2, batch, sizes[2]), generator=generator)
    results: dict[str, list[Tensor]] = {}
    for _, name in turns(list(contenders), rounds, uncounted=UNCOUNTED):
        results[name] = contenders[name].step(x, y)
        if len(results) == len(contenders):  # the end of a round
            for other, tensors in results.items():
                same = all(torch.equal(a, b) for a, b in zip(tensors, results["none"], strict=True))
                assert same, f"{other} changes the numbers"
            results.clear()
    summary: dict[str, Any] = {}
    for name, contender in contenders.items():
        seconds, baseline = contender.seconds[UNCOUNTED:], contenders["none"].seconds[UNCOUNTED:]
        summary[name] = {
            "time": quartiles(ratios(seconds, baseline)),
            "counters": {k: round(v, 3) for k, v in contender.activations.metrics().items()},
            "kept_bytes": contender.kept_bytes(x, y),
        }
        contender.activations.remove()
    return summary


def main() -> None:
    parser = record.parser(__doc__, rounds=7)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--in-flight-mib", type=int, default=32)
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="folder on a local drive")
    args = parser.parse_args()
    sizes = (args.width, args.layers, args.length)
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        results = bench(sizes, args.batch, args.rounds, args.in_flight_mib << 20, folder)
    print(json.dumps(results, indent=1))
    found = {
        **record.header("activations", private=(args.directory,)),
        "width": args.width,
        "layers": args.layers,
        "length": args.length,
        "batch": args.batch,
        "rounds": args.rounds,
        "in_flight_bytes": args.in_flight_mib << 20,
        "results": results,
    }
    record.write(args.record, found)


if __name__ == "__main__":
    main()
