"""States of the random number generators of one process: Python, NumPy, torch and the accelerator."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from ls_strategy import device as dev


def random_states() -> dict[str, Any]:
    """Return the states of all generators, in types that ``torch.load(weights_only=True)`` accepts."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    device = dev.current()
    if dev.is_accelerator(device):
        states[device.type] = dev.random_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state(legacy=True)
        states["numpy"] = (name, keys.tolist(), *rest)
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Restore the result of `random_states`."""
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    torch.set_rng_state(states["torch"])
    device = dev.current()
    if dev.is_accelerator(device) and device.type in states:
        dev.set_random_state(states[device.type], device)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(states["numpy"])
