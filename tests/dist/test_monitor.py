"""Where `Monitor` says the time goes, in runs of which that is known: what is slow shows in its bin."""

from __future__ import annotations

import csv
import json
import logging
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ls_strategy import ConfigError, Monitor, PlanError, ZeROStrategy, spans
from ls_strategy.config import nested
from ls_strategy.spans import COMMUNICATION, PHASES, SpanRecorder
from tests.dist.parallel_runs import Module as GPTModule
from tests.dist.parallel_runs import Run
from tests.dist.ranks import Net, batches, fit, on_ranks, quiet, samples, trainer_of

pytestmark = pytest.mark.wide

Row = dict[str, float]


def logger_of(folder: Path, rank: int) -> CSVLogger:
    return CSVLogger(folder, name="", version=str(rank))


def rows_of(folder: Path, rank: int = 0) -> list[Row]:
    """What rank 0 has logged, at every time of logging."""
    with (folder / str(rank) / "metrics.csv").open() as file:
        rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    return [row for row in rows if "zero_time/step_ms" in row]


def check_sums(row: Row) -> None:
    """Phases are the step, and hidden and exposed are what was under way."""
    assert sum(row[f"zero_time/{p}_ms"] for p in PHASES) == pytest.approx(row["zero_time/step_ms"])
    assert sum(row[f"zero_time_share/{p}"] for p in PHASES) == pytest.approx(1)
    for name in ("communication", "copies"):
        parts = [row.get(f"zero_time/{name}_{part}_ms", 0.0) for part in ("exposed", "hidden")]
        assert sum(parts) == pytest.approx(row.get(f"zero_time/{name}_ms", 0.0))
        assert min(parts) >= 0


# --- the right bin ----------------------------------------------------------------------------------------------------

SLOW = {"data": 0.05, "forward": 0.03, "backward": 0.07, "optimizer": 0.04, "other": 0.06}


class SlowData(Dataset):
    """Half of what a batch takes is for each of its two samples."""

    def __init__(self) -> None:
        self.x, self.y = samples(24)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        time.sleep(SLOW["data"] / 2)
        return self.x[i], self.y[i]


class SlowNet(Net):
    def training_step(self, batch: Any, i: int) -> Tensor:
        time.sleep(SLOW["forward"])
        return super().training_step(batch, i)

    def build(self) -> None:
        super().build()
        self.first.weight.register_hook(lambda grad: time.sleep(SLOW["backward"]))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        time.sleep(SLOW["optimizer"])


class SlowCallback(Callback):
    """And meters, step by step."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.started_s = self.ended_s = 0.0

    def on_train_start(self, *args: Any) -> None:
        self.started_s = time.monotonic()

    def on_train_end(self, *args: Any) -> None:
        self.ended_s = time.monotonic()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.sent.append(sum(trainer.strategy.traffic.bytes.values()))
        time.sleep(SLOW["other"])


@on_ranks(2)
def test_what_is_slow_shows_in_its_bin_and_bytes_are_the_meters(rank: int, world_size: int, tmp_path: Path) -> None:
    meter = SlowCallback()
    fit(
        2, SlowNet(), DataLoader(SlowData(), batch_size=2), max_epochs=1, logger=logger_of(tmp_path, rank),
        log_every_n_steps=1, callbacks=[meter, Monitor()],
    )  # fmt: skip
    assert SpanRecorder.active is None
    if rank:
        return
    rows = rows_of(tmp_path)
    assert len(rows) == len(meter.sent) == 6
    for row in rows:
        check_sums(row)
        for phase, seconds in SLOW.items():
            assert row[f"zero_time/{phase}_ms"] >= 1e3 * seconds, f"{phase}: {row}"
    # A delay in two bins at once would make the steps longer than the time in which they were made.
    assert sum(row["zero_time/step_ms"] for row in rows) <= 1e3 * (meter.ended_s - meter.started_s)
    sent = [after - before for before, after in zip(meter.sent, meter.sent[1:], strict=False)]
    logged = [row["zero_traffic/communication_mib_per_step"] * (1 << 20) for row in rows[1:]]
    # The logger's own exchanges are no part of the step that is metered here.
    assert logged == pytest.approx(sent)


# --- exposed and hidden -----------------------------------------------------------------------------------------------

LATE = 0.4


class OneIsLate(Net):
    """Rank 1 is late with the gradients that are sent first; rank 0 computes meanwhile, if ``busy``, or waits."""

    def __init__(self, rank: int, folder: Path, *, busy: bool) -> None:
        super().__init__()
        self.folder = folder
        if rank == 1:  # backward begins with the last layer
            self.last.weight.register_hook(lambda grad: self.be_late())
            return
        self.blocks[2].narrow.weight.register_hook(lambda grad: self.signal().touch())
        if busy:
            self.first.weight.register_hook(lambda grad: time.sleep(1.5 * LATE))

    def signal(self) -> Path:
        """Is there when rank 0 has sent the gradients of the last layer in this step."""
        return self.folder / f"sent{self.trainer.global_step}"

    def be_late(self) -> None:
        while not self.signal().exists():
            time.sleep(0.001)
        time.sleep(LATE)


@pytest.mark.parametrize("busy", [False, True])
@on_ranks(2)
def test_a_late_rank_is_waited_for_or_hidden(rank: int, world_size: int, busy: bool, tmp_path: Path) -> None:
    strategy = ZeROStrategy(
        1, sharding={"min_unit_numel": 0, "overlap_step": False}
    )  # waits for no gradient before the last is sent
    fit(
        strategy, OneIsLate(rank, tmp_path, busy=busy), max_epochs=1, limit_train_batches=2, log_every_n_steps=2,
        logger=logger_of(tmp_path, rank), callbacks=[Monitor(trace_step=2)],
    )  # fmt: skip
    if rank:
        return
    for row in rows_of(tmp_path):
        check_sums(row)
        assert row["zero_time/communication_ms"] >= 1e3 * LATE
        exposed, hidden = row["zero_time/communication_exposed_ms"], row["zero_time/communication_hidden_ms"]
        assert (hidden if busy else exposed) >= 0.8e3 * LATE
        assert (exposed if busy else hidden) <= 0.6e3 * LATE
    events = json.loads((tmp_path / "0" / "trace_step2.json").read_text())["traceEvents"]
    check_trace(events, world_size)


def check_trace(events: list[dict[str, Any]], world_size: int) -> None:
    """All ranks, in step, with what they did and what they held."""
    slices = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in slices} == set(range(world_size))
    assert {e["name"] for e in slices if e["cat"] == "phase"} >= {"data", "forward", "backward", "optimizer", "other"}
    exchanges = {e["name"] for e in slices if e["cat"] == COMMUNICATION}
    assert exchanges >= {f"{kind} blocks.1.norm.weight" for kind in ("reduce_scatter", "all_gather")}
    ends = [max(e["ts"] + e["dur"] for e in slices if e["pid"] == r and e["cat"] == "phase") for r in (0, 1)]
    assert abs(ends[0] - ends[1]) < 1e5  # microseconds: ranks end a step together
    starts = [e["ts"] for e in slices]
    assert min(starts) >= 0


# --- memory -----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_memory_follows_the_units_of_a_traced_step(rank: int, world_size: int, tmp_path: Path) -> None:
    fit(3, Net(), max_epochs=1, default_root_dir=tmp_path, callbacks=[Monitor(trace_step=2)])
    if rank:
        return
    events = json.loads((tmp_path / "trace_step2.json").read_text())["traceEvents"]
    check_trace(events, world_size)
    held = [e["args"] for e in events if e["ph"] == "C" and e["name"] == "memory (MiB)" and e["pid"] == 0]
    assert set(held[0]) == {"parameters", "gathered", "masters", "gradients", "optimizer", "communication"}
    gathered = [h["gathered"] for h in held]
    one = 313 * 4 / (1 << 20)  # a block
    assert max(gathered) - min(gathered) >= one
    assert max(gathered) < 5 * one  # never the whole model: three blocks and two layers of a quarter each
    units = {e["name"] for e in events if e["ph"] == "i"}
    assert {"blocks.0", "blocks.1", "blocks.2"} <= units


# --- offload ----------------------------------------------------------------------------------------------------------


@on_ranks(1)
def test_traffic_of_the_drive_is_copies(rank: int, world_size: int, tmp_path: Path) -> None:
    strategy = ZeROStrategy(
        2,
        sharding={"min_unit_numel": 0},
        offload={"optimizer": "nvme", "nvme_path": str(tmp_path / "drive"), "nvme_allow_ram": True},
    )
    fit(strategy, Net(), max_epochs=1, logger=logger_of(tmp_path, rank), log_every_n_steps=2, callbacks=[Monitor()])
    for row in rows_of(tmp_path):
        check_sums(row)
        assert row["zero_time/copies_ms"] > 0
        assert row["zero_traffic/copies_gb_per_s"] > 0
        # Masters and two moments, read and written: at least a page of each buffer.
        assert row["zero_traffic/copies_mib_per_step"] * (1 << 20) >= 2 * 3 * 4 * sum(
            p.numel() for p in Net().parameters()
        )


# --- loops ------------------------------------------------------------------------------------------------------------


class Manual(Net):
    """Two optimizers, each with a step of its own in every batch."""

    manual = True

    def configure_optimizers(self) -> Any:
        halves = [self.first, self.blocks, self.last]
        return [torch.optim.SGD(list(part.parameters()), lr=0.01) for part in halves[:2]]

    def training_step(self, batch: Any, i: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            time.sleep(0.02)
            self.manual_backward(self.loss(batch))
            optimizer.step()


def test_manual_optimization(tmp_path: Path) -> None:
    quiet()
    fit(1, Manual(), max_epochs=1, logger=logger_of(tmp_path, 0), log_every_n_steps=4, callbacks=[Monitor()])
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [4, 8, 12, 16]
    for row in rows:
        check_sums(row)
        assert row["zero_time/forward_ms"] >= 20
        assert row["zero_time/backward_ms"] > 0
        assert row["zero_time/optimizer_ms"] > 0


class Counted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.backwards = 0

    def on_after_backward(self) -> None:
        self.backwards += 1

    def training_step(self, batch: Any, i: int) -> Tensor:
        time.sleep(0.02)
        return super().training_step(batch, i)

    def validation_step(self, batch: Any, i: int) -> None:
        time.sleep(0.5)


def test_accumulation_counts_whole_steps_and_validation_none(tmp_path: Path) -> None:
    quiet()
    trainer = trainer_of(
        1, max_epochs=1, logger=logger_of(tmp_path, 0), log_every_n_steps=1, accumulate_grad_batches=2,
        val_check_interval=2, num_sanity_val_steps=0, limit_val_batches=2, callbacks=[Monitor()],
    )  # fmt: skip
    trainer.fit(Counted(), batches(), batches())
    rows = rows_of(tmp_path)
    assert len(rows) == 4
    for row in rows:
        check_sums(row)
        assert row["zero_time/forward_ms"] >= 40
        assert row["zero_time/data_ms"] < 500
    assert min(row["zero_time/step_ms"] for row in rows) < 1000  # two batches of validation take as long


class Pulls(Net):
    """Takes its batches itself."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:  # type: ignore[override]
        batch, i, _ = next(dataloader_iter)
        return super().training_step(batch, i)


def test_batches_that_the_step_fetches_are_data(tmp_path: Path) -> None:
    quiet()
    loader = DataLoader(SlowData(), batch_size=2)
    fit(1, Pulls(), loader, max_epochs=1, logger=logger_of(tmp_path, 0), log_every_n_steps=2, callbacks=[Monitor()])
    rows = rows_of(tmp_path)
    assert len(rows) == 6
    for row in rows:
        check_sums(row)
        assert row["zero_time/data_ms"] >= 1e3 * SLOW["data"]
    assert min(row["zero_time/forward_ms"] for row in rows) < 1e3 * SLOW["data"]


class Told(logging.Handler):
    """What is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


@pytest.mark.parametrize("summary", [True, False])
def test_the_table_at_the_end(summary: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet()
    told = Told()
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    # Whatever another test of this process has left.
    monkeypatch.setattr(log, "disabled", False)
    monkeypatch.setattr(logging.root.manager, "disable", logging.NOTSET)
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)
    level = log.level
    log.addHandler(told)
    log.setLevel(logging.INFO)
    monitor = Monitor()
    try:
        fit(1, Net(), callbacks=[monitor], enable_model_summary=summary, default_root_dir=tmp_path)
    finally:
        log.removeHandler(told)
        log.setLevel(level)
    assert ("Monitor: 16 steps on rank 0" in told.text) == summary
    assert ("backward" in told.text) == summary
    pickle.dumps(monitor)  # as launchers do, before the next fit


class Breaks(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        raise ArithmeticError


def test_nothing_is_noted_after_a_fit_that_failed() -> None:
    quiet()
    with pytest.raises(ArithmeticError):
        fit(1, Breaks(), callbacks=[Monitor()])
    assert SpanRecorder.active is None
    with spans.phase("forward"):
        pass


def test_refusals() -> None:
    quiet()
    with pytest.raises(ConfigError, match=r"Got trace_step=0, but .* at least 1"):
        Monitor(trace_step=0)
    with pytest.raises(PlanError, match=r"2 Monitors"):
        fit(1, Net(), callbacks=[Monitor(), Monitor()])


# --- divided models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 1, "parallel.tensor.size": 2},
        {"stage": 1, "parallel.context": 2},
        {"stage": 1, "parallel.pipeline.size": 2, "parallel.pipeline.micro_batches": 4},
    ],
    ids=["tensor", "context", "pipeline"],
)
@on_ranks(2)
def test_divided_models(rank: int, world_size: int, options: dict[str, Any], tmp_path: Path) -> None:
    trainer = trainer_of(
        ZeROStrategy(**nested(options)), max_epochs=1, logger=logger_of(tmp_path, rank), log_every_n_steps=2,
        callbacks=[Monitor(trace_step=3)],
    )  # fmt: skip
    trainer.fit(GPTModule(Run(options, steps=6)))
    if rank:
        return
    rows = rows_of(tmp_path)
    assert len(rows) == 3
    for row in rows:
        check_sums(row)
        assert row["zero_time/communication_exposed_ms"] > 0
        assert row["zero_traffic/communication_mib_per_step"] > 0
        assert row["zero_time/backward_ms"] > 0
    events = json.loads((tmp_path / "0" / "trace_step3.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1}
    assert {e["name"] for e in events if e.get("cat") == "phase"} >= {"forward", "backward", "optimizer"}
