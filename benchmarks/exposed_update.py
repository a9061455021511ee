"""How long training waits for updates of offloaded states: ``strategy.exposed_step_s`` as a share of the step.

``python -m benchmarks.exposed_update --record benchmarks/records/exposed_update.json``

The GPT recipe on one process, 8192 tokens per step, whole Trainers in turns in one process, in three settings:

``here``      what this machine does: device and host are the same, so copies are short, and so is the update
``bus``       copies between device and host take time, beside the computation, one after the other in each direction
``node``      updates in host memory take time as well

``bus`` and ``node`` are an H100's, to scale. It computes 400 TFLOP/s in training and moves 28 billion 16-bit elements
per second in each direction (PCIe 5.0 x16, 56 GB/s). An update moves 28 bytes per element through 400 GB/s of host
memory, 14 billion elements per second; of eight ranks each updates an eighth of the model, with an eighth of that.
Operations per second that the recipe reaches here, measured in the same run, are to these 400 TFLOP/s as the simulated
rates are to those; elements of any size count the same. Copies and updates really happen, and then last as long as the
rate says. ``params`` is the share of the step that stage 3 waits for its parameters to be read.

``--optimizers muon`` measures Muon, whose iteration is the device's work. Each block is a bucket.
"""

from __future__ import annotations

import math
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import record
from benchmarks.record import ROOT
from ls_strategy.autoload import ALIASES
from ls_strategy.config import nested
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.tiers import link
from ls_strategy.zero.flat import averages, units
from ls_strategy.zero.step import offload, update
from ls_strategy.zero.step.owner import owner_updater
from ls_strategy.zero.step.owner.split_tensors import SplitTensors
from recipes.gpt.model import GPTModule, OptimConfig, SampleConfig
from recipes.gpt.network import GPTConfig
from tests.trainers import bare_trainer, quiet

MINUTES = 30
SPREAD = "unknown: medians over the steps of each case, without quartiles"
SEEDS = "0 for weights and data"
QUICK = (
    "--strategies", "zero2_offload", "--settings", "here", "node", "--rounds", "1", "--steps", "4", "--tokens", "512",
)  # fmt: skip

H100_FLOPS = 400e12
H100_COPIED = 28e9  # elements per second, one direction
H100_UPDATED = 400e9 / 28  # elements per second, all ranks of a host together
LIMIT = 0.15
NETWORK: dict[str, Any] = {"num_layers": 8, "width": 128, "num_heads": 4}
BLOCK = 256
SETTINGS = ("here", "bus", "node")
STRATEGIES = ("zero2_offload", "zero3_offload", "zero3_nvme")


@dataclass(frozen=True)
class Run:
    strategy: str
    clip: bool = False
    overlap: bool = True
    setting: str = "here"
    optimizer: Literal["adamw", "muon"] = "adamw"

    def __str__(self) -> str:
        words = [self.strategy, "clipped" if self.clip else "free", "overlap" if self.overlap else "blocking"]
        return "-".join([self.setting, self.optimizer, *words])


class Lane:
    """Something that works jobs off one after the other, at a rate: one direction of a bus."""

    def __init__(self, elements_per_s: float) -> None:
        self._rate = elements_per_s
        self._jobs: queue.SimpleQueue[tuple[int, Later]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="lane", daemon=True).start()

    def take(self, numel: int) -> Later:
        """Begin to move so many elements."""
        later = Later()
        self._jobs.put((numel, later))
        return later

    def _run(self) -> None:
        free_at = 0.0
        while True:
            numel, later = self._jobs.get()
            free_at = max(free_at, time.perf_counter()) + numel / self._rate
            time.sleep(max(0.0, free_at - time.perf_counter()))
            later.done.set()


class Later:
    """What `ls_strategy.tiers.link.Arrival` is to a CUDA event."""

    waited_s = 0.0  # seconds that the training thread has waited for new parameters on the bus (stage 2)
    # Seconds that it has waited for parameters of stage 3 to be read. Not the update's, but the step's.
    brought_s = 0.0

    def __init__(self) -> None:
        self.done = threading.Event()

    def wait_on_host(self) -> None:
        self.done.wait()

    def wait_on_device(self) -> None:
        """Block this thread: it is what computes here."""
        started = time.perf_counter()
        self.done.wait()
        if threading.current_thread() is threading.main_thread():
            Later.waited_s += time.perf_counter() - started


class Bus:
    """Stands in for parts of the engine: copies, and in ``node`` updates in memory, last as long as a rate says.

    On a CPU the engine takes short cuts where device and host are one. They are taken away: parameters of stage 3 are
    read in the background, averages land when the bus has brought them, and so do updated parameters.
    """

    def __init__(self, setting: str, flops: float) -> None:
        scale = flops / H100_FLOPS
        self.up, self.down = Lane(H100_COPIED * scale), Lane(H100_COPIED * scale)
        self._updated_per_s = H100_UPDATED * scale if setting == "node" else math.inf
        self._prepare = offload.Offload.prepare.__func__  # type: ignore[attr-defined]
        self._land = averages.Averages.land
        self._update, self._write = update._ChunkUpdate.update, update._ChunkUpdate.write
        self._copy_out = update.CopyOut.update
        self._direction, self._apply = SplitTensors.direction, SplitTensors.write

    def prepare(self, cls: Any, *args: Any) -> Any:
        """`Offload.prepare`, with a thread for copies."""
        result = self._prepare(cls, *args)
        if result.worker is None:
            result.worker = ThreadPoolExecutor(1, "ls_strategy-background")
        return result

    def land(self, to: Any, *args: Any, **options: Any) -> None:
        self._land(to, *args, **options)
        if to._flat.gradient_tier != "device" and to.values is not None:
            to.landing = to._flat.store.in_background(self.down.take(to.values.numel()).wait_on_host)

    def update(self, portion: Any) -> None:
        started = time.perf_counter()
        self._update(portion)
        if portion._update.states.resident:
            self._lasts(portion._hi - portion._lo, started)

    def _lasts(self, elements: float, started: float) -> None:
        """Wait until an update of so many elements, which has begun at ``started``, would be over."""
        time.sleep(max(0.0, elements / self._updated_per_s - (time.perf_counter() - started)))

    def direction(self, split: Any, member: Any, grad: Tensor) -> Tensor:
        """`SplitTensors.direction`: reads a gradient, changes a momentum, and writes a 16-bit direction, 14 bytes."""
        started = time.perf_counter()
        result: Tensor = self._direction(split, member, grad)
        self._lasts(grad.numel() * 14 / 28, started)
        return result

    def apply(self, split: Any, member: Any, change: Tensor, *settings: Any) -> None:
        """`SplitTensors.write`: reads a 16-bit update and changes a master weight, 10 bytes."""
        started = time.perf_counter()
        self._apply(split, member, change, *settings)
        self._lasts(change.numel() * 10 / 28, started)

    def write(self, portion: Any) -> None:
        flat, sent = portion._update.flat, portion._out is not None and portion._update.flat.param_tier == "device"
        self._write(portion)
        if sent:
            flat.arriving = self.up.take(portion._hi - portion._lo)

    def copy_out(self, job: Any) -> None:
        self._copy_out(job)
        job._flat.arriving = self.up.take(job._flat.stepped[1] - job._flat.stepped[0])

    def to_device(self, target: Tensor, source: Tensor) -> Later:
        target.copy_(source)
        return self.up.take(target.numel())


def timed_load(flat: units.FlatBuffer, out: Tensor, *, plain: Any = units.FlatBuffer._load_shard) -> None:
    """`FlatBuffer._load_shard`, with the time it takes."""
    waited, started = Later.waited_s, time.perf_counter()
    plain(flat, out)
    Later.brought_s += time.perf_counter() - started
    Later.waited_s = waited


@contextmanager
def simulated(setting: str, flops: float) -> Iterator[None]:
    """Put a `Bus` in, and a clock."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units.FlatBuffer, "_load_shard", timed_load)
        patch.setattr(owner_updater, "BUCKET", 12 * NETWORK["width"] ** 2)  # a block: large models have many buckets
        if setting == "here":
            yield
            return
        bus = Bus(setting, flops)
        patch.setattr(offload.Offload, "prepare", classmethod(bus.prepare))
        patch.setattr(averages.Averages, "land", lambda to, *args, **options: bus.land(to, *args, **options))
        patch.setattr(update._ChunkUpdate, "update", lambda portion: bus.update(portion))
        patch.setattr(update._ChunkUpdate, "write", lambda portion: bus.write(portion))
        patch.setattr(update.CopyOut, "update", lambda job: bus.copy_out(job))
        patch.setattr(SplitTensors, "direction", lambda split, *args: bus.direction(split, *args))
        patch.setattr(SplitTensors, "write", lambda split, *args: bus.apply(split, *args))
        patch.setattr(link.Link, "to_device", lambda _, target, source, after=None: bus.to_device(target, source))
        patch.setattr(units.FlatBuffer, "_reads_ahead", property(lambda flat: flat.param_tier != "device"))
        yield


class Clock(pl.Callback):
    """Seconds of every step, and those that it waited for updates."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.exposed: list[float] = []
        self.brought: list[float] = []
        self.losses: list[float] = []
        self.flops = 0.0
        self._last = (0.0, 0.0, 0.0)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Take the time. Waiting for updates of this step happens in the next one's forward."""
        now = (time.perf_counter(), trainer.strategy.exposed_step_s + Later.waited_s, Later.brought_s)
        if batch_idx >= 2:  # the first step allocates, and cannot update early
            self.seconds.append(now[0] - self._last[0])
            self.exposed.append(now[1] - self._last[1])
            self.brought.append(now[2] - self._last[2])
        self.losses.append(float(outputs["loss"]))
        self._last = now


def train(run: Run, steps: int, tokens: int, flops: float) -> Clock:
    pl.seed_everything(0, verbose=False)
    data = torch.randint(256, (steps * (tokens // BLOCK), BLOCK + 1))
    clock = Clock()
    with simulated(run.setting, flops), tempfile.TemporaryDirectory(dir=ROOT) as folder:
        options = {**ALIASES[run.strategy], "sharding.overlap_step": run.overlap}
        if "nvme" in run.strategy:
            options["offload.nvme_path"] = folder
        trainer: Any = bare_trainer(
            ZeROStrategy(**nested(options)),
            max_steps=steps,
            gradient_clip_val=1.0 if run.clip else None,
            callbacks=[clock],
        )
        module = GPTModule(
            GPTConfig(vocab_size=256, block_size=BLOCK, **NETWORK), OptimConfig(name=run.optimizer, warmup_steps=2),
            SampleConfig(max_new_tokens=0),
        )  # fmt: skip
        trainer.fit(module, DataLoader(TensorDataset(data[:, :-1], data[:, 1:]), batch_size=tokens // BLOCK))
        clock.flops = tokens * module.flops_per_token()
        trainer.strategy.require_engine().offload.close()
    return clock


def row_of(run: Run, clocks: dict[Run, list[Clock]]) -> dict[str, Any]:
    """Medians of a run, printed and returned."""
    seconds = [s for c in clocks[run] for s in c.seconds]
    shares = [e / s for c in clocks[run] for s, e in zip(c.seconds, c.exposed, strict=True)]
    brought = [b / s for c in clocks[run] for s, b in zip(c.seconds, c.brought, strict=True)]
    blocking = [statistics.median(c.seconds) for c in clocks[replace(run, overlap=False)]]
    ratios = [statistics.median(c.seconds) / b for c, b in zip(clocks[run], blocking, strict=True)]
    row = {
        **asdict(run),
        "median_s": round(statistics.median(seconds), 4),
        "exposed": round(statistics.median(shares), 4),
        "parameters": round(statistics.median(brought), 4),
        "ratio_to_blocking": round(statistics.median(ratios), 3),
        "loss": clocks[run][0].losses[-1],
    }
    shares_shown = f"{row['exposed']:>9.1%}{row['parameters']:>9.1%}"
    print(f"{run!s:44}{row['median_s']:>8.3f}{shares_shown}{row['ratio_to_blocking']:>12.3f}", flush=True)
    return row


def main() -> None:
    parser = record.parser(__doc__, rounds=2, rounds_help="Trainers of each kind")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, help="aliases")
    parser.add_argument("--settings", nargs="+", default=SETTINGS, choices=SETTINGS)
    parser.add_argument("--optimizers", nargs="+", default=["adamw"], choices=["adamw", "muon"])
    parser.add_argument("--steps", type=int, default=5, help="steps of each, of which the first two are not counted")
    parser.add_argument("--tokens", type=int, default=8192, help="per step")
    args = parser.parse_args()
    quiet()
    torch.set_num_threads(1)  # the other core is for updates
    clock = train(Run("zero3"), 4, args.tokens, 0.0)
    flops = clock.flops / min(clock.seconds)
    runs = [
        Run(strategy, clip, overlap, setting, optimizer)
        for optimizer in args.optimizers
        for setting in args.settings
        for strategy in args.strategies
        for clip in (False, True)
        for overlap in (True, False)
    ]
    clocks: dict[Run, list[Clock]] = {run: [] for run in runs}
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {
        **record.header("exposed_update"), "limit": LIMIT, "network": NETWORK,
        "tokens": args.tokens, "block": BLOCK, "flops_per_s": round(flops),
    }  # fmt: skip
    print(f"{flops / 1e9:.0f} GFLOP/s, {args.tokens} tokens per step")
    print(f"{'':44}{'step s':>8}{'exposed':>9}{'params':>9}{'x blocking':>12}")
    for round_ in range(args.rounds):
        for run in runs:
            clocks[run].append(train(run, args.steps, args.tokens, flops))
            if round_ == args.rounds - 1 and not run.overlap:
                rows += [row_of(replace(run, overlap=True), clocks), row_of(run, clocks)]
                found["results"] = rows
                record.write(args.record, found)  # after every pair: a long run that is ended early is worth something


if __name__ == "__main__":
    main()
