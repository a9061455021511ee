"""Checkpoint folders: any layout reads what any other wrote, and Lightning's ways of saving and loading work."""

from __future__ import annotations

import copy
import itertools
import pickle
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ls_strategy import ShardedEMA, ZeROStrategy
from ls_strategy.checkpoint import commit
from ls_strategy.checkpoint.consolidate import consolidate
from ls_strategy.checkpoint.describe import verify_all
from ls_strategy.checkpoint.files import RankFile
from ls_strategy.checkpoint.manifest import read_manifest
from ls_strategy.checkpoint.place import CheckpointPath
from ls_strategy.config import LossScaleConfig, nested
from ls_strategy.errors import CheckpointError, RankFailedError, StateError
from ls_strategy.lightning.precision import ZeROPrecision
from ls_strategy.testing import spawn
from tests.dist.ranks import (
    WIDTH,
    Net,
    assert_close,
    assert_equal,
    batches,
    fit,
    folders,
    global_batches,
    mean_over_ranks,
    on_ranks,
    quiet,
    saved,
    trainer_of,
    weights,
)
from tests.dist.test_checkpoint_file import TEN_STEPS, Mixed, OneMore, WithHistory
from tests.limits import wall
from tests.marks import few_or_all, slow, wide

WORLDS, STAGES, TIERS = (1, 2, 3, 4), (1, 2, 3), ("device", "cpu", "nvme")
TEN = 10


class Rich(WithHistory):
    """Frozen, tied and uneven parameters, buffers, parameters that nobody uses, two groups, a schedule."""

    def build(self) -> None:
        super().build()
        self.unused = nn.Parameter(torch.randn(5, 3))


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
        options: dict[str, Any] = {"offload.nvme_path": str(root / "nvme"), "offload.nvme_allow_ram": True}
        if self.tier != "device":
            options["offload.optimizer"] = self.tier
            if self.stage == 3:
                options["offload.parameters"] = self.tier
        save_as: Any = "file" if self.kind == "file" else "sharded"
        stage: Any = self.stage
        return ZeROStrategy(stage, **nested({"sharding.min_unit_numel": 0, "checkpoint.format": save_as, **options}))


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
        for side in zip(*pairs[::3], strict=True):
            assert {getattr(layout, name) for layout in side} >= set(values), name


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


@pytest.mark.wide
@pytest.mark.timeout(400)
@pytest.mark.parametrize("of", ["a third of the pairs", slow("all pairs")])
def test_every_change_of_the_layout(tmp_path: Path, trusted: Any, of: str) -> None:
    """A third of the pairs still has every world size, stage and tier on both sides."""
    pairs = every_pair() if of == "all pairs" else every_pair()[::3]
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


# --- ten and ten more are twenty --------------------------------------------------------------------------------------


class Dropped(Mixed):
    """With dropout, whose random numbers differ by rank and by run."""

    seed = 0

    def build(self) -> None:
        super().build()
        self.dropout = nn.Dropout(0.3)

    def on_train_start(self) -> None:
        torch.manual_seed(1000 * self.seed + self.global_rank)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.dropout(x))


class DroppedAgain(Dropped):
    """Begins with random numbers that would be wrong after a resume."""

    seed = 1


def seeded(stage: Any, precision: str, **options: Any) -> tuple[ZeROStrategy, dict[str, Any]]:
    """A strategy and what the Trainer needs besides."""
    if precision == "16-mixed":
        scale = LossScaleConfig(initial_power=6, window=3)
        plugin: Any = ZeROPrecision("16-mixed")
        return ZeROStrategy(
            stage,
            precision_plugin=plugin,
            **nested({"sharding.min_unit_numel": 0, "precision.loss_scale": scale, **options}),
        ), {}
    options = {"checkpoint.format": "sharded", **options}
    return ZeROStrategy(stage, **nested({"sharding.min_unit_numel": 0, **options})), {"precision": precision}


def moments(trainer: pl.Trainer) -> dict[str, Tensor]:
    """State of all optimizers by parameter name, on rank 0. Collective."""
    result: dict[str, Tensor] = {}
    strategy: Any = trainer.strategy
    for optimizer in strategy.optimizers:
        names = strategy.engine.optimizers[strategy.engine.index_of(optimizer)].sharded.states.names
        state = strategy.optimizer_state(optimizer).get("state", {})
        for index, entries in state.items():
            result.update({f"{names[index]}.{key}": torch.as_tensor(value) for key, value in entries.items()})
    return dict(sorted(result.items()))


@pytest.mark.parametrize(
    ("precision", "stages"),
    [("32-true", (3,)), wide("32-true", (1, 2, 3)), slow("bf16-true", (1, 2, 3)), slow("16-mixed", (1, 2, 3))],
)
@on_ranks(2)
def test_ten_steps_and_ten_more_are_twenty_bit_for_bit(
    rank: int, world_size: int, precision: str, stages: tuple[int, ...], tmp_path: Path
) -> None:
    """Also after seven steps, in the middle of an epoch."""
    data = {"data": batches(TEN_STEPS)}
    for stage in stages:
        whole = Dropped()
        strategy, options = seeded(stage, precision)
        saves = ModelCheckpoint(tmp_path / str(stage), "{step}", every_n_train_steps=7, save_top_k=-1)
        options["gradient_clip_val"] = 0.5
        done = fit(strategy, whole, callbacks=[saves], enable_checkpointing=True, **data, **options)
        expected, scale = moments(done), done.strategy.loss_scale
        half = Dropped()
        fit(seeded(stage, precision)[0], half, max_epochs=1, **data, **options).save_checkpoint(tmp_path / "10.ckpt")
        assert_equal(half.losses, whole.losses[:TEN], f"stage {stage}")
        for steps, path in ((7, tmp_path / str(stage) / "step=7.ckpt"), (10, tmp_path / "10.ckpt")):
            rest = DroppedAgain()
            trainer = fit(seeded(stage, precision)[0], rest, ckpt=path, **data, **options)
            what = f"stage {stage}, {precision}, after {steps}"
            assert_equal(rest.losses, whole.losses[steps:], f"{what}: losses")
            assert_equal(weights(rest), weights(whole), f"{what}: weights")
            assert_equal(moments(trainer), expected, f"{what}: moments")
            assert trainer.strategy.loss_scale == scale, what
            assert (scale is not None) == (precision == "16-mixed")
            assert rest.lr_schedulers().state_dict() == whole.lr_schedulers().state_dict(), what
        if rank == 0:
            assert len(expected) == 3 * len(trainable(whole)), f"{len(expected)} states"


def trainable(module: nn.Module) -> list[str]:
    return [name for name, p in module.named_parameters() if p.requires_grad]


# --- other optimizers -------------------------------------------------------------------------------------------------


class Divided(Net):
    """The same parameters in one optimizer with one group or two, or in two optimizers."""

    def __init__(self, kind: str, lr: float) -> None:
        self.kind = kind
        super().__init__(lr)
        self.automatic_optimization = False
        self.at_start: dict[str, Tensor] = {}
        self.lrs_at_start: list[float] = []

    def training_step(self, batch: Any, i: int) -> None:
        loss = self.noted_loss(batch)
        optimizers = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def on_train_start(self) -> None:
        self.at_start = moments(self.trainer)
        self.lrs_at_start = [g["lr"] for o in self.trainer.optimizers for g in o.param_groups]

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim > 1]
        vectors = [p for p in self.parameters() if p.ndim == 1]
        options = {"lr": self.lr, "eps": 1e-4, "fused": True}
        if self.kind == "one group":
            return torch.optim.AdamW([*vectors, *matrices], **options)
        if self.kind == "two groups":
            return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors}], **options)
        if self.kind == "other groups":
            return torch.optim.AdamW([{"params": matrices[:2]}, {"params": [*matrices[2:], *vectors]}], **options)
        return [torch.optim.AdamW(vectors, **options), torch.optim.AdamW(matrices, weight_decay=0.1, **options)]


DIVISIONS = ("one group", "two groups", "other groups", "two optimizers")
SAME_GROUPS = {frozenset(["two groups", "two optimizers"]), *(frozenset([kind]) for kind in DIVISIONS)}


@pytest.mark.wide
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
@on_ranks(2)
def test_states_find_their_parameters_in_other_optimizers(
    rank: int, world_size: int, stage: int, tmp_path: Path
) -> None:
    """Moments go by name; learning rates only where the same parameters form the groups."""
    for kind in DIVISIONS:
        module = Divided(kind, 0.02)
        trainer = fit(stage, module, max_epochs=1)
        trainer.save_checkpoint(tmp_path / f"{kind}.ckpt")
        saved_moments = moments(trainer)
        if rank == 0:
            assert len(saved_moments) == 3 * len(trainable(module))
            assert all(v.abs().max() > 0 for v in saved_moments.values())
        for other in DIVISIONS:
            resumed = Divided(other, 0.003)
            fit(stage, resumed, ckpt=tmp_path / f"{kind}.ckpt", max_epochs=2, limit_train_batches=1)
            what = f"{kind} to {other}"
            assert_equal(resumed.at_start, saved_moments, what)
            lr = 0.02 if frozenset([kind, other]) in SAME_GROUPS else 0.003
            assert set(resumed.lrs_at_start) == {lr}, f"{what}: {resumed.lrs_at_start}"


# --- averages ---------------------------------------------------------------------------------------------------------


def average_leg(
    rank: int, world_size: int, stage: int, epochs: int, source: Path | None, target: Path
) -> dict[str, Tensor]:
    """The average after one more epoch."""
    quiet()
    data = global_batches(rank, world_size, 4)
    trainer = fit(
        stage, Mixed(), data, source, callbacks=[ShardedEMA(decay=0.7)], max_epochs=epochs,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.save_checkpoint(target)
    return saved(target)["ema_state_dict"] if rank == 0 else {}


def average_by_hand(rank: int, world_size: int) -> dict[str, Tensor]:
    """A plain Trainer on one process; two epochs."""
    quiet()
    module = Mixed()
    average = {n: v.clone() for n, v in module.state_dict().items()}

    class ByHand(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            for name, value in module.state_dict().items():
                if value.is_floating_point():
                    average[name].lerp_(value, 0.3)

    data = global_batches(rank, world_size, 4)
    fit("auto", module, data, callbacks=[ByHand()], use_distributed_sampler=False)
    return average


@pytest.mark.wide
def test_an_average_goes_on_at_another_world_size(tmp_path: Path) -> None:
    trusted = spawn(average_by_hand, 1, init_process_group=False)[0]
    for number, (first, second) in enumerate([((2, 3), (3, 1)), ((3, 1), (1, 3))]):
        half, whole = tmp_path / f"half{number}.ckpt", tmp_path / f"whole{number}.ckpt"
        spawn(average_leg, first[0], first[1], 1, None, half, init_process_group=False)
        average = spawn(average_leg, second[0], second[1], 2, half, whole, init_process_group=False)[0]
        assert average.keys() == trusted.keys()
        for name, value in trusted.items():
            if value.is_floating_point():
                assert_close(average[name], value, f"{first} to {second}: {name}", 3e-6)


# --- what fits, and what may be left out ------------------------------------------------------------------------------


class OneMoreNotStrict(OneMore):
    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False


class NotStrict(Net):
    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False


@pytest.mark.wide
@pytest.mark.parametrize("stages", few_or_all((3,), (1, 3)))
@on_ranks(2)
def test_names_that_do_not_fit_are_told(rank: int, world_size: int, stages: tuple[int, ...], tmp_path: Path) -> None:
    fit(2, Net(), max_epochs=1).save_checkpoint(tmp_path / "net.ckpt")
    fit(3, OneMore(), max_epochs=1).save_checkpoint(tmp_path / "more.ckpt")
    net, more = (saved(tmp_path / f"{name}.ckpt")["state_dict"] for name in ("net", "more"))
    for stage in stages:
        with pytest.raises(StateError, match=r"missing keys: extra\.bias, extra\.weight.*strict_loading=False"):
            fit(stage, OneMore(), ckpt=tmp_path / "net.ckpt")
        with pytest.raises(StateError, match=r"unexpected keys: extra\.bias, extra\.weight.*strict_loading=False"):
            fit(stage, Net(), ckpt=tmp_path / "more.ckpt")
        module = OneMoreNotStrict()
        own = module.extra.weight.detach().clone()
        evaluate(stage, module, tmp_path / "net.ckpt")
        loaded = weights(module)
        assert_equal({n: loaded[n] for n in net}, net, "what is there")
        assert_equal(loaded["extra.weight"], own, "what is not there")
        module = NotStrict()
        evaluate(stage, module, tmp_path / "more.ckpt")
        assert_equal(weights(module), {n: more[n] for n in net}, "what is wanted")


def evaluate(stage: Any, module: Net, ckpt: Path | None, method: str = "validate") -> float:
    """The loss on data of its own."""
    trainer = trainer_of(stage)
    [metrics] = getattr(trainer, method)(module, batches(seed=7), ckpt_path=ckpt, verbose=False)
    return metrics["val_loss" if method == "validate" else "test_loss"]


class Adapted(Net):
    """A frozen model with small trainable matrices on two of its layers; the frozen part is the same for all."""

    def __init__(self, seed: int = 0, strict: bool = True) -> None:
        self.seed = seed
        super().__init__()
        self.strict_loading = strict

    def build(self) -> None:
        super().build()
        self.requires_grad_(False)
        generator = torch.Generator().manual_seed(self.seed)
        self.a = nn.Parameter(torch.randn(WIDTH, 2, generator=generator))
        self.b = nn.Parameter(torch.randn(2, WIDTH, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.a @ self.b

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([self.a, self.b], lr=1e-2, eps=1e-4, fused=True)


@pytest.mark.wide
@pytest.mark.parametrize("stages", few_or_all((2,), (1, 2, 3)))
@on_ranks(2)
def test_frozen_parameters_may_be_left_out(rank: int, world_size: int, stages: tuple[int, ...], tmp_path: Path) -> None:
    frozen = {name for name, p in Adapted().named_parameters() if not p.requires_grad}
    for stage in stages:
        path = tmp_path / f"{stage}.ckpt"
        whole, half = Adapted(), Adapted()
        fit(stage, whole)
        fit(
            ZeROStrategy(stage, sharding={"min_unit_numel": 0}, checkpoint={"frozen": False}), half, max_epochs=1
        ).save_checkpoint(path)
        assert set(read_manifest(path).left_out) == frozen
        assert set(saved(path)["state_dict"]) == {"a", "b"}
        resumed = Adapted(seed=1)
        other: Any = stage % 3 + 1
        fit(other, resumed, ckpt=path)
        assert_close(resumed.losses, whole.losses[4:], f"stage {stage} to {other}")
        assert_close(weights(resumed), weights(whole), f"stage {stage} to {other}", 3e-6)
        evaluated = Adapted(seed=1)
        assert evaluate(other, evaluated, path) == pytest.approx(evaluate(stage, half, None), rel=1e-6)
        with pytest.raises(StateError, match=r"missing keys: extra"):
            fit(stage, AdaptedOneMore(), ckpt=path)


class AdaptedOneMore(Adapted):
    def build(self) -> None:
        super().build()
        self.extra = nn.Parameter(torch.zeros(()))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([self.a, self.b, self.extra], lr=1e-2, fused=True)


@pytest.mark.wide
@on_ranks(2)
def test_weights_only_folders_and_evaluation_at_other_stages(rank: int, world_size: int, tmp_path: Path) -> None:
    for stage in (1, 2, 3):
        folder = tmp_path / str(stage)
        small = ModelCheckpoint(folder, "small", save_weights_only=True, every_n_train_steps=4)
        large = ModelCheckpoint(folder, "large", every_n_train_steps=2)
        module = Mixed()
        fit(stage, module, max_epochs=1, callbacks=[small, large], enable_checkpointing=True)
        contents = saved(folder / "small.ckpt")
        assert "optimizer_states" not in contents
        assert_equal(dict(sorted(contents["state_dict"].items())), dict(sorted(weights(module).items())), "weights")
        assert "optimizer_states" in saved(folder / "large.ckpt")
        size = {n: sum(f.stat().st_size for f in (folder / f"{n}.ckpt").iterdir()) for n in ("small", "large")}
        assert size["small"] < 0.6 * size["large"]
        for method in ("validate", "test"):
            expected = evaluate(stage, module, None, method)
            for other, name in ((stage % 3 + 1, "small"), ((stage + 1) % 3 + 1, "large"), (0, "small")):
                actual = evaluate(other, Mixed(), folder / f"{name}.ckpt", method)
                assert actual == pytest.approx(expected, rel=1e-6), f"{stage} to {other}, {name}, {method}"
        with pytest.raises(KeyError, match="contains only the model"):
            fit(stage, Mixed(), ckpt=folder / "small.ckpt")


@pytest.mark.wide
@pytest.mark.parametrize("stages", few_or_all((3,), (1, 3)))
@on_ranks(2)
def test_evaluation_of_an_earlier_checkpoint_after_a_fit(
    rank: int, world_size: int, stages: tuple[int, ...], tmp_path: Path
) -> None:
    """By the same Trainer, whose states are still there; and the fit goes on from another one."""
    for stage in stages:
        module = Mixed()
        saves = ModelCheckpoint(tmp_path / str(stage), "{step}", every_n_train_steps=2, save_top_k=-1)
        trainer = fit(stage, module, callbacks=[saves], enable_checkpointing=True, max_epochs=1)
        last = evaluate_by(trainer, module, None)
        early = evaluate_by(trainer, module, tmp_path / str(stage) / "step=2.ckpt")
        assert early == pytest.approx(evaluate(1, Mixed(), tmp_path / str(stage) / "step=2.ckpt"), rel=1e-6)
        assert abs(early - last) > 1e-4
        assert evaluate_by(trainer, module, tmp_path / str(stage) / "step=4.ckpt") == pytest.approx(last, rel=1e-6)


def evaluate_by(trainer: pl.Trainer, module: Net, ckpt: Path | None) -> float:
    return trainer.validate(module, batches(seed=7), ckpt_path=ckpt, verbose=False)[0]["val_loss"]


# --- hooks ------------------------------------------------------------------------------------------------------------


class Hooked(Net):
    """Runs what it is given while a checkpoint is saved, or loaded."""

    def __init__(self, saving: Any = None, loading: Any = None) -> None:
        super().__init__()
        self.saving, self.loading = saving, loading
        self.strict_loading = False

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.saving is not None:
            self.saving(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.loading is not None:
            self.loading(checkpoint)


@pytest.mark.parametrize("stages", few_or_all((2,), (1, 2, 3)))
@on_ranks(2)
def test_hooks_drop_rename_and_add(rank: int, world_size: int, stages: tuple[int, ...], tmp_path: Path) -> None:
    def saving(checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        del state["last.bias"]
        state["renamed"] = state.pop("first.bias")
        state["added"] = torch.arange(6.0).view(2, 3)
        checkpoint["own"] = {"copy": state["last.weight"], "tensor": torch.arange(3), "word": "x"}
        checkpoint["alone"] = torch.arange(4)

    for stage in stages:
        path = tmp_path / f"{stage}.ckpt"
        module = Hooked(saving)
        fit(stage, module, max_epochs=1).save_checkpoint(path)
        expected = weights(module)
        found = saved(path)
        assert found["state_dict"].keys() == (expected.keys() - {"last.bias", "first.bias"}) | {"renamed", "added"}
        assert_equal(found["state_dict"]["renamed"], expected["first.bias"], "renamed")
        assert_equal(found["state_dict"]["added"], torch.arange(6.0).view(2, 3), "added")
        assert_equal(found["own"]["copy"], expected["last.weight"], "copy")
        assert_equal(found["own"]["tensor"], torch.arange(3), "tensor")
        assert found["own"]["word"] == "x"
        assert_equal(found["alone"], torch.arange(4), "alone")

        def loading(checkpoint: dict[str, Any]) -> None:
            state = checkpoint["state_dict"]
            state["first.bias"] = state.pop("renamed")
            state["last.bias"] = state["first.bias"] + state.pop("added").sum()

        resumed = Hooked(loading=loading)
        evaluate(stage, resumed, path)
        expected["last.bias"] = expected["first.bias"] + 15.0
        assert_equal(weights(resumed), expected, f"stage {stage}")


def scaled(checkpoint: dict[str, Any]) -> None:
    state = checkpoint["state_dict"]
    state["scaled"] = state["blocks.1.wide.weight"] * 2


def copied(checkpoint: dict[str, Any]) -> None:
    checkpoint["copied"] = checkpoint["state_dict"]["blocks.1.wide.weight"].clone()


def inside(checkpoint: dict[str, Any]) -> None:
    checkpoint["own"] = {"deep": [checkpoint["state_dict"]["blocks.1.wide.weight"].half()]}


@pytest.mark.parametrize("stages", few_or_all((1,), (1, 3)))
@pytest.mark.parametrize(("hook", "key"), [(scaled, "scaled"), slow(copied, "copied"), slow(inside, "own")])
@on_ranks(2)
def test_a_hook_that_computes_with_what_is_sharded_is_told_so(
    rank: int, world_size: int, stages: tuple[int, ...], hook: Any, key: str, tmp_path: Path
) -> None:
    for stage in stages:
        module = Hooked(hook)
        trainer = fit(stage, module, max_epochs=1)
        with pytest.raises(CheckpointError, match=rf"{key}.*on_save_checkpoint"):
            trainer.save_checkpoint(tmp_path / "x.ckpt")
        assert not list(tmp_path.iterdir())
        dist.barrier()  # or rank 0's next save begins before rank 1 has looked
        module.saving = None
        trainer.save_checkpoint(tmp_path / "x.ckpt")
        assert_equal(saved(tmp_path / "x.ckpt")["state_dict"], weights(module), f"stage {stage}")
        dist.barrier()
        if rank == 0:
            commit.remove(tmp_path / "x.ckpt")
        dist.barrier()


def under_a_name(checkpoint: dict[str, Any]) -> None:
    checkpoint["mine"] = checkpoint["state_dict"]["blocks.1.wide.weight"]


def in_a_list(checkpoint: dict[str, Any]) -> None:
    checkpoint["mine"] = [checkpoint["state_dict"]["blocks.1.wide.weight"]]


def deep(checkpoint: dict[str, Any]) -> None:
    checkpoint["mine"] = {"a": {"b": checkpoint["state_dict"]["blocks.1.wide.weight"]}}


@pytest.mark.parametrize("hook", [under_a_name, slow(in_a_list), wide(deep)])
@on_ranks(2)
def test_a_sharded_value_in_any_place_is_saved_or_refused(
    rank: int, world_size: int, hook: Any, tmp_path: Path
) -> None:
    """Never a tensor without elements in the file."""
    module = Hooked(hook)
    trainer = fit(2, module, max_epochs=1)
    try:
        trainer.save_checkpoint(tmp_path / "x.ckpt")
    except CheckpointError as raised:
        error = raised
    else:
        error = None
    if error is not None:
        assert "mine" in str(error)
        return
    found = saved(tmp_path / "x.ckpt")["mine"]
    value = {under_a_name: lambda: found, in_a_list: lambda: found[0], deep: lambda: found["a"]["b"]}[hook]()
    assert_equal(value.clone(), weights(module)["blocks.1.wide.weight"], hook.__name__)


@on_ranks(2)
def test_hooks_read_saved_tensors_as_tensors(rank: int, world_size: int, tmp_path: Path) -> None:
    module = Net()
    fit(3, module, max_epochs=1).save_checkpoint(tmp_path / "x.ckpt")
    expected = weights(module)
    name = "blocks.1.wide.weight"
    value = expected[name]
    seen: list[int] = []

    def loading(checkpoint: dict[str, Any]) -> None:
        w = checkpoint["state_dict"][name]
        seen.append(1)
        assert (tuple(w.shape), w.dtype, w.device.type, w.numel()) == (tuple(value.shape), value.dtype, "cpu", 136)
        assert torch.equal(w, value)
        assert torch.equal(w.clone(), value)
        assert torch.equal(w.to(torch.float64), value.double())
        assert torch.equal(w[3, 1:], value[3, 1:])
        assert torch.equal(torch.cat([w, w]), torch.cat([value, value]))
        assert torch.equal(w.flatten().view(-1, 4).T, value.flatten().view(-1, 4).T)
        assert w.norm().item() == value.norm().item()
        assert w[0, 0].item() == value[0, 0].item()
        assert w.tolist() == value.tolist()
        assert float(w.sum()) == float(value.sum())
        assert (w.numpy() == value.numpy()).all()
        assert torch.equal(copy.deepcopy(w), value)
        assert torch.equal(pickle.loads(pickle.dumps(w)), value)
        assert torch.equal(nn.Parameter(w.clone()), value)
        assert "SavedTensor" in repr(w)
        checkpoint["state_dict"][name] = w * 2 + 1

    for stage in (1, 3):
        resumed = Hooked(loading=loading)
        evaluate(stage, resumed, tmp_path / "x.ckpt")
        assert_equal(weights(resumed), {**expected, name: value * 2 + 1}, f"stage {stage}")
    assert seen


@pytest.mark.wide
@on_ranks(2)
def test_changes_in_place_of_a_saved_tensor_are_made_or_refused(rank: int, world_size: int, tmp_path: Path) -> None:
    """Never lost without a word."""
    module = Net()
    fit(3, module, max_epochs=1).save_checkpoint(tmp_path / "x.ckpt")
    expected = weights(module)
    value = expected["last.weight"]
    changes = {
        "mul_": lambda w: w.mul_(2),
        "copy_": lambda w: w.copy_(value * 2),
        "setitem": lambda w: w.__setitem__(slice(None), value * 2),
        "view": lambda w: w.view(-1).mul_(2),
    }
    for what, change in changes.items():
        resumed = Hooked(loading=lambda checkpoint, change=change: change(checkpoint["state_dict"]["last.weight"]))
        try:
            evaluate(1, resumed, tmp_path / "x.ckpt")
        except (CheckpointError, StateError, RuntimeError, NotImplementedError):
            continue
        assert_equal(weights(resumed), {**expected, "last.weight": value * 2}, what)


# --- ModelCheckpoint --------------------------------------------------------------------------------------------------


def names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


class Monitored(Net):
    """What it logs is least at the fifth step, and next at the sixth."""

    def training_step(self, batch: Any, i: int) -> Tensor:
        self.log("score", abs(4.2 - self.global_step))
        return super().training_step(batch, i)


@pytest.mark.wide
@pytest.mark.parametrize("save_last", [slow(True), "link", slow(None)])
@pytest.mark.parametrize("background", [slow(False), True])
@on_ranks(2)
def test_only_the_best_and_the_last_remain(
    rank: int, world_size: int, save_last: Any, background: bool, tmp_path: Path
) -> None:
    def saves() -> ModelCheckpoint:
        return ModelCheckpoint(
            tmp_path, "{step}", monitor="score", save_top_k=2, save_last=save_last, every_n_train_steps=1
        )

    for stage in (1, 3):
        callback = saves()
        strategy = folders(stage, background=background)
        module = Monitored()
        trainer = fit(strategy, module, callbacks=[callback], enable_checkpointing=True)
        dist.barrier()
        assert trainer.global_step == 8
        last = [] if save_last is None else ["last.ckpt"]
        assert names_in(tmp_path) == [*last, "step=5.ckpt", "step=6.ckpt"]
        assert Path(callback.best_model_path).name == "step=5.ckpt"
        for path in tmp_path.iterdir():
            assert verify_all(path) == []
        for word, step in (("best", 5), ("last", {None: None, True: 8, "link": 6}[save_last])):
            if step is None:
                continue
            resumed = Monitored()
            other = fit(stage, resumed, ckpt=tmp_path / "last.ckpt" if word == "last" else callback.best_model_path)
            assert len(resumed.losses) == 8 - step
            assert_equal(resumed.losses, module.losses[step:], f"{word}, stage {stage}")
            assert other.global_step == 8
        assert evaluate_best(trainer, module) == evaluate(1, Monitored(), tmp_path / "step=5.ckpt")
        dist.barrier()
        for path in list(tmp_path.iterdir()) if rank == 0 else ():
            commit.remove(path)
        dist.barrier()


def evaluate_best(trainer: pl.Trainer, module: Net) -> float:
    return trainer.validate(module, batches(seed=7), ckpt_path="best", verbose=False)[0]["val_loss"]


@pytest.mark.wide
@on_ranks(2)
def test_last_is_found_by_its_word(rank: int, world_size: int, tmp_path: Path) -> None:
    for save_last in (True, "link"):
        folder = tmp_path / str(save_last)
        callback = ModelCheckpoint(folder, "{step}", save_last=save_last, every_n_train_steps=1)
        fit(2, Net(), callbacks=[callback], enable_checkpointing=True, max_epochs=1)
        dist.barrier()
        assert names_in(folder) == ["last.ckpt", "step=4.ckpt"]
        assert (folder / "last.ckpt").is_symlink() == (save_last == "link")
        resumed = Net()
        again = ModelCheckpoint(folder, "{step}", save_last=save_last, every_n_train_steps=1)
        fit(3, resumed, ckpt="last", callbacks=[again], enable_checkpointing=True)
        dist.barrier()
        assert len(resumed.losses) == 4
        assert read_manifest(folder / "last.ckpt").step == 8
        assert not list(folder.glob(".*"))
        assert {p.name for p in folder.iterdir()} >= {"last.ckpt", "step=8.ckpt"}


def save_once(rank: int, world_size: int, path: Path) -> dict[str, Tensor]:
    quiet()
    module = Net()
    fit(3, module, max_epochs=1).save_checkpoint(path)
    return weights(module)


@pytest.mark.wide
def test_fewer_ranks_leave_no_files_of_more(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    for world in (3, 1, 2):
        expected = spawn(save_once, world, path, init_process_group=False)[0]
        shards = [f"__{rank}_0.distcp" for rank in range(world)]
        assert names_in(path) == sorted([*shards, ".metadata", "index.json", "meta.pt", "manifest.json"])
        assert_equal(saved(path)["state_dict"], expected, f"{world} ranks")
    assert names_in(tmp_path) == ["x.ckpt"]


@on_ranks(2)
def test_the_first_ranks_path_counts(rank: int, world_size: int, tmp_path: Path) -> None:
    module = Net()
    fit(3, module, max_epochs=1).save_checkpoint(tmp_path / f"of-rank-{rank}.ckpt")
    assert names_in(tmp_path) == ["of-rank-0.ckpt"]
    assert_equal(saved(tmp_path / "of-rank-0.ckpt")["state_dict"], weights(module), "weights")


@pytest.mark.wide
@on_ranks(1)
def test_a_file_system_in_memory(rank: int, world_size: int) -> None:
    root = "memory:///folder"
    whole, half, rest = Mixed(), Mixed(), Mixed()
    fit(3, whole)
    saves = ModelCheckpoint(root, "{step}", every_n_train_steps=1, save_last=True)
    fit(3, half, callbacks=[saves], enable_checkpointing=True, max_epochs=1)
    found = sorted(Path(entry).name for entry in CheckpointPath(root).entries())
    steps = len(half.losses)
    assert found == ["last.ckpt", f"step={steps}.ckpt"]
    assert commit.newest([root]) in (f"{root}/last.ckpt", f"{root}/step={steps}.ckpt")
    for name in found:
        rest = Mixed()
        trainer = fit(2, rest, ckpt=f"{root}/{name}")
        assert_equal(half.losses + rest.losses, whole.losses, name)
        assert_equal(weights(rest), weights(whole), name)
    trainer.strategy.remove_checkpoint(f"{root}/last.ckpt")
    assert [Path(entry).name for entry in CheckpointPath(root).entries()] == [f"step={steps}.ckpt"]


@pytest.mark.wide
@on_ranks(2)
def test_a_path_with_a_protocol(rank: int, world_size: int, tmp_path: Path) -> None:
    half, rest, whole = Mixed(), Mixed(), Mixed()
    fit(3, whole)
    path = f"file://{tmp_path}/deep/step=4.ckpt"
    trainer = fit(3, half, max_epochs=1)
    trainer.save_checkpoint(path)
    trainer.save_checkpoint(path)
    assert names_in(tmp_path / "deep") == ["step=4.ckpt"]
    last = fit(2, rest, ckpt=path)
    assert_equal(half.losses + rest.losses, whole.losses, "losses")
    assert_equal(weights(rest), weights(whole), "weights")
    last.strategy.remove_checkpoint(path)
    dist.barrier()
    assert names_in(tmp_path / "deep") == []


# --- other tools ------------------------------------------------------------------------------------------------------


@pytest.mark.wide
@on_ranks(2)
def test_torchs_own_tools_read_the_folder(rank: int, world_size: int, tmp_path: Path) -> None:
    module = Mixed()
    trainer = fit(3, module, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    expected, states = weights(module), moments(trainer)
    own = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load({"model": own}, checkpoint_id=str(tmp_path / "x.ckpt"))  # every rank, in full
    assert_equal(own, expected, "dcp.load")
    if rank == 0:
        dcp_to_torch_save(str(tmp_path / "x.ckpt"), str(tmp_path / "x.pt"))
        found = torch.load(tmp_path / "x.pt", weights_only=False)
        assert_equal(dict(sorted(found["model"].items())), dict(sorted(expected.items())), "model")
        flat = {f"{n}.{k}": v for n, entries in found["optimizer_0"]["state"].items() for k, v in entries.items()}
        assert_equal(dict(sorted(flat.items())), states, "optimizer")
        groups = found["optimizer_0"]["param_groups"]
        assert [g["lr"] for g in groups] == [g["lr"] for g in trainer.optimizers[0].param_groups]
    dist.barrier()


# --- what fails on one rank fails on all ------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [slow(False), True])
@pytest.mark.parametrize("where", [slow("__init__"), "add_tensor", slow("close")])
@on_ranks(2)
def test_an_error_on_one_rank_is_raised_on_all(
    rank: int, world_size: int, where: str, background: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    module = Net()
    strategy = folders(3, background=background)
    trainer = fit(strategy, module, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    before = saved(tmp_path / "x.ckpt")["state_dict"]
    dist.barrier()

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    for failing in (0, 1):
        with monkeypatch.context() as patch:
            if rank == failing:
                patch.setattr(RankFile, where, fail)
            started = time.monotonic()
            with pytest.raises(CheckpointError, match=rf"x\.ckpt failed: rank {failing}: OSError.*Input/output error"):
                trainer.save_checkpoint(tmp_path / "x.ckpt")
            assert time.monotonic() - started < wall(10)
        assert names_in(tmp_path) == ["x.ckpt"]
        assert verify_all(tmp_path / "x.ckpt") == []
        assert_equal(saved(tmp_path / "x.ckpt")["state_dict"], before, "the one before")
        dist.barrier()
    trainer.save_checkpoint(tmp_path / "y.ckpt")
    assert_equal(saved(tmp_path / "y.ckpt")["state_dict"], weights(module), "the next one")


class FailsAlone(Net):
    """An error on one rank, or on all, in the third step."""

    ranks: tuple[int, ...] = (1,)

    def training_step(self, batch: Any, i: int) -> Tensor:
        if i == 2 and self.global_rank in self.ranks:
            raise ValueError("this rank has enough")
        return super().training_step(batch, i)


class FailTogether(FailsAlone):
    ranks = (0, 1)


@pytest.mark.wide
@pytest.mark.parametrize(("stage", "background"), [slow(3, False), (1, True)])
@on_ranks(2, timeout_s=60)
def test_an_exception_on_one_rank_does_not_hang_in_its_checkpoint(
    rank: int, world_size: int, stage: int, background: bool, tmp_path: Path
) -> None:
    strategy = folders(stage, background=background)
    callback = OnExceptionCheckpoint(tmp_path, "exception")
    started = time.monotonic()
    with pytest.raises((ValueError, RankFailedError), match="this rank has enough"):
        fit(strategy, FailsAlone(), callbacks=[callback], enable_checkpointing=True)
    assert time.monotonic() - started < wall(30)
    for path in tmp_path.iterdir():
        assert verify_all(path) == []


@pytest.mark.wide
@pytest.mark.parametrize("stage", [slow(1), 3])
@on_ranks(2, timeout_s=60)
def test_an_exception_on_all_ranks_is_followed_by_a_checkpoint(
    rank: int, world_size: int, stage: int, tmp_path: Path
) -> None:
    whole = Net()
    fit(stage, whole)
    with pytest.raises(ValueError, match="this rank has enough"):
        fit(
            stage, FailTogether(), callbacks=[OnExceptionCheckpoint(tmp_path, "exception")], enable_checkpointing=True
        )  # fmt: skip
    assert names_in(tmp_path) == ["exception.ckpt"]
    resumed = Net()
    fit(3, resumed, ckpt=tmp_path / "exception.ckpt")
    assert_equal(resumed.losses, whole.losses[2:], "losses")
    assert_equal(weights(resumed), weights(whole), "weights")
