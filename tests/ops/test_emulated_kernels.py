"""The CUDA kernels, emulated: they are the references bit for bit, and do nothing that CUDA leaves undefined."""

import concurrent.futures
import ctypes
import dataclasses
import itertools
from unittest import mock

import pytest
import torch

from ls_strategy.ops import _build, native, quantized, topk, update
from ls_strategy.ops.cuda.program import Program
from ls_strategy.ops.cuda.update import UPDATES
from ls_strategy.ops.norm import BLOCK, sum_of_squares_reference
from ls_strategy.ops.permute import combine_reference, pair_dots_reference, permute_reference
from tests.ops import cases
from tests.ops.cases import CASES, DTYPES, FORMATS, make
from tests.ops.emulation import FAULTS as FAULTY
from tests.ops.emulation import Emulation, EmulationError
from tests.ops.test_permute import SHAPES, Routed, assert_same_bits
from tests.ops.test_topk import EXPERTS, scores_of

lion_ = UPDATES.functions["lion_"]


@pytest.fixture(scope="module")
def emulation():
    try:
        return Emulation()
    except _build.BuildError as e:
        pytest.skip(str(e))


def shifted(t: torch.Tensor, elements: int) -> torch.Tensor:
    """A copy that begins so many elements after an aligned address."""
    return torch.cat([t.new_zeros(elements), t.flatten()])[elements:].view(t.shape)


# --- the kernels are the references ----------------------------------------------------------------------------------


def both(emulation, case, before, shift=(), **kwargs):
    """What kernel and reference leave behind. ``shift``: number of a tensor in `places`, and by how many elements."""
    expected, result = before.clone(), before.clone()
    if shift:
        owner, name = places(result)[shift[0]]
        setattr(owner, name, shifted(getattr(owner, name), shift[1]))

    def run(name, param, moments, grad, scalars, **rest):
        stored = [t for m in moments for t in (m.codes, m.scales)] or [None, None]
        emulation.run(name, param, *stored, grad, **scalars, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "available", lambda device_type: False)
        cases.run(case, expected, **kwargs)
        patch.setattr(native, "available", lambda device_type: True)
        patch.setattr(update, "run_compiled", run)
        cases.run(case, result, **kwargs)
    return result, expected


def places(buffers):
    """What a kernel reads and writes in vectors."""
    stored = [(m, "codes") for m in buffers.moments]
    return [(buffers, "param"), (buffers, "grad"), *stored] + [(buffers, "out")] * (buffers.out is not None)


@pytest.mark.sample(10)
@pytest.mark.parametrize("moment_format", FORMATS)
@pytest.mark.parametrize("name", CASES)
def test_update_is_the_reference(emulation, name, moment_format):
    case = CASES[name]
    for number, (grad_dtype, out_dtype) in enumerate(itertools.product(DTYPES, (None, *DTYPES))):
        for n in ((1, 255)[number % 2], 2309):  # 2309: several blocks of threads, and a tail that is no vector
            before = make(case, n, moment_format, grad_dtype, out_dtype)
            cases.assert_same_bits(*both(emulation, case, before, offset=number * 256))
        shift = number % len(places(before)), 1 + number % 3
        cases.assert_same_bits(*both(emulation, case, before, shift, clip=None))


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
def test_weights_are_rounded_to_nearest_even(emulation, out_dtype):
    """From the smallest fp16 number to infinity, halves between two numbers included."""
    weights = torch.arange(0x33000000, 0x47900000, 1 << 12, dtype=torch.int32).view(torch.float32)
    case = dataclasses.replace(CASES["sgd"], settings={**CASES["sgd"].settings, "lr": 0.0})
    before = make(case, weights.numel(), "fp32", torch.bfloat16, out_dtype)
    before.param = weights
    result, expected = both(emulation, case, before)
    cases.assert_same_bits(result, expected)
    assert torch.equal(result.out, weights.to(out_dtype))


@pytest.mark.parametrize("moment_format", FORMATS)
def test_extreme_gradients(emulation, moment_format):
    for name in ("adamw", "lion", "adagrad"):
        before = make(CASES[name], 1024, moment_format, torch.float32, torch.float16)
        for i, value in enumerate((0.0, 1e-45, 3e38, -1e-20)):
            before.grad[i::7] = value
        before.param[5::11] = 1e-7
        before.param[6::11] = 70000.0
        cases.assert_same_bits(*both(emulation, CASES[name], before))


@pytest.mark.parametrize("moment_format", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(emulation, moment_format, bad):
    before = make(CASES["adamw"], 700, moment_format, torch.float32, None)
    before.grad[300] = bad
    result, expected = both(emulation, CASES["adamw"], before)
    for a, b in zip([result.param, *(m.dequantize() for m in result.moments)],
                    [expected.param, *(m.dequantize() for m in expected.moments)], strict=True):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        assert a[:256].isfinite().all()
    assert not result.moments[0].dequantize()[300].isfinite()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_of_squares_is_the_reference(emulation, dtype):
    for n in (0, 1, 31, 33, BLOCK - 1, BLOCK, BLOCK + 1, 40_003):
        grad = (torch.randn(n) * 10 ** (torch.rand(n) * 8 - 6)).to(dtype)
        assert torch.equal(emulation.run("sum_of_squares", grad, 0.3), sum_of_squares_reference(grad, 0.3)), n
        grad[n // 3 :: 5000] = float("inf")
        result = emulation.run("sum_of_squares", shifted(grad, 1), 0.3)
        assert torch.equal(result, sum_of_squares_reference(grad, 0.3)), n


def test_sums_of_sums(emulation):
    """More than one level of them, of which the first needs more than one block of threads."""
    grad = torch.randn(BLOCK * BLOCK + 12345).bfloat16()
    assert torch.equal(emulation.run("sum_of_squares", grad, 1.0), sum_of_squares_reference(grad, 1.0))


@pytest.mark.sample(4)
@pytest.mark.parametrize("dropped", [0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_routing_is_the_reference(emulation, dtype, dropped):
    for number, shape in enumerate(SHAPES):
        r = Routed(shape, dtype, dropped)
        order, counts = emulation.run("sort_by_expert", r.indices, r.kept, r.experts)
        assert torch.equal(order, r.order)
        assert torch.equal(counts, r.counts)
        x, y = shifted(r.x, (0, 1, 0, 2)[number % 4]), shifted(r.y, (0, 0, 2, 2)[number % 4])
        for weights in (None, r.weights):
            result = emulation.run("permute", x, order, weights, r.k)
            assert_same_bits(result, permute_reference(r.x, r.order, weights, r.k))
            result = emulation.run("combine", y, order, weights, len(x), r.k)
            assert_same_bits(result, combine_reference(r.y, r.order, weights, len(x), r.k))
        assert_same_bits(emulation.run("pair_dots", x, y, order, r.k), pair_dots_reference(r.x, r.y, r.order, r.k))


@pytest.mark.parametrize("dropped", [0, 0.3])
def test_sort_of_many_pairs(emulation, dropped):
    """More numbers of pairs, one of each expert and tile, than threads of the block that adds them up."""
    r = Routed((2000, 2, 300, 1), torch.float32, dropped)
    order, counts = emulation.run("sort_by_expert", r.indices, r.kept, r.experts)
    assert torch.equal(order, r.order)
    assert torch.equal(counts, r.counts)


def test_topk_is_the_reference(emulation):
    for experts in EXPERTS:
        scores = scores_of(20, experts)
        for k in {1, min(8, experts), experts}:
            expected = topk.topk_indices_reference(scores, k)
            assert torch.equal(emulation.run("topk_indices", scores, k), expected)


@pytest.mark.parametrize("form", quantized.BITS)
def test_dequantization_is_the_reference(emulation, form):
    for number, dtype in enumerate(DTYPES):
        # Three tiles: the last block of threads is not full.
        packed = quantized.quantize(torch.randn(3 * quantized.TILE) * 1e-3, form)
        expected, result = torch.empty(3 * quantized.TILE, dtype=dtype), torch.empty(3 * quantized.TILE, dtype=dtype)
        quantized.dequantize_reference(packed, expected, form)
        for source, target in ((packed, result), (shifted(packed, 1 + number), shifted(result, 1))):
            emulation.run("dequantize_", source, target, number_of(form))
            assert torch.equal(target, expected)


def number_of(form):
    return list(quantized.BITS).index(form)


@pytest.mark.parametrize("bad", [-1, 4])
def test_a_device_asserts_that_experts_exist(emulation, bad):
    with pytest.raises(EmulationError, match=r"routing.cu.*assertion 0 <= of\[i\]"):
        emulation.run("sort_by_expert", torch.tensor([[0, 1], [bad, 2]]), None, 4)


# --- the driver ------------------------------------------------------------------------------------------------------


def launch_count(emulation, device):
    target = torch.zeros(64)
    with emulation.memory({target: True}, order=0), mock.patch.object(torch.Tensor, "get_device", return_value=device):
        FAULTY.launch("count_kernel", target, 2, 64, target.data_ptr(), True)
    left = ctypes.c_void_p()
    emulation.library.cuCtxGetCurrent(ctypes.byref(left))
    assert left.value is None  # what a launch makes current does not stay
    return int(target.view(torch.int32)[0])


def test_launches_on_any_device_from_any_thread(emulation):
    """A thread that has called nothing of CUDA has no context, and kernels belong to that of their device."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        assert [thread.submit(launch_count, emulation, d).result() for d in (0, 1, 0)] == [128] * 3


def test_errors_of_the_driver_have_its_names(emulation):
    wrong = Program("faults", {"no_such_kernel": ()})
    with emulation.in_place_of_cuda(), pytest.raises(RuntimeError, match=r"CUDA_ERROR_NOT_FOUND \(500\)"):
        wrong.launch("no_such_kernel", torch.zeros(1), 1, 32)
    with emulation.in_place_of_cuda(), pytest.raises(ValueError, match="a grid of 0 blocks"):
        FAULTY.launch("assert_kernel", torch.zeros(1), 0, 32)


def test_a_launch_refuses_other_arguments_than_its_kernel_has(emulation):
    with emulation.in_place_of_cuda(), pytest.raises(ValueError, match="zip"):
        FAULTY.launch("count_kernel", torch.zeros(1), 1, 32, 0)


@pytest.mark.parametrize("wrong", ["grad", "exp_avg", "exp_avg_scales", "clip"])
def test_memory_that_a_kernel_would_read_wrongly_is_refused(emulation, wrong):
    param, grad = torch.zeros(300), torch.zeros(300)
    numbers = dict.fromkeys(
        ("unscale", "decay", "l2", "beta1", "weight1", "beta2", "weight2", "rate", "seed", "offset"), 1
    )  # fmt: skip
    given = {"param": param, "exp_avg": torch.zeros(300, dtype=torch.uint8), "exp_avg_scales": torch.zeros(2),
             "grad": grad, "out": None, "clip": torch.ones(())}  # fmt: skip
    names = [a.name for a in torch.ops.ls_strategy.lion_.default._schema.arguments]
    given = dict.fromkeys(names) | given | {n: numbers[n] for n in names if n in numbers}
    emulation.run("lion_", **given)
    for other in (torch.zeros(299), torch.zeros(300, dtype=torch.float64), torch.zeros(600)[::2]):
        with pytest.raises(RuntimeError, match=r"but it must have \d+ contiguous elements of"):
            lion_(*({**given, wrong: other}[n] for n in names))


def test_split_masters_are_refused_by_the_kernel_for_fp32_masters(emulation):
    low, ties = torch.zeros(8, dtype=torch.int16), torch.zeros(1, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="Lion got 8 numbers; split masters have no kernel on GPUs"):
        lion_(torch.zeros(8), torch.zeros(8), None, torch.zeros(8), None, None, 1.0, *[1.0] * 6, 1, 0, low, ties)


# --- what the emulation finds ----------------------------------------------------------------------------------------

FAULTS = {
    "no __syncthreads": "race: it .* an element of shared memory that thread .*, with no barrier in between",
    "no __syncwarp": "race: it .* an element of shared memory that thread .*, with no barrier in between",
    "barrier of some threads": "divergence: it waits in __syncthreads, .* 32 of 64 have ended",
    "shuffle of some lanes": "divergence: it waits in __shfl_down_sync, .* 2 of 64 have ended",
    "lanes in two operations": "divergence: it waits in __shfl_(down|xor)_sync, .* 0 of 64 have ended",
    "misaligned read": "faults.cu:.*misaligned access",
    "misaligned write": "faults.cu:.*misaligned access",
    "read past the end": "out of bounds: it reads 16 bytes at byte 256 of a buffer of 256 bytes",
    "write past the end": "out of bounds: it writes 16 bytes at byte 256 of a buffer of 256 bytes",
    "write to an input": "it writes to an input",
    "two blocks write": "race: it writes an element that thread 0 of block . has written",
    "count without atomics": "race: it reads an element that thread .* has written",
    "assertion": "assertion threadIdx.x < 40",
    "too many threads": "a block of 2048 threads",
    "too much shared memory": "50000 bytes of shared memory",
}


FROM, TO = object(), object()
LAUNCHES = {
    "correct sum": ("sum_kernel", 1, 64, 0, FROM, TO, True, True),
    "no __syncthreads": ("sum_kernel", 1, 64, 0, FROM, TO, False, True),
    "no __syncwarp": ("sum_kernel", 1, 64, 0, FROM, TO, True, False),
    "barrier of some threads": ("divergent_barrier_kernel", 1, 64, 0),
    "shuffle of some lanes": ("divergent_lanes_kernel", 1, 64, 0, TO),
    "lanes in two operations": ("two_meetings_kernel", 1, 64, 0, TO),
    "correct copy": ("copy_kernel", 1, 64, 0, FROM, TO, 0, 0),
    "misaligned read": ("copy_kernel", 1, 64, 0, FROM, TO, 1, 0),
    "misaligned write": ("copy_kernel", 1, 64, 0, FROM, TO, 0, 2),
    "read past the end": ("copy_kernel", 1, 64, 0, FROM, TO, 4, 0),
    "write past the end": ("copy_kernel", 1, 64, 0, FROM, TO, 0, 4),
    "write to an input": ("same_element_kernel", 1, 64, 0, FROM),
    "two blocks write": ("same_element_kernel", 2, 64, 0, TO),
    "correct count": ("count_kernel", 2, 64, 0, TO, True),
    "count without atomics": ("count_kernel", 1, 64, 0, TO, False),
    "assertion": ("assert_kernel", 1, 64, 0),
    "too many threads": ("count_kernel", 1, 2048, 0, TO, True),
    "too much shared memory": ("count_kernel", 1, 64, 50000, TO, True),
}
"""Kernel, blocks, threads, bytes of shared memory, arguments."""


def run_fault(emulation, name, order):
    source, target = torch.arange(64.0), torch.zeros(64)
    kernel, blocks, threads, shared_bytes, *arguments = LAUNCHES[name]
    places = {FROM: source.data_ptr(), TO: target.data_ptr()}
    with emulation.memory({source: False, target: True}, order=order):
        values = (places.get(a, a) for a in arguments)
        FAULTY.launch(kernel, source, blocks, threads, *values, shared_bytes=shared_bytes)
    return source, target


@pytest.mark.parametrize("name", FAULTS)
def test_finds_what_cuda_leaves_undefined(emulation, name):
    for order in range(3):
        with pytest.raises(EmulationError, match=FAULTS[name]):
            run_fault(emulation, name, order)


def test_finds_nothing_else(emulation):
    for order in range(3):
        source, target = run_fault(emulation, "correct sum", order)
        assert target[0] == source.sum()
        source, target = run_fault(emulation, "correct copy", order)
        assert torch.equal(target, source)
        _, target = run_fault(emulation, "correct count", order)
        assert target.view(torch.int32)[0] == 128
