"""The events of a step: who is called with what, in which order, and that what is off is not called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ls_strategy.access.offload import offload_states
from ls_strategy.engine import Engine
from ls_strategy.errors import StateError
from ls_strategy.zero.events import Event, StepEvents
from tests.unit.one_rank import adamw, backward, engine_on, network, small

EVENTS = [name for name, value in vars(StepEvents()).items() if isinstance(value, Event)]


def subscribers(engine: Engine) -> dict[str, list[str]]:
    """The names of the functions that each event calls."""
    return {
        name: [call.__qualname__ for call in getattr(engine.events, name)._subscribers]  # type: ignore[attr-defined]
        for name in EVENTS
    }


def notes(engine: Engine) -> list[Any]:
    """Subscribe to everything, as a feature of another package would; what has happened so far."""
    seen: list[Any] = []
    for name in EVENTS:
        getattr(engine.events, name).subscribe(lambda *given, name=name: seen.append((name, *given)))
    return seen


def test_subscribers_are_called_in_the_order_in_which_they_came() -> None:
    event, seen = Event(), []
    ends = [event.subscribe(lambda value, n=n: seen.append((n, value))) for n in range(3)]
    event("a")
    ends[1]()
    event.subscribe(lambda value: seen.append(("last", value)))
    event("b")
    assert seen == [(0, "a"), (1, "a"), (2, "a"), (0, "b"), (2, "b"), ("last", "b")]


def test_who_leaves_or_comes_meanwhile_counts_from_the_next_event() -> None:
    event, seen = Event(), []

    def first() -> None:
        seen.append("first")
        leave()
        event.subscribe(lambda: seen.append("later"))

    leave = event.subscribe(first)
    event.subscribe(lambda: seen.append("second"))
    event()
    assert seen == ["first", "second"]
    event()
    assert seen == ["first", "second", "second", "later"]


def test_an_exception_ends_the_event() -> None:
    event, seen = Event(), []

    def refuse() -> None:
        raise StateError("no")

    event.subscribe(refuse)
    event.subscribe(lambda: seen.append("second"))
    with pytest.raises(StateError, match="no"):
        event()
    assert not seen


@pytest.mark.parametrize("stage", range(4))
def test_the_events_of_a_step(stage: int) -> None:
    _model, engine = small(stage=stage)
    seen = notes(engine)
    backward(engine, 0)
    assert seen == [
        ("after_user_code",), ("on_step_begin",), ("after_user_code",),
        ("before_read", "parameters", "gradients"), ("on_backward_begin",),
    ]  # fmt: skip
    seen.clear()
    optimizer = engine.optimizers[0].sharded.optimizer
    engine.finish(0)
    engine.step(0, optimizer.step)
    assert seen == [("after_user_code",), ("before_publish",), ("on_stepped",)]
    seen.clear()
    engine.wait()
    engine.check_complete()
    assert seen == [("after_user_code",), ("before_read",)]


@pytest.mark.parametrize("stage", range(4))
def test_what_is_off_does_not_subscribe(stage: int) -> None:
    _model, engine = small(stage=stage)
    backward(engine, 0)
    only = {"after_user_code": ["OnDemandGather.write_back"]}
    assert subscribers(engine) == {name: [] for name in EVENTS} | only


def test_frozen_parameters_are_followed_until_all_of_them_train() -> None:
    model = network()
    for block in model[:2]:
        block.requires_grad_(False)
    engine = engine_on(model, [adamw(model.parameters())], stage=2)
    both = {"on_step_begin": ["Unfreezing.follow"], "on_backward_begin": ["Unfreezing.follow"]}
    assert subscribers(engine).items() >= both.items()
    model[0].requires_grad_(True)
    backward(engine, 0)
    assert subscribers(engine).items() >= both.items(), "the second block is frozen"
    engine.finish(0)
    engine.step(0, engine.optimizers[0].sharded.optimizer.step)
    engine.zero_grad(0)
    model[1].requires_grad_(True)
    backward(engine, 1)
    assert subscribers(engine).items() >= {name: [] for name in both}.items()
    assert all(flat.trainable for flat in engine.flats)


def test_states_that_are_offloaded_are_refused_until_they_are_back() -> None:
    _model, engine = small(stage=1)
    backward(engine, 0)
    offload_states(engine, ["optimizer"])
    assert subscribers(engine)["before_read"] == ["StateOffload.require"]
    offload_states(engine, ["gradients"])
    assert subscribers(engine)["before_read"] == ["StateOffload.require"]
    with pytest.raises(StateError, match="gradients, optimizer"):
        engine.check_complete()
    engine.state_offload.reload()
    assert subscribers(engine)["before_read"] == []
    engine.check_complete()


class Half(nn.Module):
    """A network of which the optimizer gets a part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_one_rank_averages_no_gradient_that_no_optimizer_uses() -> None:
    model = Half()
    engine = engine_on(model, [adamw(model.first.parameters())], stage=1)
    assert subscribers(engine)["on_backward_begin"] == []
