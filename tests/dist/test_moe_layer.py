"""Experts sharded over ranks compute what one rank with all of them does: values, gradients, bytes, order.

Trusted run: the same layer with all experts in the process of the test, on the tokens of each rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ls_strategy.distributed.axis import Axis
from ls_strategy.distributed.comm import Comm, make_comm
from ls_strategy.layout import TensorPart
from ls_strategy.moe.dispatch import TokenExchange
from ls_strategy.moe.feed_forward import FeedForward
from ls_strategy.moe.layer import MoE
from ls_strategy.moe.losses import moe_losses
from ls_strategy.moe.parallel import apply_expert_parallel
from ls_strategy.testing import spawn
from tests.dist.ranks import on_ranks
from tests.marks import wide

pytestmark = pytest.mark.dist

H, F, E = 16, 24, 8
EXACT = {torch.float64: 1e-12, torch.float32: 2e-6}


class Special(nn.Module):
    """An expert of no known kind."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(H, F)
        self.norm = nn.LayerNorm(F)
        self.two = nn.Linear(F, H)

    def forward(self, x: Tensor) -> Tensor:
        assert len(x) > 0
        return self.two(self.norm(self.one(x)).tanh())


@dataclass(frozen=True)
class Case:
    """A layer and the tokens of each rank."""

    options: dict[str, Any] = field(default_factory=dict)
    tokens: tuple[int, ...] = (9, 9, 9, 9)
    """Of each rank."""

    dtype: torch.dtype = torch.float64
    special: bool = False
    shared: bool = False
    to_one: bool = False
    """All tokens choose the same experts."""

    autocast: bool = False
    recompute: bool = False
    eval: bool = False


def build(case: Case) -> MoE:
    torch.manual_seed(0)
    defaults = {"k": 2, "drop_tokens": False, "second_expert_sampling": False, "use_rts": False, "balance_loss": 0.1}
    shared = FeedForward(H, F) if case.shared else None
    expert = Special if case.special else lambda: FeedForward(H, F)
    layer = MoE(H, expert, E, shared_expert=shared, **defaults | case.options).to(case.dtype)
    if case.to_one:
        with torch.no_grad():
            layer.router.weight.zero_()
    return layer.train(not case.eval)


def tokens_of(case: Case, rank: int) -> tuple[Tensor, Tensor]:
    """Input and the gradient from above."""
    generator = torch.Generator().manual_seed(rank + 1)
    x, upstream = torch.randn(2, case.tokens[rank], H, generator=generator, dtype=torch.float64).to(case.dtype)
    return x.requires_grad_(), upstream


def run(layer: MoE, case: Case, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        y = checkpoint(layer, x, use_reentrant=False) if case.recompute else layer(x)
    roots, grads = [y, moe_losses(layer)], [upstream.to(y.dtype), None]
    torch.autograd.backward(roots[:1] if case.eval else roots, grads[:1] if case.eval else grads)
    found = {"y": y.detach(), "x": x.grad}
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.clone()
    return {name: value.double() for name, value in found.items() if value is not None}


def sharded(rank: int, world: int, cases: list[Case]) -> list[dict[str, Tensor]]:
    axis, results = Axis("expert", make_comm()), []
    for case in cases:
        layer = build(case)
        before = dict(layer.named_parameters())
        parts = apply_expert_parallel(layer, axis)
        for name, parameter in layer.named_parameters():
            assert before[name] is parameter
            if name.startswith("experts."):
                part = parts[id(parameter)]
                assert part.axis == "expert"
                assert part.shape == tuple(parameter.shape)
                assert parameter.shape[0] == E // world
        results.append(run(layer, case, *tokens_of(case, rank)))
    return results


def one_rank(case: Case, world: int) -> list[dict[str, Tensor]]:
    """What every rank has to find."""
    layer = build(case)
    results = []
    for rank in range(world):
        layer.zero_grad()
        results.append(run(layer, case, *tokens_of(case, rank)))
    for name in results[0]:
        if name.startswith("experts."):
            total = torch.stack([result[name] for result in results]).sum(0)
            for rank, result in enumerate(results):
                result[name] = total.chunk(world)[rank]
    return results


def unequal(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> list[str]:
    assert found.keys() == expected.keys()
    far = {n: float((found[n] - e).norm() / max(1, e.norm())) for n, e in expected.items()}
    return [f"{name}: {error:.1e}" for name, error in far.items() if not error <= bound]


CASES = {
    "k=1": Case({"k": 1}),
    "k=2": Case(),
    "k=3": Case({"k": 3, "score": "sigmoid"}),
    "capacity, k=1": Case({"k": 1, "drop_tokens": True, "capacity_factor": 0.8, "min_capacity": 1}),
    "capacity, k=2": Case({"drop_tokens": True, "capacity_factor": 0.8, "min_capacity": 1}),
    "capacity 0": Case({"drop_tokens": True, "capacity_factor": 0.0, "min_capacity": 0}),
    "fp32": Case(dtype=torch.float32),
    "any module": Case(special=True),
    "uneven": Case(tokens=(3, 17, 1, 6)),
    "no tokens": Case(tokens=(0, 5, 0, 2)),
    "no tokens, any module": Case(tokens=(0, 5, 0, 2), special=True),
    "no tokens anywhere": Case(tokens=(0, 0, 0, 0)),
    "all to one": Case({"k": 1}, to_one=True),
    "all to one, any module": Case(to_one=True, special=True),
    "shared": Case(shared=True),
    "recomputed": Case(shared=True, recompute=True),
    "evaluation": Case({"drop_tokens": True, "eval_capacity_factor": 0.8, "min_capacity": 1}, eval=True),
    "groups, scaled": Case({"score": "sigmoid", "groups": 4, "top_groups": 2, "scale": 2.5}),
}


@pytest.mark.parametrize("world", [wide(1), 2, wide(4)])
def test_experts_over_ranks(world):
    results = spawn(sharded, world, list(CASES.values()))
    for index, (name, case) in enumerate(CASES.items()):
        for rank, expected in enumerate(one_rank(case, world)):
            assert not unequal(results[rank][index], expected, EXACT[case.dtype]), (name, rank)


@pytest.mark.sample(1)
@pytest.mark.parametrize("special", [False, True])
def test_recomputation_draws_the_same(special):
    case = Case(
        {"k": 1, "drop_tokens": True, "use_rts": True, "min_capacity": 1, "capacity_factor": 0.8}, special=special
    )
    plain, again = zip(*spawn(sharded, 2, [case, Case(**vars(case) | {"recompute": True})]), strict=True)
    for one, other in zip(plain, again, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.sample(1)
@pytest.mark.parametrize("special", [False, True])
def test_autocast_with_a_rank_without_tokens(special):
    """All ranks exchange the same dtype."""
    case = Case(dtype=torch.float32, autocast=True, tokens=(0, 5), special=special)
    results = spawn(sharded, 2, [case])
    for rank, expected in enumerate(one_rank(case, 2)):
        assert not unequal(results[rank][0], expected, 2e-2)


# --- traffic ---------------------------------------------------------------------------------------------------------


def traffic(rank: int, world: int, case: Case) -> dict[str, Any]:
    layer, axis = build(case), Axis("expert", make_comm())
    apply_expert_parallel(layer, axis)
    x, upstream = tokens_of(case, rank)
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        y = layer(x)
    forward = dict(axis.traffic.bytes)
    y.backward(upstream.to(y.dtype))
    with torch.no_grad():
        routing = layer.router(x)
    owner = routing.experts // (E // world)
    return {
        "forward": forward,
        "both": dict(axis.traffic.bytes),
        "to": [int((owner == r).sum()) for r in range(world)],
    }


@pytest.mark.parametrize(("case", "itemsize"), [wide(Case(), 8), (Case(dtype=torch.float32, autocast=True), 2)])
def test_bytes(case, itemsize):
    """A row goes to its expert and back, and the gradients the other way; nothing else, and nothing is padded."""
    ranks = spawn(traffic, 4, case)
    for rank, found in enumerate(ranks):
        out = sum(n for r, n in enumerate(found["to"]) if r != rank)
        back = sum(ranks[r]["to"][rank] for r in range(4) if r != rank)
        rows = out + back
        assert found["forward"] == {"counts": 3 * E // 4 * 8, "all_to_all": rows * H * itemsize}
        assert found["both"] == {"counts": 3 * E // 4 * 8, "all_to_all": 2 * rows * H * itemsize}


# --- overlap ---------------------------------------------------------------------------------------------------------


class Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[str]) -> Tensor:
        ctx.log = log
        log.append("shared")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.log.append("shared")
        return grads[0], None


class NotedExpert(nn.Module):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)
        self.log = log

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(Noted.apply(self.linear(x), self.log))


@pytest.mark.sample(1)
@pytest.mark.parametrize("residual", [False, True])
@on_ranks(2, timeout_s=120, init_process_group=True)
def test_the_dense_expert_runs_while_rows_travel(rank: int, world_size: int, residual: bool) -> None:
    log: list[str] = []
    layer = MoE(H, FeedForward(H, F), E, k=2, drop_tokens=False, use_residual=residual)
    if residual:
        layer.residual_expert = NotedExpert(log)
    else:
        layer.shared_expert = NotedExpert(log)
    apply_expert_parallel(layer, Axis("expert", make_comm()))
    begin, wait = TokenExchange.begin, TokenExchange.wait

    def noted_begin(self: TokenExchange, *args: Any) -> Tensor:
        log.append("begin")
        return begin(self, *args)

    def noted_wait(self: TokenExchange) -> Tensor:
        log.append("wait")
        return wait(self)

    with mock.patch.multiple(TokenExchange, begin=noted_begin, wait=noted_wait):
        x = torch.randn(10, H, requires_grad=True)
        y = layer(x)
        forward = list(log)
        log.clear()
        y.sum().backward()
    assert forward == ["begin", "shared", "wait", "begin", "wait"]
    assert log == ["begin", "wait", "begin", "shared", "wait"]


# --- folded over tensor-parallel ranks -------------------------------------------------------------------------------


def replicated(rank: int, world: int, cases: list[Case], tensor: int) -> list[dict[str, Tensor]]:
    import torch.distributed as dist

    comm = make_comm()
    groups = [dist.new_group(list(range(i, i + tensor))) for i in range(0, world, tensor)]
    mine = groups[rank // tensor]
    tensor_axis = Axis("tensor", Comm(mine, mine))
    results = []
    for case in cases:
        layer = build(case)
        parts = apply_expert_parallel(layer, Axis("expert", comm), tensor_axis=tensor_axis)
        assert all(isinstance(part, TensorPart) for part in parts.values())
        torch.manual_seed(rank)  # what is drawn must not depend on it
        results.append(run(layer, case, *tokens_of(case, rank // tensor)))
    return results


REPLICATED = {
    "k=2": Case(),
    "k=1": Case({"k": 1}),
    "capacity": Case({"drop_tokens": True, "capacity_factor": 0.8, "min_capacity": 1}),
    "shared": Case(shared=True, recompute=True),
    "any module": Case(special=True),
    "uneven": Case(tokens=(5, 7)),
    "fewer tokens than ranks": Case(tokens=(1, 0)),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("world", "tensor"), [(2, 2), (4, 2), (4, 4)])
def test_tensor_parallel_ranks_share_the_tokens(world, tensor):
    """Each dispatches a part; the result and all gradients are those of one rank with all tokens, on each of them."""
    results = spawn(replicated, world, list(REPLICATED.values()), tensor)
    batches = world // tensor
    for index, (name, case) in enumerate(REPLICATED.items()):
        expected = one_rank(case, batches)
        for rank in range(world):
            wanted = dict(expected[rank // tensor])
            for key, value in wanted.items():
                if key.startswith("experts."):
                    total = torch.cat([expected[b][key] for b in range(batches)])
                    wanted[key] = total.chunk(world)[rank]
                    assert value.shape[0] == E // batches
            assert not unequal(results[rank][index], wanted, 1e-12), (name, rank)


def test_tensor_parallel_ranks_draw_the_same():
    """Random token selection, sampling and noise: the ranks start from different random states."""
    cases = [
        Case({"k": 1, "drop_tokens": True, "use_rts": True, "capacity_factor": 0.5, "min_capacity": 1}),
        Case({"k": 2, "second_expert_sampling": True}),
        Case({"k": 1, "noisy_gate_policy": "RSample"}),
        Case({"k": 3, "noisy_gate_policy": "Jitter"}),
    ]
    first, second = spawn(replicated, 2, cases, 2)
    for one, other in zip(first, second, strict=True):
        for name in ("y", "x", "router.weight"):
            assert torch.equal(one[name], other[name]), name


def test_sharded_tokens_are_not_sharded_again():
    """With sequence parallelism every tensor-parallel rank has tokens of its own."""
    case = Case()
    results = spawn(sharded_tokens, 2, case)
    for rank, expected in enumerate(one_rank(case, 2)):
        assert not unequal(results[rank], expected, 1e-12)


def sharded_tokens(rank: int, world: int, case: Case) -> dict[str, Tensor]:
    comm, layer = make_comm(), build(case)
    apply_expert_parallel(layer, Axis("expert", comm), tensor_axis=Axis("tensor", comm), tokens_sharded=True)
    return run(layer, case, *tokens_of(case, rank))


def scaled(rank: int, world: int, case: Case) -> list[dict[str, Tensor]]:
    axis, results = Axis("expert", make_comm()), []
    for scale in (1.0, 0.25):
        layer = build(case)
        apply_expert_parallel(layer, axis, gradient_scale=scale)
        results.append(run(layer, case, *tokens_of(case, rank)))
    return results


@pytest.mark.sample(1)
@pytest.mark.parametrize("special", [False, True])
def test_gradients_of_experts_alone_are_scaled(special):
    for plain, quarter in spawn(scaled, 2, Case(special=special)):
        for name, value in plain.items():
            expected = value * 0.25 if name.startswith("experts.") else value
            assert torch.equal(quarter[name], expected), name


def started(rank: int, world: int) -> tuple[list[Tensor], dict[str, int]]:
    """Rank r sends r + q numbers to rank q, all of them r."""
    axis = Axis("any", make_comm())
    parts = [torch.full((rank + q,), float(rank)) for q in range(world)]
    received = [torch.full((q + rank,), torch.nan) for q in range(world)]
    axis.start_all_to_all(parts, received, "mine").wait()
    return received, dict(axis.traffic.bytes)


@pytest.mark.parametrize("world", [wide(1), wide(3), 2])
def test_parts_of_any_size_arrive(world):
    for rank, (received, sent) in enumerate(spawn(started, world)):
        assert all(torch.equal(part, torch.full((q + rank,), float(q))) for q, part in enumerate(received))
        others = sum(rank + q for q in range(world) if q != rank)
        assert sent == ({"mine": 4 * others} if others else {})


def on_meta(rank: int, world: int) -> list[tuple[int, ...]]:
    with torch.device("meta"):
        layer = MoE(H, lambda: FeedForward(H, F), E)
    parts = apply_expert_parallel(layer, Axis("expert", make_comm()))
    assert all(p.is_meta for p in layer.parameters())
    return [parts[id(p)].full_shape for p in layer.experts.parameters()]


def test_without_memory():
    shapes = [(E, F, H), (E, F), (E, H, F), (E, H)]
    assert spawn(on_meta, 2) == [shapes, shapes]
