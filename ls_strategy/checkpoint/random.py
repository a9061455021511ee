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


def random_marks() -> tuple[Any, ...]:
    """Return what differs once a number was drawn on the host since, in much less time than `random_states`."""
    numpy = sys.modules.get("numpy")
    words = None if numpy is None else numpy.random.get_state(legacy=True)
    drawn = () if words is None else (words[1].tobytes(), *words[2:])
    return random.getstate(), torch.get_rng_state().numpy().tobytes(), drawn


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


class RandomStream:
    """The states of all generators of one virtual rank, which this process swaps in and out many times per step."""

    def __init__(self) -> None:
        self.take()

    def take(self) -> None:
        """Adopt the current states of this process."""
        self._python, self._torch = random.getstate(), torch.get_rng_state()
        device, numpy = dev.current(), sys.modules.get("numpy")
        self._device = dev.random_state(device) if dev.is_accelerator(device) else None
        self._numpy = None if numpy is None else numpy.random.get_state(legacy=False)

    def put(self) -> None:
        """Make them the states of this process."""
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        device, numpy = dev.current(), sys.modules.get("numpy")
        if self._device is not None and dev.is_accelerator(device):
            dev.set_random_state(self._device, device)
        if self._numpy is not None and numpy is not None:
            numpy.random.set_state(self._numpy)

    def saved(self) -> dict[str, Any]:
        """Return them as `random_states` would."""
        before = RandomStream()
        self.put()
        try:
            return random_states()
        finally:
            before.put()

    @classmethod
    def of(cls, states: dict[str, Any]) -> RandomStream:
        """Return the stream that `saved` has returned."""
        before = cls()
        restore_random_states(states)
        stream = cls()
        before.put()
        return stream
