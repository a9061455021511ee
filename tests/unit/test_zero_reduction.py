"""What every kind of reduction holds, and that a new one is an entry of a table."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ls_strategy import ZeROStrategy
from ls_strategy.distributed.comm import PendingReduce, make_comm
from ls_strategy.distributed.quantized_reduce import Rounding
from ls_strategy.distributed.rounds import Split
from ls_strategy.distributed.tree_sum import TreeSum
from ls_strategy.distributed.wire_format import FORMATS
from ls_strategy.ops.quantized import TILE
from ls_strategy.testing import spawn
from ls_strategy.zero.passes.reduce import Encoded, InRankOrder, InTree
from tests.models import Case, PrivateNet, bare_trainer, loader, quiet
from tests.unit.test_zero_wire import AllBits, HalfTheBits

RANKS = 2
SHARD = TILE


class InFloat64:
    """A kind of another package: every rank sends everything, and the owner adds in fp64."""

    hops = single = False
    is_last = True

    def start(self, flat: Any, full: Tensor) -> InFloat64:
        made = InFloat64()
        made.comm, made.mine = flat.comm, slice(*flat.layout.shard_range(flat.comm.rank))
        made.terms = [torch.empty_like(full) for _ in range(flat.comm.world_size)]
        made.work = dist.all_gather(made.terms, full, group=flat.comm.group, async_op=True)
        return made

    comm: Any
    mine: slice
    terms: list[Tensor]
    work: Any

    def advance(self) -> bool:
        return False

    def collect(self, dtype: torch.dtype) -> None:
        raise AssertionError("there is one round")

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        self.work.wait()
        average = torch.stack([term[self.mine].double() for term in self.terms]).mean(0).to(out.dtype)
        out.copy_(out + average if accumulate else average)


KINDS: dict[str, tuple[Any, float]] = {
    "in rank order": (InRankOrder(torch.float32), 1e-6),
    "int8": (Encoded(FORMATS["int8"], Rounding()), 2e-2),
    "bf16": (Encoded(HalfTheBits(), Rounding()), 1e-2),
    "bytes": (Encoded(AllBits(), Rounding()), 1e-6),
    "one round of virtual ranks": (InTree(Split((1, 1)).rounds[0]), 1e-6),
    "fp64": (InFloat64(), 1e-6),
}
"""Kind, and how far an average may be off relative to the largest term."""


def buffer_of(comm: Any) -> Any:
    """Return what kinds ask of a flat buffer."""
    tree = TreeSum()
    shards = SimpleNamespace(sizes=None, shard_range=lambda rank: (rank * SHARD, (rank + 1) * SHARD))
    averages = SimpleNamespace(tree_sum=lambda: tree)
    full = torch.empty(SHARD * comm.world_size)
    return SimpleNamespace(comm=comm, name="w", layout=shards, reduces_alone=True, full=full, averages=averages)


def term_of(rank: int, number: int) -> Tensor:
    return torch.randn(SHARD * RANKS, generator=torch.Generator().manual_seed(10 * rank + number))


def reduce_each(rank: int, world_size: int) -> dict[str, tuple[Tensor, Tensor]]:
    """This rank's shard of two averages that are in flight together, and of the first one added to itself."""
    comm, found = make_comm(), {}
    for name, (kind, _) in KINDS.items():
        first, second, again = (buffer_of(comm) for _ in range(3))
        terms = [term_of(rank, number) for number in range(2)]
        kept = [term.clone() for term in terms]
        early, late = kind.start(first, terms[0]), kind.start(second, terms[1])
        assert early.is_last
        assert early.hops or not early.advance()
        while early.hops and early.advance():
            pass
        one, two = torch.full((SHARD,), float("nan")), torch.full((SHARD,), float("nan"))
        early.finish(one, accumulate=False)
        late.finish(two, accumulate=False)
        twice = one.clone()
        kind.start(again, terms[0]).finish(twice, accumulate=True)
        assert torch.allclose(twice, one + one, rtol=0, atol=1e-5), name
        assert all(map(torch.equal, terms, kept)), name
        found[name] = one, two
    return found


def test_every_kind_averages_this_ranks_shard() -> None:
    ranks = spawn(reduce_each, RANKS)
    for number in range(2):
        average = torch.stack([term_of(rank, number).double() for rank in range(RANKS)]).mean(0)
        for rank, found in enumerate(ranks):
            expected = average[rank * SHARD : (rank + 1) * SHARD]
            for name, (_, bound) in KINDS.items():
                off = (found[name][number] - expected).abs().max().item()
                assert off <= bound * 4, name
                assert (off == 0) <= (bound <= 1e-6), f"{name} rounds"


def collect_each(rank: int, world_size: int) -> Tensor:
    """Three virtual ranks on two ranks: rank 1 computes two of them."""
    comm, split = make_comm(), Split((1, 2))
    buffer, out = buffer_of(comm), torch.full((SHARD,), float("nan"))
    for now in split.rounds:
        kind, leaf = InTree(now), now.leaves[rank]
        assert kind.expect(buffer) == (leaf is None)
        if leaf is None:
            continue
        reducing = kind.start(buffer, term_of(leaf, 0))
        assert reducing.is_last == now.is_last
        if now.is_last:
            reducing.finish(out, accumulate=False)
        else:
            reducing.collect(torch.float32)
    return out


def test_rounds_that_are_not_the_last_are_collected() -> None:
    average = torch.stack([term_of(leaf, 0).double() for leaf in range(3)]).mean(0)
    found = torch.cat(spawn(collect_each, RANKS))
    assert torch.allclose(found.double(), average, rtol=0, atol=1e-6)


def test_a_reduction_of_one_round_has_nothing_to_collect() -> None:
    with pytest.raises(RuntimeError, match="one round"):
        PendingReduce((), (), (), make_comm()).collect(torch.float32)


CASE = Case(stage=2, accumulate=1)


class Replaces(pl.Callback):
    """Puts a kind into the table, and counts what it starts."""

    def __init__(self, kind: Any) -> None:
        self.kind, self.started = kind, 0

    def start(self, flat: Any, full: Tensor) -> Any:
        self.started += 1
        return self.kind.start(flat, full)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.kind is not None:
            strategy: Any = trainer.strategy
            strategy.require_engine().reducer.kinds[None] = self


def train(rank: int, world_size: int) -> list[tuple[dict[str, Tensor], int]]:
    quiet()
    found = []
    for stage in (1, 2):
        for kind in (None, InFloat64()):
            callback, module = Replaces(kind), PrivateNet(CASE)
            strategy = ZeROStrategy(stage, sharding={"min_unit_numel": 0})  # type: ignore[arg-type]
            trainer = bare_trainer(strategy, world_size, max_epochs=1, callbacks=[callback])
            trainer.fit(module, loader(CASE, world_size))
            found.append(({k: v.clone() for k, v in module.state_dict().items()}, callback.started))
    return found


def test_a_kind_of_another_package_trains() -> None:
    plain, ours, plain_2, ours_2 = spawn(train, RANKS, init_process_group=False)[0]
    for (expected, none), (weights, started) in ((plain, ours), (plain_2, ours_2)):
        assert none == 0 < started
        # Two terms have one sum, whatever the order; fp64 rounds it once, as fp32 does.
        assert all(torch.equal(weights[k], v) for k, v in expected.items())
