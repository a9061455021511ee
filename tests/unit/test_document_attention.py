"""`document_attention`: the numbers of a mask without one, on one rank and in blocks whose tokens are sharded."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import varlen
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ls_strategy import document_attention, document_mask
from ls_strategy._torch import fake_tensors, varlen_attention
from ls_strategy.errors import ConfigError, PlanError
from ls_strategy.extras.data_efficiency import documents as module
from ls_strategy.parallel.context import attention, ring
from tests.live_bytes import LiveBytes
from tests.unit.thread_ranks import ThreadAxis, on_ranks

HEADS, TOKENS, WIDTH = 4, 16, 6
NUMBERS = torch.tensor([[0] * 3 + [1] * 3 + [2] * 6 + [-1] * 4, [7] * 9 + [3] + [-1] * 2 + [5] * 4])
"""Neighbours of equal length, documents on several ranks, padding at the end and between documents."""


def inputs(key_heads: int = HEADS, dtype: torch.dtype = torch.float64, width: int = WIDTH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, n, TOKENS, width, generator=generator, dtype=torch.float64).to(dtype)
        for n in (HEADS, key_heads, key_heads)
    ]


def attend(tensors: list[Tensor], numbers: Tensor, **options: Any) -> Tensor:
    query, key, value = tensors
    return document_attention(query, key, value, numbers, **options)


def results(attend: Any, tensors: list[Tensor]) -> list[Tensor]:
    """The result and the gradients."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    result = attend(*leaves)
    result.square().sum().backward()
    return [result.detach(), *(t.grad for t in leaves if t.grad is not None)]


def without_mask(tensors: list[Tensor], numbers: Tensor = NUMBERS, **options: Any) -> list[Tensor]:
    return results(lambda *leaves: attend(list(leaves), numbers, **options), tensors)


def with_mask(tensors: list[Tensor], numbers: Tensor = NUMBERS, **options: Any) -> list[Tensor]:
    mask = document_mask(numbers)
    return results(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, mask, **options), tensors)


def on_shards(
    tensors: list[Tensor], size: int, members: int, numbers: Tensor = NUMBERS, **options: Any
) -> list[Tensor]:  # fmt: skip
    """The same of all ranks, joined along the tokens."""

    def body(axis: ThreadAxis) -> list[Tensor]:
        mine, *part = (
            t.chunk(axis.size, dim)[axis.rank].clone() for t, dim in ((numbers, 1), *((t, 2) for t in tensors))
        )
        with attention.attention_over(axis, members) as region:
            found = without_mask(part, mine, **options)
            assert all(map(torch.equal, found, without_mask(part, numbers, **options)))  # those of all tokens
        assert region.calls == 2
        return found

    return [torch.cat(parts, 2) for parts in zip(*on_ranks(size, body), strict=True)]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((a.double().cpu() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


OPTIONS = [{}, {"scale": 0.3}, {"enable_gqa": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("size", "members"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (4, 4)])
def test_values_and_gradients_are_those_of_the_mask(options, size, members):
    for key_heads in (1, 2) if "enable_gqa" in options else (HEADS,):
        tensors = inputs(key_heads)
        found = without_mask(tensors, **options) if size == 1 else on_shards(tensors, size, members, **options)
        assert_equal(found, with_mask(tensors, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_are_as_precise_as_with_the_mask(dtype):
    tensors = inputs(dtype=dtype)
    exact = with_mask([t.double() for t in tensors])
    for found in (without_mask(tensors), on_shards(tensors, 2, 1), on_shards(tensors, 2, 2)):
        for ours, bound in zip(errors(found, exact), errors(with_mask(tensors), exact), strict=True):
            assert ours <= 2 * bound


@pytest.mark.parametrize(("size", "members"), [(1, 1), (2, 1), (2, 2)])
def test_autocast_casts_as_for_attention(size, members):
    tensors = inputs(dtype=torch.float32)

    def body(axis: ThreadAxis) -> list[Tensor]:
        part, mine = [t.chunk(axis.size, 2)[axis.rank] for t in tensors], NUMBERS.chunk(axis.size, 1)[axis.rank]
        sharded = attention.attention_over(axis, members) if size > 1 else nullcontext()
        with sharded, torch.autocast("cpu", torch.bfloat16):
            return without_mask(part, mine)

    found = [torch.cat(parts, 2) for parts in zip(*on_ranks(size, body), strict=True)]
    with torch.autocast("cpu", torch.bfloat16):
        expected = with_mask(tensors)
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    assert max(errors(found, with_mask([t.double() for t in tensors]))) <= 2e-2


@pytest.mark.parametrize(("size", "members"), [(1, 1), (2, 1), (2, 2)])
def test_padding_in_several_places_changes_no_document_and_has_finite_gradients(size, members):
    numbers = torch.tensor([[-1, -1, 0, 0, 0, -1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1]] * 2)
    tensors = inputs()
    found = without_mask(tensors, numbers) if size == 1 else on_shards(tensors, size, members, numbers)
    real = numbers[0] >= 0
    assert_equal([t[:, :, real] for t in found], [t[:, :, real] for t in with_mask(tensors, numbers)])
    assert_equal(found, without_mask(tensors, numbers))
    assert all(t.isfinite().all() for t in found)


def peak_bytes(attend: Any, tokens: int, size: int, members: int) -> int:
    """Return the most bytes of tensors that forward and backward of the last rank have."""
    numbers = (torch.arange(tokens) // (tokens // 4))[None]

    def body(axis: ThreadAxis) -> int:
        leaves = [torch.ones(1, 2, tokens // size, 8, requires_grad=True) for _ in range(3)]
        live = LiveBytes()
        context = attention.attention_over(axis, members) if size > 1 else nullcontext()
        with live if axis.rank == size - 1 else nullcontext(), context:
            attend(*leaves, numbers).sum().backward()
        return live.peak

    return max(on_ranks(size, body))


def masked(query: Tensor, key: Tensor, value: Tensor, numbers: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, document_mask(numbers))


@pytest.mark.parametrize(("size", "members"), [(1, 1), (2, 1), (2, 2)])
def test_memory_grows_with_tokens_and_not_with_their_pairs(monkeypatch, size, members):
    monkeypatch.setattr(ring, "SCORE_BYTES", 1 << 16)
    growth = [
        peak_bytes(attend, 4096, size, members) / peak_bytes(attend, 1024, size, members)
        for attend in ((document_attention, masked) if size == 1 else (document_attention,))
    ]
    assert growth[0] < 6
    assert size > 1 or growth[1] > 8


def test_rings_compute_no_pair_of_chunks_without_a_common_document():
    """Of 8 chunks with 36 pairs; each rank has 2 on the diagonal."""
    numbers = torch.arange(TOKENS)[None].expand(2, -1)
    plain = ring._pairs
    longer = torch.tensor([[0] * 3 + [1] * 13, [0] * 4 + [1] * 2 + [2] * 10])
    for documents, expected in ((numbers, 8), (torch.zeros_like(numbers), 36), (longer, 8 + 1 + 21)):
        pairs: list[Any] = []

        def noted(*args: Any, pairs: list[Any] = pairs) -> Any:
            for pair in plain(*args):
                pairs.append(pair[:2])
                yield pair

        with mock.patch.object(ring, "_pairs", noted), torch.no_grad():

            def body(axis: ThreadAxis, documents: Tensor = documents) -> Tensor:
                with attention.attention_over(axis, 4):
                    return attend([t.chunk(4, 2)[axis.rank] for t in inputs()], documents)

            found = torch.cat(on_ranks(4, body), 2)
        q, k, v = inputs()
        torch.testing.assert_close(found, masked(q, k, v, documents), rtol=1e-12, atol=1e-12)
        assert len(pairs) == expected


def test_the_host_reads_the_numbers_of_a_tensor_once_and_again_when_they_have_changed():
    numbers, tensors = NUMBERS.clone(), inputs()
    with mock.patch.object(module, "_lengths", wraps=module._lengths) as read:
        for _ in range(3):
            without_mask(tensors, numbers)
        assert read.call_count == 1
        numbers[0, 3:6] = 0
        assert_equal(without_mask(tensors, numbers), with_mask(tensors, numbers))
        with torch.inference_mode():  # where no change is counted
            numbers = NUMBERS.clone()
            first = attend(tensors, numbers)
            numbers[0, 3:6] = 0
            assert not torch.equal(attend(tensors, numbers), first)


@pytest.mark.parametrize("known", [False, True])
def test_recomputation_that_keeps_operations_may_find_the_numbers_read_or_not(known):
    """Reading is not one of the operations that it kept."""

    def keep(*_args: Any, **_options: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    def selective(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        modes = partial(create_selective_checkpoint_contexts, keep)
        result = checkpoint(document_attention, query, key, value, numbers, use_reentrant=False, context_fn=modes)
        assert isinstance(result, Tensor)
        if known:
            module._KNOWN.clear()
        return result

    numbers = NUMBERS.clone()
    if known:
        without_mask(inputs(), numbers)
    assert_equal(results(selective, inputs()), with_mask(inputs()))


def test_what_cannot_be_is_refused():
    tensors = inputs()
    with mock.patch.object(module, "is_capturing", return_value=True), pytest.raises(ConfigError, match="CUDA graph"):
        module._runs_of(NUMBERS, torch.device("cuda"))
    for numbers, message in (
        (NUMBERS.double(), "numbers"),
        (NUMBERS > 0, "numbers"),
        (NUMBERS[0], "numbers"),
        (NUMBERS[:, :8], "every token"),
        (NUMBERS[:1], "for the same tokens"),
        (torch.tensor([[0] * 16, [0] * 5 + [1] * 5 + [0] * 6]), "sequence 1 the tokens of document 0 are not"),
    ):
        with pytest.raises(ConfigError, match=message):
            attend(tensors, numbers)
    for wrong, options in (
        ([tensors[0][:, :, :4], *tensors[1:]], {}),
        ([t[0] for t in tensors], {}),
        (inputs(2), {}),
        (inputs(3), {"enable_gqa": True}),
    ):
        with pytest.raises(ConfigError, match=r"requires .batch, heads|of heads must"):
            attend(wrong, NUMBERS, **options)


@pytest.mark.parametrize(("size", "members"), [(2, 1), (2, 2)])
def test_numbers_for_other_tokens_are_refused_in_sharded_blocks(size, members):
    def body(axis: ThreadAxis) -> None:
        with attention.attention_over(axis, members), pytest.raises(PlanError, match="argument of the block"):
            attend([t[:, :, :8] for t in inputs()], NUMBERS[:, :4])

    on_ranks(size, body)


def test_batches_without_tokens_and_tensors_without_values():
    for shape in ((0, 2, 8, 4), (2, 2, 0, 4)):
        empty = torch.zeros(shape, requires_grad=True)
        result = document_attention(empty, empty, empty, torch.zeros(shape[0], shape[2], dtype=torch.long))
        result.sum().backward()
        assert result.shape == shape
    with fake_tensors():
        x = torch.zeros(2, 2, 8, 4, requires_grad=True)
        document_attention(x, x, x, torch.zeros(2, 8, dtype=torch.long)).sum().backward()
        assert x.grad is not None


def reference(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, ends_k: Tensor, longest: int, longest_k: int,
              *, scale: float | None, window_size: tuple[int, int]) -> Tensor:  # fmt: skip
    """What torch 2.11 documents of its function."""
    assert window_size == (-1, 0)
    assert ends.dtype == torch.int32
    assert query.shape[1] == key.shape[1]
    assert longest == longest_k == ends.diff().max()
    assert ends is ends_k
    lines = [x.transpose(0, 1).split(ends.diff().tolist(), 1) for x in (query, key, value)]
    attend = functional.scaled_dot_product_attention
    parts = [attend(*part, is_causal=True, scale=scale) for part in zip(*lines, strict=True)]
    return torch.cat(parts, 1).transpose(0, 1)


def reference_with_gqa(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, enable_gqa: bool = False, **options: Any
) -> Tensor:
    assert enable_gqa == (query.shape[1] != key.shape[1])
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    return reference(query, key, value, *args, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("function", [reference, reference_with_gqa])
@pytest.mark.parametrize("size", [1, 2])
def test_what_torchs_attention_for_variable_lengths_is_given(function, options, size):
    tensors = inputs(2 if "enable_gqa" in options else HEADS)
    expected = with_mask(tensors, **options)
    with mock.patch.object(varlen, "varlen_attn", function), mock.patch.object(module, "can_flash", return_value=True):
        found = without_mask(tensors, **options) if size == 1 else on_shards(tensors, size, 1, **options)
    assert_equal(found, expected)


def test_torch_takes_the_arguments_of_a_gpu():
    """Shapes alone, by what torch has for tensors without memory."""
    query, key = (torch.empty(16, n, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for n in (4, 2))
    ends = torch.empty(5, dtype=torch.int32, device="meta")
    result = varlen_attention(query, key, key, ends, 9, 0.1)
    result.sum().backward()
    assert result.shape == query.shape
    assert query.grad is not None
    assert key.grad is not None


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_attention_on_a_gpu(options, dtype):
    """In one call, with at most twice the error of the mask."""
    rounded = [t.cuda() for t in inputs(2 if "enable_gqa" in options else HEADS, dtype, width=64)]
    exact = with_mask([t.double().cpu() for t in rounded], **options)
    with mock.patch.object(module, "_by_length", side_effect=AssertionError):
        found = errors(without_mask(rounded, NUMBERS.cuda(), **options), exact)
    for ours, bound in zip(found, errors(with_mask(rounded, NUMBERS.cuda(), **options), exact), strict=True):
        assert ours <= 2 * bound
