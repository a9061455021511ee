"""A draft of the units: checks before anything is moved, then buffers with the right values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ls_strategy.config import OffloadConfig, PrecisionConfig, ShardingConfig, ZeROConfig
from ls_strategy.distributed.comm import Comm
from ls_strategy.distributed.mesh import Mesh
from ls_strategy.errors import PlanError
from ls_strategy.plan import FROZEN
from ls_strategy.precision import resolve_precision
from ls_strategy.zero.setup.assembly import Draft
from ls_strategy.zero.setup.share import Share
from ls_strategy.zero_stages import POLICIES
from tests.unit.one_rank import adamw, engine_on, network, steps, weights

MESH = Mesh.data_only(Comm(None, None))


def draft_of(model: nn.Module, *optimizers: torch.optim.Optimizer, stage: Any = 1, **groups: Any) -> Draft:
    groups.setdefault("sharding", ShardingConfig(min_unit_numel=1))
    return Draft(
        model,
        optimizers,
        config=ZeROConfig(stage=stage, **groups),
        precision=resolve_precision("32-true"),
        policy=POLICIES[stage],
        parts={},
        share=Share(),
    )


class Lamb(torch.optim.Optimizer):
    """Scales a step by the norm of a whole parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * p.norm())


def test_the_first_error_is_raised_and_waits_for_the_agreement() -> None:
    model = network()
    for more in ([], [PlanError("a later one")]):
        draft = draft_of(model, torch.optim.LBFGS(model.parameters()))
        for error in more:
            draft.refuse(error)
        with pytest.raises(PlanError, match="LBFGS"):
            draft.agree(Comm(None, None))


def test_an_error_of_the_caller_is_raised() -> None:
    draft = draft_of(network())
    draft.refuse(None)
    draft.refuse(PlanError("not these weights"))
    with pytest.raises(PlanError, match="not these weights"):
        draft.agree(Comm(None, None))


def test_stage_0_takes_any_optimizer() -> None:
    model = network()
    draft_of(model, Lamb(model.parameters()), stage=0).agree(Comm(None, None))


@pytest.mark.parametrize(
    ("groups", "what"),
    [
        ({"precision": PrecisionConfig(moments="int8")}, r"precision.moments='int8'"),
        ({"offload": OffloadConfig(optimizer="cpu")}, r"offload.optimizer='cpu'"),
    ],
)
def test_options_with_one_state_per_parameter_refuse_two_optimizers(groups: dict[str, Any], what: str) -> None:
    model = network()
    draft = draft_of(model, adamw(model.parameters()), adamw([model[0][0].weight]), **groups)  # type: ignore[index]
    with pytest.raises(PlanError, match=rf"'0\.0\.weight' is in optimizers 0 and 1, but {what} keeps one state"):
        draft.agree(Comm(None, None))


def test_a_set_of_optimizers_has_a_number_of_its_own_and_parameters_without_one_are_frozen() -> None:
    model = network()
    plan = draft_of(model, adamw(model.parameters()), adamw(model[0].parameters())).resolve(MESH, {})
    assert [(u.flats[0].optimizer, u.flats[0].owners) for u in plan.units] == [(2, (0, 1)), (0, (0,)), (0, (0,))]
    plan = draft_of(model, adamw(model[1:].parameters())).resolve(MESH, {})
    assert [u.flats[0].optimizer for u in plan.units] == [FROZEN, 0, 0]


@pytest.mark.parametrize(("names", "dtype"), [(("Tanh", "Linear"), torch.float32), ((), torch.bfloat16)])
def test_modules_named_in_the_options_stay_in_fp32(names: tuple[str, ...], dtype: torch.dtype) -> None:
    options = PrecisionConfig(fp32_modules=names)
    engine = engine_on(network(), [], stage=0, trainer_precision="bf16-true", precision=options)
    assert {flat.dtype for flat in engine.flats} == {dtype}


def test_a_model_keeps_its_values_through_two_engines() -> None:
    model = network()
    expected = [p.detach().clone() for p in model.parameters()]
    for stage in (3, 1):
        engine = engine_on(model, [], stage=stage, offload=OffloadConfig(parameters="cpu") if stage == 3 else None)
        assert all(map(torch.equal, weights(engine), expected))


def test_what_was_loaded_into_a_resident_parameter_counts() -> None:
    model = network()
    optimizer = adamw(model.parameters())
    steps(engine_on(model, [optimizer], stage=1, offload="cpu"), 1)
    model.load_state_dict(network().state_dict())
    engine = engine_on(model, [optimizer], stage=1, offload="cpu")
    assert all(map(torch.equal, weights(engine), network().parameters()))
