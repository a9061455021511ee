"""What the planner predicts for GPUs, where the transport itself sums, measured on CPU ranks.

gloo has the two collectives that NCCL is asked for, so the engine's NCCL path runs here: gradients are sent as copies
in fp32, and how many of these copies are in flight is bounded. The bound is lowered, as the model is small.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from ls_strategy._torch import without_dispatch_modes
from ls_strategy.config import ShardingConfig, TierConfig, ZeROConfig
from ls_strategy.distributed import comm
from ls_strategy.distributed.comm import Comm
from ls_strategy.extras.planner.candidates import Candidate
from ls_strategy.extras.planner.forecast import Forecaster, Run
from ls_strategy.extras.planner.replay import Peak, replay
from ls_strategy.extras.planner.simulated import simulated
from ls_strategy.extras.planner.step import first_batch, training_step
from ls_strategy.extras.planner.traffic import traffic
from ls_strategy.precision import resolve_precision
from ls_strategy.testing import spawn
from ls_strategy.zero.passes import reduce
from tests.dist.test_planner import Begin
from tests.live_bytes import LiveBytes
from tests.models import Case, PrivateNet, loader, quiet, trainer_of

pytestmark = pytest.mark.wide

IN_FLIGHT_BYTES = 1 << 16
CPU = TierConfig(tier="cpu")
RUNS: tuple[tuple[Candidate, str, int], ...] = (
    (Candidate(0), "bf16-true", 1),
    (Candidate(1), "32-true", 1),
    (Candidate(1), "bf16-true", 1),
    (Candidate(1), "bf16-true", 2),
    (Candidate(2), "bf16-true", 1),
    (Candidate(2), "bf16-mixed", 2),
    (Candidate(3), "bf16-true", 1),
    (Candidate(2, CPU), "bf16-true", 1),
    (Candidate(3, CPU, CPU), "bf16-true", 1),
)
IDS = [f"{c.name}-{p}-acc{a}" for c, p, a in RUNS]


def case_of(candidate: Candidate, precision: str, accumulate: int) -> Case:
    return Case(
        stage=candidate.stage, precision=precision, accumulate=accumulate, width=96, blocks=8, steps=2, fused=None,
        options=tuple((k, v) for k, v in candidate.arguments().items() if k != "stage"),
    )  # fmt: skip


class Uncounted:
    """A collective of gloo, which sums in a copy of its own: that is not the engine's, and NCCL does not need it."""

    def __init__(self, start: Any, *args: Any, **kwargs: Any) -> None:
        with without_dispatch_modes():
            self.work = start(*args, **kwargs)

    def wait(self) -> None:
        with without_dispatch_modes():
            self.work.wait()


def measure(rank: int, world_size: int) -> list[tuple[int, int]]:
    """For every run: the peak and the bytes sent in the last step."""
    quiet()
    plain: Any = Comm.__init__

    def native(self: Comm, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        self.native = self.group is not None

    Comm.__init__ = native  # type: ignore[method-assign]
    comm.reduce_scatter_single = functools.partial(Uncounted, comm.reduce_scatter_single)
    reduce.IN_FLIGHT_BYTES = IN_FLIGHT_BYTES
    result = []
    for chosen in RUNS:
        case = case_of(*chosen)
        data: Any = loader(case, world_size)
        with LiveBytes(ignore=list(data.dataset.tensors)) as live:
            begin = Begin(live)
            trainer = trainer_of(case, world_size, callbacks=[begin])
            trainer.fit(PrivateNet(case), data)
        result.append((live.peak, begin.sent[-1] - begin.sent[-1 - case.accumulate]))
    return result


@functools.cache
def measured() -> list[list[tuple[int, int]]]:
    return spawn(measure, 2, init_process_group=False, timeout_s=170)


def predict(index: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Peak, int]:
    monkeypatch.setattr(reduce, "IN_FLIGHT_BYTES", IN_FLIGHT_BYTES)
    candidate, name, accumulate = RUNS[index]
    case = case_of(*RUNS[index])
    module, precision = PrivateNet(case), resolve_precision(name)
    run = Run(config=ZeROConfig(sharding=ShardingConfig(min_unit_numel=0)), micro_batches=accumulate)
    optimizer = module.configure_optimizers()
    with simulated(module, precision, (), torch.device("cpu")) as fakes:
        optimizers = [fakes.optimizer(optimizer)]
        forecaster = Forecaster(
            module, optimizers, fakes=fakes, precision=precision, step=training_step(module, optimizers),
            batch=first_batch(loader(case, 2)), run=run,
        )  # fmt: skip
        config = candidate.config(run.config)
        plan = forecaster.plan(config, 2)
        # The transport of GPUs, with one memory for host and device, as these ranks have.
        setting = replace(forecaster.setting(config, candidate, "cuda"), cuda=False)
        peak = replay(forecaster.trace(), plan, setting, trained=forecaster._trained, names=forecaster._names)
    sent = traffic(plan, setting.optimizer_bytes, micro_batches=accumulate, native_fp32=precision.reduce_in_fp32).sent
    return peak, sent


@pytest.mark.dist
@pytest.mark.parametrize("index", range(len(RUNS)), ids=IDS)
def test_peak_and_traffic_of_a_transport_that_sums(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    peak, sent = predict(index, monkeypatch)
    for rank in measured():
        assert sent == rank[index][1]
        assert peak.device + peak.cpu == pytest.approx(rank[index][0], rel=1e-3)
