"""Random numbers of tensor-parallel ranks: equal for replicated activations, different for sharded ones.

Outside regions all ranks draw the same numbers from the default generator of the device. A region forks it::

    outer stream   ──●──────────────────────●──▶      ● draw one number n, the same on all ranks
                     └─ seed(n, 0, rank) ───┘           stream of the region; the outer stream goes on after n
                           └ seed(n, 1) ┘               common phase inside it: all ranks draw the same numbers

The seed of a fork identifies it: the upper 32 bits hold ``n``, the lower ones a scrambled code. Code that restores a
generator's state, such as recomputation in backward, therefore restores the region too, and draws the same numbers.

Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3 (different dropout inside, same outside).
"""

from __future__ import annotations

from typing import Any

import torch

from ls_strategy.device import generator_of
from ls_strategy.distributed.axis import Axis

_MASK = 0xFFFFFFFF
_MAGIC = 0x5A7D  # upper 16 bits of a code; 6 bits of the phase and 10 of the rank follow
_ODD = 0x9E3779B1  # 2**32 / golden ratio
_ODD_INVERSE = pow(_ODD, -1, 1 << 32)
_PHASES = 64


def hash64(value: int) -> int:
    """Hash a 64-bit number (splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 31


def fork_seed(number: int, phase: int, rank: int) -> int:
    """Return the seed of one phase of a fork from the ``number`` that was drawn: 31 bits, not 0.

    Seeds of even phases differ between ranks; those of odd phases are equal.
    """
    code = _MAGIC << 16 | phase << 10 | (rank % 1024 if phase % 2 == 0 else 0)
    return number << 32 | (code * _ODD & _MASK) ^ (hash64(number) & _MASK)


def forked(seed: int) -> tuple[int, int] | None:
    """Return ``(number, phase)`` of a seed from `fork_seed`; None for other seeds (except 1 in 65536 above 2**32).

    >>> forked(fork_seed(7, 3, 0)), forked(42)
    ((7, 3), None)
    """
    number = seed >> 32
    if number == 0:
        return None
    code = ((seed & _MASK) ^ (hash64(number) & _MASK)) * _ODD_INVERSE & _MASK
    return (number, code >> 10 & _PHASES - 1) if code >> 16 == _MAGIC else None


class Streams:
    """The forks of this rank's default generators. No method synchronises with a device."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._outer: dict[torch.device, tuple[int, Any]] = {}

    def is_open(self, device: torch.device) -> bool:
        """Return whether the device's generator is inside a region."""
        return forked(generator_of(device).initial_seed()) is not None

    def open(self, device: torch.device) -> bool:
        """Begin a region. Inside one, start a phase in which every rank draws different numbers.

        Returns:
            Whether a region was begun.
        """
        generator = generator_of(device)
        if forked(generator.initial_seed()) is not None:
            self.own(device)
            return False
        number, state = draw(generator)
        self._outer[device] = number, state
        generator.manual_seed(fork_seed(number, 0, self._rank))
        return True

    def close(self, device: torch.device) -> None:
        """End the region and continue the outer stream. Outside a region, do nothing."""
        generator = generator_of(device)
        fork = forked(generator.initial_seed())
        number, state = self._outer.pop(device, (0, None))
        if fork is None:
            return
        if number == fork[0]:
            set_state(generator, state)
        else:  # recomputation restored a fork whose outer state is unknown; at least all ranks draw the same
            self.common(device)

    def close_all(self) -> None:
        """Call `close` for every device with an open region."""
        for device in list(self._outer):
            self.close(device)

    def common(self, device: torch.device) -> None:
        """Make all ranks draw the same numbers from now on. Outside a region, do nothing."""
        self._enter_phase(device, 1)

    def own(self, device: torch.device) -> None:
        """Make every rank draw different numbers from now on. Outside a region, do nothing."""
        self._enter_phase(device, 0)

    def _enter_phase(self, device: torch.device, parity: int) -> None:
        generator = generator_of(device)
        fork = forked(generator.initial_seed())
        if fork is not None and fork[1] % 2 != parity:
            number, phase = fork
            generator.manual_seed(fork_seed(number, (phase + 1) % _PHASES, self._rank))


def draw(generator: torch.Generator) -> tuple[int, Any]:
    """Return a number of 31 bits that depends on the generator's state alone, and the state after it."""
    if generator.device.type == "cpu":
        number = int(torch.randint(1, 1 << 31, (), generator=generator, device="cpu"))
        return number, generator.get_state()
    # Philox is a function of seed and offset, which the host knows. Drawing by a kernel would synchronise.
    seed, offset = generator.initial_seed(), generator.get_offset()
    number = hash64(hash64(seed) ^ offset) >> 33 or 1
    return number, (seed, offset + 4)  # offsets are multiples of 4


def position(generator: torch.Generator) -> Any:
    """Return the state, for `set_state`, without synchronising with a device."""
    if generator.device.type == "cpu":
        return generator.get_state()
    return generator.initial_seed(), generator.get_offset()


def has_drawn(generator: torch.Generator, since: Any) -> bool:
    """Return whether a generator has drawn numbers since a `position`."""
    now = position(generator)
    # On the host, also while tensors are fake.
    return bool((now.numpy() != since.numpy()).any()) if isinstance(now, torch.Tensor) else now != since


def set_state(generator: torch.Generator, state: Any) -> None:
    """Set the generator to a state that `draw` or `position` returned."""
    if isinstance(state, torch.Tensor):
        generator.set_state(state)
    else:
        seed, offset = state
        generator.manual_seed(seed)
        generator.set_offset(offset)


def share_random_state(axis: Axis, device: torch.device) -> None:
    """Copy the state of rank 0's default generator to all ranks of the axis. Collective."""
    if axis.size == 1:
        return
    generator = generator_of(device)
    state = generator.get_state()
    wire = axis.comm.sendable(state)
    axis.broadcast_(wire)
    generator.set_state(wire.cpu())
