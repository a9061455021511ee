"""An island that diverges, or sends something else, does not spoil the others' weights."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from ls_strategy import StateError, ZeROStrategy
from ls_strategy.extras.islands import outer, wire
from tests.dist.islands import diloco, hub, on_islands
from tests.dist.ranks import Net, batches, trainer_of

pytestmark = pytest.mark.dist

STEPS, EVERY = 12, 2
FAULTS = ("short", "nan", "inf", "huge", "diverges")


class WithMoments(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Diverges(WithMoments):
    """Its loss is not finite in one step, and so are its weights and moments from then on."""

    def training_step(self, batch: Any, i: int) -> Any:
        loss = super().training_step(batch, i)
        return loss * float("nan") if self.global_step == 3 else loss


def send(fault: str) -> None:
    """In its second round, send something else than the pseudo-gradient."""
    real, rounds = outer.Outer.pseudo_gradient, [0]
    values = {"nan": float("nan"), "inf": float("inf"), "huge": 1e38}

    def pseudo_gradient(self: Any, engine: Any, places: Any) -> bytes:
        data = real(self, engine, places)
        rounds[0] += 1
        if rounds[0] != 2:
            return data
        if fault == "short":
            return data[:-8]
        return wire.encode(torch.full((self._numel(places),), values[fault]), self._form)

    outer.Outer.pseudo_gradient = pseudo_gradient  # type: ignore[method-assign]


def faulty(island: int, rank: int, meet: str, fault: str, options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Diverges() if island and fault == "diverges" else WithMoments()
    if island and fault != "diverges":
        send(fault)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = trainer_of(
            ZeROStrategy(stage=2), callbacks=[diloco(meet, options.pop("island", island), every=EVERY, **options)],
            max_steps=STEPS, max_epochs=-1, devices=2,
        )  # fmt: skip
        trainer.fit(module, batches(64))
    weights: Tensor = torch.cat([p.detach().flatten() for p in module.parameters()])
    said = [str(w.message) for w in caught if "DiLoCo" in str(w.message)]
    return {"weights": weights, "said": said}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("fault", "options"),
    [
        *(pytest.param(fault, {}, id=f"{fault}, at once") for fault in FAULTS),
        *(pytest.param(fault, {"delay": 1}, id=f"{fault}, later") for fault in reversed(FAULTS)),
    ],
)
@pytest.mark.sample(2)
def test_a_contribution_that_cannot_be_right_is_left_out_by_name(fault: str, options: dict[str, Any]) -> None:
    with hub() as meet:
        islands = on_islands(2, faulty, meet, fault, options)
    ranks = [rank for island in islands for rank in island]
    assert all(bool(rank["weights"].isfinite().all()) for rank in ranks)
    assert all(torch.equal(rank["weights"], ranks[0]["weights"]) for rank in ranks)
    for island in islands:
        said = " ".join(island[0]["said"])
        assert "without the contribution of island 1, which has sent" in said
        assert "island 0" not in said


def counted() -> list[int]:
    """Return a list that gets the number of contributions of every outer step of this rank."""
    numbers, real = [], outer.Outer.step

    def step(self: Any, places: Any, received: Any) -> float:
        numbers.append(len(received))
        return real(self, places, received)

    outer.Outer.step = step  # type: ignore[method-assign]
    return numbers


def partly(island: int, rank: int, meet: str, options: dict[str, Any]) -> dict[str, Any]:
    numbers = counted()
    if (island, rank) == (1, 1):
        send("nan")
    return {**faulty(0, rank, meet, "", {**options, "island": island}), "counted": numbers}


@pytest.mark.wide
@pytest.mark.parametrize("options", [{}, {"delay": 1}], ids=["at once", "later"])
@pytest.mark.sample(1)
def test_an_island_counts_with_all_its_shards_or_with_none(options: dict[str, Any]) -> None:
    """One of its ranks sends NaN: the shards of the others counted, which is a step of no model."""
    with hub() as meet:
        islands = on_islands(2, partly, meet, options)
    ranks = [rank for island in islands for rank in island]
    assert all(torch.equal(rank["weights"], ranks[0]["weights"]) for rank in ranks)
    numbers = ranks[0]["counted"]
    assert numbers[:3] == [2, 1, 2]
    assert all(rank["counted"] == numbers for rank in ranks)


class Masked(WithMoments):
    """Infinities that are meant, and statistics that one island spoils in one step, without a trace in weights."""

    spoilt = False

    def build(self) -> None:
        super().build()
        self.register_buffer("mask", torch.tensor([0.0, float("-inf"), float("inf")]))
        self.register_buffer("statistics", torch.ones(4))
        self.register_buffer("low", torch.ones(2, dtype=torch.bfloat16))

    def training_step(self, batch: Any, i: int) -> Any:
        if self.spoilt and self.global_step == 3:
            self.statistics[1] = float("nan")
        return super().training_step(batch, i)


def with_buffers(island: int, rank: int, meet: str, options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Masked()
    module.spoilt = (island, rank) == (1, 0 if "fragments" in options else 1)  # rank 0's reach all in the next step
    numbers = counted()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_of(
            2, callbacks=[diloco(meet, island, every=EVERY, **options)], max_steps=STEPS,
            max_epochs=-1, devices=2,
        ).fit(module, batches(64))  # fmt: skip
    weights: Tensor = torch.cat([p.detach().flatten() for p in module.parameters()])
    said = " ".join(str(w.message) for w in caught if "DiLoCo" in str(w.message))
    return {"weights": weights, "buffers": dict(module.named_buffers()), "said": said, "counted": numbers}


@pytest.mark.wide
@pytest.mark.parametrize("options", [{}, {"delay": 1}, {"fragments": 2}], ids=["at once", "later", "fragments"])
@pytest.mark.sample(1)
def test_buffers_that_are_not_finite_do_not_spread_and_a_mask_of_infinities_stays(options: dict[str, Any]) -> None:
    with hub() as meet:
        islands = on_islands(2, with_buffers, meet, options)
    for rank in (rank for island in islands for rank in island):
        assert torch.equal(rank["weights"], islands[0][0]["weights"])
        assert rank["buffers"]["statistics"].tolist() == [1.0] * 4
        assert rank["buffers"]["mask"].tolist() == [0.0, float("-inf"), float("inf")]
        assert rank["counted"].count(1) >= 1
        assert rank["counted"] == islands[0][0]["counted"]
    assert all("island 1, which has sent buffers with values that are not finite" in i[0]["said"] for i in islands)


def given(island: int, rank: int, meet: str, what: str) -> str:
    torch.manual_seed(0)
    module = Masked()
    if island == 0 and what == "buffers":
        module.statistics[0] = float("inf")
    elif island == 0:
        real = outer.Outer.packed
        change = {"nan": lambda data: data[:-4] + b"\x00\x00\xc0\x7f", "short": lambda data: data[:-4]}[what]
        outer.Outer.packed = lambda self: change(real(self))  # type: ignore[method-assign]
    try:
        trainer_of(2, callbacks=[diloco(meet, island, every=EVERY)], max_steps=2, max_epochs=-1).fit(
            module, batches(64)
        )
    except StateError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("nan", "weights or momentum that are not finite"),
        ("short", "bytes of weights and momentum instead of"),
        ("buffers", "buffers that are not finite"),
    ],
)
@pytest.mark.sample(1)
def test_a_state_that_is_none_to_continue_from_is_refused(what: str, text: str) -> None:
    with hub(patience_s=3.0) as meet:
        _, second = on_islands(1, given, meet, what)
    assert "the island that gives this one its state has sent " in second[0]
    assert text in second[0]
