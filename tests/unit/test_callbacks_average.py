"""`ShardedEMA` on one rank: the average against one by hand, and the weights when it is swapped in and out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ls_strategy.config import PrecisionConfig
from ls_strategy.errors import ConfigError, PlanError, StateError
from ls_strategy.extras.callbacks import average as average_file
from ls_strategy.extras.callbacks.average import ShardedEMA
from ls_strategy.lightning.strategy import ZeROStrategy
from tests.unit.one_rank import adamw, engine_on, network, steps, weights

DECAY = 0.75


class Run:
    """A model, its engine, and a Trainer that counts steps."""

    def __init__(self, stage: Any = 3, **options: Any) -> None:
        self.model = network()
        self.engine = engine_on(self.model, [adamw(self.model.parameters())], stage=stage, **options)
        self.strategy = ZeROStrategy(stage)
        self.strategy.engine = self.engine
        self.strategy._lightning_module = self.strategy._run.module = self.model  # type: ignore[assignment]
        self.trainer: Any = SimpleNamespace(strategy=self.strategy, global_step=0)

    def start(self, ema: ShardedEMA) -> None:
        ema.on_fit_start(self.trainer, self.model)  # type: ignore[arg-type]

    def batch(self, ema: ShardedEMA, *, step: bool = True) -> None:
        """Train on a batch; without ``step`` its gradients would accumulate."""
        if step:
            steps(self.engine, 1, self.trainer.global_step)
            self.trainer.global_step += 1
        ema.on_train_batch_end(self.trainer, self.model, None, None, 0)  # type: ignore[arg-type]

    def call(self, ema: ShardedEMA, hook: str, *args: Any) -> None:
        getattr(ema, hook)(self.trainer, self.model, *args)

    def saved(self, ema: ShardedEMA) -> dict[str, Any]:
        checkpoint: dict[str, Any] = {}
        self.call(ema, "on_save_checkpoint", checkpoint)
        return checkpoint

    def average(self, ema: ShardedEMA) -> list[Tensor]:
        """Return the full average, in the order of the parameters."""
        state = self.saved(ema)["ema_state_dict"]
        return [state[name] for name, _ in self.model.named_parameters()]


def equal(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


def trained(count: int = 2, stage: int = 3, **options: Any) -> tuple[Run, ShardedEMA]:
    run, ema = Run(stage), ShardedEMA(DECAY, **options)
    run.start(ema)
    for _ in range(count):
        run.batch(ema)
    return run, ema


# --- the average ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_average_is_one_by_hand_of_the_full_weights(stage: int) -> None:
    run, ema = Run(stage), ShardedEMA(DECAY)
    run.start(ema)
    by_hand = weights(run.engine)
    for _ in range(3):
        run.batch(ema)
        by_hand = [DECAY * mean + (1 - DECAY) * new for mean, new in zip(by_hand, weights(run.engine), strict=True)]
    torch.testing.assert_close(run.average(ema), by_hand)
    assert not equal(by_hand, weights(run.engine))


def test_the_average_starts_from_the_weights_also_with_a_checkpoint_that_has_none() -> None:
    run, ema = Run(), ShardedEMA()
    run.call(ema, "on_load_checkpoint", {"state_dict": {}})
    for _ in range(2):
        run.start(ema)
        assert equal(run.average(ema), weights(run.engine))


@pytest.mark.parametrize("goes_on", [False, True], ids=["a batch without a step", "a fit that goes on"])
def test_nothing_but_a_step_of_the_fit_counts(goes_on: bool) -> None:
    run, ema = trained(1)
    if goes_on:
        run.start(ema)
        steps(run.engine, 1, 1)  # the weights change, the number of steps does not
    before = run.average(ema)
    run.batch(ema, step=False)
    assert equal(run.average(ema), before)


def test_the_average_is_updated_after_every_nth_step() -> None:
    run, ema = trained(0, every_n_steps=3)
    changed = []
    for _ in range(6):
        before = run.average(ema)
        run.batch(ema)
        changed.append(not equal(run.average(ema), before))
    assert changed == [False, False, True, False, False, True]


def test_the_average_is_fp32_where_masters_are_not() -> None:
    run = Run(trainer_precision="bf16-true", precision=PrecisionConfig(master_weights=False))
    ema = ShardedEMA(0.999)
    run.start(ema)
    start = run.engine.trainable_masters()[0].float()
    assert run.engine.trainable_masters()[0].dtype == torch.bfloat16
    run.batch(ema)
    expected = start.lerp(run.engine.trainable_masters()[0].float(), 1 - 0.999)
    assert torch.equal(ema._average[0], expected)
    assert not torch.equal(expected, expected.bfloat16().float())


def test_parameters_added_during_the_fit_are_refused() -> None:
    run, ema = trained(1)
    grown = Run()
    grown.model.append(nn.Sequential(nn.Linear(24, 24)))
    run.strategy.engine = engine_on(grown.model, [adamw(grown.model.parameters())])
    with pytest.raises(PlanError, match="in the optimizers when the fit began, but parameters were added"):
        run.call(ema, "on_validation_start")


# --- validation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_validation_computes_with_the_average_and_training_with_the_weights(stage: int) -> None:
    run, ema = trained(stage=stage)
    before, average = weights(run.engine), run.average(ema)
    for _ in range(2):  # a second start does not swap back
        run.call(ema, "on_validation_start")
        assert equal(weights(run.engine), average)
    run.call(ema, "on_validation_end")
    assert equal(weights(run.engine), before)
    assert equal(run.average(ema), average)


@pytest.mark.parametrize("fitted", [True, False], ids=["that is wanted", "there was no fit"])
def test_validation_computes_with_the_weights_if(fitted: bool) -> None:
    run, ema = trained(validate_with_average=False) if fitted else (Run(), ShardedEMA())
    before = weights(run.engine)
    for hook in ("on_validation_start", "on_validation_end"):
        run.call(ema, hook)
        assert equal(weights(run.engine), before)


@pytest.mark.parametrize("stage", [0, 3])
def test_masters_in_16_bits_do_not_round_the_average(stage: int) -> None:
    options = {"trainer_precision": "bf16-true", "precision": PrecisionConfig(master_weights=False)}
    run, ema = Run(stage, **options), ShardedEMA(DECAY)
    run.start(ema)
    average = [each.add_(1e-4).clone() for each in ema._average]
    before = run.average(ema)
    assert all(each.dtype == torch.float32 for each in before)
    assert not equal(before, [each.bfloat16().float() for each in before])
    run.call(ema, "on_validation_start")
    run.call(ema, "on_validation_end")
    assert equal(ema._average, average)
    assert equal(run.average(ema), before)


def test_nothing_is_exchanged_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    run, ema = trained()
    run.call(ema, "on_validation_start")
    run.call(ema, "on_exception", ValueError("mine"))
    monkeypatch.setattr(
        "ls_strategy.extras.callbacks.average.exchange_masters", lambda *_, **__: pytest.fail("collective")
    )
    run.call(ema, "on_validation_end")


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_has_the_average_as_a_state_dict_and_leaves_the_weights() -> None:
    run, ema = trained()
    before = weights(run.engine)
    state = run.saved(ema)["ema_state_dict"]
    plain = network()
    plain.load_state_dict(state)
    torch.testing.assert_close([p.detach() for p in plain.parameters()], run.average(ema), rtol=0, atol=0)
    assert equal(weights(run.engine), before)
    assert not equal(list(state.values()), before)


def test_a_save_while_the_average_is_in_the_weights_place_is_refused() -> None:
    """Its ``state_dict`` would be the average, and its average the weights."""
    run, ema = trained()
    before = weights(run.engine)
    run.call(ema, "on_validation_start")
    with pytest.raises(StateError, match=r"Got a save during validation.*Save in on_validation_end"):
        run.saved(ema)
    run.call(ema, "on_validation_end")
    assert equal(weights(run.engine), before)


def test_a_checkpoint_without_a_fit_has_no_average() -> None:
    assert Run().saved(ShardedEMA()) == {}


def test_a_folder_gets_stand_ins_for_the_average() -> None:
    run, ema = trained()
    given: list[Any] = []
    run.strategy.saves.collection = SimpleNamespace(  # type: ignore[assignment]
        weights=lambda raw, masters: given.append((raw.keys(), masters)) or "stand-ins"
    )
    assert run.saved(ema) == {"ema_state_dict": "stand-ins"}
    assert given == [(network().state_dict().keys(), ema._average)]


def test_a_save_that_fails_leaves_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    run, ema = trained()
    before = weights(run.engine)

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("full")

    monkeypatch.setattr(average_file, "full_state_dict", fail)
    with pytest.raises(MemoryError, match="full"):
        run.saved(ema)
    assert equal(weights(run.engine), before)


def test_a_loaded_average_goes_on_and_is_used_once() -> None:
    run, ema = trained()
    checkpoint = run.saved(ema)
    other, resumed = Run(), ShardedEMA(DECAY)
    other.call(resumed, "on_load_checkpoint", checkpoint)
    other.start(resumed)
    assert equal(other.average(resumed), run.average(ema))
    other.start(resumed)
    assert equal(other.average(resumed), weights(other.engine))


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"decay": 1.5}, {"decay": -0.1}, {"every_n_steps": 0}], ids=str)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        ShardedEMA(**options)


def test_another_strategy_is_refused() -> None:
    with pytest.raises(PlanError, match=r"ShardedEMA reads shards, and strategy=object has none.*zero0"):
        ShardedEMA().on_fit_start(SimpleNamespace(strategy=object()), nn.Linear(1, 1))  # type: ignore[arg-type]
