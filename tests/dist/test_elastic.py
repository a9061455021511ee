"""Runs that lose ranks or nodes continue from snapshots in memory, with the bits of a run that nothing happened to."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ls_strategy.extras.snapshots import progress
from ls_strategy.testing import spawn
from tests.dist import elastic_program

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder on the memory file system, as a node of its own."""
    folder = Path(tempfile.mkdtemp(prefix="ls_strategy_test_", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def fit(ranks: int, folder: Path, memory: Path, **options: Any) -> dict[str, Any] | None:
    """Run the program on ``ranks`` ranks. Returns its results, or None if a rank ended itself as ``kills`` says."""
    folder.mkdir(exist_ok=True)
    options = {"folder": str(folder), "run": "test", "logger": False, **options}
    before = len(list(folder.glob("killed-*")))
    env = {"LS_STRATEGY_MEMORY": str(memory)}
    try:
        spawn(elastic_program.rank_of, ranks, options, timeout_s=100, env=env, init_process_group=False)
    except Exception:
        if len(list(folder.glob("killed-*"))) == before:
            raise
        return None
    result = json.loads((folder / "out.json").read_text())
    return {key: value for key, value in result.items() if key != "world_size"}


@pytest.mark.parametrize("then", [1, pytest.param(3, marks=pytest.mark.wide)])
def test_continues_on_other_numbers_of_ranks_with_the_same_bits(tmp_path: Path, memory: Path, then: int):
    kills = [[7, 1, "train"]]
    expected = fit(1, tmp_path / "unbroken", memory, run="unbroken")
    assert fit(2, tmp_path / "lossy", memory, kills=kills) is None
    assert fit(then, tmp_path / "lossy", memory, kills=kills) == expected
    assert list(memory.glob("*")) == []  # a complete run leaves nothing


@pytest.mark.wide
@pytest.mark.parametrize(
    "options",
    [
        {"stage": 3, "offload": "cpu", "accumulate": 3, "epochs": 3},
        {"stage": 1, "precision": "bf16-mixed", "val_check_interval": 1.0},
        {"stage": 0, "every": 3},
    ],
    ids=["zero3 offloaded, accumulation", "zero1 bf16", "zero0, every third step"],
)
def test_stages_tiers_and_accumulation(options: dict[str, Any], tmp_path: Path, memory: Path):
    """Validation runs after every fourth batch: the second loss is after the first of three accumulated ones."""
    kills = [[3, 0, "optimizer"], [5, 1, "validation"]]
    expected = fit(2, tmp_path / "unbroken", memory, run="unbroken", **options)
    assert fit(2, tmp_path / "lossy", memory, kills=kills, **options) is None
    assert fit(2, tmp_path / "lossy", memory, kills=kills, **options) is None
    assert fit(2, tmp_path / "lossy", memory, kills=kills, **options) == expected


@pytest.mark.wide
def test_without_virtual_ranks_on_the_same_number_of_ranks(tmp_path: Path, memory: Path):
    options = {"parallel": {}, "stage": 2}
    kills = [[7, 1, "train"]]
    expected = fit(2, tmp_path / "unbroken", memory, run="unbroken", **options)
    assert fit(2, tmp_path / "lossy", memory, kills=kills, **options) is None
    with pytest.raises(Exception, match="or start as many ranks"):
        fit(1, tmp_path / "lossy", memory, kills=kills, **options)
    assert fit(2, tmp_path / "lossy", memory, kills=kills, **options) == expected


@pytest.mark.wide
def test_loaders_with_a_state_continue_on_every_rank(tmp_path: Path, memory: Path):
    """Each rank from its own state; what is logged in some batches only is counted once, and in its epoch."""
    options = {"parallel": {}, "stage": 2, "loader": "own", "epochs": 3, "val_check_interval": 8}
    kills = [[3, 1, "train"], [13, 0, "train"]]
    expected = fit(2, tmp_path / "unbroken", memory, run="unbroken", **options)
    assert fit(2, tmp_path / "lossy", memory, kills=kills, **options) is None
    assert fit(2, tmp_path / "lossy", memory, kills=kills, **options) is None
    assert fit(2, tmp_path / "lossy", memory, kills=kills, **options) == expected


@pytest.mark.wide
@pytest.mark.parametrize("part", ["__1_0.distcp", "meta.pt", ".metadata"])
def test_a_flipped_bit_costs_one_start_and_not_all(tmp_path: Path, memory: Path, part: str):
    """The only snapshot is damaged: the next start leaves it out."""
    kills = [[7, 1, "train"]]
    assert fit(2, tmp_path / "lossy", memory, kills=kills) is None
    (path,) = memory.glob(f"*/step-*/{part}")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    result = fit(2, tmp_path / "lossy", memory, kills=kills)
    assert result == fit(1, tmp_path / "unbroken", memory, run="unbroken")  # from the beginning
    assert list(memory.glob("*")) == []


@pytest.mark.wide
def test_a_torn_snapshot_and_one_of_another_run_do_not_count(tmp_path: Path, memory: Path):
    kills = [[7, 1, "train"]]
    assert fit(2, tmp_path / "lossy", memory, kills=kills) is None
    (run,) = memory.iterdir()
    shutil.copytree(run, memory / "other-000000000000")
    for manifest in run.glob("step-*/manifest.json"):
        manifest.write_text(manifest.read_text().replace('"step"', '"stop"', 1))
    result = fit(2, tmp_path / "lossy", memory, kills=kills)
    assert result == fit(1, tmp_path / "unbroken", memory, run="unbroken")  # from the beginning
    assert [p.name for p in memory.iterdir()] == ["other-000000000000"]


def most_behind(rank: int, world_size: int, most: Any, memory: str) -> int:
    """Return how many steps are finished at most after the newest snapshot that is complete, if writing takes long."""
    from lightning.pytorch.callbacks import Callback

    from ls_strategy import ElasticTraining, ZeROStrategy
    from ls_strategy.extras.snapshots.write import InMemory
    from tests.dist.ranks import Net, batches, quiet, trainer_of

    quiet()
    complete, behind, commit = [0], [0], InMemory.commit

    def slow_commit(self: InMemory, *args: Any) -> None:
        time.sleep(0.1)
        commit(self, *args)
        complete.append(self._step)

    class Notes(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            behind.append(trainer.global_step - complete[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InMemory, "commit", slow_commit)
        elastic = ElasticTraining(most, memory=memory, run=f"behind-{most}")
        trainer = trainer_of(ZeROStrategy(2), callbacks=[Notes(), elastic], max_steps=12, max_epochs=-1)
        trainer.fit(Net(), batches(48))
    assert elastic.taken > 1 or isinstance(most, str)
    return max(behind) if rank == 0 else 0


@pytest.mark.wide
@pytest.mark.parametrize("most", [1, 2, 5])
def test_a_loss_repeats_no_more_steps_than_allowed(most: int, memory: Path):
    """Training waits for a snapshot that is not complete in time."""
    assert spawn(most_behind, 2, most, str(memory), init_process_group=False)[0] <= most


@pytest.mark.wide
def test_auto_waits_for_no_snapshot(memory: Path):
    assert spawn(most_behind, 2, "auto", str(memory), init_process_group=False)[0] > 5


def taken_if_writing_takes(rank: int, world_size: int, seconds: float, memory: str) -> int:
    """Return how many snapshots are taken in twenty steps if the thread that writes one is busy for so long."""
    from lightning.pytorch.callbacks import Callback

    from ls_strategy import ElasticTraining, ZeROStrategy
    from ls_strategy.extras.callbacks import elastic as module
    from ls_strategy.lightning.checkpointing.saving import Saves
    from tests.dist.ranks import Net, batches, quiet, trainer_of

    class Slow(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            time.sleep(0.05)

    quiet()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saves, "busy_s", seconds)
        patch.setattr(module, "_COST", 0.5)
        elastic = ElasticTraining(memory=memory, run=f"busy-{seconds:g}")
        trainer = trainer_of(ZeROStrategy(2), callbacks=[Slow(), elastic], max_steps=20, max_epochs=-1)
        trainer.fit(Net(), batches(80))
    return elastic.taken


@pytest.mark.wide
def test_auto_counts_the_thread_that_writes(memory: Path):
    """On the CPU, where it takes a core from training."""
    fast, slow = (
        spawn(taken_if_writing_takes, 2, seconds, str(memory), init_process_group=False)[0] for seconds in (0.0, 10.0)
    )
    assert fast > 1
    assert slow == 1


def refused(rank: int, world_size: int, what: str, folder: str) -> str:
    """Return the error of a fit that `ElasticTraining` refuses."""
    from torch.utils.data import DataLoader, IterableDataset, RandomSampler

    from ls_strategy import ElasticTraining, ZeROStrategy
    from tests.dist.ranks import Net, samples
    from tests.trainers import bare_trainer

    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            yield from zip(*samples(16), strict=True)

    module, strategy, callbacks = Net(), ZeROStrategy(2), [ElasticTraining(run="refused")]
    data = list(zip(*samples(16), strict=True))
    loader, options = DataLoader(data, batch_size=4), {}
    if what == "stream":
        loader = DataLoader(Stream(), batch_size=4)
    elif what == "sampler":
        loader = DataLoader(data, batch_size=4, sampler=RandomSampler(data))
        options = {"use_distributed_sampler": False}
    elif what == "manual":
        module.automatic_optimization = False
    elif what == "join":
        strategy = ZeROStrategy(2, uneven="join")
    elif what == "ddp":
        strategy = "ddp"
    trainer = bare_trainer(strategy, world_size, max_steps=2, callbacks=callbacks, default_root_dir=folder, **options)
    try:
        trainer.fit(module, loader)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("what", "cure"),
    [
        ("stream", "give the loader a length"),
        ("sampler", "use a DistributedSampler"),
        ("manual", "Use PreemptionHandler"),
        ("join", "Leave one of the two out"),
        ("ddp", 'Trainer(strategy="zero2")'),
    ],
)
def test_what_cannot_continue_is_refused_on_all_ranks(what: str, cure: str, tmp_path: Path, memory: Path):
    ranks = 2 if what == "stream" else 1
    env = {"LS_STRATEGY_MEMORY": str(memory)}
    for error in spawn(refused, ranks, what, str(tmp_path), env=env, init_process_group=False, timeout_s=60):
        assert error.startswith("ConfigError: Got ElasticTraining")
        assert cure in error


@pytest.mark.wide
def test_a_checkpoint_that_the_user_names_later_counts(tmp_path: Path, memory: Path):
    """And the snapshots of the run before it are gone, also those of later steps."""
    kills = [[15, 1, "train"]]
    assert fit(2, tmp_path / "lossy", memory, kills=kills, save_at=5) is None
    path = str(tmp_path / "lossy" / "saved.ckpt")
    assert fit(2, tmp_path / "lossy", memory, kills=[*kills, [6, 0, "train"]], ckpt_path=path) is None
    (run,) = memory.iterdir()
    assert all(int(each.name[5:14]) < 15 for each in run.glob("step-*"))
    kills.append([6, 0, "train"])
    again = fit(2, tmp_path / "lossy", memory, kills=kills, ckpt_path=path)
    assert again is not None
    assert again["steps"] == 24


@pytest.mark.wide
def test_a_node_without_room_is_an_error_at_once(tmp_path: Path, memory: Path):
    """A run that has no snapshot at all would not survive, so it ends."""
    with pytest.raises(Exception, match="could not survive a loss"):
        fit(2, tmp_path / "full", memory, run="full", file_limit=4096)
    assert not list(memory.glob("*/step-*/manifest.json"))


# --- torchrun ---------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Agent:
    """``torchrun`` on one emulated node: a memory of its own, and a process group that can be killed."""

    def __init__(self, number: int, port: int, memory: Path, options: Path, *, ranks: int, nodes: str) -> None:
        self.memory = memory / f"node{number}"
        self.memory.mkdir(exist_ok=True)
        self.log = options.parent / f"node{number}.log"
        command = [
            sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={ranks}",
            "--max-restarts=5", "--rdzv-backend=c10d", "--rdzv-id=elastic", f"--rdzv-endpoint=127.0.0.1:{port}",
            "--rdzv-conf=last_call_timeout=3", "-m", "tests.dist.elastic_program", str(options),
        ]  # fmt: skip
        env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "LS_STRATEGY_MEMORY": str(self.memory)}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def descendants(self) -> list[int]:
        found, queue = [], [self.process.pid]
        while queue:
            pid = queue.pop()
            found.append(pid)
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                queue += map(int, children.read_text().split())
        return found

    def lose(self) -> None:
        """Kill the agent and its ranks, and remove what the node had in memory."""
        for pid in self.descendants():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(20)
        shutil.rmtree(self.memory)

    def step(self) -> int:
        """The last finished step that the node has noted."""
        return max((progress.last(folder)[0] for folder in self.memory.glob("*")), default=-1)

    def wait_for_step(self, step: int, limit_s: float = 120) -> None:
        until = time.monotonic() + limit_s
        while self.step() < step:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < until, self.log.read_text()[-4000:]
            time.sleep(0.05)


@pytest.fixture
def options(tmp_path: Path) -> Path:
    path = tmp_path / "options.json"
    path.write_text(json.dumps({"folder": str(tmp_path), "epochs": 3, "sleep": 0.1}))
    return path


def outcome(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out.json").read_text())


@pytest.mark.slow
def test_torchrun_starts_a_killed_rank_again(tmp_path: Path, memory: Path, options: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options.write_text(json.dumps({**json.loads(options.read_text()), "kills": [[9, 1, "train"]]}))
    agent = Agent(0, free_port(), memory, options, ranks=2, nodes="1")
    assert agent.process.wait(150) == 0, agent.log.read_text()[-4000:]
    result = outcome(tmp_path)
    expected = fit(1, tmp_path / "unbroken", memory, run="unbroken", epochs=3)
    assert expected is not None
    assert {key: result[key] for key in expected} == expected
    (logs,) = (tmp_path / "lightning_logs").iterdir()  # the restart continues in the folder of the first start
    events = EventAccumulator(str(logs))
    events.Reload()
    (repeated,) = events.Scalars("elastic/repeated_steps")
    assert 0 <= repeated.value <= 1
    assert 0 < events.Scalars("elastic/seconds")[0].value < 100
    assert "steps are repeated" in agent.log.read_text()


@pytest.mark.wide
@pytest.mark.parametrize("wrong", [{"manual": True}, {"ckpt_path": "empty.ckpt"}], ids=["option", "checkpoint"])
def test_an_error_that_comes_again_uses_up_no_restarts(
    tmp_path: Path, memory: Path, options: Path, wrong: dict[str, Any]
):
    """Of the five that there are, one, to see that it comes again; one more if ranks were ended before the note."""
    if "ckpt_path" in wrong:
        (tmp_path / "empty.ckpt").mkdir()
        wrong = {"ckpt_path": str(tmp_path / "empty.ckpt")}
    options.write_text(json.dumps({**json.loads(options.read_text()), **wrong}))
    agent = Agent(0, free_port(), memory, options, ranks=2, nodes="1")
    assert agent.process.wait(150) != 0
    log = agent.log.read_text()
    assert len((tmp_path / "starts").read_text().splitlines()) <= 3 * 2, log[-4000:]
    assert "torchrun ends without using up its restarts" in log
    assert ("for manual optimization" if "manual" in wrong else "is not a committed checkpoint") in log


@pytest.mark.wide
def test_a_lost_node_is_restored_from_its_buddy(tmp_path: Path, memory: Path, options: Path):
    port = free_port()
    first = Agent(0, port, memory, options, ranks=1, nodes="1:2")
    time.sleep(2)
    second = Agent(1, port, memory, options, ranks=1, nodes="1:2")
    second.wait_for_step(9)
    second.lose()
    assert first.process.wait(200) == 0, first.log.read_text()[-4000:]
    expected = fit(1, tmp_path / "unbroken", memory, run="unbroken", epochs=3)
    assert expected is not None
    result = outcome(tmp_path)
    assert {key: result[key] for key in expected} == expected
    assert result["world_size"] == 1
    assert "lost " in first.log.read_text()


@pytest.mark.wide
def test_a_node_whose_rank_is_wrong_twice_is_left_out(tmp_path: Path, memory: Path, options: Path):
    """Also with a restart in between: its node's count outlives the process."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    wrong = {"check": 1, "flips": [[3, "node1", "gradient"], [9, "node1", "weights"]], "kills": [[6, 0, "train"]]}
    options.write_text(json.dumps({**json.loads(options.read_text()), **wrong}))
    port = free_port()
    first = Agent(0, port, memory, options, ranks=1, nodes="1:2")
    time.sleep(2)
    second = Agent(1, port, memory, options, ranks=1, nodes="1:2")
    assert second.process.wait(200) != 0
    assert first.process.wait(200) == 0, first.log.read_text()[-4000:]
    expected = fit(1, tmp_path / "unbroken", memory, run="unbroken", epochs=3)
    assert expected is not None
    result = outcome(tmp_path)
    assert {key: result[key] for key in expected} == expected
    assert result["world_size"] == 1
    at, rank = map(int, (tmp_path / "flipped-1").read_text().split())
    log = "".join(agent.log.read_text() for agent in (first, second))
    assert f"the run goes on after step {at + 1} without the ranks {rank} of its node" in log
    assert f"continues after step {at + 1} from the snapshot" in log
    assert "so torchrun ends" in second.log.read_text()
    events = EventAccumulator(str(next((tmp_path / "lightning_logs").iterdir())))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("elastic/left_out")] == [(at + 1, rank)]


@pytest.mark.slow
def test_a_node_joins_again(tmp_path: Path, memory: Path, options: Path):
    options.write_text(json.dumps({"folder": str(tmp_path), "epochs": 6, "sleep": 0.4}))
    port = free_port()
    first = Agent(0, port, memory, options, ranks=1, nodes="1:2")
    time.sleep(2)
    second = Agent(1, port, memory, options, ranks=1, nodes="1:2")
    second.wait_for_step(5)
    second.lose()
    first.wait_for_step(first.step() + 3)
    again = Agent(1, port, memory, options, ranks=1, nodes="1:2")
    assert first.process.wait(250) == 0, first.log.read_text()[-4000:]
    assert again.process.wait(60) == 0, again.log.read_text()[-4000:]
    expected = fit(1, tmp_path / "unbroken", memory, run="unbroken", epochs=6)
    assert expected is not None
    result = outcome(tmp_path)
    assert {key: result[key] for key in expected} == expected
    assert result["world_size"] == 2
    assert "new " in first.log.read_text()
