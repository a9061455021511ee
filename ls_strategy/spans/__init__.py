"""Record what this rank does and when: phases of a step, collectives, copies, and waits.

::

    phases          | data | forward        | backward              | optimizer | other |     one at a time, no gaps
    communication   |        ====  ======      =====  =========  ====                         overlaps the phases
    copies          |  ==          ====                       ===                             overlaps the phases
    waits           |              ~               ~~                                         computation is blocked

Off by default, at the cost of reading `SpanRecorder.active`. An active recorder records phases in every step, waits for
other ranks where it measures the `own_time` of a step, and everything else only while ``detail`` is set. There is one
recorder per process, as with ``torch.profiler``, because independent objects on several threads record to it.

Times are those of the computation: the clock on the CPU, and events in the current stream on CUDA, which are resolved
when seconds are requested. Until then nothing waits for the device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ls_strategy.spans.record import (
    BACKWARD,
    COMMUNICATION,
    COPY,
    DATA,
    FORWARD,
    OPTIMIZER,
    OTHER,
    PHASES,
    VALIDATION,
    Span,
    SpanRecord,
)
from ls_strategy.spans.recorder import Note, SpanRecorder, Window
from ls_strategy.spans.stamps import OWN_THREADS

__all__ = [
    "BACKWARD",
    "COMMUNICATION",
    "COPY",
    "DATA",
    "FORWARD",
    "OPTIMIZER",
    "OTHER",
    "PHASES",
    "VALIDATION",
    "Span",
    "SpanRecord",
    "SpanRecorder",
    "Window",
    "at_unit",
    "copying",
    "copying_on",
    "enter",
    "followed",
    "leave",
    "phase",
    "sent",
    "waiting",
]

_NOTHING = nullcontext()


def enter(name: str) -> None:
    """See `SpanRecorder.enter`. Call only on the training thread, as for all phases."""
    if SpanRecorder.active is not None:
        SpanRecorder.active.enter(name)


def leave(name: str) -> None:
    """See `SpanRecorder.leave`."""
    if SpanRecorder.active is not None:
        SpanRecorder.active.leave(name)


@contextmanager
def phase(name: str) -> Generator[None, None, None]:
    """Record a phase; a context manager, and a decorator."""
    enter(name)
    try:
        yield
    finally:
        leave(name)


def at_unit(name: str) -> None:
    """Record that a unit of the model is about to compute, or that backward has computed its gradients."""
    recorder = SpanRecorder.active
    if recorder is not None and recorder.each_unit:
        recorder.sample(name)


def sent(kind: str, nbytes: int) -> None:
    """Count bytes that leave this rank."""
    if SpanRecorder.active is not None:
        SpanRecorder.active.sent[kind] += nbytes


def followed(works: Sequence[Any], name: str, nbytes: int) -> Sequence[Any]:
    """Record a collective that was started. Returns the works to wait for."""
    recorder = _detailed()
    return works if recorder is None or not works else recorder.follow(works, name, nbytes)


def waiting(category: str, name: str = "wait") -> AbstractContextManager[None]:
    """Record a wait. Communication counts as in flight while it is waited for."""
    recorder = SpanRecorder.active
    if recorder is None or not (recorder.detail or recorder.own_time.on) or _is_overlapped():
        return _NOTHING
    return recorder.wait(category, name)


def copying(name: str, nbytes: int) -> AbstractContextManager[None]:
    """Record a copy by the calling thread. On the training thread it blocks computation."""
    recorder = _detailed()
    if recorder is None:
        return _NOTHING
    now = time.perf_counter
    return recorder.during(Note(COPY, name, now(), None, nbytes, waits=not _is_overlapped()), now)


@contextmanager
def copying_on(stream: Any, name: str, nbytes: int) -> Generator[None, None, None]:
    """Record a copy that is enqueued on a CUDA stream."""
    recorder = _detailed()
    if recorder is None:
        yield
        return
    now = recorder.clock.now
    with recorder.during(Note(COPY, name, now(stream), None, nbytes), lambda: now(stream)):
        yield


def _detailed() -> SpanRecorder | None:
    recorder = SpanRecorder.active
    return recorder if recorder is not None and recorder.detail else None


def _is_overlapped() -> bool:
    return threading.current_thread().name.startswith(OWN_THREADS)
