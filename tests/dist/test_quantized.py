"""Frozen weights in 4 and 8 bits on several ranks: the numbers of rounded weights, a quarter of the bytes.

Trusted runs: the same strategy without quantization, and plain torch on one process, of a model whose frozen matrices
were rounded before.
"""

from __future__ import annotations

import functools
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from ls_strategy.config import nested
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.ops.quantized import rounded
from ls_strategy.planner.traffic import traffic
from ls_strategy.testing import spawn
from ls_strategy.zero.flat.quantized import QuantizedFlat
from tests.dist.ranks import WIDTH, Net, assert_close, assert_equal, fit, global_batches, mean_over_ranks, on_ranks, quiet

HIDDEN, STEPS = 64, 4
OPTIONS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, recomputed": {"stage": 3, "activations.checkpointing": "full"},
    "stage 1, recomputed": {"stage": 1, "activations.checkpointing": "full"},
    "stage 3, host": {"stage": 3, "offload.parameters": "cpu", "offload.optimizer": "cpu"},
}


class Adapted(nn.Module):
    """A residual block of two frozen layers, each with an adapter as LoRA adds it."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.a, self.b = nn.Linear(width, 4, bias=False), nn.Linear(4, hidden, bias=False)
        self.up.requires_grad_(False)
        self.down.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x) + self.b(self.a(x))))


class Lora(Net):
    """Frozen blocks between trained layers."""

    blocks_number = 3
    form: str | None = None
    """Round the frozen matrices of the blocks to this format at the start."""

    def build(self) -> None:
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.blocks = nn.ModuleList([Adapted(HIDDEN, 2 * HIDDEN) for _ in range(self.blocks_number)])
        self.last = nn.Linear(HIDDEN, WIDTH)
        if self.form is not None:
            round_frozen(self.blocks, self.form)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr, eps=1e-4, fused=True)


class Rounded(Lora):
    """Starts with weights that were rounded to nf4."""

    form = "nf4"


def round_frozen(module: nn.Module, form: Any) -> None:
    with torch.no_grad():
        for p in module.parameters():
            if not p.requires_grad and p.dim() == 2:
                p.copy_(rounded(p.reshape(-1), form).view(p.shape))


def strategy_of(options: dict[str, Any], form: str | None) -> ZeROStrategy:
    return ZeROStrategy(**nested({"sharding.min_unit_numel": 0, **options, "precision.frozen": form}))


def run(
    rank: int, world_size: int, options: dict[str, Any], form: str | None, module: Net | None = None, **of_trainer: Any
) -> tuple[list[float], dict[str, Tensor], Any]:
    """Losses averaged over ranks, final weights, and the Trainer."""
    module = Lora() if module is None else module
    data = global_batches(rank, world_size, STEPS)
    trainer = fit(
        strategy_of(options, form), module, data, use_distributed_sampler=False, max_epochs=1, **of_trainer
    )
    final = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return mean_over_ranks(module.losses), final, trainer


def plain(rank: int, world_size: int) -> tuple[list[float], dict[str, Tensor]]:
    """The trusted run: plain torch, one process, rounded weights."""
    quiet()
    module = Rounded()
    fit("auto", module, global_batches(rank, world_size, STEPS), use_distributed_sampler=False, max_epochs=1)
    return module.losses, dict(module.state_dict())


@functools.cache
def trusted() -> Any:
    return spawn(plain, 1, init_process_group=False, timeout_s=60)[0]


def frozen(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in weights.items() if ".up." in name or ".down." in name}


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_training_is_that_of_rounded_weights(world_size: int) -> None:
    """On every stage bit for bit, against plain torch on one process to within rounding, the frozen weights exactly."""
    expected = trusted()
    spawn(all_options, world_size, expected, init_process_group=False, timeout_s=120)


def all_options(rank: int, world_size: int, expected: Any) -> None:
    quiet()
    first: Any = None
    for name, options in OPTIONS.items():
        losses, weights, _ = run(rank, world_size, options, "nf4")
        assert_close(losses, expected[0], f"{name}, losses")
        assert_close(weights, expected[1], f"{name}, weights")
        assert_equal(frozen(weights), frozen(expected[1]), f"{name}, frozen weights")
        first = first or (losses, weights)
        if name != "stage 3, host":  # where a kernel of its own updates the adapters; `tests.unit` has it bit for bit
            assert_equal(losses, first[0], f"{name} against stage 0, losses")
            assert_equal(weights, first[1], f"{name} against stage 0, weights")
    losses, weights, _ = run(rank, world_size, OPTIONS["stage 3"], None, Rounded())
    assert_equal(losses, first[0], "without quantization, losses")
    assert_equal(weights, first[1], "without quantization, weights")


class Sent(pl.Callback):
    """Bytes sent so far, after each step."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        meter = trainer.strategy.traffic.bytes  # type: ignore[attr-defined]
        self.bytes.append(meter["all_gather"] + meter["reduce_scatter"])


@on_ranks(2)
def test_bytes_on_the_wire_and_in_memory(rank: int, world_size: int) -> None:
    for form, ratio in (("nf4", 0.3), ("int4", 0.3), ("int8", 0.52)):
        sent = Sent()
        _, _, trainer = run(rank, world_size, OPTIONS["stage 3"], form, precision="bf16-true", callbacks=[sent])
        engine = trainer.strategy.require_engine()
        quantized = [f for f in engine.flats if isinstance(f, QuantizedFlat)]
        assert len(quantized) == Lora.blocks_number
        numel = sum(f.layout.param_numel for f in quantized)
        assert numel == Lora.blocks_number * 4 * HIDDEN * HIDDEN
        assert sum(f.wire.numel() for f in quantized) <= ratio * 2 * numel
        assert sum(f.master.nbytes for f in quantized) <= ratio * numel  # half of it on each rank
        assert sum(f.full.untyped_storage().nbytes() + f.wire.untyped_storage().nbytes() for f in quantized) == 0
        assert sum(f.plan.gathered_numel for f in quantized) == sum(f.wire.numel() for f in quantized) // 2
        assert engine.memory_bytes()["masters"] == engine.plan.state_bytes()["masters"]
        assert sent.bytes[3] - sent.bytes[2] == traffic(engine.plan, (8.0,)).sent
