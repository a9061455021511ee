"""What a forecast counts: bytes on their ways, memory of the host, and times."""

from __future__ import annotations

import torch

from ls_strategy.config import OffloadConfig, ShardingConfig, ZeROConfig
from ls_strategy.extras.planner.forecast import lacks_of
from ls_strategy.extras.planner.states import ModelStates
from ls_strategy.extras.planner.traffic import traffic
from ls_strategy.precision import resolve_precision
from tests.unit.test_planner import Net, exact, forecasts_of, question


def test_both_bounds_of_the_time_count_what_is_sent() -> None:
    for forecast in question().forecasts(exact(None, tflops=1e3, link_gbs=1e-6)):
        sent_s = forecast.traffic.sent / 1e3
        assert forecast.seconds is not None
        assert forecast.seconds[0] == sent_s, "overlapped"
        assert forecast.seconds[1] > sent_s, "one after the other"


def test_offloaded_gradients_cross_the_bus_in_every_micro_batch() -> None:
    module = Net()
    states = ModelStates(module, [torch.optim.AdamW(module.parameters())], resolve_precision("32-true"))
    config = ZeROConfig(stage=2, offload=OffloadConfig(optimizer="cpu"), sharding=ShardingConfig(min_unit_numel=0))
    plan = states.plan(config, 2)
    one, three = (traffic(plan, (8.0,), micro_batches=n, cuda=True).bus for n in (1, 3))
    averages = plan.bytes_by_tier((8.0,))["cpu"]["gradients"]
    assert three - one == 2 * averages > 0


def test_passes_wait_for_what_is_gathered_and_for_what_is_updated_meanwhile() -> None:
    """Not for gradients that are averaged in backward, nor for new parameters that are sent at once."""
    work = {f.candidate.name: f.work for f in question().forecasts(exact(None, device="cpu"))}
    units = work["zero2"].messages // 2
    again = work["zero3"].messages - 2 * units
    assert again > 0
    waits = {name: work[name].waits for name in ("zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")}
    assert waits == {
        "zero0": 0, "zero1": 0, "zero2": 0, "zero2_offload": 2 * units,
        "zero3": units + again, "zero3_offload": 2 * units + again,
    }  # fmt: skip


def test_a_policy_decides_about_every_operation_of_a_block_twice() -> None:
    """Also about those whose results are kept, which do not run again."""
    work = {f.candidate.name: f.work for f in question().forecasts(exact(None, device="cpu"))}
    full, selective = work["zero2, full recompute"], work["zero2, selective recompute"]
    assert selective.policed == 2 * (full.backward.operations - work["zero2"].backward.operations)
    assert selective.backward.operations < full.backward.operations


def test_activations_that_stay_in_memory_take_no_time() -> None:
    """On a host, they are copied from a number of bytes in flight on, and by the thread that trains."""
    work = {f.candidate.name: f.work for f in question().forecasts(exact(None, device="cpu"))}
    assert work["zero3_offload, full recompute"].handovers > 0
    assert work["zero3_offload, full recompute, activations on the host"] == work["zero3_offload, full recompute"]


def test_on_cpus_what_is_offloaded_takes_the_same_memory() -> None:
    (peak,) = (forecast.peak for forecast in forecasts_of() if forecast.candidate.name == "zero2_offload")
    assert peak.cpu > 0
    lacks = [lacks_of(peak, exact(peak.device + peak.cpu - less, device="cpu")) for less in (0, 1)]
    assert lacks[0] == ()
    assert lacks[1][0].endswith("host memory")
