"""States away from the device: transfers, buffers, and the stream of updates."""

from __future__ import annotations

from tests.mutations import Mutation

OFFLOAD = (
    Mutation(
        "NVMe: transfers of the same bytes may overtake each other",
        "ls_strategy/tiers/nvme.py",
        'return overlap and "write" in (self.transfer.verb, other.transfer.verb)',
        "return False",
        (
            "tests/unit/test_nvme.py::TestNVMe::test_a_get_sees_a_write_that_is_still_under_way",
            "tests/unit/test_nvme.py::TestContract::test_many_puts_of_one_range_end_with_the_last[nvme]",
        ),
    ),
    Mutation(
        "NVMe: the error of a write is dropped",
        "ls_strategy/tiers/nvme.py",
        "            self._error = self._error or transfer.error\n",
        "            pass\n",
        ("tests/unit/test_nvme.py::TestErrors::test_a_failed_write_is_raised_by_flush_and_by_everything_after_it",),
    ),
    Mutation(
        "NVMe: a buffer is free although a read into it is in flight",
        "ls_strategy/tiers/nvme.py",
        "        transfer.when_finished(lambda: self._pool.give(buffer))\n",
        "        self._pool.give(buffer)\n",
        ("tests/unit/test_nvme.py::TestNVMe::test_a_released_buffer_is_lent_again_when_its_read_is_over",),
    ),
    Mutation(
        "a buffer is used again although a copy still reads it",
        "ls_strategy/distributed/buffer_pool.py",
        "                if not copy.is_over():\n",
        "                if False:\n",
        ("tests/unit/test_comm_parts.py::test_a_pool_waits_for_copies_when_too_much_is_late",),
    ),
    Mutation(
        "gathered units are allocated among all other tensors",
        "ls_strategy/distributed/gather_memory.py",
        "if pool is None or dev.is_capturing(buffer.device):",
        "if True:",
        ("tests/simulated_device/test_gathers.py::test_addresses_repeat[of several sizes, with validation between]",),
    ),
    Mutation(
        "the stream of updates goes on with later jobs after a job has failed",
        "ls_strategy/tiers/stream.py",
        "        if job is None or self._error is not None:\n",
        "        if job is None:\n",
        ("tests/unit/test_update_stream.py::test_nothing_is_worked_on_after_a_job_that_failed",),
    ),
    Mutation(
        "a thread that is refused direct I/O fails if another thread has just fallen back",
        "ls_strategy/tiers/file_io.py",
        "                if direct and error.errno in _REFUSES_DIRECT:",
        "                if self.direct and error.errno in _REFUSES_DIRECT:",
        ("tests/unit/test_nvme.py::TestDirect::test_two_threads_that_are_refused_at_the_same_time",),
    ),
)
