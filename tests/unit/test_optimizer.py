"""A sharded optimizer against the plain one on whole parameters. No processes: every rank's part is run in turn."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ls_strategy.distributed.comm import Comm
from ls_strategy.distributed.mesh import Mesh
from ls_strategy.errors import PlanError, StateError
from ls_strategy.layout import FlatLayout, TensorPart
from ls_strategy.optimizers.muon import Muon
from ls_strategy.plan import FlatPlan
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.step.elementwise import is_elementwise
from ls_strategy.zero.step.optimizer import OwnStep, ShardedOptimizer
from ls_strategy.zero.step.owner.full_tensor_groups import (
    check_full_tensor_groups,
    full_tensor_groups,
    steps_one_by_one,
)
from ls_strategy.zero.step.updater import StepArguments
from ls_strategy.zero_stages import POLICIES
from tests.optimizers import EachTensor

SHAPES = ((5, 7), (3,), (), (16, 16), (0,), (1, 1), (2, 3, 4), (33,))
LATE, NEVER = 3, 6
"""Parameters that get their first gradient in the fourth step, and none at all."""

STEPS = 8


class Lion(EachTensor):
    """Chen et al., arXiv:2302.06675, algorithm 2."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, lr, betas=(0.9, 0.99), weight_decay=0.1)

    def change(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if not self.state[p]:
            self.state[p]["exp_avg"] = torch.zeros_like(p)
        average, (beta1, beta2) = self.state[p]["exp_avg"], group["betas"]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(average.lerp(grad, 1 - beta1).sign(), alpha=group["lr"])
        average.lerp_(grad, 1 - beta2)


class Lamb(EachTensor):
    """What LAMB and LARS have in common: a step scaled by the norms of a whole parameter."""

    def change(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        p.sub_(grad * (p.norm() / grad.norm()), alpha=group["lr"])


# Where torch has a fused kernel the sharded optimizer takes it, so the plain one is told to.
OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "fused": True}),
    "AdamW foreach": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "foreach": True}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True, "fused": True}),
    "SGD nesterov": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "foreach": True}),
    "SGD": (torch.optim.SGD, {"lr": 1e-2, "fused": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1, "fused": True}),
    "RMSprop centered": (torch.optim.RMSprop, {"lr": 1e-3, "centered": True, "momentum": 0.5}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2}),
    "RAdam": (torch.optim.RAdam, {"lr": 1e-2}),
    "Adamax": (torch.optim.Adamax, {"lr": 1e-2}),
    "ASGD": (torch.optim.ASGD, {"lr": 1e-2, "t0": 3.0}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "Rprop": (torch.optim.Rprop, {"lr": 1e-2}),
    "Lion": (Lion, {"lr": 1e-2}),
}


class LoneRank(Comm):
    """One rank of several in a process of its own: nothing is sent."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(None, None)
        self.rank, self.world_size = rank, world_size

    def broadcast_(self, tensor: Tensor, source: int = 0) -> None:
        """All ranks have the same."""


@pytest.fixture(scope="module", autouse=True)
def compiler_is_imported() -> Iterator[None]:
    """The first step of any optimizer imports torch's compiler, which sets an environment variable."""
    torch.optim.SGD([nn.Parameter(torch.zeros(1))]).step()
    yield
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradients(dtype: torch.dtype) -> list[list[Tensor | None]]:
    """Per step and parameter; None where a parameter is unused."""
    generator = torch.Generator().manual_seed(1)
    steps: list[list[Tensor | None]] = []
    for step in range(STEPS):
        grads: list[Tensor | None] = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
        grads[NEVER] = None
        if step < 3:
            grads[LATE] = None
        steps.append(grads)
    return steps


def build(name: str, params: list[nn.Parameter]) -> Optimizer:
    """Two groups with different rates, not in the order of the parameters."""
    make, settings = OPTIMIZERS[name]
    return make([{"params": params[1::2]}, {"params": params[::2], "lr": settings["lr"] / 2}], **settings)


def schedule(optimizer: Optimizer, step: int) -> None:
    """Rates change between steps, as under a scheduler: they are read late."""
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * (0.9 if step % 2 else 1.05)


def plain(name: str, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
    """The trusted run."""
    params = parameters(dtype)
    optimizer = build(name, params)
    for step, grads in enumerate(gradients(dtype)):
        for p, g in zip(params, grads, strict=True):
            p.grad = None if g is None else g.clone()
        optimizer.step()
        schedule(optimizer, step)
    return [p.detach() for p in params], optimizer.state_dict()


class Sharded:
    """One rank's part of a run on two flat buffers."""

    def __init__(self, name: str, dtype: torch.dtype, rank: int, world_size: int) -> None:
        params = parameters(dtype)
        self.optimizer = build(name, params)
        comm = LoneRank(rank, world_size)
        self.flats: list[FlatBuffer] = []
        # Groups side by side, as the plan lays them out; the rest in a second buffer.
        self.numbers = [[1, 3, 0, 2], [4, 5, 6, 7]]
        for numbers in self.numbers:
            layout = FlatLayout.pack(((str(i), SHAPES[i]) for i in numbers), world_size)
            members = [params[i] for i in numbers]
            flat = FlatBuffer(FlatPlan(layout, dtype, dtype, 0), members, policy=POLICIES[1], comm=comm)
            flat.load([p.detach() for p in members], torch.device("cpu"))
            self.flats.append(flat)
        self.sharded = ShardedOptimizer(self.optimizer, self.flats, Mesh.data_only(comm))

    def step(self, grads: list[Tensor | None]) -> None:
        used: list[bool] = []
        for flat, numbers in zip(self.flats, self.numbers, strict=True):
            whole = torch.zeros(flat.layout.numel, dtype=flat.average_dtype)
            for slot, i in zip(flat.layout.slots, numbers, strict=True):
                grad = grads[i]
                used.append(grad is not None)
                if grad is not None:
                    whole[slot.offset : slot.end].copy_(grad.reshape(-1))
            flat.averages.tensor().copy_(whole[slice(*flat.stepped)])
        self.sharded.bind_grads(used)
        with OwnStep(self.sharded, StepArguments(used)) as step:
            step.begin()  # as the engine's hook before ``step`` does
            self.optimizer.step()

    def run(self, dtype: torch.dtype, start: int = 0) -> Sharded:
        for step, grads in list(enumerate(gradients(dtype)))[start:]:
            self.step(grads)
            schedule(self.optimizer, step)
        return self


def together(ranks: list[Sharded]) -> list[Tensor]:
    """Whole parameters out of every rank's masters."""
    result = [torch.empty(0)] * len(SHAPES)
    for n, numbers in enumerate(ranks[0].numbers):
        whole = torch.cat([r.flats[n].master for r in ranks])
        for slot, i in zip(ranks[0].flats[n].layout.slots, numbers, strict=True):
            result[i] = whole[slot.offset : slot.end].view(slot.shape)
    return result


def difference(a: list[Tensor], b: list[Tensor]) -> float:
    """Relative to the tensor's largest element."""
    return max(((x - y).abs().max() / x.abs().max()).item() for x, y in zip(a, b, strict=True) if x.numel())


@pytest.mark.sample(19)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_the_plain_optimizers(name, world_size) -> None:
    """In fp64, where rounding cannot hide a difference; parameters come late or never, rates are scheduled."""
    expected, _ = plain(name, torch.float64)
    ranks = [Sharded(name, torch.float64, r, world_size).run(torch.float64) for r in range(world_size)]
    assert difference(expected, together(ranks)) <= 1e-14


def test_momentum_may_begin_later_for_some_parameters(monkeypatch) -> None:
    """SGD with momentum and torch's choice of kernel: a parameter gets its first gradient in the fourth step."""
    monkeypatch.setitem(OPTIMIZERS, "SGD momentum", (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}))
    expected, _ = plain("SGD momentum", torch.float64)
    rank = Sharded("SGD momentum", torch.float64, 0, 1).run(torch.float64)
    assert difference(expected, together([rank])) <= 1e-14


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fp32_steps_are_the_plain_optimizers(name) -> None:
    """Within two roundings of the largest element: vector and scalar loops of one kernel may round differently."""
    expected, _ = plain(name, torch.float32)
    ranks = [Sharded(name, torch.float32, r, 3).run(torch.float32) for r in range(3)]
    assert difference(expected, together(ranks)) <= 2 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_world_sizes_are_equal_bit_for_bit(name) -> None:
    runs = [
        together([Sharded(name, torch.float32, r, n).run(torch.float32) for r in range(n)]) for n in (1, 2, 3, 5)
    ]  # fmt: skip
    for other in runs[1:]:
        assert all(map(torch.equal, runs[0], other))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_users_groups_are_his_again_after_a_step(name) -> None:
    rank = Sharded(name, torch.float32, 0, 2)
    pieces = [list(group["params"]) for group in rank.optimizer.param_groups]
    rank.run(torch.float32)
    for group, before in zip(rank.optimizer.param_groups, pieces, strict=True):
        assert [id(p) for p in group["params"]] == [id(p) for p in before]
        assert group.get("fused") == OPTIMIZERS[name][1].get("fused")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_dict_is_torchs_own(name) -> None:
    """Keys, shapes and values; parameters that never had a gradient have what the constructor gave them."""
    _, expected = plain(name, torch.float64)
    ours = Sharded(name, torch.float64, 0, 1).run(torch.float64).sharded.states.full_state_dict()
    order = [*range(1, len(SHAPES), 2), *range(0, len(SHAPES), 2)]
    # SGD without momentum has states that hold nothing. The plain optimizer counts the steps of an empty parameter;
    # here it has no piece on any rank.
    empty = order.index(SHAPES.index((0,)))
    wanted = {i: state for i, state in expected["state"].items() if state and i != empty}
    assert {i for i, state in ours["state"].items() if state and i != empty} == wanted.keys()
    assert (order.index(NEVER) in wanted) == (name == "Adagrad")  # whose constructor makes states
    for i in wanted:
        assert ours["state"][i].keys() == wanted[i].keys()
        for key, value in wanted[i].items():
            found = ours["state"][i][key]
            if isinstance(value, Tensor):
                assert found.shape == value.shape
                assert torch.allclose(found.double(), value.double(), rtol=1e-12, atol=1e-14)
            else:
                assert found == value
    assert [len(g["params"]) for g in ours["param_groups"]] == [len(g["params"]) for g in expected["param_groups"]]
    assert [g["lr"] for g in ours["param_groups"]] == [g["lr"] for g in expected["param_groups"]]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_goes_into_a_plain_optimizer_and_back(name) -> None:
    """Half of a run sharded, the other half plain; and the other way round; both are the plain run."""
    dtype, half = torch.float64, STEPS // 2
    expected, _ = plain(name, dtype)
    first = Sharded(name, dtype, 0, 1)
    params = parameters(dtype)
    optimizer = build(name, params)
    for step, grads in enumerate(gradients(dtype)[:half]):
        first.step(grads)
        schedule(first.optimizer, step)
        for p, g in zip(params, grads, strict=True):
            p.grad = None if g is None else g.clone()
        optimizer.step()
        schedule(optimizer, step)
    # sharded -> plain; the trusted run is plain -> plain: torch casts states on loading, which rounds (NAdam)
    ends: list[list[Tensor]] = []
    for weights, state in (
        (together([first]), first.sharded.states.full_state_dict()),
        (params, optimizer.state_dict()),
    ):
        taken = [nn.Parameter(p.detach().clone()) for p in weights]
        continued = build(name, taken)
        continued.load_state_dict(copy.deepcopy(state))  # which would share the tensors
        for step, grads in list(enumerate(gradients(dtype)))[half:]:
            for p, g in zip(taken, grads, strict=True):
                p.grad = None if g is None else g.clone()
            continued.step()
            schedule(continued, step)
        ends.append([p.detach() for p in taken])
    assert difference(*ends) <= 1e-14
    # plain -> sharded, on three ranks
    ranks = [Sharded(name, dtype, r, 3) for r in range(3)]
    for rank in ranks:
        for flat, numbers in zip(rank.flats, rank.numbers, strict=True):
            for piece, i in zip(flat.pieces, numbers, strict=True):
                values = params[i].detach().reshape(-1)[piece.param_start : piece.param_start + piece.numel]
                flat.master[piece.start : piece.stop].copy_(values)
        rank.sharded.states.load_full_state_dict(optimizer.state_dict())
        rank.run(dtype, start=half)
    # NAdam keeps a product of rates in fp32; that of the 0-d parameter looks like one element of its state and is kept
    # in the masters' dtype, fp64 here, which rounds it less. Everything else agrees to 1e-14.
    assert difference(expected, together(ranks)) <= (1e-12 if name == "NAdam" else 1e-14)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_that_is_asked_for_between_two_steps_changes_no_later_step(name) -> None:
    expected = together([Sharded(name, torch.float64, 0, 1).run(torch.float64)])
    looked_at = Sharded(name, torch.float64, 0, 1)
    for step, grads in enumerate(gradients(torch.float64)):
        looked_at.step(grads)
        looked_at.sharded.states.full_state_dict()
        schedule(looked_at.optimizer, step)
    assert difference(expected, together([looked_at])) == 0.0


def test_a_step_that_fails_leaves_the_groups_and_the_state_as_they_are_between_two_steps() -> None:
    rank = Sharded("AdamW", torch.float32, 0, 1)
    used = [True] * sum(len(numbers) for numbers in rank.numbers)
    before = [[id(p) for p in group["params"]] for group in rank.optimizer.param_groups]
    state = rank.optimizer.state

    def fail(step: OwnStep) -> None:
        with step:
            step.begin()
            assert [[id(p) for p in group["params"]] for group in rank.optimizer.param_groups] != before
            raise RuntimeError("in the optimizer")

    with pytest.raises(RuntimeError, match="in the optimizer"):
        fail(OwnStep(rank.sharded, StepArguments(used)))
    assert [[id(p) for p in group["params"]] for group in rank.optimizer.param_groups] == before
    assert rank.optimizer.state is state


def test_a_state_of_other_groups_is_refused() -> None:
    state = Sharded("SGD", torch.float32, 0, 1).sharded.states.full_state_dict()
    state["param_groups"][0]["params"].pop()
    with pytest.raises(StateError, match="parameter groups of sizes"):
        Sharded("SGD", torch.float32, 0, 1).sharded.states.load_full_state_dict(state)


def test_a_parameter_added_later_is_refused() -> None:
    rank = Sharded("SGD", torch.float32, 0, 1)
    rank.optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(3)))
    with pytest.raises(PlanError, match="SGD were changed in the middle of a training step"):
        rank.step(gradients(torch.float32)[0])


# --- which optimizers are refused -------------------------------------------------------------------------------------


def matrices() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(6, 6))]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_elementwise_optimizers_are_accepted_and_not_touched(name) -> None:
    params = parameters(torch.float32)
    optimizer = build(name, params)
    state, weights = repr(optimizer.state_dict()), [p.detach().clone() for p in params]
    assert is_elementwise(optimizer)
    assert full_tensor_groups(optimizer) == (False, False)
    assert repr(optimizer.state_dict()) == state
    assert all(map(torch.equal, params, weights))


class OneNorm(Optimizer):
    """Clips by the norm of all its parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.sub_(p.grad / norm)


class OneRate(OneNorm):
    """A rate common to all elements, as D-Adaptation finds one: halves that are stepped together hide it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        rate = 1 / sum(float(p.grad.abs().sum()) for p in params)
        for p in params:
            p.sub_(rate * p.grad)


class Noisy(OneNorm):
    """Langevin dynamics."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(0.1 * p.grad + torch.randn_like(p))


class Declared(Lamb):
    whole_tensors = True


class ByDimension(OneNorm):
    """Matrices by their norms, everything else element by element."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm() if p.dim() == 2 else p.grad)


WHOLE = {"LAMB": Lamb, "Adafactor": torch.optim.Adafactor, "Muon": torch.optim.Muon, "declared": Declared}


@pytest.mark.parametrize("name", WHOLE)
def test_optimizers_that_look_at_whole_parameters_are_found(name) -> None:
    optimizer = WHOLE[name](matrices())
    before = repr(optimizer.state_dict())
    check_full_tensor_groups(optimizer, {}, {})
    assert full_tensor_groups(optimizer) == (True,)
    assert steps_one_by_one(optimizer) == (name != "LAMB")  # which may count its calls, for all that is known
    assert repr(optimizer.state_dict()) == before


def test_groups_are_found_one_by_one() -> None:
    optimizer = ByDimension([{"params": matrices()}, {"params": [nn.Parameter(torch.ones(5))]}])
    assert full_tensor_groups(optimizer) == (True, False)
    assert full_tensor_groups(Lamb([{"params": matrices()}, {"params": [nn.Parameter(torch.ones(5))]}])) == (True, True)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (OneNorm, "OneNorm.*steps a tensor differently if it has a second one.*stage 0"),
        (OneRate, "OneRate.*steps a tensor differently if it has a second one.*AdamW"),
        (Noisy, "Noisy.*random numbers"),
        (torch.optim.LBFGS, "LBFGS"),
    ],
)
def test_optimizers_that_look_at_all_parameters_are_refused(make, words) -> None:
    with pytest.raises(PlanError, match=words):
        check_full_tensor_groups(make(matrices()), {}, {})


def test_a_stack_that_expert_parallelism_splits_needs_an_optimizer_of_stacks() -> None:
    stack = nn.Parameter(torch.ones(4, 3, 3))
    part = {id(stack): TensorPart.cut((8, 3, 3), 0, 0, 2)}
    part = {k: replace(v, axis="expert") for k, v in part.items()}
    check_full_tensor_groups(Muon([stack]), part, {})
    with pytest.raises(PlanError, match=r"expert parallelism splits 'up'.*parallel\.expert to 1"):
        check_full_tensor_groups(Lamb([stack]), part, {id(stack): "up"})
