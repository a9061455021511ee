"""The recipes with virtual ranks: fifty steps give the same bits on any number of ranks, at any stage, on any tier.

Trusted run: one process, stage 2.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

pytest.importorskip("torchvision")

from ls_strategy import ZeROStrategy
from ls_strategy.config import nested
from ls_strategy.testing import spawn
from recipes.cifar.data import Images, _as_is
from recipes.cifar.model import CIFARModule
from recipes.gpt.corpus import Tokens
from recipes.gpt.data import Crops, CropSampler, ResumableLoader
from recipes.gpt.model import GPTModule, OptimConfig, SampleConfig
from recipes.gpt.network import GPTConfig

STEPS = 50
VIRTUAL = 4
TIERS: dict[str, dict[str, Any]] = {
    "none": {},
    "cpu": {"offload.optimizer": "cpu"},
    "nvme": {"offload.optimizer": "nvme", "offload.nvme_allow_ram": True},
}
PLACES = [(stage, tier) for stage in (0, 1, 2, 3) for tier in TIERS if stage or tier == "none"]
"""Stage 0 offloads nothing: the options refuse it."""


class Text(Tokens):
    """Tokens in memory."""

    def __init__(self, values: Any) -> None:
        self.values = values


def gpt(steps: int, batches: int) -> tuple[Any, Any]:
    """The recipe's model with dropout, and its loader, which keeps its own position."""
    network = GPTConfig(vocab_size=64, block_size=16, num_layers=2, width=32, num_heads=2, dropout=0.1)
    module = GPTModule(network, OptimConfig(total_steps=steps, warmup_steps=5), SampleConfig(max_new_tokens=0))

    def loader() -> Any:
        values = torch.randint(64, (batches * VIRTUAL * 2 * 16 + 32,), generator=torch.Generator().manual_seed(1))
        shard = module.trainer.distributed_sampler_kwargs
        sampler = CropSampler(len(values), 16, seed=1, **shard)
        return ResumableLoader(Crops(Text(values.numpy()), 16, 1), sampler, batch_size=2, num_workers=0)

    return module, loader


def cifar(steps: int, batches: int) -> tuple[Any, Any]:
    """The recipe's convolutional network with batch norm, and its augmentation."""
    random = torch.Generator().manual_seed(1)
    images = torch.randint(256, (batches * VIRTUAL * 2, 32, 32, 3), generator=random, dtype=torch.uint8)
    labels = torch.randint(10, (len(images),), generator=random)
    module = CIFARModule(width=4)

    def loader() -> Any:
        return DataLoader(Images(images, labels), batch_size=2, shuffle=True, drop_last=True, collate_fn=_as_is)

    return module, loader


Found = tuple[dict[str, Tensor], list[float]]
"""Weights and losses."""


def train(
    rank: int, world_size: int, recipe: str, every: list[dict[str, Any]], steps: int, accumulate: int, precision: str
) -> list[Found]:
    """Train with each of several options, one after the other."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found: list[Found] = []
    for options in every:
        pl.seed_everything(0, verbose=False)
        module, loader = globals()[recipe](steps, steps * accumulate)
        losses = Losses()
        trainer = pl.Trainer(
            accelerator="cpu", devices=world_size, strategy=ZeROStrategy(**nested(options)), max_steps=steps,
            precision=precision, accumulate_grad_batches=accumulate, gradient_clip_val=0.5, callbacks=[losses],
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            num_sanity_val_steps=0,
        )  # type: ignore[arg-type]  # fmt: skip
        trainer.fit(module, Data(loader))
        assert trainer.global_step == steps
        weights = trainer.strategy.lightning_module_state_dict()
        found.append(({name: value.clone() for name, value in weights.items()}, losses.found))
    return found


class Data(pl.LightningDataModule):
    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.train_dataloader = loader  # type: ignore[method-assign]


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, i: int) -> None:
        self.found.append(outputs["loss"].item())


def run(
    world_size: int,
    recipe: str,
    places: list[tuple[int, str]],
    folder: Path,
    *,
    steps: int = STEPS,
    accumulate: int = 1,
    precision: str = "32-true",
) -> list[Found]:
    every = []
    for stage, tier in places:
        options = {"stage": stage, "sharding.min_unit_numel": 0, "parallel.virtual_ranks": VIRTUAL, **TIERS[tier]}
        if stage == 3 and tier != "none":
            options["offload.parameters"] = tier
        if tier == "nvme":
            options["offload.nvme_path"] = str(folder)
        every.append(options)
    return spawn(
        train, world_size, recipe, every, steps, accumulate, precision, init_process_group=False, timeout_s=900
    )[0]  # fmt: skip


def check(found: Found, expected: Found) -> None:
    assert found[1] == expected[1], "losses"
    for name, weight in expected[0].items():
        assert torch.equal(found[0][name], weight), name


@pytest.mark.parametrize(
    ("recipe", "steps"),
    [
        ("gpt", 6),
        pytest.param("gpt", STEPS, marks=pytest.mark.wide),
        pytest.param("cifar", STEPS, marks=pytest.mark.wide),
    ],
)
def test_three_ranks_give_the_bits_of_one(recipe: str, steps: int, tmp_path: Path) -> None:
    (expected,) = run(1, recipe, [(2, "none")], tmp_path, steps=steps)
    (found,) = run(3, recipe, [(3, "none")], tmp_path, steps=steps)
    check(found, expected)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("recipe", ["gpt", "cifar"])
def test_every_number_of_ranks_stage_and_tier(recipe: str, accumulate: int, precision: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"accumulate": accumulate, "precision": precision}
    (expected,) = run(1, recipe, [(2, "none")], tmp_path, **options)
    for world_size in (1, 2, 3, 4):
        for place, found in zip(PLACES, run(world_size, recipe, PLACES, tmp_path, **options), strict=True):
            print(world_size, place)
            check(found, expected)
