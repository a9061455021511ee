"""Reading and writing a drive: this engine against fio and DeepSpeed's aio handle, interleaved in one run.

``python -m benchmarks.nvme_io DIR --record benchmarks/records/nvme_io.json``

Everybody moves the same bytes, in order, past the page cache, on the same file system, into files whose space was
reserved and written once before. What is reported is the median of the ratios to the fastest of fio's ways, round by
round, with their quartiles: its way is chosen once, by the median of all rounds. fio's memory is 4 KiB pages, and this
engine's are huge pages, which the kernel gives to those who ask; fio takes reserved ones only, so it runs with them too
where some are (``sysctl vm.nr_hugepages=64``).

fio needs the ``fio`` program, DeepSpeed ``deepspeed`` and libaio's headers (``libaio-dev``); who is missing is skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks import record
from benchmarks.contest import quartiles, ratios, turns
from ls_strategy.config import NVMeIOConfig
from ls_strategy.extras.cli.tuning import Measured, move
from ls_strategy.tiers.buffers import AlignedBuffer
from ls_strategy.tiers.file_io import IOEngine
from ls_strategy.tiers.nvme import NVMeTier
from ls_strategy.tiers.nvme_folder import mount_of, open_scratch

MINUTES = 6
SPREAD = "quartiles over rounds"
SEEDS = "none set: times do not depend on the values"
QUICK = ("--gib", "0.04", "--rounds", "2")

Verb = Literal["read", "write"]
Contender = Callable[[Verb], float]  # moves everything once; returns the seconds
MIB = 1 << 20
FIO = [("psync", 1, 1), ("psync", 8, 1), ("libaio", 1, 8), ("libaio", 8, 4)]
"""I/O engine, block in MiB, blocks under way."""

HUGE_PAGES = 24  # of 2 MiB, that fio needs for four blocks of 8 MiB, with room for what it aligns


def fio(directory: Path, nbytes: int, ioengine: str, block_mib: int, depth: int, memory: str) -> Contender:
    """fio's own count of its time, so that starting it costs nothing."""

    def run(verb: Verb) -> float:
        command = [
            "fio", "--name=bench", f"--filename={directory / 'fio'}", f"--rw={verb}", f"--ioengine={ioengine}",
            f"--bs={block_mib}M", f"--iodepth={depth}", f"--size={nbytes}", "--direct=1", "--overwrite=1",
            f"--mem={memory}", "--output-format=json",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return nbytes / json.loads(done.stdout)["jobs"][0][verb]["bw_bytes"]

    return run


def engine(directory: Path, nbytes: int, io: NVMeIOConfig) -> Contender:
    """Blocks through the engine, as the tier would queue them."""
    file = open_scratch(directory, nbytes, rank=0, direct=True)
    buffer = AlignedBuffer(2 * io.parallelism * io.block_bytes)
    threads = IOEngine(io)
    measured = Measured(io, nbytes)
    return lambda verb: move(threads, file, verb, buffer, measured)


def tier(directory: Path, nbytes: int, io: NVMeIOConfig) -> Contender:
    """A state of the NVMe tier, chunk by chunk: read six ahead and released, or put from a tensor."""
    key = (0, "master")
    made = NVMeTier(directory, {key: (nbytes // 4, torch.float32)}, io=io, rank=0, buffer_bytes=8 * MIB, buffers=8)
    chunk = made.chunk_numel(torch.float32)
    starts = range(0, nbytes // 4, chunk)

    def run(verb: Verb) -> float:
        begin = time.perf_counter()
        if verb == "read":
            leases = [made.get(key, s, s + chunk) for s in starts[:6]]
            for i in range(len(starts)):
                leases[i % 6].wait()
                leases[i % 6].release()
                if i + 6 < len(starts):
                    leases[i % 6] = made.get(key, starts[i + 6], starts[i + 6] + chunk)
        else:
            source = torch.ones(chunk)
            for s in starts:
                made.put(key, source, s)  # copies the chunk into a buffer, too
            made.flush()
        return time.perf_counter() - begin

    return run


def deepspeed(directory: Path, nbytes: int, block_mib: int, depth: int, threads: int) -> Contender:
    """DeepSpeed's aio handle on one page-locked buffer of the file's size."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.op_builder import AsyncIOBuilder  # pyright: ignore[reportMissingImports]

    handle = AsyncIOBuilder().load(verbose=False).aio_handle(block_mib * MIB, depth, False, True, threads)
    buffer = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
    path = str(directory / f"deepspeed-{block_mib}-{threads}")

    def run(verb: Verb) -> float:
        begin = time.perf_counter()
        moved = handle.sync_pread(buffer, path) if verb == "read" else handle.sync_pwrite(buffer, path)
        assert moved > 0, f"DeepSpeed moved {moved}"
        return time.perf_counter() - begin

    return run


def free_huge_pages() -> int:
    """Reserved pages that nobody uses."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("HugePages_Free")), 0)


def contenders(directory: Path, nbytes: int, io: NVMeIOConfig) -> tuple[dict[str, Contender], dict[str, str]]:
    """Those that are here, and why the others are not."""
    present: dict[str, Contender] = {"ours": engine(directory, nbytes, io), "ours, tier": tier(directory, nbytes, io)}
    absent: dict[str, str] = {}
    if shutil.which("fio"):
        present |= {f"fio {e} {b}M x {d}": fio(directory, nbytes, e, b, d, "malloc") for e, b, d in FIO}
        if free_huge_pages() >= HUGE_PAGES:
            present |= {
                f"fio {e} {b}M x {d}, huge pages": fio(directory, nbytes, e, b, d, "mmaphuge") for e, b, d in FIO
            }
        else:
            absent["fio, huge pages"] = f"fewer than {HUGE_PAGES} are reserved"
    else:
        absent["fio"] = "not installed"
    if importlib.util.find_spec("deepspeed") is None:
        absent["deepspeed"] = "not installed"
        return present, absent
    try:
        # Its defaults, and what its own tuner would be asked to try: our block size and number of threads.
        present["deepspeed 1M x 8, 1 thread"] = deepspeed(directory, nbytes, 1, 8, 1)
        present["deepspeed 8M x 8, 4 threads"] = deepspeed(directory, nbytes, 8, 8, 4)
    except Exception as error:  # no compiler, no libaio: its build says which
        absent["deepspeed"] = f"{type(error).__name__}: {error}"
    return present, absent


def summarise(seconds: dict[str, dict[Verb, list[float]]], nbytes: int) -> dict[str, dict[str, Any]]:
    """GB/s and ratio of speeds to fio's fastest way in the same round, per direction."""
    result: dict[str, dict[str, Any]] = {name: {} for name in seconds}
    verbs: tuple[Verb, ...] = ("read", "write")
    for verb in verbs:
        ways = [name for name in seconds if name.startswith("fio")] or ["ours"]
        medians = {name: statistics.median(seconds[name][verb]) for name in ways}
        fastest = min(ways, key=medians.__getitem__)
        for name, times in seconds.items():
            low, middle, high = quartiles(ratios(seconds[fastest][verb], times[verb]))
            speeds = quartiles([nbytes / s / 1e9 for s in times[verb]], 2)
            result[name][verb] = {
                "gbs": speeds[1], "gbs_q1": speeds[0], "gbs_q3": speeds[2],
                "ratio": middle, "ratio_q1": low, "ratio_q3": high, "baseline": fastest,
            }  # fmt: skip
    return result


def measure(present: dict[str, Contender], rounds: int) -> dict[str, dict[Verb, list[float]]]:
    """Seconds per contender, direction and counted round; two rounds before do not count."""
    seconds: dict[str, dict[Verb, list[float]]] = {name: {"read": [], "write": []} for name in present}
    for counts, name in turns(list(present), rounds, uncounted=2):
        for verb in ("write", "read"):
            spent = present[name](verb)
            if counts:  # the first writes turn reserved space into written space, and build DeepSpeed's files
                seconds[name][verb].append(spent)
    return seconds


def main() -> None:
    parser = record.parser(__doc__, rounds=9)
    parser.add_argument("directory", type=Path, nargs="?", default=Path.cwd(), help="on the drive; default: here")
    parser.add_argument("--gib", type=float, default=1.0, help="bytes moved in each direction, round and contender")
    parser.add_argument("--block-mib", type=int, default=8, help="our block size")
    parser.add_argument("--parallelism", type=int, default=4, help="our threads")
    args = parser.parse_args()
    torch.set_num_threads(1)  # copies into buffers, beside the threads that move them
    io = NVMeIOConfig(block_bytes=args.block_mib * MIB, parallelism=args.parallelism)
    nbytes = int(args.gib * 2**30) // (16 * MIB) * 16 * MIB
    with tempfile.TemporaryDirectory(dir=args.directory) as scratch:
        present, absent = contenders(Path(scratch), nbytes, io)
        for name, why in absent.items():
            print(f"skipped: {name}: {why}")
        table = summarise(measure(present, args.rounds), nbytes)
    print(f"{'':32}{'read GB/s':>10}{'x fio':>8}{'q1':>7}{'q3':>7}{'write GB/s':>12}{'x fio':>8}{'q1':>7}{'q3':>7}")
    for name, row in table.items():
        read, write = row["read"], row["write"]
        print(
            f"{name:32}{read['gbs']:>10.2f}{read['ratio']:>8.3f}{read['ratio_q1']:>7.2f}{read['ratio_q3']:>7.2f}"
            f"{write['gbs']:>12.2f}{write['ratio']:>8.3f}{write['ratio_q1']:>7.2f}{write['ratio_q3']:>7.2f}"
        )
    found = {
        **record.header("nvme_io", private=(args.directory,)),
        "file_system": mount_of(args.directory).kind,
        "gib": nbytes / 2**30,
        "rounds": args.rounds,
        "skipped": absent,
        "results": table,
    }
    record.write(args.record, found)


if __name__ == "__main__":
    main()
