"""The port on which ranks meet."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment

from ls_strategy.distributed.launch import rendezvous
from ls_strategy.distributed.launch.rendezvous import PORTS, check_port, free_port, listeners
from ls_strategy.errors import PlanError, StateError
from ls_strategy.lightning._private import free_main_port
from tests.limits import wall

LISTEN = """
import socket, sys, time
family = socket.AF_INET6 if sys.argv[1] == "::" else socket.AF_INET
with socket.socket(family) as s:
    s.bind((sys.argv[1], 0)); s.listen(1)
    print(s.getsockname()[1], flush=True)
    sys.stdin.read()
"""


@pytest.fixture(params=["127.0.0.1", "0.0.0.0", "::"])
def other(request):
    """Another process that listens: ``(process, port)``."""
    process = subprocess.Popen(
        [sys.executable, "-c", LISTEN, request.param], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        pytest.skip(f"no {request.param} here")
    yield process, int(line)
    process.stdin.close()
    process.wait(10)
    process.stdout.close()


def test_a_taken_port_is_named_with_its_holder_and_a_free_one(other):
    process, port = other
    with pytest.raises(PlanError) as error:
        check_port("node7", port, 0)
    for part in (f"MASTER_PORT={port}", "node7", f"process {process.pid}", "python"):
        assert part in str(error.value)
    assert [pid for pid, _ in listeners(port)] == [process.pid]


def test_only_rank_0_looks_and_not_under_torchrun(other, monkeypatch):
    _, port = other
    check_port("node7", port, 1)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    check_port("node7", port, 0)


@pytest.mark.wide
@pytest.mark.sample(1)
def test_ranks_of_an_agent_that_has_ended_do_not_wait_for_it(other, monkeypatch):
    process, port = other
    address = "::1" if process.args[-1] == "::" else "127.0.0.1"
    rendezvous.check_agent(address, port)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    rendezvous.check_agent(address, port)
    process.kill()
    process.wait()
    began = time.monotonic()
    with pytest.raises(StateError, match=rf"{port}.*torchrun.*has ended.*start the run again"):
        rendezvous.check_agent(address, port)
    assert time.monotonic() - began < wall(10)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    rendezvous.check_agent(address, port)


def test_a_job_of_slurm_learns_why(other, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(PlanError, match="last four digits of the job id"):
        check_port("node7", other[1], 0)


def test_a_free_port_may_be_used_and_one_of_this_process_too():
    port = free_port()
    assert port in PORTS
    check_port("localhost", port, 0)
    with socket.socket() as mine:
        mine.bind(("127.0.0.1", port))
        mine.listen(1)
        assert listeners(port)[0][0] == os.getpid()
        check_port("localhost", port, 0)


CHOOSE = """
import sys
from ls_strategy.distributed.launch import rendezvous
rendezvous.PORTS = range(int(sys.argv[1]), int(sys.argv[1]) + 1)
print(rendezvous.free_port(), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the processes of a host know of each other on Linux alone")
def test_two_runs_that_start_at_once_get_two_ports(monkeypatch):
    """Before one of them listens; when its process has ended, the port is free again."""
    port = free_port()
    rendezvous._held.pop(port)[1].close()
    monkeypatch.setattr(rendezvous, "PORTS", range(port, port + 1))
    command = [sys.executable, "-c", CHOOSE, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == f"{port}\n"
        with pytest.raises(PlanError, match="no free TCP port"):
            free_port()
        other.kill()
    assert free_port() == port
    with pytest.raises(PlanError, match="no free TCP port"):
        free_port()
    monkeypatch.setattr(rendezvous, "_held", {port: (0.0, rendezvous._held.pop(port)[1])})
    assert free_port() == port, "long after"


def test_a_connection_that_winds_down_is_no_listener():
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", free_port()))
        server.listen(1)
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # this side closes first, and keeps the port in TIME_WAIT
        client.close()
    check_port("localhost", port, 0)


def test_a_port_that_nobody_may_use(monkeypatch):
    def refuse(port: int) -> OSError:
        return PermissionError(13, "Permission denied")

    monkeypatch.setattr(
        "ls_strategy.distributed.launch.rendezvous._bind_error", lambda port: refuse(port) if port == 80 else None
    )
    with pytest.raises(PlanError, match="Permission denied"):
        check_port("localhost", 80, 0)


@pytest.fixture
def clean(monkeypatch):
    for name in ("MASTER_PORT", "STANDALONE_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_the_port_is_chosen_where_lightning_starts_the_ranks(clean):
    environment = LightningEnvironment()
    free_main_port(environment, lambda: 23456)
    assert environment.main_port == 23456
    free_main_port(environment, lambda: 1)
    assert environment.main_port == 23456, "once"


@pytest.mark.parametrize("name", ["MASTER_PORT", "STANDALONE_PORT", "LOCAL_RANK"])
def test_a_port_that_was_fixed_stays(clean, name):
    clean.setenv(name, "4000")
    environment = LightningEnvironment()
    free_main_port(environment, lambda: 23456)
    assert environment.main_port != 23456


def test_slurm_has_its_own(clean):
    clean.setenv("SLURM_JOB_ID", "12")
    clean.setenv("SLURM_NTASKS", "1")
    environment = SLURMEnvironment()
    free_main_port(environment, lambda: 23456)
    assert environment.main_port == 15012
    clean.delenv("MASTER_PORT")


def test_runs_with_one_seed_choose_different_ports_and_leave_the_users_random_numbers_alone():
    chosen: list[list[int]] = []
    for _ in range(2):
        random.seed(1)
        before = random.getstate()
        chosen.append([free_port() for _ in range(4)])
        assert random.getstate() == before
    assert chosen[0] != chosen[1]
