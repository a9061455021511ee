"""Ring attention: the values and gradients of attention over all tokens, alone and with exchanged heads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ls_strategy._torch import flash_attention, flash_attention_backward
from ls_strategy.errors import PlanError
from ls_strategy.parallel.context import attention, ring
from tests.live_bytes import LiveBytes
from tests.unit.thread_ranks import ThreadAxis, on_ranks

ORIGINAL = functional.scaled_dot_product_attention
BATCH, HEADS, TOKENS, WIDTH = 2, 4, 16, 6


@pytest.fixture(autouse=True)
def interception() -> Iterator[attention.Interception]:
    active = attention.Interception()
    yield active
    active.remove()


def inputs(key_heads: int = HEADS, dtype: torch.dtype = torch.float64, width: int = WIDTH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(BATCH, n, TOKENS, width, generator=generator, dtype=torch.float64).to(dtype)
        for n in (HEADS, key_heads, key_heads)
    ]


def results(tensors: list[Tensor], size: int, members: int, *, autocast: bool = False, **options: Any) -> list[Tensor]:
    """The result and the gradients of all ranks, joined along the tokens."""

    def body(axis: ThreadAxis) -> list[Tensor]:
        leaves = [t.chunk(axis.size, 2)[axis.rank].clone().requires_grad_() for t in tensors]
        with attention.attention_over(axis, members), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = functional.scaled_dot_product_attention(*leaves, **options)
        result.backward(torch.linspace(0, 1, TOKENS).to(result)[:, None].chunk(axis.size)[axis.rank].expand_as(result))
        return [result.detach(), *(t.grad for t in leaves)]

    return [torch.cat(parts, 2) for parts in zip(*on_ranks(size, body), strict=True)]


def expected(tensors: list[Tensor], **options: Any) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in tensors]
    result = ORIGINAL(*leaves, **options)
    result.backward(torch.linspace(0, 1, TOKENS).to(result)[:, None].expand_as(result))
    return [result.detach(), *(t.grad for t in leaves)]


def documents() -> Tensor:
    number = torch.tensor([0] * 3 + [1] * 7 + [2] * 6)
    return (number[:, None] == number) & torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


MASKS = {
    "causal": {"is_causal": True},
    "full": {},
    "scaled": {"is_causal": True, "scale": 0.3},
    "documents": {"attn_mask": documents()},
    "bias": {"attn_mask": torch.randn(BATCH, HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(1))},
    "keys": {"attn_mask": torch.arange(TOKENS).lt(11)[None, None, None].expand(BATCH, 1, 1, TOKENS)},
    "empty rows": {"attn_mask": torch.arange(TOKENS).ge(4)[:, None].expand(TOKENS, TOKENS)},
}


@pytest.mark.sample(17)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("size", "members"), [(2, 2), (4, 4), (4, 2), (2, 1), (4, 1)])
@pytest.mark.parametrize("rows", [2000, 10**6])
def test_values_and_gradients_are_those_of_all_tokens(mask, size, members, rows):
    options = {k: v.double() if k == "attn_mask" and v.is_floating_point() else v for k, v in MASKS[mask].items()}
    with mock.patch.object(ring, "SCORE_BYTES", rows):
        found = results(inputs(), size, members, **options)
    for a, b in zip(found, expected(inputs(), **options), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize(("size", "members"), [(2, 2), (4, 4), (4, 2), (2, 1), (4, 1)])
def test_key_heads_may_be_fewer_than_ranks(key_heads, size, members):
    options = {"is_causal": True, "enable_gqa": True}
    found = results(inputs(key_heads), size, members, **options)
    for a, b in zip(found, expected(inputs(key_heads), **options), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_lower_precisions(dtype, bound):
    found = results(inputs(dtype=dtype), 4, 4, is_causal=True)
    for a, b in zip(found, expected(inputs(dtype=dtype), is_causal=True), strict=True):
        assert a.dtype == dtype
        assert (a.double() - b.double()).norm() <= bound * b.double().norm()


def test_no_number_crosses_documents():
    """Another first document leaves every bit of the others' results and gradients."""
    tensors = inputs(dtype=torch.float32)
    changed = [t.clone() for t in tensors]
    for t in changed:
        t[:, :, :3] = torch.randn(BATCH, HEADS, 3, WIDTH)
    for size, members in ((2, 2), (4, 2), (4, 4), (2, 1)):
        found, other = (results(t, size, members, attn_mask=documents()) for t in (tensors, changed))
        for a, b in zip(found, other, strict=True):
            assert torch.equal(a[:, :, 3:], b[:, :, 3:])
            assert not torch.equal(a[:, :, :3], b[:, :, :3])


def test_causal_work_is_equal():
    """Pairs of chunks per rank: with consecutive tokens the last rank would have almost twice the mean."""
    for members in (2, 4, 8):
        pairs = []
        for rank in range(members):
            setting = ring._Setting(mock.Mock(rank=rank, size=members), causal=True, scale=1.0, mask=None)
            x = torch.zeros(1, 1, 1, 2, 1)
            pairs.append(sum(len(list(ring._pairs(setting, m, x, x[0], torch.float32))) for m in range(members)))
        assert set(pairs) == {2 * members + 1}


def test_a_mask_that_is_trained_gets_the_gradient_of_all_heads():
    """Without rings. Gradients of parameters are averaged over the ranks; here they are summed."""
    for heads in (1, HEADS):
        whole = torch.randn(1, heads, TOKENS, TOKENS, dtype=torch.float64)

        def body(axis: ThreadAxis, whole: Tensor = whole) -> Tensor:
            mask = whole.clone().requires_grad_()
            with attention.attention_over(axis):
                part = [t.chunk(axis.size, 2)[axis.rank] for t in inputs()]
                functional.scaled_dot_product_attention(*part, attn_mask=mask).square().sum().backward()
            assert mask.grad is not None
            return mask.grad

        mask = whole.clone().requires_grad_()
        ORIGINAL(*inputs(), attn_mask=mask).square().sum().backward()
        torch.testing.assert_close(sum(on_ranks(2, body)), mask.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("size", "members"), [(2, 2), (4, 2), (2, 1)])
@pytest.mark.parametrize("shape", [(1, 0), (0, 1), (0, 0)])
def test_masks_of_some_tokens_are_refused(size, members, shape):
    local = TOKENS // size
    mask = torch.ones([TOKENS if full else local for full in shape], dtype=torch.bool)
    with pytest.raises(PlanError, match=rf"attn_mask .* for {local} of {TOKENS} tokens"):
        results(inputs(), size, members, attn_mask=mask)


def test_what_cannot_be_is_refused():
    for options, message in (
        ({"dropout_p": 0.1}, "dropout"),
        ({"attn_mask": torch.zeros(4, 4).requires_grad_()}, "mask"),
    ):
        with pytest.raises(PlanError, match=message):
            results(inputs(), 2, 2, **options)
    with pytest.raises(PlanError, match="two chunks"):
        results([t[:, :, :6] for t in inputs()], 2, 2)


def test_blocks_are_the_pairs_that_a_causal_mask_allows():
    """Each pair of chunks that attend, once, and nothing else."""
    for members in (2, 3, 8):
        for rank in range(members):
            setting = ring._Setting(mock.Mock(rank=rank, size=members), causal=True, scale=1.0, mask=None)
            for owner in range(members):
                rows, k_rows, causal = ring._block(setting, owner, 4)
                allowed = torch.zeros(4, 4, dtype=torch.bool)
                allowed[rows, k_rows] = True
                allowed &= torch.ones(4, 4, dtype=torch.bool).tril() if causal else True
                q, k = (torch.tensor(setting.chunks(m)).repeat_interleave(2) * 2 for m in (rank, owner))
                at = torch.tensor([0, 1, 0, 1])
                assert torch.equal(allowed, (q + at)[:, None] >= (k + at)), (members, rank, owner)


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((a.double().cpu() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


def assert_no_less_precise_than_alone(rounded: list[Tensor], size: int, members: int, options: dict[str, Any]) -> None:
    """The error of results and gradients is at most twice that of flash attention on one rank; no score is computed."""
    exact = expected([t.double().cpu() for t in rounded], **options)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        alone = errors(expected(rounded, **options), exact)
        with mock.patch.object(ring, "_pairs", side_effect=AssertionError):
            found = errors(results(rounded, size, members, **options), exact)
    for ours, bound in zip(found, alone, strict=True):
        assert ours <= 2 * bound


SOME_OPTIONS = [{"is_causal": True}, {}, {"is_causal": True, "scale": 0.3}]


@pytest.mark.parametrize("options", SOME_OPTIONS, ids=str)
@pytest.mark.parametrize("key_heads", [HEADS, 1])
@pytest.mark.parametrize(("size", "members"), [(2, 2), (4, 4), (4, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_attention_in_rings(options, key_heads, size, members, dtype):
    """Torch has it for CPUs, too; there it is only used here."""
    options = {**options, "enable_gqa": key_heads < HEADS}
    with mock.patch.object(ring, "can_flash", return_value=True):
        assert_no_less_precise_than_alone(inputs(key_heads, dtype), size, members, options)


def peak_bytes(tokens: int, size: int, members: int) -> int:
    """Return the most bytes of tensors that forward and backward of the last rank have, which reads all keys."""

    def body(axis: ThreadAxis) -> int:
        leaves = [torch.ones(1, 2, tokens // size, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        live = LiveBytes()
        with live if axis.rank == size - 1 else nullcontext(), attention.attention_over(axis, members):
            functional.scaled_dot_product_attention(*leaves, is_causal=True).sum().backward()
        return live.peak

    return max(on_ranks(size, body))


@pytest.mark.parametrize(("size", "members"), [(2, 2), (4, 2)])
def test_memory_of_flash_attention_in_rings_grows_with_tokens_and_not_with_their_pairs(size, members):
    """Alone, and with exchanged heads. What computes scores needs a multiple of that for four times the tokens."""
    growth = {}
    for flash in (True, False):
        with mock.patch.object(ring, "can_flash", return_value=flash):
            growth[flash] = peak_bytes(4096, size, members) / peak_bytes(1024, size, members)
    assert growth[True] < 6
    assert growth[False] > 8


@pytest.mark.gpu
@pytest.mark.parametrize("options", SOME_OPTIONS, ids=str)
@pytest.mark.parametrize("key_heads", [HEADS, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_attention_in_rings_on_a_gpu(options, key_heads, dtype):
    """Notices rings that compute scores in fp32, and gradients of a backward that got other sums than it needs."""
    rounded = [t.cuda() for t in inputs(key_heads, dtype, width=64)]
    options = {**options, "enable_gqa": key_heads < HEADS}
    assert_no_less_precise_than_alone(rounded, 4, 4, options)


class FakeGPU(torch.Tensor):
    """Says that it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")


@pytest.mark.parametrize(
    ("width", "dtype", "capability", "fits"),
    [
        (64, torch.bfloat16, (8, 0), True),
        (64, torch.float16, (12, 0), True),
        (256, torch.bfloat16, (9, 0), True),
        (256, torch.bfloat16, (8, 6), False),
        (60, torch.bfloat16, (9, 0), False),
        (64, torch.float32, (9, 0), False),
        (64, torch.bfloat16, (7, 5), False),
    ],
)
def test_where_flash_attention_is_used(monkeypatch, width, dtype, capability, fits):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(ring.dev, "compute_capability", lambda device: capability)
    x = torch.zeros(1, 1, 2, width, dtype=dtype)
    there = x.as_subclass(FakeGPU)
    assert ring.can_flash(there, x, x) == fits
    assert not ring.can_flash(x, x, x)
    assert not ring.can_flash(there, x, x[..., :4])
    assert not ring.can_flash(there, x.double(), x)
    with sdpa_kernel(SDPBackend.MATH):
        assert not ring.can_flash(there, x, x)


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("kinds", ["dtypes", "strides"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=str)
def test_inputs_are_what_attention_itself_makes_of_them(flash, kinds, options):
    """Under autocast of several dtypes, and with rows that are not adjacent."""
    tensors = inputs(dtype=torch.bfloat16)
    if kinds == "dtypes":
        tensors = [tensors[0].float(), tensors[1], tensors[2].float()]
    else:
        tensors[0] = tensors[0].mT.contiguous().mT

    with mock.patch.object(ring, "can_flash", return_value=flash):
        found = results(tensors, 2, 2, autocast=True, **options)
    with torch.autocast("cpu", torch.bfloat16):
        alone = expected(tensors, **options)
    exact = expected([t.double() for t in tensors], **options)
    assert [t.dtype for t in found] == [t.dtype for t in alone]
    assert max(errors(found, exact)) <= 1e-2


def test_with_a_mask_scores_are_computed():
    rounded = inputs(dtype=torch.bfloat16)
    with (
        mock.patch.object(ring, "can_flash", return_value=True),
        mock.patch.object(ring, "flash_attention", side_effect=AssertionError),
    ):
        found = results(rounded, 2, 2, attn_mask=documents())
    assert max(errors(found, expected([t.double() for t in rounded], attn_mask=documents()))) <= 1e-2


def test_torch_takes_the_arguments_of_a_gpu():
    """Shapes alone, by what torch has for tensors without memory."""
    query, key = (torch.empty(2, heads, 16, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    result, log_sum = flash_attention(query, key, key, causal=True, scale=0.1)
    assert (result.shape, log_sum.shape, log_sum.dtype) == (query.shape, query.shape[:-1], torch.float32)
    grads = flash_attention_backward(result, (query, key, key), result, log_sum, causal=True, scale=0.1)
    assert [g.shape for g in grads] == [query.shape, key.shape, key.shape]
