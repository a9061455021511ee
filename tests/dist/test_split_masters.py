"""Split master weights: the bits of fp32 masters, or with 24 bits the same ones everywhere, and what is refused."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ls_strategy import ShardedEMA
from ls_strategy.checkpoint.files import Reader, read_range
from ls_strategy.checkpoint.manifest import read_manifest
from ls_strategy.config import OffloadConfig, PrecisionConfig, nested
from ls_strategy.errors import ConfigError, PlanError, StateError
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.ops.split_master import split
from ls_strategy.precision import resolve_precision
from ls_strategy.testing import spawn
from tests.dist.test_checkpoint_async import slow_writes
from tests.marks import wide
from tests.models import (
    Case,
    Net,
    PrivateNet,
    SaveOnce,
    assert_same_bits,
    changed_in_between,
    loader,
    placed,
    quiet,
    trainer_of,
)
from tests.unit.one_rank import adamw, close_engines, engine_on, network, steps

pytestmark = pytest.mark.dist

DOCS = Path(__file__).parents[2] / "docs" / "memory.md"
SPLIT = ("precision.master_weights", "split")
IN_24_BITS = ("precision.master_weights", "24")
ON_CPU = (("offload.optimizer", "cpu"),)
ON_NVME = (("offload.optimizer", "nvme"), ("offload.nvme_allow_ram", True))
ALL_ON_CPU = (*ON_CPU, ("offload.parameters", "cpu"))
ALL_ON_NVME = (*ON_NVME, ("offload.parameters", "nvme"))
SHORT = Case(precision="bf16-true", steps=12, blocks=2, clip="norm", clip_at=0.5, fused=None)


def pair(case: Case) -> tuple[Case, Case]:
    """Return a run with fp32 masters, and the same one with split ones."""
    return case, replace(case, options=(*case.options, SPLIT))


PLACES = [SHORT.at(0), SHORT.at(1), *(replace(SHORT, stage=2, options=options) for options in ((), ON_CPU, ON_NVME))]
SHARDED = [
    replace(SHORT, stage=3, options=options)
    for options in (
        (), ON_CPU, ALL_ON_CPU, ON_NVME, ALL_ON_NVME, (*ON_CPU, *ALL_ON_NVME[1:]), (("offload.parameters", "cpu"),),
    )
]  # fmt: skip
LONG = [replace(case, steps=200) for case in (*PLACES, *SHARDED)]
CROSSED = [
    replace(SHORT.at(2), accumulate=3, clip="value", clip_at=0.01, traits=("frozen", "tied", "uneven")),
    replace(SHORT.at(1), traits=("unused", "unused_here", "buffers"), options=ON_CPU),
    replace(SHORT.at(2), clip=None, accumulate=2, traits=("private", "empty"), options=ON_NVME),
    replace(SHORT.at(2), clip=None, traits=("private",), options=ON_CPU),
    replace(SHORT.at(0), optimizer="two"),
    replace(SHORT.at(1), optimizer="sgd", options=(("precision.moments", "bf16"),)),
    replace(SHORT.at(2), options=(("precision.moments", "int8"), *ON_NVME)),
    replace(SHORT.at(2), options=(("parallel.virtual_ranks", 4),)),
    replace(SHORT.at(2), options=(("sharding.shard_size", 1),)),
    replace(SHORT.at(2), options=(("precision.fp32_modules", ["LayerNorm"]), ("sharding.overlap_step", False))),
    replace(SHORT.at(3), clip=None, traits=("private", "frozen", "tied", "uneven"), options=ALL_ON_CPU),
    replace(SHORT.at(3), accumulate=2, traits=("unused", "buffers"), options=(("precision.moments", "int8"),)),
    replace(SHORT.at(3), clip=None, traits=("private",), options=ALL_ON_NVME),
    replace(SHORT.at(3), options=(("sharding.quantized_gathers", "int8"), ("precision.fp32_modules", ["LayerNorm"]))),
    replace(SHORT.at(3), options=(("parallel.virtual_ranks", 4),)),
    replace(SHORT.at(3), options=(("sharding.shard_size", 1), *ON_CPU)),
]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (2, PLACES[2:]),
        (2, SHARDED[:5]),
        (2, CROSSED[:2]),
        (2, CROSSED[10:12]),
        wide(2, CROSSED),
        wide(1, CROSSED),
        wide(3, [*PLACES, *SHARDED]),
        wide(2, LONG),
    ],
)
def test_split_masters_make_the_bits_of_fp32_masters(world_size: int, cases: list[Case], tmp_path: Path) -> None:
    assert_same_bits(world_size, map(pair, cases), tmp_path)


def in_24_bits(*cases: Case) -> list[Case]:
    return [replace(case, options=(*case.options, IN_24_BITS)) for case in cases]


INT8 = (("precision.moments", "int8"),)


@pytest.mark.parametrize(
    ("world_size", "groups"),
    [
        (2, [in_24_bits(*PLACES, *SHARDED[:3], SHARDED[4])]),
        wide(2, [in_24_bits(*LONG)]),
        wide(3, [in_24_bits(*PLACES, *SHARDED)]),
        wide(1, [in_24_bits(*PLACES, *SHARDED)]),
        wide(2, [in_24_bits(case, replace(case, options=())) for case in CROSSED[1:4]]),
        wide(2, [in_24_bits(*(replace(case, options=(*case.options, *INT8)) for case in (PLACES[3], *SHARDED[:4])))]),
    ],
)
def test_masters_of_24_bits_have_the_same_bits_everywhere(
    world_size: int, groups: list[list[Case]], tmp_path: Path
) -> None:
    assert_same_bits(world_size, groups, tmp_path)


BEGIN_IN_BACKWARD = replace(SHORT, clip=None, traits=("private", "uneven"))


@pytest.mark.parametrize("masters", [IN_24_BITS, wide(SPLIT), wide(("precision.master_weights", True))])
def test_updates_in_backward_have_the_bits_of_those_after_it(masters: tuple[str, Any], tmp_path: Path) -> None:
    late, early = ("sharding.overlap_step", False), ("sharding.overlap_step", "backward")
    groups = [
        [replace(BEGIN_IN_BACKWARD, stage=stage, options=(*options, *INT8, masters, when)) for when in (late, early)]
        for stage, options in ((1, ()), (2, ()), (2, ON_CPU), (3, ()), (3, ALL_ON_CPU))
    ]
    assert_same_bits(2, groups, tmp_path)


class Weighed(PrivateNet):
    """Notes the bytes of gradients after each step."""

    def on_train_batch_end(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        strategy: Any = self.trainer.strategy
        self.held = strategy.memory_bytes()["gradients"]


def gradients_held(rank: int, world_size: int, cases: list[Case]) -> list[int]:
    """Return the bytes of gradients that are left after the last step of each case. Collective."""
    quiet()
    found = []
    for case in cases:
        net = Weighed(case)
        trainer_of(case, world_size).fit(net, loader(case, world_size))
        found.append(net.held)
    return found


def test_updates_in_backward_leave_no_gradients_unless_they_are_clipped() -> None:
    case = replace(BEGIN_IN_BACKWARD.at(2), steps=3, options=(IN_24_BITS, ("sharding.overlap_step", "backward")))
    cases = [case, replace(case, clip="norm", clip_at=0.5), replace(case, options=(IN_24_BITS,)), case.at(3)]
    for freed, clipped, late, sharded in spawn(gradients_held, 2, cases, init_process_group=False, timeout_s=200):
        assert freed == sharded == 0
        assert clipped == late > 0


def test_a_checkpoint_of_24_bits_goes_on_in_24_bits_elsewhere(tmp_path: Path) -> None:
    case = replace(SHORT, steps=8)
    full, on_cpu, on_drive = in_24_bits(case.at(2), replace(case, stage=3, options=ALL_ON_CPU),
                                        placed(replace(case, stage=3, options=ALL_ON_NVME), tmp_path))  # fmt: skip
    folder = replace(on_cpu, options=(*on_cpu.options, ("checkpoint", "sharded")))
    changes = {
        "to stage 3": (full, on_cpu),
        "from a drive to stage 2": (on_drive, full),
        "from a folder to a drive": (folder, on_drive),
    }
    for found in spawn(changed_in_between, 2, tmp_path, full, changes, init_process_group=False, timeout_s=300):
        assert all(found.values()), found


class Resumed(Net):
    """Keeps the masters with which it goes on."""

    def on_train_start(self) -> None:
        strategy: Any = self.trainer.strategy
        self.masters = {name: value.clone() for name, value in strategy.full_weights(dtype=torch.float32)}


def masters_after_loading(rank: int, world_size: int, path: str, saves: Case, loads: list[Case]) -> list[Any]:
    """Save with one case, and return the masters that each of the others loads. Collective."""
    quiet()
    trainer_of(saves, world_size, callbacks=[SaveOnce(path)]).fit(Net(saves), loader(saves, world_size))
    found: list[Any] = []
    for case in loads:
        net = Resumed(case)
        trainer_of(case, world_size).fit(net, loader(case, world_size), ckpt_path=path)
        found.append(net.masters)
    return found


def test_masters_are_loaded_by_any_format_and_rounded_to_24_bits_only_by_that_one(tmp_path: Path) -> None:
    fp32, divided = pair(replace(SHORT.at(2), steps=4))
    short, sharded = in_24_bits(fp32, replace(fp32, stage=3, options=ALL_ON_CPU))
    path = str(tmp_path / "fp32.ckpt")
    for full, halves, *rounded in spawn(
        masters_after_loading, 2, path, fp32, [fp32, divided, short, sharded], init_process_group=False, timeout_s=200
    ):
        for name, value in full.items():
            assert torch.equal(halves[name], value)
            for found in rounded:
                assert torch.equal(found[name].view(-1), split(value.view(-1), "24").join())
        assert any(not torch.equal(rounded[0][name], value) for name, value in full.items())


def test_a_checkpoint_goes_from_split_masters_to_fp32_ones_and_back(tmp_path: Path) -> None:
    case = replace(SHORT, steps=8)
    full, divided = pair(case.at(2))
    drive = placed(replace(divided, options=(*divided.options, *ON_NVME)), tmp_path)
    split3 = replace(divided, stage=3)
    changes = {
        "split, then not": (divided, full),
        "fp32, then split": (case.at(1), divided),
        "fp32 at stage 3, then on a drive": (case.at(3), drive),
        "split at stage 3, then not": (split3, full),
        "from a drive to a folder": (replace(drive, options=(*drive.options, ("checkpoint", "sharded"))), full),
    }
    for found in spawn(changed_in_between, 2, tmp_path, full, changes, init_process_group=False, timeout_s=300):
        assert all(found.values()), found


class Unfreezing(Net):
    """Trains its first block from the sixth batch on."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.blocks[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.blocks[0].requires_grad_(batch_idx >= 5)


def averaged(rank: int, world_size: int, cases: list[Case]) -> list[Any]:
    """Return the losses of each case, and its averaged weights, which are validated and saved in fp32. Collective."""
    quiet()
    found: list[Any] = []
    for case in cases:
        net, average = Unfreezing(case), ShardedEMA(0.5)
        trainer = trainer_of(case, world_size, callbacks=[average])
        trainer.fit(net, loader(case, world_size))
        masters = [value.double().sum().item() for _, value in trainer.strategy.full_weights(dtype=torch.float32)]
        found.append((net.result.losses, masters, [value.double().sum().item() for value in net.state_dict().values()]))
    return found


@pytest.mark.parametrize(
    "case",
    [replace(SHORT.at(2), options=ON_CPU), SHARDED[0], *map(wide, (PLACES[2], PLACES[4], *SHARDED[1:]))],
    ids=lambda case: f"{case.stage} {dict(case.options)}",
)
def test_unfrozen_and_averaged_weights_are_those_of_fp32_masters(case: Case, tmp_path: Path) -> None:
    cases = [placed(case, tmp_path) for case in pair(case)]
    for expected, found in spawn(averaged, 2, cases, init_process_group=False, timeout_s=200):
        assert found == expected


class Writing(Net):
    """Sets some elements of its weights after the fourth step."""

    announced = True

    def on_train_batch_end(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.trainer.global_step != 4:
            return
        strategy: Any = self.trainer.strategy
        with strategy.gathered_parameters(modify=True) if self.announced else nullcontext(), torch.no_grad():
            self.head.weight[::2].clamp_(-0.05, 0.05)
            self.emb.weight.data = self.emb.weight.data.roll(1, 1)


class WritingTwice(Writing):
    """The first write is in place, the second one to the same buffer through ``p.data``."""

    def on_train_batch_end(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.trainer.global_step == 4:
            with torch.no_grad():
                self.blocks[0].up.weight.mul_(0.99)
            self.blocks[0].down.weight.data.mul_(1.05)


def written(rank: int, world_size: int, cases: list[Case], announced: bool, kind: type[Writing] = Writing) -> list[Any]:
    """Return the losses of each case with writes to its weights, or the error. Collective."""
    quiet()
    found: list[Any] = []
    for case in cases:
        net = kind(case)
        net.announced = announced
        try:
            trainer_of(case, world_size).fit(net, loader(case, world_size))
        except StateError as error:
            found.append(str(error))
        else:
            found.append(net.result.losses)
    return found


def test_announced_writes_change_only_what_they_write_and_others_are_refused(tmp_path: Path) -> None:
    cases = [*pair(SHORT.at(1)), *(placed(case, tmp_path) for case in pair(replace(SHORT, stage=2, options=ON_NVME)))]
    for found in spawn(written, 2, cases, True, init_process_group=False, timeout_s=200):
        assert found[0] == found[1]
        assert found[2] == found[3]
    for kind in (Writing, WritingTwice):
        for (error,) in spawn(written, 2, cases[1:2], False, kind, init_process_group=False, timeout_s=200):
            assert "cannot tell which elements have changed. Write to it inside" in error


@pytest.mark.parametrize("announced", [False, wide(True)])
def test_at_stage_3_all_writes_are_those_to_fp32_masters(announced: bool, tmp_path: Path) -> None:
    cases = [placed(each, tmp_path) for case in (SHARDED[0], SHARDED[2], SHARDED[4]) for each in pair(case)]
    for found in spawn(written, 2, cases, announced, init_process_group=False, timeout_s=200):
        for expected, ours in zip(found[::2], found[1::2], strict=True):
            assert isinstance(expected, list)
            assert ours == expected


class Through(Net):
    """Halves a weight after the fourth step, by ``means``, and ``announced`` or not."""

    means = "parameter"
    announced = False

    def on_train_start(self) -> None:
        weight = self.head.weight
        self.kept = {"kept data": lambda: weight.data.view(-1), "kept view": weight.detach}.get(self.means, int)()

    def on_train_batch_end(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.trainer.global_step != 4:
            return
        strategy: Any = self.trainer.strategy
        early = self.head.weight.data if self.means == "data of before" else None
        with strategy.gathered_parameters(modify=True) if self.announced else nullcontext(), torch.no_grad():
            target: Any = {"parameter": self.head.weight, "data of before": early}.get(self.means, self.kept)
            (self.head.weight.data if self.means == "data" else target).mul_(0.37)


def written_through(rank: int, world_size: int, cases: list[Case], means: list[tuple[str, bool]]) -> list[list[Any]]:
    """Return the losses of each case with writes of each kind, or the error. Collective."""
    quiet()
    found: list[list[Any]] = []
    for case in cases:
        found.append([])
        for name, announced in means:
            net = Through(case)
            net.means, net.announced = name, announced
            try:
                trainer_of(case, world_size).fit(net, loader(case, world_size))
            except StateError as error:
                found[-1].append(str(error))
            else:
                found[-1].append(net.result.losses)
    return found


@pytest.mark.parametrize("stage", [2, wide(0), wide(1)])
def test_writes_through_views_that_no_version_counts_are_those_to_parameters(stage: int) -> None:
    cases = pair(replace(SHORT.at(stage), steps=7))
    means = [("parameter", True), ("data", False), ("data", True), ("data of before", True)]
    means += [("kept data", False), ("kept data", True), ("kept view", False)]
    for ours in spawn(written_through, 2, cases, means, init_process_group=False, timeout_s=200):
        for direct, *others in ours:
            assert isinstance(direct, list)
            assert all(other == direct for other in others)
        assert ours[0] == ours[1]


def test_with_offload_a_write_through_a_view_of_before_the_step_is_an_error() -> None:
    cases = pair(replace(SHORT.at(2), steps=7, options=ON_CPU))
    means = [("kept data", False), ("kept view", False)]
    for ours in spawn(written_through, 2, cases, means, init_process_group=False, timeout_s=200):
        for error in (*ours[0], *ours[1]):
            assert "that was kept through a step was written to" in error


class Saving(Net):
    """Writes to weights while a save in the background has not read them yet."""

    folder = ""

    def on_train_batch_end(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        strategy: Any = self.trainer.strategy
        if self.trainer.global_step != 4:
            return
        self.trainer.save_checkpoint(self.folder)
        with strategy.gathered_parameters(modify=True), torch.no_grad():
            self.head.weight.mul_(0.37)


@pytest.mark.parametrize(("stage", "options"), [(2, ON_CPU), wide(2, ON_NVME), (3, ALL_ON_CPU), wide(3, ALL_ON_NVME)])
def test_a_background_save_has_the_weights_of_before_a_write(stage: int, options: Any, tmp_path: Path) -> None:
    options = (*options, ("checkpoint.background", True), ("checkpoint.format", "sharded"))
    saved: list[dict[str, Any]] = []
    for case in pair(replace(SHORT.at(stage), steps=6, options=options)):
        net = Saving(case)
        net.folder = str(tmp_path / f"{len(saved)}.ckpt")
        with slow_writes(0.02):
            trainer_of(placed(case, tmp_path), 1).fit(net, loader(case, 1))
        reader = Reader(net.folder, read_manifest(net.folder))
        weights = {p: m for p in reader.under("model") if (m := reader.tensor_metadata(p)) is not None}
        saved.append({str(p): read_range(reader, p, 0, m.size.numel()) for p, m in weights.items()})
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(value, saved[1][name]) for name, value in saved[0].items())


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"stage": 3, "offload.optimizer": "cpu", "offload.step_on": "cpu"}, "Leave step_on out"),
        ({"stage": 2, "offload.optimizer": "cpu", "offload.delay_after": 5}, "late updates would change"),
        ({"stage": 2, "offload.optimizer": "cpu", "offload.step_on": "cpu"}, "Leave step_on out"),
    ],
)
def test_options_without_a_weight_to_complete_are_refused(options: dict[str, Any], rule: str) -> None:
    for form in ("split", "24"):
        with pytest.raises(ConfigError, match=f"'{form}'.*{rule}"):
            ZeROStrategy(**nested({**options, "precision.master_weights": form}))


def test_24_is_read_as_yaml_writes_it_and_a_near_name_is_suggested() -> None:
    assert PrecisionConfig(master_weights=24).split_masters == "24"
    with pytest.raises(ConfigError, match=r"must be .* 'split' or '24' or 24\. Set precision.master_weights='split'"):
        PrecisionConfig(master_weights="spilt")  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-true"])
def test_precisions_without_bf16_weights_are_refused(precision: str) -> None:
    with pytest.raises(ConfigError, match=f"precision='{precision}'.*Set precision='bf16-true'"):
        resolve_precision(precision, master_weights="split")


BYTES = re.findall(r"\| `(True|split|24)` \| `(\w+)` \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|", DOCS.read_text())


@pytest.mark.parametrize("row", BYTES, ids=" ".join)
def test_bytes_per_parameter_are_those_of_the_documents(row: tuple[str, ...]) -> None:
    master_weights, moments, *documented = row
    model = network(256)
    given: Any = {"master_weights": True if master_weights == "True" else master_weights, "moments": moments}
    precision = PrecisionConfig(**given)
    engine = engine_on(model, [adamw(model.parameters())], stage=2, trainer_precision="bf16-true", precision=precision)
    steps(engine, 1)
    live, numel = engine.memory_bytes(), sum(flat.stepped_numel for flat in engine.flats)
    kinds = [live[kind] / numel for kind in ("parameters", "masters", "optimizer")]
    assert [float(value) for value in documented] == [round(value, 3) for value in (*kinds, sum(kinds))]
    close_engines()


def test_every_format_is_in_the_documents() -> None:
    assert len(BYTES) == 9


@pytest.mark.parametrize(("stage", "tier"), [(2, None), (2, "cpu"), (3, None), (3, "cpu")])
def test_memory_is_what_the_plan_says(stage: Any, tier: Any) -> None:
    found = {}
    for master_weights in (True, "split", "24"):
        model = network()
        engine = engine_on(
            model,
            [adamw(model.parameters())],
            stage=stage,
            trainer_precision="bf16-true",
            precision=PrecisionConfig(master_weights=master_weights),
            offload=OffloadConfig(optimizer=tier),
        )
        steps(engine, 2)
        numel = sum(flat.stepped_numel for flat in engine.flats)
        planned, live = engine.plan.state_bytes()["masters"], engine.memory_bytes()["masters"]
        assert live == planned
        found[master_weights] = live / numel
        close_engines()
    assert found == {True: 4.0, "split": 2.125, "24": 1.0}


class Elsewhere(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), amsgrad=True)


def test_an_optimizer_without_a_fused_update_is_refused() -> None:
    _, case = pair(SHORT.at(2))
    with pytest.raises(PlanError, match="master_weights='split' with AdamW, but it needs a fused update"):
        trainer_of(case, 1).fit(Elsewhere(case), loader(case, 1))
