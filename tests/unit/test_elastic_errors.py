"""Which errors end `torchrun` with restarts left: the same one, twice, where it would start the ranks again."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ls_strategy.errors import ConfigError, PlanError
from ls_strategy.extras.callbacks import elastic_errors
from ls_strategy.extras.snapshots.memory import Memory


def test_only_the_same_error_on_as_many_ranks_comes_again(tmp_path: Path) -> None:
    def again(error: Exception, ranks: int = 2) -> bool:
        return elastic_errors.came_again(tmp_path, error, ranks)

    assert not again(ConfigError("Got x=1"))
    assert again(ConfigError("Got x=1"))
    assert not again(ConfigError("Got x=2"))
    assert not again(PlanError("Got x=2"))
    assert not again(PlanError("Got x=2"), ranks=3)
    assert again(PlanError("Got x=2"), ranks=3)
    elastic_errors.forget(tmp_path)  # a step was trained
    assert not again(PlanError("Got x=2"), ranks=3)
    assert not elastic_errors.came_again(tmp_path / "absent", ConfigError("x"), 1)


def test_the_note_goes_with_the_memory(tmp_path: Path) -> None:
    memory = Memory(tmp_path, "run")
    elastic_errors.came_again(memory.folder, ConfigError("x"), 1)
    memory.clear()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("restarts", "most", "has"),
    [("1", "3", True), ("2", "3", True), ("0", "3", False), ("3", "3", False), ("", "", False), ("x", "3", False)],
)
def test_the_launcher_ends_between_its_first_and_its_last_restart(restarts: str, most: str, has: bool) -> None:
    environ = {"TORCHELASTIC_RESTART_COUNT": restarts, "TORCHELASTIC_MAX_RESTARTS": most}
    assert elastic_errors.has_restarts(environ) == has


@pytest.mark.parametrize("listens", [True, False])
@pytest.mark.parametrize("by", ["--rdzv-endpoint=node0:{}", "--rdzv_endpoint node0:{}", "variable"])
def test_a_rank_knows_its_launcher_and_whether_all_meet_there(by: str, listens: bool, tmp_path: Path) -> None:
    """In a child of a process of that name, as ranks are."""
    child = (
        f"import os; exec(open({elastic_errors.__file__!r}).read()); print(launcher(), "
        "launcher() is not None and is_meeting_place(launcher(), os.environ))"
    )
    (tmp_path / "torchrun").write_text(
        f"import os, subprocess, sys\nprint(os.getpid(), flush=True)\nsubprocess.run([sys.executable, '-c', {child!r}])"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        env = {**os.environ, **({"PET_RDZV_ENDPOINT": f"node0:{port}"} if by == "variable" else {})}
        command = [sys.executable, str(tmp_path / "torchrun"), *([] if by == "variable" else by.format(port).split())]
        kept = (server.fileno(),) if listens else ()
        found = subprocess.run(
            command, env=env, capture_output=True, text=True, check=True, timeout=120, pass_fds=kept
        ).stdout.split()
    assert found == [found[0], found[0], str(listens)]
    assert elastic_errors.launcher() is None
