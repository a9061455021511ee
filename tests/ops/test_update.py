"""Updates: the references are torch's optimizers, and the kernels are the references, bit for bit."""

import itertools

import pytest
import torch

from ls_strategy.ops import moments, native, reference, update
from tests.ops.cases import CASES, DTYPES, FORMATS, assert_same_bits, make, run

SIZES = (0, 1, 15, 16, 17, 255, 256, 257, 4097, 100_003)


@pytest.fixture
def no_kernels(monkeypatch):
    monkeypatch.setattr(native, "available", lambda device_type: False)


def with_reference(case, buffers, **kwargs):
    result = buffers.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "available", lambda device_type: False)
        run(case, result, **kwargs)
    return result


TORCH = {
    "adamw": (torch.optim.AdamW, {"betas": (0.9, 0.95), "weight_decay": 0.1}, (True, False)),
    "adam": (torch.optim.Adam, {"betas": (0.9, 0.95), "weight_decay": 0.1, "maximize": True}, (True, False)),
    "adam_beta1_0.3": (torch.optim.AdamW, {"betas": (0.3, 0.95), "weight_decay": 0.1}, (True, False)),
    "sgd": (torch.optim.SGD, {"weight_decay": 0.1, "maximize": True}, ()),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}, (True,)),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, (True,)),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1}, (False,)),
}


@pytest.mark.parametrize("name", TORCH)
def test_equals_torch(name, no_kernels):
    n, lr = 1000, 1e-2
    cls, options, signed = TORCH[name]
    torch.manual_seed(0)
    p = torch.randn(n)
    q = p.clone().requires_grad_()
    optimizer = cls([q], lr=lr, foreach=False, **options)
    stored = [moments.empty(n, "fp32", s) for s in signed]
    case = CASES[name]
    settings = {**case.settings}
    if "dampening" in settings:
        settings["dampening"] = options.get("dampening", 0.0)
    for step in range(1, 21):
        g = torch.randn(n)
        q.grad = g.clone()
        optimizer.step()
        if "step" in settings:
            settings["step"] = step
        if "first" in settings:
            settings["first"] = step == 1
        case.update(p, *stored, g, **settings | {"lr": lr})
    torch.testing.assert_close(p, q.detach(), rtol=1e-6, atol=1e-6)
    keys = [k for k in ("exp_avg", "exp_avg_sq", "momentum_buffer", "sum") if optimizer.state[q].get(k) is not None]
    for m, key in zip(stored, keys, strict=True):
        torch.testing.assert_close(m.codes, optimizer.state[q][key], rtol=1e-6, atol=1e-6)


@pytest.mark.sample(10)
@pytest.mark.parametrize("moment_format", FORMATS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("isa", [0, 1, 2], indirect=True)
def test_kernel_is_the_reference(isa, name, moment_format):
    case = CASES[name]
    for n in SIZES:
        for grad_dtype in DTYPES:
            for out_dtype in (None, *DTYPES):
                if n > 5000 and out_dtype is not torch.bfloat16:
                    continue
                before = make(case, n, moment_format, grad_dtype, out_dtype)
                expected = with_reference(case, before)
                result = before.clone()
                run(case, result)
                assert_same_bits(result, expected)


@pytest.mark.parametrize("moment_format", FORMATS)
@pytest.mark.parametrize("kernels", [True, False])
def test_portions_are_the_whole(kernels, moment_format, monkeypatch, request):
    if kernels:
        request.getfixturevalue("compiled")
    else:
        request.getfixturevalue("no_kernels")
    case = CASES["adamw"]
    whole = make(case, 4097, moment_format, torch.bfloat16, torch.bfloat16)
    portions = whole.clone()
    run(case, whole, offset=5 * moments.BLOCK)
    cuts = [0, 256, 1024, 3840, 4097] if moment_format == "int8" else [0, 16, 1040, 3888, 4097]
    for start, stop in itertools.pairwise(cuts):
        run(case, portions.narrow(start, stop), offset=5 * moments.BLOCK + start)
    assert_same_bits(whole, portions)


def test_threads_change_nothing(compiled):
    case = CASES["adamw"]
    before = make(case, 300_001, "int8", torch.bfloat16, torch.bfloat16)
    results, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(before.clone())
            run(case, results[-1])
    finally:
        torch.set_num_threads(threads)
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


@pytest.mark.parametrize("moment_format", FORMATS)
def test_extreme_gradients(compiled, moment_format):
    case = CASES["adamw"]
    before = make(case, 1024, moment_format, torch.float32, torch.float16)
    before.grad[::7] = 0
    before.grad[1::7] = 1e-45
    before.grad[2::7] = 3e38
    before.grad[3::7] = -1e-20
    before.param[5::11] = 1e-7
    before.param[6::11] = 70000.0
    expected = with_reference(case, before)
    run(case, before)
    assert_same_bits(before, expected)


@pytest.mark.parametrize("moment_format", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(compiled, moment_format, bad):
    case = CASES["adamw"]
    before = make(case, 700, moment_format, torch.float32, None)
    before.grad[300] = bad
    expected = with_reference(case, before)
    run(case, before)
    for a, b in zip([before.param, *(m.dequantize() for m in before.moments)],
                    [expected.param, *(m.dequantize() for m in expected.moments)], strict=True):  # fmt: skip
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
        assert a[:256].isfinite().all()
    assert not before.moments[0].dequantize()[300].isfinite()


@pytest.mark.parametrize("clip", [None, 0.5, torch.tensor(0.5), torch.tensor([0.5])])
@pytest.mark.parametrize("kernels", [True, False])
def test_clip(kernels, clip, request):
    request.getfixturevalue("compiled" if kernels else "no_kernels")
    case = CASES["momentum_first"]
    b = make(case, 100, "fp32", torch.float32, None)
    run(case, b, clip=clip, unscale=1.0)
    c = make(case, 100, "fp32", torch.float32, None)
    c.grad = c.grad if clip is None else c.grad * 0.5
    run(case, c, clip=None, unscale=1.0)
    assert torch.equal(b.param, c.param)


def test_moments_of_two_formats(compiled):
    n = 300
    p, q = torch.randn(n), torch.zeros(n)
    stored = [moments.empty(n, "bf16", True), moments.empty(n, "fp32", False)]
    q.copy_(p)
    update.adamw_(q, *stored, torch.randn(n), **CASES["adamw"].settings)
    assert not torch.equal(p, q)


@pytest.mark.parametrize("broken", ["grad", "out", "codes", "param"])
def test_refuses_what_a_kernel_would_misread(broken):
    p, g, out, m, v = torch.zeros(8), torch.zeros(8), torch.zeros(8), moments.empty(8, "fp32", True), None
    v = moments.empty(8, "fp32", False)
    if broken == "grad":
        g = torch.zeros(16)[::2]
    elif broken == "out":
        out = torch.zeros(7)
    elif broken == "codes":
        m = moments.empty(9, "fp32", True)
    else:
        p = torch.zeros(8, dtype=torch.float64)
    with pytest.raises((ValueError, TypeError)):
        update.adamw_(p, m, v, g, out=out, **CASES["adamw"].settings)


@pytest.mark.parametrize(
    ("name", "moment_format"),
    [
        pytest.param(name, moment_format, marks=[pytest.mark.wide] if moment_format == less else [])
        for name, less in zip(
            ["adamw", "lion", "momentum", "sgd", "adagrad"], ["fp32", "int8", "fp32", "int8", "int8"], strict=True
        )
        for moment_format in ("fp32", "int8")
    ],
)
def test_opcheck(compiled, name, moment_format, monkeypatch):
    calls = []
    monkeypatch.setattr(update, "run_compiled", lambda *a, **k: calls.append((a, k)))
    case = CASES[name]
    run(case, make(case, 300, moment_format, torch.bfloat16, torch.bfloat16), clip=torch.tensor(0.5))
    (op, param, stored, grad, scalars), rest = calls[0]
    flat = [t for m in stored for t in (m.codes, m.scales)] or [None, None]
    args = (param, *flat, grad)
    result = torch.library.opcheck(getattr(torch.ops.ls_strategy, op).default, args, {**scalars, **rest})
    assert set(result.values()) == {"SUCCESS"}


def test_fake(compiled):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert torch.ops.ls_strategy.sum_of_squares(torch.zeros(10), 1.0).shape == (2,)


def test_rules_and_schemas_have_the_same_names():
    assert set(reference.RULES) == set(native.NAMES)
