"""What every wire format holds, and that a new one is an entry of a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ls_strategy.distributed.wire_format import FORMATS, CastWireFormat, WireFormat
from ls_strategy.ops.quantized import TILE
from ls_strategy.testing import spawn
from tests.models import Case, PrivateNet, bare_trainer, loader, quiet


@dataclass(frozen=True)
class HalfTheBits(WireFormat):
    """A format of another package: fp32 values are sent in bf16."""

    name: str = "bf16"
    dtype: torch.dtype = torch.bfloat16
    lossless: bool = False

    def numel(self, elements: int) -> int:
        return elements

    def encode(self, values: Tensor, out: Tensor) -> None:
        out.copy_(values)

    def decode(self, wire: Tensor, out: Tensor) -> None:
        out.copy_(wire)

    def rounded(self, values: Tensor) -> Tensor:
        return values.bfloat16().to(values.dtype)


@dataclass(frozen=True)
class AllBits(HalfTheBits):
    """What is sent is what is there, twice over: as bytes, so that sizes differ from those of the elements."""

    name: str = "bytes"
    dtype: torch.dtype = torch.uint8
    lossless: bool = True

    def numel(self, elements: int) -> int:
        return 4 * elements

    def encode(self, values: Tensor, out: Tensor) -> None:
        out.copy_(values.view(torch.uint8))

    def decode(self, wire: Tensor, out: Tensor) -> None:
        out.view(torch.uint8).copy_(wire)

    def rounded(self, values: Tensor) -> Tensor:
        return values


EVERY: list[WireFormat] = [
    *FORMATS.values(), CastWireFormat(torch.bfloat16), CastWireFormat(torch.float8_e4m3fn), HalfTheBits(), AllBits(),
]  # fmt: skip


def encoded(form: WireFormat, values: Tensor) -> Tensor:
    out = torch.empty(form.numel(values.numel()), dtype=form.dtype)
    form.encode(values, out)
    return out


def decoded(form: WireFormat, sent: Tensor, numel: int) -> Tensor:
    out = torch.full((numel,), float("nan"))
    form.decode(sent, out)
    return out


@pytest.mark.parametrize("form", EVERY, ids=lambda form: form.name)
def test_shards_are_sent_without_their_neighbours(form: WireFormat) -> None:
    torch.manual_seed(0)
    shards = [torch.randn(n * TILE) for n in (3, 1, 0, 2)]
    full = torch.cat(shards)
    assert sum(form.numel(s.numel()) for s in shards) == form.numel(full.numel())
    sent = torch.cat([encoded(form, s) for s in shards])
    assert torch.equal(sent, encoded(form, full))
    values = decoded(form, sent, full.numel())
    assert torch.equal(values, torch.cat([decoded(form, encoded(form, s), s.numel()) for s in shards]))


@pytest.mark.parametrize("form", EVERY, ids=lambda form: form.name)
def test_rounding_is_declared_and_happens_once(form: WireFormat) -> None:
    torch.manual_seed(0)
    full = torch.randn(2 * TILE)
    values = decoded(form, encoded(form, full), full.numel())
    assert torch.equal(values, full) == form.lossless
    assert torch.equal(form.rounded(full), values)
    if form.name not in FORMATS:  # in these, elements share a scale
        assert torch.equal(form.rounded(full[:7]), values[:7])
    assert torch.equal(decoded(form, encoded(form, values), values.numel()), values)
    assert (values - full).norm() <= 0.2 * full.norm()


CASE = Case(stage=3, accumulate=1)
SENT = {"gathers": "all_gather", "gradients": "reduce_scatter"}


def trained(form: WireFormat | None, world_size: int, sent: str = "gathers") -> tuple[dict[str, Tensor], int]:
    """The weights of four steps and the bytes of what is sent in a format that may be another package's."""
    from ls_strategy import ZeROStrategy

    quiet()
    sharding: dict[str, Any] = {"min_unit_numel": 0}
    if form is not None:
        FORMATS[form.name] = form
        sharding[f"quantized_{sent}"] = form.name
    strategy, module = ZeROStrategy(3, sharding=sharding), PrivateNet(CASE)
    bare_trainer(strategy, world_size, max_epochs=1).fit(module, loader(CASE, world_size))
    return {k: v.clone() for k, v in module.state_dict().items()}, strategy.traffic.bytes[SENT[sent]]


def with_formats(rank: int, world_size: int, sent: str) -> list[tuple[dict[str, Tensor], int]]:
    own = dict(FORMATS)
    try:
        return [trained(form, world_size, sent) for form in (None, AllBits(), HalfTheBits(), FORMATS["int8"])]
    finally:
        for name in set(FORMATS) - set(own):
            del FORMATS[name]


@pytest.mark.parametrize("sent", SENT)
def test_a_format_of_another_package_trains(sent: str) -> None:
    (plain, bytes_of_plain), (same, bytes_of_same), (half, bytes_of_half), (int8, bytes_of_int8) = spawn(
        with_formats, 2, sent, init_process_group=False
    )[0]
    assert all(torch.equal(plain[k], same[k]) for k in plain), "nothing was rounded"
    assert bytes_of_int8 < bytes_of_half < bytes_of_same, "small buffers are padded to tiles by all of these"
    assert bytes_of_plain < bytes_of_same
    assert not all(torch.equal(plain[k], half[k]) for k in plain)
    for weights in (half, int8):
        for k in plain:
            assert torch.allclose(weights[k], plain[k], rtol=0.1, atol=0.1)
