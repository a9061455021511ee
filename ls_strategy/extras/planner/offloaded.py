"""Predict the bytes that activation offload copies, by the rules of `ls_strategy.activations.offload`.

A device with its own memory sends everything that autograd saves to storage, but need not load again what is in flight
at the end of the forward. Without such a device, that part is not copied at all. In a pipeline, the next forwards
displace it, so everything is counted as loaded again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from ls_strategy.config import ActivationOffloadConfig
from ls_strategy.extras.planner.trace import Event
from ls_strategy.extras.planner.traffic import StepTraffic


def saved_bytes(events: Iterable[Event], least: int) -> int:
    """Return the bytes that autograd keeps of the forward in ``events``, in storages of ``least`` bytes and more."""
    sizes: Counter[int] = Counter()
    saved: dict[int, int] = {}
    for kind, number, amount in events:
        if kind == "end_forward":
            break
        if kind == "bytes":
            sizes[number] += amount
            if number in saved:
                saved[number] += amount
        elif kind == "saved" and number not in saved and sizes[number] >= least:
            saved[number] = sizes[number]
    return sum(saved.values())


def with_activations(
    moved: StepTraffic,
    offload: ActivationOffloadConfig,
    *,
    saved: int,
    micro_batches: int,
    at_once: int = 1,
    cuda: bool,
) -> StepTraffic:
    """Add what offload of activations moves in a step.

    Args:
        moved: without it.
        offload: the options.
        saved: `saved_bytes` of a micro-batch.
        micro_batches: per optimizer step.
        at_once: micro-batches whose forward has run, and their backward has not.
        cuda: the device has its own memory.
    """
    away = max(at_once * saved - offload.in_flight_bytes, 0)
    back = micro_batches * (saved if away and at_once > 1 else away)
    both_ways = back + (saved * micro_batches if cuda else back)
    return replace(
        moved,
        activations=both_ways,
        bus=moved.bus + (both_ways if cuda else 0),
        drive=moved.drive + (both_ways if offload.tier == "nvme" else 0),
    )
