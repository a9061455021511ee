"""Memory and time on several GPUs: no retries of the allocator, and at most a tenth more than torch's own sharding."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.step_time import Setting, measure
from ls_strategy.testing import spawn
from tests.gpu.memory import BOUND, forecast
from tests.gpu.test_memory import WIDTH, WORKSPACE_BYTES
from tests.gpus.suite import TIMEOUT_S, allocator, case_of, peaks

DEVICE = "cuda"
STEP_OVER_FSDP2 = 1.1


def test_the_allocator_never_tries_again_and_shards_take_less(ranks: int) -> None:
    case = replace(case_of(DEVICE, "bf16-true"), width=1024, blocks=8, steps=5)
    peaks = []
    for stage in (0, 1, 3):
        found = spawn(allocator, ranks, case.at(stage), init_process_group=False)
        assert [each["retries"] for each in found] == [0] * ranks
        peaks.append(max(each["peak"] for each in found))
    assert peaks[0] > peaks[1] > peaks[2]


def test_the_peak_of_every_rank_is_what_was_predicted(ranks: int) -> None:
    """Notices a buffer that is allocated twice, or kept, and a state that every rank holds in full."""
    for found in spawn(peaks, ranks, DEVICE, WIDTH, init_process_group=False, timeout_s=TIMEOUT_S):
        for name, peak in found.items():
            predicted = forecast(name, WIDTH, ranks).peak.device
            assert (1 - BOUND) * predicted <= peak <= (1 + BOUND) * predicted + WORKSPACE_BYTES, name


def test_a_step_of_stage_3_takes_at_most_a_tenth_more_than_fsdp2(ranks: int) -> None:
    """Both take turns in the same processes."""
    setting = Setting("350M", rounds=12, batch=4, block=512, device="cuda", steps=10)
    rows = measure(setting, ranks, ["fsdp2", "zero3"])["contenders"]
    assert rows["zero3"]["ratio"] <= STEP_OVER_FSDP2, rows
