"""Ranks killed at random moments under torchrun: what a loss costs, and whether the bits are those of an unbroken run.

``python -m benchmarks.elastic --record benchmarks/records/elastic.json``

One ``torchrun`` on this host with ``ElasticTraining`` and four virtual ranks. Again and again a random rank gets
SIGKILL at a random moment after the run has made a few more steps. The weights and the losses at the end are compared
with those of a run on one rank that nothing happened to; if one bit differs, this bench fails.

Stated: the seconds from the kill to the next finished step, of which until the ranks' program begins again (torchrun
notices, ends the others, and starts Python), and the optimizer steps that were repeated.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.contest import quartiles
from ls_strategy.extras.snapshots import progress

MINUTES = 20
SPREAD = "quartiles over losses"
SEEDS = "0 for the moments and the ranks that are killed, 7 for weights, 1 for data"
QUICK = ("--losses", "1", "--steps", "24", "--ranks", "2")

ROOT = Path(__file__).parents[1]
STEPS_PER_EPOCH = 12
_LIMIT_S = 120.0


def descendants(pid: int) -> list[int]:
    """Return the processes below ``pid``."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            found += [child, *descendants(child)]
    return found


def ranks_of(agent: int) -> list[int]:
    """Return the processes of the ranks."""
    found = []
    for pid in descendants(agent):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"elastic_program" in command:
            found.append(pid)
    return found


class Run:
    def __init__(self, folder: Path, ranks: int, losses: int, steps: int) -> None:
        folder.mkdir()
        self.folder, self.memory, self.log = folder, folder / "memory", folder / "log"
        shared = Path("/dev/shm")
        if shared.is_dir():
            self.memory = Path(tempfile.mkdtemp(prefix="ls_strategy_bench_", dir=shared))
        options = {
            "folder": str(folder), "epochs": -(-steps // STEPS_PER_EPOCH), "sleep": 0.02, "every": "auto",
            "run": "bench", "logger": False,
        }  # fmt: skip
        (folder / "options.json").write_text(json.dumps(options))
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
            f"--max-restarts={losses + 1}", "-m", "tests.dist.elastic_program", str(folder / "options.json"),
        ]  # fmt: skip
        env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "LS_STRATEGY_MEMORY": str(self.memory)}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)

    def last(self) -> tuple[int, float]:
        """Return the last finished step, and when it ended."""
        return max((progress.last(each) for each in self.memory.glob("*")), default=(-1, 0.0))

    def wait(self, step: int, after: float = 0.0) -> float:
        """Wait until more steps than ``step`` are finished, or any after a moment; return when the last one was."""
        until = time.monotonic() + _LIMIT_S
        while True:
            now, when = self.last()
            if (after and when > after) or (not after and now > step):
                return when
            if self.process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the run ended or hung at step {now}:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.005)

    def starts(self) -> list[float]:
        """Return when programs of ranks began."""
        path = self.folder / "starts"
        return [float(line.split()[2]) for line in path.read_text().splitlines()] if path.exists() else []

    def outcome(self) -> dict[str, Any]:
        """Wait for the end, and return what the program has written."""
        if self.process.wait(600) != 0:
            raise SystemExit(self.log.read_text()[-4000:])
        shutil.rmtree(self.memory, ignore_errors=True)
        return json.loads((self.folder / "out.json").read_text())


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--losses", type=int, default=50, help="ranks that are killed, one after the other")
    parser.add_argument("--steps", type=int, default=720, help="optimizer steps of the run")
    parser.add_argument("--ranks", type=int, default=4)
    args = parser.parse_args()
    chance = random.Random(0)
    seconds: list[float] = []
    started: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        unbroken = Run(Path(folder, "unbroken"), 1, 0, args.steps).outcome()
        run = Run(Path(folder, "lossy"), args.ranks, args.losses, args.steps)
        for number in range(args.losses):
            run.wait(run.last()[0] + chance.randint(1, 6))
            time.sleep(chance.random() * 0.2)
            ranks = ranks_of(run.process.pid)
            before = len(run.starts())
            os.kill(chance.choice(ranks), signal.SIGKILL)
            killed = time.time()
            seconds.append(run.wait(-1, after=killed + 0.5) - killed)
            started.append(run.starts()[before] - killed)
            print(f"loss {number + 1}: {seconds[-1]:.1f} s to the next step", flush=True)
        outcome = run.outcome()
        repeated = [int(n) for n in re.findall(r"; (\d+) steps are repeated", run.log.read_text())]
    for key in ("weights", "losses", "seen", "lr", "steps"):
        if outcome[key] != unbroken[key]:
            raise SystemExit(f"{key} differ from those of the unbroken run")
    results = {
        "seconds": quartiles(seconds),
        "until_the_program_begins_s": quartiles(started),
        "repeated_steps": {"median": statistics.median(repeated), "most": max(repeated)},
        "equal_bits": True,
    }
    print(json.dumps(results))
    options = {k: v for k, v in vars(args).items() if k != "record"}
    record.write(args.record, {**record.header("elastic"), **options, "results": results})


if __name__ == "__main__":
    main()
