"""The grouped product is ``nn.Linear`` of every group, with its gradients.

Trusted run: ``torch.nn.functional.linear`` group by group.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from ls_strategy.moe import grouped
from ls_strategy.moe.grouped import grouped_linear

IN, OUT = 8, 16
COUNTS = {
    "even": (3, 3, 3),
    "empty first": (0, 4, 2),
    "empty last": (4, 2, 0),
    "empty between": (4, 0, 1),
    "all to one": (0, 7, 0),
    "all empty": (0, 0, 0),
}


def inputs(counts, dtype, bias=True):
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return drawn(sum(counts), IN), drawn(len(counts), OUT, IN), drawn(len(counts), OUT) if bias else None


def loop(x, weight, bias, counts):
    rows = x.split(counts)
    return torch.cat([functional.linear(r, weight[g], None if bias is None else bias[g]) for g, r in enumerate(rows)])


def everything(function, x, weight, bias, counts, upstream):
    leaves = [t for t in (x, weight, bias) if t is not None]
    out = function(x, weight, bias, counts)
    grads = torch.autograd.grad(out, leaves, upstream, materialize_grads=True)
    return [out.detach(), *grads]


@pytest.fixture(params=["loop", "kernel"])
def path(request, monkeypatch):
    """The kernel for all groups runs on the CPU too, slowly, with the rules on strides that it has on CUDA."""
    if request.param == "kernel":

        def fits(x, _other):
            return len(x) > 0 and x.dtype in (torch.float32, torch.bfloat16)

        monkeypatch.setattr(grouped, "_fits_kernel", fits)
    return request.param


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients(path, counts, dtype, bias):
    x, weight, b = inputs(counts, dtype, bias)
    upstream = torch.randn(sum(counts), OUT, dtype=torch.float64).to(dtype)
    found = everything(grouped_linear, x, weight, b, counts, upstream)
    expected = everything(loop, x, weight, b, counts, upstream)
    bound = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 1e-2}[dtype]
    for f, e in zip(found, expected, strict=True):
        assert f.dtype == e.dtype
        assert f.is_contiguous()
        torch.testing.assert_close(f, e, rtol=bound, atol=bound * 10)
    for group, n in enumerate(counts):
        if not n:
            assert torch.equal(found[2][group], torch.zeros(OUT, IN, dtype=dtype))


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_gradcheck(counts):
    x, weight, bias = inputs(counts, torch.float64)
    assert torch.autograd.gradcheck(lambda *leaves: grouped_linear(*leaves, counts), (x, weight, bias))


def test_only_the_gradients_that_are_wanted():
    counts = (2, 3)
    x, weight, bias = inputs(counts, torch.float64)
    out = grouped_linear(x.detach(), weight.detach(), bias, counts)
    out.sum().backward()  # an expanded gradient
    assert torch.equal(bias.grad, torch.tensor(counts, dtype=torch.float64)[:, None].expand(2, OUT))


def test_autocast_as_linear(path):
    counts = (2, 0, 3)
    x, weight, bias = inputs(counts, torch.float32)
    upstream = torch.randn(sum(counts), OUT).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = everything(grouped_linear, x, weight, bias, counts, upstream)
        expected = everything(loop, x, weight, bias, counts, upstream)
        double = [t.detach().double() for t in (x, weight, bias)]
        assert grouped_linear(*double, counts).dtype == torch.float64
    assert [f.dtype for f in found] == [torch.bfloat16] + [torch.float32] * 3
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-2, atol=5e-2)


def test_wrong_counts_are_refused():
    x, weight, bias = inputs((2, 3), torch.float32)
    with pytest.raises(ValueError, match="2 groups of 6 rows"):
        grouped_linear(x, weight, bias, (3, 3))


@pytest.mark.parametrize(
    ("capability", "fits"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)]
)
def test_the_kernel_is_asked_only_where_torch_has_one(capability, fits, monkeypatch):
    """Elsewhere torch would loop, and wait for the device in every product."""
    monkeypatch.setattr(grouped, "compute_capability", lambda _: capability)
    with FakeTensorMode():
        x, weight = (torch.empty(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((4, 16), (2, 8, 16)))
        assert grouped._fits_kernel(x, weight) is fits
