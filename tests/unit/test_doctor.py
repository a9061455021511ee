"""`ls-strategy doctor`: every fault has a state and a cure, and a healthy machine has none."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch  # noqa: F401 - sets variables of the environment when it is first imported
import pytest
import torch

from ls_strategy.distributed.launch.rendezvous import free_port
from ls_strategy.errors import ConfigError
from ls_strategy.extras import cli
from ls_strategy.extras.doctor import cluster, collective, gpus, host, kernels, nvme, software
from ls_strategy.extras.doctor.examine import TOPICS, Check, choose, examine
from ls_strategy.extras.doctor.finding import Finding
from ls_strategy.ops import _build, native
from ls_strategy.ops.cuda import nvrtc
from ls_strategy.ops.extra_library import routing_library
from ls_strategy.tiers.nvme_folder import mount_of
from ls_strategy.tiers.threads import cpu_quota
from tests.limits import wall
from tests.processes import output_of

JOB = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "1", "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip


def states(findings):
    return [f.state for f in findings]


def program(folder: Path, name: str, text: str) -> None:
    """A command on PATH."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """A folder that is PATH by itself, but for the shell's own commands."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


# --- the whole -------------------------------------------------------------------------------------------------------


def test_a_finding_that_complains_has_a_cure():
    with pytest.raises(ValueError, match="without a cure"):
        Finding("x", "broken", "problem")


def test_a_healthy_machine_in_words_and_json(capsys):
    names = ["software", "compilers", "host", "drive", "launcher"]
    assert cli.main(["doctor", "--only", *names]) == 0
    shown = capsys.readouterr()
    assert [line for line in shown.out.splitlines() if line in TOPICS] == names
    assert "... versions" in shown.err
    assert "This machine can train" in shown.out
    assert cli.main(["doctor", "--json", "--only", *names]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"]
    assert {f["topic"] for f in told["findings"]} == set(names)
    assert all(f["cure"] for f in told["findings"] if f["state"] != "ok")


def test_a_problem_is_the_exit_status(capsys, tmp_path):
    assert cli.main(["doctor", "--only", "drive", "--nvme-path", str(tmp_path / "typo")]) == 1
    assert f"-> Create it on a local NVMe device (mkdir -p {tmp_path}/typo)" in capsys.readouterr().out
    assert not (tmp_path / "typo").exists()


def test_the_folder_of_the_environment(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("LS_STRATEGY_NVME_PATH", str(tmp_path / "typo"))
    assert cli.main(["doctor", "--json", "--only", "drive"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["value"] == f"{tmp_path}/typo does not exist"


def test_unknown_checks_and_times(capsys):
    assert cli.main(["doctor", "--only", "hots"]) == 1
    assert f"Got the unknown check hots.\n  The checks are {', '.join(TOPICS)}" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        cli.main(["doctor", "--only", "host", "--timeout-s", "0"])
    assert "argument --timeout-s: 0.0 is given" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="leave no check"):
        choose([Check("host", "", list)], only=[], skip=["host"])


def test_a_check_that_fails_is_a_problem_and_the_others_go_on():
    def breaks():
        yield Finding("first", "there")
        raise RuntimeError("unexpected")

    checks = [Check("a", "a", breaks), Check("b", "b", lambda: iter([Finding("last", "there")]))]
    seen: list[str] = []
    found = examine(checks, lambda topic, finding: seen.append(finding.name), lambda doing: None)
    assert seen == ["first", "a", "last"]
    assert found[1][1].state == "problem"
    assert "--skip a" in found[1][1].cure


# --- software --------------------------------------------------------------------------------------------------------


def test_versions_out_of_range_and_missing(monkeypatch):
    plain = software.installed
    monkeypatch.setattr(software, "requirements", lambda: {"torch": ">=2.11", "lightning": "<2.7,>=2.6.4"})
    monkeypatch.setattr(software, "installed", lambda name: {"torch": "2.4.1", "fsspec": None}.get(name, plain(name)))
    found = {f.name: f for f in software.versions()}
    assert found["torch"].state == found["fsspec"].state == "problem"
    assert found["torch"].value == "2.4.1, but >=2.11 is required"
    assert found["torch"].cure == 'pip install "torch>=2.11"'
    assert found["lightning"].state == "ok"


def test_the_requirements_are_those_of_the_package():
    pytest.importorskip("packaging")
    if software.installed("ls_strategy") is None:
        pytest.skip("the package is not installed")
    assert software.requirements()["torch"] == ">=2.11"
    assert "pytest" not in software.requirements()  # only for tests


def without_compilers(found):
    """Slower, not broken; and why, for each library."""
    by_name = {f["name"]: f for f in found}
    assert by_name["C++"]["state"] == "note"
    assert "apt install g++" in by_name["C++"]["cure"]
    for name, operation in (("updates on cpu", "adamw_"), ("routing on cpu", "topk_indices")):
        assert by_name[name]["state"] == "note"
        assert operation in by_name[name]["value"]
        assert "no compiler" in by_name[name]["value"]


@pytest.mark.usefixtures("commands")
def test_without_compilers_all_runs_in_references(monkeypatch, capsys, request):
    monkeypatch.setattr(_build, "_status", {})  # as in a process that has not asked yet
    native.available.cache_clear()
    request.addfinalizer(native.available.cache_clear)
    monkeypatch.setattr(routing_library, "_loaded", {})
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("LS_STRATEGY_OPS", raising=False)
    assert cli.main(["doctor", "--json", "--only", "compilers", "kernels"]) == 0
    without_compilers(json.loads(capsys.readouterr().out)["findings"])


@pytest.mark.slow
def test_a_bare_machine(tmp_path):
    """A process of its own: nothing on PATH, nothing compiled yet."""
    environment = {k: v for k, v in os.environ.items() if k not in ("CXX", "LS_STRATEGY_OPS")}
    environment |= {"PATH": str(tmp_path), "LS_STRATEGY_CACHE": str(tmp_path / "cache"), "CUDA_HOME": str(tmp_path)}
    printed = output_of(
        [sys.executable, "-m", "ls_strategy.cli", "doctor", "--json", "--only", "compilers", "kernels"],
        timeout=60,
        env=environment,
    )
    without_compilers(json.loads(printed)["findings"])


def test_a_compiler_that_is_named_wrongly(monkeypatch):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    finding = next(f for f in software.compilers() if f.name == "C++")
    assert (finding.state, finding.cure[:9]) == ("note", "CXX names")


def test_the_compiler_for_gpus_and_what_it_compiles_for(monkeypatch):
    found = SimpleNamespace(version="13.0", architecture=lambda capability: f"sm_{capability[0]}{capability[1]}")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(nvrtc, "compiler", lambda: found)
    assert list(software.compilers())[-1] == Finding("NVRTC", "13.0, for sm_75")

    def missing():
        raise _build.BuildError("libnvrtc.so.13 is not installed: pip install nvidia-cuda-nvrtc")

    monkeypatch.setattr(nvrtc, "compiler", missing)
    finding = list(software.compilers())[-1]
    assert (finding.name, finding.state) == ("NVRTC", "note")
    assert "pip install nvidia-cuda-nvrtc" in finding.value


def test_kernels_that_are_required_and_cannot_be_had():
    def refuses(device):
        raise ConfigError("LS_STRATEGY_OPS=1, but there is no kernel for cpu: no compiler g++.")

    finding = kernels.library("cpu", "updates", ("adamw_",), SimpleNamespace(available=refuses))
    assert finding.state == "problem"
    assert "unset LS_STRATEGY_OPS" in finding.cure


def test_kernels_that_are_switched_off(monkeypatch):
    monkeypatch.setenv("LS_STRATEGY_OPS", "0")
    finding = kernels.library("cpu", "updates", ("adamw_",), SimpleNamespace(available=lambda device: False))
    assert (finding.state, finding.cure) == ("note", "Unset LS_STRATEGY_OPS to use the kernels.")


@pytest.mark.parametrize(
    ("folder", "where"), [(_build.SHIPPED, "came with the wheel"), (Path("cache"), "compiled here")]
)
def test_kernels_that_run_say_for_which_processor_and_where_they_were_compiled(folder, where):
    found = SimpleNamespace(available=lambda device: True, limit_isa=lambda limit: 1, path=lambda: str(folder / "a.so"))
    finding = kernels.library("cpu", "updates", ("adamw_", "lion_"), found)
    assert finding.value == f"adamw_ lion_: kernels with AVX2, {where}"


# --- host ------------------------------------------------------------------------------------------------------------


def test_limits_of_the_host(tmp_path, monkeypatch):
    assert host.open_files(65536, 65536).state == "ok"
    assert host.open_files(1024, 524288).cure.startswith("`ulimit -n 524288`")
    assert host.open_files(1024, resource.RLIM_INFINITY).cure.startswith("`ulimit -n 65536`")
    assert "administrator" in host.open_files(1024, 1024).cure
    missing = host.shared_memory(tmp_path / "shm")
    assert (missing.state, missing.cure[:9]) == ("problem", "Mount it:")
    monkeypatch.setattr(host, "SHARED_MEMORY", 1 << 60)
    assert "--shm-size" in host.shared_memory(tmp_path).cure


def test_threads_against_the_limit_of_a_container(tmp_path):
    assert cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert cpu_quota(tmp_path) == 2.5
    finding = host.threads(8, 2.5)
    assert finding.state == "note"
    assert "OMP_NUM_THREADS to 2.5" in finding.cure
    (tmp_path / "memory.max").write_text("max\n")
    assert host.cgroup_limit(tmp_path) is None
    (tmp_path / "memory.max").write_text("1073741824\n")
    assert host.cgroup_limit(tmp_path) == 1 << 30


@pytest.mark.parametrize(
    ("address", "state", "word"),
    [(None, "problem", "/etc/hosts"), ("127.0.1.1", "note", "IFNAME"), ("10.0.0.3", "ok", "")],
)
def test_the_name_of_the_host(monkeypatch, address, state, word):
    def getaddrinfo(name, port):
        if address is None:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    finding = host.name_resolves("node7")
    assert finding.state == state
    assert word in finding.cure


# --- GPUs ------------------------------------------------------------------------------------------------------------


def test_a_driver_that_does_not_answer(commands):
    program(commands, "nvidia-smi", 'echo "Failed to initialize NVML: Driver/library version mismatch"; exit 18')
    seen, failure = gpus.driver_list()
    assert not seen
    assert "status 18" in failure
    assert "version mismatch" in failure
    finding = next(iter(gpus.gpus()))
    assert (finding.name, finding.state) == ("driver", "problem")
    assert "dmesg" in finding.cure


def test_what_the_driver_lists(commands):
    program(commands, "nvidia-smi", "echo '0, NVIDIA H100, 570.86.10, 81559, 4'")
    seen, failure = gpus.driver_list()
    assert (seen[0].driver, seen[0].total, failure) == ("570.86.10", "81559", "")


def test_gpus_that_torch_cannot_use(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus.unavailable(0, None, "2.15.0").state == "ok"
    assert "built without CUDA" in gpus.unavailable(2, None, "2.15.0+cpu").value
    old = gpus.unavailable(2, "13.0", "2.15.0")
    assert (old.state, old.cure[:17]) == ("problem", "Update the driver")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "Unset CUDA_VISIBLE_DEVICES" in gpus.unavailable(2, "13.0", "2.15.0").cure


# --- NVMe ------------------------------------------------------------------------------------------------------------


def test_a_folder_in_memory():
    if mount_of(Path("/dev/shm")).kind != "tmpfs":
        pytest.skip("no tmpfs in /dev/shm")
    (finding,) = nvme.folder("/dev/shm")
    assert finding.state == "problem"
    assert "tmpfs" in finding.value
    assert "ext4" in finding.cure


def test_a_folder_on_a_disk(tmp_path):
    found = {f.name: f for f in nvme.folder(str(tmp_path))}
    if found["folder"].state == "problem":
        pytest.skip("temporary files are in memory here")
    assert found["direct I/O"].state in ("ok", "note")
    assert "free" in found["room"].value
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_direct_io(tmp_path, monkeypatch):
    from ls_strategy.tiers.file_io import DirectFile

    def refuses(self, direct):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(DirectFile, "_set_direct", refuses)
    finding = nvme.direct_io(tmp_path)
    assert (finding.state, finding.value) == ("note", "the file system refuses O_DIRECT")
    assert "ext4" in finding.cure


def test_a_file_instead_of_a_folder(tmp_path):
    (tmp_path / "file").touch()
    (finding,) = nvme.folder(str(tmp_path / "file"))
    assert finding.state == "problem"
    assert "is a file" in finding.value


# --- SLURM and launchers ---------------------------------------------------------------------------------------------


def test_outside_of_a_job(commands):
    found = list(cluster.slurm({}))
    assert states(found) == ["ok", "ok"]
    assert found[1].value == "no sinfo: this host is in no SLURM cluster"


def test_a_healthy_step(commands):
    program(commands, "sinfo", "echo 'gpu* 4 idle'")
    found = list(cluster.slurm(JOB))
    assert states(found) == ["ok", "ok"], found
    assert "task 1 of 4 on 2 nodes" in found[0].value
    assert "gpu* 4 idle" in found[1].value


@pytest.mark.parametrize(
    ("changes", "state", "value", "cure"),
    [
        ({"SLURM_NTASKS": "four"}, "problem", "SLURM_NTASKS='four' is not a number", "fresh job"),
        ({"SLURM_PROCID": "-1"}, "problem", "SLURM_PROCID='-1'", "fresh job"),
        ({"SLURM_NTASKS": None}, "problem", "SLURM_NTASKS missing", "--ntasks-per-node"),
        ({"SLURM_PROCID": "9"}, "problem", "task 9 of 4", "mixed"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "problem", "lists others", "mixed"),
        ({"SLURM_STEP_TASKS_PER_NODE": "3,1"}, "problem", "different numbers of tasks", "--ntasks-per-node"),
        ({"SLURM_STEP_NUM_TASKS": None}, "note", "without srun", "srun python"),
        ({"SLURM_JOB_ID": None}, "problem", "none, but SLURM_NTASKS", "unset SLURM_NTASKS"),
        ({"SLURM_JOB_NAME": "bash"}, "problem", "4 tasks in a job named 'bash'", "SLURM_JOB_NAME=train"),
    ],
)
def test_variables_of_slurm_that_do_not_fit(commands, changes, state, value, cure):
    program(commands, "sinfo", "echo up")
    environ = {k: v for k, v in (JOB | changes).items() if v is not None}
    worst = next(f for f in cluster.slurm(environ) if f.state != "ok")
    assert worst.state == state
    assert value in worst.value
    assert cure in worst.cure


def test_a_controller_that_does_not_answer(commands, monkeypatch):
    assert cluster.sinfo(in_job=True).state == "note"  # no command at all
    program(commands, "sinfo", "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1")
    down = cluster.sinfo(in_job=True)
    assert (down.state, "Unable to contact" in down.value) == ("problem", True)
    assert "scontrol ping" in down.cure
    program(commands, "sinfo", "while :; do :; done")
    monkeypatch.setattr(cluster, "_TIMEOUT_S", 0.2)
    assert "does not answer" in cluster.sinfo(in_job=False).value


def test_variables_of_launchers():
    assert states(cluster.launcher({})) == ["ok"]
    (wrong,) = cluster.launcher({"RANK": "zero"})
    assert wrong.cure.endswith("unset RANK")
    (beyond,) = cluster.launcher({"RANK": "2", "WORLD_SIZE": "2"})
    assert beyond.value == "RANK=2 of WORLD_SIZE=2"
    assert states(cluster.launcher({"RANK": "1", "WORLD_SIZE": "2"})) == ["ok"]


def test_a_port_that_is_taken():
    number = free_port()
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(number)}
    assert states(cluster.launcher(environ)) == ["ok", "ok"]
    # Another process: of this one, torch would share the store.
    code = f"import socket, time; s = socket.create_server(('', {number})); print('up', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        taken = list(cluster.launcher(environ))[-1]
    finally:
        holder.kill()
        holder.communicate()
    assert taken.state == "problem"
    assert f"process {holder.pid}" in taken.value
    assert "free port" in taken.cure
    assert "another host" in cluster.port("10.255.0.1", number).value


# --- two ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.wide
def test_two_ranks_add_up():
    finding = collective.all_reduce("gloo", timeout_s=60)
    assert finding.state == "ok", finding
    assert "the sum is correct" in finding.value


@pytest.mark.parametrize(
    ("code", "value", "cure"),
    [
        (
            "sys.exit('out of luck') if sys.argv[2] == '1' else time.sleep(600)",
            "rank 1 ended with status 1: out",
            "torch",
        ),
        ("os.kill(os.getpid(), 9) if sys.argv[2] == '0' else time.sleep(600)", "signal SIGKILL", "torch"),
        ("sys.exit('errno: 98 - Address already in use')", "already in use", "MASTER_PORT"),
        ("sys.exit('connectFullMesh failed: timed out')", "timed out", "GLOO_SOCKET_IFNAME=lo"),
        ("print('hello')", "'hello'", "import torch"),
        ('print(\'{"sum": [3.0, 4.0], "ms": 1.0}\')', "between 3.0 and 4.0", "update torch"),
    ],
)
def test_ranks_that_fail(code, value, cure):
    started = time.monotonic()
    command = (sys.executable, "-c", f"import os, sys, time; {code}")
    finding = collective.all_reduce("gloo", timeout_s=300, program=command)
    assert time.monotonic() - started < wall(20)  # the other rank is not waited for
    assert finding.state == "problem"
    assert value in finding.value
    assert cure in finding.cure


@pytest.mark.wide
def test_ranks_that_hang_are_ended(tmp_path):
    code = f"import os, sys, time; open(r'{tmp_path}/' + sys.argv[2], 'w').write(str(os.getpid())); time.sleep(60)"
    finding = collective.all_reduce("nccl", timeout_s=1.5, program=(sys.executable, "-c", code))
    assert finding.state == "problem"
    assert "no result within 1.5 s" in finding.value
    assert "NCCL_SOCKET_IFNAME" in finding.cure
    for rank in range(2):
        assert not Path(f"/proc/{(tmp_path / str(rank)).read_text()}").exists()


@pytest.mark.slow
def test_a_port_that_torch_cannot_have():
    with socket.create_server(("127.0.0.1", 0)) as server:
        finding = collective.all_reduce("gloo", timeout_s=60, port=server.getsockname()[1])
    assert finding.state == "problem"
    assert "MASTER_PORT" in finding.cure
