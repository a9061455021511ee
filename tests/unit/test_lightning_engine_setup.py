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


def test_without_nvme_no_folder_is_chosen() -> None:
    assert chosen(offload="cpu").offload.nvme_path == ""


@pytest.mark.parametrize("options", [{"offload": "nvme"}, {"activations": {"offload": "nvme"}}], ids=str)
def test_nvme_goes_to_the_trainers_folder(options: dict[str, Any]) -> None:
    assert chosen(**options).offload.nvme_path == "/runs/a/nvme"


def test_the_environment_names_another_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LS_STRATEGY_NVME_PATH", "/scratch")
    assert chosen(offload="nvme").offload.nvme_path == "/scratch"


def test_an_option_names_the_folder_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LS_STRATEGY_NVME_PATH", "/scratch")
    assert chosen(offload={"optimizer": "nvme", "nvme_path": "/mine"}).offload.nvme_path == "/mine"


def test_the_rest_of_the_options_stays_with_a_chosen_folder() -> None:
    config = chosen(offload="nvme", sharding={"prefetch_units": 3})
    assert config.offload.tiers == {"nvme"}
    assert config.sharding.prefetch_units == 3


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
