"""Checkpoint folders: any layout reads what any other wrote, and Lightning's ways of saving and loading work."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ls_strategy import ZeROStrategy
from ls_strategy.checkpoint.consolidate import consolidate
from ls_strategy.testing import spawn
from tests.dist.ranks import (
    WIDTH,
    Net,
    assert_close,
    fit,
    global_batches,
    mean_over_ranks,
    quiet,
    weights,
)
from tests.dist.test_checkpoint_file import Mixed

WORLDS, STAGES, TIERS = (1, 2, 3, 4), (1, 2, 3), ("device", "cpu", "nvme")
TEN = 10


class Rich(Mixed):
    """Frozen, tied and uneven parameters, buffers, parameters that nobody uses, two groups, a schedule."""

    def build(self) -> None:
        super().build()
        self.unused = nn.Parameter(torch.randn(5, 3))
        self.register_buffer("seen", torch.zeros(3))

    def training_step(self, batch: Any, i: int) -> Tensor:
        self.seen.lerp_(torch.full_like(self.seen, float(self.global_step)), 0.3)
        return super().training_step(batch, i)


# --- any layout to any other ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """What saves or loads."""

    world: int
    stage: int
    tier: str = "device"
    kind: str = "folder"
    """``folder``; ``file``, of this package; ``ddp``, Lightning's own."""

    def __str__(self) -> str:
        return f"{self.kind}-{self.world}-{self.stage}-{self.tier}"

    def strategy(self, root: Path) -> Any:
        """A new one, with every block as a unit."""
        if self.kind == "ddp":
            return "ddp_find_unused_parameters_true"
        options: dict[str, Any] = {"nvme_path": str(root / "nvme"), "nvme_allow_ram": True}
        if self.tier != "device":
            options["offload_optimizer"] = self.tier
            if self.stage == 3:
                options["offload_param"] = self.tier
        save_as: Any = "file" if self.kind == "file" else "sharded"
        stage: Any = self.stage
        return ZeROStrategy(stage, min_unit_numel=0, save_as=save_as, **options)


def every_pair() -> list[tuple[Layout, Layout]]:
    """As few pairs as cover every change of the world size, of the stage and of the tier; and other kinds of saves."""
    pairs: list[tuple[Layout, Layout]] = []
    for number, (before, after) in enumerate(itertools.product(WORLDS, WORLDS)):
        a, b = number % 3, number // 3 % 3
        source = Layout(before, STAGES[a], TIERS[b])
        pairs.append((source, Layout(after, STAGES[b], TIERS[(a + b) % 3])))
    return [
        *pairs,
        (Layout(2, 0, kind="ddp"), Layout(3, 3, "nvme")),
        (Layout(2, 0, kind="ddp"), Layout(4, 1)),
        (Layout(3, 3, "cpu", kind="file"), Layout(2, 2, "nvme")),
        (Layout(1, 2, kind="file"), Layout(4, 3)),
        (Layout(3, 3, "nvme"), Layout(2, 0, kind="ddp")),
        (Layout(4, 2), Layout(3, 0, kind="ddp")),
    ]


def test_the_pairs_cover_every_change() -> None:
    pairs = every_pair()
    for name, values in (("world", WORLDS), ("stage", STAGES), ("tier", TIERS)):
        found = {(getattr(a, name), getattr(b, name)) for a, b in pairs if a.kind == b.kind == "folder"}
        assert found == set(itertools.product(values, values)), name


def train(rank: int, layout: Layout, root: Path, epochs: int, ckpt: Path | None = None) -> tuple[pl.Trainer, Rich]:
    module = Rich()
    data = global_batches(rank, layout.world, TEN)
    trainer = fit(layout.strategy(root), module, data, ckpt, use_distributed_sampler=False, max_epochs=epochs)
    return trainer, module


def save_all(rank: int, world_size: int, layouts: list[Layout], root: Path) -> None:
    """Ten steps under every layout, to a folder or file of its name."""
    quiet()
    for layout in layouts:
        trainer, _ = train(rank, layout, root, 1)
        trainer.save_checkpoint(root / f"{layout}.ckpt")


def load_all(
    rank: int, world_size: int, pairs: list[tuple[Layout, Layout]], root: Path, trusted: tuple[list[float], Any]
) -> list[str]:
    """Ten more steps; what differs from the run that was not interrupted."""
    quiet()
    problems: list[str] = []
    for source, target in pairs:
        name = f"{source}.ckpt" + (".one" if target.kind == "ddp" and source.kind == "folder" else "")
        what = f"{source} to {target}"
        try:
            trainer, module = train(rank, target, root, 2, root / name)
            assert trainer.global_step == 2 * TEN, f"{what}: {trainer.global_step} steps"
            assert_close(mean_over_ranks(module.losses), trusted[0][TEN:], f"{what}, losses")
            assert_close(weights(module), trusted[1], f"{what}, weights", 3e-6)
        except AssertionError as error:
            problems.append(str(error)[:2000])
    return problems


def run_trusted(rank: int, world_size: int) -> tuple[list[float], dict[str, Tensor]]:
    """A plain Trainer on one process, never interrupted."""
    quiet()
    module = Rich()
    fit("auto", module, global_batches(0, 1, TEN), use_distributed_sampler=False, max_epochs=2)
    return module.losses, weights(module)


def save_sources(layouts: set[Layout], root: Path) -> None:
    """One start of the ranks for each world size."""
    for world in WORLDS:
        mine = sorted((x for x in layouts if x.world == world), key=str)
        spawn(save_all, world, mine, root, init_process_group=False, timeout_s=170)


@pytest.fixture(scope="module")
def trusted() -> tuple[list[float], dict[str, Tensor]]:
    return spawn(run_trusted, 1, init_process_group=False)[0]


def problems_of(pairs: list[tuple[Layout, Layout]], root: Path, trusted: Any) -> list[str]:
    """Load every pair's checkpoint; one start of the ranks for each world size."""
    result: list[str] = []
    for world in WORLDS:
        mine = [pair for pair in pairs if pair[1].world == world]
        if mine:
            by_rank = spawn(load_all, world, mine, root, trusted, init_process_group=False, timeout_s=900)
            result += list(dict.fromkeys(itertools.chain(*by_rank)))
    return result


@pytest.mark.timeout(400)
def test_every_change_of_the_layout(tmp_path: Path, trusted: Any) -> None:
    pairs = every_pair()
    save_sources({source for source, _ in pairs}, tmp_path)
    for source in {source for source, target in pairs if target.kind == "ddp"}:
        consolidate(tmp_path / f"{source}.ckpt", tmp_path / f"{source}.ckpt.one")
    assert problems_of(pairs, tmp_path, trusted) == []


@pytest.fixture(scope="module")
def all_sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("sources")
    save_sources({Layout(*values) for values in itertools.product(WORLDS, STAGES, TIERS)}, root)
    return root


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", WORLDS)
def test_every_layout_reads_every_other(
    world_size: int, stage: int, tier: str, all_sources: Path, trusted: Any
) -> None:
    sources = [Layout(*values) for values in itertools.product(WORLDS, STAGES, TIERS)]
    assert problems_of([(x, Layout(world_size, stage, tier)) for x in sources], all_sources, trusted) == []
