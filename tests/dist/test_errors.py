"""What cannot work is refused on every rank, with what was given, the rule and the cure; nothing hangs."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from ls_strategy import ZeROStrategy
from ls_strategy.config import LossScaleConfig, nested
from ls_strategy.errors import ConfigError, LSError, PlanError, RankFailedError, StateError
from tests.dist.ranks import (
    STAGES,
    WIDTH,
    Net,
    batches,
    fit,
    on_ranks,
    trainer_of,
    weights,
)
from tests.limits import wall
from tests.marks import few_or_all, slow
from tests.optimizers import EachTensor

# --- options that are wrong by themselves: no ranks needed ------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stage": 4}, r"stage=4.*0, 1, 2, 3 or 'auto'"),
        ({"stage": "3"}, r"stage='3'.*1, 2, 3 or 'auto'.*Set stage=3"),
        ({"sharding.block_classes": "Block"}, r"sharding.block_classes='Block'.*a list.*\['Block'\]"),
        ({"precision.fp32_modules": "Router"}, r"precision.fp32_modules='Router'.*a list.*\['Router'\]"),
        ({"sharding.prefetch_units": -1}, r"sharding.prefetch_units=-1.*at least 0"),
        ({"sharding.min_unit_numel": -1}, r"sharding.min_unit_numel=-1.*at least 0"),
        ({"precision.reduce_dtype": "bf16"}, r"precision.reduce_dtype='bf16'.*fp32.*compute"),
    ],
)
def test_options_are_checked_where_they_are_given(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ZeROStrategy(**nested(options))


@pytest.mark.parametrize(
    "options", [{"static": 0.0}, {"static": -1.0}, {"window": 0}, {"hysteresis": 0}, {"min_scale": 0.0}]
)
def test_loss_scale_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        LossScaleConfig(**options)


def test_unknown_options_are_not_swallowed() -> None:
    with pytest.raises(ConfigError, match=r"zero_stage=3.*Did you mean 'stage'"):
        ZeROStrategy(zero_stage=3)  # type: ignore[call-arg]


def test_precisions_of_others_are_refused() -> None:
    with pytest.raises(
        (ConfigError, ModuleNotFoundError), match=r"precision.*32-true.*Trainer\(precision=|transformer"
    ):
        trainer_of(ZeROStrategy(2), precision="transformer-engine", devices=2)


@pytest.mark.parametrize("name", ["grad_norm", "memory_bytes", "require_engine"])
def test_questions_before_there_is_an_answer(name: str) -> None:
    with pytest.raises(StateError, match=r"not set up yet.*on_fit_start"):
        getattr(ZeROStrategy(2), name)()


# --- optimizers -------------------------------------------------------------------------------------------------------


class Muon(EachTensor):
    """Orthogonalises the momentum of a matrix."""

    def change(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        u, _, v = torch.linalg.svd(grad.view(len(p), -1), full_matrices=False)
        p.add_((u @ v).view_as(p), alpha=-group["lr"])


class Lamb(EachTensor):
    """Scales each parameter's step by the parameter's norm."""

    def change(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        p.add_(grad, alpha=-group["lr"] * float(p.norm() / grad.norm().clamp(min=1e-6)))


class Signed(EachTensor):
    """Element-wise, with state of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, 1e-3)

    def change(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["average"], state["calls"] = torch.zeros_like(p), 0
        state["calls"] += 1
        state["average"].lerp_(grad, 0.1)
        p.add_(torch.tanh(state["average"] * state["calls"]), alpha=-group["lr"])


class WithOptimizer(Net):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


class Together(Lamb):
    """Clips by the norm of all parameters that it sees."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.sub_(p.grad / norm)
        return loss


@pytest.mark.parametrize("stages", few_or_all(((1,), (3,)), ((1, 2, 3), (1, 2, 3))))
@on_ranks(2)
def test_optimizers_that_need_all_parameters_are_refused(rank: int, world_size: int, stages: Any) -> None:
    cure = r"(element-wise|first-order) optimizer \(AdamW"
    for make, of_optimizer in zip((Together, torch.optim.LBFGS), stages, strict=True):
        for stage in of_optimizer:
            with pytest.raises(PlanError, match=rf"{make.__name__}.*{cure}"):
                fit(stage, WithOptimizer(make))


@on_ranks(2)
def test_optimizers_that_need_whole_matrices_work_at_stage_0(rank: int, world_size: int) -> None:
    for make in (Lamb, Muon):
        ddp, ours = WithOptimizer(make), WithOptimizer(make)
        fit("ddp", ddp)
        fit(0, ours)
        assert ours.losses == pytest.approx(ddp.losses, rel=1e-6)


@pytest.mark.wide
@on_ranks(2)
def test_any_elementwise_optimizer_is_taken(rank: int, world_size: int) -> None:
    makes = [
        Signed, optim.Adadelta, optim.ASGD, lambda p: optim.Adagrad(p, initial_accumulator_value=0.1),
        lambda p: optim.RMSprop(p, 1e-3), lambda p: optim.NAdam(p, eps=1e-4), lambda p: optim.RAdam(p, eps=1e-4),
        lambda p: optim.Adamax(p, 1e-3, eps=1e-4), lambda p: optim.Rprop(p, 1e-4),
        lambda p: optim.AdamW(p, 1e-3, amsgrad=True, eps=1e-4), lambda p: optim.SGD(p, 1e-2, 0.9, nesterov=True),
    ]  # fmt: skip
    for make in makes:
        ddp = WithOptimizer(make)
        fit("ddp", ddp)
        for stage in (1, 3):
            ours = WithOptimizer(make)
            trainer = fit(stage, ours)
            name = type(trainer.optimizers[0]).__name__
            assert ours.losses == pytest.approx(ddp.losses, rel=2e-6), f"{name}, stage {stage}"


class Stranger(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.ones(3, 7))], 0.1)


@on_ranks(2)
def test_parameters_of_no_module_are_refused(rank: int, world_size: int) -> None:
    for stage in STAGES:
        with pytest.raises(
            PlanError, match=r"optimizer 0 \(SGD\).*\(3, 7\).*not in the LightningModule.*nn\.Parameter"
        ):
            fit(stage, Stranger())


# --- ranks that disagree ----------------------------------------------------------------------------------------------


class PerRank(Net):
    """Built differently on every rank."""

    def __init__(self, rank: int, what: str) -> None:
        self.rank, self.what = rank, what
        super().__init__()

    def build(self) -> None:
        super().build()
        if self.what == "shape":
            self.blocks[1].wide = nn.Linear(WIDTH, 5 + self.rank)
        elif self.what == "name":
            setattr(self, f"extra_{self.rank}", nn.Linear(2, 2))
        elif self.what == "number" and self.rank == 1:
            self.surplus = nn.Linear(2, 2)
        elif self.what == "frozen" and self.rank == 1:
            self.last.bias.requires_grad_(False)


@pytest.mark.parametrize("stages", few_or_all({"shape": (0,), "name": (2,), "number": (3,), "frozen": (3,)}, {}))
@on_ranks(2)
def test_ranks_with_different_models_are_told_the_first_difference(
    rank: int, world_size: int, stages: dict[str, tuple[int, ...]]
) -> None:
    for what, words in {
        "shape": r"blocks\.1\.wide\.weight.*\(5, 8\).*blocks\.1\.wide\.weight.*\(6, 8\)",
        "name": r"extra_0\.weight.*extra_1\.weight",
        "number": r"None.*surplus\.weight",
        "frozen": r"last\.bias.*True.*last\.bias.*False",
    }.items():
        for stage in stages.get(what, (0, 2, 3)):
            with pytest.raises(PlanError, match=rf"(?s)different models.*rank 0.*{words}.*same model on every rank"):
                fit(stage, PerRank(rank, what))


@on_ranks(2)
def test_ranks_with_different_options_are_refused(rank: int, world_size: int) -> None:
    for options in (
        {"stage": 1 + rank},
        {"stage": 3, "sharding.prefetch_units": rank},
        {"stage": 2, "sharding.min_unit_numel": rank * 100},
    ):
        with pytest.raises(PlanError, match=r"different options.*rank 0.*rank 1.*same configuration"):
            fit(ZeROStrategy(**nested(options)), Net())


@on_ranks(2)
def test_one_rank_with_a_bad_model_stops_both(rank: int, world_size: int) -> None:
    """Only rank 1 has the problem; rank 0 hears of it."""
    with pytest.raises(PlanError, match=r"(rank 1: )?.*Together.*element-wise"):
        fit(2, WithOptimizer(Together if rank == 1 else torch.optim.SGD))
    with pytest.raises(PlanError, match=r"different options"):
        fit(2, WithOptimizer(Muon if rank == 1 else torch.optim.SGD))


@on_ranks(2)
def test_launcher_and_trainer_disagree(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=r"started 2 ranks.*devices=1.*Set devices=2 and num_nodes=1"):
        fit(1, Net(), devices=1)


# --- a rank that fails ------------------------------------------------------------------------------------------------


class FailsOnce(Net):
    """One rank raises in its third step, in the forward or in the backward pass."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def training_step(self, batch: Any, i: int) -> Tensor:
        loss = super().training_step(batch, i)
        if self.global_rank == 1 and i == 2:
            if self.where == "forward":
                raise ZeroDivisionError("user code failed")
            loss.register_hook(self.fail)
        return loss

    @staticmethod
    def fail(_: Tensor) -> None:
        raise ZeroDivisionError("user code failed")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("where", "stage"),
    [
        ("forward", 0),
        ("backward", 3),
        *(slow(*c) for c in [("forward", 1), ("forward", 2), ("forward", 3)]),
        *(slow("backward", stage) for stage in (0, 1, 2)),
    ],
)
@on_ranks(2, timeout_s=40)
def test_a_rank_that_fails_stops_the_others_within_seconds(rank: int, world_size: int, stage: int, where: str) -> None:
    begin = time.monotonic()
    if rank == 1:
        with pytest.raises(ZeroDivisionError, match="user code failed"):
            fit(stage, FailsOnce(where))
    else:
        with pytest.raises(RankFailedError, match=r"rank 1.*ZeroDivisionError.*user code failed"):
            fit(stage, FailsOnce(where))
    assert time.monotonic() - begin < wall(15)


class RefusesOnRank1(Net):
    """One rank refuses what is right on the others: a folder that one node lacks, a value it cannot read."""

    def __init__(self, where: str, error: type[Exception]) -> None:
        super().__init__()
        self.where, self.error = where, error

    def refuse(self, where: str) -> None:
        if self.where == where and self.global_rank == 1:
            raise self.error("Got no folder here. Create it.")

    def configure_optimizers(self) -> Any:
        self.refuse("setup")
        return super().configure_optimizers()

    def training_step(self, batch: Any, i: int) -> Tensor:
        if i == 2:
            self.refuse("step")
        return super().training_step(batch, i)


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("error", "where", "stage"),
    [(ConfigError, "setup", 3), (PlanError, "step", 0), slow(PlanError, "setup", 1), slow(ConfigError, "step", 3)],
)
@on_ranks(2)
def test_a_refusal_on_one_rank_stops_the_others_within_seconds(
    rank: int, world_size: int, error: type[Exception], where: str, stage: int
) -> None:
    begin = time.monotonic()
    expected: type[Exception] = error if rank == 1 else RankFailedError
    with pytest.raises(expected, match=("" if rank else rf"rank 1: {error.__name__}: ") + r"Got no folder here"):
        fit(stage, RefusesOnRank1(where, error))
    assert time.monotonic() - begin < wall(15)


class FailsEverywhere(Net):
    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.error = error

    def training_step(self, batch: Any, i: int) -> Tensor:
        if i == 2:
            raise self.error("user code failed")
        return super().training_step(batch, i)


@pytest.mark.wide
@on_ranks(2)
def test_a_failure_on_all_ranks_does_not_prevent_the_next_fit(rank: int, world_size: int) -> None:
    """A search over hyper-parameters prunes a trial by an exception and starts the next one."""
    for stage, error in ((1, ZeroDivisionError), (3, ZeroDivisionError), (2, PlanError)):
        with pytest.raises(error, match="user code failed"):
            fit(stage, FailsEverywhere(error))
        module = Net()
        fit(stage, module)
        assert len(module.losses) == 8


class StepsOfNone(Net):
    """Returns no loss on one rank."""

    def training_step(self, batch: Any, i: int) -> Any:
        loss = super().training_step(batch, i)
        return None if i == 1 else loss


@on_ranks(2, timeout_s=40)
def test_skipping_a_step_by_returning_none(rank: int, world_size: int) -> None:
    """Lightning refuses this on several ranks; so do we, without a hang."""
    with pytest.raises(RuntimeError, match="None"):
        fit(1, StepsOfNone())


# --- names and numbers ------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_names_without_a_module_are_refused(rank: int, world_size: int) -> None:
    with pytest.raises(
        PlanError,
        match=r"sharding.block_classes=\['Blok'\].*no module of class Blok.*Block.*leave sharding.block_classes out",
    ):
        fit(ZeROStrategy(3, sharding={"block_classes": ["Blok"]}), Net())
    with pytest.raises(PlanError, match=r"precision.fp32_modules=\['Router'\].*no module of class Router.*Block"):
        fit(ZeROStrategy(1, precision={"fp32_modules": ["Router"]}), Net(), precision="bf16-true")
    module = Net()
    fit(
        ZeROStrategy(3, sharding={"min_unit_numel": 0, "block_classes": ["Block", "torch.nn.modules.linear.Linear"]}),
        module,
    )
    assert len(module.losses) == 8


@pytest.mark.parametrize("stages", few_or_all((1, 3), STAGES))
@on_ranks(2)
def test_nan_is_not_hidden(rank: int, world_size: int, stages: tuple[int, ...]) -> None:
    for stage in stages:
        module = Net()
        with torch.no_grad():
            module.last.weight[0, 0] = math.nan
        fit(stage, module, max_epochs=1, gradient_clip_val=1.0)
        assert all(map(math.isnan, module.losses)), f"stage {stage}"
        assert any(v.isnan().any() for v in weights(module).values()), f"stage {stage}"


class NormAtWrongTime(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with pytest.raises(StateError, match=r"no gradient to read.*between backward and zero_grad"):
            self.trainer.strategy.grad_norm()


@pytest.mark.parametrize("stages", few_or_all((0, 3), STAGES))
@on_ranks(2)
def test_grad_norm_without_gradients(rank: int, world_size: int, stages: tuple[int, ...]) -> None:
    for stage in stages:
        trainer = trainer_of(stage, max_epochs=1, limit_train_batches=1)
        trainer.fit(NormAtWrongTime(), batches())
        assert trainer.global_step == 1


def test_every_error_is_one_of_ours_and_a_builtin() -> None:
    for error in (ConfigError, PlanError, StateError, RankFailedError):
        assert issubclass(error, LSError)
        assert issubclass(error, (ValueError, RuntimeError))
    assert not dist.is_initialized()
