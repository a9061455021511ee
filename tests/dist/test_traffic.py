"""Elements on the wire equal the formulas of ZeRO, section 7, to the last element.

Counted where they leave: `torch.distributed.batch_isend_irecv` is wrapped, and everything the ranks exchange on gloo
goes through it. The strategy's own meter and the plan are held against that count.
"""

from __future__ import annotations

import functools
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist.ranks import on_ranks
from tests.models import VOCABULARY, Case, Net, loader, quiet, trainer_of

STEPS = 6
CASES = [
    Case(stage=stage, accumulate=accumulate, traits=traits, steps=STEPS, precision=precision)
    for stage in (0, 1, 2, 3)
    for accumulate in (1, 3)
    for traits, precision in (((), "32-true"), (("uneven", "frozen"), "bf16-true"))
]
WORLDS = (2, 3)
FEW = (3, 4, 11, 14)
"""Of the cases, those of the default run: every stage, with what is twice there by turns."""

PARAMETERS = [
    pytest.param(world_size, indices, index, id=f"{world_size}-{name}-{CASES[index].stage}-{CASES[index]}", marks=mark)
    for world_size, name, indices, mark in (
        (2, "few", FEW, ()),
        *((world_size, "all", tuple(range(len(CASES))), pytest.mark.wide) for world_size in WORLDS),
    )
    for index in indices
]


class Meter(pl.Callback):
    """Elements sent so far, after each optimizer step: by our own count, and by the strategy's."""

    def __init__(self) -> None:
        self.sent = 0
        self.counted: list[int] = []
        self.reported: list[int] = []

    def wrap(self, exchange: Any) -> Any:
        def counting(operations: list[dist.P2POp]) -> Any:
            self.sent += sum(o.tensor.numel() for o in operations if o.op is dist.isend)
            return exchange(operations)

        return counting

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if len(module.result.losses) % module.case.accumulate == 0:
            elements = trainer.strategy.traffic.elements
            self.counted.append(self.sent)
            self.reported.append(elements["all_gather"] + elements["reduce_scatter"])


def count(rank: int, world_size: int, cases: list[Case]) -> list[tuple[list[int], list[int], int]]:
    """For every case: counted and reported elements after each step, and what the plan foretells for one."""
    quiet()
    exchange = dist.batch_isend_irecv
    result = []
    for case in cases:
        meter = Meter()
        dist.batch_isend_irecv = meter.wrap(exchange)
        trainer = trainer_of(case, world_size, callbacks=[meter])
        trainer.fit(Net(case), loader(case, world_size))
        planned = trainer.strategy.require_engine().plan.elements_sent(case.accumulate)
        result.append((meter.counted, meter.reported, planned))
    dist.batch_isend_irecv = exchange
    return result


@functools.cache
def counts(world_size: int, indices: tuple[int, ...]) -> list[dict[int, tuple[list[int], list[int], int]]]:
    """For every rank: ``index of the case -> what `count` has found``."""
    ranks = spawn(count, world_size, [CASES[i] for i in indices], init_process_group=False, timeout_s=120)
    return [dict(zip(indices, found, strict=True)) for found in ranks]


def up(numel: int, align: int) -> int:
    return -(-numel // align) * align


def padded(sizes: list[int], world_size: int) -> int:
    """Elements of one flat buffer: slots and shards start at multiples of 16."""
    return world_size * up(-(-sum(up(n, 16) for n in sizes) // world_size), 16)


def expected(case: Case, world_size: int) -> tuple[int, int]:
    """Elements one rank sends per optimizer step by the paper's formulas, and P, the padded size that they are of.

    Units of the model: the embedding and the head (root units), and three equal blocks.
    """
    width = 7 if "uneven" in case.traits else case.width
    hidden = 3 * width + 1
    block = padded([width, width, hidden * width, hidden, width * hidden, width], world_size)
    scalar = [1] if "uneven" in case.traits else []
    # The module's own parameters come first: the scalar stands before the embedding.
    begin, bias = padded([*scalar, VOCABULARY * width], world_size), padded([VOCABULARY], world_size)
    frozen = (
        "frozen" in case.traits
    )  # the bias of the head then has a buffer of its own, although it is in the optimizer
    head = padded([VOCABULARY * width, *([] if frozen else [VOCABULARY])], world_size)
    root = begin + head + (bias if frozen else 0)
    trained = begin + head + (case.blocks - frozen) * block
    others = world_size - 1
    p = root + case.blocks * block
    if case.stage in (0, 1):
        volume = 2 * trained
    elif case.stage == 2:
        volume = trained * (1 + case.accumulate)
    else:
        # Root units are gathered once per step; every block for forward and for backward of each micro-batch, but for
        # the last one, whose backward comes next.
        gathers = 2 * case.blocks - 1
        volume = root + case.accumulate * (gathers * block + trained)
    return volume * others // world_size, p


@pytest.mark.parametrize(("world_size", "indices", "index"), PARAMETERS)
def test_sent_elements_equal_the_formula(world_size: int, indices: tuple[int, ...], index: int) -> None:
    """The sixth step, on every rank. Formulas: stages 0 and 1 ``2P``, 2 ``P(1 + acc)``, 3 at most ``3P acc``, of which
    each rank sends ``(N - 1) / N``."""
    case = CASES[index]
    formula, p = expected(case, world_size)
    for rank in counts(world_size, indices):
        counted, reported, planned = rank[index]
        assert len(counted) == STEPS
        assert counted[5] - counted[4] == formula
        assert counted == reported
        assert planned == formula
        if case.stage == 3:
            assert formula <= 3 * p * case.accumulate * (world_size - 1) // world_size


@pytest.mark.parametrize(("world_size", "indices", "index"), PARAMETERS)
def test_every_step_after_the_first_sends_the_same(world_size: int, indices: tuple[int, ...], index: int) -> None:
    for rank in counts(world_size, indices):
        steps = torch.tensor(rank[index][0]).diff().tolist()
        assert len(set(steps[1:])) == 1


class Collectives(TorchDispatchMode):
    """Bytes that this rank sends in collectives of torch's own, of 2 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = {"all_gather": 0, "reduce_scatter": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if "allgather" in name or "reduce_scatter" in name:
            out, given = args[:2]
            kind, full = ("all_gather", out) if "allgather" in name else ("reduce_scatter", given)
            self.sent[kind] += full.nbytes // 2
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))  # type: ignore[no-any-return]


class Layers(pl.LightningModule):
    """Four blocks and no other parameters, of sizes that nobody pads."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.sent: list[dict[str, int]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.blocks(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        strategy.require_engine().comm.traffic.reset()

    def on_train_batch_end(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        strategy: Any = self.trainer.strategy
        self.sent.append({kind: strategy.require_engine().comm.traffic.bytes[kind] for kind in Collectives().sent})


@on_ranks(2)
def test_stage_3_with_autocast_sends_the_bytes_of_fsdp2(rank: int, world_size: int) -> None:
    """Whose policy is what Lightning's FSDPStrategy makes of ``bf16-mixed``; the last block stays, as is advised."""
    quiet()
    x, module = torch.randn(3, 16, 64), Layers()
    units, sums = {"min_unit_numel": 0}, {"reduce_dtype": "compute"}  # the default sums in fp32, as DDP does
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=ZeROStrategy(3, sharding=units, precision=sums), precision="bf16-mixed",
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(x.flatten(0, 1)), batch_size=8))
    model, policy = Layers().blocks, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model:
        fully_shard(block, mp_policy=policy, reshard_after_forward=block is not model[-1])
    fully_shard(model, mp_policy=policy)
    sent: dict[str, int] = {}
    for batch in x:
        with Collectives() as counted:
            model(batch).square().mean().backward()
        sent = counted.sent
    assert module.sent[-1] == sent
    assert min(sent.values()) > 0
