"""Generation with weights in fewer bits, interleaved in one run.

``OMP_NUM_THREADS=2 python -m benchmarks.inference --record benchmarks/records/inference.json``

A GPT of random weights, too large for a cache, generates greedily from one token: in fp32, in bf16, and quantised
from fp32 by `ls_strategy.init_inference`. For every batch and format: milliseconds per step, of which each makes one
token per row, the quartiles of how many times faster than fp32 in the same round, the bytes of weights that a step
reads, and the time that memory needs for these at the bandwidth of a triad, which takes its turn too, over the step's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

import ls_strategy
from benchmarks import record
from benchmarks.contest import clocked, quartiles, ratios
from ls_strategy.extras.inference.engine import InferenceEngine
from ls_strategy.extras.inference.measure import triad_gbs, weights_read
from ls_strategy.extras.inference.sampling import SamplingConfig
from recipes.gpt.network import GPT, GPTConfig

MINUTES = 6
SPREAD = "quartiles over rounds"
SEEDS = "0 for weights, 1 for prompts"
QUICK = ("--width", "128", "--layers", "2", "--new", "4", "--rounds", "2", "--batches", "1")

FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"dtype": "bf16"},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
}
BASELINE = "fp32"


def engine_of(name: str, width: int, layers: int, length: int) -> InferenceEngine:
    """The same weights in every format."""
    torch.manual_seed(0)
    config = GPTConfig(
        block_size=length, num_layers=layers, num_heads=width // 64, width=width, vocab_size=8192, tied_embeddings=False
    )
    return ls_strategy.init_inference(GPT(config), **FORMATS[name])


def bench(engines: dict[str, InferenceEngine], batch: int, new: int, rounds: int) -> list[dict[str, Any]]:
    prompts = torch.randint(3, 8192, (batch, 1), generator=torch.Generator().manual_seed(1))
    greedy = SamplingConfig(temperature=0)
    bandwidths: list[float] = []

    def generate(engine: InferenceEngine) -> Callable[[], object]:
        return lambda: engine.generate(prompts, new, sampling=greedy)

    ways: dict[str, Callable[[], object]] = {name: generate(engine) for name, engine in engines.items()}
    ways["triad"] = lambda: bandwidths.append(triad_gbs(torch.device("cpu")))
    times = clocked(ways, rounds)
    gbs = statistics.median(bandwidths[1:])
    rows: list[dict[str, Any]] = []
    for name, engine in engines.items():
        step, read = statistics.median(times[name]) / new, weights_read(engine.module)
        rows.append(
            {
                "batch": batch,
                "format": name,
                "ms_per_step": round(step * 1e3, 3),
                "times_faster": quartiles(ratios(times[BASELINE], times[name]), 2),
                "weights_mb": round(read / 1e6, 1),
                "triad_gbs": round(gbs, 1),
                "bandwidth_share": round(read / (gbs * 1e9) / step, 2),
            }
        )
    return rows


def line(row: dict[str, Any]) -> str:
    low, middle, high = row["times_faster"]
    speed = f"{row['ms_per_step']:>9.3f} ms  {middle:.2f} [{low:.2f}, {high:.2f}] times faster"
    share = f"{100 * row['bandwidth_share']:.0f} % of {row['triad_gbs']} GB/s"
    return f"batch {row['batch']:<3} {row['format']:5} {speed}  {row['weights_mb']:>8.1f} MB  {share}"


def main() -> None:
    parser = record.parser(__doc__, rounds=9)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--new", type=int, default=16, help="tokens of every row")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    args = parser.parse_args()
    engines = {name: engine_of(name, args.width, args.layers, args.new + 8) for name in FORMATS}
    results: list[dict[str, Any]] = []
    for batch in args.batches:
        rows = bench(engines, batch, args.new, args.rounds)
        results += rows
        print("\n".join(map(line, rows)), flush=True)
    found = {
        **record.header("inference"),
        "threads": torch.get_num_threads(),
        "width": args.width,
        "layers": args.layers,
        "new": args.new,
        "rounds": args.rounds,
        "results": results,
    }
    record.write(args.record, found)


if __name__ == "__main__":
    main()
