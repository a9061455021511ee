"""What the planner says of groups by node is what four ranks hold and send, two on each of two emulated nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ls_strategy.config import ShardingConfig, ZeROConfig
from ls_strategy.extras.planner.candidates import Candidate
from ls_strategy.extras.planner.forecast import Forecaster, Run
from ls_strategy.extras.planner.hardware import Hardware
from ls_strategy.extras.planner.simulated import simulated
from ls_strategy.extras.planner.step import first_batch, training_step
from ls_strategy.precision import resolve_precision
from ls_strategy.testing import spawn
from tests.dist.test_planner import Begin
from tests.dist.test_shard_groups import on_nodes
from tests.live_bytes import LiveBytes
from tests.models import Case, PrivateNet, loader, quiet, trainer_of

pytestmark = pytest.mark.wide

RUNS: list[tuple[int, str, dict[str, Any]]] = [
    (1, "32-true", {"shard_size": "node"}),
    (2, "bf16-true", {"shard_size": "node"}),
    (3, "bf16-true", {"shard_size": "node"}),
    (3, "bf16-true", {"hpz": "node"}),
    (3, "32-true", {"hpz": "node", "quantized_gathers": "int8"}),
    (1, "bf16-true", {"quantized_gradients": "int4"}),
    (2, "32-true", {"quantized_gradients": "int8"}),
    (3, "32-true", {"hpz": "node", "quantized_gathers": "int8", "quantized_gradients": "int8"}),
    (3, "bf16-true", {"quantized_gradients": "int8", "shard_size": "node"}),
]


def case_of(stage: int, precision: str, sharding: dict[str, Any]) -> Case:
    options = tuple((f"sharding.{name}", value) for name, value in sharding.items())
    return Case(
        stage=stage, precision=precision, traits=("private",), width=96, blocks=4, steps=2, fused=None, options=options
    )


def measure(rank: int, world_size: int) -> list[int]:
    quiet()
    on_nodes(rank, 2)
    found = []
    for run in RUNS:
        case = case_of(*run)
        data: Any = loader(case, world_size)
        with LiveBytes(ignore=list(data.dataset.tensors)) as live:
            trainer: Any = trainer_of(case, 2, num_nodes=2, callbacks=[Begin(live)])
            trainer.fit(PrivateNet(case), data)
        found.append(live.peak)
    return found


def test_the_peak_is_foretold_within_a_hundredth() -> None:
    ranks = spawn(measure, 4, init_process_group=False, timeout_s=120)
    for index, (stage, name, sharding) in enumerate(RUNS):
        case = case_of(stage, name, sharding)
        module, precision = PrivateNet(case), resolve_precision(name)
        by_node: Any = next((option for option in ("shard_size", "hpz") if option in sharding), None)
        rest = {k: v for k, v in sharding.items() if k != by_node}
        run = Run(config=ZeROConfig(sharding=ShardingConfig(min_unit_numel=0, **rest)))
        with simulated(module, precision, (), torch.device("cpu")) as fakes:
            optimizers = [fakes.optimizer(module.configure_optimizers())]
            forecaster = Forecaster(
                module, optimizers, fakes=fakes, precision=precision, step=training_step(module, optimizers),
                batch=first_batch(loader(case, 4)), run=run,
            )  # fmt: skip
            candidate: Any = Candidate(stage, by_node=by_node)  # type: ignore[arg-type]
            forecast = forecaster.forecast(candidate, Hardware(ranks=4, ranks_per_node=2, device="cpu"))
        for peaks in ranks:
            assert forecast.peak.device + forecast.peak.cpu == pytest.approx(peaks[index], rel=0.01), RUNS[index]
