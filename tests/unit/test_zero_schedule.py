"""When updates begin, and when the forward gets the new parameters."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from ls_strategy.config import OffloadConfig, ShardingConfig
from ls_strategy.engine import Engine
from ls_strategy.errors import StateError
from ls_strategy.zero.flat.states import UpdateState
from ls_strategy.zero.step import schedule
from tests.unit.one_rank import ShelfTier, adamw, backward, engine_on, network, small, steps, weights

INLINE = ShardingConfig(min_unit_numel=1, overlap_step=False)


def take(engine: Engine) -> None:
    engine.step(0, engine.optimizers[0].sharded.optimizer.step)
    engine.zero_grad(0)


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"stage": 1, "offload": "cpu"}, True),
        ({"stage": 3, "offload": "cpu"}, True),
        ({"stage": 1}, False),
        ({"stage": 1, "offload": OffloadConfig(optimizer="cpu", delay_after=1)}, False),
        ({"stage": 3, "offload": OffloadConfig(parameters="cpu")}, False),
        ({"stage": 1, "offload": "cpu", "halves": True}, False),
    ],
)
def test_only_offloaded_states_of_one_optimizer_are_updated_early(options: dict[str, Any], allowed: bool) -> None:
    model = network()
    parts = [model[:1], model[1:]] if options.pop("halves", False) else [model]
    engine = engine_on(model, [adamw(part.parameters()) for part in parts], **options)
    assert engine.schedule.allows_early is allowed


def test_updates_are_submitted_in_the_order_of_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    _model, engine = small(stage=3, offload="cpu", sharding=INLINE)
    order: list[str] = []
    submit = engine.offload.stream.submit

    def recorded(jobs: Any) -> Any:
        order.append(jobs[0]._update.flat.name)
        return submit(jobs)

    monkeypatch.setattr(engine.offload.stream, "submit", recorded)
    backward(engine, 0)
    take(engine)
    assert order == [flat.name for flat in engine.flats]


@pytest.mark.parametrize("stage", [1, 3])
def test_early_updates_give_the_same_bits(stage: int) -> None:
    _model, late = small(stage=stage, offload="cpu")
    _other, early = small(stage=stage, offload="cpu")
    early.private_gradients = late.private_gradients = True
    early.early_step = True
    expected = steps(late)
    begun: list[bool] = []
    found = steps(
        early, between=lambda engine: begun.append(any(f.update is UpdateState.UPDATED_EARLY for f in engine.flats))
    )
    assert begun == [False, True, True], "the first step shows whether hooks read gradients"
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_delayed_update_comes_one_step_later() -> None:
    _model, engine = small(stage=1, offload=OffloadConfig(optimizer="cpu", delay_after=1))
    engine.gatherer.overlap = True
    before = weights(engine)
    backward(engine, 0)
    take(engine)
    first = [p.detach().clone() for p in engine.model.parameters()]
    assert not any(map(torch.equal, first, before)), "step 1 is not delayed"
    backward(engine, 1)
    take(engine)
    in_flight = [p.detach().clone() for p in engine.model.parameters()]
    assert all(map(torch.equal, in_flight, first)), "step 2 is in flight"
    engine.wait()
    assert not any(map(torch.equal, weights(engine), first))


class Late:
    """A job before all updates of a step, which lets them go on half a second after it was made."""

    def __init__(self) -> None:
        self._opens_at = time.monotonic() + 0.5

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._opens_at

    def read(self) -> None: ...

    def update(self) -> None:
        while not self.is_over:
            time.sleep(0.01)

    def write(self) -> None: ...


def overlapping(**options: Any) -> Engine:
    """Return an engine whose next forward waits for new weights unit by unit, after one step."""
    model, engine = small(**options)
    engine.optimizers[0].sharded.optimizer.model_of_the_test = model  # type: ignore[attr-defined]
    engine.gatherer.overlap = True
    steps(engine, 1)
    return engine


def test_a_late_update_reads_the_gradients_of_its_own_step(shelves: list[ShelfTier]) -> None:
    """Although the next backward has new ones for the same place on the drive: they wait for the update."""

    def train(*, late: bool) -> list[torch.Tensor]:
        engine = overlapping(stage=1, offload=OffloadConfig(optimizer="nvme", delay_after=1))
        backward(engine, 1)
        engine.offload.stream.submit([Late()] if late else [])
        take(engine)
        backward(engine, 2)
        take(engine)
        engine.wait()
        return weights(engine)

    torch.testing.assert_close(train(late=True), train(late=False), rtol=0, atol=0)


@pytest.mark.parametrize("stage", [1, 3])
def test_who_waits_for_the_engine_finds_updated_masters(stage: int) -> None:
    engine = overlapping(stage=stage, offload="cpu")
    before = [flat.master.detach().clone() for flat in engine.flats]
    backward(engine, 1)
    engine.offload.stream.submit([Late()])
    take(engine)
    assert all(torch.equal(flat.master, b) for flat, b in zip(engine.flats, before, strict=True)), "in flight"
    engine.wait()
    assert not any(torch.equal(flat.master, b) for flat, b in zip(engine.flats, before, strict=True))


def test_the_norm_of_gradients_that_an_early_update_has_taken_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update sums their squares while it runs, and they are in no memory afterwards."""
    monkeypatch.setattr(schedule, "_EARLY_UPDATES", 10)  # else backward waits

    def norm(*, early: bool) -> torch.Tensor:
        engine = overlapping(stage=1, offload="cpu")
        engine.private_gradients, engine.early_step = True, early
        steps(engine, 1, first=1)
        engine.offload.stream.submit([Late()] if early else [])
        backward(engine, 2)
        assert any(f.update is UpdateState.UPDATED_EARLY for f in engine.flats) is early
        return engine.grad_norm()

    assert norm(early=True) == norm(early=False) > 0


def test_hooks_of_the_user_after_the_step_find_updated_masters() -> None:
    engine = overlapping(stage=1, offload="cpu")
    before, found = [flat.master.detach().clone() for flat in engine.flats], []

    def look(*_: Any) -> None:
        found.extend(flat.master.detach().clone() for flat in engine.flats)

    engine.optimizers[0].sharded.optimizer.register_step_post_hook(look)
    backward(engine, 1)
    engine.offload.stream.submit([Late()])
    take(engine)
    assert len(found) == len(before)
    assert not any(map(torch.equal, found, before))


def test_a_failed_update_is_raised_and_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _model, engine = small(stage=1, offload="cpu")
    steps(engine, 1)
    backward(engine, 1)

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("lost")

    monkeypatch.setattr("ls_strategy.ops.update.adamw_", fails)
    with pytest.raises(OSError, match="lost"):
        take(engine)
    with pytest.raises(StateError, match=r"OSError: lost.*do not belong to one step"):
        engine.check_complete()
