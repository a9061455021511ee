"""Inputs of recomputed modules, kept in parts over an axis: the same bits, and fewer bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ls_strategy.activations.apply import MIN_PARTITIONED_BYTES, Activations
from ls_strategy.activations.partition import ActivationPartition
from ls_strategy.activations.storage import NVMeFolder
from ls_strategy.config import ActivationOffloadConfig, RecomputeConfig
from ls_strategy.distributed.axis import Axis
from ls_strategy.distributed.comm import make_comm
from ls_strategy.errors import PlanError
from ls_strategy.testing import spawn
from tests.dist.ranks import on_ranks

pytestmark = pytest.mark.dist

CPU = torch.device("cpu")
WIDTH = 96
SHAPE = (7, 31, WIDTH)  # odd, so that parts are padded
BYTES = 7 * 31 * WIDTH * 4
BLOCKS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        return x + self.wide(self.norm(x)).masked_fill(mask, 0.0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(SHAPE, dtype=torch.bool)  # large enough, but no activation
        mask[:, 3] = True
        for i, block in enumerate(self.blocks):
            # A transposed input has another layout, not another value.
            x = block(x.transpose(0, 1).contiguous().transpose(0, 1) if i == 1 else x, mask=mask)
        return functional.mse_loss(x, torch.ones_like(x))


def train(activations: Activations | None, model: nn.Module, steps: int = 3) -> list[Tensor]:
    results = []
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(SHAPE, requires_grad=True)
        loss = model(x)
        loss.backward()
        assert x.grad is not None
        results += [loss.detach(), x.grad]
    return [*results, *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def parts(rank: int, size: int, folder: str) -> None:
    axis = Axis("tensor", make_comm())
    expected = train(None, Net())
    part = -(-(BYTES // 4) // size) * 4
    offloads = {
        "": None,
        "cpu": ActivationOffloadConfig(tier="cpu", min_bytes=MIN_PARTITIONED_BYTES, in_flight_bytes=part),
        "nvme": ActivationOffloadConfig(tier="nvme", min_bytes=MIN_PARTITIONED_BYTES, in_flight_bytes=0),
    }
    for name, offload in offloads.items():
        for recompute in (RecomputeConfig(policy="full"), RecomputeConfig(policy="selective")):
            model = Net()
            activations = Activations(
                model,
                CPU,
                recompute=recompute,
                offload=offload,
                partition=axis,
                drive=NVMeFolder(folder, allow_ram=True),
            )
            sent = axis.traffic.elements["all_gather"]
            assert_same(train(activations, model), expected)
            numbers = activations.metrics()
            assert numbers["partitioned_bytes"] == numbers["packed_bytes"] == 3 * BLOCKS * BYTES
            assert numbers["part_bytes"] == 3 * BLOCKS * part
            # Each input is gathered once per step; three numbers of each are compared in the first step.
            gathered = axis.traffic.elements["all_gather"] - sent
            assert gathered == (size - 1) * (3 * BLOCKS * (part // 4) + 3 * BLOCKS)
            assert activations.saved is not None
            assert activations.saved.regions == 0
            if name:
                assert numbers["stored_bytes"] == numbers["part_buffer_bytes"] == 0
                assert numbers["stored_peak_bytes"] == part * (BLOCKS - (name == "cpu"))
                assert numbers["in_flight_peak_bytes"] == part
            activations.remove()


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [2, 4])
def test_no_bit_changes_and_each_rank_keeps_its_share(size: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    spawn(parts, size, str(tmp_path_factory.mktemp("nvme")), timeout_s=100)


@on_ranks(2, init_process_group=True)
def test_parts_lie_in_one_buffer(rank: int, world_size: int) -> None:
    axis = Axis("tensor", make_comm())
    partition = ActivationPartition(axis, CPU)
    x = torch.arange(1001, dtype=torch.float32)
    y = torch.arange(501, dtype=torch.bfloat16)
    places = []
    for _ in range(3):
        kept = [partition.keep(t) for t in (x, y, x + 1)]
        places.append([k.shard.data_ptr() for k in kept if k.shard is not None])
        for k, t in zip(reversed(kept), (x + 1, y, x), strict=True):
            assert torch.equal(partition.load(k), t)
            partition.drop(k)
    assert places[1] == places[2]
    assert partition.buffer.nbytes == 2048 + 512 + 2048  # 501 fp32, 251 bf16, at multiples of 512 bytes
    begin = places[1][0]
    assert [p - begin for p in places[1]] == [0, 2048, 2560]
    # More than the step before: outside of the buffer, which then grows.
    kept = [partition.keep(x) for _ in range(4)]
    assert all(torch.equal(partition.load(k), x) for k in kept)
    for k in kept:
        partition.drop(k)
    assert partition.buffer.nbytes == 4 * 2048
    # The same region twice in a row is gathered once.
    part, before = partition.keep(x), axis.traffic.elements["all_gather"]
    first, second = partition.load(part), partition.load(part)
    assert first is second
    assert axis.traffic.elements["all_gather"] - before == 501
    partition.drop(part)


class Shifted(Net):
    """Its blocks see another input on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.roll(self.rank, 0))


@on_ranks(2, init_process_group=True)
def test_inputs_that_are_not_replicated_are_refused_on_all_ranks(rank: int, world_size: int) -> None:
    model = Shifted(rank)
    activations = Activations(
        model, CPU, recompute=RecomputeConfig(policy="full"), partition=Axis("tensor", make_comm())
    )
    with pytest.raises(PlanError, match=r"differs between the 2 ranks of axis 'tensor'"):
        train(activations, model, steps=1)


def test_one_rank_keeps_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")  # torch sets it when it first looks
    model = Net()
    activations = Activations(model, CPU, recompute=RecomputeConfig(policy="full"), partition=Axis("tensor"))
    assert activations.partition is None
    assert_same(train(activations, model), train(None, Net()))
