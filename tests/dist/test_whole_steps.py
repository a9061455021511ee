"""A step in whole tensors with precisions, skipped steps, clipping, accumulation and schedules; its bytes and FLOPs.

Stage 0, where every rank steps every tensor by the optimizer's own ``step``, is the trusted run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

import ls_strategy
from ls_strategy.config import nested
from ls_strategy.lightning.precision import ZeROPrecision
from ls_strategy.lightning.strategy import ZeROStrategy
from tests.dist.ranks import Net, assert_equal, fit, global_batches, on_ranks, quiet, weights
from tests.dist.whole_optimizers import Lamb, matrices, vectors

STEPS = 6


class Scheduled(Net):
    """LAMB, as the library and as users have it, by turns; tied weights, one of them in no forward of its own."""

    make: Any = ls_strategy.Lamb

    def build(self) -> None:
        super().build()
        self.last.weight = self.first.weight

    def configure_optimizers(self) -> Any:
        optimizer = self.make([{"params": matrices(self), "weight_decay": 0.1}, {"params": vectors(self), "lr": 0.02}])
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]

    def training_step(self, batch: Any, i: int) -> Any:
        overflows = (self.trainer.strategy.loss_scale or 1) > 1 and i == 1 and self.global_rank == 1
        return self.noted_loss(batch) * (float("inf") if overflows else 1.0)

    def on_train_end(self) -> None:
        self.seen.append(self.trainer.strategy.skipped_steps)


class Unknown(Scheduled):
    make = Lamb


CASES: dict[str, dict[str, Any]] = {
    "fp32": {"gradient_clip_val": 0.05},
    "by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "bf16-mixed": {"precision": "bf16-mixed", "gradient_clip_val": 0.05},
    "bf16-true": {"precision": "bf16-true"},
    "16-mixed": {"gradient_clip_val": 0.05, "plugins": lambda: ZeROPrecision("16-mixed")},  # as on a GPU
    "accumulated": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
}


def trained(
    rank: int, world_size: int, net: type[Net], options: dict[str, Any], case: dict[str, Any], steps: int = STEPS
) -> Any:
    """Weights, and how many steps an overflow has skipped."""
    module = net()
    options = {"sharding.min_unit_numel": 0, **options}
    fit(
        ZeROStrategy(**nested(options)), module, global_batches(rank, world_size, 2 * steps),
        use_distributed_sampler=False, max_epochs=1, **{k: v() if callable(v) else v for k, v in case.items()},
    )  # fmt: skip
    return weights(module), module.seen[0]


class WithMuon(Scheduled):
    """Matrices by Muon, others by its AdamW, in one optimizer."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": matrices(self)}, {"params": vectors(self), "use_muon": False, "lr": 0.02}]
        optimizer = ls_strategy.Muon(groups, lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]

    def on_train_end(self) -> None:
        super().on_train_end()
        sharded = self.trainer.strategy.require_engine().optimizers[0].sharded
        self.seen += [{len(m.shape) for m in sharded.owner.members}, sharded.state_bytes()]


@pytest.mark.wide
@pytest.mark.parametrize("name", ["fp32", *(pytest.param(n, marks=pytest.mark.slow) for n in CASES if n != "fp32")])
@on_ranks(2, timeout_s=150)
def test_adamw_groups_of_muon_stay_in_shards_on_every_tier(
    rank: int, world_size: int, name: str, tmp_path: Path
) -> None:
    """Equal bits at every stage and on every tier. On NVMe nothing is in memory; elsewhere as much as is needed."""
    case = CASES[name]
    drive = {"offload.optimizer": "nvme", "offload.nvme_path": str(tmp_path)}
    delayed = {"offload.optimizer": "cpu", "offload.delay_after": 1}
    by_micro_batch = "accumulate_grad_batches" in case
    trusted = {
        s: trained(rank, world_size, WithMuon, {"stage": s}, case)[0] for s in ((0, 2) if by_micro_batch else (0,))
    }
    tiers = [{"stage": 1}, {"stage": 2, **drive}, {"stage": 3, **drive}, {"stage": 3, "offload.optimizer": "cpu"}]
    for options in (*tiers, {"stage": 1, **delayed}):
        expected = trusted[2 if by_micro_batch and options["stage"] > 1 else 0]
        module = WithMuon()
        fit(
            ZeROStrategy(**nested({"sharding.min_unit_numel": 0, **options})), module,
            global_batches(rank, world_size, 2 * STEPS), use_distributed_sampler=False, max_epochs=1,
            **{k: v() if callable(v) else v for k, v in case.items()},
        )  # fmt: skip
        assert_equal(weights(module), expected, f"{options}")
        shapes, nbytes = module.seen[1:]
        assert shapes == {2}
        owned = sum(p.numel() for p in matrices(module)) * 4 + sum(p.numel() for p in vectors(module)) * 8
        if drive.items() <= options.items():
            assert nbytes == 0
        else:
            assert 0 < total(nbytes) <= owned * 1.4  # padding, and step counts


@on_ranks(2)
def test_steps_are_those_of_stage_0(rank: int, world_size: int, tmp_path: Path) -> None:
    """Every stage and tier with one of the optimizers; `test_a_step_is_that_of_stage_0` has the other cases."""
    drive = {"offload.optimizer": "nvme", "offload.nvme_path": str(tmp_path)}
    tiers = {Scheduled: ({"stage": 2, **drive}, {"stage": 3}), Unknown: ({"stage": 1, "offload.optimizer": "cpu"},)}
    for net, layouts in tiers.items():
        expected = trained(rank, world_size, net, {"stage": 0}, CASES["bf16-mixed"], 3)[0]
        for options in layouts:
            found = trained(rank, world_size, net, options, CASES["bf16-mixed"], 3)[0]
            assert_equal(found, expected, f"{net.__name__}, {options}")


@pytest.mark.wide
@pytest.mark.parametrize("name", [*list(CASES)[2:3], *(pytest.param(n, marks=pytest.mark.slow) for n in CASES)])
@on_ranks(2, timeout_s=150)
def test_a_step_is_that_of_stage_0(rank: int, world_size: int, name: str, tmp_path: Path) -> None:
    case = CASES[name]
    drive = {"offload.optimizer": "nvme", "offload.nvme_path": str(tmp_path)}
    for net in (Scheduled, Unknown):
        # With accumulation, stages 2 and 3 sum over ranks first.
        by_micro_batch = "accumulate_grad_batches" in case
        trusted = {s: trained(rank, world_size, net, {"stage": s}, case) for s in ((0, 2) if by_micro_batch else (0,))}
        assert (trusted[0][1] > 0) == (name == "16-mixed"), trusted[0][1]
        for options in ({"stage": 1}, {"stage": 2, **drive}, {"stage": 3, "offload.optimizer": "cpu"}, {"stage": 3}):
            expected = trusted[2 if by_micro_batch and options["stage"] > 1 else 0]
            assert_equal(trained(rank, world_size, net, options, case)[0], expected[0], f"{net.__name__}, {options}")


class Counted(Net):
    """Muon: FLOPs and sent bytes of every step."""

    manual = True
    flops: list[int]
    sent: list[int]

    def configure_optimizers(self) -> Any:
        groups = [{"params": matrices(self)}, {"params": vectors(self), "use_muon": False}]
        self.flops, self.sent = [], []
        return ls_strategy.Muon(groups, lr=0.01)

    def training_step(self, batch: Any, i: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.noted_loss(batch))
        strategy: Any = self.trainer.strategy
        before = self.nbytes(strategy)
        with FlopCounterMode(display=False) as counter:
            optimizer.step()
        self.flops.append(counter.get_total_flops())
        self.sent.append(self.nbytes(strategy) - before)

    @staticmethod
    def nbytes(strategy: Any) -> int:
        return strategy.traffic.bytes["all_to_all"] if hasattr(strategy, "traffic") else 0


def total(number: int) -> int:
    value = torch.tensor(number)
    dist.all_reduce(value)
    return int(value)


@on_ranks(2)
def test_every_tensor_is_stepped_once_and_what_is_sent_is_the_formula(rank: int, world_size: int) -> None:
    quiet()
    alone = Counted()
    optimizer = alone.configure_optimizers()
    alone.loss(next(iter(global_batches(rank, world_size, 1)))).backward()
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    for stage in (1, 3):
        module = Counted()
        trainer = fit(stage, module, global_batches(rank, world_size, 3), use_distributed_sampler=False, max_epochs=1)
        assert [total(n) for n in module.flops] == [counter.get_total_flops()] * 3
        assert min(module.flops) > 0
        sharded = trainer.strategy.require_engine().optimizers[0].sharded
        away = 0
        for member in sharded.owner.members:
            slot = member.flat.layout.slots[member.index]
            start, stop = member.flat.layout.shard_range(member.owner)
            assert len(slot.shape) == 2
            away += slot.numel - max(min(slot.end, stop) - max(slot.offset, start), 0)
        # The direction to the owner and the update back, in bf16; states are exchanged in no step.
        assert [total(n) for n in module.sent] == [2 * 2 * away] * 3
        assert away > 0
        assert f"by one of 2 ranks, {2 * 2 * away:,} bytes sent" in sharded.describe()


class WholeCounted(Counted):
    """An optimizer that the engine knows nothing of."""

    def configure_optimizers(self) -> Any:
        self.flops, self.sent = [], []
        return Lamb(matrices(self))


class Fp32Counted(Counted):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        for group in optimizer.param_groups:
            group["ns_dtype"] = "fp32"
        return optimizer


@on_ranks(2)
def test_bytes_of_other_optimizers_are_the_formula(rank: int, world_size: int) -> None:
    """Master weights in fp32: 12 bytes per element for a step that is not split, 8 for an iteration in fp32."""
    quiet()
    for kind, nbytes in ((WholeCounted, 3 * 4), (Fp32Counted, 2 * 4)):
        module = kind()
        data = global_batches(rank, world_size, 3)
        trainer = fit(2, module, data, use_distributed_sampler=False, max_epochs=1)
        owner = trainer.strategy.require_engine().optimizers[0].sharded.owner
        away = sum(m.gathered_numel for m in owner.members)
        assert [total(n) for n in module.sent] == [nbytes * away] * 3
        assert owner.bytes_sent == nbytes * away > 0
