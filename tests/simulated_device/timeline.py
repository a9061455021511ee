"""What happens before what on the simulated device, and what of it is a mistake.

The host and every stream have a vector clock. An operation on a stream comes after all earlier work of that stream,
after the events that the stream waited for, and after what the host had waited for when it started the operation. Two
accesses to the same bytes, of which one writes, are a hazard if neither comes before the other. This needs no luck with
timing: a wait that is missing is found in every run. All threads of the host share one clock.

Copies between device and pinned host memory are late:

* to the host: the target holds poison until the host waits for the copy,
* to the device: the source is read when something waits for the copy, and must not have changed since.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

HOST, OTHER = -1, 1
"""The places of the host, and of the default stream of the device of another process, among the streams."""

Clock = dict[int, int]
"""For every stream, how many of its operations are over. Never changed in place."""


def joined(one: Clock, other: Clock) -> Clock:
    """Return the later of two clocks, stream by stream."""
    if one.items() >= other.items():
        return one
    return {stream: max(one.get(stream, 0), other.get(stream, 0)) for stream in one.keys() | other.keys()}


@dataclass(frozen=True)
class Moment:
    """One operation of a stream."""

    stream: int
    time: int
    clock: Clock
    name: str
    """Of the operation, and the line that started it."""

    def is_before(self, clock: Clock) -> bool:
        """Whether the operation is over for somebody with ``clock``."""
        return clock.get(self.stream, 0) >= self.time


@dataclass(frozen=True)
class Access:
    """Bytes ``[start, stop)`` of an allocation, read or written."""

    moment: Moment
    start: int
    stop: int
    writes: bool


@dataclass(eq=False)
class Copy:
    """A copy between device and pinned memory that has not happened yet."""

    moment: Moment
    host: Tensor
    """Contiguous pinned memory."""
    run: Callable[[], None]
    to_host: bool
    allocation: int

    def overlaps(self, address: int, nbytes: int) -> bool:
        """Whether the copy uses any of these bytes of the host."""
        return self.host.data_ptr() < address + nbytes and address < self.host.data_ptr() + self.host.nbytes


@dataclass
class Allocation:
    """What is known of one allocation of device memory."""

    accesses: list[Access] = field(default_factory=list)
    used_in: set[int] = field(default_factory=set)
    """Streams from ``record_stream``."""


ASKED_OFTEN = 10


class Timeline:
    """The order of everything on one device."""

    def __init__(self, give: Callable[[int], None]) -> None:
        """``give`` returns the memory at an address to the allocator."""
        self.hazards: list[str] = []
        """Mistakes so far, each in a sentence."""
        self.waits: Counter[str] = Counter()
        """How often the main thread, which is that of training, has waited for the device, by the line."""
        self.delayed = 0
        """How often memory was freed that is used again only when the device has done all that another stream has to do
        by now (``record_stream``). The host may be far ahead."""
        self.lock = threading.RLock()
        self._give = give
        self._clocks: dict[int, Clock] = {HOST: {}}
        self._events: dict[int, Clock] = {}
        self._asked: dict[int, int] = {}
        """How often each event was asked for, since it was recorded."""
        self._allocations: dict[int, Allocation] = {}
        self._copies: list[Copy] = []
        self._freed: deque[tuple[int, Clock]] = deque()
        self._kept: set[int] = set()
        """Freed memory that a copy in flight still needs."""

    # streams, events and the host ------------------------------------------------------------------------------------

    def begin(self, stream: int, name: str) -> Moment:
        """Start an operation on a stream."""
        if stream == OTHER:
            self.stray("an operation")
        self.give_freed()
        clock = joined(self._clocks.get(stream, {}), self._clocks[HOST])
        time = clock.get(stream, 0) + 1
        clock = {**clock, stream: time}
        self._clocks[stream] = clock
        moment = Moment(stream, time, clock, f"{name} ({caller()})")
        self._run([copy for copy in self._copies if not copy.to_host and copy.moment.is_before(clock)])
        return moment

    def record(self, event: int, stream: int) -> None:
        """Let an event happen when the stream has done its work so far."""
        self._events[event] = joined(self._clocks.get(stream, {}), self._clocks[HOST])
        self._asked.pop(event, None)

    def block(self, event: int, stream: int) -> None:
        """Let the later work of a stream wait for an event."""
        self._clocks[stream] = joined(self._clocks.get(stream, {}), self._events.get(event, {}))

    def wait_for_event(self, event: int) -> None:
        """Let the host wait for an event."""
        self._wait(self._events.get(event, {}))

    def wait_for_stream(self, stream: int | None) -> None:
        """Let the host wait for all work of a stream; None: of the device."""
        streams = list(self._clocks) if stream is None else [stream]
        for each in streams:
            self._wait(self._clocks.get(each, {}))

    def has_happened(self, event: int) -> bool:
        """Whether an event has happened: a late device says so when it is asked again, for those who ask in a loop."""
        clock = self._events.get(event, {})
        now = self._clocks[HOST]
        if all(now.get(stream, 0) >= time for stream, time in clock.items()):
            return True
        self._asked[event] = self._asked.get(event, 0) + 1
        if self._asked[event] < ASKED_OFTEN:
            return False
        self.wait_for_event(event)
        return True

    def _wait(self, clock: Clock) -> None:
        if threading.current_thread() is threading.main_thread():
            self.waits[caller()] += 1
        self.give_freed()
        self._clocks[HOST] = joined(self._clocks[HOST], clock)
        self._run([copy for copy in self._copies if copy.moment.is_before(self._clocks[HOST])])

    def stray(self, what: str) -> None:
        """Take note of what was done on a device that is not this one."""
        self._complain(f"{what} ({caller()}) on the device of another process, in {threading.current_thread().name}")

    # memory of the device --------------------------------------------------------------------------------------------

    def access(self, moment: Moment, address: int, start: int, stop: int, *, writes: bool) -> None:
        """Note that an operation uses bytes ``[start, stop)`` of the allocation at ``address``."""
        allocation = self._allocations.setdefault(address, Allocation())
        new = Access(moment, start, stop, writes)
        kept = []
        for old in allocation.accesses:
            is_before = old.moment.is_before(moment.clock)
            if old.start < stop and start < old.stop and (writes or old.writes) and not is_before:
                verbs = ("reads", "writes")
                self._complain(
                    f"{moment.name} on stream {moment.stream} {verbs[writes]} what {old.moment.name} on stream "
                    f"{old.moment.stream} {verbs[old.writes]}, and neither waits for the other"
                )
            same = old.moment.stream == moment.stream and old.writes == writes
            is_covered = is_before and start <= old.start and old.stop <= stop and (writes or same)
            if not is_covered:
                kept.append(old)
        kept.append(new)
        allocation.accesses = kept

    def use_in_stream(self, address: int, stream: int) -> None:
        """See `torch.Tensor.record_stream`."""
        self._allocations.setdefault(address, Allocation()).used_in.add(stream)

    def free(self, address: int, stream: int) -> None:
        """Take note that memory was freed which was allocated for a stream. Runs inside any other function of this."""
        self._freed.append((address, joined(self._clocks.get(stream, {}), self._clocks[HOST])))

    def give_freed(self) -> None:
        """Return what was freed to the allocator, unless a copy in flight needs it."""
        while self._freed:
            address, clock = self._freed.popleft()
            allocation = self._allocations.pop(address, None) or Allocation()
            self.delayed += bool(allocation.used_in)
            for access in allocation.accesses:
                if not access.moment.is_before(clock) and access.moment.stream not in allocation.used_in:
                    self._complain(
                        f"{access.moment.name} on stream {access.moment.stream} uses memory that is freed, and the "
                        "stream that it was allocated for does not wait"
                    )
            if any(copy.allocation == address for copy in self._copies):
                self._kept.add(address)
            else:
                self._give(address)

    # copies ----------------------------------------------------------------------------------------------------------

    def copy_to_host(self, moment: Moment, host: Tensor, values: Tensor) -> None:
        """Start a copy of ``values``, a copy of their own, to pinned memory, which holds poison until it is over."""
        self._check_host(moment, host, "writes to")
        poison = bytes_of(host)
        poison.fill_(255)

        def run() -> None:
            if not bool((poison == 255).all()):
                self._complain(f"the host writes to memory that {moment.name} still copies to")
            host.copy_(values)

        self._copies.append(Copy(moment, host, run, to_host=True, allocation=0))

    def copy_to_device(self, moment: Moment, host: Tensor, target: Tensor, allocation: int) -> None:
        """Start a copy from pinned memory to ``target``, the values on the device at the address ``allocation``."""
        self._check_host(moment, host, "reads from")
        before = bytes_of(host).clone()
        poison = target.clone()
        bytes_of(poison).fill_(255)
        target.copy_(poison)

        def run() -> None:
            if not torch.equal(bytes_of(host), before):
                self._complain(f"the host changes memory that {moment.name} still copies from")
            target.copy_(host)

        self._copies.append(Copy(moment, host, run, to_host=False, allocation=allocation))

    def unpin(self, address: int, nbytes: int) -> None:
        """Take note that the host unregisters memory."""
        for copy in self._copies:
            if copy.overlaps(address, nbytes):
                self._complain(f"the host unpins memory that {copy.moment.name} still uses")

    def finish(self) -> None:
        """Let the device do all its work."""
        self.wait_for_stream(None)

    def _check_host(self, moment: Moment, host: Tensor, verb: str) -> None:
        overlapping = [copy for copy in self._copies if copy.overlaps(host.data_ptr(), host.nbytes)]
        if verb == "reads from":  # two copies may read the same memory
            overlapping = [copy for copy in overlapping if copy.to_host]
        for copy in overlapping:
            if not copy.moment.is_before(moment.clock):
                self._complain(
                    f"{moment.name} on stream {moment.stream} {verb} host memory that {copy.moment.name} on stream "
                    f"{copy.moment.stream} still uses, and neither waits for the other"
                )
        self._run(overlapping)

    def _run(self, copies: list[Copy]) -> None:
        for copy in copies:
            if copy in self._copies:
                self._copies.remove(copy)
                copy.run()
                if copy.allocation in self._kept and all(c.allocation != copy.allocation for c in self._copies):
                    self._kept.remove(copy.allocation)
                    self._give(copy.allocation)

    def _complain(self, sentence: str) -> None:
        if sentence not in self.hazards:
            self.hazards.append(sentence)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, ``(nbytes,)`` uint8, in the same memory."""
    return tensor.view(-1).view(torch.uint8)


def caller() -> str:
    """Return the line of the package that is running in this thread, or of its caller outside of torch."""
    frame = sys._getframe(2)
    outside = None
    while frame is not None:
        path = frame.f_code.co_filename
        if "/ls_strategy/" in path:
            return f"{path.rpartition('/ls_strategy/')[2]}:{frame.f_lineno}"
        if outside is None and "/simulated_device/" not in path and "/torch/" not in path:
            outside = f"{path.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return outside or "torch"
