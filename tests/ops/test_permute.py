"""Routing: the references are what they say, the kernels are the references bit for bit, gradients are gradients."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ls_strategy.ops import permute
from ls_strategy.ops.extra_library import routing_library
from ls_strategy.ops.permute import (
    combine_reference,
    pair_dots_reference,
    permute_reference,
    sort_by_expert_reference,
)
from tests.ops.conftest import limited

ROOT = Path(__file__).parents[2]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [
    # tokens, choices, experts, width
    (0, 2, 4, 16),
    (1, 1, 1, 1),
    (5, 1, 3, 15),
    (33, 2, 8, 16),
    (40, 3, 64, 127),
    (64, 2, 8, 128),
    (19, 8, 8, 300),
    (300, 2, 16, 512),
]


@pytest.fixture(scope="session")
def kernels(compiled):
    if not routing_library.available("cpu"):
        pytest.skip("no kernels of routing")


@pytest.fixture
def no_kernels(monkeypatch):
    monkeypatch.setattr(permute, "_kernels", lambda device_type: False)


@pytest.fixture(params=[True, False], ids=["kernels", "references"])
def either(request):
    """A test runs with the kernels, and without."""
    request.getfixturevalue("kernels" if request.param else "no_kernels")


@pytest.fixture
def isa(request, kernels):
    yield from limited(routing_library, request.param)


class Routed:
    """Tokens with choices; ``dropped`` is the share of pairs that is not kept."""

    def __init__(self, shape, dtype, dropped, seed=0):
        tokens, self.k, self.experts, width = shape
        g = torch.Generator().manual_seed(seed)
        # No expert twice in a token, as a router chooses.
        self.indices = torch.rand(tokens, max(self.experts, self.k), generator=g).argsort(1)[:, : self.k] % self.experts
        self.kept = torch.rand(tokens, self.k, generator=g) >= dropped if dropped else None
        self.order, self.counts = sort_by_expert_reference(self.indices, self.kept, self.experts)
        pairs = self.order.numel()
        self.weights = torch.rand(tokens, self.k, generator=g)
        self.x = torch.randn(tokens, width, generator=g).to(dtype)
        self.y = (torch.randn(pairs, width, generator=g) * 10 ** torch.randint(-3, 3, (pairs, 1), generator=g)).to(
            dtype
        )


def assert_same_bits(a, b):
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert torch.equal(a, b)
    assert torch.equal(a.signbit(), b.signbit())


# --- the references say what is meant --------------------------------------------------------------------------------


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dropped", [0, 0.3, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
class TestMeaning:
    """Against loops over pairs, in fp64."""

    @pytest.mark.sample(12)
    def test_sort(self, shape, dropped):
        r = Routed(shape, torch.float32, dropped)
        order, counts = permute.sort_by_expert(r.indices, r.kept, r.experts)
        flat = r.indices.flatten().tolist()
        kept = [True] * len(flat) if r.kept is None else r.kept.flatten().tolist()
        expected = [[i for i, e in enumerate(flat) if e == expert and kept[i]] for expert in range(r.experts)]
        assert order.tolist() == [pair for pairs in expected for pair in pairs]
        assert counts.tolist() == [len(pairs) for pairs in expected]
        assert order.dtype == counts.dtype == torch.int64

    def test_rows(self, shape, dropped):
        r = Routed(shape, torch.float64, dropped)
        r.weights = r.weights.double()
        rows = permute.permute(r.x, r.order, r.k)
        scaled = permute.permute(r.x, r.order, r.k, r.weights)
        total, plain = torch.zeros_like(r.x), torch.zeros_like(r.x)
        dots = torch.zeros_like(r.weights)
        for p, pair in enumerate(r.order.tolist()):
            s, j = divmod(pair, r.k)
            assert torch.equal(rows[p], r.x[s])
            assert torch.equal(scaled[p], r.x[s] * r.weights[s, j])
            total[s] += r.weights[s, j] * r.y[p]
            plain[s] += r.y[p]
            dots[s, j] = r.x[s] @ r.y[p]
        near = {"rtol": 1e-12, "atol": 1e-9}
        torch.testing.assert_close(permute.combine(r.y, r.order, r.weights), total, **near)
        torch.testing.assert_close(permute.sum_pairs(r.y, r.order, None, len(r.x), r.k), plain, **near)
        torch.testing.assert_close(permute.pair_dots(r.x, r.y, r.order, r.k), dots, **near)


@pytest.mark.usefixtures("either")
class TestRounding:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_sums_of_16_bit_are_rounded_once(self, dtype):
        """1 + eight times what is lost in it each time."""
        small = torch.finfo(dtype).eps / 4
        y = torch.tensor([1.0] + [small] * 8).to(dtype)[:, None].repeat(1, 20)
        order = torch.arange(9)
        expected = torch.full((1, 20), 1 + 8 * small).to(dtype)
        assert expected[0, 0] > 1
        assert torch.equal(permute.combine(y, order, torch.ones(1, 9)), expected)
        x = torch.ones(1, 20, dtype=dtype, requires_grad=True)
        permute.permute(x, order, 9).backward(y)
        assert torch.equal(x.grad, expected)

    def test_the_order_of_choices_decides(self):
        """Whatever the order of the experts: (1 + 1e8) - 1e8, from the left."""
        y = torch.tensor([[-1e8], [1.0], [1e8]])
        assert permute.combine(y, torch.tensor([2, 0, 1]), torch.ones(1, 3)).item() == 0.0
        assert permute.combine(y, torch.tensor([0, 2, 1]), torch.ones(1, 3)).item() == 1.0

    def test_dropped_pairs_count_zero_whatever_they_hold(self):
        y = torch.full((1, 40), float("inf"))
        out = permute.combine(y, torch.tensor([1]), torch.ones(2, 2))
        assert out[0].isinf().all()
        assert torch.equal(out[1], torch.zeros(40))

    def test_what_is_not_finite_stays_visible(self):
        y = torch.zeros(2, 40, dtype=torch.bfloat16)
        y[1, 38] = float("nan")
        out = permute.combine(y, torch.arange(2), torch.ones(1, 2))
        assert out.isnan().nonzero().tolist() == [[0, 38]]


# --- the kernels are the references ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dropped", [0, 0.3, 1.0])
@pytest.mark.parametrize("isa", [0, 1, 2], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_is_the_reference(dtype, isa, dropped):
    for shape in SHAPES:
        r = Routed(shape, dtype, dropped)
        order, counts = permute.sort_by_expert(r.indices, r.kept, r.experts)
        assert torch.equal(order, r.order)
        assert torch.equal(counts, r.counts)
        for weights in (None, r.weights, -r.weights):
            assert_same_bits(permute.permute(r.x, order, r.k, weights), permute_reference(r.x, order, weights, r.k))
            expected = combine_reference(r.y, order, weights, len(r.x), r.k)
            assert_same_bits(permute.sum_pairs(r.y, order, weights, len(r.x), r.k), expected)
        assert_same_bits(permute.pair_dots(r.x, r.y, order, r.k), pair_dots_reference(r.x, r.y, order, r.k))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_with_gaps(kernels, dtype):
    r = Routed((64, 2, 8, 48), dtype, 0.3)

    def gaps(t):
        wide = t.new_zeros(*t.shape[:-1], 2 * t.shape[-1])
        wide[..., ::2] = t
        return wide[..., ::2]

    x, y, order, weights = gaps(r.x), gaps(r.y).t().contiguous().t(), gaps(r.order), gaps(r.weights)
    assert not any(t.is_contiguous() for t in (x, y, order, weights))
    assert_same_bits(permute.permute(x, order, r.k, weights), permute_reference(r.x, r.order, r.weights, r.k))
    expected = combine_reference(r.y, r.order, r.weights, len(x), r.k)
    assert_same_bits(permute.combine(y, order, weights), expected)
    assert_same_bits(permute.pair_dots(x, y, order, r.k), pair_dots_reference(r.x, r.y, r.order, r.k))
    order, _ = permute.sort_by_expert(r.indices.t().contiguous().t(), r.kept.t().contiguous().t(), r.experts)
    assert torch.equal(order, r.order)


def test_not_aligned(kernels):
    """A view that begins in the middle of a vector."""
    r = Routed((64, 2, 8, 48), torch.float16, 0)
    x = torch.cat([torch.zeros(1, dtype=torch.float16), r.x.flatten()])[1:].view_as(r.x)
    assert x.data_ptr() % 4 == 2
    assert_same_bits(permute.permute(x, r.order, r.k, r.weights), permute_reference(r.x, r.order, r.weights, r.k))


def test_threads_change_nothing(kernels):
    threads, results = torch.get_num_threads(), []
    r = Routed((40_000, 2, 8, 8), torch.bfloat16, 0.1)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            order, counts = permute.sort_by_expert(r.indices, r.kept, r.experts)
            results.append((order, counts, permute.combine(r.y, order, r.weights)))
            results[-1] += (permute.pair_dots(r.x, r.y, order, r.k), permute.permute(r.x, order, r.k))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0][0], r.order)
    assert torch.equal(results[0][1], r.counts)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropped", [pytest.param(0, marks=pytest.mark.wide), 0.4, 1.0])
def test_gradients(dropped):
    """First and second ones, in fp64."""
    r = Routed((5, 2, 4, 3), torch.float64, dropped)
    x, y, w = (t.detach().double().requires_grad_() for t in (r.x, r.y, r.weights))
    checks = [
        (lambda x: permute.permute(x, r.order, r.k), (x,)),
        (lambda x, w: permute.permute(x, r.order, r.k, w), (x, w)),
        (lambda y, w: permute.combine(y, r.order, w), (y, w)),
        (lambda y: permute.sum_pairs(y, r.order, None, 5, r.k), (y,)),
        (lambda x, y: permute.pair_dots(x, y, r.order, r.k), (x, y)),
    ]
    for function, inputs in checks:
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropped", [0, 0.4])
def test_gradients_of_kernels_are_those_of_references(kernels, dtype, dropped):
    r = Routed((37, 2, 4, 50), dtype, dropped)
    normal = torch.randn(r.y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)  # nothing overflows

    def gradients():
        x, y, w = (t.detach().requires_grad_() for t in (r.x, normal, r.weights))
        rows = permute.permute(x, r.order, r.k, w)
        out = permute.combine(rows * y, r.order, w)
        dots = permute.pair_dots(out, y, r.order, r.k)
        first = torch.autograd.grad((dots * dots).sum() * 1e-3, (x, y, w), create_graph=True)
        second = torch.autograd.grad(first[0].float().sum(), (x, y, w))
        return [out, dots, *first, *second]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(permute, "_kernels", lambda device_type: False)
        expected = gradients()
    result = gradients()
    assert result[0].grad_fn.name() != expected[0].grad_fn.name()  # two implementations
    for a, b in zip(result, expected, strict=True):
        assert a.isfinite().all()
        assert_same_bits(a.detach(), b.detach())


@pytest.mark.usefixtures("either")
def test_only_what_needs_a_gradient_is_kept():
    r = Routed((30, 2, 4, 64), torch.float32, 0)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        permute.permute(r.x.requires_grad_(), r.order, r.k)
    assert saved == [r.order.shape]


# --- as torch sees them ----------------------------------------------------------------------------------------------


def operations(r):
    ops = torch.ops.ls_strategy
    x, y, w = (t.detach().requires_grad_() for t in (r.x, r.y, r.weights))
    return [
        (ops.sort_by_expert.default, (r.indices, r.kept, r.experts)),
        (ops.permute.default, (x, r.order, w, r.k)),
        (ops.permute.default, (x, r.order, None, r.k)),
        (ops.combine.default, (y, r.order, w, len(r.x), r.k)),
        (ops.combine.default, (y, r.order, None, len(r.x), r.k)),
        (ops.pair_dots.default, (x, y, r.order, r.k)),
    ]


@pytest.mark.parametrize(
    ("number", "dropped"),
    [
        pytest.param(number, dropped, marks=[pytest.mark.wide] if (number in (0, 2, 3)) is (dropped == 0) else [])
        for number in range(6)
        for dropped in (0, 0.4)
    ],
)
def test_opcheck(kernels, number, dropped):
    permute._kernels("cpu")
    op, args = operations(Routed((10, 2, 4, 24), torch.bfloat16 if number % 2 else torch.float32, dropped))[number]
    assert set(torch.library.opcheck(op, args).values()) == {"SUCCESS"}


@pytest.mark.slow
@pytest.mark.usefixtures("either")
def test_compiles_into_one_graph():
    r = Routed((16, 2, 4, 24), torch.float32, 0)

    def layer(x, w):
        order, _ = permute.sort_by_expert(r.indices, None, r.experts)
        return permute.combine(permute.permute(x, order, r.k) * 2, order, w)

    def run(function):
        x, w = r.x.detach().requires_grad_(), r.weights.detach().requires_grad_()
        out = function(x, w)
        out.backward(r.x)
        return out.detach(), x.grad, w.grad

    compiled_layer = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for a, b in zip(run(compiled_layer), run(layer), strict=True):
        assert_same_bits(a, b)


PROGRAM = """
import torch
from ls_strategy.ops import permute
from ls_strategy.ops.extra_library import routing_library
order, counts = permute.sort_by_expert(torch.tensor([[1, 0], [1, 1]]), None, 2)
assert order.tolist() == [1, 0, 2, 3] and counts.tolist() == [1, 3]
x = torch.ones(2, 3, requires_grad=True)
permute.combine(permute.permute(x, order, 2), order, torch.ones(2, 2)).sum().backward()
assert x.grad.tolist() == [[2.0] * 3] * 2
assert not routing_library.available("cpu")
"""


@pytest.mark.wide
def test_no_compiler_is_needed(tmp_path):
    variables = {k: v for k, v in os.environ.items() if k != "LS_STRATEGY_OPS"}
    variables |= {"CXX": "/nonexistent/g++", "LS_STRATEGY_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", PROGRAM], env=variables, check=True, timeout=150)
    assert not list(tmp_path.glob("*.so"))


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("either")
class TestRefusals:
    @pytest.mark.parametrize("bad", [-1, 4])
    def test_an_expert_that_there_is_not(self, bad):
        indices = torch.tensor([[0, 1], [bad, 2]])
        with pytest.raises(RuntimeError, match="below the number of experts, 4"):
            permute.sort_by_expert(indices, None, 4)
        permute.sort_by_expert(indices, indices.ge(0) & indices.lt(4), 4)  # dropped, whatever it says

    @pytest.mark.parametrize("bad", [-1, 8, 1 << 40])
    def test_a_pair_that_there_is_not(self, bad):
        order, y = torch.tensor([0, bad]), torch.ones(2, 5)
        with pytest.raises((RuntimeError, IndexError)):
            permute.permute(torch.ones(4, 5), order, 2)
        if bad != -1 or permute._kernels("cpu"):  # to torch, -1 is the last one
            with pytest.raises((RuntimeError, IndexError)):
                permute.combine(y, order, torch.ones(4, 2))

    def test_shapes(self):
        x, order, w = torch.ones(4, 5), torch.arange(8), torch.ones(4, 2)
        for call in (
            lambda: permute.permute(x[0], order, 2),
            lambda: permute.permute(x.int(), order, 2),
            lambda: permute.permute(x, order.int(), 2),
            lambda: permute.permute(x, order, 2, w[:3]),
            lambda: permute.combine(torch.ones(7, 5), order, w),
            lambda: permute.combine(torch.ones(8, 5), order, w[0]),
            lambda: permute.pair_dots(x, torch.ones(8, 4), order, 2),
            lambda: permute.pair_dots(x, torch.ones(8, 5).double(), order, 2),
            lambda: permute.sort_by_expert(order, None, 2),
            lambda: permute.sort_by_expert(w, None, 2),
            lambda: permute.sort_by_expert(order.view(4, 2), torch.ones(4, 2), 2),
        ):
            with pytest.raises(ValueError, match=r"must (be|have)"):
                call()

    def test_a_pair_twice(self, kernels):
        with pytest.raises(RuntimeError, match="names pair 3 twice"):
            torch.ops.ls_strategy.combine(torch.ones(2, 5), torch.tensor([3, 3]), None, 4, 2)
