"""Records: results of a bench as JSON, with what a reader needs to judge them, and the options that benches share."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.catalogue import benches

ROOT = Path(__file__).parents[1]
RECORDS = Path("benchmarks/records")  # below `ROOT`

REQUIRED = (
    "benchmark",
    "command",
    "date",
    "commit",
    "cpu",
    "cores",
    "memory_gib",
    "python",
    "versions",
    "spread",
    "seeds",
)
"""What every record has, beside its ``results``."""

_PACKAGES = ("torch", "lightning", "deepspeed")


def header(benchmark: str, *, private: tuple[Path | str, ...] = ()) -> dict[str, Any]:
    """Name, command, date, commit, hardware, versions, spread and seeds: what every record begins with.

    Args:
        benchmark: the module's name below ``benchmarks``.
        private: arguments that say nothing to others (folders of this machine); ``DIR`` stands for them.
    """
    bench = benches()[benchmark]
    hidden = {str(each) for each in private}
    arguments = ["DIR" if a in hidden else a for a in sys.argv[1:]]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "benchmark": benchmark,
        "command": " ".join([f"python -m benchmarks.{benchmark}", *map(shlex.quote, arguments)]),
        "commit": commit.stdout.strip(),
        **environment(),
        "spread": bench.spread,
        "seeds": bench.seeds,
    }


def environment() -> dict[str, Any]:
    """Date, hardware and versions."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        **_hardware(),
        "python": platform.python_version(),
        "versions": {p: importlib.metadata.version(p) for p in _PACKAGES if importlib.util.find_spec(p)},
    }


def _hardware() -> dict[str, Any]:
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor())
    found: dict[str, Any] = {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
    }
    if torch.cuda.is_available():
        found["gpus"] = _gpus()
    return found


def _gpus() -> list[str]:
    """Return the names of all GPUs. Another process asks: this one would keep half a GiB of each for itself."""
    program = "import json, torch; n = torch.cuda.device_count()\n"
    program += "print(json.dumps([torch.cuda.get_device_name(i) for i in range(n)]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return names


def parser(
    doc: str | None, *, rounds: int | None = None, rounds_help: str = "counted rounds"
) -> argparse.ArgumentParser:
    """``--record``, and ``--rounds`` where rounds are counted; the bench adds its own.

    Args:
        doc: the bench's docstring.
        rounds: default of ``--rounds``. None: there is no such option.
        rounds_help: what a round is.
    """
    result = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds is not None:
        result.add_argument("--rounds", type=int, default=rounds, help=f"{rounds_help}; default: %(default)s")
    result.add_argument("--record", type=Path, default=None, help="JSON file to write")
    return result


def write(path: Path | None, record: dict[str, Any]) -> None:
    """Write a record completely or not at all. None: nothing is written.

    Raises:
        ValueError: something is missing that a reader needs to judge the numbers.
    """
    if path is None:
        return
    missing = [name for name in (*REQUIRED, "results") if not record.get(name)]
    if missing:
        raise ValueError(f"Got a record without {', '.join(missing)}. Begin it with record.header().")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=2) + "\n")
    partial.replace(path)
