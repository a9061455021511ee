"""Copies between device and host where both are the CPU, and memory for them."""

from __future__ import annotations

import pytest
import torch

from ls_strategy.tiers.arrival import DONE
from ls_strategy.tiers.link import Link, host_empty
from ls_strategy.zero.step.where_to_step import StepSpeed, measure

CPU = torch.device("cpu")


def test_copies_on_a_cpu_are_done_when_they_return() -> None:
    link, source = Link(CPU), torch.arange(4.0)
    host, target = torch.empty(4, dtype=torch.bfloat16), torch.empty(4)
    assert link.to_host(host, source) is DONE
    assert link.to_device(target, source, link.mark()) is DONE
    assert torch.equal(host.float(), source)
    assert torch.equal(target, source)


@pytest.mark.parametrize("numel", [0, 3, 1 << 19])
def test_host_memory_has_the_shape_and_dtype(numel: int) -> None:
    found = host_empty(numel, torch.float32, CPU)
    assert (found.shape, found.dtype) == ((numel,), torch.float32)
    found.fill_(2.0)


def test_large_host_memory_begins_at_a_page() -> None:
    assert host_empty(1 << 19, torch.float32, CPU).data_ptr() % 4096 == 0


def test_the_device_has_to_be_faster_than_the_noise() -> None:
    assert StepSpeed(cpu=1.0, device=0.9).device_is_faster
    assert not StepSpeed(cpu=1.0, device=0.96).device_is_faster


def test_both_ways_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ls_strategy.zero.step.where_to_step._NUMEL", 1 << 12)
    speed = measure(CPU, Link(CPU))
    assert min(speed.cpu, speed.device) > 0
    assert "billion parameters per second by the CPU" in str(speed)
