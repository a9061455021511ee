"""The engine that reads and writes files, and its memory."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from ls_strategy.config import NVMeIOConfig
from ls_strategy.errors import ConfigError, StateError
from ls_strategy.tiers import file_io
from ls_strategy.tiers.buffers import PAGE, AlignedBuffer, BoundedPool
from ls_strategy.tiers.file_io import DirectFile, IOEngine, NVMeError

NBYTES = 64 * PAGE


@pytest.fixture
def file(tmp_path):
    fd = os.open(tmp_path / "states", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, NBYTES)
    made = DirectFile(fd, "states", direct=True)
    yield made
    made.close()


@pytest.fixture
def engine():
    made = IOEngine(NVMeIOConfig(block_bytes=2 * PAGE, parallelism=3, queue_depth=4))
    yield made
    made.close()


def filled():
    buffer = AlignedBuffer(NBYTES)
    buffer.tensor.copy_(torch.randint(256, (NBYTES,), dtype=torch.uint8))
    return buffer


def written_and_read(file, engine, source):
    engine.write(file, source.view, 0).wait()
    target = AlignedBuffer(NBYTES)
    engine.read(file, target.view, 0).wait()
    return target.tensor


class TestMemory:
    def test_buffers_begin_at_pages_and_hold_zeros(self):
        buffer = AlignedBuffer(5000)
        assert buffer.nbytes == 8192
        assert buffer.tensor.data_ptr() % PAGE == 0
        assert not buffer.tensor.any()

    def test_elements_are_a_view(self):
        buffer = AlignedBuffer(PAGE)
        buffer.elements(7, torch.bfloat16).fill_(1)
        assert buffer.tensor[:14].any()
        assert not buffer.tensor[14:].any()

    def test_tensors_keep_their_memory(self):
        tensor = AlignedBuffer(1 << 20).elements(1000, torch.float32)
        assert tensor.fill_(2).sum() == 2000

    def test_a_forked_process_does_not_share_it(self):
        buffer = AlignedBuffer(1 << 20)
        buffer.tensor.fill_(1)
        address = f"{buffer.tensor.data_ptr():x}-"
        with open("/proc/self/smaps") as maps:  # noqa: PTH123
            flags = maps.read().split(address)[1].split("VmFlags:")[1].splitlines()[0].split()
        assert "dc" in flags

    def test_pool_hands_out_a_fixed_number(self):
        pool = BoundedPool(2, PAGE)
        pool.patience_s = 0.05
        first, second = pool.take("first"), pool.take("second")
        assert first is not second
        with pytest.raises(StateError, match=r"third waits for a buffer.*Held by: first; second"):
            pool.take("third")
        pool.give(first)
        assert pool.take("third") is first

    def test_pool_waits_as_long_as_others_move(self):
        pool = BoundedPool(1, PAGE)
        pool.patience_s = 0.2
        buffer, taken = pool.take("first"), []

        def pass_on():
            nonlocal buffer
            for _ in range(4):
                time.sleep(0.1)
                pool.give(buffer)
                buffer = pool.take("again")
            pool.give(buffer)

        thread = threading.Thread(target=pass_on)
        thread.start()
        taken.append(pool.take("patient"))
        pool.give(taken[0])
        thread.join()

    def test_pool_that_is_closed(self):
        pool = BoundedPool(1, PAGE)
        buffer = pool.take("first")
        pool.close()
        pool.give(buffer)
        with pytest.raises(StateError, match="closed"):
            pool.take("second")


class TestEngine:
    def test_bytes_come_back(self, file, engine):
        source = filled()
        assert torch.equal(written_and_read(file, engine, source), source.tensor)
        assert (engine.bytes_written, engine.bytes_read) == (NBYTES, NBYTES)

    def test_short_calls_are_continued(self, file, engine, monkeypatch):
        pwritev, preadv, calls = os.pwritev, os.preadv, []

        def short(call):
            def moved(fd, buffers, offset):
                assert offset % PAGE == 0
                calls.append(offset)
                # Up to two pages were asked for: one and a half, of which half a page has to be done again, or one.
                result = call(fd, [memoryview(buffers[0])[: max(len(buffers[0]) // 2, PAGE)]], offset)
                return result + PAGE // 2 if len(buffers[0]) > result else result

            return moved

        monkeypatch.setattr(os, "pwritev", short(pwritev))
        monkeypatch.setattr(os, "preadv", short(preadv))
        source = filled()
        assert torch.equal(written_and_read(file, engine, source), source.tensor)
        assert len(calls) == 2 * 64

    def test_short_calls_of_the_page_cache_may_end_anywhere(self, tmp_path, engine, monkeypatch):
        fd = os.open(tmp_path / "states", os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(fd, 0, NBYTES)
        file = DirectFile(fd, "states", direct=False)
        pwritev, preadv = os.pwritev, os.preadv
        monkeypatch.setattr(os, "pwritev", lambda fd, b, offset: pwritev(fd, [b[0][:1000]], offset))
        monkeypatch.setattr(os, "preadv", lambda fd, b, offset: preadv(fd, [b[0][:999]], offset))
        source = filled()
        assert torch.equal(written_and_read(file, engine, source), source.tensor)
        file.close()

    def test_calls_that_move_nothing_end(self, file, engine, monkeypatch):
        monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: 0)
        with pytest.raises(NVMeError, match="writing 8192 bytes"):
            engine.write(file, filled().view, 0).wait()

    def test_a_file_that_was_cut_is_an_error(self, file, engine):
        os.ftruncate(file.fd, NBYTES - PAGE)
        with pytest.raises(NVMeError, match=f"reading 4096 bytes at offset {NBYTES - PAGE}"):
            engine.read(file, filled().view, 0).wait()

    def test_no_more_than_the_queue_depth_is_under_way(self, file, engine, monkeypatch):
        pwritev, may_write = os.pwritev, threading.Event()
        monkeypatch.setattr(os, "pwritev", lambda *args: (may_write.wait(5), pwritev(*args))[1])
        source, transfers = filled(), []
        thread = threading.Thread(target=lambda: transfers.append(engine.write(file, source.view, 0)))
        thread.start()
        time.sleep(0.1)
        assert thread.is_alive()
        assert engine._unfinished == 4
        may_write.set()
        thread.join()
        transfers[0].wait()

    def test_callbacks_come_once_before_those_who_wait(self, file, engine):
        seen = []
        transfer = engine.transfer(file, "write")
        transfer.when_finished(lambda: seen.append("first"))
        engine.submit(transfer, filled().view, 0)
        transfer.wait()
        assert seen == ["first"]
        transfer.when_finished(lambda: seen.append("late"))
        assert seen == ["first", "late"]

    def test_close_finishes_what_was_queued(self, file):
        engine = IOEngine(NVMeIOConfig(block_bytes=PAGE, parallelism=1, queue_depth=100))
        source = filled()
        transfer = engine.write(file, source.view, 0)
        engine.close()
        assert transfer.finished.is_set()
        with pytest.raises(StateError, match="closed"):
            engine.write(file, source.view, 0)

    def test_who_waits_for_room_hears_of_a_drive_that_hangs(self, file, engine, monkeypatch):
        pwritev, may_write = os.pwritev, threading.Event()
        monkeypatch.setattr(os, "pwritev", lambda *args: (may_write.wait(5), pwritev(*args))[1])
        monkeypatch.setattr(file_io, "STALLED_S", 0.1)
        transfer = engine.transfer(file, "write")
        with pytest.raises(StateError, match="and 4 are waiting"):
            engine.submit(transfer, filled().view, 0)
        monkeypatch.setattr(file_io, "STALLED_S", 10.0)
        may_write.set()
        with pytest.raises(StateError):
            transfer.wait()

    def test_options(self):
        with pytest.raises(ConfigError, match="multiple of 4096"):
            NVMeIOConfig(block_bytes=5000)
        with pytest.raises(ConfigError, match="from 1 to 1,024"):
            NVMeIOConfig(parallelism=0)
