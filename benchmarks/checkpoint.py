"""Saving a checkpoint: folders of this package against ``torch.save`` and against DCP, interleaved in one run.

``python -m benchmarks.checkpoint --record benchmarks/records/checkpoint.json``

Ranks train a model of equal blocks with AdamW, in fp32, so that there are 12 bytes per parameter to save: weights and
two moments. Then they save, in turns, and wait until the bytes are on the disk. No name is taken: what the round before
has saved is removed first, outside of the times.

``torch.save``       rank 0 alone writes a full state that it has in memory already, and syncs the file
``one file``         ``checkpoint.format="file"``, which the ranks write together
``dcp``              ``torch.distributed.checkpoint.save`` of the same shards as DTensors, with its own writer
``dcp, thread``      ``async_save`` of these, which writes in a thread
``dcp, process``     the same in a process of its own
``folder``           this package
``folder, async``    this package, in the background, and a step of training
``update at once``   the same without the step: the update follows the call
``copy alone``       every rank copies its states within host memory and writes nothing: what a stall cannot be below if
                     an update follows at once

*Call* is the time until the call has returned. *Stall* is that and what the next update waits until it may change the
states, after a forward and backward through as many layers, of one weight, with 64 samples per rank. It has not what
the save takes from the cores while these compute.

Memory is the growth of anonymous memory of a rank during the save, sampled every 2 ms.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import record
from benchmarks.contest import quartiles, ratios, turns
from ls_strategy.checkpoint.describe import verify_all
from ls_strategy.checkpoint.place import CheckpointPath
from ls_strategy.config import nested
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.processes import anonymous_bytes
from tests.trainers import bare_trainer

MINUTES = 5
SAMPLES = 64  # per rank in the step that follows a save
SPREAD = "quartiles over rounds"
SEEDS = "none set: times do not depend on the values"
KINDS = ("seconds", "call", "stall", "memory", "first")  # what is measured of every save
QUICK = ("--width", "64", "--layers", "2", "--rounds", "2")


class Model(pl.LightningModule):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.width = width

    def training_step(self, batch: list[Tensor], i: int) -> Tensor:
        h = batch[0]
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return h.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def trained(width: int, layers: int, ranks: int, folder: Path, **options: Any) -> pl.Trainer:
    """Two steps, so that every state exists; the strategy then still holds the shards."""
    trainer = bare_trainer(
        ZeROStrategy(3, **nested({"sharding.min_unit_numel": 0, "checkpoint.format": "sharded", **options})),
        ranks,
        max_steps=2,
        default_root_dir=folder,
    )
    data = DataLoader(TensorDataset(torch.randn(8 * ranks, width)), batch_size=2)
    trainer.fit(Model(width, layers), data)
    return trainer


class Peak:
    """Largest growth of this process' anonymous memory inside the block."""

    def __enter__(self) -> Peak:
        self._stop = threading.Event()
        self.start = self.top = anonymous_bytes()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.top = max(self.top, anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.bytes = max(self.top, anonymous_bytes()) - self.start


def gradients(width: int, layers: int) -> Callable[[], None]:
    """Return what computes gradients of layers of its own, which share one weight: memory is for what is saved."""
    layer = nn.Linear(width, width)
    batch = torch.randn(SAMPLES, width)

    def compute() -> None:
        h = batch
        for _ in range(layers):
            h = torch.tanh(layer(h))
        h.square().mean().backward()

    compute()  # makes the gradients, which are no memory of a save
    return compute


class Saves:
    """What saves, by the names of the contenders. Each is made when it is asked for: all need memory."""

    def __init__(self, rank: int, ranks: int, width: int, layers: int, root: Path) -> None:
        """Train nothing yet."""
        self.rank, self.ranks, self.width, self.layers, self.root = rank, ranks, width, layers, root
        # That save in the background, by where their states are, and one that writes files.
        self.trainers: dict[str, pl.Trainer] = {}
        self.named: dict[str, Callable[[], Callable[[], Any]]] = {
            "torch.save": self.torch_save,
            "one file": partial(self.folder, _nothing, background=False, **{"checkpoint.format": "file"}),
            "dcp": self.dcp_save,
            "dcp, thread": partial(self.dcp_async, AsyncCheckpointerType.THREAD),
            "dcp, process": partial(self.dcp_async, AsyncCheckpointerType.PROCESS),
            "folder": partial(self.folder, _nothing, background=False),
            "folder, async": partial(self.folder, gradients(width, layers)),
            "folder, async, update at once": partial(self.folder, _nothing),
            "folder, async, states in host memory": partial(
                self.folder, gradients(width, layers), **{"offload.optimizer": "cpu"}
            ),
            "copy alone": self.copy_alone,
        }

    @functools.cached_property
    def shards(self) -> dict[str, DTensor]:
        """As many bytes as a trainer saves."""
        mesh = init_device_mesh("cpu", (self.ranks,))
        local = (self.width // self.ranks, self.width)
        return {
            f"{n}.{k}": DTensor.from_local(torch.randn(local), mesh, [Shard(0)], run_check=False)
            for n in range(self.layers)
            for k in ("weight", "exp_avg", "exp_avg_sq")
        }

    def torch_save(self) -> Callable[[], Any]:
        """Rank 0 saves full tensors."""
        sizes = (self.width, self.width)
        full = {f"{n}.{k}": torch.randn(sizes) for n in range(self.layers) for k in range(3)} if self.rank == 0 else {}

        def save() -> None:
            if self.rank == 0:
                with (self.root / "saved").open("wb") as file:
                    torch.save(full, file)
                    file.flush()
                    os.fsync(file.fileno())

        return save

    def dcp_save(self) -> Callable[[], Any]:
        """DCP, which the caller waits for."""
        return partial(dcp.save, self.shards, checkpoint_id=self.root / "saved")

    def dcp_async(self, kind: AsyncCheckpointerType) -> Callable[[], Any]:
        """DCP in the background."""
        return partial(dcp.async_save, self.shards, checkpoint_id=self.root / "saved", async_checkpointer_type=kind)

    def copy_alone(self) -> Callable[[], Any]:
        """No save: a copy of every shard."""
        local = [shard.to_local() for shard in self.shards.values()]
        copies = [torch.zeros_like(shard) for shard in local]

        def copy() -> None:
            for target, shard in zip(copies, local, strict=True):
                target.copy_(shard)

        return copy

    def folder(
        self, compute: Callable[[], None], *, background: bool = True, **options: Any
    ) -> Callable[[], Callable[[], float]]:
        """This package. What it returns saves, and returns what follows: gradients, and what an update does first.

        That returns the seconds for which the update waits before it may change states.
        """
        options = {"checkpoint.background": True, **options}
        key = str(options)
        if key not in self.trainers:
            self.trainers[key] = trained(self.width, self.layers, self.ranks, self.root, **options)
        trainer = self.trainers[key]

        def update() -> float:
            compute()
            begin = time.perf_counter()
            for flat in cast("ZeROStrategy", trainer.strategy).require_engine().flats:
                flat.before_change()
            return time.perf_counter() - begin

        def save() -> Callable[[], float]:
            trainer.training = background  # after a fit, saves are not left to the background
            trainer.save_checkpoint(self.root / "saved")
            return update

        return save

    def wait(self) -> None:
        """Wait for what this package writes in the background."""
        for trainer in self.trainers.values():
            cast("ZeROStrategy", trainer.strategy).wait_for_saves()


def _nothing() -> None:
    """Compute nothing."""


def bench(rank: int, ranks: int, width: int, layers: int, rounds: int, folder: str, only: list[str]) -> dict[str, Any]:
    """Seconds, stall and memory per contender and round, on one rank."""
    root = Path(folder)
    made = Saves(rank, ranks, width, layers, root)
    saves = {name: make() for name, make in made.named.items() if name in only or not only}
    result: dict[str, Any] = {name: {kind: [] for kind in KINDS} for name in saves}
    for counts, name in turns(list(saves), rounds, uncounted=1):
        if rank == 0:
            CheckpointPath(root / "saved").remove()
            os.sync()
        dist.barrier()
        begin = time.perf_counter()
        with Peak() as peak:
            pending = saves[name]()
            call = time.perf_counter() - begin
            waited: Any = pending() if callable(pending) else 0.0
            stall = call + waited
            if isinstance(pending, Future):
                pending.result()
            made.wait()
        dist.barrier()
        if not counts:  # the first round makes files and staging memory, which later ones use again
            result[name]["first"].append(peak.bytes)
        else:
            result[name]["seconds"].append(time.perf_counter() - begin)
            result[name]["call"].append(call)
            result[name]["stall"].append(stall)
            result[name]["memory"].append(peak.bytes)
        if rank == 0 and not counts and name.startswith("folder"):
            assert not verify_all(root / "saved")  # all of it can be read
    return result


def summarise(by_rank: list[dict[str, Any]], nbytes: int, unit_bytes: int) -> dict[str, Any]:
    """Slowest rank per round; ratios to ``torch.save`` and to DCP in the same round."""
    slowest = {
        name: {key: [max(each) for each in zip(*(r[name][key] for r in by_rank), strict=True)] for key in KINDS}
        for name in by_rank[0]
    }
    results: dict[str, Any] = {}
    for name, measured in slowest.items():
        row: dict[str, Any] = {
            "gbs": quartiles([nbytes / s / 1e9 for s in measured["seconds"]]),
            "memory_over_unit": round(max(measured["memory"]) / unit_bytes, 2),
            "first_memory_over_unit": round(max(measured["first"]) / unit_bytes, 2),
        }
        for peer in (name for name in ("torch.save", "dcp", "dcp, process") if name in slowest):
            row[f"times_faster_than_{peer}"] = quartiles(ratios(slowest[peer]["seconds"], measured["seconds"]))
        for each in ("call", "stall"):
            row[f"{each}_over_folder"] = quartiles(ratios(measured[each], slowest["folder"]["seconds"]))
        results[name] = row
    return results


def main() -> None:
    parser = record.parser(__doc__, rounds=9)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=[], help="contenders; none: all")
    parser.add_argument("--directory", type=Path, default=None, help="folder on the disk to write to")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        by_rank = spawn(
            bench,
            args.ranks,
            args.width,
            args.layers,
            args.rounds,
            folder,
            args.only,
            init_process_group=False,
            timeout_s=3600,
        )
    parameters = args.layers * args.width * (args.width + 1)
    results = summarise(by_rank, 12 * parameters, 12 * args.width * (args.width + 1) // args.ranks)
    print(json.dumps(results, indent=1))
    found = {
        **record.header("checkpoint", private=(args.directory,) if args.directory else ()),
        "parameters": parameters,
        "ranks": args.ranks,
        "rounds": args.rounds,
        "results": results,
    }
    record.write(args.record, found)


if __name__ == "__main__":
    main()
