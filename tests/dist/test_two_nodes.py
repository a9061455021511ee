"""Two nodes with a slow link: what the kernel counts on it is what the planner's formula says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import deepspeed_steps
from benchmarks.slow_network import BASELINE, CONTENDERS, check, measure
from tests import two_nodes

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(600)]

HEADERS = 0.05
"""Of TCP and IP, which are 66 bytes per packet of 1,500, repeated packets and acknowledgments, relative to the bytes
that are sent. Of a model as small as this, agreements on a few numbers are a part, too."""


@pytest.fixture(autouse=True)
def possible() -> Iterator[None]:
    try:
        two_nodes.require()
    except two_nodes.TwoNodesError as error:
        pytest.skip(str(error))
    yield
    assert not list(Path("/run/netns").glob(f"ls-nodes-{os.getpid()}-*")), "nodes are left behind"


def test_the_bytes_on_the_link_are_those_of_the_formula() -> None:
    args = {"rate": "1gbit", "ranks_per_node": 2, "size": "5M", "rounds": 1, "steps": 5, "batch": 1, "block": 16}
    results = measure(args)
    check(results)
    assert set(results) - set(deepspeed_steps.configurations(2)) == set(CONTENDERS)
    for name in CONTENDERS:
        row = results[name]
        over = row["crossed_bytes"] / row["predicted_bytes"]
        assert 1.0 < over < 1.0 + HEADERS, f"{name}: {over}"
    crossed = {name: row["crossed_bytes"] for name, row in results.items()}
    # A third of the bytes are gathers in backward; root units and the last block have none.
    assert crossed["hpZ"] < 0.75 * crossed[BASELINE], "backward gathers inside the nodes"
    assert crossed["qwZ + hpZ + qgZ, int8"] < 0.25 * crossed[BASELINE]


def test_nodes_meet_without_the_name_of_an_interface() -> None:
    """The host's name is a loopback address on both of them, as on Debian."""
    code = """if True:
        import sys
        from tests import two_nodes
        two_nodes.enter(sys.argv[1])
        import socket
        socket.gethostname = lambda: "127.0.1.1"  # as gloo itself sees it where this test can find something
        from tests.dist.ranks import Net, fit
        fit("zero2", Net(), devices=1, num_nodes=2, max_steps=2)
        """
    with two_nodes.two_nodes("1gbit") as names:
        ranks = []
        for rank, name in enumerate(names):
            own = two_nodes.environment(rank, 1) | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": "29655"}
            own |= {"TORCHELASTIC_RUN_ID": "nodes", "NODE_RANK": str(rank), "OMP_NUM_THREADS": "1"}
            environment = {**os.environ, **own}
            environment.pop("GLOO_SOCKET_IFNAME")
            ranks.append(subprocess.Popen([sys.executable, "-c", code, name], env=environment))
        try:
            assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
        finally:
            for rank in ranks:
                rank.kill()


def test_an_error_leaves_no_node_behind() -> None:
    def fail() -> None:
        with two_nodes.two_nodes("1gbit") as names:
            assert all(Path("/run/netns", name).exists() for name in names)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with pytest.raises(two_nodes.TwoNodesError, match="fast"), two_nodes.two_nodes("fast"):
        pass


def test_nodes_of_a_process_that_was_killed_are_removed() -> None:
    code = """if True:
        import time
        from tests import two_nodes
        with two_nodes.two_nodes("1gbit") as names:
            print(names[0], flush=True)
            time.sleep(60)
        """
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert Path("/run/netns", name).exists()
    time.sleep(0.1)
    with two_nodes.two_nodes("1gbit"):
        assert not Path("/run/netns", name).exists()
