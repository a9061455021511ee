"""A checkpoint folder is there in full, or not at all: at every step of a save at which the process may end."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ls_strategy.checkpoint import claim, commit
from ls_strategy.checkpoint.manifest import FORMAT, FileRecord, Manifest, is_committed, read_manifest, record_of, verify
from ls_strategy.checkpoint.place import CheckpointPath, sync_file
from ls_strategy.checkpoint.target import MANIFEST
from ls_strategy.errors import CheckpointError
from ls_strategy.layout import Box, flat_range_to_boxes
from tests.os_calls import replaced

FILES = ("__0_0.distcp", "__1_0.distcp", ".metadata", "meta.pt")


def save(path: Any, content: int, names: tuple[str, ...] = FILES) -> None:
    """As all ranks together do it; every file says ``content``."""
    save_id = commit.new_save_id()
    held = commit.begin(path, save_id)
    place = commit.staging(path, save_id)
    records: dict[str, FileRecord] = {}
    for name in names:
        with place.open(name, "wb") as file:
            file.write(f"{name} {content}".encode())
        records[name] = record_of(place, name)
    commit.commit(path, save_id, Manifest(step=content, epoch=0, layout={}, files=records))
    held.release()


def content_of(path: Any) -> int | None:
    """What the committed folder says, all files alike; None if there is none."""
    if not is_committed(path):
        return None
    manifest = read_manifest(path)
    for name, record in manifest.files.items():
        verify(path, name, record)
        with CheckpointPath(path).open(name, "rb") as file:
            assert file.read() == f"{name} {manifest.step}".encode()
    return manifest.step


def names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


# --- a process that ends ----------------------------------------------------------------------------------------------


class Ended(BaseException):
    """The process ends here: no handler of errors runs."""


STEPS = ("mkdir", "rename", "replace", "unlink", "rmdir", "symlink", "fsync")
"""Of `os`: after each of them the disk is different."""


@contextmanager
def ends_before(step: int, *, exchange: bool) -> Iterator[list[str]]:
    """Raise `Ended` instead of the ``step``-th change of the disk; gives what was done."""
    done: list[str] = []
    plain_open, plain_exchange = CheckpointPath.open, commit.exchange_names

    def counted(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if len(done) == step:
                raise Ended
            done.append(f"{name} {args[0]}")
            return plain(*args, **options)

        return call

    CheckpointPath.open = counted("open", plain_open)  # type: ignore[method-assign]
    commit.exchange_names = counted("exchange", plain_exchange if exchange else lambda a, b: False)
    try:
        with replaced({name: counted(name, getattr(os, name)) for name in STEPS}):
            yield done
    finally:
        CheckpointPath.open = plain_open  # type: ignore[method-assign]
        commit.exchange_names = plain_exchange
        claim.forget_all()


def every_end(work: Callable[[], None], prepare: Callable[[], Any], *, exchange: bool = True) -> Iterator[list[str]]:
    """Run ``work`` after ``prepare``, once for every step at which it may end, and at last to its end."""
    for step in range(200):
        prepare()
        with ends_before(step, exchange=exchange) as done:
            try:
                work()
            except Ended:
                ended = True
            else:
                ended = False
        yield done
        if not ended:
            assert step > 1, "nothing was counted"
            return
    raise AssertionError("it never ends")


@pytest.mark.sample(1)
@pytest.mark.parametrize("exchange", [True, False])
def test_a_save_that_ends_anywhere_leaves_the_one_before_or_itself(tmp_path: Path, exchange: bool) -> None:
    path = tmp_path / "last.ckpt"
    found: list[int | None] = []

    def prepare() -> None:
        for entry in tmp_path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        save(path, 1)
        assert names_in(tmp_path) == ["last.ckpt"]

    for done in every_end(lambda: save(path, 2), prepare, exchange=exchange):
        if exchange:
            assert content_of(path) in (1, 2), f"lost its name after {done[-1:]}"
        assert commit.newest([tmp_path]) == str(path), done[-1:]
        commit.recover(path)
        found.append(content_of(path))
        assert found[-1] in (1, 2), done[-1:]
        save(path, 3)
        assert content_of(path) == 3
        assert names_in(tmp_path) == ["last.ckpt"], f"left behind after {done[-1:]}"
    assert set(found) == {1, 2}
    assert found[-1] == 2
    assert found == sorted(found, key=lambda n: n or 0), "a save that was there is gone again at a later step"


def test_without_an_exchange_of_names_the_one_before_is_not_removed_before_the_new_one_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plain = tmp_path / "last.ckpt", os.rename
    save(path, 1)
    monkeypatch.setattr(commit, "exchange_names", lambda a, b: False)

    def rename(source: Any, target: Any, **options: Any) -> None:
        if Path(target).name == "last.ckpt":
            raise Ended
        plain(source, target, **options)

    with replaced({"rename": rename}), pytest.raises(Ended):
        save(path, 2)
    claim.forget_all()
    assert sorted(name.rsplit(".")[-1] for name in names_in(tmp_path)) == ["old", "partial", "saving"]
    commit.recover(path)
    assert content_of(path) == 2


def test_a_first_save_that_ends_anywhere_is_there_or_not(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "last.ckpt"
    found: list[int | None] = []

    def prepare() -> None:
        shutil.rmtree(tmp_path / "deep", ignore_errors=True)

    for done in every_end(lambda: save(path, 2), prepare):
        before_recovery = content_of(path)
        newest = commit.newest([tmp_path / "deep"])
        commit.recover(path)
        found.append(content_of(path))
        assert before_recovery in (None, found[-1])
        assert newest == (str(path) if found[-1] == 2 else None), done[-1:]
        if found[-1] is None:
            assert not path.exists(), f"a name without a checkpoint after {done[-1:]}"
        save(path, 3)
        assert names_in(tmp_path / "deep") == ["last.ckpt"]
    assert set(found) == {None, 2}
    assert found[-1] == 2


@pytest.mark.wide
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.booleans()), min_size=2, max_size=6))
def test_ends_one_after_the_other_never_go_back(ends: list[tuple[int, bool]]) -> None:
    """A run that is interrupted again and again has the last save that was committed, or a later one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "last.ckpt"
        save(path, 0)
        last = 0
        for number, (step, exchange) in enumerate(ends, 1):
            with ends_before(step, exchange=exchange), suppress(Ended):
                save(path, number)
                last = number
            with ends_before(step // 4, exchange=exchange), suppress(Ended):
                commit.recover(path)
            commit.recover(path)
            found = content_of(path)
            assert found is not None
            assert found >= last, ends[:number]
            last = found
        save(path, 100)
        assert names_in(Path(folder)) == ["last.ckpt"]


def test_a_removal_that_ends_anywhere_leaves_a_whole_one_or_none(tmp_path: Path) -> None:
    path, other = tmp_path / "step=1.ckpt", tmp_path / "step=2.ckpt"

    def prepare() -> None:
        save(path, 1)
        save(other, 2)

    for done in every_end(lambda: commit.remove(path), prepare):
        assert path.exists() == (content_of(path) == 1), f"half of it is there after {done[-1:]}"
        assert content_of(other) == 2
        assert commit.newest([tmp_path]) == str(other)
    assert names_in(tmp_path) == ["step=2.ckpt"]


def test_an_interrupted_removal_is_finished_later(tmp_path: Path) -> None:
    """By a save under another name: the one that was to go will not be saved again."""

    def prepare() -> None:
        for name in ("step=1.ckpt", "step=2.ckpt"):
            save(tmp_path / name, 1)

    for done in every_end(lambda: commit.remove(tmp_path / "step=1.ckpt"), prepare):
        save(tmp_path / "step=2.ckpt", 2)
        kept = ["step=1.ckpt"] if content_of(tmp_path / "step=1.ckpt") == 1 else []
        assert names_in(tmp_path) == [*kept, "step=2.ckpt"], f"left behind after {done[-1:]}"


@pytest.mark.parametrize("was", ["nothing", "link", "file", "folder"])
@pytest.mark.parametrize("exchange", [True, False])
def test_a_link_that_ends_anywhere_leads_to_one_of_them(tmp_path: Path, was: str, exchange: bool) -> None:
    first, second, last = (tmp_path / f"{name}.ckpt" for name in ("first", "second", "last"))
    save(first, 1)
    save(second, 2)

    def prepare() -> None:
        commit.remove(last)
        if was == "link":
            commit.link(first, last)
        elif was == "file":
            torch.save({}, last)
        elif was == "folder":
            save(last, 1)

    for done in every_end(lambda: commit.link(second, last), prepare, exchange=exchange):
        commit.recover(last)
        found = content_of(last)
        assert found in {"nothing": (None, 2), "file": (None, 2)}.get(was, (1, 2)), done[-1:]
        if was == "file" and found is None:
            assert torch.load(last) == {}
    assert last.is_symlink()
    assert last.readlink() == Path("second.ckpt")
    assert content_of(last) == 2


def test_a_link_turns_when_its_checkpoint_goes(tmp_path: Path) -> None:
    first, second, last = (tmp_path / f"{name}.ckpt" for name in ("first", "second", "last"))

    def prepare() -> None:
        save(first, 1)
        save(second, 2)
        commit.link(second, last)

    for done in every_end(lambda: commit.remove(second), prepare):
        assert content_of(last) in (1, 2), f"leads nowhere after {done[-1:]}"
    assert content_of(last) == 1


# --- what a reader accepts --------------------------------------------------------------------------------------------


def test_everything_is_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: Any) -> None:
    """Power may fail: a rename must not outrun the bytes and the names that it stands for."""
    events: list[str] = []
    plain_fsync, plain_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        events.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        plain_fsync(descriptor)

    def rename(source: Any, target: Any, **options: Any) -> None:
        events.append(f"rename {Path(target).name}")
        plain_rename(source, target, **options)

    with replaced({"fsync": fsync, "rename": rename}):
        save(tmp_path / "a.ckpt", 1)
    to_manifest, named = events.index(f"rename {MANIFEST}"), events.index("rename a.ckpt")
    assert {f"sync {name}" for name in (*FILES, f"{MANIFEST}.tmp")} <= set(events[:to_manifest])
    folder = [n for n, e in enumerate(events) if e.startswith("sync .a.ckpt.") and e.endswith(".partial")]
    assert any(to_manifest < n < named for n in folder)
    assert f"sync {tmp_path.name}" in events[named:]


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_or_cut_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.ckpt"
    save(path, 1)
    data = (path / name).read_bytes()
    (path / name).write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=rf"a\.ckpt/{name} has {len(data) - 1} bytes.*says {len(data)}"):
        read_manifest(path)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=rf"a\.ckpt/{name} is missing"):
        read_manifest(path)
    assert not is_committed(path)
    assert commit.newest([tmp_path]) is None


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    """In every file, the manifest among them."""
    path = tmp_path / "a.ckpt"
    save(path, 1)
    unnoticed: list[str] = []
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        for at in range(len(data)):
            damaged = bytearray(data)
            damaged[at] ^= 1 << at % 8
            file.write_bytes(damaged)
            try:
                for name, record in read_manifest(path).files.items():
                    verify(path, name, record)
                unnoticed.append(f"{file.name}[{at}]: {bytes(damaged[max(at - 12, 0) : at + 4])!r}")
            except CheckpointError as error:
                if "a.ckpt" not in str(error):
                    unnoticed.append(f"{file.name}[{at}] is not named: {error}")
        file.write_bytes(data)
    assert unnoticed == []


def test_a_folder_without_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save(path, 1)
    (path / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"a\.ckpt is not a committed checkpoint: it has no manifest\.json"):
        read_manifest(path)
    with pytest.raises(CheckpointError, match="not a committed checkpoint"):
        read_manifest(tmp_path / "nothing.ckpt")
    (tmp_path / "file.ckpt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="not a committed checkpoint"):
        read_manifest(tmp_path / "file.ckpt")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null", '"x"', '{"files": []}', '{"files": {}, "steq": 1}'])
def test_a_manifest_that_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.ckpt"
    save(path, 1)
    (path / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=rf"a\.ckpt/{MANIFEST} is damaged"):
        read_manifest(path)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    commit.begin(path, "id")
    commit.commit(path, "id", Manifest(0, 0, {}, {}, format=FORMAT + 1))
    with pytest.raises(CheckpointError, match="newer version"):
        read_manifest(path)


def test_a_manifest_comes_back_as_it_was() -> None:
    record = FileRecord(7, [(0, 3, 1), (3, 4, 2**32 - 1)])
    manifest = Manifest(3, 1, {"stage": 3}, {"a": record, "ü.distcp": FileRecord(0, [])}, ["x"], 12.5)
    assert Manifest.from_json(manifest.to_json()) == manifest
    json.loads(manifest.to_json().splitlines()[0])


@given(data=st.binary(max_size=300), cuts=st.lists(st.integers(0, 300), max_size=4), where=st.integers(0, 299))
@settings(max_examples=50, deadline=None)
def test_verify_names_the_stretch(data: bytes, cuts: list[int], where: int) -> None:
    bounds = sorted({0, len(data), *(min(c, len(data)) for c in cuts)})
    parts = [(a, b - a, zlib.crc32(data[a:b])) for a, b in itertools.pairwise(bounds)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "f"
        file.write_bytes(data)
        verify(folder, "f", FileRecord(len(data), parts))
        if where >= len(data):
            return
        file.write_bytes(data[:where] + bytes([data[where] ^ 4]) + data[where + 1 :])
        offset, length = next((a, n) for a, n, _ in parts if a <= where < a + n)
        with pytest.raises(CheckpointError, match=rf"/f is damaged: bytes \[{offset}, {offset + length}\)"):
            verify(folder, "f", FileRecord(len(data), parts))


# --- writing ----------------------------------------------------------------------------------------------------------


def test_a_file_that_rank_0_does_not_see_stops_the_commit(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save(path, 1)
    held = commit.begin(path, "id")
    record = {"__3_0.distcp": FileRecord(10, [(0, 10, 0)])}
    with pytest.raises(CheckpointError, match=r"__3_0\.distcp .* has None bytes as rank 0 sees it.*wrote 10"):
        commit.commit(path, "id", Manifest(2, 0, {}, record))
    commit.discard(path, "id")
    held.release()
    assert content_of(path) == 1
    assert names_in(tmp_path) == ["a.ckpt"]
    commit.discard(path, "id")  # there is nothing any more


def test_fewer_files_than_before_leave_none_of_the_others(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save(path, 1, tuple(f"__{r}_0.distcp" for r in range(8)))
    save(path, 2, ("__0_0.distcp",))
    assert names_in(path) == sorted(["__0_0.distcp", MANIFEST])


@pytest.mark.parametrize("was", ["file", "cut file", "old file", "empty file", "link", "broken link", "empty folder"])
def test_a_save_takes_the_name_of_what_was_a_checkpoint(tmp_path: Path, was: str) -> None:
    path, other = tmp_path / "a.ckpt", tmp_path / "other.ckpt"
    if was.endswith("file"):
        torch.save({"a": torch.ones(100)}, path, _use_new_zipfile_serialization=was != "old file")
        os.truncate(path, {"cut file": 200, "empty file": 0}.get(was, path.stat().st_size))
    elif was == "empty folder":
        path.mkdir()
    else:
        if was == "link":
            save(other, 5)
        path.symlink_to("other.ckpt")
    save(path, 1)
    assert content_of(path) == 1
    assert not path.is_symlink()
    assert content_of(other) == (5 if was == "link" else None), "the link's target is not touched"
    assert names_in(tmp_path) == ["a.ckpt", *(["other.ckpt"] if was == "link" else [])]


def test_saves_of_other_names_are_left_alone(tmp_path: Path) -> None:
    """Names that begin alike, and hidden files of others."""
    others = [
        ".a.ckpt", ".a.ckpt.x", ".a.ckpt.1.2.partial", ".a.ckpt-v1.id.partial", ".a.ckpt.dead.partial",
        ".b.ckpt.id.partial", "a.ckpt.old",
    ]  # fmt: skip
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / ".a.ckpt.0000dead.partial").mkdir()
    (tmp_path / ".a.ckpt.0000dead.old").mkdir()
    save(tmp_path / "a.ckpt", 1)
    assert names_in(tmp_path) == sorted([*others, "a.ckpt"])


def test_of_those_that_lost_their_name_the_newest_whole_one_gets_it(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    for number, name in enumerate(("1.old", "1.partial", "2.old", "2.partial"), 1):
        save(tmp_path / "elsewhere", number)
        (tmp_path / "elsewhere").rename(tmp_path / f".a.ckpt.0000000{name}")
    (tmp_path / ".a.ckpt.00000002.partial" / "meta.pt").unlink()
    commit.recover(path)
    assert content_of(path) == 3
    commit.recover(path)
    left = [".a.ckpt.00000001.old", ".a.ckpt.00000001.partial", ".a.ckpt.00000002.partial", "a.ckpt"]
    assert names_in(tmp_path) == left


def test_a_save_removes_what_others_left_and_nothing_that_is_needed(tmp_path: Path) -> None:
    """Another run may save to the folder at the same time, or have lost a name that can be given back."""
    needed = [".lost.ckpt.00000001.old", ".lost.ckpt.00000001.partial", ".only.ckpt.00000002.old", ".mine.old"]
    for name in needed[:3]:
        save(tmp_path / "elsewhere", 1)
        (tmp_path / "elsewhere").rename(tmp_path / name)
        long_ago = time.time() - 1e6
        for entry in (*(tmp_path / name).iterdir(), tmp_path / name):  # however old
            os.utime(entry, (long_ago, long_ago))
    busy = commit.begin(tmp_path / "busy.ckpt", "00000003")
    needed += [".busy.ckpt.00000003.partial", ".busy.ckpt.saving", ".users.saving"]
    needed += [".pipe.saving", ".other.ckpt.saving"]
    (tmp_path / ".users.saving").write_text("something else")
    os.mkfifo(tmp_path / ".pipe.saving")
    now = time.time()
    (tmp_path / ".other.ckpt.saving").touch()  # will be locked and signed in a moment
    os.utime(tmp_path / ".other.ckpt.saving", (now + 100, now + 100))
    for name in (needed[3], ".kept.ckpt.00000004.old", ".away.ckpt.00000005.old", ".dead.ckpt.00000006.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_bytes(b"x")
    save(tmp_path / "kept.ckpt", 1)
    (tmp_path / ".killed.ckpt.saving").write_text("ls_strategy some-machine pid 1 on some-host")
    (tmp_path / ".unsigned.ckpt.saving").touch()  # of a process that was killed before it signed
    os.utime(tmp_path / ".unsigned.ckpt.saving", (now - 2, now - 2))
    save(tmp_path / "new.ckpt", 2)
    assert names_in(tmp_path) == sorted([*needed, "kept.ckpt", "new.ckpt"])
    busy.release()
    commit.recover(tmp_path / "lost.ckpt")
    assert content_of(tmp_path / "lost.ckpt") == 1


def test_newest_looks_into_all_folders_and_at_files_too(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    assert commit.newest([a, b]) is None
    a.mkdir()
    assert commit.newest([a, b]) is None
    save(a / "x.ckpt", 1)
    save(b / "y.ckpt", 2)
    assert commit.newest([a, b]) == str(b / "y.ckpt")
    saved_at = read_manifest(b / "y.ckpt").saved_at
    file = a / "one.ckpt"
    file.write_bytes(b"one file")
    os.utime(file, (saved_at + 10, saved_at + 10))
    assert commit.newest([b, a]) == str(file)
    os.utime(file, (saved_at - 1000, saved_at - 1000))
    assert commit.newest([b, a]) == str(b / "y.ckpt")
    (a / "notes.txt").write_text("newer, and no checkpoint")
    (a / "broken.ckpt").symlink_to("nowhere")
    (b / "y.ckpt" / MANIFEST).unlink()
    assert commit.newest([a, b]) == str(a / "x.ckpt")


def test_remove_takes_files_links_and_folders(tmp_path: Path) -> None:
    file, folder, link = tmp_path / "file.ckpt", tmp_path / "folder.ckpt", tmp_path / "link.ckpt"
    torch.save({}, file)
    save(folder, 1)
    link.symlink_to("folder.ckpt")
    commit.remove(link)
    assert content_of(folder) == 1
    commit.remove(file)
    commit.remove(folder)
    commit.remove(folder)
    assert names_in(tmp_path) == []


def test_another_file_system(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a swap of names, and without folders of its own."""
    root = f"memory:///{request.node.name}"
    path = f"{root}/a.ckpt"
    try:
        assert commit.newest([root]) is None
        save(path, 1)
        save(path, 2)
        assert content_of(path) == 2
        assert commit.newest([root]) == path
        place = CheckpointPath(path)
        assert [CheckpointPath(path).at(e).name for e in place.parent.entries()] == ["a.ckpt"]
        save(f"{root}/b.ckpt", 1)
        CheckpointPath(f"{root}/b.ckpt").rename(place.sibling(".a.ckpt.0000dead.partial"))
        place.rename(place.sibling(".a.ckpt.0000dead.old"))
        assert commit.newest([root]) is None, "another process may be between the two renames"
        monkeypatch.setattr(commit, "_RENAMED_S", 0.0)
        assert commit.newest([root]) == path
        assert content_of(path) == 1
        (left,) = (e for e in place.parent.entries() if e.endswith(".old"))
        save(path, 3)
        assert CheckpointPath(path).at(left).exists(), "another process may be writing to it"
        monkeypatch.setattr(commit, "_ABANDONED_S", -1.0)
        save(path, 3)
        assert not CheckpointPath(path).at(left).exists()
        with place.open("meta.pt", "wb") as file:
            file.write(b"?")
        with pytest.raises(CheckpointError, match=r"memory://.*/a\.ckpt/meta\.pt has 1 bytes"):
            read_manifest(path)
        commit.remove(path)
        assert not CheckpointPath(path).exists()
        commit.remove(path)
    finally:
        CheckpointPath(root).remove()


def test_a_stream_without_descriptor_is_flushed() -> None:
    sync_file(io.BytesIO())


# --- boxes ------------------------------------------------------------------------------------------------------------


@st.composite
def ranges(draw: Any) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=5)))
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


def positions(shape: tuple[int, ...], box: Box) -> list[int]:
    """Where the box's elements are in the flattened tensor, in the box's own order."""
    flat = [0]
    for size, offset, extent in zip(shape, box.offsets, box.sizes, strict=True):
        flat = [f * size + offset + i for f in flat for i in range(extent)]
    return flat


@settings(max_examples=300)
@given(ranges())
def test_boxes_tile_the_range_in_order(example: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = example
    boxes = flat_range_to_boxes(shape, start, stop)
    assert [p for box in boxes for p in positions(shape, box)] == list(range(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    for box in boxes:
        assert len(box.offsets) == len(box.sizes) == len(shape)
        assert all(o + s <= n for o, s, n in zip(box.offsets, box.sizes, shape, strict=True))
        assert positions(shape, box) == list(range(box.start, box.stop))


@settings(max_examples=300)
@given(ranges(), st.integers(1, 40))
def test_split_boxes_are_small_and_tile_the_box(example: tuple[tuple[int, ...], int, int], limit: int) -> None:
    shape, start, stop = example
    for box in flat_range_to_boxes(shape, start, stop):
        parts = box.split(limit)
        assert [p for part in parts for p in positions(shape, part)] == list(range(box.start, box.stop))
        assert all(0 < part.numel <= limit for part in parts)
        assert all(positions(shape, part) == list(range(part.start, part.stop)) for part in parts)


def test_an_empty_range_has_no_boxes() -> None:
    for shape in ((), (0,), (3, 0), (0, 3), (4, 5)):
        assert flat_range_to_boxes(shape, 0, 0) == []
