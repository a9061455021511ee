"""The speeds of the ranks, and the time that a step takes at them, to compare candidates.

A candidate's step is predicted from counted work: operations, bytes and messages to other ranks, bytes that updates
touch, bytes over the bus. On the host, all of it adds up, because ranks send with the cores that compute. An
accelerator computes, sends and copies at once, while the host launches the work, so there the longest of these counts;
updates come on top.

`micro_speeds.measure` measures speeds, and `learned` corrects them by runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ls_strategy.extras.planner.forecast import Forecast
from ls_strategy.extras.planner.work import StepWork, Work

SAME = 0.05  # predictions that differ by less than this share say nothing: then the lighter candidate is taken


@dataclass(frozen=True)
class Phase:
    """Seconds of one phase of a step, by what takes them."""

    device: float = 0.0  # computation of the model
    host: float = 0.0  # calls of operations, and what Python does around them
    traffic: float = 0.0  # between ranks
    bus: float = 0.0
    update: float = 0.0

    def seconds(self, *, overlaps: bool) -> float:
        """Return the duration of the phase."""
        together = (self.device, self.host, self.traffic, self.bus)
        return (max(together) if overlaps else sum(together)) + self.update


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Speeds that every rank reaches at least, while all of them do the same."""

    flops: float  # operations per second in products of matrices, in the forward's dtype
    link: float  # bytes per second to other ranks, of large messages
    message: float  # seconds of a collective that sends next to nothing, one of several in flight
    wait: float = 0.0  # seconds that a collective takes longer if a pass waits for it before it goes on
    update: float  # bytes per second that an update on the device reads and writes
    host_update: float  # bytes per second that an update on the host reads and writes
    bus: float  # bytes per second from the device to its host and back. Infinite where they are one.
    overlaps: bool  # whether traffic hides behind computation
    touch: float = float("inf")  # bytes per second that operations without products read and write
    operation: float = 0.0  # seconds to call an operation
    block: float = 0.0  # seconds to arrange that a block's forward runs again, above those of its operations
    # Seconds to have a policy choose which operations of a block run again, above those of each of them.
    context: float = 0.0
    policy: float = 0.0  # seconds to decide whether an operation runs again
    handover: float = 0.0  # seconds that a piece of work costs on a background thread, if it takes no time itself
    rest: float = 0.0  # seconds per step outside of forward, backward and update: data, callbacks, the loop

    def phases(self, work: StepWork) -> dict[str, Phase]:
        """Return what ``forward``, ``backward`` and ``optimizer`` take; reads and writes of NVMe are not included.

        Traffic counts where it is waited for, roughly: stage 3 sends a third in forward, other stages half after
        backward.
        """
        traffic = work.sent / self.link + work.messages * self.message
        waits = work.waits * self.wait / 2
        forward, backward, step = (1 / 3, 2 / 3, 0.0) if work.gathers else (0.0, 1 / 2, 1 / 2)
        again = (work.policed * self.policy + work.contexts * self.context + work.blocks * self.block) / 2
        bus = work.bus / self.bus
        update = work.stepped / (self.host_update if work.steps_on_host else self.update)
        update += work.step_flops / self.flops
        away = work.copied / self.touch + work.handovers * self.handover
        return {
            "forward": Phase(self._device(work.forward), self._host(work.forward) + again, traffic * forward + waits),
            "backward": Phase(
                self._device(work.backward), self._host(work.backward) + again + away, traffic * backward + waits, bus
            ),
            "optimizer": Phase(traffic=traffic * step, update=update),
        }

    def seconds(self, work: StepWork) -> float:
        """Predict one optimizer step."""
        phases = self.phases(work).values()
        names = ("device", "host", "traffic", "bus", "update")
        together = Phase(*(sum(getattr(phase, name) for phase in phases) for name in names))
        return together.seconds(overlaps=self.overlaps) + self.rest

    def _device(self, work: Work) -> float:
        return work.flops / self.flops + work.touched / self.touch

    def _host(self, work: Work) -> float:
        return work.operations * self.operation


def quickest(forecasts: Sequence[Forecast], speeds: Speeds, same: float = SAME) -> Forecast | None:
    """Return the first of those that fit and take at most ``same`` longer than the fastest; None if nothing fits.

    Forecasts that are both faster and smaller on the device go before it. NVMe is not measured: what needs it is taken
    only if nothing else fits.
    """
    fitting = [f for f in forecasts if f.fits]
    resident = [f for f in fitting if not f.traffic.drive] or fitting[:1]
    if not resident:
        return None

    def seconds(forecast: Forecast) -> float:
        return speeds.seconds(forecast.work)

    most = min(map(seconds, resident)) * (1 + same)
    chosen = next(f for f in resident if seconds(f) <= most)
    for other in resident:
        if seconds(other) < seconds(chosen) and other.peak.device < chosen.peak.device:
            chosen = other
    return chosen
