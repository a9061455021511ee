"""What Lightning does per rank is done per replica of the model: data, seeds, logged values, metrics."""

from __future__ import annotations

import random
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchmetrics import SumMetric

from ls_strategy.config import nested
from ls_strategy.errors import ConfigError, PlanError, StateError
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist.parallel_runs import Run, plain, train, train_all
from tests.dist.ranks import on_ranks, trainer_of
from tests.dist.trusted import once
from tests.marks import slow

pytestmark = [pytest.mark.wide, pytest.mark.dist]

WIDTH = 8


class MLP(pl.LightningModule):
    """Two layers that are divided, a norm that is not, dropout in both places; and everything that is counted."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.inner = nn.Dropout(dropout)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.outer = nn.Dropout(dropout)
        self.samples = SumMetric()
        self.losses: list[float] = []
        self.seen: list[float] = []

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"up": "column", "down": "row"}

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(functional.gelu(self.up(self.norm(x))))
        return x + self.outer(self.down(hidden))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = functional.mse_loss(self(x), y)
        self.losses.append(loss.item())
        self.seen.append(x.sum().item())
        self.log("replicas", 1.0, on_step=True, on_epoch=False, sync_dist=True, reduce_fx="sum")
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.samples.update(float(len(batch[0])))
        self.log("samples", self.samples)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4, fused=True)


def data(numel: int = 32, batch_size: int = 4) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(numel, WIDTH, generator=generator)
    return DataLoader(TensorDataset(x, x.roll(1, 1)), batch_size=batch_size)


def tensor_parallel(stage: Any = 1, size: Any = 2, **options: Any) -> ZeROStrategy:
    return ZeROStrategy(stage, **nested({"sharding.min_unit_numel": 0, "parallel.tensor.size": size, **options}))  # type: ignore[arg-type]


def over_replica(trainer: pl.Trainer, value: Any) -> list[Any]:
    """Every rank's value, of this rank's replica."""
    return trainer.strategy.parallel.mesh.model.exchange_objects(value)  # type: ignore[attr-defined]


@on_ranks(4)
def test_a_replica_shares_batches_and_counts_once(rank, world_size):
    module, trainer = MLP(), trainer_of(tensor_parallel(), max_epochs=1)
    trainer.fit(module, data(), data())
    strategy = trainer.strategy
    assert (strategy.data_parallel_size, strategy.data_parallel_rank) == (2, rank // 2)
    assert trainer.distributed_sampler_kwargs == {"num_replicas": 2, "rank": rank // 2}
    assert len(module.losses) == 32 // 4 // 2
    assert len({tuple(seen) for seen in over_replica(trainer, module.seen)}) == 1
    everyones = strategy.parallel.mesh.world.exchange_objects(module.seen)
    assert everyones[0] != everyones[2]  # another replica, other data
    assert trainer.callback_metrics["replicas"] == 2
    assert trainer.callback_metrics["samples"] == 32
    mean = sum(sum(m) / len(m) for m in strategy.parallel.mesh.data.exchange_objects(module.losses)) / 2
    assert trainer.callback_metrics["loss"].item() == pytest.approx(mean, rel=1e-6)
    assert strategy.reduce_boolean_decision(rank == 3, all=False)
    assert not strategy.reduce_boolean_decision(rank != 3, all=True)


@on_ranks(2)
def test_a_lone_replica_counts_once(rank, world_size):
    module, trainer = MLP(), trainer_of(tensor_parallel(), max_epochs=1)
    trainer.fit(module, data(), data())
    assert trainer.callback_metrics["replicas"] == 1
    assert trainer.callback_metrics["samples"] == 32


class PerRank(IterableDataset):
    """What a user writes for data parallelism alone."""

    def __init__(self, rank: int) -> None:
        self.generator = torch.Generator().manual_seed(rank)

    def __iter__(self) -> Any:
        for _ in range(8):
            x = torch.randn(WIDTH, generator=self.generator)
            yield x, x


@on_ranks(4)
def test_batches_that_differ_inside_a_replica_are_named(rank, world_size):
    trainer = trainer_of(tensor_parallel(), max_epochs=1)
    first = rank // 2 * 2
    with pytest.raises(StateError, match=rf"ranks {first} and {first + 1} .*batch\[0\] differs in batch 1 "):
        trainer.fit(MLP(), DataLoader(PerRank(rank), batch_size=2))


class Augmented(Dataset):
    """Draws from the worker's generators."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        x = torch.full((WIDTH,), float(index)) + random.random() + torch.rand(())
        return x, x


@on_ranks(4, timeout_s=90)
@pytest.mark.slow
def test_workers_of_a_replica_draw_alike(rank, world_size):
    module, trainer = MLP(), trainer_of(tensor_parallel(), max_epochs=1)
    trainer.fit(module, DataLoader(Augmented(), batch_size=2, num_workers=1))
    assert len({tuple(seen) for seen in over_replica(trainer, module.seen)}) == 1


@on_ranks(4)
def test_dropout_is_the_same_where_values_are_and_differs_where_they_do(rank, world_size):
    """Seeds that differ over ranks when the fit starts do not count."""
    module, trainer = MLP(dropout=0.3), trainer_of(tensor_parallel(), max_epochs=1)
    masks: dict[str, list[Tensor]] = {"inner": [], "outer": []}
    for name, kept in masks.items():
        layer = getattr(module, name)
        layer.register_forward_hook(lambda _m, _i, out, kept=kept: kept.append((out == 0).cpu()))
    torch.manual_seed(100 + rank)
    trainer.fit(module, data())
    outer = over_replica(trainer, masks["outer"])
    inner = over_replica(trainer, masks["inner"])
    assert all(torch.equal(a, b) for a, b in zip(*outer, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(*inner, strict=True))
    replicated = over_replica(trainer, [module.norm.weight.detach().clone(), module.down.bias.detach().clone()])
    assert all(torch.equal(a, b) for a, b in zip(*replicated, strict=True))


def test_a_resumed_run_draws_what_the_whole_one_drew(tmp_path):
    """With dropout on, bit for bit."""
    path = str(tmp_path / "half.ckpt")
    options = {"stage": 2, "parallel.tensor.size": 2}
    whole = Run(options, {"dropout": 0.2}, steps=8, save=(4, path))
    rest = Run(options, {"dropout": 0.2}, steps=8, resume=path)
    first, second = spawn(train_all, 4, [whole, rest], init_process_group=False)[0]
    assert second.losses == first.losses[4:]
    assert all(torch.equal(v, second.weights[k]) for k, v in first.weights.items())


@on_ranks(2)
def test_fit_validate_test_and_predict_one_after_the_other(rank, world_size):
    module, trainer = MLP(), trainer_of(tensor_parallel(3), max_epochs=1)
    module.test_step = module.validation_step
    trainer.fit(module, data())
    trainer.validate(module, data(), verbose=False)
    trainer.test(module, data(), verbose=False)
    whole = {k: v.clone() for k, v in module.state_dict().items()}
    assert whole["up.weight"].shape == (4 * WIDTH, WIDTH)
    plain = MLP().eval()
    plain.load_state_dict(whole)
    with torch.no_grad():
        expected = [plain(x) for x, _ in data()]
    for a, b in zip(expected, trainer.predict(module, data()), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
    trainer = trainer_of(tensor_parallel(1), max_epochs=1)
    trainer.fit(module, data())
    with pytest.raises(PlanError, match="was partitioned by an earlier run"):
        trainer_of(ZeROStrategy(1), max_epochs=1).fit(module, data())


class OwnPlan(MLP):
    """Divides itself, as for Lightning's ModelParallelStrategy."""

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            mesh = self.device_mesh["tensor_parallel"]
            parallelize_module(self, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


class Pair(nn.Module):
    """A block."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(OwnPlan):
    """Blocks that are units, and layers that are units by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in "ab")
        self.layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return super().forward(self.layers(x))

    def tensor_parallel_plan(self) -> dict[str, str]:
        pairs = {"blocks.*.up": "column", "blocks.*.down": "row", "layers.0": "column", "layers.1": "row"}
        return {**super().tensor_parallel_plan(), **pairs}

    def configure_model(self) -> None:
        super().configure_model()
        if self.device_mesh is not None:
            kinds = {"column": ColwiseParallel, "row": RowwiseParallel}
            plan = {k: kinds[v]() for k, v in self.tensor_parallel_plan().items() if k not in ("up", "down")}
            parallelize_module(self, self.device_mesh["tensor_parallel"], plan)


class OneStack(Stack):
    """Divided by its plan."""

    configure_model = pl.LightningModule.configure_model


def train_mlp(rank: int, world_size: int, kind: type[MLP], strategy: Any) -> tuple[list[float], dict[str, Tensor]]:
    module = kind()
    strategy = ZeROStrategy(**nested(strategy)) if isinstance(strategy, dict) else strategy
    trainer = trainer_of(strategy, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module, data())
    return module.losses, {k: v.clone() for k, v in trainer.strategy.lightning_module_state_dict().items()}


@pytest.mark.parametrize(("world", "stage"), [slow(2, 1), slow(4, 2), (4, 3)])
@pytest.mark.parametrize("kinds", [(OwnPlan, MLP), (Stack, OneStack)], ids=["layers", "blocks"])
def test_a_module_that_divides_itself(world, stage, kinds):
    """By ``parallelize_module`` in ``configure_model``, or by its own plan: all replicas see the same data here."""
    losses, weights = once(train_mlp, 1, kinds[1], "auto")[0]
    options = {"stage": stage, "sharding.min_unit_numel": 0, "parallel.tensor.size": 2}
    for kind in kinds:
        ours, state = spawn(train_mlp, world, kind, options, init_process_group=False)[0]
        assert ours == pytest.approx(losses, rel=1e-6), kind
        for key, value in weights.items():
            torch.testing.assert_close(state[key], value, rtol=2e-6, atol=2e-6)


@on_ranks(2)
def test_a_plan_by_names(rank, world_size):
    plan = {"norm": "replicate", "up": "column", "down": "row"}
    module, trainer = MLP(), trainer_of(tensor_parallel(**{"parallel.tensor.plan": plan}), max_epochs=1)
    trainer.fit(module, data())
    assert module.up.weight.shape == (2 * WIDTH, WIDTH)
    assert module.down.weight.shape == (WIDTH, 2 * WIDTH)
    with pytest.raises(PlanError, match="upp"):
        trainer_of(tensor_parallel(**{"parallel.tensor.plan": {"upp": "column"}}), max_epochs=1).fit(MLP(), data())


@on_ranks(2)
def test_refusals(rank, world_size):
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (PlanError, "does not divide the 2 ranks", {"parallel.tensor.size": 3}),
        (PlanError, "requires repeated blocks", {"parallel.tensor.size": 2, "parallel.tensor.sequence_parallel": True}),
        (PlanError, "one stack of blocks", {"parallel.context": 2}),
        (ConfigError, "there is one", {"activations.checkpointing": "full", "activations.partitioning": True}),
    ]
    for error, words, options in cases:
        with pytest.raises(error, match=words):
            trainer_of(ZeROStrategy(1, **nested(options)), max_epochs=1).fit(MLP(), data())
    for words, options in {
        "activations.checkpointing": {"activations.partitioning": True},
        "but TensorConfig needs size": {"parallel.tensor.sequence_parallel": True},
        "but both need 2 ranks": {"parallel.tensor.size": 1, "parallel.tensor.sequence_parallel": True},
        "Got parallel.context=0": {"parallel.context": 0},
    }.items():
        with pytest.raises(ConfigError, match=words):
            ZeROStrategy(1, **nested(options))
    assert dist.is_initialized()


def test_16_bit_is_as_good_as_data_parallel():
    """Error against fp32 at most twice that of the same precision without divided layers."""
    fp32 = plain(Run())
    errors: dict[str, float] = {}
    for name, options in {"dp": {"stage": 2}, "tp": {"stage": 2, "parallel.tensor.size": 2}}.items():
        run = Run(options, trainer={"precision": "bf16-true"})
        found = spawn(train, 2, run, init_process_group=False)[0]
        errors[name] = max(abs(a - b) for a, b in zip(fp32.losses, found.losses, strict=True))
    assert errors["tp"] <= 2 * errors["dp"]
