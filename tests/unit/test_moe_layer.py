"""The Mixture-of-Experts layer on one rank: values, gradients, parameters, and what a model may do with it.

Trusted runs: a loop over tokens and their experts, each a module of its own.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ls_strategy.distributed.axis import Axis
from ls_strategy.errors import ConfigError, PlanError, StateError
from ls_strategy.moe.experts import Experts
from ls_strategy.moe.feed_forward import FeedForward, GatedFeedForward
from ls_strategy.moe.layer import MoE
from ls_strategy.moe.losses import moe_losses
from ls_strategy.moe.parallel import apply_expert_parallel

S, H, F, E = 23, 8, 12, 5


class Normed(nn.Module):
    """An expert of no known kind, with a parameter of its own and one that it uses twice."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.scale = nn.Parameter(torch.rand(H))
        self.one = nn.Linear(H, H)
        self.two = nn.Linear(H, H)
        self.two.weight = self.one.weight

    def forward(self, x):
        assert len(x) > 0
        return self.two(self.one(self.norm(x)).tanh()) * self.scale

    def reset_parameters(self):
        nn.init.uniform_(self.scale)


EXPERTS = {
    "feed forward": lambda: FeedForward(H, F),
    "without bias": lambda: FeedForward(H, F, bias=False, activation=nn.ReLU()),
    "gated": lambda: GatedFeedForward(H, F),
    "linear": lambda: nn.Linear(H, H),
    "sequential": lambda: nn.Sequential(nn.Linear(H, F), nn.GELU(), nn.Sequential(nn.Linear(F, H), nn.Dropout(0.0))),
    "any module": Normed,
}


def layer(expert=EXPERTS["feed forward"], *, seed=0, **options):
    torch.manual_seed(seed)
    defaults = {"k": 2, "drop_tokens": False, "second_expert_sampling": False, "balance_loss": 0.0}
    return MoE(H, expert, E, **defaults | options).double()


def tokens(kind="random"):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(S, H, generator=generator, dtype=torch.float64)
    return x.fill_(0.5) if kind == "all the same" else x


def steer(moe, kind):
    """Make the router send all tokens to the same experts, or to none of some, or have it find all experts equal."""
    with torch.no_grad():
        if kind == "ties":
            moe.router.weight.zero_()
        elif kind == "none to some":
            moe.router.weight[1] = moe.router.weight[0] - 5 * moe.router.weight[0].sign()
            moe.router.weight[3] *= 0


def own_experts(moe, expert):
    """One module per expert, whose parameters are views of the stacked ones."""
    modules = []
    for index in range(E):
        module = expert()
        for path, child in module.named_modules():
            for name, _ in list(child.named_parameters(recurse=False, remove_duplicate=False)):
                stacked = moe.experts.get_submodule(path).get_parameter(name)
                del child._parameters[name]
                setattr(child, name, stacked[index])
        modules.append(module)
    return modules


def loop(moe, experts, x):
    """Every token through each of its experts, one at a time, and the router written out."""
    k = moe.router.options.k
    scores = (x @ moe.router.weight.t()).softmax(-1)
    rows = []
    for token, score in zip(x, scores, strict=True):
        # The first of equal ones, where torch.topk promises no order.
        chosen = score.sort(descending=True, stable=True).indices[:k] if k <= 2 else score.topk(k).indices
        weights = score[chosen]
        weights = weights / weights.sum() if k > 1 else weights
        rows.append(sum(w * experts[int(e)](token[None])[0] for e, w in zip(chosen, weights, strict=True)))
    return torch.stack(rows)


def everything(moe, y, x, upstream):
    parameters = dict(moe.named_parameters())
    grads = torch.autograd.grad(y, [x, *parameters.values()], upstream, materialize_grads=True)
    return {"y": y.detach(), **dict(zip(["x", *parameters], grads, strict=True))}


def same(found, expected, bound=1e-12):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).norm() <= bound * max(1, value.norm()), name


@pytest.mark.sample(22)
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("kind", ["random", "all the same", "none to some", "ties"])
@pytest.mark.parametrize("expert", EXPERTS)
def test_dropless_is_a_loop_over_tokens(expert, kind, k):
    moe = layer(EXPERTS[expert], k=k)
    steer(moe, kind)
    x = tokens(kind).requires_grad_()
    upstream = torch.randn(S, H, dtype=torch.float64)
    expected = everything(moe, loop(moe, own_experts(moe, EXPERTS[expert]), x), x, upstream)
    same(everything(moe, moe(x), x, upstream), expected)
    if kind in ("all the same", "ties"):
        assert (moe.statistics().routed > 0).sum() == k


def test_shape_is_kept():
    moe, x = layer(), tokens()[:20]
    assert torch.equal(moe(x.view(2, 5, 2, H)), moe(x).view(2, 5, 2, H))
    assert moe(x[0]).shape == (H,)
    assert moe(x[:0].view(3, 0, H)).shape == (3, 0, H)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("expert", ["feed forward", "any module"])
def test_capacity_is_a_dispatch_by_one_hot_masks(k, expert):
    """GShard's einsums with a slot per expert and place, from the routing that other tests check."""
    moe = layer(EXPERTS[expert], k=k, drop_tokens=True, capacity_factor=0.6, min_capacity=0)
    x = tokens().requires_grad_()
    upstream = torch.randn(S, H, dtype=torch.float64)
    state = torch.get_rng_state()
    found = everything(moe, moe(x), x, upstream)
    torch.set_rng_state(state)
    routing = moe.router(x)
    gates = torch.zeros(S, E, dtype=torch.float64).scatter(1, routing.experts, routing.weights)
    kept = torch.zeros(S, E).scatter(1, routing.experts, routing.kept.float())
    assert 0 < kept.sum() < S * k
    place = (kept.cumsum(0) - 1) * kept
    slot = nn.functional.one_hot(place.long(), S).double() * kept[..., None]
    dispatched = torch.einsum("sec,sm->ecm", slot, x)
    computed = torch.stack([f(rows) for f, rows in zip(own_experts(moe, EXPERTS[expert]), dispatched, strict=True)])
    y = torch.einsum("sec,ecm->sm", gates[..., None] * slot, computed)
    same(found, everything(moe, y, x, upstream))


def test_nothing_fits():
    """Capacity 0: the layer adds nothing, and every gradient is 0."""
    for expert in ("feed forward", "any module"):
        moe = layer(EXPERTS[expert], drop_tokens=True, capacity_factor=0.0, min_capacity=0)
        x = tokens().requires_grad_()
        found = everything(moe, moe(x), x, torch.ones(S, H, dtype=torch.float64))
        assert all(not value.any() for value in found.values())
        moe(x).sum().backward()
        assert all(p.grad is not None for p in moe.experts.parameters())


def test_what_is_dropped_does_not_meet_what_is_infinite():
    moe = layer(k=1, drop_tokens=True, capacity_factor=0.5, min_capacity=0, use_rts=False)
    x = tokens()
    steer(moe, "ties")  # all to expert 0, which has room for the first three
    with torch.no_grad():
        moe.experts.down.bias[0] = torch.inf
    y = moe(x)
    assert y[:3].isinf().all()
    assert not y[3:].any()


@pytest.mark.parametrize("expert", ["feed forward", "gated", "linear", "sequential"])
@pytest.mark.parametrize("drop", [True, False])
def test_one_by_one_computes_what_all_at_once_does(expert, drop):
    moe = layer(EXPERTS[expert], drop_tokens=drop, capacity_factor=0.7)
    assert moe.experts.runs_grouped
    x, upstream = tokens().requires_grad_(), torch.randn(S, H, dtype=torch.float64)
    expected = everything(moe, moe(x), x, upstream)
    moe.experts.runs_grouped = False
    same(everything(moe, moe(x), x, upstream), expected)


def test_which_experts_run_all_at_once():
    def hooked():
        module = FeedForward(H, F)
        module.up.register_forward_hook(lambda m, a, y: y * 2)
        return module

    alone = {
        "any module": Normed(),
        "hook": hooked(),
        "activation with parameters": FeedForward(H, F, activation=nn.PReLU()),
        "norm": nn.Sequential(nn.Linear(H, H), nn.LayerNorm(H)),
        "forward of its own": type("Special", (nn.Linear,), {"forward": lambda self, x: x * self.weight[0]})(H, H),
    }
    assert {name: Experts(e, 2).runs_grouped for name, e in alone.items()} == dict.fromkeys(alone, False)
    drawn_otherwise = type("Drawn", (nn.Linear,), {"reset_parameters": lambda self: None})
    assert Experts(drawn_otherwise(H, H), 2).runs_grouped
    for expert in list(alone.values()):
        x = tokens().float()
        moe = MoE(H, expert, 1, drop_tokens=False)
        torch.testing.assert_close(moe(x), expert(x))


def test_copies_and_drawings():
    expert = FeedForward(H, F)
    copies = MoE(H, expert, E)
    for name, parameter in expert.named_parameters():
        stacked = copies.experts.get_parameter(name)
        assert stacked.shape == (E, *parameter.shape)
        assert all(torch.equal(each, parameter) for each in stacked)
    torch.manual_seed(3)
    drawn = MoE(H, lambda: FeedForward(H, F), E)
    torch.manual_seed(3)
    each = [FeedForward(H, F) for _ in range(E)]
    for name, _ in expert.named_parameters():
        assert torch.equal(drawn.experts.get_parameter(name), torch.stack([e.get_parameter(name) for e in each]))


def test_names():
    names = {name: tuple(p.shape) for name, p in MoE(H, Normed, E, use_residual=True).named_parameters()}
    assert names == {
        "experts.scale": (E, H), "experts.norm.weight": (E, H), "experts.norm.bias": (E, H),
        "experts.one.weight": (E, H, H), "experts.one.bias": (E, H), "experts.two.bias": (E, H),
        "residual_expert.scale": (H,), "residual_expert.norm.weight": (H,), "residual_expert.norm.bias": (H,),
        "residual_expert.one.weight": (H, H), "residual_expert.one.bias": (H,), "residual_expert.two.bias": (H,),
        "router.weight": (E, H), "coefficient.weight": (2, H), "coefficient.bias": (2,),
    }  # fmt: skip


def test_state_dict_copy_and_pickle():
    moe = layer(functools.partial(FeedForward, H, F), bias_update_rate=0.1, balance_loss=0.1, z_loss=0.1)
    x = tokens()
    y = moe(x)  # leaves a loss, which no copy has
    stream = io.BytesIO()
    torch.save(moe.state_dict(), stream)
    stream.seek(0)
    other = layer(functools.partial(FeedForward, H, F), seed=1, bias_update_rate=0.1)
    other.load_state_dict(torch.load(stream))
    for copied in (other, copy.deepcopy(moe), pickle.loads(pickle.dumps(moe))):
        assert moe_losses(copied) == 0
        assert torch.equal(copied(x), y)
    assert moe_losses(moe) > 0


def fill(module):
    """What the engine does with a model that was built without memory: module after module, in registration order."""
    for each in module.modules():
        own = [*each.named_parameters(recurse=False), *each.named_buffers(recurse=False)]
        if not any(t.is_meta for _, t in own):
            continue
        for name, tensor in own:
            if isinstance(tensor, nn.Parameter):
                setattr(each, name, nn.Parameter(torch.empty_like(tensor, device="cpu").fill_(torch.nan)))
            else:
                setattr(each, name, torch.empty_like(tensor, device="cpu").fill_(torch.nan))
        each.reset_parameters()


def drawn_specially():
    expert = GatedFeedForward(H, F)
    nn.init.normal_(expert.down.weight, std=0.01)
    return expert


@pytest.mark.parametrize("copies", [False, True])
def test_built_without_memory(copies):
    """The same random numbers, and the same ones after it."""

    def build():
        torch.manual_seed(5)
        expert = GatedFeedForward(H, F) if copies else lambda: GatedFeedForward(H, F)
        shared = FeedForward(H, F) if copies else None
        return MoE(H, expert, E, shared_expert=shared, use_residual=not copies, bias_update_rate=0.1)

    eager = build()
    after = torch.rand(3)
    with torch.device("meta"):
        meta = build()
    assert all(t.is_meta for t in meta.state_dict().values())
    torch.manual_seed(5)
    fill(meta)
    assert torch.equal(torch.rand(3), after)
    assert all(torch.equal(a, b) for a, b in zip(sorted_values(eager), sorted_values(meta), strict=True))


def sorted_values(module):
    return [value for _, value in sorted(module.state_dict().items())]


def test_an_expert_may_be_drawn_in_a_way_of_its_own():
    torch.manual_seed(5)
    eager = MoE(H, drawn_specially, E)
    assert eager.experts.down.weight.abs().max() < 0.1
    with torch.device("meta"):
        meta = MoE(H, drawn_specially, E)
    torch.manual_seed(5)
    fill(meta)
    assert all(torch.equal(a, b) for a, b in zip(sorted_values(eager), sorted_values(meta), strict=True))
    # Again, and another time: all new, all different.
    before = meta.experts.up.weight.detach().clone()
    for module in meta.modules():
        if hasattr(module, "reset_parameters") and next(module.parameters(recurse=False), None) is not None:
            module.reset_parameters()
    assert not torch.equal(meta.experts.up.weight, before)


def test_a_rank_fills_its_own_experts():
    full = MoE(H, lambda: FeedForward(H, F), 6)
    local = copy.deepcopy(full)
    axis = Axis("expert")
    axis.rank, axis.size = 1, 3
    apply_expert_parallel(local, axis)
    for moe in (full, local):
        torch.manual_seed(7)
        for module in moe.experts.modules():
            if next(module.parameters(recurse=False), None) is not None:
                module.reset_parameters()
    for name, parameter in local.experts.named_parameters():
        assert torch.equal(parameter, full.experts.get_parameter(name)[2:4])


def test_missing_reset_parameters_is_refused():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(H))

        def forward(self, x):
            return x * self.weight

    with torch.device("meta"):
        moe = MoE(H, Bare(), 2)
    with pytest.raises(PlanError, match="reset_parameters"):
        fill(moe)
    with torch.device("meta"):
        moe = MoE(H, Bare, 2)
    fill(moe)
    assert torch.equal(moe.experts.weight, torch.ones(2, H))


def test_experts_that_cannot_be_stacked():
    with pytest.raises(PlanError, match="running_mean"):
        MoE(H, nn.Sequential(nn.Linear(H, H), nn.BatchNorm1d(H)), 2)
    with pytest.raises(PlanError, match="no parameters"):
        MoE(H, nn.Identity(), 2)
    with pytest.raises(PlanError, match="type int"):
        MoE(H, lambda: 3, 2)
    with pytest.raises(ConfigError, match="shared_expert"):
        MoE(H, nn.Linear(H, H), 2, use_residual=True, shared_expert=nn.Linear(H, H))


def test_frozen_experts_stay_frozen():
    moe = MoE(H, FeedForward(H, F).requires_grad_(False), E, drop_tokens=False)
    x = tokens().float().requires_grad_()
    moe(x).sum().backward()
    assert all(p.grad is None for p in moe.experts.parameters())
    assert x.grad.any()
    assert moe.router.weight.grad.any()


def test_dropout_follows_the_mode():
    moe = MoE(H, nn.Sequential(nn.Linear(H, F), nn.Dropout(0.5), nn.Linear(F, H)), E, drop_tokens=False)
    for grouped in (True, False):
        moe.experts.runs_grouped = grouped
        x = tokens().float()
        moe.train()
        assert not torch.equal(moe(x), moe(x))
        moe.eval()
        assert torch.equal(moe(x), moe(x))


def test_shared_expert():
    x = tokens()
    moe = layer(shared_expert=FeedForward(H, F))
    plain = layer(shared_expert=None)
    plain.load_state_dict(moe.state_dict(), strict=False)
    torch.testing.assert_close(moe(x), plain(x) + moe.shared_expert(x))
    mixed = layer(use_residual=True)
    plain.load_state_dict(mixed.state_dict(), strict=False)
    share = mixed.coefficient(x).softmax(-1)
    torch.testing.assert_close(mixed(x), plain(x) * share[:, :1] + mixed.residual_expert(x) * share[:, 1:])
    copied = MoE(H, FeedForward(H, F), E, use_residual=True)
    for name, parameter in copied.residual_expert.named_parameters():
        assert torch.equal(parameter, copied.experts.get_parameter(name)[0])


@pytest.mark.parametrize("expert", ["feed forward", "any module"])
def test_autocast_and_16_bit(expert):
    """Results have the dtype that the expert alone would give, and its accuracy."""
    moe = layer(EXPERTS[expert]).float()
    x = tokens().float().requires_grad_()
    exact = moe(x)
    exact.square().sum().backward()
    expected = [x.grad, *(p.grad for p in moe.parameters())]
    moe.zero_grad()
    x.grad = None
    with torch.autocast("cpu", torch.bfloat16):
        y = moe(x)
    assert y.dtype == (torch.bfloat16 if expert == "feed forward" else torch.float32)
    y.float().square().sum().backward()
    found = [x.grad, *(p.grad for p in moe.parameters())]
    for f, e in zip([y.float(), *found], [exact, *expected], strict=True):
        assert f.dtype == torch.float32
        assert (f - e).norm() < 0.02 * e.norm()
    low = moe.bfloat16()(x.detach().bfloat16())
    assert low.dtype == torch.bfloat16
    assert (low.float() - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("drop", [True, False])
def test_recomputed_forwards(k, drop):
    """Same losses and gradients, nothing counted twice; also for a layer that is called twice."""
    options = {"k": k, "drop_tokens": drop, "balance_loss": 0.1, "z_loss": 0.01, "second_expert_sampling": True}
    outcomes = []
    for recompute in (False, True):
        moe = layer(**options, capacity_factor=0.7)
        x = tokens().requires_grad_()
        torch.manual_seed(2)

        def block(x, moe=moe):
            return x + moe(x.tanh())

        y = x
        for _ in range(2):
            y = checkpoint(block, y, use_reentrant=False) if recompute else block(y)
        loss = y.square().sum() + moe_losses(moe)
        loss.backward()
        assert moe_losses(moe) == 0
        outcomes.append([loss.detach(), x.grad, *(p.grad for p in moe.parameters())])
        assert moe.statistics().calls == 2
        assert moe.statistics().routed.sum() == 2 * S * k
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


def test_loss_alone_reaches_the_router_through_a_recomputed_forward():
    grads = []
    for recompute in (False, True):
        moe = layer(balance_loss=1.0)
        x = tokens().requires_grad_()
        _ = checkpoint(moe, x, use_reentrant=False) if recompute else moe(x)
        moe_losses(moe).backward()
        grads.append([x.grad, moe.router.weight.grad])
        assert moe.router.weight.grad.any()
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("drop", [True, False])
def test_reentrant_checkpointing_passes_the_gradients_of_losses_on(drop):
    """Also of a layer that is called twice, of two accumulated steps, and scaled as for fp16."""
    options = {"k": 2, "drop_tokens": drop, "balance_loss": 0.1, "z_loss": 0.01, "second_expert_sampling": True}
    outcomes = []
    for recompute in (False, True):
        moe = layer(**options, capacity_factor=0.7).double()
        torch.manual_seed(2)
        values = []
        for step in range(2):
            x = tokens().double().mul(1 + step).requires_grad_()
            y = x
            for _ in range(2):
                y = y + (checkpoint(moe, y.tanh(), use_reentrant=True) if recompute else moe(y.tanh()))
            aux = moe_losses(moe)
            values += [aux.detach()]
            ((y.square().sum() + 0.3 * aux) * 1024).backward()
            values += [x.grad]
        assert moe_losses(moe) == 0
        outcomes.append([*values, *(p.grad for p in moe.parameters())])
        assert moe.statistics().calls == 4
    for actual, expected in zip(outcomes[1], outcomes[0], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_a_reentrant_forward_whose_losses_get_no_gradient_is_refused():
    moe = layer(balance_loss=1.0)
    y = checkpoint(moe, tokens().requires_grad_(), use_reentrant=True)
    aux = moe_losses(moe)
    with pytest.raises(StateError, match="its losses have no gradient"):
        y.sum().backward()
    del aux
    y = checkpoint(moe, tokens().requires_grad_(), use_reentrant=True)
    moe_losses(moe).item()  # only looked at
    y.sum().backward()


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_losses_that_backward_does_not_bring_to_the_router_are_refused(needs_gradient):
    """The output is not part of the loss, or no gradient flows into the checkpoint: torch does not recompute it."""
    moe, weight = layer(balance_loss=1.0), torch.ones((), requires_grad=True)
    x = tokens().requires_grad_(needs_gradient)

    def step(*, uses_output: bool) -> None:
        y = checkpoint(moe, x, use_reentrant=True)
        loss = moe_losses(moe) + weight
        (loss + y.sum() if uses_output else loss).backward()

    step(uses_output=not needs_gradient)
    assert moe.router.weight.grad is None
    with pytest.raises(StateError, match=r"its router got no gradient.*use_reentrant=False"):
        step(uses_output=True)
    x.requires_grad_()
    for _ in range(2):
        step(uses_output=True)
    assert moe.router.weight.grad.any()


def test_the_gradient_of_losses_may_come_in_a_backward_of_its_own():
    grads = []
    for recompute in (False, True):
        moe = layer(balance_loss=1.0)
        for _ in range(2):
            x = tokens().requires_grad_()
            y = checkpoint(moe, x, use_reentrant=True) if recompute else moe(x)
            moe_losses(moe).backward(retain_graph=True)
            y.sum().backward()
        grads.append(moe.router.weight.grad)
    torch.testing.assert_close(grads[1], grads[0])


def test_a_forward_without_gradients_leaves_no_losses():
    moe = layer(balance_loss=1.0)
    with torch.no_grad():
        moe(tokens())
    assert moe_losses(moe) == 0
    assert not moe_losses(moe).requires_grad


def test_statistics():
    moe = layer(drop_tokens=True, capacity_factor=0.5, min_capacity=0, balance_loss=0.1, z_loss=0.1)
    empty = moe.statistics()
    assert (empty.calls, int(empty.routed.sum()), float(empty.entropy)) == (0, 0, 0.0)
    x = tokens()
    for _ in range(3):
        moe(x)
    moe.eval()(x)
    found = moe.statistics()
    probabilities = (x @ moe.router.weight.t()).softmax(-1)
    entropy = torch.distributions.Categorical(probabilities).entropy().mean()
    torch.testing.assert_close(found.entropy, entropy.detach())
    assert found.calls == 3
    assert found.routed.sum() == 3 * 2 * S
    capacity = 5  # ceil(23 / 5 * 0.5 * 2)
    assert torch.equal(found.kept, 3 * (found.routed // 3).clamp(max=capacity))
    torch.testing.assert_close(moe_losses(moe), 3 * 0.1 * (found.balance_loss + found.z_loss))
    assert not found.routed.requires_grad
    assert not found.entropy.requires_grad
    assert "counts" not in "".join(moe.state_dict())
    moe.reset_statistics()
    assert moe.statistics().calls == 0
    assert found.calls == 3  # a snapshot


def test_applied_to_one_rank():
    moe, plain = layer(k=2, drop_tokens=True), layer(k=2, drop_tokens=True)
    parameters = dict(moe.named_parameters())
    parts = apply_expert_parallel(moe, Axis("expert"))
    assert {id(p) for p in moe.experts.parameters()} == set(parts)
    assert all(parameters[name] is p for name, p in moe.named_parameters())
    assert torch.equal(moe(tokens()), plain(tokens()))


def test_a_model_that_cannot_be_sharded():
    axis = Axis("expert")
    axis.size = 2
    with pytest.raises(PlanError, match="nothing to shard"):
        apply_expert_parallel(nn.Linear(2, 2), axis)
    model = nn.ModuleDict({"a": MoE(H, nn.Linear(H, H), 4), "b": MoE(H, nn.Linear(H, H), 5)})
    before = model["a"].experts.weight.shape
    with pytest.raises(PlanError, match=r"'b' has num_experts=5"):
        apply_expert_parallel(model, axis)
    assert model["a"].experts.weight.shape == before


def test_compiled_block():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(H)
            self.moe = MoE(H, FeedForward(H, F), E, k=2, drop_tokens=False, second_expert_sampling=False)

        def forward(self, x):
            return x + self.moe(self.norm(x)) * 2

    block = Block()
    x = tokens().float()
    outcomes = []
    for module in (block, torch.compile(block, backend="aot_eager")):
        block.zero_grad()
        y = module(x)
        (y.square().sum() + moe_losses(module)).backward()
        outcomes.append([y.detach(), *(p.grad.clone() for p in block.parameters())])
    for a, b in zip(*outcomes, strict=True):
        torch.testing.assert_close(a, b)
