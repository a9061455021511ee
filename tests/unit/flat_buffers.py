"""A small sharded model in one process, built of the parts of `ls_strategy.zero` and without an engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ls_strategy.config import ZeroStage
from ls_strategy.distributed.comm import Comm
from ls_strategy.layout import FlatLayout
from ls_strategy.plan import FROZEN, FlatPlan
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.units import Unit
from ls_strategy.zero.passes.gather import Gatherer
from ls_strategy.zero.passes.hooks import UnitHooks
from ls_strategy.zero.passes.reduce import Reducer
from ls_strategy.zero.user_code.on_demand import OnDemandGather
from ls_strategy.zero_stages import POLICIES

WIDTH = 3


class Net(nn.Module):
    """A root layer, and blocks."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


@dataclass
class Sharded:
    """A model and what moves its states."""

    net: Net
    comm: Comm
    units: list[Unit]
    on_demand: OnDemandGather
    gatherer: Gatherer
    reducer: Reducer
    hooks: UnitHooks | None = None

    @property
    def flats(self) -> list[FlatBuffer]:
        """All flat buffers, the root unit's first."""
        return [flat for unit in self.units for flat in unit.flats]

    def attach(self) -> None:
        """Let modules gather and release their units, and autograd pass gradients to the reducer."""
        self.hooks = UnitHooks(self.units, self.gatherer, self.reducer, sharded=self.gatherer.sharded)


def flat_of(
    module: nn.Module, name: str, stage: ZeroStage, *, dtype: torch.dtype = torch.float32, frozen: bool = False
) -> FlatBuffer:
    """Move the parameters of one module into a flat buffer, with master weights in fp32, or fp64 for fp64."""
    comm = Comm(None, None)
    members = dict(module.named_parameters())
    values = [p.detach().clone() for p in members.values()]
    for p in members.values():
        p.data = p.data.to(dtype)
    layout = FlatLayout.pack([(f"{name}.{key}", tuple(p.shape)) for key, p in members.items()], 1)
    plan = FlatPlan(layout, dtype, torch.promote_types(dtype, torch.float32), FROZEN if frozen else 0)
    flat = FlatBuffer(plan, list(members.values()), policy=POLICIES[stage], comm=comm)
    flat.load(values, torch.device("cpu"))
    return flat


def sharded(
    stage: ZeroStage, *, blocks: int = 3, dtype: torch.dtype = torch.float32, prefetch_units: int = 1
) -> Sharded:
    """Build the model: one root unit, and one unit per block."""
    torch.manual_seed(0)
    net = Net(blocks)
    modules = {"first": net.first, **{f"blocks.{i}": block for i, block in enumerate(net.blocks)}}
    units = [
        Unit(name, [module], [flat_of(module, name, stage, dtype=dtype)], is_root=name == "first")
        for name, module in modules.items()
    ]
    flats = [flat for unit in units for flat in unit.flats]
    comm, is_sharded = flats[0].comm, POLICIES[stage].parameters
    return Sharded(
        net,
        comm,
        units,
        OnDemandGather(flats, sharded=is_sharded),
        Gatherer(units, sharded=is_sharded, prefetch_units=prefetch_units),
        Reducer(units, policy=POLICIES[stage], comm=comm, reduce_in_fp32=True),
    )
