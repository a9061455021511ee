"""`DiLoCo` on two islands of two ranks: against DDP on all ranks, and against plain torch in one process.

One start of the ranks runs all cases, because it costs more than they do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from ls_strategy import ConfigError, PlanError, ZeROStrategy
from ls_strategy.extras.islands import wire
from tests.dist.islands import diloco, hub, in_plain_torch, on_islands
from tests.dist.ranks import OPTIONS, Net, assert_close, assert_equal, batches, fit, trainer_of, weights
from tests.dist.trusted import once

pytestmark = pytest.mark.dist

NUMEL, BATCH, STEPS, EVERY = 96, 2, 17, 5
STREAMING = {"every": 6, "fragments": 2, "delay": 2}
EVERY_STEP = {"every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}


class PlainSgd(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


class Manual(Net):
    manual = True


class Frozen(Net):
    """The first layer does not train."""

    def build(self) -> None:
        super().build()
        self.first.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr, eps=1e-4, fused=True)


class Normed(Net):
    def build(self) -> None:
        super().build()
        self.norm = nn.BatchNorm1d(self.first.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Two(Net):
    """Two optimizers, each for half of the model, that both step in every batch."""

    manual = True

    def configure_optimizers(self) -> Any:
        halves = [*self.first.parameters(), *self.last.parameters()], self.blocks.parameters()
        return [torch.optim.AdamW(half, lr=self.lr, eps=1e-4, fused=True) for half in halves]

    def training_step(self, batch: Any, i: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(self.noted_loss(batch))
        for optimizer in optimizers:
            optimizer.step()


CASES: dict[str, tuple[type[Net], Any, dict[str, Any], dict[str, Any]]] = {
    "DDP, stage 1": (PlainSgd, 1, EVERY_STEP, {}),
    "DDP, stage 3": (PlainSgd, 3, EVERY_STEP, {}),
    **{f"stage {stage}": (Net, stage, {"every": EVERY}, {}) for stage in range(4)},
    "offload": (Net, OPTIONS["zero3_offload"], {"every": EVERY}, {}),
    "one island at stage 1, one at stage 3": (Net, (1, 3), {"every": EVERY}, {}),
    "streaming": (Net, 2, STREAMING, {}),
    "streaming, stage 3": (Net, 3, STREAMING, {}),
    "manual": (Manual, 2, {"every": EVERY}, {}),
    "two optimizers": (Two, 2, {"every": 2 * EVERY}, {"max_steps": 2 * STEPS}),
    "accumulation": (PlainSgd, 2, {"every": EVERY}, {"accumulate_grad_batches": 2}),
    "virtual ranks": (Net, {"stage": 2, "parallel": {"virtual_ranks": 4}}, {"every": EVERY}, {}),
    "frozen": (Frozen, 2, {"every": EVERY}, {}),
    "batch norm": (Normed, 3, {"every": EVERY}, {}),
    "bf16": (Net, 1, {"every": EVERY, "wire": "bf16"}, {}),
    "int8": (Net, 1, {"every": EVERY, "wire": "int8"}, {}),
    "int4": (Net, 1, {"every": EVERY, "wire": "int4"}, {}),
    "bf16-true": (Net, 2, {"every": EVERY}, {"precision": "bf16-true"}),
}


class Sent(Callback):
    """Remembers what `DiLoCo` has sent before its end, and the rounds."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        callback, engine = trainer.callbacks[0], trainer.strategy.engine
        names = {id(p): n for n, p in pl_module.named_parameters()}
        self.found = {
            "sent": callback.sent_bytes,
            "received": callback.received_bytes,
            "rounds": callback.round,
            "units": [{names[id(p)] for f in u.flats for p in f.params} for u in engine.units],
            "owned_of": [sum(f.owned[1] - f.owned[0] for f in u.trainable_flats) for u in engine.units],
            "owned": sum(f.owned[1] - f.owned[0] for f in engine.stepper.flats_that_train),
        }


def strategy_of(given: Any, island: int) -> Any:
    if isinstance(given, tuple):
        given = given[island]
    if not isinstance(given, dict):
        return given
    options = {"sharding.min_unit_numel": 0, **given}
    nested: dict[str, Any] = {}
    for name, value in options.items():
        group, _, field = name.rpartition(".")
        if group:
            nested.setdefault(group, {})[field] = value
        else:
            nested[name] = value
    return ZeROStrategy(**nested)


def train(island: int, rank: int, meet: str, names: list[str]) -> dict[str, dict[str, Any]]:
    results = {}
    for name in names:
        kind, strategy, options, trainer_options = CASES[name]
        module, sent = kind(), Sent()
        trainer = trainer_of(
            strategy_of(strategy, island),
            callbacks=[sent, diloco(meet, island, **options)][::-1],
            **{"max_steps": STEPS, "max_epochs": -1, **trainer_options},
        )
        trainer.fit(module, batches(NUMEL, BATCH))
        results[name] = {"weights": weights(module), "losses": module.losses, **sent.found}
    return results


FEW = ["DDP, stage 3", "stage 2", "streaming, stage 3"]
"""In the default run."""


def by_name(names: Iterable[str]) -> list[Any]:
    """Parameters of a test: a few, and the others wide."""
    return [name if name in FEW else pytest.param(name, marks=pytest.mark.wide) for name in names]


class Runs:
    """What the ranks of a case have returned, ``[island][rank]``. Cases that tests ask for first bring their group."""

    def __init__(self) -> None:
        self._found: dict[str, list[list[dict[str, Any]]]] = {}

    def __call__(self, name: str) -> list[list[dict[str, Any]]]:
        if name not in self._found:
            group = [each for each in CASES if (each in FEW) == (name in FEW)]
            with hub() as meet:
                islands = on_islands(2, train, meet, group, timeout_s=170)
            for each in group:
                self._found[each] = [[rank[each] for rank in ranks] for ranks in islands]
        return self._found[name]


@pytest.fixture(scope="module")
def runs() -> Runs:
    return Runs()


def ddp(rank: int, world_size: int) -> dict[str, Tensor]:
    module = PlainSgd()
    fit("ddp", module, batches(NUMEL, BATCH), max_steps=STEPS, max_epochs=-1)
    return weights(module)


def trusted(kind: type[Net] = Net, *, batch: int = BATCH, ranks: int = 2, every: int = EVERY, **options: Any) -> Any:
    return in_plain_torch(kind(), STEPS, numel=NUMEL, batch=batch, ranks=ranks, every=every, **options)


@pytest.mark.parametrize("name", by_name(["DDP, stage 1", "DDP, stage 3"]))
def test_with_an_exchange_in_every_step_it_is_ddp_on_all_ranks(runs: Runs, name: str) -> None:
    assert_close(runs(name)[0][0]["weights"], once(ddp, 4)[0], name)


@pytest.mark.parametrize("name", by_name(CASES))
def test_all_ranks_of_all_islands_end_with_the_same_bits(runs: Runs, name: str) -> None:
    islands = runs(name)
    for ranks in islands:
        for each in ranks:
            for key, value in islands[0][0]["weights"].items():
                if "running" in key and each is not ranks[0]:
                    continue  # as under DDP, those of an island's rank 0 count
                assert_equal(each["weights"][key], value, f"{name}: {key}")
    assert islands[0][0]["losses"] != islands[1][0]["losses"], "islands train on the same data"


@pytest.mark.parametrize(
    "name",
    by_name([*(f"stage {stage}" for stage in range(4)), "offload", "one island at stage 1, one at stage 3", "manual",
             "two optimizers"]),
)  # fmt: skip
def test_the_outer_step_is_that_of_torch(runs: Runs, name: str) -> None:
    assert_close(runs(name)[0][0]["weights"], trusted()[0], name)


@pytest.mark.wide
def test_accumulated_batches_are_one_step(runs: Runs) -> None:
    assert_close(runs("accumulation")[0][0]["weights"], trusted(PlainSgd, batch=2 * BATCH)[0], "accumulation")


@pytest.mark.wide
def test_virtual_ranks_are_ranks_of_their_island(runs: Runs) -> None:
    assert_close(runs("virtual ranks")[0][0]["weights"], trusted(ranks=4)[0], "virtual ranks")


@pytest.mark.parametrize("name", by_name(["streaming", "streaming, stage 3"]))
def test_fragments_take_turns_and_are_used_later(runs: Runs, name: str) -> None:
    run = runs(name)[0][0]
    fragments = [set().union(*run["units"][first::2]) for first in (0, 1)]
    expected = trusted(every=6, fragments=fragments, delay=2, mixing=0.5)
    assert_close(run["weights"], expected[0], name)


@pytest.mark.wide
def test_frozen_parameters_stay_and_are_not_sent(runs: Runs) -> None:
    run, before = runs("frozen")[0][0], Frozen()
    assert_equal(run["weights"]["first.weight"], before.first.weight.detach(), "first.weight")
    expected = trusted(Frozen)[0]
    assert_close({n: run["weights"][n] for n in expected}, expected, "frozen")


@pytest.mark.parametrize(
    "name", by_name(["stage 0", "stage 1", "stage 2", "stage 3", "offload", "frozen", "bf16", "int8", "int4"])
)
def test_a_rank_sends_the_bytes_of_its_shards_in_every_round(runs: Runs, name: str) -> None:
    form = name if name in ("bf16", "int8", "int4") else "exact"
    islands = runs(name)
    for ranks in islands:
        for run in ranks:
            state = (
                0 if ranks is islands[1] else 8 * run["owned"]
            )  # global weights and momentum, once, to the other one
            assert run["rounds"] == STEPS // EVERY + 1
            assert run["sent"] == run["rounds"] * wire.nbytes(run["owned"], form) + state
            received = 8 * run["owned"] if ranks is islands[1] else 0
            assert run["received"] == run["rounds"] * wire.nbytes(run["owned"], form) + received


@pytest.mark.parametrize("name", by_name(["streaming", "streaming, stage 3"]))
def test_a_rank_sends_the_bytes_of_its_shards_of_the_fragment(runs: Runs, name: str) -> None:
    for run in runs(name)[1]:
        first, second = (4 * sum(run["owned_of"][fragment::2]) for fragment in (0, 1))
        assert run["rounds"] == 6  # after steps 3, 6, 9, 12 and 15, and everything at the end
        assert run["sent"] == 3 * first + 2 * second + (first + second)


@pytest.mark.wide
@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
def test_rounded_pseudo_gradients_come_near(runs: Runs, form: str) -> None:
    limit = {"bf16": 2e-3, "int8": 5e-3, "int4": 8e-2}[form]
    exact = trusted()[0]
    assert_close(runs(form)[0][0]["weights"], exact, form, limit)
    assert any(not torch.equal(runs(form)[0][0]["weights"][n], exact[n]) for n in exact)


# --- what does not fit ------------------------------------------------------------------------------------------------


class Other(Net):
    def build(self) -> None:
        super().build()
        self.extra = nn.Linear(1, 1)


def run_wrongly(island: int, rank: int, meet: str, folder: str) -> dict[str, str]:
    errors = {}
    for name, (kind, options, trainer_options, loader) in wrong(island, rank, folder).items():
        trainer = trainer_of(
            1, max_steps=4, max_epochs=-1, callbacks=[diloco(meet, island, **options)], **trainer_options
        )
        try:
            trainer.fit(kind(), loader)
            errors[name] = "none"
        except (ConfigError, PlanError) as error:
            errors[name] = str(error)
    return errors


def wrong(island: int, rank: int, folder: str) -> dict[str, tuple[type[Net], dict[str, Any], dict[str, Any], Any]]:
    data = batches(NUMEL, BATCH)
    sampler = torch.utils.data.DistributedSampler(data.dataset, num_replicas=2, rank=rank)  # type: ignore[arg-type]
    per_rank = torch.utils.data.DataLoader(data.dataset, batch_size=BATCH, sampler=sampler)
    return {
        "options": (Net, {"every": 3 + island}, {}, data),
        "model": (Other if island else Net, {"every": 3}, {}, data),
        "units": (Net, {"every": 7, "fragments": 7}, {}, data),
        "replicas": (Net, {"every": 3}, {}, per_rank),
        "data": (Net, {"every": 3}, {"use_distributed_sampler": False}, data),
        "folder": (Net, {"every": 3}, {"default_root_dir": folder, "enable_checkpointing": True}, data),
        "frozen": (Seeded if island else Frozen, {"every": 3}, {}, data),
    }


class Seeded(Frozen):
    def build(self) -> None:
        torch.manual_seed(5)
        super().build()


@pytest.mark.wide
def test_islands_that_do_not_fit_are_errors_on_every_rank_with_the_cure(tmp_path: Any) -> None:
    with hub() as meet:
        found = on_islands(2, run_wrongly, meet, str(tmp_path))
    messages = {
        "options": "every is 3 on island 0 and 4 on island 1. Start all islands with the same model",
        "model": "parameters that train is ",
        "units": "fragments=7 for a model with 5 units",
        "replicas": "DistributedSampler for 2 ranks, but 2 islands read from the data with 2 ranks each",
        "data": "same first batches on island 0 and island 1",
        "folder": "same folder on island 0 and island 1",
        "frozen": "frozen parameters is ",
    }
    for island, ranks in enumerate(found):
        for rank, errors in enumerate(ranks):
            for name, text in messages.items():
                assert text in errors[name], f"{name} on rank {rank} of island {island}: {errors[name]}"
    assert "num_replicas=4 and rank=3" in found[1][1]["replicas"]


def plain(island: int, rank: int, meet: str) -> str:
    try:
        trainer_of("ddp", callbacks=[diloco(meet, island)]).fit(Net(), batches())
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.wide
def test_another_strategy_is_an_error() -> None:
    assert "DiLoCo reads shards" in on_islands(1, plain, "127.0.0.1:1", islands=1)[0][0]
