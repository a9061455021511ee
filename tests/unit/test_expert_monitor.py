"""`ExpertMonitor`: its numbers against those of every rank, its picture, and that it leaves training alone."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy import ConfigError
from ls_strategy.extras.callbacks.expert_monitor import ExpertMonitor, LayerLoad, draw, scalars
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.moe.layer import MoE
from ls_strategy.moe.losses import moe_losses
from ls_strategy.testing import spawn

WIDTH, EXPERTS, EVERY = 8, (4, 6), 2


class Net(pl.LightningModule):
    """Two MoE layers of different sizes; keeps what it knows of its own routing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            MoE(WIDTH, lambda: nn.Linear(WIDTH, WIDTH), n, capacity_factor=0.5, min_capacity=1) for n in EXPERTS
        )
        self.losses: list[Tensor] = []
        self.interval: list[list[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x

    def training_step(self, batch: list[Tensor], i: int) -> Tensor:
        loss = (self(batch[0]) - 1).square().mean() + moe_losses(self)
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: list[Tensor], i: int) -> None:
        self(batch[0])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """What every layer has counted since the last reset, on this rank."""
        layers: Any = self.layers
        self.interval.append([layer.statistics().kept.clone() for layer in layers if isinstance(layer, MoE)])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Dense(Net):
    """No experts at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])


class Absent(Net):
    """The second layer is on another rank of a pipeline: without memory, and never called here."""

    def on_train_start(self) -> None:
        self.layers[1].to("meta")

    def on_train_end(self) -> None:
        self.layers[1].to_empty(device="cpu")  # the Trainer moves the module once more

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers[0](x)


def loader() -> DataLoader:
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(x), batch_size=8)


def fit(module: Net, folder: Path, *, callbacks: list[pl.Callback], **options: Any) -> pl.Trainer:
    common: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1, "max_steps": 4, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 1,
        "logger": CSVLogger(folder, name="", version="0"),
    }  # fmt: skip
    torch.manual_seed(1)
    trainer = pl.Trainer(**common | options, callbacks=callbacks)
    trainer.fit(module, loader(), loader())
    return trainer


def rows(folder: Path) -> list[dict[str, float]]:
    with (folder / "0" / "metrics.csv").open() as file:
        return [
            {k: float(v) for k, v in row.items() if v}
            for row in csv.DictReader(file)
            if row.get("zero_experts/entropy")
        ]


def kept_by_hand(modules: list[Net], interval: int) -> list[float]:
    """Part of all pairs that were dropped, by layer, of the counts of every rank."""
    per_step = 8  # tokens a rank routes
    result = []
    for layer in range(len(EXPERTS)):
        kept = sum(int(m.interval[EVERY * (interval + 1) - 1][layer].sum()) for m in modules)
        result.append(1 - kept / (len(modules) * EVERY * per_step))
    return result


def test_logs_what_the_layers_counted(tmp_path: Path) -> None:
    module = Net()
    fit(module, tmp_path, callbacks=[ExpertMonitor(EVERY)])
    logged = rows(tmp_path)
    assert [row["step"] for row in logged] == [2, 4]
    for interval, row in enumerate(logged):
        first, second = kept_by_hand([module], interval)
        assert row["zero_expert_dropped/layers.0"] == pytest.approx(first)
        assert row["zero_expert_dropped/layers.1"] == pytest.approx(second)
        assert row["zero_experts/dropped"] == pytest.approx((first + second) / 2)
        assert row["zero_experts/dropped"] > 0
        assert row["zero_experts/largest_load"] == max(row[f"zero_expert_largest_load/layers.{i}"] for i in (0, 1))
        assert 0 < row["zero_expert_entropy/layers.0"] <= math.log(EXPERTS[0])
        assert "zero_experts/sent_mib_per_step" not in row


def test_training_is_the_same_without_it(tmp_path: Path) -> None:
    watched, plain = Net(), Net()
    fit(watched, tmp_path / "a", callbacks=[ExpertMonitor(1, picture_every_n_steps=1)])
    fit(plain, tmp_path / "b", callbacks=[])
    assert torch.equal(torch.stack(watched.losses), torch.stack(plain.losses))
    for mine, theirs in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_every_n_steps_is_the_trainers_by_default_and_a_model_without_experts_logs_nothing(tmp_path: Path) -> None:
    fit(Net(), tmp_path / "a", callbacks=[ExpertMonitor()], log_every_n_steps=4)
    assert [row["step"] for row in rows(tmp_path / "a")] == [4]
    trainer = fit(Dense(), tmp_path / "b", callbacks=[ExpertMonitor(1)])
    assert trainer.global_step == 4
    assert not (tmp_path / "b" / "0" / "metrics.csv").exists()


def test_accumulated_batches_are_one_step(tmp_path: Path) -> None:
    module = Net()
    fit(module, tmp_path, callbacks=[ExpertMonitor(1)], max_steps=2, accumulate_grad_batches=4)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]
    kept = module.interval[0][0]
    assert rows(tmp_path)[0]["zero_expert_dropped/layers.0"] == pytest.approx(1 - int(kept.sum()) / 32)


def test_a_layer_that_another_rank_holds_adds_nothing(tmp_path: Path) -> None:
    fit(Absent(), tmp_path, callbacks=[ExpertMonitor(EVERY)])
    for row in rows(tmp_path):
        assert not {"zero_expert_largest_load/layers.1", "zero_expert_entropy/layers.1"} & row.keys()
        assert row["zero_expert_unused/layers.1"] == 1.0
        assert row["zero_expert_largest_load/layers.0"] >= 1.0
        assert row["zero_experts/dropped"] == row["zero_expert_dropped/layers.0"]


@pytest.mark.parametrize("options", [{"every_n_steps": 0}, {"picture_every_n_steps": 0}])
def test_a_number_below_one_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        ExpertMonitor(**options)


# --- several ranks --------------------------------------------------------------------------------------------------


def run_on_ranks(rank: int, world_size: int, folder: Path, names: list[str]) -> dict[str, list[list[Tensor]]]:
    """What each rank's layers counted, by strategy."""
    result = {}
    for name in names:
        strategy: Any = name if name == "ddp" else ZeROStrategy(2, parallel={"expert": int(name[-1])})
        module = Net()
        fit(module, folder / name, callbacks=[ExpertMonitor(EVERY)], devices=world_size, strategy=strategy)
        result[name] = module.interval
    return result


@pytest.mark.dist
def test_sums_over_all_ranks_under_ddp_and_expert_parallelism(tmp_path: Path) -> None:
    names = ["ddp", "ep1", "ep2"]
    ranks = spawn(run_on_ranks, 2, tmp_path, names, init_process_group=False, timeout_s=90)
    for name in names:
        modules = [Net() for _ in ranks]
        for module, counted in zip(modules, ranks, strict=True):
            module.interval = counted[name]
        logged = rows(tmp_path / name)
        assert [row["step"] for row in logged] == [2, 4]
        for interval, row in enumerate(logged):
            first, second = kept_by_hand(modules, interval)
            assert row["zero_expert_dropped/layers.0"] == pytest.approx(first)
            assert row["zero_expert_dropped/layers.1"] == pytest.approx(second)
            assert ("zero_experts/sent_mib_per_step" in row) == (name == "ep2")
            assert row.get("zero_experts/sent_mib_per_step", 1) > 0
            assert ("zero_experts/wait_ms_per_step" in row) == (name == "ep2")
            assert row.get("zero_experts/wait_ms_per_step", 1) > 0
    # The same tokens and weights at first, however states and experts are divided.
    loads = [rows(tmp_path / name)[0]["zero_experts/largest_load"] for name in ("ep1", "ddp")]
    assert loads[0] == loads[1]


# --- numbers and pictures -------------------------------------------------------------------------------------------


def load(*routed: int, kept: tuple[int, ...] | None = None) -> LayerLoad:
    values = torch.tensor(routed, dtype=torch.double)
    return LayerLoad(values, values if kept is None else torch.tensor(kept, dtype=torch.double), 1.0, 2.0, 3.0)


def test_numbers_by_hand() -> None:
    found = scalars({"a": load(6, 2, 0, 0, kept=(3, 2, 0, 0)), "b": load(1, 1)})
    expected = {
        "zero_expert_largest_load/a": 3.0, "zero_expert_largest_load/b": 1.0, "zero_experts/largest_load": 3.0,
        "zero_expert_unused/a": 0.5, "zero_experts/unused": pytest.approx(2 / 6),
        "zero_expert_dropped/a": pytest.approx(3 / 8), "zero_experts/dropped": pytest.approx(3 / 10),
        "zero_experts/entropy": 1.0, "zero_experts/balance_loss": 2.0, "zero_experts/z_loss": 3.0,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    nothing = scalars({"a": load(0, 0)})
    assert nothing["zero_experts/largest_load"] == nothing["zero_experts/dropped"] == 0.0
    assert nothing["zero_experts/unused"] == 1.0


def test_the_picture_shows_layers_by_lines_and_experts_by_cells() -> None:
    pytest.importorskip("matplotlib")
    image = draw({"a": torch.tensor([0.0, 1.0, 1.0, 2.0]), "b": torch.tensor([5.0, 5.0])})
    assert image.dtype == torch.uint8
    black = (image == 40).all(0)
    lines = (black.sum(1) == black.sum(1).max()).nonzero().flatten()  # of the first layer, by its unused expert
    line, height = lines[len(lines) // 2].item(), len(lines) / 0.84
    left, right = black[line].nonzero().flatten()[[0, -1]].tolist()
    wide = right - left + 2  # and a line between cells

    def colour(layer: int, place: float) -> list[int]:
        return image[:, line + round(height * layer), left + int(place * wide)].tolist()

    even, busy = colour(0, 1.5), colour(0, 3.5)
    assert min(even) > 230  # white
    assert busy[0] > 200 > busy[1]  # red
    assert colour(1, 0.9) == colour(1, 3.1) == even  # half as many experts, cells twice as wide


def test_many_experts_still_fit() -> None:
    pytest.importorskip("matplotlib")
    assert draw({"a": torch.arange(1.0, 513.0)})[:, 40].float().std() > 10


def test_tensorboard_gets_histograms_and_pictures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("matplotlib")
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    module = Net()
    monitor = ExpertMonitor(1, picture_every_n_steps=2)
    fit(module, tmp_path, callbacks=[monitor], logger=TensorBoardLogger(tmp_path, name="", version="0"))
    events = EventAccumulator(str(tmp_path / "0"), size_guidance={"histograms": 0, "images": 0}).Reload()
    assert [e.step for e in events.Images("zero_experts/load")] == [1, 3]
    assert [e.step for e in events.Scalars("zero_experts/entropy")] == [1, 2, 3, 4]
    for layer, experts in enumerate(EXPERTS):
        histogram = events.Histograms(f"zero_expert_tokens/layers.{layer}")[0].histogram_value
        assert histogram.bucket_limit == [i + 0.5 for i in range(experts)]
        assert sum(histogram.bucket) == histogram.num == 8
