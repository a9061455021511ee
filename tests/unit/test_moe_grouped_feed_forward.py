"""Experts run in parts are experts run layer by layer, forward and backward.

Trusted run: the grouped products of each layer by itself, which other tests hold against ``nn.Linear``.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ls_strategy.moe import experts as module
from ls_strategy.moe import grouped_feed_forward as parts
from ls_strategy.moe.experts import Experts
from ls_strategy.moe.feed_forward import FeedForward, GatedFeedForward

HIDDEN, WIDE = 16, 24
COUNTS = [(3, 0, 5, 1), (0, 0, 9, 0), (9, 0, 0, 0), (2, 2, 2, 3), (0, 0, 0, 0)]
KINDS = {
    "GELU": lambda: FeedForward(HIDDEN, WIDE),
    "ReLU without bias": lambda: FeedForward(HIDDEN, WIDE, activation=nn.ReLU(), bias=False),
    "SwiGLU": lambda: GatedFeedForward(HIDDEN, WIDE),
    "SwiGLU with bias": lambda: GatedFeedForward(HIDDEN, WIDE, bias=True),
}


def run(experts, counts, dtype=torch.float32, autocast=False):
    rows = torch.randn(sum(counts), HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    experts.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = experts(rows, counts)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype))
    return [out.detach(), rows.grad, *(p.grad for p in experts.parameters())]


def layer_by_layer(monkeypatch):
    monkeypatch.setattr(module, "_RECOMPUTED", ())


@pytest.fixture
def calls(monkeypatch):
    """How often experts ran in parts."""
    seen = []
    real = module.grouped_feed_forward
    monkeypatch.setattr(module, "grouped_feed_forward", lambda *args: seen.append(1) or real(*args))
    return seen


@pytest.mark.parametrize("limit", [1, 3 * WIDE, 1 << 19], ids=["each", "several", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_portions_compute_the_same_as_one_pass(kind, limit, monkeypatch, calls):
    torch.manual_seed(0)
    experts = Experts(KINDS[kind], 4)
    monkeypatch.setattr(parts, "PART_NUMEL", limit)
    for counts in COUNTS:
        for dtype, autocast in ((torch.float32, False), (torch.float32, True), (torch.float64, False)):
            experts.to(dtype)
            found = run(experts, counts, dtype, autocast)
            with monkeypatch.context() as patched:
                layer_by_layer(patched)
                expected = run(experts, counts, dtype, autocast)
            assert [t.dtype for t in found] == [t.dtype for t in expected]
            # torch computes the last few elements of a tensor by other instructions, and parts end elsewhere.
            bound = 1e-14 if dtype == torch.float64 else 1e-2 if autocast else 1e-6
            torch.testing.assert_close(found, expected, rtol=bound, atol=bound / 10)
    assert len(calls) == 3 * len(COUNTS)


def test_gradcheck():
    torch.manual_seed(0)
    hidden = 4  # the check computes twice for every element of every weight
    experts = Experts(lambda: GatedFeedForward(hidden, 5, bias=True), 3).double()
    names, values = zip(*experts.named_parameters(), strict=True)
    rows = torch.randn(6, hidden, dtype=torch.float64, requires_grad=True)

    def function(rows, *values):
        return torch.func.functional_call(experts, dict(zip(names, values, strict=True)), (rows, (4, 0, 2)))

    assert torch.autograd.gradcheck(function, (rows, *values))


@pytest.mark.parametrize("frozen", ["up.weight", "up.bias", "down.weight", "down.bias", "rows"])
def test_frozen_layers_get_no_gradient_and_the_others_the_same(frozen):
    torch.manual_seed(0)
    experts = Experts(KINDS["GELU"], 4)
    expected = dict(zip(("out", "rows", *dict(experts.named_parameters())), run(experts, COUNTS[0]), strict=True))
    experts.zero_grad()
    rows = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_(frozen != "rows")
    if frozen != "rows":
        experts.get_parameter(frozen).requires_grad_(False)
    out = experts(rows, COUNTS[0])
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)))
    found = {"rows": rows.grad, **{name: p.grad for name, p in experts.named_parameters()}}
    assert found.pop(frozen) is None
    assert all(torch.equal(grad, expected[name]) for name, grad in found.items())


def test_less_is_kept_for_backward():
    experts = Experts(KINDS["SwiGLU"], 4)

    def kept():
        sizes = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: sizes.update({t.data_ptr(): t.untyped_storage().nbytes()}) or t, lambda t: t
        ):
            experts(torch.randn(64, HIDDEN, requires_grad=True), (16, 16, 16, 16))
        weights = {p.data_ptr() for p in experts.parameters()}
        return sum(size for at, size in sizes.items() if at not in weights)

    rows, wide = 64 * HIDDEN * 4, 64 * WIDE * 4
    assert kept() == rows + 2 * wide  # what enters, and what the first layers give: no activation, no product


@pytest.mark.parametrize(
    "activation", [nn.Dropout(0.5), nn.Sequential(nn.GELU()), nn.ReLU(inplace=True)], ids=["random", "own", "in place"]
)
def test_what_cannot_be_computed_twice_runs_layer_by_layer(activation, calls):
    experts = Experts(FeedForward(HIDDEN, WIDE, activation=activation), 4)
    run(experts, COUNTS[0])
    assert not calls


def test_an_activation_with_hooks_runs_layer_by_layer(calls):
    expert = FeedForward(HIDDEN, WIDE)
    expert.activation.register_forward_hook(lambda *_: None)
    run(Experts(expert, 4), COUNTS[0])
    assert not calls
