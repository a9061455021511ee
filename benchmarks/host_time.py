"""Host time per unit and pass of this engine, DDP and FSDP2, above a plain loop: what a GPU has to wait for.

``python -m benchmarks.host_time --units 100 300 --record benchmarks/records/host_time.json``

The model is many blocks of two `Linear` layers, each so small that its arithmetic takes almost no time. So what remains
is what Python, hooks, bookkeeping and launches cost the training thread. All contenders train in fp32 with torch's
fused AdamW, in the same process, in turns (`benchmarks.contest`). Each step has three parts:

``forward``   with what prepares the step and ends the forward
``backward``  with what sends gradients and waits for them
``update``    ``zero_grad``, the optimizer's step, and what publishes the new weights

A part's time minus that of the plain loop in the same round, divided by the number of blocks, is the time per unit.

There are three worlds:

``alone``   one rank, as on one GPU. This engine has nothing to shard, and runs every stage as stage 0
``unsent``  one of two ranks. torch's back end *fake* takes every collective, and returns without sending. The engine
            takes its branches for NCCL. So this is the host time of two ranks without that of their collectives; a
            launch of NCCL would be added to each of them, for all contenders
``gloo``    two ranks on the same cores. This includes gloo's work and the waits for the other rank
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import record
from benchmarks.contest import ratios, spread, turns
from benchmarks.step_time import Setting, adamw, engine_of, sharded_by_fsdp2

MINUTES = 5
SPREAD = "quartiles over rounds"
SEEDS = "0 for weights, the rank for data"
QUICK = ("--units", "4", "--rounds", "2")

WIDTH = 16
BATCH = 2
UNCOUNTED = 3  # rounds in which contenders allocate, learn the order of units, and build kernels
WORLDS = {"alone": 1, "unsent": 1, "gloo": 2}

PARTS = ("forward", "backward", "update")


class Block(nn.Module):
    """Two layers with next to no arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(B, WIDTH) to (B, WIDTH)."""
        return x + self.second(torch.relu(self.first(x)))


class Blocks(nn.Module):
    """``count`` blocks, and a head."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, WIDTH) to a scalar."""
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


@dataclass(frozen=True)
class Loop:
    """One step of a contender, in parts."""

    forward: Callable[[Tensor], Tensor]
    zero_grad: Callable[[], object]
    backward: Callable[[Tensor], object]
    step: Callable[[], object]

    def run(self, x: Tensor) -> tuple[float, float, float]:
        """Train on ``x``; return the seconds of `PARTS`."""
        begin = time.perf_counter()
        loss = self.forward(x)
        forwarded = time.perf_counter()
        self.zero_grad()
        zeroed = time.perf_counter()
        self.backward(loss)
        done = time.perf_counter()
        self.step()
        end = time.perf_counter()
        return forwarded - begin, done - zeroed, zeroed - forwarded + end - done


def _loop(model: nn.Module) -> Loop:
    optimizer = adamw(model.parameters())
    return Loop(model, optimizer.zero_grad, Tensor.backward, optimizer.step)


def _ddp(model: nn.Module) -> Loop:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if dist.get_backend() == "fake":  # whose all-reduce has no result for DDP to read
        wrapped.register_comm_hook(None, lambda _, bucket: _done(bucket.buffer()))
    return _loop(wrapped)


def _done(value: Tensor) -> torch.futures.Future[Tensor]:
    result: torch.futures.Future[Tensor] = torch.futures.Future()
    result.set_result(value)
    return result


def _ours(stage: int) -> Callable[[nn.Module], Loop]:
    def build(model: nn.Module) -> Loop:
        from ls_strategy.config import ShardingConfig, ZeROConfig

        every_block = ShardingConfig(min_unit_numel=0)  # else blocks this small join the root unit
        config = ZeROConfig(stage=stage, sharding=every_block)  # type: ignore[arg-type]
        optimizer = adamw(model.parameters())
        engine = engine_of(model, optimizer, config, Setting("", 0, 0, 0), _comm())
        assert len(engine.units) == len(model.blocks) + 1  # type: ignore[arg-type]

        def forward(x: Tensor) -> Tensor:
            engine.begin_step()
            loss = model(x)
            engine.end_forward()
            return loss

        def backward(loss: Tensor) -> None:
            engine.begin_backward(eager=True)
            loss.backward()
            engine.end_backward()

        return Loop(forward, lambda: engine.zero_grad(0), backward, lambda: engine.step(0, optimizer.step))

    return build


def _comm() -> Any:
    """The ranks of the engine; of a world that sends nothing, with the branches for NCCL."""
    if dist.get_backend() != "fake":
        return None
    from ls_strategy.distributed.comm import Comm

    comm = Comm(dist.group.WORLD, dist.group.WORLD)
    comm.native = True
    return comm


CONTENDERS: dict[str, Callable[[nn.Module], Loop]] = {
    "plain": _loop,
    "ddp": _ddp,
    "fsdp2": lambda model: _loop(sharded_by_fsdp2(model, Setting("", 0, 0, 0))),
    **{f"zero{stage}": _ours(stage) for stage in range(4)},
}


def join_unsent() -> None:
    """Be rank 0 of two, in a world whose collectives return at once and send nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it makes the back end known

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)


def run_rank(
    rank: int, _processes: int, units: int, rounds: int, steps: int, *, unsent: bool, names: Sequence[str]
) -> dict[str, list[list[float]]]:
    """Measure in one process; returns one list of rounds per contender, with the seconds of `PARTS` per step."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # a gather that sends nothing leaves what was in memory
    if unsent:
        join_unsent()
    loops = {name: CONTENDERS[name](Blocks(units)) for name in names}
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(rank))
    times: dict[str, list[list[float]]] = {name: [] for name in names}
    gc.collect()
    gc.freeze()  # one contender's collections must not walk over all the others' objects
    for counts, name in turns(names, rounds, uncounted=UNCOUNTED):
        dist.barrier()
        parts = [loops[name].run(x) for _ in range(steps)]
        if counts:
            times[name].append([sum(each) / steps for each in zip(*parts, strict=True)])
    return times


def judged(times: dict[str, list[list[float]]], units: int) -> dict[str, Any]:
    """Per contender: us per unit above the plain loop, by part and together, and over FSDP2's in the same round."""

    def above(name: str, part: int | None) -> list[float]:
        seconds = ([sum(r) if part is None else r[part] for r in times[n]] for n in (name, "plain"))
        return [1e6 * (mine - plain) / units for mine, plain in zip(*seconds, strict=True)]

    rows: dict[str, Any] = {}
    for name in times:
        rows[name] = row = {}
        for i, part in [*enumerate(PARTS), (None, "step")]:
            row[part] = {"us": spread(above(name, i), 2)}
            if name != "plain" and "fsdp2" in times:
                row[part]["over_fsdp2"] = spread(ratios(above(name, i), above("fsdp2", i)))
    rows["plain"] = {
        part: {"us": spread([1e6 * r[i] / units for r in times["plain"]], 2)} for i, part in enumerate(PARTS)
    }
    return rows


def measure(world: str, units: int, rounds: int, steps: int, names: Sequence[str]) -> dict[str, Any]:
    """A world's part of the record."""
    from ls_strategy.testing import spawn

    unsent = world == "unsent"
    times = spawn(
        partial(run_rank, unsent=unsent, names=names), WORLDS[world], units, rounds, steps,
        timeout_s=1800, env={"OMP_NUM_THREADS": "1"}, init_process_group=not unsent,
    )[0]  # fmt: skip
    return judged(times, units)


def show(world: str, units: int, rows: dict[str, Any]) -> None:
    print(f"\n{world}, {units} units: us per unit above the plain loop [quartiles], and over FSDP2's")
    for name, row in rows.items():
        cells = []
        for part, cell in row.items():
            us, over = cell["us"], cell.get("over_fsdp2")
            times = f" x{over['median']:.2f}" if over else ""
            cells.append(f"{part} {us['median']:7.1f} [{us['q1']:.1f}, {us['q3']:.1f}]{times}")
        print(f"{name:8}" + "   ".join(f"{cell:34}" for cell in cells))


def main() -> None:
    parser = record.parser(__doc__, rounds=20, rounds_help="counted turns of each contender")
    parser.add_argument("--units", type=int, nargs="+", default=[100, 300], help="blocks; default: %(default)s")
    parser.add_argument("--steps", type=int, default=2, help="per turn; default: %(default)s")
    parser.add_argument("--worlds", nargs="+", choices=list(WORLDS), default=list(WORLDS), help="default: all")
    parser.add_argument("--peers", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS), help="default: all")
    args = parser.parse_args()
    names = list(dict.fromkeys(["plain", *args.peers]))
    found: dict[str, Any] = {
        **record.header("host_time"), "precision": "fp32", "width": WIDTH, "batch": BATCH, "results": {},
    }  # fmt: skip
    for world in args.worlds:
        found["results"][world] = {}
        for units in args.units:
            rows = measure(world, units, args.rounds, args.steps, names)
            found["results"][world][str(units)] = rows
            show(world, units, rows)
    record.write(args.record, found)


if __name__ == "__main__":
    main()
