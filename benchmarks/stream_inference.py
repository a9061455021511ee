"""Generation from weights on a drive: how fast they are read beside it, and what a batch makes of that.

``python -m benchmarks.stream_inference DIR --record benchmarks/records/stream_inference.json``

A GPT of the recipe is built on meta, filled block by block with random weights and put on the drive; then one process
generates from it, tokens by token with a cache. Turns are interleaved:

- the tier alone reads the extents of all blocks in order, into the same buffers, and computes nothing;
- a token of every row is generated, for each batch: every pass reads all blocks once.

Reported: bytes read per second of generation over those of the tier alone in the same round, and tokens per second.
Before that, a process under a limit of the kernel (a memory cgroup of version 1, or the data segment's) generates from
weights of more than three times what it may use.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks import contest, record
from benchmarks.host_memory import cgroup, confine, status
from ls_strategy.extras.inference.stream import StreamedBlocks, stream_blocks
from ls_strategy.tiers.nvme_folder import mount_of
from recipes.gpt.network import GPT, GPTConfig

MINUTES = 8
SPREAD = "quartiles over rounds"
SEEDS = "the bench's SEED for weights"
QUICK = ("--width", "128", "--blocks", "4", "--rounds", "1", "--tokens", "1", "--allowed-mib", "0")

MIB = 1 << 20
SEED = 5


@dataclass(frozen=True)
class Case:
    blocks: int
    width: int
    nvme_path: str
    new_tokens: int = 4
    batch: int = 2
    # The kernel refuses more than this (without a cgroup, twice this) above what there is after a tiny model.
    allowed_bytes: int = 0
    cgroup: str = ""


def config(blocks: int, width: int) -> GPTConfig:
    """A block has about ``12 * width**2`` parameters."""
    return GPTConfig(num_layers=blocks, width=width, num_heads=width // 64, vocab_size=1024, block_size=128)


def build(shape: GPTConfig, tier: Literal["cpu", "nvme"], path: str | None) -> tuple[GPT, StreamedBlocks]:
    """Random weights, the same on every tier."""
    with torch.device("meta"):
        model = GPT(shape).eval()
    torch.manual_seed(SEED)
    return model, stream_blocks(model, tier, path)


def prompts(batch: int) -> Tensor:
    """Of 16 tokens."""
    return torch.arange(batch * 16).view(batch, 16) % 1000


class Decoding:
    """One batch that goes on and on; it starts again when its sequences are full."""

    def __init__(self, model: GPT, batch: int) -> None:
        self.model, self.batch = model, batch
        self.cache = model.make_cache()
        self.produced = self.cache_length = 0
        self.tokens = prompts(batch)

    @torch.inference_mode()
    def __call__(self) -> Tensor:
        """One pass: a token of every row, ``(batch, 1)``."""
        if self.cache_length == 0 or self.cache_length + 1 > self.model.config.block_size:
            self.cache.begin()
            self.tokens, self.cache_length = prompts(self.batch), 0
        self.cache_length += self.tokens.shape[1]
        self.tokens = self.model(self.tokens, cache=self.cache)[:, -1].argmax(dim=-1, keepdim=True)
        self.produced += self.batch
        return self.tokens


def generated(model: GPT, case: Case) -> list[list[int]]:
    """Tokens that follow the prompts."""
    decoding = Decoding(model, case.batch)
    return torch.cat([decoding() for _ in range(case.new_tokens)], dim=1).tolist()


# --- under a limit ----------------------------------------------------------------------------------------------------


def weigh(case: Case) -> dict[str, Any]:
    """Fill, stream and generate in this process, under the limit; what it took."""
    torch.set_num_threads(1)
    tiny = replace(case, blocks=2, width=64)
    model, handle = build(config(tiny.blocks, tiny.width), "nvme", case.nvme_path)
    generated(model, tiny)
    handle.close()
    del model, handle
    gc.collect()
    before = status("VmRSS")
    confine(case.cgroup, case.allowed_bytes)
    model, handle = build(config(case.blocks, case.width), "nvme", case.nvme_path)
    filled = status("VmHWM") - before
    tokens = generated(model, case)
    result = {
        **asdict(case),
        "weights_bytes": handle.stored_nbytes + sum(p.nbytes for p in model.parameters() if not p.isnan().any()),
        "buffers_bytes": handle.buffers_nbytes,
        "peak_while_filling_bytes": filled,
        "peak_bytes": status("VmHWM") - before,
        "resident_bytes": status("VmRSS") - before,
        "tokens": tokens,
    }
    handle.close()
    return result


def limited(case: Case, *, timeout_s: float = 900) -> dict[str, Any]:
    """`weigh` in a process of its own under ``case.allowed_bytes``; ``limited_by`` says what enforced it."""
    names = ("WORLD_SIZE", "LOCAL_RANK", "RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    variables = {k: v for k, v in os.environ.items() if k not in names} | {"OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        group, limit = "", "RLIMIT_DATA"
        with contextlib.suppress(OSError):
            group, limit = stack.enter_context(cgroup(case.allowed_bytes)), "memory cgroup"
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.stream_inference", "--one",
             json.dumps(asdict(replace(case, cgroup=group)))],
            cwd=record.ROOT, env=variables, capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(f"{case} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        result = json.loads(done.stdout.splitlines()[-1])
        if group:
            result["charged_bytes"] = int((Path(group) / "memory.max_usage_in_bytes").read_text())
    return {**result, "cgroup": "", "nvme_path": "", "limited_by": limit}


# --- speed ------------------------------------------------------------------------------------------------------------


def tier_alone(handle: StreamedBlocks) -> Callable[[], None]:
    """The NVMe tier reads what the model reads, as fast as it can: all buffers are always on order."""
    storage = handle._storage
    sizes = [block.nbytes for block in handle._blocks]

    def run() -> None:
        handle._ahead.drop()
        leases = [storage.tier.get((i, "block"), 0, n) for i, n in enumerate(sizes[: storage.capacity])]
        for i in range(len(sizes)):
            leases[i].wait()
            leases[i].release()
            following = i + storage.capacity
            if following < len(sizes):
                leases.append(storage.tier.get((following, "block"), 0, sizes[following]))

    return run


def speeds(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Seconds and bytes of every turn, and what follows from them."""
    begin = time.perf_counter()
    model, handle = build(config(args.blocks, args.width), "nvme", folder)
    filled_s = time.perf_counter() - begin
    alone = tier_alone(handle)
    names = ["tier alone", *(f"batch {b}" for b in args.batches)]
    decodings = {f"batch {b}": Decoding(model, b) for b in args.batches}
    times: dict[str, list[float]] = {name: [] for name in names}
    rates: dict[str, list[float]] = {name: [] for name in names}
    for counts, name in contest.turns(names, args.rounds, uncounted=1):
        if name != "tier alone":
            decodings[name]()  # so that the first blocks are on their way again
        bytes_before, started = handle.bytes_read, time.perf_counter()
        for _ in range(args.tokens):
            alone() if name == "tier alone" else decodings[name]()
        spent = time.perf_counter() - started
        if counts:
            times[name].append(spent)
            rates[name].append((handle.bytes_read - bytes_before) / spent / 1e9)
    result = {
        "weights_bytes": handle.stored_nbytes,
        "buffers_bytes": handle.buffers_nbytes,
        "filled_s": round(filled_s, 2),
        "tier_alone_gbs": contest.spread(rates["tier alone"]),
        "batches": {
            str(b): {
                "gbs": contest.spread(rates[f"batch {b}"]),
                "of_tier": contest.spread(contest.ratios(rates[f"batch {b}"], rates["tier alone"])),
                "tokens_per_s": contest.spread([b * args.tokens / s for s in times[f"batch {b}"]]),
            }
            for b in args.batches
        },
    }
    handle.close()
    return result


def main() -> None:
    parser = record.parser(__doc__, rounds=9)
    parser.add_argument("directory", type=Path, nargs="?", default=Path.cwd(), help="on the drive; default: here")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--width", type=int, default=1536, help="a block has about 12 width**2 parameters of 4 bytes")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=3, help="passes per turn")
    parser.add_argument("--threads", type=int, default=1, help="that compute")
    parser.add_argument("--allowed-mib", type=int, default=256, help="of the run under a limit; 0: no such run")
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(weigh(Case(**json.loads(args.one)))))
        return
    torch.set_num_threads(args.threads)
    within: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        if args.allowed_mib:
            width = 64 * round((3.2 * args.allowed_mib * MIB / 30 / 48) ** 0.5 / 64)  # 30 blocks of 48 width**2 bytes
            within = limited(Case(30, width, folder, allowed_bytes=args.allowed_mib * MIB))
            print(
                f"{within['weights_bytes'] / MIB:.0f} MiB of weights, {args.allowed_mib} MiB allowed "
                f"({within['limited_by']}): highest {within['peak_bytes'] / MIB:.0f} MiB, "
                f"{within['peak_while_filling_bytes'] / MIB:.0f} MiB while filling"
            )
        found = speeds(args, folder)
    print(f"tier alone: {found['tier_alone_gbs']['median']:.2f} GB/s; {found['weights_bytes'] / 1e9:.2f} GB of weights")
    print(f"{'batch':>6}{'GB/s':>8}{'of tier':>9}{'q1':>7}{'q3':>7}{'tokens/s':>10}")
    for batch, r in found["batches"].items():
        ratio = r["of_tier"]
        print(
            f"{batch:>6}{r['gbs']['median']:>8.2f}{ratio['median']:>9.3f}{ratio['q1']:>7.2f}{ratio['q3']:>7.2f}"
            f"{r['tokens_per_s']['median']:>10.2f}"
        )
    record.write(
        args.record,
        {
            **record.header("stream_inference", private=(args.directory,)),
            "file_system": mount_of(args.directory).kind,
            "blocks": args.blocks,
            "width": args.width,
            "rounds": args.rounds,
            "threads": args.threads,
            "under_a_limit": within,
            "results": found,
        },
    )


if __name__ == "__main__":
    main()
