"""Stage 3 sends for the blocks to come while it computes: in which order collectives and computation begin and end."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ls_strategy.config import nested
from ls_strategy.distributed.comm import Comm, PendingGather
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from tests.dist.ranks import WIDTH, Block, Net, fit, on_ranks

BLOCKS, STEPS = 5, 3


class Noted(Block):
    """Notes when its forward begins and ends, and when its backward begins: where that of the next block ends."""

    def __init__(self, number: int, events: list[tuple[str, int]]) -> None:
        super().__init__()
        self.number, self.events = number, events

    def forward(self, x: Tensor) -> Tensor:
        self.events.append(("forward begins", self.number))
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda _: self.events.append(("backward begins", self.number)))
        self.events.append(("forward ends", self.number))
        return y


class Watched(Net):
    def build(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Noted(i, self.events) for i in range(BLOCKS)])
        self.last = nn.Linear(WIDTH, WIDTH)

    def on_train_batch_start(self, *_: Any) -> None:
        self.events.append(("step", 0))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def events_of_a_step(**options: Any) -> list[tuple[str, int]]:
    """Of the last; gathers of blocks among them, when they begin and when they have been waited for."""
    module = Watched()
    numbers = {f"blocks.{i}.norm.weight": i for i in range(BLOCKS)}
    gather, read = Comm.all_gather, FlatBuffer.start_read

    def reads(flat: FlatBuffer) -> None:
        before = flat.reading
        read(flat)
        if flat.reading is not before and flat.name in numbers:
            module.events.append(("read begins", numbers[flat.name]))

    def noted(comm: Comm, full: Tensor, of: str = "", *more: Any) -> PendingGather:
        pending = gather(comm, full, of, *more)
        if of not in numbers:
            return pending
        wait = pending.wait

        def waits() -> None:
            wait()
            module.events.append(("gather ends", numbers[of]))

        pending.wait = waits  # type: ignore[method-assign]
        module.events.append(("gather begins", numbers[of]))
        return pending

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Comm, "all_gather", noted)
        patch.setattr(FlatBuffer, "start_read", reads)
        fit(ZeROStrategy(3, **nested({"sharding.min_unit_numel": 0, **options})), module, max_steps=STEPS)
        events = list(module.events)
    steps = [i for i, event in enumerate(events) if event[0] == "step"]
    assert len(steps) == STEPS
    return events[steps[-2] : steps[-1]]


@pytest.mark.wide
@pytest.mark.parametrize("depth", [0, 1, 2])
@on_ranks(2)
def test_so_many_blocks_ahead_are_being_gathered_while_one_computes(rank: int, world_size: int, depth: int) -> None:
    """Begun before the block begins to compute in forward, and before it ends in backward; and no more than those."""
    events = events_of_a_step(**{"sharding.prefetch_units": depth})
    at: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for position, event in enumerate(events):
        at[event].append(position)
    last = BLOCKS - 1
    turn = at["backward begins", last][0]
    for k in range(BLOCKS):
        begins = at["gather begins", k]
        assert len(begins) == (1 if k == last else 2), "the last block stays for its backward"
        assert begins[0] < turn
        assert all(b > turn for b in begins[1:])
        for ahead in range(1, BLOCKS - k):
            begun = at["gather begins", k + ahead][0] < at["forward begins", k][0]
            assert begun == (ahead <= depth), f"forward of {k}, gather of {k + ahead}"
        for ahead in range(1, k + 1):
            begun = at["gather begins", k - ahead][-1] < at["backward begins", k - 1][0]
            assert begun == (ahead <= depth), f"backward of {k}, gather of {k - ahead}"
    for k, begins in ((k, at["gather begins", k]) for k in range(BLOCKS)):
        for begin, end in zip(begins, at["gather ends", k], strict=True):
            assert begin < end, "waited for after it was begun"
        assert at["gather ends", k][0] < at["forward begins", k][0], "and before the block computes"
        if depth and k:
            between = events[begins[0] : at["gather ends", k][0]]
            assert ("forward ends", k - 1) in between, "another block computes meanwhile"


@pytest.mark.parametrize("depth", [1, 2])
@on_ranks(2, timeout_s=120, init_process_group=True)
def test_a_drive_is_read_one_block_earlier_than_it_is_gathered(
    rank: int, world_size: int, depth: int, tmp_path: Path
) -> None:
    """So that the gather finds its part in memory, and does not wait for the drive."""
    folder = str(tmp_path)
    events = events_of_a_step(
        **{"sharding.prefetch_units": depth},
        **{"offload.parameters": "nvme"},
        **{"offload.optimizer": "nvme"},
        **{"offload.nvme_path": folder},
        **{"offload.nvme_allow_ram": True},
    )
    turn = events.index(("backward begins", BLOCKS - 1))
    forward, backward = events[:turn], events[turn:]
    for k in range(1, BLOCKS - depth - 1):
        read = forward.index(("read begins", k + depth + 1))
        assert read < forward.index(("forward begins", k)) < forward.index(("gather begins", k + depth + 1))
    for k in range(depth + 2, BLOCKS - 1):
        read = backward.index(("read begins", k - depth - 1))
        assert read < backward.index(("backward begins", k - 1)) < backward.index(("gather begins", k - depth - 1))
