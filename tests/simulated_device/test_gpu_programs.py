"""The programs and tests of `tests/gpu`, in small, without a GPU: on the simulated device, or on the CPU.

They are the same functions with another device, so a wrong name or option is found here. What only a GPU shows is left
to ``python -m pytest -m gpu``: its kernels, its clock, NCCL, and torch's warnings about waits.
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
from tests.dist.test_parity import check_parity
from tests.gpu import kernels, memory, run, test_features, test_memory, test_nccl, test_offload, test_parity, test_waits
from tests.gpu.communicator import One, trained_on_ranks
from tests.gpu.programs import (
    FEATURES,
    METERED,
    MONITORED,
    OFFLOADS,
    PRECISIONS,
    RECOMPUTED,
    SAVED,
    WAITING,
    Reading,
    fitted,
    offload_programs,
    trusted,
    waiting_programs,
    waits,
    write_checkpoints,
)
from tests.gpu.run import Raised, each, result
from tests.gpu.watch import LATE, SYNCHRONIZING
from tests.simulated_device import device as simulated

pytestmark = pytest.mark.wide

WIDTH = 96
SAMPLE = [*list(OFFLOADS)[::7], *RECOMPUTED]
"""Offload and recomputation; `test_fits` has the others."""


def sleeps(device: torch.device, kind: str, options: dict[str, Any]) -> Counter[int]:
    """Count the pauses of a fit with late streams, by stream."""
    streams: Counter[int] = Counter()
    fitted(device, options, late=kind, sleep=lambda: streams.update([torch.accelerator.current_stream().stream_id]))
    return streams


@pytest.fixture(scope="module")
def on_device() -> simulated.Outcome:
    """What one process has made of all programs that the simulated device can run."""
    sample = {name: offload_programs(None)[name] for name in SAMPLE}
    everything: dict[str, tuple[Any, ...]] = {name: p for name, p in FEATURES.items() if name not in MONITORED}
    everything |= sample | {f"trusted, {name}": trusted(program) for name, program in sample.items()}
    everything |= {f"late {kind}": (sleeps, kind, OFFLOADS[SAMPLE[0]]) for kind in LATE}
    everything |= memory.programs(WIDTH) | waiting_programs(str)
    everything["checkpoints"] = (write_checkpoints,)
    return simulated.run(each, everything)


def test_no_program_does_anything_too_early(on_device: simulated.Outcome) -> None:
    assert on_device.hazards == []
    assert [found.text for found in on_device.result.values() if isinstance(found, Raised)] == []


@pytest.mark.parametrize("name", SAMPLE)
def test_offload_changes_no_bit(on_device: simulated.Outcome, name: str) -> None:
    resident = {name: result(on_device.result, f"trusted, {name}")}
    test_offload.test_offload_changes_no_bit(name, on_device.result, resident)


def test_pauses_are_where_the_copies_are(on_device: simulated.Outcome) -> None:
    """On side streams alone, or on the stream of the computation alone: there in forward and backward of each block."""
    side, computation = (result(on_device.result, f"late {kind}") for kind in ("side streams", "computation"))
    assert 0 not in side
    assert side.total() > 5
    assert set(computation) == {0}
    assert computation.total() == 2 * 5 * 4


def test_what_users_do_besides(on_device: simulated.Outcome) -> None:
    for name in SAVED:
        test_features.test_a_save_in_the_background_is_that_of_its_step(on_device.result, name)
    for name in METERED:
        test_features.test_metrics_are_on_the_device(on_device.result, name)
    for stage in (0, 3):
        test_features.test_experts_train_as_in_a_plain_trainer(on_device.result, stage)
    test_features.test_experts_train_in_bf16(on_device.result)
    for tier in ("cpu", "nvme"):
        test_features.test_streamed_inference_is_that_of_the_resident_model(on_device.result, tier)


@pytest.mark.parametrize("name", memory.PLANNED)
def test_the_peak_is_what_was_predicted(on_device: simulated.Outcome, name: str) -> None:
    """Closer than on a GPU, whose libraries take memory too."""
    predicted = memory.forecast(name, WIDTH).peak.device
    assert predicted <= result(on_device.result, name)["device"] <= 1.02 * predicted


@pytest.mark.parametrize("name", memory.PINNED)
def test_the_host_pins_what_is_planned(on_device: simulated.Outcome, name: str) -> None:
    test_memory.test_the_host_pins_what_is_planned(on_device.result, name)


def test_one_rank_sends_saves_and_resumes(on_device: simulated.Outcome) -> None:
    test_nccl.test_one_rank_sends_saves_and_resumes(result(on_device.result, "checkpoints"))


def test_one_is_one_but_not_alone() -> None:
    one = One(1)
    assert one != 1
    assert one > 1
    assert one // 1 == 1
    assert list(range(one)) == [0]


# on the CPU ----------------------------------------------------------------------------------------------------------


class Warns(Reading):
    """As torch does when it waits for CUDA."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        warnings.warn(SYNCHRONIZING, stacklevel=1)
        return super().training_step(batch, batch_idx)


def counted(device: torch.device) -> tuple[list[str], dict[str, int]]:
    """Count waits where every step has one."""
    modes: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.gpu.programs.Reading", Warns)
        return modes, waits(device, None, "32-true", True, modes.append)


@pytest.fixture(scope="module")
def on_cpu() -> dict[str, Any]:
    """What one process has made of all programs that the simulated device cannot run."""
    everything: dict[str, tuple[Any, ...]] = {**MONITORED, "counted": (counted,), "kernels": (kernels_in_small,)}
    everything |= {name: p for name, p in test_parity.programs().items() if ", clipped" in name}
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


@pytest.mark.parametrize("precision", PRECISIONS)
def test_parity_with_ddp(on_cpu: dict[str, Any], precision: str) -> None:
    test_parity.test_stages_are_equal_bit_for_bit(on_cpu, precision, "clipped")
    if precision == "32-true":
        test_parity.test_fp32_is_ddp_up_to_the_order_of_sums(on_cpu, 3, "clipped")
    else:
        test_parity.test_16_bit_error_is_at_most_twice_ddps(on_cpu, precision, "clipped", 3)


def test_the_monitor_logs_finite_numbers(on_cpu: dict[str, Any]) -> None:
    for name in MONITORED:
        found = result(on_cpu, name)
        assert all(math.isfinite(value) for value in found.values())
        for positive in ("zero_time/step_ms", "zero/samples_per_s", "zero/grad_norm"):
            assert found[positive] > 0


def test_waits_are_counted_in_six_steps(on_cpu: dict[str, Any], on_device: simulated.Outcome) -> None:
    modes, lines = result(on_cpu, "counted")
    assert sum(lines.values()) == test_waits.STEPS
    assert modes == ["warn", "default"]
    for name in WAITING:
        test_waits.test_training_waits_for_the_device_once_a_step(on_device.result, name)
    found = {**on_device.result, "reading": lines}
    test_waits.test_a_wait_in_every_step_is_counted(found)


def test_kernels_in_small(on_cpu: dict[str, Any]) -> None:
    if not native.available("cpu"):
        pytest.skip("no compiled kernels")
    sums, expected, different, of_broken = result(on_cpu, "kernels")
    assert sums == [expected, expected]
    assert different == []
    assert len(of_broken) == 3


def test_two_ranks_train_the_cases_of_nccl() -> None:
    case = test_nccl.CASES[0]
    cases = [case.at(stage) for stage in (None, 3)]
    ddp, ours = zip(*spawn(trained_on_ranks, 2, cases, "cpu", init_process_group=False), strict=True)
    check_parity(case, ddp, ours)


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
