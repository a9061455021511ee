"""Host memory per parameter with every state on the CPU; and with every state on a drive, under a limit of the kernel.

The limit is a memory cgroup of version 1 (root only), which counts the page cache too; where there is none, the data
segment's (``RLIMIT_DATA``), which counts private memory. Whoever takes more is killed, or gets no memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.host_memory import LIMITS, Case, limited, measure

MIB = 1 << 20
ALLOWED = 256 * MIB
SIZES = (24, 48, 96)
"""Blocks of a million parameters."""


def writable_clear_refs() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(not writable_clear_refs(), reason="needs /proc/self/clear_refs of Linux"),
]


@pytest.mark.slow
@pytest.mark.parametrize("clip", [False, True], ids=["free", "clipped"])
@pytest.mark.parametrize(("masters", "moments"), LIMITS)
def test_all_states_on_the_host_cost_what_they_are(masters: Any, moments: str, clip: bool) -> None:
    """Masters, moments, gradients, and half a byte for what is gathered and under way. The peak, set-up included.

    The buffers under way are 64 MiB whatever the size of the model: 0.17 bytes of each of 403 million parameters.
    """
    result = measure(Case(moments, clip, blocks=96, width=1024, master_weights=masters))
    assert result["resident_per_parameter"] <= LIMITS[masters, moments], result
    assert result["peak_per_parameter"] <= LIMITS[masters, moments], result


def test_gradients_need_no_memory_where_updates_begin_at_once() -> None:
    """Without clipping a few buffers go round, also after the first step, which cannot begin early.

    What does not grow with the model (buffers under way, the allocator's own) is 25 to 40 MB, and differs by 10 MB from
    run to run: a fifth of a byte of each of 95 million parameters may not decide between 12 bytes and 14.
    """
    result = measure(Case("fp32", clip=False, blocks=160, width=384, steps=5))
    assert result["resident_per_parameter"] <= 12.0 + 1.0, result


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("clip", [False, True], ids=["free", "clipped"])
def test_a_drive_holds_what_memory_cannot(tmp_path: Path, clip: bool) -> None:
    """States of several times the memory that the kernel allows; and what is resident does not grow with the model."""
    resident: list[int] = []
    states = 0
    for blocks in SIZES:
        case = Case("fp32", clip, "zero3_nvme", blocks, 512, nvme_path=str(tmp_path), allowed_bytes=ALLOWED)
        result = limited(case)
        resident.append(result["resident_bytes"])
        states = (18 if clip else 14) * result["parameters"]
    assert states > 3 * ALLOWED  # of the largest
    assert max(resident) < ALLOWED
    assert resident[-1] - resident[0] < 48 * MIB, resident  # the states grew by a gigabyte
