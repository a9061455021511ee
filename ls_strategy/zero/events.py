"""The events of a step. Features subscribe while they are on; what is off is not entered.

==================  =============================================================  =================================
event               when                                                           who subscribes
==================  =============================================================  =================================
after_user_code     user code has run: before a step, after its forward, before    user code's view of parameters
                    and after the optimizer's step, and before weights are read
on_step_begin       a step begins, before its units are gathered                   frozen parameters
on_backward_begin   a backward pass begins, before its first gradient              frozen parameters, gradients that
                                                                                   no optimizer uses
before_publish      an optimizer has written new weights, before they are sent     digests of the check for corruption
on_stepped          an optimizer has stepped, or skipped its step after an         routers that balance experts
                    overflow
before_read         states of some kinds are about to be used; gets their names,   states that are offloaded between
                    or none for all                                                two steps
==================  =============================================================  =================================
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


class Event:
    """Calls those who have subscribed, in the order in which they have. An exception of one ends the event."""

    def __init__(self) -> None:
        self._subscribers: list[Callable[..., object]] = []

    def subscribe(self, call: Callable[..., object]) -> Callable[[], None]:
        """Call ``call`` at every later event. Return a function that ends that."""
        self._subscribers.append(call)
        return partial(self._subscribers.remove, call)

    def __call__(self, *given: Any) -> None:
        """Call those who have subscribed by now, also one that unsubscribes meanwhile."""
        for call in tuple(self._subscribers):
            call(*given)


class StepEvents:
    """The events of one engine."""

    def __init__(self) -> None:
        """Begin without subscribers."""
        self.after_user_code = Event()
        self.on_step_begin = Event()
        self.on_backward_begin = Event()
        self.before_publish = Event()
        self.on_stepped = Event()
        self.before_read = Event()
