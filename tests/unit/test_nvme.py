"""Tiers: one contract for all of them, and what only the NVMe tier can get wrong."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import textwrap
import threading
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ls_strategy.config import NVMeIOConfig
from ls_strategy.errors import ConfigError, PlanError, StateError
from ls_strategy.tiers import nvme
from ls_strategy.tiers import nvme_folder as drive
from ls_strategy.tiers.base import ResidentTier
from ls_strategy.tiers.buffers import BoundedPool
from ls_strategy.tiers.file_io import DirectFile, NVMeError
from ls_strategy.tiers.nvme import NVMeTier
from ls_strategy.tiers.nvme_folder import check_path, nvme_wear
from tests.processes import Program

IO = NVMeIOConfig(block_bytes=8192, parallelism=3, queue_depth=8)
SIZES = {
    (numel, str(dtype)): (numel, dtype)
    for numel in (0, 1, 4095, 4096, 4097, 30_000)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8)
}
BIG = (30_000, "torch.float32")


MADE = []


@pytest.fixture(autouse=True)
def closed():
    yield
    while MADE:
        MADE.pop().close()


def make_nvme(directory, sizes=SIZES, *, io=IO, buffer_bytes=256 << 10, buffers=6, **options):
    """A tier that is closed after the test."""
    MADE.append(NVMeTier(directory, sizes, io=io, rank=0, buffer_bytes=buffer_bytes, buffers=buffers, **options))
    return MADE[-1]


def values(key, sizes=SIZES, seed=0):
    numel, dtype = sizes[key]
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (numel,), generator=generator).to(dtype)


def read(tier, key, start=0, stop=None):
    lease = tier.get(key, start, stop)
    result = lease.wait().clone()
    lease.release()
    return result


@pytest.fixture(params=["device", "cpu", "nvme", "nvme through the page cache"])
def tier(request, tmp_path):
    if request.param.startswith("nvme"):
        io = NVMeIOConfig(block_bytes=8192, parallelism=3, queue_depth=8, direct=request.param == "nvme")
        made = make_nvme(tmp_path, io=io)
    else:
        made = ResidentTier(SIZES, lambda numel, dtype: torch.empty(numel, dtype=dtype), request.param)
    yield made
    made.close()


class TestContract:
    """Holds for every tier."""

    def test_name_says_which(self, tier):
        assert tier.name in ("device", "cpu", "nvme")

    @pytest.mark.parametrize("key", SIZES)
    def test_a_state_that_was_never_put_is_zeros(self, tier, key):
        numel, dtype = SIZES[key]
        assert torch.equal(read(tier, key), torch.zeros(numel, dtype=dtype))

    @pytest.mark.parametrize("key", SIZES)
    def test_what_is_put_comes_back(self, tier, key):
        tier.put(key, values(key))
        tier.flush()
        assert torch.equal(read(tier, key), values(key))

    def test_states_do_not_reach_into_each_other(self, tier):
        for i, key in enumerate(SIZES):
            tier.put(key, values(key, seed=i))
        for i, key in enumerate(SIZES):
            assert torch.equal(read(tier, key), values(key, seed=i))

    def test_a_tensor_may_change_once_it_was_put(self, tier):
        given = values(BIG)
        tier.put(BIG, given)
        given.fill_(-1)
        assert torch.equal(read(tier, BIG), values(BIG))

    def test_ranges(self, tier):
        whole = values(BIG)
        tier.put(BIG, whole[8192:], 8192)
        tier.put(BIG, whole[4096:8192], 4096)
        assert torch.equal(read(tier, BIG, 0, 4096), torch.zeros(4096))
        assert torch.equal(read(tier, BIG, 4096, 12288), whole[4096:12288])
        assert torch.equal(read(tier, BIG, 28672), whole[28672:])
        assert read(tier, BIG, 4096, 4096).numel() == 0

    def test_a_loan_changed_in_place_and_put_stays_changed(self, tier):
        tier.put(BIG, values(BIG))
        lease = tier.get(BIG, 4096, 8192)
        lease.wait().add_(1)
        tier.put(BIG, lease, 4096)
        expected = values(BIG)
        expected[4096:8192] += 1
        assert torch.equal(read(tier, BIG), expected)

    def test_a_loan_may_rest_at_another_place(self, tier):
        tier.put(BIG, values(BIG))
        tier.put(BIG, tier.get(BIG, 0, 4096), 16384)
        assert torch.equal(read(tier, BIG, 16384, 20480), values(BIG)[:4096])

    def test_several_loans_at_a_time(self, tier):
        tier.put(BIG, values(BIG))
        leases = [tier.get(BIG, i * 4096, (i + 1) * 4096) for i in range(4)]
        for i, lease in reversed(list(enumerate(leases))):
            assert torch.equal(lease.wait(), values(BIG)[i * 4096 : (i + 1) * 4096])
            lease.release()

    def test_release_is_idempotent_and_need_not_wait(self, tier):
        for _ in range(30):
            lease = tier.get(BIG)
            lease.release()
            lease.release()

    def test_many_puts_of_one_range_end_with_the_last(self, tier):
        for i in range(30):
            tier.put(BIG, torch.full((30_000,), float(i)))
        assert read(tier, BIG).unique().tolist() == [29.0]

    def test_unknown_states_and_ranges_are_refused(self, tier):
        with pytest.raises(StateError, match=r"has no state 'exp_avg'.*sizes"):
            tier.get((0, "exp_avg"))
        with pytest.raises(StateError, match="it has 30000"):
            tier.get(BIG, 0, 30_001)
        with pytest.raises(StateError, match="it has 30000"):
            tier.put(BIG, torch.zeros(8192), 24576)

    def test_two_threads(self, tier):
        errors = []

        def work(key):
            try:
                for i in range(20):
                    tier.put(key, values(key, seed=i))
                    lease = tier.get(key)
                    assert torch.equal(lease.wait(), values(key, seed=i))
                    lease.wait().zero_()
                    tier.put(key, lease)
                    assert not read(tier, key).any()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=((n, "torch.float32"),)) for n in (4097, 30_000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors

    def test_close_is_idempotent_and_final(self, tier):
        tier.put(BIG, values(BIG))
        tier.close()
        tier.close()
        with pytest.raises(StateError, match="closed"):
            tier.get(BIG)


class TestResident:
    def test_memory_is_taken_at_first_use(self):
        taken = []

        def allocate(numel, dtype):
            taken.append(numel)
            return torch.empty(numel, dtype=dtype)

        tier = ResidentTier(SIZES, allocate, "cpu")
        assert taken == []
        tier.get((4097, "torch.uint8"))
        assert taken == [4097]

    def test_loans_are_views_of_the_state(self):
        tier = ResidentTier(SIZES, lambda numel, dtype: torch.empty(numel, dtype=dtype), "cpu")
        lent = tier.get(BIG, 100, 200).wait()
        assert lent.data_ptr() == tier.tensor(BIG)[100:].data_ptr()
        lent.fill_(3)
        tier.put(BIG, lent, 100)
        assert tier.tensor(BIG).sum() == 300


class TestNVMe:
    def test_gets_are_limited_by_the_buffer(self, tmp_path):
        tier = make_nvme(tmp_path, buffer_bytes=65536)
        assert (tier.buffer_bytes, tier.chunk_numel(torch.float32)) == (65536, 16384)
        with pytest.raises(StateError, match=r"at most 16384 of torch.float32 at a time. Request chunks"):
            tier.get(BIG)
        tier.put(BIG, values(BIG))  # in portions by itself
        assert torch.equal(read(tier, BIG, 16384), values(BIG)[16384:])

    def test_a_loan_that_ended_is_refused(self, tmp_path):
        tier = make_nvme(tmp_path)
        lease = tier.get(BIG)
        lease.release()
        with pytest.raises(StateError, match="released or put"):
            lease.wait()
        with pytest.raises(StateError, match="released or put"):
            tier.put(BIG, lease)

    def test_ends_inside_a_page_are_refused(self, tmp_path):
        tier = make_nvme(tmp_path, buffers=1)
        with pytest.raises(AssertionError, match="inside a page"):
            tier.put(BIG, torch.zeros(100))
        with pytest.raises(AssertionError, match="starts at 100, inside a page"):
            tier.get(BIG, 100)
        with pytest.raises(AssertionError, match="put into state"):
            tier.put(BIG, torch.zeros(30_000, dtype=torch.bfloat16))
        assert not read(tier, BIG).any()

    def test_a_get_sees_a_write_that_is_still_under_way(self, tmp_path, monkeypatch):
        tier = make_nvme(tmp_path)
        pwritev, may_write = os.pwritev, threading.Event()
        monkeypatch.setattr(os, "pwritev", lambda *args: (may_write.wait(5), pwritev(*args))[1])
        small = (4097, "torch.uint8")
        tier.put(small, values(small))
        assert not read(tier, BIG, 0, 4096).any()  # does not wait for it
        threading.Timer(0.1, may_write.set).start()
        assert torch.equal(read(tier, small), values(small))
        assert may_write.is_set()

    def test_a_released_buffer_is_lent_again_when_its_read_is_over(self, tmp_path, monkeypatch):
        tier, small = make_nvme(tmp_path, buffers=1), (4097, "torch.uint8")
        preadv, may_read = os.preadv, threading.Event()
        monkeypatch.setattr(os, "preadv", lambda *args: (may_read.wait(5), preadv(*args))[1])
        tier.get(small).release()
        threading.Timer(0.1, may_read.set).start()
        lease = tier.get(small)
        assert may_read.is_set(), "two reads into one buffer"
        lease.release()

    def test_counters(self, tmp_path):
        tier = make_nvme(tmp_path)
        tier.put(BIG, values(BIG))
        tier.flush()
        read(tier, BIG)
        padded = -(-30_000 * 4 // 4096) * 4096
        assert (tier.bytes_written, tier.bytes_read) == (padded, padded)
        assert tier.busy_s > 0

    def test_loans_survive_close(self, tmp_path):
        tier = make_nvme(tmp_path)
        tier.put(BIG, values(BIG))
        lease = tier.get(BIG)
        held = lease.wait()
        tier.close()
        assert torch.equal(held, values(BIG))
        lease.release()

    def test_all_buffers_lent_is_an_error_that_names_who_holds_them(self, tmp_path, monkeypatch):
        monkeypatch.setattr(BoundedPool, "patience_s", 0.1)
        tier = make_nvme(tmp_path, buffers=2)
        leases = [tier.get(BIG, 0, 4096), tier.get((4097, "torch.uint8"))]
        with pytest.raises(StateError, match=r"8192\) waits for a buffer: all 2 .*Held by: get of 'torch"):
            tier.get(BIG, 4096, 8192)
        leases[0].release()
        assert not read(tier, BIG, 4096, 8192).any()

    def test_get_waits_for_a_buffer_that_comes_back(self, tmp_path):
        tier = make_nvme(tmp_path, buffers=1)
        lease = tier.get(BIG)
        lease.wait()
        threading.Timer(0.05, lease.release).start()
        assert not read(tier, BIG).any()


class TestErrors:
    """A drive that fails is heard of, and nobody waits for ever."""

    def fail(self, monkeypatch, name, number):
        def call(fd, buffers, offset):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, name, call)

    def test_a_failed_read_is_raised_where_it_is_waited_for(self, tmp_path, monkeypatch):
        tier = make_nvme(tmp_path)
        with monkeypatch.context() as patch:
            self.fail(patch, "preadv", errno.EIO)
            lease = tier.get(BIG)
            with pytest.raises(
                NVMeError, match=r"reading 8192 bytes at offset \d+ failed: Input/output error.*rank0"
            ) as info:
                lease.wait()
            assert info.value.errno == errno.EIO
            lease.release()
        for _ in range(10):  # its buffer came back
            assert not read(tier, BIG).any()

    @pytest.mark.parametrize(
        ("number", "cure"), [(errno.EIO, "dmesg"), (errno.ENOSPC, "Free space"), (errno.EFBIG, "ulimit")]
    )
    def test_a_failed_write_is_raised_by_flush_and_by_everything_after_it(self, tmp_path, monkeypatch, number, cure):
        tier = make_nvme(tmp_path)
        with monkeypatch.context() as patch:
            self.fail(patch, "pwritev", number)
            tier.put(BIG, values(BIG))
            with pytest.raises(NVMeError, match=f"writing 8192 bytes at offset.*{cure}.*checkpoint") as info:
                tier.flush()
            assert info.value.errno == number
        for call in (tier.flush, lambda: tier.get(BIG), lambda: tier.put(BIG, values(BIG))):
            with pytest.raises(NVMeError):
                call()

    def test_a_read_of_what_could_not_be_written_fails(self, tmp_path, monkeypatch):
        tier = make_nvme(tmp_path)
        with monkeypatch.context() as patch:
            self.fail(patch, "pwritev", errno.EIO)
            tier.put(BIG, values(BIG))
            with pytest.raises(NVMeError):
                read(tier, BIG)

    def test_an_error_of_writing_back_from_the_page_cache_is_kept(self, tmp_path, monkeypatch):
        def refuse(fd):
            raise OSError(errno.EIO, "Input/output error")

        io = NVMeIOConfig(direct=False)
        tier = make_nvme(tmp_path, io=io)
        tier.put(BIG, values(BIG))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", refuse)
            with pytest.raises(NVMeError, match="writing back"):
                tier.flush()
        with pytest.raises(NVMeError, match="writing back"):
            tier.get(BIG)

    def test_an_error_that_nobody_asked_for_is_logged(self, tmp_path, monkeypatch, caplog):
        tier = make_nvme(tmp_path)
        self.fail(monkeypatch, "pwritev", errno.EIO)
        tier.put(BIG, values(BIG))
        with caplog.at_level(logging.ERROR, "ls_strategy.tiers"):
            tier.close()
        assert "Input/output error" in caplog.text

    def test_a_drive_that_hangs_is_an_error(self, tmp_path, monkeypatch):
        tier = make_nvme(tmp_path)
        preadv, may_read = os.preadv, threading.Event()
        monkeypatch.setattr(os, "preadv", lambda *args: (may_read.wait(5), preadv(*args))[1])
        monkeypatch.setattr("ls_strategy.tiers.file_io.STALLED_S", 0.1)
        lease = tier.get((4097, "torch.uint8"))
        with pytest.raises(StateError, match=r"no block was read or written for .*dmesg"):
            lease.wait()
        may_read.set()
        monkeypatch.setattr("ls_strategy.tiers.file_io.STALLED_S", 10.0)

    def test_a_full_drive_is_an_error_at_the_start(self, tmp_path):
        too_much = shutil.disk_usage(tmp_path).free + (1 << 30)
        with pytest.raises(PlanError, match=r"GB free, but the states on the NVMe tier need .* GB. Free space"):
            NVMeTier(tmp_path, {(0, "master"): (too_much, torch.uint8)}, io=IO, rank=0)
        assert not list(tmp_path.iterdir())
        assert not [t for t in threading.enumerate() if t.name.startswith("ls_strategy-io")]

    def test_a_missing_folder_is_an_error(self, tmp_path):
        with pytest.raises(ConfigError, match="No such file"):
            NVMeTier(tmp_path / "missing", SIZES, io=IO, rank=0)


class TestFile:
    """The file is there as long as we are, and not longer."""

    CODE = """
        import os, sys, torch
        from ls_strategy.tiers import nvme_folder as drive
        from ls_strategy.tiers.nvme import NVMeTier
        if sys.argv[2] == "named":
            drive._KEEPS_NO_NAMELESS = (drive.mount_of(drive.Path(sys.argv[1])).kind,)
        tier = NVMeTier(sys.argv[1], {(0, "master"): (100_000, torch.float32)}, rank=3)
        tier.put((0, "master"), torch.ones(100_000))
        tier.flush()
        print("ready", flush=True)
        sys.stdin.read()
    """

    def start(self, directory, kind):
        code = textwrap.dedent(self.CODE)
        process = Program(code, str(directory), kind)
        assert process.stdout.readline() == "ready\n"
        return process

    def kill(self, process):
        with process:
            process.kill()

    def test_it_has_no_name_and_kill_9_leaves_nothing(self, tmp_path):
        process = self.start(tmp_path, "nameless")
        assert not list(tmp_path.iterdir())
        held = [str(p.readlink()) for p in Path(f"/proc/{process.pid}/fd").iterdir()]
        assert any(target.startswith(str(tmp_path)) for target in held)
        self.kill(process)
        assert not list(tmp_path.iterdir())

    def test_where_it_keeps_its_name_the_next_run_clears_it(self, tmp_path, monkeypatch):
        monkeypatch.setattr(drive, "_KEEPS_NO_NAMELESS", (drive.mount_of(tmp_path).kind,))
        process = self.start(tmp_path, "named")
        assert len(list(tmp_path.iterdir())) == 1
        tier = make_nvme(tmp_path)
        assert len(list(tmp_path.iterdir())) == 2  # that of a living run stays
        tier.close()
        assert len(list(tmp_path.iterdir())) == 1
        self.kill(process)
        assert len(list(tmp_path.iterdir())) == 1
        tier = make_nvme(tmp_path)
        assert [path.name.split("-")[2] for path in tmp_path.iterdir()] == [str(os.getpid())]
        tier.close()
        assert not list(tmp_path.iterdir())

    def test_without_locks_the_process_decides(self, tmp_path, monkeypatch):
        def no_locks(fd, operation):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(drive.fcntl, "flock", no_locks)
        alive = tmp_path / f"rank0-{drive._host()}-{os.getpid()}-00000000{drive._SUFFIX}"
        dead = tmp_path / f"rank0-{drive._host()}-99999999-00000000{drive._SUFFIX}"
        elsewhere = tmp_path / f"rank0-elsewhere-99999999-00000000{drive._SUFFIX}"
        for path in (alive, dead, elsewhere, tmp_path / f"rank0{drive._SUFFIX}"):
            path.touch()
        assert drive.remove_stale(tmp_path) == [dead]

    def test_links_and_pipes_in_the_folder_are_left_alone(self, tmp_path):
        """Somebody else's, where several users share a drive."""
        victim, link = tmp_path / "victim", tmp_path / f"rank0-{drive._host()}-99999999-00000000{drive._SUFFIX}"
        victim.touch()
        link.symlink_to(victim)
        assert drive.remove_stale(tmp_path) == []
        assert link.is_symlink()

    def test_files_that_only_look_alike_are_left_alone(self, tmp_path):
        """The folder may be one that holds other things, too."""
        stale = tmp_path / f"rank3-{drive._host()}-99999999-00c0ffee{drive._SUFFIX}"
        others = [
            tmp_path / f"rank{name}{drive._SUFFIX}" for name in ("ings", "0-notes", "0-a-1-00c0ffee0", "0-a-b-00")
        ]
        for path in (stale, *others):
            path.touch()
        assert drive.remove_stale(tmp_path) == [stale]
        assert all(path.exists() for path in others)

    def test_the_folder_is_made_for_this_user_alone(self, tmp_path):
        drive.check_path(tmp_path / "nvme", 0, allow_tmpfs=True)
        assert (tmp_path / "nvme").stat().st_mode & 0o777 == 0o700

    def test_kill_9_in_the_check_of_the_folder_leaves_nothing(self, tmp_path, monkeypatch):
        found = []
        monkeypatch.setattr(os, "fsync", lambda fd: found.append(list(tmp_path.iterdir())))
        drive.check_path(tmp_path, 0, allow_tmpfs=True)
        assert found == [[]]

    def test_without_nameless_files_it_is_unlinked(self, tmp_path, monkeypatch):
        monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # "Is a directory", as old kernels say
        tier = make_nvme(tmp_path)
        assert not list(tmp_path.iterdir())
        tier.put(BIG, values(BIG))
        assert torch.equal(read(tier, BIG), values(BIG))

    def test_close_gives_space_back_though_a_forked_process_holds_the_file(self, tmp_path):
        tier = make_nvme(tmp_path)
        kept = os.dup(tier._file.fd)
        assert os.fstat(kept).st_blocks > 0
        tier.close()
        assert os.fstat(kept).st_blocks == 0
        os.close(kept)


class TestDirect:
    """Direct I/O where it is possible."""

    def test_a_file_system_that_refuses_it_at_opening(self, tmp_path, monkeypatch, caplog):
        def refuse(self, direct):
            raise OSError(errno.EINVAL, "Invalid argument")

        monkeypatch.setattr(DirectFile, "_set_direct", refuse)
        with caplog.at_level(logging.WARNING, "ls_strategy.tiers"):
            tier = make_nvme(tmp_path)
        tier.put(BIG, values(BIG))
        tier.flush()
        assert torch.equal(read(tier, BIG), values(BIG))
        tier.close()
        assert caplog.text.count("refuses direct I/O (Invalid argument)") == 1

    @pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
    def test_a_file_system_that_refuses_it_at_the_first_block(self, tmp_path, monkeypatch, caplog, number):
        tier = make_nvme(tmp_path)
        pwritev = os.pwritev

        def call(fd, buffers, offset):
            if tier._file.direct:
                raise OSError(number, os.strerror(number))
            return pwritev(fd, buffers, offset)

        monkeypatch.setattr(os, "pwritev", call)
        with caplog.at_level(logging.WARNING, "ls_strategy.tiers"):
            tier.put(BIG, values(BIG))
            tier.flush()
        assert torch.equal(read(tier, BIG), values(BIG))
        assert not tier._file.direct
        tier.close()
        assert caplog.text.count("refuses direct I/O") == 1

    def test_two_threads_that_are_refused_at_the_same_time(self, tmp_path, monkeypatch):
        """The second one learns of it after the first one has fallen back."""
        file = DirectFile(os.open(tmp_path / "states", os.O_RDWR | os.O_CREAT), "states", direct=False)
        file.direct = True
        pwritev, refused, both, fallen_back = os.pwritev, set(), threading.Event(), threading.Event()
        set_direct = DirectFile._set_direct

        def falling_back(own, direct):
            set_direct(own, direct)
            fallen_back.set()

        def call(fd, buffers, offset):
            if offset in refused:
                return pwritev(fd, buffers, offset)
            refused.add(offset)
            (both if offset == 0 else fallen_back).wait(60)
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")

        monkeypatch.setattr(DirectFile, "_set_direct", falling_back)
        monkeypatch.setattr(os, "pwritev", call)
        page = memoryview(bytearray(b"x" * 4096))
        with ThreadPoolExecutor(2) as threads:
            moves = [threads.submit(file.write, page, offset) for offset in (0, 4096)]
            while len(refused) < 2:
                time.sleep(0.001)
            both.set()
            for move in moves:
                move.result(60)
        file.close()


class TestCheckPath:
    def test_it_makes_the_folder_and_leaves_nothing_in_it(self, tmp_path):
        check_path(tmp_path / "a" / "b", 1 << 20)
        assert not list((tmp_path / "a" / "b").iterdir())

    def test_empty(self):
        with pytest.raises(ConfigError, match="Set nvme_path"):
            check_path("", 0)

    def test_a_file(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match="is a file"):
            check_path(tmp_path / "file", 0)
        with pytest.raises(ConfigError, match="cannot be created: Not a directory"):
            check_path(tmp_path / "file" / "folder", 0)

    @pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
    def test_a_folder_that_cannot_be_written(self, tmp_path, monkeypatch, number):
        def refuse(path, *args, **kwargs):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises(ConfigError, match=rf"cannot be written: {os.strerror(number)}.*this user may write to"):
            check_path(tmp_path, 0)

    def test_too_small(self, tmp_path, monkeypatch):
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(drive.shutil, "disk_usage", lambda path: usage(10**12, 9 * 10**11, 10**11))
        check_path(tmp_path, 10**11)
        with pytest.raises(PlanError, match=r"has 100.0 GB free, but the states on the NVMe tier need 100.1 GB"):
            check_path(tmp_path, 10**11 + 10**8)

    @pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs")
    def test_host_memory_is_refused(self, tmp_path):
        folder = Path("/dev/shm") / f"ls_strategy-{os.getpid()}"
        try:
            with pytest.raises(ConfigError, match=r"is on /dev/shm \(tmpfs\), in host memory.*nvme_allow_ram"):
                check_path(folder, 0)
            check_path(folder, 0, allow_tmpfs=True)
            tier = make_nvme(folder)
            tier.put(BIG, values(BIG))
            tier.flush()
            assert torch.equal(read(tier, BIG), values(BIG))
            tier.close()
        finally:
            shutil.rmtree(folder)

    @pytest.mark.parametrize(
        ("mount", "expected"),
        [
            (drive.Mount("/dev/nvme0n1", "/", "ext4", "rw"), False),
            (drive.Mount("/dev/zram0", "/", "ext4", "rw"), True),
            (drive.Mount("tmpfs", "/", "tmpfs", "rw"), True),
            (drive.Mount("overlay", "/", "overlay", "rw,lowerdir=/a,upperdir=/not/visible"), False),
            (drive.Mount("overlay", "/", "overlay", "rw,lowerdir=/a,upperdir=/dev/shm,workdir=/w"), True),
        ],
    )
    def test_what_is_memory(self, mount, expected):
        assert drive.in_memory(mount) is expected

    def test_mounts(self, tmp_path, monkeypatch):
        table = (
            f"a / ext4 rw 0 0\nb {tmp_path}/with\\040space xfs rw 0 0\nc / btrfs rw 0 0\nd {tmp_path}/wit zfs rw 0 0\n"
        )
        monkeypatch.setattr(Path, "read_text", lambda self, **kwargs: table)
        assert drive.mount_of(tmp_path / "with space" / "x").kind == "xfs"
        assert drive.mount_of(tmp_path / "without").kind == "btrfs"  # the later of two on one point

    def test_wear(self):
        assert "84.0 GB per rank" in nvme_wear(84 * 10**9)
        assert "about 7,143 such steps" in nvme_wear(84 * 10**9)
        assert nvme_wear(0) == "A step writes nothing to NVMe."


def test_extents_tile_the_file():
    offsets, end = nvme.extents(SIZES)
    ordered = sorted((offsets[key], numel * dtype.itemsize) for key, (numel, dtype) in SIZES.items())
    for (begin, nbytes), (following, _) in zip(ordered, [*ordered[1:], (end, 0)], strict=True):
        assert begin % 4096 == 0
        assert begin + nbytes <= following < begin + nbytes + 4096
