"""Measure which block size and number of threads are fastest on an NVMe device, in interleaved runs."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from ls_strategy.config import NVMeIOConfig
from ls_strategy.tiers.buffers import AlignedBuffer
from ls_strategy.tiers.file_io import DirectFile, IOEngine, Transfer
from ls_strategy.tiers.nvme_folder import open_scratch

Verb = Literal["read", "write"]
_CLOSE_ENOUGH = 0.97
"""Settings within 3 % count as equally fast, since repeated measurements of one setting differ by more."""


@dataclass
class Measured:
    """One setting, and its seconds per round to move the same bytes."""

    io: NVMeIOConfig
    nbytes: int
    read_s: list[float] = field(default_factory=list)
    write_s: list[float] = field(default_factory=list)

    @property
    def read_gbs(self) -> float:
        """Return the median read bandwidth of the rounds, in GB/s."""
        return self.nbytes / statistics.median(self.read_s) / 1e9

    @property
    def write_gbs(self) -> float:
        """Return the median write bandwidth of the rounds, in GB/s."""
        return self.nbytes / statistics.median(self.write_s) / 1e9

    @property
    def both_gbs(self) -> float:
        """Return the bandwidth of reading and then writing every byte, as an optimizer step does, in GB/s."""
        return 2 / (1 / self.read_gbs + 1 / self.write_gbs)


def best(measured: Sequence[Measured]) -> Measured:
    """Return the setting with the fewest threads and smallest blocks among those about as fast as the fastest.

    Threads compete with the training thread for the interpreter lock, and large blocks delay small transfers.
    """
    fastest = max(m.both_gbs for m in measured)
    close = [m for m in measured if m.both_gbs >= _CLOSE_ENOUGH * fastest]
    return min(close, key=lambda m: (m.io.parallelism, m.io.block_bytes))


def measure(
    directory: Path,
    settings: Sequence[NVMeIOConfig],
    *,
    nbytes: int,
    seconds: float,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Measured]:
    """Write and read a file of ``nbytes`` with every setting, in interleaved rounds until the time is over.

    Args:
        directory: on the NVMe device. The file is deleted when this returns, or when the process ends.
        settings: to compare.
        nbytes: per measurement; rounded down to full blocks of the largest size, at least one.
        seconds: time limit, after at least one full round.
        progress: called with one line per measurement.

    Raises:
        ConfigError: no file can be created there.
        PlanError: there is not enough space.
        NVMeError: the device failed.
    """
    largest = max(io.block_bytes for io in settings)
    nbytes = max(nbytes // largest, 1) * largest
    in_flight = max(io.block_bytes * io.parallelism for io in settings) * 2
    buffer = AlignedBuffer(min(in_flight, nbytes))
    buffer.tensor.copy_(torch.randint(256, (buffer.nbytes,), dtype=torch.uint8))  # devices may compress zeros
    results = [Measured(io, nbytes) for io in settings]
    deadline = time.monotonic() + seconds
    file = open_scratch(directory, nbytes, rank=0, direct=settings[0].direct)
    try:
        # The first write to reserved space costs more than later ones, which a training run does.
        list(_rounds(file, buffer, results[:1], progress, "warm-up"))
        results[0].read_s.clear()
        results[0].write_s.clear()
        round_ = 0
        while True:
            turn = results[round_ % len(results) :] + results[: round_ % len(results)]
            for _ in _rounds(file, buffer, turn, progress, f"round {round_ + 1}"):
                if round_ > 0 and time.monotonic() > deadline:
                    return results
            round_ += 1
            if time.monotonic() > deadline:
                return results
    finally:
        file.close()


def _rounds(
    file: DirectFile, buffer: AlignedBuffer, turn: Sequence[Measured], progress: Callable[[str], None], label: str
) -> Iterator[None]:
    """Measure every setting once, writing and then reading."""
    for i, measured in enumerate(turn):
        engine = IOEngine(measured.io)
        try:
            measured.write_s.append(move(engine, file, "write", buffer, measured))
            measured.read_s.append(move(engine, file, "read", buffer, measured))
        finally:
            engine.close()
        progress(
            f"{label}, {i + 1}/{len(turn)}: {measured.io.block_bytes >> 10} KiB x {measured.io.parallelism}: "
            f"read {measured.nbytes / measured.read_s[-1] / 1e9:.2f}, "
            f"write {measured.nbytes / measured.write_s[-1] / 1e9:.2f} GB/s"
        )
        yield


def move(engine: IOEngine, file: DirectFile, verb: Verb, buffer: AlignedBuffer, measured: Measured) -> float:
    """Return the seconds to move the full file, block by block, with two blocks in flight per thread."""
    block, nbytes = measured.io.block_bytes, measured.nbytes
    slots = max(min(buffer.nbytes // block, 2 * measured.io.parallelism), 1)
    start = time.perf_counter()
    in_flight: deque[Transfer] = deque()
    for i in range(nbytes // block):
        if len(in_flight) == slots:
            in_flight.popleft().wait()
        at = i % slots * block
        transfer = engine.transfer(file, verb)
        engine.submit(transfer, buffer.view[at : at + block], i * block)
        in_flight.append(transfer)
    for transfer in in_flight:
        transfer.wait()
    return time.perf_counter() - start
