"""The Trainers of `benchmarks.gpu`: their sizes, and each in a process of its own that ends in time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.contest import spread
from benchmarks.record import ROOT

CONTENDERS = ("zero2", "zero2_offload", "fsdp2", "fsdp2_offload", "deepspeed2", "deepspeed2_offload")
MARK = "RESULT "  # begins the line in which a case says what it found


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
    kv_heads: int | None = None  # none: as many as heads
    vocabulary: int = 50304  # GPT-2's 50257, rounded up to a multiple of 64
    tied: bool = True  # whether the embedding is the output layer, too
    # Whether this package keeps only those bits of the masters that the weights in bf16 do not have.
    split_masters: bool = False


SIZES = {
    "tiny": Shape(2, 32, 2, micro_batch=2, block=16, vocabulary=256),
    "124M": Shape(12, 768, 12, micro_batch=8),
    "1.3B": Shape(24, 2048, 16, micro_batch=8, recompute=True),
    "7B": Shape(32, 4096, 32, micro_batch=8, mlp="swiglu", positions="rotary", recompute=True),
    "7B-4k": Shape(
        38, 4096, 32, micro_batch=2, block=4096, mlp="swiglu", positions="rotary", recompute=True, kv_heads=8,
        vocabulary=128256, tied=False, split_masters=True,
    ),
}  # fmt: skip
"""GPT-2 small, and sizes of GPT-3 (Brown et al. 2020, table 2.1) without biases.

``7B-4k`` is the case of `benchmarks.bars`: Llama 3's 8B, with 38 narrower layers for its 32, so that a token takes as
many FLOPs. States of 16 bytes per parameter, 124 GB, leave room for activations on an H200.
"""


@dataclass(frozen=True)
class Case:
    contender: str
    shape: Shape
    tokens: int  # per optimizer step: a multiple of a micro-batch
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
    """Run a case in a process of its own, which the system ends first if memory is short; return what it found.

    After ``limit_s``, or if this call is interrupted, it is ended with all processes that it has started.
    """
    command = [sys.executable, "-m", "benchmarks.gpu", "--case", json.dumps(asdict(case))]
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ}  # sizes here leave little room
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"failed": f"not over after {limit_s:.0f} s"}
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for line in output.splitlines():
        if line.startswith(MARK):
            found: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return found
    last = (errors.strip().splitlines() or ["no message"])[-1]
    return {"failed": "killed, as by a lack of memory" if process.returncode < 0 else last[:300]}


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the result of a contender from those of its runs."""
    failed = next((each for each in found if "failed" in each), None)
    if failed is not None:
        return failed
    return {**found[-1], "tokens_per_s": spread([each["tokens_per_s"] for each in found])}


def ratios(row: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Tokens per second with offload over those without, for each that has both; and ours over each peer's."""
    speed = {name: each["tokens_per_s"]["median"] for name, each in row.items() if "failed" not in each}
    found = {f"{n}/{n[:-8]}": speed[n] / speed[n[:-8]] for n in speed if n.endswith("_offload") and n[:-8] in speed}
    for ending in ("", "_offload"):
        ours = speed.get(f"zero2{ending}")
        for peer in (f"fsdp2{ending}", f"deepspeed2{ending}"):
            if ours is not None and peer in speed:
                found[f"zero2{ending}/{peer}"] = ours / speed[peer]
    return found


def line_of(name: str, found: dict[str, Any]) -> str:
    """Return a printed line of what `summary` returned."""
    if "failed" in found:
        return f"  {name:20} {found['failed']}"
    speed = found["tokens_per_s"]
    mfu = "" if found["mfu"] is None else f"MFU {found['mfu']:.3f}  "
    memory = f"peak {found['peak_device_gib']:.1f} GiB, host {found['peak_host_gib']:.1f} GiB"
    between = f"[{speed['q1']:.0f}, {speed['q3']:.0f}]"
    return f"  {name:20} {speed['median']:12.0f} tokens/s {between}  {mfu}{memory}  loss {found['loss']:.6f}"
