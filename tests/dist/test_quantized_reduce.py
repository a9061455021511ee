"""Reduce-scatters in few bits: equal to the sums of terms that were rounded by hand, on nodes and in groups."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from ls_strategy.distributed.comm import make_comm
from ls_strategy.distributed.mesh import MeshShape, make_mesh
from ls_strategy.distributed.quantized_reduce import Rounding, reduce_quantized
from ls_strategy.distributed.wire_format import FORMATS
from ls_strategy.layout import round_up
from ls_strategy.ops.quantized import TILE, rounded
from ls_strategy.testing import spawn
from tests.dist.ranks import on_ranks

SHARD = 2048
"""Elements, and of `shard_of` at least."""

FORMS: tuple[Any, ...] = ("int8", "int4")
KINDS = [(torch.float32, 1.0), (torch.bfloat16, 1e-3), (torch.float16, 1e3)]


def shard_of(world_size: int, group: int) -> int:
    """Return the elements of a shard: full tiles, also divided by the replicas, as layouts of buffers make them."""
    return round_up(SHARD, TILE * (world_size // group))


def terms_of(world_size: int, dtype: torch.dtype, scale: float, numel: int) -> list[Tensor]:
    """Return what every rank has, with blocks of very different size, and zeros."""
    made = []
    for rank in range(world_size):
        values = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
        values *= scale * torch.logspace(-4, 0, numel // 64).repeat_interleave(64)
        values[:512] = 0.0
        made.append(values.to(dtype))
    return made


def added(parts: list[tuple[Tensor, bool]], form: Any) -> Tensor:
    """Return the sum in order of terms, which are rounded unless they are the adder's own: ``(values, is own)``."""
    total = torch.zeros_like(parts[0][0], dtype=torch.float32)
    for i, (values, own) in enumerate(parts):
        term = values.float() if own else rounded(values.float(), form)
        total = term if i == 0 else total + term
    return total


def by_hand(terms: list[Tensor], form: Any, *, node: int, group: int) -> list[Tensor]:
    """Return every rank's shard of the average: `group` ranks shard a replica, over nodes of `node` ranks."""
    world_size, shard = len(terms), len(terms[0]) // group
    result = []
    sums = []
    for rank in range(world_size):
        first = rank // group * group
        owner = rank - first
        mine = slice(owner * shard, (owner + 1) * shard)
        members = range(first, first + group)
        if group > node > 1:
            by_node = [[r for r in members if r // node == n] for n in sorted({r // node for r in members})]
            halves = []
            for ranks in by_node:
                adder = ranks[rank % node]
                halves.append((added([(terms[r][mine], r == adder) for r in ranks], form), adder == rank))
            sums.append(added(halves, form))
        else:
            sums.append(added([(terms[r][mine], r == rank) for r in members], form))
    for rank in range(world_size):
        replicas = range(rank % group, world_size, group)
        if len(replicas) == 1:
            result.append(sums[rank] * (1.0 / world_size))
            continue
        part = shard // len(replicas)
        totals = []
        for i, adder in enumerate(replicas):
            here = slice(i * part, (i + 1) * part)
            totals.append(rounded(added([(sums[r][here], r == adder) for r in replicas], form), form))
        result.append(torch.cat(totals) * (1.0 / world_size))
    return result


def reduce_all(rank: int, world_size: int, layouts: list[Layout]) -> list[tuple[Tensor, Tensor, Any]]:
    world = make_comm()
    found = []
    for node, group in layouts:
        world.locate(node)
        shape = MeshShape.of(world_size, shard=group, node_size=node)
        comm = make_mesh(shape, world).shards
        for form, (dtype, scale) in itertools.product(FORMS, KINDS):
            shard = shard_of(world_size, group)
            full = terms_of(world_size, dtype, scale, shard * group)[rank]
            before, meter = full.clone(), Rounding()
            out = torch.empty(shard)
            first = reduce_quantized(comm, full, FORMATS[form], of="test", sizes=None, meter=meter)
            first.advance()
            second = reduce_quantized(comm, full, FORMATS[form], of="test", sizes=None, meter=Rounding())
            first.finish(out, accumulate=False)
            twice = out.clone()
            second.finish(twice, accumulate=True)
            assert torch.equal(full, before)
            found.append((out, twice, meter.take(out.device)))
    return found


Layout = tuple[int | None, int]
"""Ranks per node, and ranks that shard a replica."""

LAYOUTS: list[Layout] = [(None, 4), (2, 4), (2, 2), (2, 1)]


def compare(world_size: int, layouts: list[Layout]) -> None:
    ranks = spawn(reduce_all, world_size, layouts, timeout_s=120)
    cases = list(itertools.product(layouts, FORMS, KINDS))
    for i, ((node, group), form, (dtype, scale)) in enumerate(cases):
        terms = terms_of(world_size, dtype, scale, shard_of(world_size, group) * group)
        nodes = node if node is not None and world_size % node == 0 else 0
        expected = by_hand(terms, form, node=nodes, group=group)
        exact = torch.stack([t.double() for t in terms]).sum(0)
        changed = torch.zeros(2, dtype=torch.float64)
        for rank in range(world_size):
            out, twice, sums = ranks[rank][i]
            assert torch.equal(out, expected[rank]), (node, group, form, dtype)
            assert torch.equal(twice, out + out)
            changed += sums
        error = float((changed[0] / changed[1]).sqrt())
        full = torch.cat([ranks[r][i][0] for r in range(group)]).double() * world_size
        actual = float((full - exact).norm() / exact.norm())
        assert 0.5 < error / actual < 2.0, (node, group, form, dtype)
        assert error < (0.02 if form == "int8" else 0.3)


def test_the_bits_are_those_of_terms_rounded_by_hand() -> None:
    compare(4, LAYOUTS)


@pytest.mark.slow
def test_the_bits_in_other_layouts() -> None:
    compare(2, [(None, 2), (1, 2), (None, 1)])
    compare(4, [(1, 4), (None, 2), (4, 2)])
    compare(6, [(2, 6), (3, 6), (3, 3), (2, 2), (4, 6)])


@on_ranks(4, init_process_group=True)
def test_what_is_not_finite_stays_visible_where_it_is(rank: int, world_size: int) -> None:
    """In its block of 64 elements, and nowhere else."""
    world = make_comm()
    found = []
    for node, group in LAYOUTS[:3]:
        world.locate(node)
        comm = make_mesh(MeshShape.of(world_size, shard=group, node_size=node), world).shards
        for form, value, dtype in itertools.product(FORMS, ("nan", "inf", "-inf"), (torch.float32, torch.float16)):
            full = torch.ones(SHARD * group, dtype=dtype)
            if rank == 3:
                full[700::1024] = float(value)  # in every shard
            out, meter = torch.empty(SHARD), Rounding()
            reduce_quantized(comm, full, FORMATS[form], of="test", sizes=None, meter=meter).finish(
                out, accumulate=False
            )
            found.append((out, meter.take(out.device)))
    for out, sums in found:
        blocks = out.view(-1, 64)
        bad = ~blocks.isfinite().all(1)
        assert bad.nonzero().flatten().tolist() == [10, 26]
        assert torch.allclose(blocks[~bad], torch.ones(()), atol=1e-2)
        assert sums.isfinite().all()
