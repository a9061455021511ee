"""Run two real ranks that rendezvous on a port, all-reduce, check the sum and time it.

::

    doctor ──start──> rank 0 ─┐  tcp://127.0.0.1:port   all-reduce, checked and timed ──> a line of JSON ──> finding
           └─start──> rank 1 ─┘                         an error, or silence until the deadline ──> killed ──> finding

A rank is ``python -m ls_strategy.extras.doctor.collective BACKEND RANK WORLD_SIZE PORT SECONDS``.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from ls_strategy.distributed.launch import rendezvous
from ls_strategy.extras.doctor.finding import Finding, one_line

TIMEOUT_S = 60.0  # for the start of Python, the import of torch, and the all-reduce
_ELEMENTS = 1 << 20
_ROUNDS = 10
_FROM_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_", "SLURM_")
_PROGRAM = (sys.executable, "-m", "ls_strategy.extras.doctor.collective")


def collectives(timeout_s: float = TIMEOUT_S) -> Iterator[Finding]:
    """Test gloo, and NCCL if there are two GPUs."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        cure = "Install torch from pytorch.org: this build has no torch.distributed."
        yield Finding("gloo", "no torch.distributed", "problem", cure)
        return
    yield all_reduce("gloo", timeout_s=timeout_s)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0  # CUDA only: NCCL
    if gpus > 1 and dist.is_nccl_available():
        yield all_reduce("nccl", timeout_s=timeout_s)
    else:
        yield Finding("nccl", f"not tested: it needs two GPUs, and this host has {gpus}")


def all_reduce(
    backend: str, *, timeout_s: float = TIMEOUT_S, port: int | None = None, program: Sequence[str] = _PROGRAM
) -> Finding:
    """Start two ranks and wait for their all-reduce. Leaves no process behind.

    Args:
        backend: ``gloo`` or ``nccl``.
        timeout_s: For everything together.
        port: Rendezvous port. None: a free one.
        program: A rank's command line, up to the backend.
    """
    port = rendezvous.free_port() if port is None else port
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="ls_strategy-doctor-") as folder:
        try:
            for rank in range(2):
                command = [*program, backend, str(rank), "2", str(port), str(timeout_s)]
                with Path(folder, f"out{rank}").open("wb") as out, Path(folder, f"err{rank}").open("wb") as err:
                    ranks.append(_start(command, out, err))
            failed = _wait(ranks, time.monotonic() + timeout_s)
        finally:
            for process in ranks:
                _end(process)
        texts = [
            Path(folder, f"{kind}{rank}").read_text(errors="replace") for kind in ("out", "err") for rank in (0, 1)
        ]
    if failed is not None:
        return _failure(backend, failed, ranks[failed].returncode, texts[2 + failed], port)
    if any(process.returncode == -signal.SIGKILL for process in ranks):
        return _silence(backend, timeout_s, texts[2:])
    return _success(backend, texts[0])


def _start(command: Sequence[str], out: BinaryIO, err: BinaryIO) -> subprocess.Popen[bytes]:
    """Start a rank without the launcher's variables: it is not part of this process's job."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_FROM_LAUNCHERS)}
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True
    )


def _wait(ranks: Sequence[subprocess.Popen[bytes]], deadline: float) -> int | None:
    """Wait until all ranks succeed, one fails, or the deadline. Return the first rank that failed."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in ranks]
        for rank, code in enumerate(codes):
            if code:
                return rank
        if None not in codes:
            return None
        time.sleep(0.05)
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _success(backend: str, output: str) -> Finding:
    try:
        result = json.loads(output.strip().splitlines()[-1])
        sums, ms = result["sum"], float(result["ms"])
    except (ValueError, KeyError, IndexError, TypeError):
        cure = "Something prints during Python's start or ends it: run `python -c 'import torch'` to see."
        return Finding(backend, f"a rank printed {one_line(output)!r}", "problem", cure)
    if sums != [3.0, 3.0]:
        cure = "The all-reduce is wrong: update torch and drivers; with NCCL, try NCCL_P2P_DISABLE=1."
        return Finding(backend, f"1 + 2 on two ranks gave results between {sums[0]} and {sums[1]}", "problem", cure)
    mib = 4 * _ELEMENTS / (1 << 20)
    return Finding(backend, f"two ranks, all-reduce of {mib:.0f} MiB in {ms:.2f} ms, the sum is correct")


def _failure(backend: str, rank: int, code: int, stderr: str, port: int) -> Finding:
    lines = [line for line in stderr.splitlines() if line.strip()]
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
    value = f"rank {rank} ended with {how}: {one_line(lines[-1] if lines else 'no message')}"
    if "EADDRINUSE" in stderr or "already in use" in stderr:
        cure = f"Another process uses port {port}: set MASTER_PORT to a free port, or end the process."
    elif backend == "nccl":
        cure = "Run with NCCL_DEBUG=INFO; try NCCL_P2P_DISABLE=1, more shared memory, or NCCL_SOCKET_IFNAME=lo."
    elif "connect" in stderr.lower() or "resolve" in stderr.lower() or "timed out" in stderr.lower():
        cure = "The ranks cannot connect: set GLOO_SOCKET_IFNAME=lo on one node, or open the firewall."
    else:
        cure = "The message is torch's: repair its installation, or check the host name and the open files."
    return Finding(backend, value, "problem", cure)


def _silence(backend: str, timeout_s: float, stderr: Sequence[str]) -> Finding:
    output = one_line(" ".join(text.strip().rsplit("\n", 1)[-1] for text in stderr)) or "nothing"
    name = "NCCL" if backend == "nccl" else "GLOO"
    cure = (
        f"A firewall or the wrong interface: set {name}_SOCKET_IFNAME=lo on one node. On a slow or busy host, raise "
        "--timeout-s."
    )
    return Finding(backend, f"no result within {timeout_s:g} s; the ranks printed: {output}", "problem", cure)


# --- a rank ----------------------------------------------------------------------------------------------------------


def run_rank(backend: str, rank: int, world_size: int, port: int, seconds: float) -> dict[str, object]:
    """Rendezvous, all-reduce, and time it. Collective over the ranks.

    Returns:
        ``sum``: smallest and largest element of the result. ``ms``: median time of an all-reduce.
    """
    import torch
    import torch.distributed as dist

    from ls_strategy import device as dev

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    dev.select(device)
    dist.init_process_group(
        backend,
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=seconds),
    )
    times: list[float] = []
    x = torch.empty(0)
    for _ in range(_ROUNDS):
        x = torch.full((_ELEMENTS,), float(rank + 1), device=device)
        dist.all_reduce(x[:1].clone())  # a barrier, so that waiting for the other rank is not timed
        start = time.perf_counter()
        dist.all_reduce(x)
        dev.synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    return {"sum": [x.min().item(), x.max().item()], "ms": statistics.median(times)}


def main(argv: Sequence[str]) -> None:
    """Run a rank from its command line, and end the process."""
    backend, rank, world_size, port, seconds = argv
    result = run_rank(backend, int(rank), int(world_size), int(port), float(seconds))
    print(json.dumps(result), flush=True)
    os._exit(0)  # gloo's threads sometimes abort the process in a regular interpreter exit


if __name__ == "__main__":
    main(sys.argv[1:])
