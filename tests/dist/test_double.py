"""Models in fp64, under ``precision="64-true"`` and by hand: as under DDP, far closer than fp32 can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from ls_strategy.config import nested
from ls_strategy.distributed.comm import Comm
from ls_strategy.errors import PlanError
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist.ranks import WIDTH, assert_close, fit, global_batches, mean_over_ranks, on_ranks, quiet, weights
from tests.dist.test_habits import OPTIONS, Habit
from tests.marks import slow

pytestmark = pytest.mark.wide

LIMIT = 1e-13
STEPS = 4


class Noisy(Habit):
    """New tensors of the default dtype in the step, and a buffer whose 53 bits count."""

    def build(self) -> None:
        super().build()
        self.register_buffer("scale", torch.full((WIDTH,), 1 / 3, dtype=torch.float64))

    def loss(self, batch: Any) -> Tensor:
        noise = torch.linspace(-1 / 3, 1 / 3, WIDTH)
        self.note(noise.dtype.itemsize)
        self.note(self.scale)
        return super().loss((batch[0] + (noise * self.scale).to(batch[0].dtype), batch[1]))


class ByHand(Noisy):
    """As scripts that set the default dtype, at ``precision="32-true"``."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss([part.double() for part in batch])


class Clips(ByHand):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        self.note(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1))


class Mixes(Noisy):
    """One block in fp64, with its inputs and outputs cast: the rest stays in fp32, as do the buffers of both."""

    def build(self) -> None:
        super().build()
        self.blocks[1].double()
        self.blocks[1].register_forward_pre_hook(lambda _, args: (args[0].double(),))
        self.blocks[1].register_forward_hook(lambda _, __, output: output.float())

    def loss(self, batch: Any) -> Tensor:
        self.note(self.blocks[1].wide.weight.dtype.itemsize)
        self.note(self.blocks[1].wide.weight)
        return super().loss(batch)


CASES: dict[str, tuple[type[Habit], torch.dtype, dict[str, Any], float]] = {
    "64-true": (Noisy, torch.float32, {"precision": "64-true", "gradient_clip_val": 0.1}, LIMIT),
    "accumulated": (
        Noisy,
        torch.float32,
        {"precision": "64-true", "gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
        LIMIT,
    ),
    "by hand": (ByHand, torch.float64, {"gradient_clip_val": 0.1}, LIMIT),
    "clipped by torch": (Clips, torch.float64, {}, LIMIT),
    "clipped by value": (ByHand, torch.float64, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, LIMIT),
    "a part of the model": (Mixes, torch.float32, {"gradient_clip_val": 0.1}, 1e-6),
}


def outcome(rank: int, world_size: int, name: str, strategy: Any) -> tuple[Any, ...]:
    habit, default, options, _ = CASES[name]
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        module = habit()
        data = global_batches(rank, world_size, STEPS)
        fit(strategy, module, data, use_distributed_sampler=False, **options)
    finally:
        torch.set_default_dtype(before)
    return mean_over_ranks(module.losses), mean_over_ranks(module.seen), weights(module)


def problems(rank: int, world_size: int, names: list[str], configurations: list[str]) -> list[str]:
    quiet()
    found = []
    for name in names:
        expected = outcome(rank, world_size, name, "ddp")
        for configuration in configurations:
            try:
                actual = outcome(rank, world_size, name, ZeROStrategy(**nested(CONFIGURATIONS[configuration])))
                for what, ours, theirs in zip(("losses", "seen", "weights"), actual, expected, strict=True):
                    assert_close(ours, theirs, what, CASES[name][3])
                dtypes = [{k: v.dtype for k, v in result[2].items()} for result in (actual, expected)]
                assert dtypes[0] == dtypes[1], dtypes
            except Exception as error:
                found.append(f"{name}, {configuration}: {type(error).__name__}: {str(error)[:300]}")
    return found


CONFIGURATIONS: dict[str, dict[str, Any]] = {"zero0": {"stage": 0}, **OPTIONS}
CHEAP = ("zero0", "zero1", "zero2", "zero3, small units")


@pytest.mark.parametrize("configuration", [name if name in CHEAP else slow(name) for name in CONFIGURATIONS])
def test_in_fp64_as_under_ddp(configuration: str) -> None:
    found = spawn(problems, 2, list(CASES), [configuration], timeout_s=100)
    assert not any(found), "\n".join(found[0])


class Norms(Noisy):
    """Norms by name, beside those of the gradients that user code reads."""

    checked = 0

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy: Any = self.trainer.strategy
        found = strategy.grad_norms()
        for name, p in self.named_parameters():
            if p.grad is not None:
                self.checked += 1
                assert found[name].dtype == torch.float64
                assert_close(found[name], torch.linalg.vector_norm(p.grad), name, LIMIT)


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks(2)
def test_norms_by_name(rank: int, world_size: int, stage: int) -> None:
    module, data = Norms(), global_batches(rank, world_size, STEPS)
    fit(ZeROStrategy(stage, sharding={"min_unit_numel": 0}), module, data, precision="64-true", max_epochs=1)
    assert module.checked > STEPS


@on_ranks(2)
def test_not_on_nvme(rank: int, world_size: int, tmp_path: Path) -> None:
    """Its updates are of fp32."""
    options: Any = {"optimizer": "nvme", "nvme_path": str(tmp_path), "nvme_allow_ram": True}
    strategy = ZeROStrategy(2, sharding={"min_unit_numel": 0}, offload=options)
    with pytest.raises(PlanError, match=r"(?s)fp32 master weights.*offload to 'cpu'"):
        outcome(rank, world_size, "64-true", strategy)


@pytest.mark.parametrize("format", ["sharded", "file"])
@on_ranks(2)
def test_a_run_in_fp64_goes_on_with_the_same_bits(rank: int, world_size: int, format: Any, tmp_path: Path) -> None:
    """fp32 anywhere on the way would show."""

    def run(module: Habit, **options: Any) -> None:
        strategy = ZeROStrategy(stage=3, sharding={"min_unit_numel": 0}, checkpoint=format)
        data = global_batches(rank, world_size, STEPS)
        fit(strategy, module, data, precision="64-true", max_epochs=1, use_distributed_sampler=False, **options)

    full, rest = Noisy(), Noisy()
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    run(full, callbacks=[saves], enable_checkpointing=True)
    run(rest, ckpt=tmp_path / "step=2.ckpt")
    assert rest.losses == full.losses[2:], (rest.losses, full.losses)
    expected, found = weights(full), weights(rest)
    assert all(v.dtype == torch.float64 for v in found.values() if v.is_floating_point())
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@on_ranks(2)
def test_transports_that_sum_do_it_in_fp64(rank: int, world_size: int) -> None:
    """NCCL sums what it moves; the ranks of this test sum by themselves."""
    asked: list[tuple[torch.dtype, torch.dtype | None]] = []
    reduce_scatter = Comm.reduce_scatter

    def noted(self: Comm, full: Tensor, dtype: torch.dtype | None = None, *args: Any, **options: Any) -> Any:
        asked.append((full.dtype, dtype))
        return reduce_scatter(self, full, dtype, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Comm, "reduce_scatter", noted)
        outcome(rank, world_size, "a part of the model", ZeROStrategy(2, sharding={"min_unit_numel": 0}))
    assert set(asked) == {(torch.float32, torch.float32), (torch.float64, torch.float64)}
