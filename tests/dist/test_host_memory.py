"""Host memory per parameter with every state on the CPU; and with every state on a drive, under a limit of the kernel.

The limit is a memory cgroup of version 1 (root only), which counts the page cache too; where there is none, the data
segment's (``RLIMIT_DATA``), which counts private memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.bench.host_memory import LIMITS, Case, measure

ROOT = Path(__file__).parents[2]
CGROUP = Path("/sys/fs/cgroup/memory")
MIB = 1 << 20

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc of Linux")


@pytest.mark.slow
@pytest.mark.parametrize("clip", [False, True], ids=["free", "clipped"])
@pytest.mark.parametrize("moments", LIMITS)
def test_all_states_on_the_host_cost_what_they_are(moments: str, clip: bool) -> None:
    """Masters, moments, gradients, and half a byte for what is gathered and under way. The peak, set-up included."""
    result = measure(Case(moments, clip, blocks=96, width=768))
    assert result["resident_per_parameter"] <= LIMITS[moments], result
    assert result["peak_per_parameter"] <= LIMITS[moments] + 0.25, result


def test_gradients_need_no_memory_where_updates_begin_at_once() -> None:
    """Without clipping a few buffers go round, also after the first step, which cannot begin early."""
    result = measure(Case("fp32", False, blocks=48, width=256, steps=5))
    assert result["resident_per_parameter"] <= 13.0, result
