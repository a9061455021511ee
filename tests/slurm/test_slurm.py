"""The GPT recipe on a real cluster of at least two nodes: submitted, requeued, cancelled, killed.

They run where ``sbatch`` is on the PATH and answers; ``LS_STRATEGY_SLURM_CONF`` names another slurm.conf. pytest's
``--basetemp`` must be a folder that the nodes share. Nodes with the address 127.0.0.1 (several on one host, for tests)
meet on the loopback interface.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from tests.processes import output_of

pytest.importorskip("jsonargparse")
pytest.importorskip("tensorboard")

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "recipes" / "gpt" / "configs"
TINY = [
    "--trainer.val_check_interval=1000", "--trainer.num_sanity_val_steps=0", "--trainer.log_every_n_steps=1",
    "--model.config.num_layers=2", "--model.config.width=64",
    "--model.optim.warmup_steps=2", "--data.block_size=32", "--data.batch_size=4", "--data.val_crops=16",
    "--data.corpus.max_bytes=200000", "--model.sample.max_new_tokens=8",
]  # fmt: skip

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(480)]


class Slow(Callback):
    """Half a second per step in the first start of a job, none after it was requeued; prints every step."""

    def __init__(self) -> None:
        if "OWN_MEMORY" in os.environ:  # nodes on one host are nodes with a memory of their own
            os.environ["LS_STRATEGY_MEMORY"] = os.environ["OWN_MEMORY"] + os.environ["SLURM_NODEID"]

    def on_train_start(self, *_: Any) -> None:
        if "IGNORE_SIGUSR1" in os.environ:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        print(f"start {os.environ.get('SLURM_RESTART_COUNT', '0')} step {trainer.global_step}", flush=True)
        if "SLURM_RESTART_COUNT" not in os.environ:
            time.sleep(0.5)


def slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


@pytest.fixture(scope="module", autouse=True)
def cluster():
    conf = os.environ.get("LS_STRATEGY_SLURM_CONF")
    with pytest.MonkeyPatch.context() as patch:
        if conf:
            patch.setenv("SLURM_CONF", conf)
        if shutil.which("sbatch") is None or subprocess.run(["sinfo"], capture_output=True, check=False).returncode:
            pytest.skip("no SLURM cluster answers")
        for name in [n for n in os.environ if n.startswith(("SLURM_JOB", "SLURM_STEP", "MASTER_", "WORLD_SIZE"))]:
            patch.delenv(name)
        yield


class Submitted:
    """A job of this test, its logs and its end."""

    def __init__(self, folder: Path, *options: str, program: tuple[str, ...] = ()) -> None:
        self.folder = folder
        local = "NodeAddr=127.0.0.1" in slurm("scontrol", "show", "node", "-o")
        env = [f"--env=PYTHONPATH={ROOT}"]
        if local:
            env += ["--env=MASTER_ADDR=127.0.0.1", "--env=GLOO_SOCKET_IFNAME=lo"]
        command = [
            sys.executable, "-m", "ls_strategy.cli", "submit", str(CONFIGS / "base.yaml"), str(CONFIGS / "zero2.yaml"),
            "--module=recipes.gpt", "--name=test", "--nodes=2", *env, *options, "--", *TINY,
            f"--trainer.logger.init_args.save_dir={folder / 'runs'}", f"--trainer.default_root_dir={folder}",
            f"--data.corpus.cache_dir={folder / 'cache'}",
            f"--trainer.callbacks+={__name__}.Slow",
            "--trainer.callbacks+=ls_strategy.PreemptionHandler", *program,
        ]  # fmt: skip
        printed = output_of(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)})
        match = re.search(r"as job (\d+)", printed)
        assert match, printed
        self.id = match[1]
        self.said = printed

    def show(self, key: str) -> str:
        found = re.search(rf"\b{key}=(\S+)", slurm("scontrol", "show", "job", self.id))
        assert found
        return found[1]

    def log(self, name: str = "rank-0.log") -> str:
        path = self.folder / "slurm" / f"test-{self.id}" / name
        return path.read_text() if path.exists() else ""

    def steps(self, start: int = 0) -> list[int]:
        return [int(s) for s in re.findall(rf"start {start} step (\d+)", self.log())]

    def wait(self, done: Callable[[], Any], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            batch = self.folder / "slurm" / f"test-{self.id}.log"
            said = batch.read_text() if batch.exists() else ""
            state = self.show("JobState")
            over = time.monotonic() >= deadline or (state == "FAILED" and not done())
            assert not over, f"{what}: {state}\n{said}\n{self.log()}"
            time.sleep(0.5)

    def ended(self) -> bool:
        return self.show("JobState") not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED")

    def processes(self) -> list[int]:
        """Ranks on this host."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                environ = path.read_bytes().split(b"\0")
                command = (path.parent / "cmdline").read_bytes()
            except OSError:
                continue
            if b"recipes.gpt" in command and f"SLURM_JOB_ID={self.id}".encode() in environ and b"srun" not in command:
                found.append(int(path.parent.name))
        return found


@pytest.fixture
def submit(tmp_path: Path):
    jobs: list[Submitted] = []

    def start(*options: str, program: tuple[str, ...] = ()) -> Submitted:
        jobs.append(Submitted(tmp_path, *options, program=program))
        return jobs[-1]

    yield start
    for job in jobs:
        subprocess.run(["scancel", job.id], check=False)


HANDLER = "--trainer.callbacks.init_args"


@pytest.mark.parametrize("by", ["signal", "clock"])
def test_the_job_saves_before_its_time_is_over_and_goes_on_after_the_requeue(submit, by):
    """By SLURM's signal alone, or by PreemptionHandler's look at the clock alone."""
    if by == "signal":
        job = submit(
            "--time=2", "--signal-lead-s=30", program=(f"{HANDLER}.minutes_before_end=0", "--trainer.max_steps=400")
        )
    else:
        # SLURM may send its signal a minute earlier than it was told; here it must not count.
        job = submit(
            "--time=2", "--signal-lead-s=1", "--env=IGNORE_SIGUSR1=1",
            program=(f"{HANDLER}.signals=[SIGTERM]", "--trainer.max_steps=400"),
        )  # fmt: skip
    job.wait(lambda: "The process ends with status 0" in job.log(), 150, "stop")
    first = job.steps()
    why = "SIGUSR1" if by == "signal" else "the time of the SLURM job ends"
    assert why in job.log()
    assert first == list(range(1, len(first) + 1))
    assert [p.name for p in (job.folder / "preemption" / job.id).iterdir()] == [f"step={first[-1]}.ckpt"]
    job.wait(lambda: job.show("JobState") == "PENDING", 60, "requeue")
    # SLURM would wait for two minutes; and on a busy machine two minutes could end the second start, too.
    slurm("scontrol", "update", f"JobId={job.id}", "StartTime=now", "TimeLimit=10")
    job.wait(job.ended, 240, "second start")
    assert job.show("JobState") == "COMPLETED"
    assert job.show("Restarts") == "1"
    assert job.steps(1) == list(range(first[-1] + 1, 401))
    assert [p.name for p in (job.folder / "runs" / "gpt").iterdir()] == [f"job_{job.id}"], "one curve"


def test_scancel_ends_the_job_promptly_and_for_good(submit):
    job = submit("--time=10", program=("--trainer.max_steps=2000",))
    job.wait(lambda: len(job.steps()) >= 3, 90, "training")
    before = time.monotonic()
    slurm("scancel", job.id)
    job.wait(job.ended, 30, "scancel")
    assert time.monotonic() - before < 25
    assert job.show("JobState") == "CANCELLED"
    assert job.processes() == []
    assert "is not requeued" in job.log()
    assert list((job.folder / "preemption" / job.id).iterdir())


def test_a_killed_rank_ends_the_job_promptly(submit):
    job = submit("--time=10", program=("--trainer.max_steps=2000",))
    job.wait(lambda: len(job.steps()) >= 3, 90, "training")
    ranks = job.processes()
    if not ranks:
        pytest.skip("the ranks run on other hosts")
    before = time.monotonic()
    os.kill(ranks[-1], 9)
    job.wait(job.ended, 60, "death of a rank")
    assert time.monotonic() - before < 45
    assert job.show("JobState") == "FAILED"
    assert job.processes() == []


def test_a_job_continues_without_a_node_that_fails(submit, tmp_path):
    """SLURM takes the second node away; the first one has its copies, and completes the run with as many steps."""
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else tmp_path
    folder = memory / f"ls_strategy_test_{os.getpid()}_"
    job = submit(
        "--elastic",
        f"--env=OWN_MEMORY={folder}",
        program=("--trainer.max_steps=60", "--trainer.strategy.init_args.parallel.virtual_ranks=2"),
    )
    node = ""
    try:
        job.wait(lambda: re.search(r"start 0 step 6\b", job.log("node-0.log")), 120, "six steps on two nodes")
        nodes = slurm("scontrol", "show", "hostnames", job.show("NodeList")).split()
        node = nodes[-1]
        slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        job.wait(job.ended, 200, "the end on one node")
        assert job.show("JobState") == "COMPLETED", job.log("node-0.log")
    finally:
        if node:
            subprocess.run(
                ["scontrol", "update", f"nodename={node}", "state=resume"], check=False
            )  # if it is still down
        for each in memory.glob(f"{folder.name}*"):
            shutil.rmtree(each)
    log = job.log("node-0.log")
    assert "ElasticTraining: continues after step" in log
    assert "on 1 ranks of 1 nodes, after 2 ranks of 2; lost" in log
    assert re.search(r"start 0 step 60\b", log)


def test_the_same_program_under_torchrun(tmp_path):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "recipes.gpt", "fit",
        f"--config={CONFIGS / 'base.yaml'}", f"--config={CONFIGS / 'zero2.yaml'}", *TINY, "--trainer.max_steps=6",
        f"--trainer.logger.init_args.save_dir={tmp_path}", f"--data.corpus.cache_dir={tmp_path / 'cache'}",
        f"--trainer.default_root_dir={tmp_path}", "--trainer.callbacks+=ls_strategy.PreemptionHandler",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "max_steps=6" in done.stderr + done.stdout
