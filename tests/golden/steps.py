"""The same numbers and the same bytes as another commit: ``python -m tests.golden.steps COMMIT``.

A change of structure leaves every bit where it was. Twenty small configurations, which together enter every part of the
engine, are trained on this machine twice, by this checkout and by a checkout of ``COMMIT``, and compared: losses,
gradient norms, weights, buffers (and, with virtual ranks and optimizers that need whole matrices, optimizer states) bit
for bit, and every collective on every rank in its order: kind, elements, dtype, size of the group.

Bits depend on the processor and on torch's version, so they are computed anew and not kept in a file. The collectives
do not: `tests.dist.test_collectives` compares those of today with ``tests/records/collectives.json``, which
``python -m tests.golden.steps --collectives`` writes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from ls_strategy.config import nested
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests import models
from tests.dist import parallel_runs, ranks, whole_optimizers
from tests.dist.test_shard_groups import on_nodes
from tests.models import Case

ROOT = Path(__file__).parents[2]
COLLECTIVES = ROOT / "tests" / "records" / "collectives.json"
TIMEOUT_S = 300

NORM = {"clip": "norm", "clip_at": 0.05}
VALUE = {"clip": "value", "clip_at": 0.01}
HOST = (("offload.optimizer", "cpu"), ("offload.parameters", "cpu"))
DRIVE = (("offload.optimizer", "nvme"), ("offload.parameters", "nvme"), ("offload.nvme_allow_ram", True))
PIPELINE = {"parallel.pipeline.size": 2, "parallel.pipeline.micro_batches": 2}
EXPERTS = {"num_experts": 4, "k": 2}
STEPS = 4


@dataclass(frozen=True)
class Golden:
    """A configuration: so many ranks, and one of the small models of the tests."""

    ranks: int
    case: Case | parallel_runs.Run | dict[str, Any]
    """A case of `tests.models`, a run of the small GPT, or options for the optimizers or virtual ranks below."""

    per_node: int = 0
    """Ranks of each node, if there are several nodes."""


def _case(stage: int, traits: str = "", **more: Any) -> Case:
    return Case(stage=stage, traits=tuple(traits.split()), steps=STEPS, **more)


def _gpt(options: dict[str, Any], **more: Any) -> parallel_runs.Run:
    return parallel_runs.Run(options, steps=STEPS, batch=8, **more)


ACCUMULATED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}

GOLDEN: dict[str, Golden] = {
    "stage 0": Golden(2, _case(0, "uneven frozen", accumulate=3, **NORM)),
    "stage 1": Golden(3, _case(1, "unused_here uneven", **VALUE)),
    "stage 2": Golden(2, _case(2, "frozen empty tied", accumulate=3, **NORM)),
    "stage 3": Golden(2, _case(3, "unused uneven buffers", accumulate=2, **NORM)),
    "two optimizers": Golden(2, _case(2, "tied uneven", optimizer="two", accumulate=2, **NORM)),
    "bf16-mixed": Golden(2, _case(3, "tied", precision="bf16-mixed", **NORM)),
    "16-mixed": Golden(2, _case(2, "uneven", precision="16-mixed", accumulate=2, **NORM)),
    "host": Golden(2, _case(3, "frozen uneven", precision="bf16-true", options=HOST, **NORM)),
    "host, early": Golden(2, _case(3, "private", precision="bf16-true", options=HOST)),
    "drive": Golden(2, _case(3, "unused", optimizer="sgd", options=DRIVE, accumulate=2)),
    "quantized wire": Golden(
        4,
        _case(
            3,
            fused=None,
            options=(
                ("sharding.quantized_gathers", "int8"),
                ("sharding.quantized_gradients", "int4"),
            ),
        ),
        per_node=2,
    ),
    "copy per node": Golden(4, _case(3, "uneven", precision="bf16-mixed", options=(("sharding.hpz", 2),)), per_node=2),
    "replicas": Golden(4, _case(3, "uneven", options=(("sharding.shard_size", 2),), **NORM), per_node=2),
    "virtual ranks": Golden(
        2, {"virtual": True, "options": {"stage": 2, "parallel.virtual_ranks": 4}, "trainer": {"precision": "64-true"}}
    ),
    "Muon": Golden(2, {"optimizer": "Muon and AdamW", "options": {"stage": 3}}),
    "Shampoo": Golden(2, {"optimizer": "Shampoo", "options": {"stage": 2, "offload.optimizer": "cpu"}}),
    "tensor": Golden(
        4,
        _gpt(
            {"stage": 2, "parallel.tensor.size": 2, "parallel.tensor.sequence_parallel": True},
            trainer=dict(ACCUMULATED),
        ),
    ),
    "rings": Golden(
        2, _gpt({"stage": 3, "parallel.context": 2, "parallel.ring": 2, "activations.checkpointing": "full"})
    ),
    "pipeline": Golden(4, _gpt({"stage": 1, **PIPELINE}, trainer=dict(ACCUMULATED))),
    "experts": Golden(2, _gpt({"stage": 3, "parallel.expert": 2}, experts=EXPERTS, trainer=dict(ACCUMULATED))),
}
"""By name."""

Found = dict[str, Any]
"""What a configuration left behind on one rank; JSON."""


# --- one rank ---------------------------------------------------------------------------------------------------------


BY_THE_CLOCK = "allreduce 6 int64"
"""With this, ranks ask each other whether all still make progress: the slower a run, the more often."""


class Collectives:
    """What a rank asks of each process group, in its order; two groups have no order between them."""

    def __init__(self) -> None:
        self.groups: dict[dist.ProcessGroup, list[list[Any]]] = {}
        """By group, in the order of their first use: lines, and how often in a row."""

    def note(self, group: dist.ProcessGroup, line: str) -> None:
        """Add one line."""
        if line == BY_THE_CLOCK:
            return
        lines = self.groups.setdefault(group, [])
        if lines and lines[-1][0] == line:
            lines[-1][1] += 1
        else:
            lines.append([line, 1])

    def as_json(self) -> list[str]:
        """Return all lines, a heading before those of each group."""
        found = []
        for group, lines in self.groups.items():
            found.append(f"--- a group of {group.size()}")
            found += [line if count == 1 else f"{line} x {count}" for line, count in lines]
        return found


def summary(found: list[Found]) -> dict[str, Any]:
    """Return how often rank 0 sends each line, and a hash of every rank's order: short enough for a record."""
    counts: Counter[str] = Counter()
    for line in found[0]["collectives"]:
        what, _, times = line.partition(" x ")
        counts[what] += int(times or 1)
    return {
        "order": [digest(rank["collectives"]) for rank in found],
        "rank 0": {what: counts[what] for what in sorted(counts)},
    }


ASKED = (
    "allreduce", "alltoall", "alltoall_base", "broadcast", "gather", "recv", "reduce", "reduce_scatter",
    "scatter", "send", "_allgather_base", "_reduce_scatter_base",
)  # fmt: skip
"""Methods of `ProcessGroup`, through which all functions of `torch.distributed` go. Objects are gathered by others,
which depend on torch's version, so they are noted by themselves."""


@contextmanager
def counted() -> Iterator[Collectives]:
    """Inside, what this rank asks of process groups is noted."""
    collectives = Collectives()

    def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            sent = args[-1 if name.startswith("reduce_scatter") and len(args) > 1 else 0]
            peer = f" {args[1]}" if name in {"send", "recv"} else ""
            collectives.note(group, f"{name}{peer} {_sizes(sent)}")
            return original(group, *args, **kwargs)

        return call

    gather_object = dist.all_gather_object

    def gather_objects(found: list[Any], value: Any, group: dist.ProcessGroup) -> None:
        collectives.note(group, "objects")
        gather_object(found, value, group)

    noting_all = {name: noting(name, getattr(dist.ProcessGroup, name)) for name in ASKED}
    with (
        mock.patch.multiple(dist.ProcessGroup, **noting_all),
        mock.patch.object(dist, "all_gather_object", gather_objects),
    ):
        yield collectives


def _sizes(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_sizes, value))
    if not isinstance(value, Tensor):
        return ""
    if value.dtype == torch.uint8 and value.numel() > 1:  # objects, pickled; some hold times or addresses
        return "bytes"
    return f"{value.numel()} {str(value.dtype).removeprefix('torch.')}"


def digest(values: Any) -> str:
    """Return a hash of the bits of tensors, in dicts by name or lists by place, with their shapes and dtypes."""
    total = hashlib.sha256()

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key in value:
                add(f"{name}.{key}", value[key])
        elif isinstance(value, (list, tuple)):
            for i, each in enumerate(value):
                add(f"{name}.{i}", each)
        elif isinstance(value, Tensor):
            plain = value.detach().cpu().contiguous()
            total.update(f"{name} {plain.dtype} {tuple(plain.shape)}".encode())
            total.update(plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
        else:
            total.update(f"{name} {value!r}".encode())

    add("", values)
    return total.hexdigest()[:16]


class Random(ranks.Net):
    """Dropout, which virtual ranks draw for."""

    def build(self) -> None:
        super().build()
        self.drop = torch.nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(x))


def _train(rank: int, world_size: int, case: Any, folder: str) -> Found:
    """Losses, norms and hashes of one configuration."""
    if isinstance(case, Case):
        result = models.run(rank, world_size, models.placed(case, Path(folder)))
        return {
            "losses": result.losses,
            "norms": result.norms,
            "weights": {k: digest(v) for k, v in result.weights.items()},
            "buffers": digest(result.buffers),
        }
    if isinstance(case, parallel_runs.Run):
        outcome = parallel_runs.train(rank, world_size, case)
        weights = {k: digest(v) for k, v in outcome.weights.items()}
        return {"losses": outcome.losses, "norms": outcome.norms, "weights": weights}
    torch.manual_seed(0)
    module = Random() if case.get("virtual") else whole_optimizers.Trained(case["optimizer"])
    strategy = ZeROStrategy(**nested({"sharding.min_unit_numel": 0, **case["options"]}))
    data = ranks.batches() if case.get("virtual") else ranks.global_batches(rank, world_size, STEPS)
    options = {"use_distributed_sampler": bool(case.get("virtual")), "max_epochs": 1, **case.get("trainer", {})}
    trainer = ranks.fit(strategy, module, data, **options)
    states = trainer.strategy.optimizer_state(trainer.optimizers[0])
    return {
        "losses": module.losses,
        "weights": {k: digest(v) for k, v in ranks.weights(module).items()},
        "states": digest(states) if rank == 0 else "",
    }


def run(rank: int, world_size: int, case: Any, folder: str, per_node: int = 0) -> Found:
    """Train one configuration on this rank; collective."""
    models.quiet()
    if per_node:
        on_nodes(rank, per_node)
    with counted() as collectives:
        found = _train(rank, world_size, case, folder)
    return {**found, "collectives": collectives.as_json()}


# --- all of them ------------------------------------------------------------------------------------------------------


def record(names: list[str]) -> dict[str, list[Found]]:
    """Return what each configuration leaves behind on every rank."""
    found = {}
    for name in names:
        golden = GOLDEN[name]
        with tempfile.TemporaryDirectory() as folder:
            found[name] = spawn(
                run, golden.ranks, golden.case, folder, golden.per_node, init_process_group=False, timeout_s=TIMEOUT_S
            )
        print(f"{name}: {golden.ranks} ranks, {len(found[name][0]['collectives'])} lines", file=sys.stderr, flush=True)
    return found


def differences(before: dict[str, list[Found]], now: dict[str, list[Found]]) -> list[str]:
    """Return a line for each value that differs: configuration, rank, what, and its first place."""
    lines = []
    for name, ours in now.items():
        if name not in before:
            lines.append(f"{name}: not in the other commit")
            continue
        for rank, (theirs_here, here) in enumerate(zip(before[name], ours, strict=True)):
            for key in here:
                was, is_now = theirs_here.get(key), here[key]
                if was != is_now:
                    lines.append(f"{name}, rank {rank}: {key}: {_first(was, is_now)}")
    return lines


def _first(was: Any, now: Any) -> str:
    if isinstance(was, list) and isinstance(now, list):
        for i, (a, b) in enumerate(zip(was, now, strict=False)):
            if a != b:
                return f"number {i} was {a}, is {b}"
        return f"{len(was)} were there, {len(now)} are"
    if isinstance(was, dict) and isinstance(now, dict):
        keys = [k for k in {**was, **now} if was.get(k) != now.get(k)]
        return f"{len(keys)} differ, first {keys[0]!r}"
    return f"was {was}, is {now}"


def against(commit: str, names: list[str]) -> list[str]:
    """Train in a checkout of ``commit`` and here; return what differs."""
    with tempfile.TemporaryDirectory() as folder:
        tree, file = Path(folder) / "tree", Path(folder) / "before.json"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", tree, commit], cwd=ROOT, check=True)
        try:
            command = [sys.executable, "-m", "tests.golden.steps", "--save", str(file), *[f"--only={n}" for n in names]]
            subprocess.run(command, cwd=tree, check=True, env=_environment(tree))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
        return differences(json.loads(file.read_text()), json.loads(json.dumps(record(names))))


def _environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree)}


def main() -> int:
    """Compare with a commit, or write what there is; the exit status is 1 if something differs."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("commit", nargs="?", help="compare with this commit")
    options.add_argument("--only", action="append", choices=list(GOLDEN), help="this configuration; may be repeated")
    options.add_argument("--save", metavar="FILE", help="write losses, hashes and collectives of this checkout")
    options.add_argument("--collectives", action="store_true", help=f"write {COLLECTIVES.relative_to(ROOT)}")
    asked = options.parse_args()
    names = asked.only or list(GOLDEN)
    if asked.commit:
        problems = against(asked.commit, names)
        print("\n".join(problems) or f"{len(names)} configurations: the same bits and collectives as {asked.commit}")
        return int(bool(problems))
    found = record(names)
    if asked.save:
        Path(asked.save).write_text(json.dumps(found))
    if asked.collectives:
        COLLECTIVES.write_text(json.dumps({k: summary(v) for k, v in found.items()}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
