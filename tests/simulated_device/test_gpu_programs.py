"""The programs of `tests/gpu`, in small, without a GPU: on the simulated device, and on the CPU what that cannot do.

They are the same functions with another device, so a wrong name or option is found here. What only a GPU shows is left
to `python -m pytest -m gpu`: its kernels, its clock, NCCL, and warnings about waits.
"""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ls_strategy.ops import native
from ls_strategy.testing import _PRELOAD, spawn
from tests.dist.models import Case, same_bits
from tests.dist.ranks import assert_close, assert_equal
from tests.dist.test_parity import check_parity
from tests.gpu import kernels, memory, run
from tests.gpu.communicator import One, trained_on_ranks
from tests.gpu.programs import (
    FEATURES,
    MONITORED,
    OFFLOADS,
    RECOMPUTED,
    Reading,
    case_of,
    fitted,
    offload_programs,
    train,
    train_alone,
    trusted,
    waiting_programs,
    waits,
    write_checkpoints,
)
from tests.gpu.run import Raised, each, result
from tests.gpu.watch import LATE, SYNCHRONIZING
from tests.simulated_device import device as simulated

WIDTH = 96
SAMPLE = [*list(OFFLOADS)[::7], *RECOMPUTED]
"""Offload and recomputation; `test_fits` has the others."""


def sleeps(device: torch.device, kind: str, options: dict[str, Any]) -> Counter[int]:
    """Count the pauses of a fit with late streams, by stream."""
    streams: Counter[int] = Counter()
    fitted(device, options, late=kind, sleep=lambda: streams.update([torch.accelerator.current_stream().stream_id]))
    return streams


def sample(late: str | None) -> dict[str, tuple[Any, ...]]:
    return {name: offload_programs(late)[name] for name in SAMPLE}


@pytest.fixture(scope="module")
def on_device() -> simulated.Outcome:
    """What one process has made of all programs that the simulated device can run."""
    everything: dict[str, tuple[Any, ...]] = {name: p for name, p in FEATURES.items() if name not in MONITORED}
    everything |= sample(None)
    everything |= {f"trusted, {name}": trusted(program) for name, program in sample(None).items()}
    everything |= {f"late {kind}": (sleeps, kind, OFFLOADS[SAMPLE[0]]) for kind in LATE}
    everything |= memory.programs(WIDTH) | waiting_programs(str)
    everything["checkpoints"] = (write_checkpoints,)
    return simulated.run(each, everything)


def test_no_program_does_anything_too_early(on_device: simulated.Outcome) -> None:
    assert on_device.hazards == []
    assert [name for name, found in on_device.result.items() if isinstance(found, Raised)] == []


@pytest.mark.parametrize("name", SAMPLE)
def test_offload_changes_no_bit(on_device: simulated.Outcome, name: str) -> None:
    assert_equal(result(on_device.result, name), result(on_device.result, f"trusted, {name}"), name)


def test_pauses_are_where_the_copies_are(on_device: simulated.Outcome) -> None:
    """On side streams alone, or on the stream of the computation alone: there in forward and backward of each block."""
    side = result(on_device.result, "late side streams")
    assert 0 not in side
    assert side.total() > 5
    assert set(result(on_device.result, "late computation")) == {0}
    assert result(on_device.result, "late computation").total() == 2 * 5 * 4


def test_saves_metrics_experts_and_streams(on_device: simulated.Outcome) -> None:
    found = on_device.result
    for name in ("saved, stage 2", "saved, stage 3", "saved, stage 2, cpu, step on device"):
        end, *resumed = result(found, name)
        assert len(resumed) == 2
        for weights in resumed:
            assert_equal(weights, end, name)
    for name in ("metered", "metered, offload"):
        measured = result(found, name)
        assert measured["seen"] == {simulated.NAME}
        assert measured["mean"] == pytest.approx(sum(measured["losses"]) / 5, rel=1e-5)
    for stage in (0, 3):
        assert_close(result(found, f"experts, stage {stage}"), result(found, "experts"), "experts")
    low, full = result(found, "experts, bf16")["losses"][:3], result(found, "experts")["losses"][:3]
    assert_close(low, full, "experts in bf16", limit=0.05)
    for tier in ("cpu", "nvme"):
        assert torch.equal(result(found, f"streamed from {tier}"), result(found, "not streamed"))


@pytest.mark.parametrize("name", memory.PLANNED)
def test_the_peak_is_what_was_predicted(on_device: simulated.Outcome, name: str) -> None:
    predicted = memory.forecast(name, WIDTH).peak
    assert result(on_device.result, name)["device"] == pytest.approx(predicted.device, rel=memory.BOUND)


@pytest.mark.parametrize("name", memory.PINNED)
def test_the_host_pins_what_is_planned(on_device: simulated.Outcome, name: str) -> None:
    found = result(on_device.result, name)
    assert found["planned"] <= found["registered"] + memory.SLACK_BYTES
    assert found["registered"] <= found["planned"] + 2 * found["unit"] + memory.SLACK_BYTES


def test_one_rank_sends_saves_and_resumes(on_device: simulated.Outcome) -> None:
    found = result(on_device.result, "checkpoints")
    assert {"all_gather", "reduce_scatter"} <= found["sent"]
    assert (found["sharded, exists"], found["file, exists"]) == ("folder", "file")
    for form in ("sharded", "file"):
        assert_equal(found[f"{form}, resumed"], found[form], form)


def test_one_is_one_but_not_alone() -> None:
    one = One(1)
    assert one != 1
    assert (one == 1) is False
    assert one > 1
    assert one // 1 == 1
    assert list(range(one)) == [0]


# on the CPU ----------------------------------------------------------------------------------------------------------


class WarningOfWaits(Reading):
    """As torch warns on CUDA."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        warnings.warn(SYNCHRONIZING, stacklevel=1)
        return super().training_step(batch, batch_idx)


def counted(device: torch.device) -> dict[str, int]:
    """Count waits where every step has one."""
    modes: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.gpu.programs.Reading", WarningOfWaits)
        found = waits(device, None, "32-true", True, modes.append)
    return {**found, " ".join(modes): 0}


PRECISION_CASES = [("32-true", "clipped"), ("bf16-mixed", "clipped"), ("bf16-true", "no clipping")]


@pytest.fixture(scope="module")
def on_cpu() -> dict[str, Any]:
    """What one process has made of all programs that the simulated device cannot run."""
    everything: dict[str, tuple[Any, ...]] = {**MONITORED, "counted": (counted,), "kernels": (kernels_in_small,)}
    for precision, clip in PRECISION_CASES:
        for stage in (None, 0, 3):
            everything[f"{precision}, {stage}"] = (train, case_of(precision, clip, stage))
        everything[f"{precision}, alone"] = (train_alone, case_of(precision, clip, 3))
    return run.run(each, everything, device="cpu")


def kernels_in_small(device: torch.device) -> list[Any]:
    """Run the programs of the kernels where a few elements are many."""
    n, boundary = 4 * kernels.WINDOW + 77, 2 * kernels.WINDOW
    kernels.all_kernels(device)
    sums = [kernels.large_sum(device, n, dtype).tolist() for dtype in (torch.bfloat16, torch.float16)]
    return [sums, [n + 32, 0], kernels.large_update(device, n, boundary), broken_update(device, n, boundary)]


def broken_update(device: torch.device, n: int, boundary: int) -> list[str]:
    """Run an update that leaves everything above the boundary as it was."""
    run_update: Callable[..., None] = kernels.run

    def narrow(case: Any, buffers: Any, **options: Any) -> None:
        is_large = buffers.param.numel() == n
        run_update(case, buffers.narrow(0, boundary) if is_large else buffers, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "run", narrow)
        return kernels.large_update(device, n, boundary)


@pytest.mark.parametrize(("precision", "clip"), PRECISION_CASES)
def test_stages_are_equal_and_near_ddp(on_cpu: dict[str, Any], precision: str, clip: str) -> None:
    """The bounds in 16 bit are those of `tests/dist/test_parity.py`, which has them on two ranks."""
    ddp, zero, three, alone = (result(on_cpu, f"{precision}, {name}") for name in (None, 0, 3, "alone"))
    assert same_bits(zero, three)
    assert same_bits(zero, alone)
    if precision == "32-true":
        check_parity(case_of(precision, clip), (ddp,), (zero,))


def test_the_monitor_logs_finite_numbers(on_cpu: dict[str, Any]) -> None:
    for name in MONITORED:
        found = result(on_cpu, name)
        assert all(math.isfinite(value) for value in found.values())
        for positive in ("zero_time/step_ms", "zero/samples_per_s", "zero/grad_norm"):
            assert found[positive] > 0


def test_waits_are_counted_in_six_steps(on_cpu: dict[str, Any]) -> None:
    found = result(on_cpu, "counted")
    assert sum(found.values()) == 6
    assert "warn default" in found


def test_kernels_in_small(on_cpu: dict[str, Any]) -> None:
    if not native.available("cpu"):
        pytest.skip("no compiled kernels")
    sums, expected, different, of_broken = result(on_cpu, "kernels")
    assert sums == [expected, expected]
    assert different == []
    assert len(of_broken) == 3


def test_two_ranks_train_the_cases_of_nccl() -> None:
    cases = [case.at(stage) for case in [Case(steps=20)] for stage in (None, 3)]
    trusted_, ours = zip(*spawn(trained_on_ranks, 2, cases, "cpu", init_process_group=False), strict=True)
    check_parity(cases[0], trusted_, ours)


def test_what_is_imported_before_ranks_start_uses_no_gpu() -> None:
    """A process that has asked CUDA anything cannot be forked: the ranks of `spawn` could not use the GPU."""
    code = f"""
    import importlib, torch
    asked = []
    for owner, name in ((torch.cuda, "is_available"), (torch.cuda, "device_count"), (torch.cuda, "_lazy_init"),
                        (torch._C, "_cuda_getDeviceCount"), (torch._C, "_accelerator_getAccelerator")):
        if hasattr(owner, name):
            setattr(owner, name, lambda *args, name=name: asked.append(name) or 0)
    for name in {_PRELOAD!r}:
        importlib.import_module(name)
    assert not asked, asked
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)
