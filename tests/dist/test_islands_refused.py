"""An island that diverges, or sends something else, does not spoil the others' weights."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from ls_strategy import ZeROStrategy
from ls_strategy.islands import outer, wire
from tests.dist.islands import diloco, hub, on_islands
from tests.dist.ranks import Net, batches, trainer_of

pytestmark = pytest.mark.dist

STEPS, EVERY = 12, 2
FAULTS = ("diverges", "nan", "inf", "huge", "short")


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
            ZeROStrategy(stage=2), callbacks=[diloco(meet, island, every=EVERY, **options)], max_steps=STEPS,
            max_epochs=-1, devices=2,
        )  # fmt: skip
        trainer.fit(module, batches(64))
    weights: Tensor = torch.cat([p.detach().flatten() for p in module.parameters()])
    said = [str(w.message) for w in caught if "DiLoCo" in str(w.message)]
    return {"weights": weights, "said": said}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("options", [{}, {"delay": 1}], ids=["at once", "later"])
@pytest.mark.sample(5)
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
