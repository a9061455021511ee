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


def gpt(steps: int, batches: int) -> tuple[Any, Any]:
    """The recipe's model with dropout, and its loader, which keeps its own position."""
    network = GPTConfig(vocab_size=64, block_size=16, num_layers=2, width=32, num_heads=2, dropout=0.1)
    module = GPTModule(network, OptimConfig(total_steps=steps, warmup_steps=5), SampleConfig(max_new_tokens=0))

    def loader() -> Any:
        values = torch.randint(64, (batches * VIRTUAL * 2 * 16 + 32,), generator=torch.Generator().manual_seed(1))
        tokens = Tokens(values.numpy().astype("uint16"), len(values), 0.0)  # type: ignore[call-arg]
        shard = module.trainer.distributed_sampler_kwargs
        sampler = CropSampler(len(values), 16, seed=1, **shard)
        return ResumableLoader(Crops(tokens, 16, 1), sampler, batch_size=2, num_workers=0)

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


def train(
    rank: int, world_size: int, recipe: str, options: dict[str, Any], accumulate: int, precision: str
) -> tuple[dict[str, Tensor], list[float]]:
    """Train for fifty steps; return weights and losses."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pl.seed_everything(0, verbose=False)
    module, loader = globals()[recipe](STEPS, STEPS * accumulate)
    losses = Losses()
    trainer = pl.Trainer(
        accelerator="cpu", devices=world_size, strategy=ZeROStrategy(**nested(options)), max_steps=STEPS,
        precision=precision, accumulate_grad_batches=accumulate, gradient_clip_val=0.5, logger=False, callbacks=[losses],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, Data(loader))
    assert trainer.global_step == STEPS
    weights = trainer.strategy.lightning_module_state_dict()
    return {name: value.clone() for name, value in weights.items()}, losses.found


class Data(pl.LightningDataModule):
    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.train_dataloader = loader  # type: ignore[method-assign]


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, i: int) -> None:
        self.found.append(outputs["loss"].item())


def run(world_size: int, recipe: str, place: tuple[int, str], accumulate: int, precision: str, folder: Path) -> Any:
    stage, tier = place
    options = {"stage": stage, "sharding.min_unit_numel": 0, "parallel.virtual_ranks": VIRTUAL, **TIERS[tier]}
    if stage == 3 and tier != "none":
        options["offload.parameters"] = tier
    if tier == "nvme":
        options["offload.nvme_path"] = str(folder)
    return spawn(train, world_size, recipe, options, accumulate, precision, init_process_group=False, timeout_s=170)[0]


def check(found: Any, expected: Any) -> None:
    assert found[1] == expected[1], "losses"
    for name, weight in expected[0].items():
        assert torch.equal(found[0][name], weight), name


@pytest.mark.parametrize("recipe", ["gpt", pytest.param("cifar", marks=pytest.mark.wide)])
def test_three_ranks_give_the_bits_of_one(recipe: str, tmp_path: Path) -> None:
    expected = run(1, recipe, (2, "none"), 1, "32-true", tmp_path)
    check(run(3, recipe, (3, "none"), 1, "32-true", tmp_path), expected)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("recipe", ["gpt", "cifar"])
def test_ranks_stages_and_tiers(recipe: str, accumulate: int, precision: str, tmp_path: Path) -> None:
    """Every stage and tier on two ranks, and every number of ranks at a stage and tier that changes with it."""
    expected = run(1, recipe, (2, "none"), accumulate, precision, tmp_path)
    for number, place in enumerate(PLACES):
        for world_size in sorted({2, 1 + number % 4}):
            check(run(world_size, recipe, place, accumulate, precision, tmp_path), expected)
