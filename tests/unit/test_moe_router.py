"""Which experts a token gets, who is dropped, and the losses of routers.

Trusted runs: GShard's and Switch's algorithms with one-hot masks, written here from the papers, and DeepSpeed's gating
functions where that is installed.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import nn

from ls_strategy.distributed.axis import Axis
from ls_strategy.errors import ConfigError, StateError
from ls_strategy.moe import router as routing_module
from ls_strategy.moe.balance import update_router_bias
from ls_strategy.moe.capacity import capacity_of, kept_pairs
from ls_strategy.moe.losses import MOST_LEFT, balance_loss, moe_losses, z_loss
from ls_strategy.moe.router import Router, RoutingOptions, per_expert

S, H, E = 37, 12, 6


@pytest.fixture(scope="module")
def gating():
    """DeepSpeed's gating functions; its import changes the environment."""
    before = dict(os.environ)
    try:
        return pytest.importorskip("deepspeed.moe.sharded_moe")
    finally:
        os.environ.clear()
        os.environ.update(before)


def router(tokens=S, seed=0, **options):
    torch.manual_seed(seed)
    made = Router(H, RoutingOptions(**{"num_experts": E, "min_capacity": 0} | options))
    x = torch.randn(tokens, H, generator=torch.Generator().manual_seed(seed))
    x[:, 0] += 1.5  # uneven loads
    with torch.no_grad():
        made.weight[:, 0] += torch.linspace(-0.5, 0.5, E)
    return made, x


def dense(routing):
    """``(S, E)``: the weight of every expert."""
    return torch.zeros(len(routing.experts), E).scatter(1, routing.experts, routing.weights.detach())


def gates_of(made, x):
    logits = x @ made.weight.detach().t()
    return logits, logits.softmax(-1)


def one_hot(index):
    return nn.functional.one_hot(index, E)


def switch(gates, capacity, priority):
    """Fedus et al., algorithm in section 2: argmax, and the first ``capacity`` tokens in the order of ``priority``."""
    mask = one_hot(gates.argmax(-1))
    order = priority.argsort(descending=True, stable=True)
    location = torch.empty_like(mask)
    location[order] = mask[order].cumsum(0) - 1
    kept = mask * (location < capacity)
    loss = E * (gates.mean(0) * mask.float().mean(0)).sum()
    return gates * kept, loss


def gshard(gates, second_scores, capacity):
    """Lepikhin et al., algorithm 1."""
    mask1 = one_hot(gates.argmax(-1))
    mask2 = one_hot(second_scores.masked_fill(mask1.bool(), -math.inf).argmax(-1))
    location1 = mask1.cumsum(0) - 1
    location2 = mask2.cumsum(0) - 1 + mask1.sum(0)
    loss = (gates.mean(0) * mask1.float().mean(0)).mean() * E * E
    kept = mask1 * (location1 < capacity) + mask2 * (location2 < capacity)
    weights = gates * kept
    return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).eps), loss


def best_of_many(gates, k, capacity, policy):
    """What DeepSpeed does where ``k > 2``."""
    mask = torch.zeros_like(gates).scatter(1, gates.topk(k, -1).indices, 1)
    loss = (gates.mean(0) * mask.mean(0)).mean() * E * E / k
    if policy == "position":
        mask = mask * (mask.cumsum(0) - 1 < capacity)
    else:
        lowest = (gates * mask).topk(min(capacity, len(gates)), 0).values[-1]
        mask = mask * (gates >= lowest)
    weights = gates * mask
    return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).eps), loss


def check(found, made, expected):
    weights, loss = expected
    torch.testing.assert_close(dense(found), weights, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(moe_losses(made).detach(), 0.01 * loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25, 8.0])
def test_one_choice_is_switch(factor, monkeypatch):
    made, x = router(k=1, capacity_factor=factor)
    priority = torch.rand(S)
    monkeypatch.setattr(torch, "rand_like", lambda _: priority[:, None])
    _, gates = gates_of(made, x)
    check(made(x), made, switch(gates, math.ceil(S / E * factor), priority))


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25, 8.0])
@pytest.mark.parametrize("sampled", [False, True])
def test_two_choices_are_gshard(factor, sampled, monkeypatch):
    made, x = router(k=2, capacity_factor=factor, second_expert_sampling=sampled)
    logits, gates = gates_of(made, x)
    noise = torch.randn(S, E) * 2
    monkeypatch.setattr(routing_module, "gumbel", lambda _: noise)
    check(made(x), made, gshard(gates, logits + noise if sampled else logits, math.ceil(S / E * factor * 2)))


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25, 8.0])
@pytest.mark.parametrize("policy", ["probs", "position"])
def test_more_choices(factor, policy):
    made, x = router(k=3, capacity_factor=factor, drop_policy=policy)
    _, gates = gates_of(made, x)
    check(made(x), made, best_of_many(gates, 3, math.ceil(S / E * factor * 3), policy))


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("factor", [0.4, 1.0, 1.1, 2.0])
@pytest.mark.parametrize("drop", [True, False])
def test_deepspeed_routes_the_same(gating, k, factor, drop, monkeypatch):
    """Its gating functions, with the same random numbers: weights, loss, and the gradient of the router."""
    made, x = router(k=k, capacity_factor=factor, drop_tokens=drop, min_capacity=3)
    noise, priority = torch.randn(S, E), torch.rand(S, 1)
    monkeypatch.setattr(routing_module, "gumbel", lambda _: noise)
    monkeypatch.setattr(torch, "rand_like", lambda _: priority)
    monkeypatch.setitem(gating.gumbel_map, x.device, lambda _: noise)
    monkeypatch.setitem(gating.exp_selection_uniform_map, x.device, lambda shape: priority.expand(shape))
    routing = made(x)
    upstream = torch.randn(S, E)
    combined = torch.zeros(S, E).scatter(1, routing.experts, routing.weights)
    own = torch.autograd.grad((combined * upstream).sum() + 100 * moe_losses(made), made.weight)[0]

    weight = made.weight.detach().clone().requires_grad_()
    logits = x @ weight.t()
    if k == 1:
        result = gating.top1gating(logits, factor, 3, drop_tokens=drop, sparse_routes=True)
    elif k == 2:
        result = gating.top2gating(logits.clone(), factor, 3, drop_tokens=drop, sparse_routes=True)
    else:
        result = gating.topkgating(logits, k, factor, 3, drop_tokens=drop, sparse_routes=True)
    loss, _, _, experts, _, weights, counts = result
    kept = (experts >= 0).t()
    weights = torch.where(kept, weights.t(), 0)
    theirs = torch.zeros(S, E).scatter_add(1, experts.t().clamp(min=0).long(), weights)
    torch.testing.assert_close(combined, theirs, rtol=1e-6, atol=1e-7)
    assert torch.equal(counts.long(), per_expert(routing.experts, E))
    (expected,) = torch.autograd.grad((theirs * upstream).sum() + loss, weight)
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 7, 10, 1000, 12345])
@pytest.mark.parametrize("factor", [0.3, 1.0, 1.1, 1.25, 3.3])
def test_capacity_is_deepspeeds(gating, tokens, factor):
    theirs = gating._capacity(torch.empty(tokens, E), torch.tensor(factor), torch.tensor(4))
    assert capacity_of(tokens, E, factor, 4) == int(theirs)


def test_kept_pairs_by_hand():
    experts = torch.tensor([[0, 1], [0, 1], [1, 0], [0, 2]])
    token_by_token = kept_pairs(experts, 3, 2)
    assert token_by_token.tolist() == [[True, True], [True, True], [False, False], [False, True]]
    first_choices = kept_pairs(experts, 3, 2, ranks_first=True)
    assert first_choices.tolist() == [[True, True], [True, False], [True, False], [False, True]]
    priority = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6], [0.7, 0.8]])
    best = kept_pairs(experts, 3, 2, priority=priority)
    assert best.tolist() == [[False, False], [False, True], [True, True], [True, True]]
    assert kept_pairs(experts, 3, 0).any() == False  # noqa: E712
    assert kept_pairs(experts, 3, 4) is None


def test_evaluation_has_its_own_capacity_and_nothing_random():
    made, x = router(k=1, capacity_factor=8.0, eval_capacity_factor=0.5, noisy_gate_policy="Jitter", z_loss=1.0)
    made.eval()
    first, second = made(x), made(x)
    assert torch.equal(first.weights, second.weights)
    assert torch.equal(first.kept, second.kept)
    _, gates = gates_of(made, x)
    expected, _ = switch(gates, math.ceil(S / E * 0.5), -torch.arange(S))
    torch.testing.assert_close(dense(first), expected, rtol=1e-6, atol=1e-7)
    assert moe_losses(made) == 0
    assert made.counts.statistics(x.device).calls == 0
    made.train()
    assert made(x).kept is None


def test_random_selection_keeps_as_many_and_others():
    made, x = router(k=1, capacity_factor=0.5)
    first, second = made(x), made(x)
    assert torch.equal(first.experts, second.experts)
    assert not torch.equal(first.kept, second.kept)
    for one in (first, second):
        counts = per_expert(one.experts, E, one.kept)
        assert torch.equal(counts, per_expert(one.experts, E).clamp(max=math.ceil(S / E * 0.5)))


def test_noise_draws_experts_with_their_probabilities():
    made, _ = router(k=1, noisy_gate_policy="RSample", drop_tokens=False)
    x = torch.randn(1, H).expand(20_000, H)
    probability = gates_of(made, x[:1])[1][0]
    share = per_expert(made(x).experts, E) / len(x)
    error = (probability * (1 - probability) / len(x)).sqrt()
    assert ((share - probability).abs() < 5 * error).all()
    assert made.eval()(x).experts.unique().numel() == 1


def test_jitter_changes_the_routers_input_by_a_hundredth():
    made, x = router(k=1, noisy_gate_policy="Jitter", drop_tokens=False)
    exact, _ = router(k=1, drop_tokens=False)
    change = (made(x).weights / exact(x).weights - 1).abs().max()
    assert 1e-4 < change < 0.2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_computed_in_fp32(dtype):
    """With 16-bit weights and under autocast: bit for bit what fp32 gives."""
    made, x = router(k=2, drop_tokens=False, second_expert_sampling=False)
    expected = made(x.to(dtype).float())
    with torch.autocast("cpu", torch.bfloat16):
        found = made(x.to(dtype))
    assert found.weights.dtype == torch.float32
    assert torch.equal(found.weights, expected.weights)
    low = made.to(dtype)(x.to(dtype))
    exact, _ = router(k=2, drop_tokens=False, second_expert_sampling=False)
    exact.weight.data = exact.weight.data.to(dtype).float()
    assert torch.equal(low.weights, exact(x.to(dtype).float()).weights)


def test_sigmoid_normalisation_and_scale():
    made, x = router(k=3, score="sigmoid", drop_tokens=False, scale=2.5)
    routing = made(x)
    scores = (x @ made.weight.t()).sigmoid()
    top = scores.topk(3, -1)
    assert torch.equal(routing.experts, top.indices)
    torch.testing.assert_close(routing.weights, 2.5 * top.values / top.values.sum(-1, keepdim=True))
    raw, _ = router(k=3, score="sigmoid", drop_tokens=False, normalize=False)
    torch.testing.assert_close(raw(x).weights, top.values)
    probabilities = scores / scores.sum(-1, keepdim=True)
    expected = balance_loss(probabilities, per_expert(top.indices, E), 3)
    torch.testing.assert_close(moe_losses(made), 0.01 * expected)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_groups(score):
    """By hand: a group's score is its best, or the sum of its two best."""
    made, x = router(k=3, score=score, groups=3, top_groups=2, drop_tokens=False)
    logits, gates = gates_of(made, x)
    scores = gates if score == "softmax" else logits.sigmoid()
    for token, chosen in zip(scores, made(x).experts, strict=True):
        groups = [token[i : i + 2] for i in (0, 2, 4)]
        of_group = [float(g.max() if score == "softmax" else g.sum()) for g in groups]
        worst = of_group.index(min(of_group))
        allowed = [i for i in range(E) if i // 2 != worst]
        best = sorted(allowed, key=lambda i: -float(token[i]))[:3]
        assert chosen.tolist() == best


def test_bias_chooses_and_does_not_weigh():
    made, x = router(k=2, score="sigmoid", bias_update_rate=0.1, drop_tokens=False, balance_loss=0.0)
    assert made.bias.dtype == torch.float32
    assert "bias" in made.state_dict()
    made.bias[4] = 10.0
    routing = made(x)
    assert (routing.experts[:, 0] == 4).all()
    scores = (x @ made.weight.t()).sigmoid().gather(1, routing.experts)
    torch.testing.assert_close(routing.weights, scores / scores.sum(-1, keepdim=True))


def test_bias_follows_the_loads():
    one, x = router(k=1, bias_update_rate=0.25, drop_tokens=False)
    other = Router(H, RoutingOptions(num_experts=3, bias_update_rate=0.5, drop_tokens=False))
    still = Router(H, RoutingOptions(num_experts=3))
    model = nn.ModuleList([one, other, still])
    first, second = one(x).experts, one(x[:10]).experts
    asked = []

    def reduce(loads):
        asked.append(loads.clone())
        return loads * 2

    update_router_bias(model, reduce)
    load = (per_expert(first, E) + per_expert(second, E)).float()
    assert torch.equal(one.bias, 0.25 * torch.sign(load.mean() - load))
    assert torch.equal(other.bias, torch.zeros(3))
    assert len(asked) == 1
    assert torch.equal(asked[0], torch.cat([load, torch.zeros(3)]))
    before = one.bias.clone()
    update_router_bias(model)  # the loads are forgotten
    assert torch.equal(one.bias, before)
    update_router_bias(still, reduce)
    assert len(asked) == 1


def test_bias_evens_the_loads_out():
    made, _ = router(k=2, bias_update_rate=0.02, score="sigmoid", drop_tokens=False, balance_loss=0.0)
    x = torch.randn(4096, H)
    x[:, 0] += 1.5
    before = per_expert(made(x).experts, E).float()
    for _ in range(100):
        made(x)
        update_router_bias(made)
    after = per_expert(made(x).experts, E).float()
    assert before.max() / before.mean() > 1.4
    assert after.max() / after.mean() < 1.1


def test_bias_is_cast_back_to_fp32():
    made, x = router(k=1, bias_update_rate=1e-3, drop_tokens=False)
    made.bias = made.bias.bfloat16()
    for _ in range(3):
        made(x)
        update_router_bias(made)
    assert made.bias.dtype == torch.float32
    torch.testing.assert_close(made.bias.abs().max(), torch.tensor(3e-3))


def test_even_loads_have_balance_loss_one():
    even = torch.full((E * 4, E), 1 / E)
    assert math.isclose(balance_loss(even, torch.full((E,), 4)), 1, rel_tol=1e-6)
    assert math.isclose(balance_loss(even, torch.full((E,), 8), 2), 1, rel_tol=1e-6)
    one = torch.zeros(4, E)
    one[:, 2] = 1
    assert float(balance_loss(one, torch.tensor([0, 0, 4, 0, 0, 0]))) == E


def test_z_loss():
    logits = torch.randn(S, E, dtype=torch.float64)
    expected = sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits.tolist()) / S
    assert math.isclose(z_loss(logits), expected, rel_tol=1e-12)


def test_losses_wait_and_are_taken_once():
    made, x = router(k=1, z_loss=0.5)
    assert moe_losses(made) == 0
    made(x)
    made(x)
    with torch.no_grad():
        made(x)
    statistics = made.counts.statistics(x.device)
    both = moe_losses(made)
    expected = 2 * (0.01 * statistics.balance_loss + 0.5 * statistics.z_loss)
    torch.testing.assert_close(both.detach(), expected, rtol=1e-6, atol=0)
    assert statistics.calls == 3
    assert moe_losses(made) == 0
    assert moe_losses(nn.Identity()) == 0


def test_losses_that_are_never_taken_are_an_error():
    made, x = router(k=1)
    for _ in range(MOST_LEFT):
        made(x)
    with pytest.raises(StateError, match="moe_losses"):
        made(x)
    silent, _ = router(k=1, balance_loss=0.0)
    for _ in range(MOST_LEFT + 1):
        silent(x)


def test_no_tokens():
    for k in (1, 2, 3):
        made, x = router(tokens=0, k=k, z_loss=1.0)
        routing = made(x)
        assert routing.experts.shape == (0, k)
        loss = moe_losses(made)
        loss.backward()
        assert loss == 0
        assert torch.equal(made.weight.grad, torch.zeros(E, H))
        assert not made.counts.statistics(x.device).entropy.isnan()


def test_replicas_draw_the_same():
    """What is drawn goes through a broadcast over the replicas, and nothing else does."""
    made, x = router(k=1, noisy_gate_policy="RSample", capacity_factor=0.5)
    seen = []

    class Recorded(Axis):
        def broadcast_(self, tensor, source=0):
            seen.append(tensor.shape)

    made(x, Recorded("tensor"))
    assert seen == [(S, E), (S, 1)]
    seen.clear()
    made.eval()(x, Recorded("tensor"))
    assert seen == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 7}, "k=7"),
        ({"k": 0}, "k=0"),
        ({"num_experts": 0}, "num_experts=0"),
        ({"groups": 4}, "groups=4"),
        ({"groups": 3, "top_groups": 4}, "top_groups=4"),
        ({"groups": 3, "top_groups": 1, "k": 3}, "between 1 and 2"),
        ({"noisy_gate_policy": "RSample", "k": 2}, "RSample"),
        ({"noisy_gate_policy": "None"}, "noisy_gate_policy='None'"),
        ({"score": "tanh"}, "'sigmoid'"),
        ({"drop_policy": "last"}, "drop_policy"),
        ({"capacity_factor": -1.0}, "capacity_factor=-1.0"),
        ({"balance_loss": float("nan")}, "balance_loss=nan"),
        ({"bias_update_rate": -0.1}, "bias_update_rate"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        RoutingOptions(**{"num_experts": E} | options)
