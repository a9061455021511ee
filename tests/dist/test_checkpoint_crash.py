"""Processes that are killed, disks that are full, bytes that are damaged: no half checkpoint is ever taken for one."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import random
import resource
import shutil
import signal
import subprocess
import threading
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ls_strategy import ZeROStrategy
from ls_strategy.checkpoint import commit, save
from ls_strategy.checkpoint.describe import verify_all
from ls_strategy.checkpoint.files import Reader, read_range
from ls_strategy.checkpoint.manifest import Manifest, is_committed, read_manifest
from ls_strategy.checkpoint.place import CheckpointPath
from ls_strategy.checkpoint.reshard import CheckpointEntry
from ls_strategy.config import nested
from ls_strategy.errors import CheckpointError, RankFailedError
from ls_strategy.testing import RankDiedError, spawn
from tests.dist.ranks import Net, assert_equal, batches, fit, on_ranks, quiet, saved, trainer_of, weights
from tests.limits import wall
from tests.marks import slow

pytestmark = pytest.mark.wide

# --- every step of a save ---------------------------------------------------------------------------------------------

RANKS = 2
SHAPE = (6, 5)
PATHS = (("model", "a"),)
STEPS = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "symlink", "ftruncate", "pwrite")
"""Of `os`: after each of them the disk is different."""

_rank = threading.local()


class HalfOf:
    """A value of which one rank has the upper and the other the lower half; what `save.run` needs of a source."""

    def __init__(self, rank: int, number: int) -> None:
        self.flat = self
        self.rank, self.number = rank, number

    def boxes(self) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        rows = SHAPE[0] // RANKS
        yield (rows * self.rank, 0), torch.full((rows, SHAPE[1]), float(self.number))


class Death:
    """Ends the process at the ``step``-th change of the disk that ``rank`` makes, in the middle of it if it writes.

    With ``alone`` only that rank stands still, and the process ends when the others come no further.
    """

    def __init__(self, rank: int, step: int, *, alone: bool) -> None:
        self.rank, self.step, self.alone = rank, step, alone
        self.count = 0
        self.dead = threading.Event()

    def due(self) -> bool:
        """Whether this is the step."""
        if getattr(_rank, "number", None) != self.rank:
            return False
        self.count += 1
        return self.count == self.step + 1

    def die(self) -> None:
        if not self.alone:
            os._exit(9)
        self.dead.set()
        threading.Event().wait()

    def before(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """``plain``, or the end."""

        def call(*args: Any, **options: Any) -> Any:
            if self.due():
                self.die()
            return plain(*args, **options)

        return call


class TornFile(io.FileIO):
    """Without buffers: what is written before the end is on the disk, the last write by half."""

    def __init__(self, path: str, death: Death) -> None:
        super().__init__(path, "wb")
        self.death = death

    def write(self, data: Any) -> int:
        raw = data.encode() if isinstance(data, str) else bytes(data)
        if self.death.due():
            super().write(raw[: len(raw) // 2])
            self.death.die()
        return super().write(raw) or 0


class Talk:
    """Exchanges values between the threads; ends the process when a dead rank is waited for, as a closed connection."""

    def __init__(self, death: Death) -> None:
        self.death = death
        self.rounds: list[dict[int, Any]] = []
        self.changed = threading.Condition()

    def of_rank(self, rank: int) -> Callable[[Any], list[Any]]:
        numbers = itertools.count()

        def exchange(value: Any) -> list[Any]:
            number = next(numbers)
            with self.changed:
                if len(self.rounds) == number:
                    self.rounds.append({})
                said = self.rounds[number]
                said[rank] = value
                self.changed.notify_all()
                while len(said) < RANKS:
                    if self.death.dead.is_set():
                        os._exit(9)
                    self.changed.wait(0.005)
            return [said[r] for r in range(RANKS)]

        return exchange


def save_by_threads(path: Path, number: int, death: Death, *, as_file: bool) -> None:
    """Save what says ``number``, every rank a thread of this process."""
    talk = Talk(death)

    def write_meta(target: str) -> None:
        with TornFile(target, death) as file:
            file.write(f"meta {number}")

    def work(rank: int) -> None:
        _rank.number = rank
        entries = [CheckpointEntry(p, torch.empty(SHAPE, device="meta"), HalfOf(rank, number)) for p in PATHS]  # type: ignore[arg-type]
        job: save.Save | save.SharedFileSave
        if as_file:
            weights = {entry.path[-1]: entry.value for entry in entries}
            job = save.SharedFileSave(str(path), {"state_dict": weights, "global_step": number}, entries)
        else:
            manifest = Manifest(step=number, epoch=0, layout={}, files={})
            job = save.Save(str(path), entries, {"torch": torch.zeros(9)}, manifest, write_meta)
        save.run(job, rank, talk.of_rank(rank))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def save_and_die(path: Path, number: int, death: Death, *, exchange: bool, as_file: bool = False) -> bool:
    """In a process of its own; whether it died."""
    return work_and_die(lambda: save_by_threads(path, number, death, as_file=as_file), death, exchange=exchange)


def work_and_die(work: Callable[[], None], death: Death, *, exchange: bool) -> bool:
    """In a process of its own; whether it died."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, 9), f"it ended with {code}"
        return code == 9
    try:
        for name in STEPS:
            setattr(os, name, death.before(getattr(os, name)))
        commit.exchange_names = death.before(commit.exchange_names if exchange else lambda a, b: False)
        plain_open = CheckpointPath.open

        def torn_open(self: CheckpointPath, name: str, mode: str) -> Any:
            if "w" not in mode:
                return plain_open(self, name, mode)
            if death.due():
                death.die()
            return TornFile(f"{self.path}/{name}", death)

        CheckpointPath.open = torn_open  # type: ignore[method-assign]
        threading.excepthook = lambda args: (traceback.print_exception(args.exc_value), os._exit(7))  # type: ignore[arg-type]
        work()
        os._exit(0)
    finally:
        os._exit(8)


def number_in(path: Path) -> int | None:
    """What the committed folder or file says, after a look at every byte; None if there is none."""
    if path.is_file():
        assert verify_all(path) == []
        found = torch.load(path, weights_only=True)
        assert torch.equal(found["state_dict"]["a"], torch.full(SHAPE, float(found["global_step"])))
        return int(found["global_step"])
    if not is_committed(path):
        return None
    manifest = read_manifest(path)
    assert verify_all(path) == []
    reader = Reader(path, manifest)
    for tensor in PATHS:
        assert torch.equal(read_range(reader, tensor, 0, 30), torch.full((30,), float(manifest.step)))
    assert (path / "meta.pt").read_text() == f"meta {manifest.step}"
    return manifest.step


@pytest.mark.parametrize(
    ("rank", "alone", "exchange", "as_file"),
    [slow(0, False, True, False), slow(0, False, False, False), slow(0, True, True, False),
     slow(1, False, True, False), (1, True, True, False), (0, False, True, True), slow(0, True, True, True),
     slow(1, False, True, True), slow(1, True, True, True)],
)  # fmt: skip
def test_a_death_at_any_step_leaves_the_save_before_or_this_one(
    tmp_path: Path, rank: int, alone: bool, exchange: bool, as_file: bool
) -> None:
    """Each save begins with what the death in the one before has left."""
    path = tmp_path / "last.ckpt"
    assert not save_and_die(path, 0, Death(-1, 0, alone=False), exchange=exchange, as_file=as_file)
    found: list[int] = [0]
    number = 0
    died = True
    while died:
        number += 1
        assert number < 200
        death = Death(rank, number - 1, alone=alone)
        died = save_and_die(path, number, death, exchange=exchange, as_file=as_file)
        if exchange:
            assert number_in(path) in (found[-1], number), f"lost its name at step {number - 1}"
        assert commit.newest([tmp_path]) == str(path)
        commit.recover(path)
        now = number_in(path)
        assert now in (found[-1], number), f"after a death at step {number - 1}: {now}"
        found.append(now)
    assert found[-1] == number
    assert number > (2 if as_file else 8), "hardly a step was counted"
    assert len(set(found)) > 2 or rank > 0, "no death after a commit"
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("rank", [slow(0), 1])
def test_a_death_in_the_first_save_leaves_it_or_nothing(tmp_path: Path, rank: int) -> None:
    path = tmp_path / "last.ckpt"
    found: list[int | None] = []
    died = True
    while died:
        for entry in tmp_path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        died = save_and_die(path, 5, Death(rank, len(found), alone=False), exchange=True)
        newest = commit.newest([tmp_path])
        commit.recover(path)
        found.append(number_in(path))
        assert newest == (None if found[-1] is None else str(path))
        assert found[-1] is not None or not path.exists()
    assert found[-1] == 5
    assert None in found


def remove_and_link(folder: Path, number: int) -> None:
    """What follows a save on rank 0: the oldest checkpoint goes, and ``last.ckpt`` is a link to the newest."""
    _rank.number = 0
    commit.remove(folder / f"step={number - 2}.ckpt")
    commit.link(folder / f"step={number}.ckpt", folder / "last.ckpt")


def test_a_death_at_any_step_of_a_removal_or_a_link_leaves_nothing_that_a_later_save_does_not_remove(
    tmp_path: Path,
) -> None:
    """A name that is removed is never saved to again, so that only another name's save can clean up after it."""
    alive, last = Death(-1, 0, alone=False), tmp_path / "last.ckpt"
    assert not save_and_die(tmp_path / "step=0.ckpt", 0, alive, exchange=True)
    assert not work_and_die(lambda: remove_and_link(tmp_path, 0), alive, exchange=True)
    number, died, left = 0, True, set()
    while died:
        number += 1
        assert not save_and_die(tmp_path / f"step={number}.ckpt", number, alive, exchange=True)
        death = Death(0, number - 1, alone=False)
        died = work_and_die(lambda n=number: remove_and_link(tmp_path, n), death, exchange=True)  # type: ignore[misc]
        left |= {entry.suffix for entry in tmp_path.iterdir() if entry.name.startswith(".")}
        assert None not in map(number_in, [last, *tmp_path.glob("[!.]*.ckpt")])
    assert left == {".saving", ".gone", ".link"}, "not every kind of leftover was seen"
    for entry in tmp_path.glob(".*.saving"):  # so old that nobody is about to sign it
        os.utime(entry, (0, 0))
    assert not save_and_die(tmp_path / f"step={number + 1}.ckpt", number + 1, alive, exchange=True)
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


# --- kill -9 ----------------------------------------------------------------------------------------------------------

LR = 2.0**-12


class Counted(pl.LightningModule):
    """After ``t`` steps every weight is ``-t * (t + 1) / 2 * LR`` and every momentum ``t``, both exact in fp32."""

    def __init__(self, die_after_s: float | None) -> None:
        super().__init__()
        self.die_after_s = die_after_s
        self.steps_here = 0
        self.blocks = nn.ModuleList([nn.Linear(40, 41) for _ in range(4)])
        for p in self.parameters():
            nn.init.zeros_(p)

    def training_step(self, batch: Tensor, i: int) -> Tensor:
        self.log("number", float(self.global_step + 1))
        total: Any = sum(block(torch.ones(1, 40)).sum() - block.weight.sum() * 0 for block in self.blocks)
        return total

    def on_train_batch_end(self, *_: Any) -> None:
        """A save in the background waits for the one before: after the third step the first one's is committed.

        And after the fourth step of all, the newest checkpoint knows of ``last.ckpt``.
        """
        self.steps_here += 1
        if self.die_after_s is not None and self.steps_here >= 3 and self.global_step >= 4:
            threading.Timer(self.die_after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
            self.die_after_s = None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LR, momentum=1.0)


def train_until_killed(
    rank: int, world_size: int, folder: Path, steps: int, die_after_s: list[float | None], options: dict[str, Any]
) -> int:
    """Go on from the newest checkpoint, and save after every step: ``last.ckpt`` again and again, and the best two."""
    quiet()
    newest = [commit.newest([folder])] if rank == 0 else [None]
    path = folder / "resume_from"
    if rank == 0:
        path.with_suffix(".tmp").write_text(newest[0] or "")
        path.with_suffix(".tmp").rename(path)
    while not path.exists():
        time.sleep(0.01)
    ckpt = path.read_text() or None
    saves = ModelCheckpoint(
        folder, "{step}", monitor="number", mode="max", save_top_k=2, every_n_train_steps=1,
        save_last=options.pop("save_last"),
    )  # fmt: skip
    strategy = ZeROStrategy(**nested({"sharding.min_unit_numel": 0, "checkpoint.format": "sharded", **options}))
    trainer = trainer_of(
        strategy, callbacks=[saves], enable_checkpointing=True, max_steps=steps, max_epochs=-1,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Counted(die_after_s[rank]), DataLoader(torch.zeros(4000), batch_size=1), ckpt_path=ckpt)
    return trainer.global_step


def check_all(folder: Path) -> int:
    """Whatever has a checkpoint's name is one, and holds its step's values; returns the newest one's step."""
    newest = commit.newest([folder])
    assert newest is not None
    last = folder / "last.ckpt"
    commit.recover(last)
    assert is_whole(last)
    steps = [check_counted(path) for path in folder.glob("[!.]*.ckpt")]
    assert saved(newest)["global_step"] >= max(steps) - 1  # two of the same save have two times
    return max(steps)


def is_whole(path: Path) -> bool:
    return is_committed(path) if path.is_dir() else zipfile.is_zipfile(path)


def check_counted(path: Path) -> int:
    assert is_whole(path), f"{path} has a name and is not whole"
    contents = saved(path)
    step = contents["global_step"]
    assert path.name in ("last.ckpt", f"step={step}.ckpt")
    assert verify_all(path) == []
    if path.is_dir():
        assert read_manifest(path).step == step
    for name, value in contents["state_dict"].items():
        assert torch.equal(value, torch.full_like(value, -step * (step + 1) / 2 * LR)), f"{path}: {name}"
    [optimizer] = contents["optimizer_states"]
    assert len(optimizer["state"]) == 8
    for name, entries in optimizer["state"].items():
        value = entries["momentum_buffer"] + 0
        assert torch.equal(value, torch.full_like(value, float(step))), f"{path}: momentum of {name}"
    return step


def kill_again_and_again(folder: Path, kills: int, seed: int, options: dict[str, Any]) -> None:
    """Every run goes on where the one before was killed; at last one ends by itself and leaves nothing else behind."""
    draw = random.Random(seed)
    step = 0
    for number in range(kills):
        after_s = draw.uniform(0, 0.3)
        victims = draw.choice([(0,), (1,), (0, 1)])
        times = [after_s if rank in victims else None for rank in range(2)]
        (folder / "resume_from").unlink(missing_ok=True)
        with pytest.raises(RankDiedError):
            spawn(
                train_until_killed, 2, folder, 10_000, times, options, init_process_group=False, timeout_s=60
            )  # fmt: skip
        found = check_all(folder)
        assert found > step, f"run {number} of seed {seed}, killed {victims} after {after_s:.3f} s, went back"
        step = found
    (folder / "resume_from").unlink(missing_ok=True)
    done = spawn(train_until_killed, 2, folder, step + 5, [None, None], options, init_process_group=False)
    assert done == [step + 5] * 2
    assert check_all(folder) == step + 5
    names = {entry.name for entry in folder.iterdir()} - {"resume_from"}
    assert names >= {"last.ckpt", f"step={step + 4}.ckpt", f"step={step + 5}.ckpt"}
    assert not [name for name in names if name.startswith(".")]


WAYS = [
    {"stage": 3, "save_last": True}, {"stage": 2, "save_last": "link"},
    {"stage": 3, "save_last": "link", "checkpoint.background": True},
    {"stage": 1, "save_last": True, "checkpoint.background": True},
    {"stage": 3, "save_last": "link", "checkpoint.background": True, "checkpoint.format": "file"},
    {"stage": 2, "save_last": True, "checkpoint.format": "file"},
]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [slow(WAYS[0]), WAYS[1], slow(WAYS[2]), WAYS[3], WAYS[4], slow(WAYS[5])],
    ids=lambda o: "-".join(map(str, o.values())),
)
def test_a_killed_run_goes_on_from_a_whole_checkpoint(tmp_path: Path, options: dict[str, Any]) -> None:
    kill_again_and_again(tmp_path, 2, random.randrange(1 << 30), options)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", WAYS, ids=lambda o: "-".join(map(str, o.values())))
def test_a_run_that_is_killed_all_the_time(tmp_path: Path, options: dict[str, Any]) -> None:
    kill_again_and_again(tmp_path, 25, random.randrange(1 << 30), options)


# --- damage -----------------------------------------------------------------------------------------------------------


def save_net(rank: int, world_size: int, path: Path) -> None:
    quiet()
    fit(3, Net(), max_epochs=1).save_checkpoint(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks."""
    path = tmp_path_factory.mktemp("whole") / "x.ckpt"
    spawn(save_net, 2, path, init_process_group=False)
    return path


FILES = ("__0_0.distcp", "__1_0.distcp", ".metadata", "index.json", "meta.pt", "manifest.json")


def flip(file: Path, at: int) -> None:
    """Change one bit."""
    with file.open("r+b") as stream:
        stream.seek(at)
        [byte] = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte ^ 1 << at % 8]))


def load_flipped(rank: int, world_size: int, path: Path, seed: int) -> list[str]:
    """Flip a bit, load, flip it back; ten places in each file. What was not noticed."""
    quiet()
    draw = random.Random(seed)
    unnoticed: list[str] = []
    for name in FILES:
        size = (path / name).stat().st_size
        for at in [0, size - 1, *(draw.randrange(size) for _ in range(8))]:
            flip(path / name, at)
            try:
                fit(3, Net(), ckpt=path)
                unnoticed.append(f"{name}[{at}] of {size}")
            except CheckpointError as error:
                if name not in str(error):
                    unnoticed.append(f"{name}[{at}]: the error does not name it: {error}")
            flip(path / name, at)
    return unnoticed


def test_a_flipped_bit_is_found_and_its_file_is_named(tmp_path: Path, whole: Path) -> None:
    shutil.copytree(whole, tmp_path / "x.ckpt")
    seed = random.randrange(1 << 30)
    assert spawn(load_flipped, 1, tmp_path / "x.ckpt", seed, init_process_group=False)[0] == [], f"seed {seed}"
    assert verify_all(tmp_path / "x.ckpt") == []


def load_damaged(rank: int, world_size: int, path: Path) -> tuple[str, str, float]:
    """The error of a load, and how long it took."""
    quiet()
    started = time.monotonic()
    with pytest.raises((CheckpointError, RankFailedError)) as caught:
        fit(2, Net(), ckpt=path)
    return type(caught.value).__name__, str(caught.value), time.monotonic() - started


DAMAGES = {
    "flipped": lambda file: flip(file, file.stat().st_size // 3),
    "cut": lambda file: os.truncate(file, file.stat().st_size - 1),
    "missing": lambda file: file.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["__1_0.distcp", "meta.pt"])
def test_damage_is_told_on_all_ranks(tmp_path: Path, whole: Path, name: str, damage: str) -> None:
    """Also where only one rank has read the damaged part."""
    path = tmp_path / "x.ckpt"
    shutil.copytree(whole, path)
    DAMAGES[damage](path / name)
    for _, message, seconds in spawn(load_damaged, 2, path, init_process_group=False, timeout_s=60):
        assert f"x.ckpt/{name}" in message
        assert seconds < wall(20)


def load_some(rank: int, world_size: int, path: Path) -> list[str]:
    return [load_damaged(rank, world_size, entry)[1] for entry in sorted(path.iterdir())]


def test_what_is_no_checkpoint_is_told_on_all_ranks(tmp_path: Path, whole: Path) -> None:
    """The manifest, or the folder, or its contents: all ranks look at these."""
    for number, name in enumerate(["manifest.json", ".metadata", "__0_0.distcp"]):
        shutil.copytree(whole, tmp_path / f"{number}.ckpt")
        (tmp_path / f"{number}.ckpt" / name).unlink()
    (tmp_path / "3.ckpt").mkdir()
    for messages in spawn(load_some, 2, tmp_path, init_process_group=False, timeout_s=60):
        assert "0.ckpt is not a committed checkpoint: it has no manifest.json" in messages[0]
        assert "1.ckpt/.metadata is missing" in messages[1]
        assert "2.ckpt/__0_0.distcp is missing" in messages[2]
        assert "3.ckpt is not a committed checkpoint" in messages[3]


# --- full disks -------------------------------------------------------------------------------------------------------


class Wide(Net):
    """About 200 KiB on the disk, with its optimizer states."""

    def build(self) -> None:
        super().build()
        self.wide = nn.Linear(8, 1500)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.wide(x)[:, :8]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], timeout=10, check=True)


@pytest.mark.parametrize(("background", "save_as"), [(False, "sharded"), (True, "sharded"), (False, "file")])
@on_ranks(2)
def test_a_full_disk_is_an_error_on_all_ranks(
    rank: int, world_size: int, background: bool, save_as: Any, small_disk: Path
) -> None:
    module = Wide()
    sharding = {"min_unit_numel": 0}
    strategy = ZeROStrategy(3, sharding=sharding, checkpoint={"format": save_as, "background": background})
    trainer = fit(strategy, module, max_epochs=1)
    trainer.save_checkpoint(small_disk / "first.ckpt")
    expected = weights(module)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"second\.ckpt failed: rank \d: OSError: .*No space left on device"):
            trainer.save_checkpoint(small_disk / "second.ckpt")
        with pytest.raises(CheckpointError, match=r"first\.ckpt failed: .*No space left.*earlier checkpoints are"):
            trainer.save_checkpoint(small_disk / "first.ckpt")
        assert [entry.name for entry in small_disk.iterdir()] == ["first.ckpt"]
        assert verify_all(small_disk / "first.ckpt") == []
        assert_equal(saved(small_disk / "first.ckpt")["state_dict"], expected, "the one before")
        dist.barrier()
    if rank == 0:
        commit.remove(small_disk / "first.ckpt")
    dist.barrier()
    trainer.save_checkpoint(small_disk / "second.ckpt")
    assert is_whole(small_disk / "second.ckpt")


@pytest.mark.parametrize("save_last", [slow(None), slow(True), "link"])
@pytest.mark.parametrize("background", [False, True])
@on_ranks(2)
def test_training_goes_on_and_removes_nothing_when_the_disk_is_full(
    rank: int, world_size: int, background: bool, save_last: Any, small_disk: Path
) -> None:
    """Of ``step=1.ckpt`` and what follows, each for the one before: there is room for one and the next one's half."""
    ballast = small_disk / "ballast"
    if rank == 0:
        ballast.write_bytes(bytes(20 * 1024 if save_last is not True else 0))
    strategy = ZeROStrategy(
        2,
        sharding={"min_unit_numel": 0},
        checkpoint={"format": "sharded", "background": background, "on_error": "continue"},
    )
    callback = ModelCheckpoint(small_disk, "{step}", every_n_train_steps=1, save_last=save_last)
    module = Wide()
    trainer = fit(strategy, module, callbacks=[callback], enable_checkpointing=True)
    assert trainer.global_step == len(module.losses) == 8
    dist.barrier()
    left = [entry for entry in small_disk.iterdir() if entry != ballast]
    assert left, "the last good checkpoint was removed"
    assert not [entry for entry in left if entry.name.startswith(".")]
    for entry in left:
        assert verify_all(entry) == [], entry
    resumed = Wide()
    step = read_manifest(left[0]).step
    assert step < 8, "there was room for all"
    fit(3, resumed, ckpt=left[0])
    assert_equal(resumed.losses, module.losses[step:], f"after {step}")


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """As a quota would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limited", [slow(0), 1])
@on_ranks(2)
def test_a_file_that_may_not_grow_is_an_error_on_all_ranks(
    rank: int, world_size: int, limited: int, tmp_path: Path
) -> None:
    module = Wide()
    trainer = fit(3, module, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    expected = weights(module)
    for nbytes in (0, 1000, 30_000):
        with (
            files_of_at_most(nbytes) if rank == limited else contextlib.nullcontext(),
            pytest.raises(CheckpointError, match=rf"failed: rank {limited}: OSError: .*File too large"),
        ):
            trainer.save_checkpoint(tmp_path / "x.ckpt")
        assert [entry.name for entry in tmp_path.iterdir()] == ["x.ckpt"]
        assert_equal(saved(tmp_path / "x.ckpt")["state_dict"], expected, "the one before")
        dist.barrier()
    trainer.validate(module, batches(), verbose=False)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
