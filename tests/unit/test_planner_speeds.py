"""What ``zero_auto`` takes, from predicted work and measured speeds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from ls_strategy.config import TierConfig
from ls_strategy.distributed.comm import Comm
from ls_strategy.extras.planner import micro_speeds
from ls_strategy.extras.planner.candidates import Candidate
from ls_strategy.extras.planner.forecast import Forecast
from ls_strategy.extras.planner.micro_speeds import measure
from ls_strategy.extras.planner.replay import Peak
from ls_strategy.extras.planner.speeds import SAME, Speeds, quickest
from ls_strategy.extras.planner.states import matrix_flops
from ls_strategy.extras.planner.traffic import StepTraffic
from ls_strategy.extras.planner.work import StepWork, Work
from ls_strategy.optimizers.muon import Muon

HOST = Speeds(
    flops=1e9, link=1e6, message=0.001, update=1e8, host_update=1e7, bus=1e6, overlaps=False,
)  # fmt: skip
"""Of a machine in which everything is easy to add up."""


PLAIN = Candidate(0)


def forecast(
    candidate: Candidate = PLAIN, *, flops: int = 10**9, drive: int = 0, bus: int = 0, step_flops: int = 0,
    lacks: tuple[str, ...] = (),
) -> Forecast:  # fmt: skip
    peak = Peak(device=1, cpu=0, nvme=0, at_peak={}, states={})
    work = StepWork(
        Work(flops // 2), Work(flops - flops // 2), sent=10**6, messages=10, bus=bus, stepped=10**8,
        step_flops=step_flops, steps_on_host=candidate.optimizer is not None,
    )  # fmt: skip
    return Forecast(candidate, peak, StepTraffic(10**6, 0, bus, drive), flops, seconds=None, lacks=lacks, work=work)


def test_on_the_host_all_of_a_step_adds_up():
    assert HOST.seconds(forecast().work) == pytest.approx(1 + 1 + 0.01 + 1)
    assert HOST.seconds(forecast(step_flops=2 * 10**9).work) == pytest.approx(3.01 + 2)
    costs = {"operation": 1e-3, "block": 0.1, "context": 0.2, "policy": 0.01, "handover": 0.5, "wait": 0.05}
    speeds = replace(HOST, touch=1e6, rest=0.25, **costs)
    work = StepWork(
        Work(0, 10**6, 10), Work(0, 2 * 10**6, 20), blocks=2, contexts=2, policed=4, copied=10**6, handovers=3, waits=7
    )
    passes = 3 + 0.03 + 2 * 0.1 + 2 * 0.2 + 4 * 0.01 + 1 + 3 * 0.5 + 7 * 0.05
    assert speeds.seconds(work) == pytest.approx(passes + 0.25)


def test_phases_add_up_to_a_step():
    speeds = replace(HOST, touch=1e6, operation=1e-3, block=0.1, wait=0.1, rest=0.5)
    for gathers in (False, True):
        work = replace(forecast(step_flops=10**8).work, gathers=gathers, blocks=3, waits=5)
        phases = speeds.phases(work)
        assert sum(p.seconds(overlaps=False) for p in phases.values()) + 0.5 == pytest.approx(speeds.seconds(work))


def test_an_accelerator_sends_and_copies_while_it_computes():
    device = replace(HOST, overlaps=True)
    assert device.seconds(forecast().work) == pytest.approx(1.01 + 1)
    assert device.seconds(forecast(bus=3 * 10**6).work) == pytest.approx(3 + 1)


def test_offloaded_states_are_updated_at_the_speed_of_the_host():
    offloaded = Candidate(2, TierConfig(tier="cpu"))
    assert HOST.seconds(forecast(offloaded).work) - HOST.seconds(forecast().work) == pytest.approx(9)


def test_the_lighter_one_is_taken_where_predictions_say_nothing():
    first = forecast(Candidate(0))
    seconds = HOST.seconds(first.work)
    same = forecast(Candidate(1), flops=int(1e9 * (1 - 0.9 * SAME * seconds)))
    faster = forecast(Candidate(2), flops=int(1e9 * (1 - 1.5 * SAME * seconds)))
    assert quickest([first, same], HOST) is first
    assert quickest([first, same, faster], HOST) is same
    assert quickest([first, faster], HOST) is faster
    assert quickest([first, same], HOST, SAME / 2) is same


def test_nothing_is_taken_that_another_one_beats_in_time_and_memory():
    first = forecast(Candidate(0))
    first = replace(first, peak=replace(first.peak, device=10))
    slightly = int(1e9 * (1 - 0.5 * SAME * HOST.seconds(first.work)))
    better = forecast(Candidate(1), flops=slightly)
    assert quickest([first, better], HOST) is better
    larger = replace(better, peak=replace(better.peak, device=11))
    assert quickest([first, larger], HOST) is first


def test_what_does_not_fit_is_not_taken_and_nvme_only_if_nothing_else_fits():
    fast = forecast(Candidate(0), flops=1, lacks=("1 GB of device memory",))
    drive = forecast(Candidate(3, TierConfig(tier="nvme")), flops=1, drive=1)
    slow = forecast(Candidate(3))
    assert quickest([fast, slow, drive], HOST) is slow
    assert quickest([fast, drive], HOST) is drive
    assert quickest([fast], HOST) is None


def test_the_lightest_of_several_that_need_nvme_is_taken():
    heavy = forecast(Candidate(3, TierConfig(tier="nvme")), drive=1, flops=1)
    assert quickest([heavier := replace(heavy, flops=10**12), heavy], HOST) is heavier


def test_steps_on_full_matrices_are_counted_where_an_optimizer_has_them():
    matrix, vector = torch.nn.Parameter(torch.zeros(8, 4)), torch.nn.Parameter(torch.zeros(8))
    assert matrix_flops(torch.optim.AdamW([matrix, vector])) == 0
    muon = torch.optim.Muon([matrix], ns_steps=5)
    assert matrix_flops(muon) == 2 * 5 * (2 * 4 * 4 * 8 + 4**3)
    ours = Muon([{"params": [matrix]}, {"params": [vector], "use_muon": False}])
    assert matrix_flops(ours) == 2 * Muon.tensor_cost(ours.param_groups[0], (8, 4))


def test_short_work_is_measured_over_several_turns_of_a_process_and_what_disturbs_it_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
):
    now, starts = [0.0], [0]

    def clock() -> float:
        starts[0] += 1
        return now[0]

    def work() -> None:
        now[0] += 0.001 if starts[0] < 7 else 0.004  # from the second of four attempts on

    monkeypatch.setattr(micro_speeds.time, "perf_counter", clock)
    before = now[0]
    (seconds,) = micro_speeds._seconds(Comm(None, None), torch.device("cpu"), work)
    assert seconds == pytest.approx(0.001)
    assert now[0] - before > 0.02 + 3 * 0.02 * 4


def test_one_process_measures_itself():
    speeds = measure(Comm(None, None), torch.device("cpu"), torch.float32)
    assert speeds.message == speeds.wait == 0
    assert speeds.link == speeds.bus == math.inf
    assert not speeds.overlaps
    for name in ("flops", "update", "host_update", "touch"):
        assert 1e6 < getattr(speeds, name) < 1e15
    assert 0 < speeds.operation < 0.1
    for name in ("block", "context", "policy", "handover"):
        assert 0 <= getattr(speeds, name) < 1
