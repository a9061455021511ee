"""What this rank does, from when to when: phases of a step, collectives, copies, and waits for both.

::

    phases          | data | forward        | backward              | optimizer | other |     one at a time: add up
    communication   |        ====  ======      =====  =========  ====                         beside them
    copies          |  ==          ====                       ===                             likewise
    waits           |              ~               ~~                                         computation stands still

Off by default, when a note costs a look at `Recorder.active`. Switched on, phases are noted in every step; the rest,
which is more, only while ``detail`` is set. There is one recorder per process, as of ``torch.profiler``: what is noted
happens in objects that do not know of each other, on several threads.

Moments are those of the computation: on the CPU the clock when the thread passes, on CUDA events in the current
stream, which are read when somebody asks for seconds; until then nothing waits for the device.
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
    Record,
    Span,
)
from ls_strategy.spans.recorder import Note, Recorder, Window
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
    "Record",
    "Recorder",
    "Span",
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
    """See `Recorder.enter`. Only on the thread that trains, as all phases."""
    if Recorder.active is not None:
        Recorder.active.enter(name)


def leave(name: str) -> None:
    """See `Recorder.leave`."""
    if Recorder.active is not None:
        Recorder.active.leave(name)


@contextmanager
def phase(name: str) -> Generator[None, None, None]:
    """Inside, or around a function, it is this phase."""
    enter(name)
    try:
        yield
    finally:
        leave(name)


def at_unit(name: str) -> None:
    """A unit of the model is about to compute."""
    recorder = Recorder.active
    if recorder is not None and recorder.each_unit:
        recorder.sample(name)


def sent(kind: str, nbytes: int) -> None:
    """So many bytes leave this rank."""
    if Recorder.active is not None:
        Recorder.active.sent[kind] += nbytes


def followed(works: Sequence[Any], name: str, nbytes: int) -> Sequence[Any]:
    """A collective was started; the result is what is to be waited for."""
    recorder = _detailed()
    return works if recorder is None or not works else recorder.follow(works, name, nbytes)


def waiting(category: str, name: str = "wait") -> AbstractContextManager[None]:
    """Around waiting for what is under way: communication counts as under way while it is waited for."""
    recorder = _detailed()
    if recorder is None or _is_overlapped():
        return _NOTHING
    now = recorder.clock.now
    return recorder.during(Note(category, name, now(), None, moves=category == COMMUNICATION, waits=True), now)


def copying(name: str, nbytes: int) -> AbstractContextManager[None]:
    """Around a copy that the calling thread makes itself. On the thread that trains, computation waits for it."""
    recorder = _detailed()
    if recorder is None:
        return _NOTHING
    now = time.perf_counter
    return recorder.during(Note(COPY, name, now(), None, nbytes, waits=not _is_overlapped()), now)


@contextmanager
def copying_on(stream: Any, name: str, nbytes: int) -> Generator[None, None, None]:
    """Around giving a copy to a CUDA stream."""
    recorder = _detailed()
    if recorder is None:
        yield
        return
    now = recorder.clock.now
    with recorder.during(Note(COPY, name, now(stream), None, nbytes), lambda: now(stream)):
        yield


def _detailed() -> Recorder | None:
    recorder = Recorder.active
    return recorder if recorder is not None and recorder.detail else None


def _is_overlapped() -> bool:
    return threading.current_thread().name.startswith(OWN_THREADS)
