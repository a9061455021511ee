"""Split master weights: every number is restored, and the upper part is the nearest bf16 number."""

from collections.abc import Iterator

import pytest
import torch

from ls_strategy.ops import native
from ls_strategy.ops.moments import BLOCK
from ls_strategy.ops.split_master import SplitMaster, split
from tests.ops.cases import CASES, make, run
from tests.ops.conftest import limited

UPPER = torch.arange(1 << 16) << 16
LOWER = torch.arange(1 << 16)


def numbers(bits: torch.Tensor) -> torch.Tensor:
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32).view(-1)


@pytest.mark.parametrize(
    "bits",
    [
        UPPER[:, None] | torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]),
        torch.tensor([0, 0x80000000, 0x3F800000, 0x3F810000, 0xBF810000, 0x7F7F0000, 0x7F800000])[:, None] | LOWER,
    ],
    ids=["all upper halves", "all lower halves"],
)
def test_every_number_is_restored_and_the_upper_part_is_nearest_even(bits: torch.Tensor) -> None:
    values = numbers(bits)
    parts = split(values)
    found, is_nan = parts.join(), values.isnan()
    assert torch.equal(found.isnan(), is_nan)
    assert torch.equal(found.view(torch.int32)[~is_nan], values.view(torch.int32)[~is_nan])
    rounded = values.to(torch.bfloat16)
    assert torch.equal(parts.high.view(torch.int16)[~is_nan], rounded.view(torch.int16)[~is_nan])


def test_sixteen_bits_cannot_complete_an_even_number() -> None:
    """65,537 fp32 numbers round to it, so there is one bit more for the two in the middle."""
    around = numbers(torch.arange(0x3F7F0000, 0x3F820000))
    parts = split(around)
    own = parts.high == 1.0
    assert int(own.sum()) == 65_537
    assert parts.low[own].unique().numel() == 65_536
    bits = torch.arange(8, dtype=torch.uint8)
    assert parts.ties is not None
    tied = (parts.ties[:, None] >> bits & 1).view(-1)[own]
    assert torch.stack([parts.low[own].long(), tied.long()]).unique(dim=1).shape[1] == 65_537


def test_numbers_of_24_bits_are_restored_but_for_the_middle_above_an_even_one() -> None:
    bits = torch.arange(1 << 24) << 8
    values = numbers(bits)
    parts, is_nan = split(values, "24"), values.isnan()
    found, left_out = parts.join().view(torch.int32), (bits & 0x1FFFF) == 0x8000
    assert torch.equal(parts.join().isnan(), is_nan)
    kept = ~is_nan & ~left_out
    assert torch.equal(found[kept], values.view(torch.int32)[kept])
    assert torch.equal(found[left_out & ~is_nan], values.view(torch.int32)[left_out & ~is_nan] - 0x100)
    rounded = values.to(torch.bfloat16)
    assert torch.equal(parts.high.view(torch.int16)[~is_nan], rounded.view(torch.int16)[~is_nan])


def test_others_are_rounded_to_the_nearest_number_of_24_bits_and_cast_as_before() -> None:
    lower = [0, 1, 0x7F, 0x80, 0x81, 0x17F, 0x180, 0x181, 0x7F7F, 0x7F80, 0x7FFF, 0x8000, 0x8001, 0x8080, 0x8081]
    values = numbers(UPPER[:, None] | torch.tensor([*lower, 0xFF7F, 0xFF80, 0xFFFF]))
    parts, bits = split(values, "24"), values.view(torch.int32)
    found, is_nan = parts.join(), values.isnan()
    assert torch.equal(found.isnan(), is_nan)
    assert torch.equal(found.to(torch.bfloat16)[~is_nan], values.to(torch.bfloat16)[~is_nan])
    below = (bits & ~0xFF).view(torch.float32).double()
    above = ((bits & ~0xFF) + 0x100).view(torch.float32).double()
    to_below, to_above = (values.double() - below).abs(), (above - values.double()).abs()
    even = torch.where((bits >> 8 & 1) == 0, below, above)
    expected = torch.where(to_below == to_above, even, torch.where(to_below < to_above, below, above))
    beside = ((bits & 0xFFFF) - 0x8000).abs() <= 0x80  # the middle, and what is nearest to it
    usual = values.isfinite() & above.isfinite() & ~beside
    assert torch.equal(found.double()[usual], expected[usual])
    assert torch.equal(found[values.isinf()], values[values.isinf()])
    assert ((found.view(torch.int32) - bits).abs()[values.isfinite()] <= 0x100).all()
    again = split(found, "24")
    assert torch.equal(again.join().view(torch.int32)[~is_nan], found.view(torch.int32)[~is_nan])
    assert torch.equal(again.low, parts.low)


@pytest.fixture(params=["plain torch", 0, 1, 2])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The reference, or the kernels with an instruction set."""
    if request.param == "plain torch":
        monkeypatch.setattr(native, "available", lambda device_type: False)
        yield
        return
    request.getfixturevalue("compiled")
    yield from limited(native, request.param)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("moment_format", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", CASES)
def test_an_update_is_that_of_fp32_masters(name: str, moment_format: str) -> None:
    case = CASES[name]
    bf16, fp32 = torch.bfloat16, torch.float32  # of gradients: kernels have a loop of its own for bf16
    for n, grad_dtype in ((1, bf16), (17, fp32), (256, bf16), (2309, fp32), (70_001, bf16)):
        before = make(case, n, moment_format, grad_dtype, torch.bfloat16)
        before.param = numbers((before.param.view(torch.int32).long() & 0xFFFF0000) + 0x7FF0 + torch.arange(n) % 32)
        expected, ours = before.clone(), before.clone()
        parts = split(before.param)
        ours.param, ours.out = parts, None  # type: ignore[assignment]
        run(case, expected, offset=3 * BLOCK)
        run(case, ours, offset=3 * BLOCK)
        assert torch.equal(parts.join().view(torch.int32), expected.param.view(torch.int32))
        assert expected.out is not None
        assert torch.equal(parts.high.view(torch.int16), expected.out.view(torch.int16))
        for found, moment in zip(ours.moments, expected.moments, strict=True):
            assert torch.equal(found.codes, moment.codes)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("moment_format", ["fp32", "int8"])
@pytest.mark.parametrize("name", CASES)
def test_an_update_of_24_bits_is_that_of_fp32_masters_rounded(name: str, moment_format: str) -> None:
    case = CASES[name]
    for n, grad_dtype in ((1, torch.bfloat16), (17, torch.float32), (2309, torch.bfloat16), (70_001, torch.float32)):
        before = make(case, n, moment_format, grad_dtype, None)
        special = torch.tensor([float("inf"), 0.0, -0.0, 1e-40, float("nan"), -3.4e38, 1.00390625])[: n // 7]
        before.param[: len(special)] = special
        expected, ours = before.clone(), before.clone()
        parts = split(before.param, "24")
        expected.param, ours.param = parts.join(), parts  # type: ignore[assignment]
        run(case, expected, offset=3 * BLOCK)
        run(case, ours, offset=3 * BLOCK)
        rounded = split(expected.param, "24")
        number = ~expected.param.isnan()
        assert torch.equal(parts.high.isnan(), ~number)
        assert torch.equal(parts.high.view(torch.int16)[number], rounded.high.view(torch.int16)[number])
        assert torch.equal(parts.low, rounded.low)
        for found, moment in zip(ours.moments, expected.moments, strict=True):
            assert torch.equal(found.codes.view(torch.uint8), moment.codes.view(torch.uint8))


def test_a_part_that_begins_inside_of_a_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        split(torch.ones(32))[4:16]


def test_parts_are_views() -> None:
    parts = split(torch.zeros(32))
    part = parts[8:24]
    assert isinstance(part, SplitMaster)
    part.store_(torch.full((16,), 1.00390625 * 3))
    assert torch.equal(parts.join()[8:24], torch.full((16,), 1.00390625 * 3))
    assert not parts.join()[:8].any()
