"""`Steps`: what surrounds the user's steps and the backward pass."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ls_strategy.distributed.lockstep import REQUEUE, STOP
from ls_strategy.lightning.loop.pipeline import PipelineLoop
from ls_strategy.lightning.loop.plain import StepLoop
from ls_strategy.lightning.steps import Steps
from ls_strategy.parallel import logits
from tests.unit.run_states import run_state


@pytest.fixture(autouse=True)
def gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits, "gather", lambda output: ("full", output))


class Recorded:
    """Notes every call of a method, with its keywords."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls
        self.comm = SimpleNamespace(naming_failures=nullcontext)
        self.keeps_gradients = True

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **options: self.calls.append((name, options))


@pytest.fixture
def calls() -> list[Any]:
    return []


def make(calls: list[Any], *, pipeline: Any = None, automatic: bool = True, asked: int = 0) -> Steps:
    engine = Recorded(calls)
    lockstep = SimpleNamespace(
        step=nullcontext, agree=lambda: asked, asked=asked, ask=lambda what: calls.append(("ask", what))
    )
    trainer = SimpleNamespace(_signal_connector=SimpleNamespace(received_sigterm=False))
    module = SimpleNamespace(automatic_optimization=automatic, trainer=trainer)
    run = run_state(module=module, lockstep=lockstep, engine=engine)
    run.parallel.pipeline, run.parallel.replica_ranks = pipeline, 2
    parts: Any = SimpleNamespace(
        run=run,
        planning=SimpleNamespace(explain_memory=lambda error: None),
        uneven=SimpleNamespace(),
        resume=SimpleNamespace(restore_random_states=lambda: calls.append(("random", {}))),
    )
    loop = StepLoop(parts) if pipeline is None else PipelineLoop(parts)
    setup: Any = SimpleNamespace(follow_optimizers=lambda: engine)
    return Steps(parts, loop, setup)


def step(calls: list[Any]) -> Any:
    return lambda *args, **kwargs: calls.append(("step", args, kwargs)) or "loss"


def test_a_training_step_is_between_begin_and_end(calls: list[Any]) -> None:
    result = make(calls).train(step(calls), ("batch", 0), {"x": 1})
    assert result == ("full", "loss")
    assert calls == [
        ("random", {}),
        ("begin_step", {"sync_buffers_after": True}),
        ("step", ("batch", 0), {"x": 1}),
        ("end_forward", {}),
    ]


@pytest.mark.parametrize(("automatic", "accumulating"), [(False, False), (True, True)])
def test_buffers_are_synchronised_only_after_steps_that_reduce(
    calls: list[Any], automatic: bool, accumulating: bool
) -> None:
    steps = make(calls, automatic=automatic)
    steps.accumulating = accumulating
    steps.train(step(calls), (), {})
    assert ("begin_step", {"sync_buffers_after": False}) in calls


def test_a_pipeline_runs_the_training_step_itself(calls: list[Any]) -> None:
    pipeline = SimpleNamespace(train=lambda *args, last: (args[3], last))
    steps = make(calls, pipeline=pipeline)
    assert steps.train(step(calls), ("batch",), {}) == (("batch",), True)
    steps.accumulating = True
    assert steps.train(step(calls), ("batch",), {}) == (("batch",), False)
    assert ("end_forward", {}) not in calls


@pytest.mark.parametrize("accumulating", [True, False])
def test_gradients_stay_local_while_they_accumulate(calls: list[Any], accumulating: bool) -> None:
    steps = make(calls)
    steps.accumulating = accumulating
    with steps.around_backward(steps._module) as to_run:
        assert to_run
    assert calls == [
        ("begin_backward", {"eager": not accumulating, "counts": True}),
        ("end_backward", {"local": accumulating}),
    ]


def test_a_pipelines_backward_has_run(calls: list[Any]) -> None:
    steps = make(calls, pipeline=object())
    with steps.around_backward(steps._module) as to_run:
        assert not to_run
    assert calls == []
    assert not steps._run.require_engine().keeps_gradients


def test_a_failed_backward_is_not_ended(calls: list[Any]) -> None:
    steps = make(calls)
    with pytest.raises(ValueError, match="mine"), steps.around_backward(steps._module):
        raise ValueError("mine")
    assert [name for name, _ in calls] == ["begin_backward"]


def test_sigterm_ends_an_evaluation(calls: list[Any]) -> None:
    steps = make(calls, asked=STOP)
    with pytest.raises(SIGTERMException):
        steps.evaluate(step(calls), (), {})
    assert steps.stops_alone  # ranks do not wait for each other in this evaluation
    assert calls == []


def test_another_request_waits_for_the_next_training_batch(calls: list[Any]) -> None:
    assert make(calls, asked=REQUEUE).evaluate(step(calls), ("batch",), {}) == ("full", "loss")
    assert calls == [("ask", REQUEUE), ("begin_step", {}), ("step", ("batch",), {})]
