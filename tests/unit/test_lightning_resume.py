"""`Resume`: what a loaded checkpoint restores, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ls_strategy.checkpoint.random import random_states
from ls_strategy.errors import StateError
from ls_strategy.lightning.checkpointing import resume as resume_module
from ls_strategy.lightning.checkpointing.resume import Resume
from ls_strategy.lightning.precision import ZeROPrecision
from tests.unit.run_states import run_state


def resume_of(module: Any = None, *, optimizers: Any = (), precision: Any = "32-true") -> Resume:
    strategy: Any = SimpleNamespace(optimizers=list(optimizers), zero_precision=lambda: ZeROPrecision(precision))
    return Resume(run_state(module=module), strategy)


def pending(**attributes: Any) -> Resume:
    """A resume with random states of seed 5, in a run with these attributes of the module's trainer."""
    resume = resume_of(SimpleNamespace(trainer=SimpleNamespace(**attributes)))
    torch.manual_seed(5)
    resume._random = random_states()
    torch.manual_seed(6)
    return resume


def drawn(seed: int) -> float:
    return float(torch.rand(1, generator=torch.Generator().manual_seed(seed)))


def test_random_states_are_restored_once() -> None:
    resume = pending()
    resume.restore_random_states()
    assert not resume.pending
    assert float(torch.rand(1)) == drawn(5)
    torch.manual_seed(6)
    resume.restore_random_states()
    assert float(torch.rand(1)) == drawn(6)


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_restores_random_states_in_training_alone(training: bool) -> None:
    resume = pending(training=training)
    resume.on_batch()
    assert resume.pending is not training


def boundary(is_last: bool) -> Any:
    batches = SimpleNamespace(is_last_batch=is_last, current=SimpleNamespace(ready=1, processed=1))
    return SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=batches), _loaded_from_state_dict=False)


@pytest.mark.parametrize("between_epochs", [True, False])
def test_an_iterator_between_epochs_draws_from_the_saved_states(between_epochs: bool) -> None:
    """In the middle of an epoch it draws as before."""
    resume = pending(fit_loop=boundary(between_epochs))
    with resume.making_iterators():
        assert float(torch.rand(1)) == drawn(5 if between_epochs else 6)
    assert resume.pending
    if between_epochs:
        torch.manual_seed(6)
        resume.restore_random_states()
        second = torch.rand(2, generator=torch.Generator().manual_seed(5))[1]
        assert float(torch.rand(1)) == float(second)  # continues after the draw


@pytest.mark.parametrize(("precision", "dtype"), [("32-true", torch.float32), ("64-true", torch.float64)])
def test_a_plain_module_is_loaded_at_once_with_all_bits(precision: str, dtype: torch.dtype) -> None:
    module, other = nn.Linear(2, 1), nn.Linear(2, 1, dtype=dtype)
    resume = resume_of(module, precision=precision)
    resume.load_weights(other.state_dict(), strict=True)
    assert torch.equal(module.weight, other.weight)
    with pytest.raises(RuntimeError, match="Missing key"):
        resume.load_weights({}, strict=True)


def test_weights_of_a_meta_module_wait_for_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(resume_module, "load_full_state_dict", lambda *args, **options: calls.append((args, options)))
    module = nn.Linear(2, 1, device="meta")
    resume = resume_of(module)
    weights = nn.Linear(2, 1).state_dict()
    resume.load_weights(weights, strict=False)
    assert calls == []
    engine: Any = SimpleNamespace(units=["units"])
    resume.weights_for(engine)
    resume.weights_for(engine)
    assert calls == [((module, weights, ["units"]), {"strict": False, "may_lack": ()})]


def test_states_by_position_need_as_many_optimizers() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    engine: Any = SimpleNamespace(index_of=lambda _: 0)
    with pytest.raises(StateError, match="states of 2 optimizers, configure_optimizers returned 1"):
        resume_of(optimizers=[optimizer]).load_optimizer_states(engine, [optimizer.state_dict()] * 2)


def test_states_by_position_go_to_the_optimizer_at_that_position() -> None:
    loaded: list[Any] = []
    sharded = [
        SimpleNamespace(states=SimpleNamespace(load_full_state_dict=lambda s, i=i: loaded.append((i, s))))
        for i in (0, 1)
    ]
    engine: Any = SimpleNamespace(
        index_of={"a": 1, "b": None, "c": 0}.get, optimizers=[SimpleNamespace(sharded=each) for each in sharded]
    )
    states = [{"param_groups": [{"params": [0]}], "of": name} for name in "abc"]
    resume_of(optimizers=["a", "b", "c"]).load_optimizer_states(engine, states)
    assert loaded == [(1, states[0]), (0, states[2])]
