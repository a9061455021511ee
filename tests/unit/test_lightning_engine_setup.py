"""`EngineSetup`: where states on NVMe are stored, and what is planned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ls_strategy.config import ZeROConfig
from ls_strategy.extras.planner import fit as planner_fit
from ls_strategy.lightning.engine_setup import EngineSetup
from ls_strategy.lightning.planning import Planning
from ls_strategy.lightning.precision import ZeROPrecision
from ls_strategy.lightning.run_state import RunState
from tests.unit.run_states import run_state

TRAINER: Any = SimpleNamespace(default_root_dir="/runs/a")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LS_STRATEGY_NVME_PATH", raising=False)


def setup_of(run: RunState) -> EngineSetup:
    loop: Any = SimpleNamespace(end_run=lambda: None)
    unused: Any = None
    return EngineSetup(run, unused, loop, uneven=unused, resume=unused)


def chosen(**options: Any) -> ZeROConfig:
    run = run_state(ZeROConfig.of(3, **options))
    setup_of(run).choose_nvme_path(TRAINER)
    return run.config


@pytest.mark.parametrize(
    ("options", "environment", "path"),
    [
        ({"offload": "cpu"}, None, ""),
        ({"offload": "nvme"}, None, "/runs/a/nvme"),
        ({"activations": {"offload": "nvme"}}, None, "/runs/a/nvme"),
        ({"offload": "nvme"}, "/scratch", "/scratch"),
        ({"offload": {"optimizer": "nvme", "nvme_path": "/mine"}}, "/scratch", "/mine"),
    ],
    ids=["without nvme", "the trainer's", "for activations", "of the environment", "of the option"],
)
def test_the_folder_of_nvme(
    options: dict[str, Any], environment: str | None, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if environment is not None:
        monkeypatch.setenv("LS_STRATEGY_NVME_PATH", environment)
    config = chosen(**options, sharding={"prefetch_units": 3})
    assert config.offload.nvme_path == path
    assert config.sharding.prefetch_units == 3, "the rest of the options stays"
    assert config.offload.tiers == chosen(**options).offload.tiers


def test_free_memory_is_read_once_for_several_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    monkeypatch.setattr(planner_fit, "found_here", lambda *_, **options: read.append(options) or object())
    monkeypatch.setattr(planner_fit, "before_sharding", list)
    run = run_state(ZeROConfig.of(3, offload={"optimizer": "nvme", "nvme_path": "/mine"}))
    run.comm.world_size, run.comm.node_size = 4, 2
    planning = Planning(run, ZeROPrecision, auto=False)
    trainer: Any = SimpleNamespace(optimizers=[])
    planning.plan(trainer, None)  # type: ignore[arg-type]
    planning.plan(trainer, None)  # type: ignore[arg-type]
    assert read == [{"ranks": 4, "ranks_per_node": 2, "nvme_path": "/mine"}]


def test_an_engine_is_detached_only_where_every_rank_has_full_parameters() -> None:
    events: list[str] = []
    engine = SimpleNamespace(
        gradients=SimpleNamespace(local=False),
        on_demand=SimpleNamespace(thread=1, state_dict_copies=SimpleNamespace(training=True)),
        comm=SimpleNamespace(world_size=1),
        wait=lambda: events.append("wait"),
        detach=lambda: events.append("detach"),
        state_offload=SimpleNamespace(reload=lambda: events.append("reload")),
        offload=SimpleNamespace(rest=lambda: events.append("rest")),
    )
    setup = setup_of(run_state(engine=engine))
    setup.detach()
    assert events == ["reload", "wait", "detach", "rest"]
    assert engine.gradients.local
    assert (engine.on_demand.thread, engine.on_demand.state_dict_copies.training) == (None, False)
    setup.state_dict_hooks = object()  # type: ignore[assignment]
    setup.detach()
    assert events == ["reload", "wait", "detach", "rest", "reload", "wait", "rest"]
