"""What the planner says of tensor, context, expert and pipeline parallelism is what real ranks hold and send."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy.activations.offload import ActivationOffload
from ls_strategy.config import RecomputeConfig, ZeROConfig, nested
from ls_strategy.extras.planner.candidates import Candidate
from ls_strategy.extras.planner.choice import Question
from ls_strategy.extras.planner.forecast import Run as PlannedRun
from ls_strategy.extras.planner.parallelism import Job, Parallelism
from ls_strategy.extras.planner.partitioned import partitioned
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.precision import resolve_precision
from ls_strategy.testing import spawn
from ls_strategy.tiers.nvme import NVMeTier
from tests.dist.parallel_runs import Module, Run
from tests.dist.ranks import quiet
from tests.live_bytes import LiveBytes
from tests.marks import wide
from tests.trainers import bare_trainer

FULL = RecomputeConfig(policy="full")
SHAPE: dict[str, Any] = {"num_layers": 6, "width": 128, "num_heads": 4, "vocab_size": 64, "block_size": 64}

EXPERTS: dict[str, Any] = {"num_experts": 4, "ffn": 192, "k": 2, "drop_tokens": False}


DRIVE = "TEST_PLANNED_ON_DRIVE"
"""Environment variable: the folder of states on NVMe."""


class Private(Module):
    """No hook of the module looks at gradients."""

    on_before_optimizer_step = pl.LightningModule.on_before_optimizer_step

    def train_dataloader(self) -> DataLoader:
        shard = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1}
        mine = self.run.batch // shard["num_replicas"]
        tokens = torch.randint(0, SHAPE["vocab_size"], (self.run.steps * mine, SHAPE["block_size"]))
        return DataLoader(TensorDataset(tokens, tokens), batch_size=mine)


@dataclass(frozen=True)
class Planned:
    """One run, and how it is planned."""

    parallel: Parallelism
    candidate: Candidate
    precision: str = "32-true"
    micro_batches: int = 1
    samples: int = 2
    experts: bool = False
    shape: dict[str, Any] = field(default_factory=dict, hash=False)
    ranks: int = 4
    node_size: int = 4

    @property
    def data(self) -> int:
        return self.ranks // self.parallel.replica

    @property
    def on_drive(self) -> dict[str, Any]:
        """The tiers, and where NVMe is, if it is used."""
        tiers = {"optimizer": self.candidate.optimizer, "parameters": self.candidate.parameters}
        if "nvme" not in self.candidate.strategy:
            return {}
        where = {"nvme_path": os.environ.get(DRIVE), "nvme_allow_ram": True}
        return {"offload": {**{name: tier.tier for name, tier in tiers.items() if tier}, **where}}

    @property
    def kept_away(self) -> dict[str, Any]:
        """Offload of activations with its own bounds, which `Candidate.arguments` leaves out."""
        offload = self.candidate.activation_offload
        if offload is None:
            return {}
        assert self.candidate.recompute is not None
        return {"activations": {"checkpointing": self.candidate.recompute.policy, "offload": asdict(offload)}}

    @property
    def run(self) -> Run:
        accumulated = self.micro_batches if self.parallel.pipeline == 1 else 1
        options = {
            **self.candidate.arguments(),
            **self.on_drive,
            **self.kept_away,
            "parallel": self.parallel.arguments(self.micro_batches),
            "sharding.min_unit_numel": 0,
        }
        batch = self.samples * self.data * (1 if self.parallel.pipeline == 1 else self.micro_batches)
        return Run(
            options, {**SHAPE, **self.shape}, EXPERTS if self.experts else None, steps=2 * accumulated, batch=batch,
            trainer={"accumulate_grad_batches": accumulated, "precision": self.precision},
        )  # fmt: skip

    @property
    def job(self) -> Job:
        return Job(
            candidate=self.candidate, parallel=self.parallel, ranks=self.ranks, node_size=self.node_size,
            samples=self.samples, micro_batches=self.micro_batches,
        )  # fmt: skip

    def __str__(self) -> str:
        words = (self.parallel.name, self.candidate.name, self.precision, "moe" if self.experts else "")
        return ", ".join(word for word in words if word).replace(" ", "-")


CP2, CP4 = Parallelism(context=2), Parallelism(context=4, ring=2)
EP2, EP4 = Parallelism(expert=2), Parallelism(expert=4)
TP2, TP4 = Parallelism(tensor=2), Parallelism(tensor=4)
PP2, PP4 = Parallelism(pipeline=2), Parallelism(pipeline=4)
RUNS = (
    Planned(TP2, Candidate(1)),
    Planned(TP4, Candidate(3), "bf16-true"),
    Planned(TP2, Candidate(3, recompute=FULL), "bf16-true", micro_batches=2),
    Planned(PP2, Candidate(1), micro_batches=4),
    Planned(PP4, Candidate(1), "bf16-true", micro_batches=8),
    Planned(PP2, Candidate(2), "bf16-true", micro_batches=4),
    Planned(PP2, Candidate(3, recompute=FULL), micro_batches=4),
    Planned(Parallelism(pipeline=2, schedule="gpipe"), Candidate(1), micro_batches=4),
    Planned(Parallelism(pipeline=2, schedule="interleaved_1f1b"), Candidate(1), micro_batches=4),
    Planned(Parallelism(pipeline=2, tensor=2), Candidate(2), micro_batches=4),
    Planned(CP2, Candidate(1)),
    Planned(CP4, Candidate(3, recompute=FULL), "bf16-true"),
    Planned(Parallelism(context=2, ring=2), Candidate(2), "bf16-true"),
    Planned(Parallelism(context=2, tensor=2), Candidate(3)),
    Planned(EP2, Candidate(1), experts=True),
    Planned(EP4, Candidate(3), "bf16-true", experts=True),
    Planned(Parallelism(expert=2, pipeline=2), Candidate(2), micro_batches=4, experts=True),
)


class Begin(pl.Callback):
    """From here on the peak and the bytes count."""

    def __init__(self, live: LiveBytes, offloads: list[ActivationOffload]) -> None:
        self.live, self.offloads = live, offloads
        self.sent: list[dict[str, int]] = []

    def on_train_start(self, *_: Any) -> None:
        self.live.reset_peak()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        mesh = trainer.strategy.parallel.mesh
        axes = {name: sum(getattr(mesh, name).traffic.bytes.values()) for name in ("tensor", "sequence", "expert")}
        counted = ["all_gather", "reduce_scatter", *(["all_reduce"] if mesh.shape.shard else [])]
        meter = trainer.strategy.traffic
        axes["pipeline"] = sum(v for k, v in mesh.pipeline.traffic.bytes.items() if k == "pipeline")
        axes["zero"] = sum(v for k, v in meter.bytes.items() if k in counted)
        axes["activations"] = sum(each.bytes_out + each.bytes_back for each in self.offloads)
        axes["zero between nodes"] = sum(v for k, v in meter.bytes_between_nodes.items() if k in counted)
        self.sent.append(axes)


@contextmanager
def moved_by_the_drive() -> Iterator[Callable[[], int]]:
    """Yield what returns the bytes that NVMe has read and written. Threads append: ``+=`` may lose what they add."""
    moved: list[int] = []
    get, put = NVMeTier.get, NVMeTier.put

    def counting_get(tier: NVMeTier, key: Any, start: int = 0, stop: int | None = None) -> Any:
        numel, dtype = tier.sizes[key]
        moved.append(((numel if stop is None else stop) - start) * dtype.itemsize)
        return get(tier, key, start, stop)

    def counting_put(tier: NVMeTier, key: Any, value: Any, start: int = 0) -> None:
        moved.append((value if isinstance(value, torch.Tensor) else value.wait()).nbytes)
        put(tier, key, value, start)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NVMeTier, "get", counting_get)
        patch.setattr(NVMeTier, "put", counting_put)
        yield lambda: sum(moved)


@contextmanager
def offloads_made() -> Iterator[list[ActivationOffload]]:
    """Yield a list, to which every offload of activations is added."""
    made: list[ActivationOffload] = []
    plain = ActivationOffload.__init__

    def noted(offload: ActivationOffload, *args: Any, **options: Any) -> None:
        plain(offload, *args, **options)
        made.append(offload)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ActivationOffload, "__init__", noted)
        yield made


def trainer_of(run: Run, devices: int, nodes: int, **arguments: Any) -> pl.Trainer:
    strategy = ZeROStrategy(**nested(run.options or {}))
    options = {"num_nodes": nodes, "max_epochs": 1, "use_distributed_sampler": False}
    return bare_trainer(strategy, devices, **options, **run.trainer, **arguments)


def measure(rank: int, world_size: int, runs: tuple[Planned, ...]) -> list[tuple[int, dict[str, int]]]:
    """For every run: peak bytes, and bytes sent in the last step by axis."""
    quiet()
    found = []
    for planned in runs:
        run = planned.run
        per_step = run.trainer["accumulate_grad_batches"]
        moved: list[int] = []
        for longer in range(2 if "nvme" in planned.candidate.strategy else 1):  # reading runs ahead of a step's end
            now = replace(run, steps=run.steps + longer * per_step)
            torch.manual_seed(0)
            with LiveBytes() as live, moved_by_the_drive() as count, offloads_made() as offloads:
                begin = Begin(live, offloads)
                trainer_of(now, planned.node_size, world_size // planned.node_size, callbacks=[begin]).fit(Private(now))
            moved.append(count())
        assert len(begin.sent) > per_step, (str(planned), len(begin.sent))
        last, before = begin.sent[-1], begin.sent[-1 - per_step]
        sent = {name: last[name] - before[name] for name in last}
        found.append((live.peak, {**sent, "drive": moved[-1] - moved[0]}))
    return found


@functools.cache
def measured() -> list[list[tuple[int, dict[str, int]]]]:
    return spawn(measure, 4, RUNS, init_process_group=False, timeout_s=400)


def question_of(planned: Planned) -> Question:
    run = planned.run
    module = Private(run)
    module.configure_model()
    tokens = torch.zeros(planned.samples, SHAPE["block_size"], dtype=torch.long)
    config = ZeROConfig(sharding={"min_unit_numel": 0})
    return Question(
        module, [module.configure_optimizers()], resolve_precision(planned.precision), [tokens, tokens],
        PlannedRun(config=config),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("names", "short"),
    [
        wide((), True),
        (("blocks.*.attention_norm",), True),
        (("blocks.7.attention_norm",), False),
        (tuple(f"blocks.{i}.attention_norm" for i in range(8)), False),
        (("head.weight",), True),
    ],
)
def test_one_block_stands_for_all_only_if_all_stay_in_fp32_alike(names: tuple[str, ...], short: bool) -> None:
    planned = Planned(Parallelism(tensor=2), Candidate(1), precision="bf16-true", shape={"num_layers": 8}, ranks=2)
    plain = question_of(planned)
    config = ZeROConfig.of(1, precision={"fp32_modules": names})
    question = replace(plain, run=PlannedRun(config=replace(plain.run.config, precision=config.precision)))
    with partitioned(question, planned.parallel, native=False) as model:
        assert bool(model.short) == short
        assert model.peaks(planned.job, range(1))[0].device > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("index", range(len(RUNS)), ids=map(str, RUNS))
def test_the_peak_is_foretold_within_a_twentieth(index: int) -> None:
    planned = RUNS[index]
    with partitioned(question_of(planned), planned.parallel, native=False) as model:
        foretold = [p.device + p.cpu for p in model.peaks(planned.job, range(planned.parallel.pipeline))]
    found = [rank[index][0] for rank in measured()]
    per_stage = len(found) // len(foretold)
    for rank, peak in enumerate(found):
        assert foretold[rank // per_stage] == pytest.approx(peak, rel=0.05), (foretold, found)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("index", range(len(RUNS)), ids=map(str, RUNS))
def test_traffic_of_every_axis_is_foretold(index: int) -> None:
    """Exactly, except that routers do not send every expert as many tokens, nor the stages all as much."""
    planned = RUNS[index]
    with partitioned(question_of(planned), planned.parallel, native=False) as model:
        foretold = model.spent(planned.job)
        zero = model.zero_traffic(planned.job).sent
    most = {axis: max(rank[index][1][axis] for rank in measured()) for axis in measured()[0][index][1]}
    assert zero == pytest.approx(most["zero"], rel=0.001)  # stages have other paddings
    assert foretold["tensor"] == most["tensor"]
    assert foretold["context"] == most["sequence"]
    if not planned.experts:
        assert foretold["pipeline"] == most["pipeline"]
    assert foretold["expert"] == pytest.approx(most["expert"], rel=0.05)
