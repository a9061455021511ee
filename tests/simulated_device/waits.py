"""Every wait, event and change of stream between device and host, and a program that notices if it is missing."""

from __future__ import annotations

import importlib
import inspect
import textwrap
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.simulated_device.collectives import between_groups
from tests.simulated_device.programs import (
    FITS,
    crowded,
    dropped,
    fit,
    given_up,
    in_chunks,
    order_of_chunks,
    overtaken,
    pinned_anywhere,
    saved,
    saved_through_device,
    streamed,
)


class WaitNotFoundError(Exception):
    """The line is not, or not only once, in its module, or could not be taken out."""


@dataclass(frozen=True)
class Wait:
    """A line of the package, and what stands there without the wait."""

    module: str
    line: str
    without: str
    program: str
    """A key of `FITS`, or ``streamed`` with a tier."""

    function: str = ""
    """Where the line is not unique: the function that it is in."""

    def __str__(self) -> str:
        where = f"{self.module}.{self.function}" if self.function else self.module
        return f"{where}: {self.line}"


LINK, STOCK, GROUPS = "tiers.link", "tiers.stock", "distributed.shard_groups"
STEP = "zero.step.device_step"
STOPS_EARLY = "stage 3, all on cpu, stops early"
GRADIENTS_ADDED = "stage 2, gradients on cpu, accumulation"
WAITS = (
    Wait("tiers.arrival", "event.synchronize()", "pass", "stage 2, cpu, step on cpu"),
    Wait("tiers.arrival", "dev.stream(event.device).wait_event(event)", "pass", "stage 2, cpu, step on cpu"),
    Wait(STOCK, "busy.wait_on_host()", "pass", "stage 2, cpu, 16-bit copies", "take_idle"),
    Wait(STOCK, "each.busy.wait_on_host()", "pass", "activations on cpu"),
    Wait(LINK, "side.wait_event(after)", "pass", "stage 2, step on device, a forward before the step"),
    Wait(STEP, "arrival.wait_on_host()", "pass", "in chunks"),
    Wait(STEP, "self._link.enqueued(done, work", "self._link.enqueued(None, work", "order of chunks"),
    Wait(STEP, "append((arrival, self._results,", "append((arrival, [],", "in chunks"),
    Wait(LINK, "stream.wait_stream(dev.stream(self.device))", "pass", "activations on cpu"),
    Wait(LINK, "stream.wait_event(after)", "pass", "stage 2, step on cpu, a forward before the step", "_copy"),
    Wait(LINK, "with dev.on(stream), spans", "with spans", "stage 2, cpu, step on cpu"),
    Wait(LINK, "event = dev.record(self.device, stream)", "event = None", "stage 2, cpu, step on cpu"),
    Wait("tiers.arrival", "dev.use_in_stream(tensor, self._stream)", "pass", "dropped"),
    Wait("checkpoint.background", "begun.synchronize()", "pass", "background save"),
    Wait("checkpoint.background", "(self._stream.synchronize)", "(_has_arrived)", "background save"),
    Wait("checkpoint.background", "self._arrivals.append(Arrival(", "(None and Arrival(", "overtaken"),
    Wait("checkpoint.background", "arrival.wait_on_host()", "pass", "overtaken"),
    Wait("activations.offload", "kept.arriving.wait_on_device()", "pass", "activations on cpu"),
    Wait("activations.offload", "kept.arriving.wait_on_host()", "pass", "given up", "drop"),
    Wait("activations.offload", "kept.arriving.wait_on_host()", "pass", "given up, sent again", "_send"),
    Wait("activations.storage", "self._wait(region.copying.wait_on_host)", "pass", "activations on cpu"),
    Wait("activations.storage", "region.copying.wait_on_host()", "pass", "activations on nvme", "finish"),
    Wait("activations.storage", "busy.wait_on_host()  # I/O", "pass  # I/O", "activations on nvme"),
    Wait(GROUPS, "self._used = self._inner.works", "pass", "between groups"),
    Wait(GROUPS, "stream.wait_stream(dev.stream(term.device))", "pass", "between groups of one"),
    Wait(GROUPS, "work.wait()", "pass", "between groups", "start"),
    Wait(GROUPS, "self._group.across.wait(self.works)", "pass", "between groups"),
    Wait("distributed.buffer_pool", "copy.wait_on_host()", "pass", "crowded", "_take_back"),
    Wait("extras.inference.storage", "arrival.wait_on_host()", "pass", "streamed cpu"),
    Wait("zero.flat.averages", "arrival.wait_on_host()", "None", "stage 3, all on cpu"),
    Wait(
        "zero.flat.averages",
        "to_device(mine, self.values).wait_on_device()",
        "to_device(mine, self.values)",
        GRADIENTS_ADDED,
    ),
    Wait("zero.flat.flat_states", "self.arriving.wait_on_device()", "pass", "stage 2, cpu, step on cpu"),
    Wait("zero.flat.averages", "self.wait()", "pass", "stage 3, all on nvme, clipping", "_recorded"),
    Wait("zero.flat.state_store", "pending.result()", "pass", "stage 3, all on nvme"),
    Wait("zero.flat.state_store", "arrival.wait_on_host()", "pass", "stage 3, all on nvme"),
    Wait("zero.flat.flat_buffer", "arrival.wait_on_device()", "pass", "stage 3, all on cpu"),
    Wait("zero.flat.flat_buffer", "self.reading.result().wait_on_device()", "self.reading.result()", STOPS_EARLY),
    Wait("zero.step.update", "update.landing.result()", "pass", GRADIENTS_ADDED),
    Wait(LINK, "dev.select(self.device)", "pass", "stage 3, all on nvme"),
    Wait("tiers.buffers", "with dev.selected(device):", "if True:", "pinned anywhere"),
    Wait("tiers.buffers", "with dev.selected(registered[1]):", "if True:", "pinned anywhere"),
    Wait("device", "with selected(device):", "if True:", "pinned anywhere", "synchronize"),
    Wait("extras.inference.storage", ", link.bind_thread", "", "streamed cpu"),
)


def ranks_of(wait: Wait) -> int:
    """Return how many ranks the program needs."""
    return 4 if wait.program.startswith("between groups") else 1


def without(device: torch.device, wait: Wait, program: Callable[..., Any], *args: Any) -> Any:
    """Run a program without one wait."""
    remove(wait)
    return program(device, *args)


def remove(wait: Wait) -> None:
    """Take the wait out of the function that it is in, in this process.

    Raises:
        WaitNotFoundError: that has failed, for whatever reason: no other error may say that the wait is missed.
    """
    try:
        function, source = place_of(wait)
        _replace(function, source.replace(wait.line, wait.without))
    except Exception as error:
        raise WaitNotFoundError(str(wait)) from error


def place_of(wait: Wait) -> tuple[types.FunctionType, str]:
    """Return the function that the wait is in, and its source.

    Raises:
        WaitNotFoundError: it is in none, or in several.
    """
    module = importlib.import_module(f"ls_strategy.{wait.module}")
    classes = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]
    places: list[tuple[types.FunctionType, str]] = []
    for owner in (module, *classes):
        for name, value in list(vars(owner).items()):
            found = inspect.unwrap(value) if callable(value) else value
            if not isinstance(found, types.FunctionType) or found.__code__.co_filename != module.__file__:
                continue  # imported, or generated as those of dataclasses are
            source = textwrap.dedent(inspect.getsource(found))
            if source.count(wait.line) == 1 and wait.function in ("", name):
                places.append((found, source))
    if len(places) != 1:
        raise WaitNotFoundError(f"{wait}: stands {len(places)} times")
    return places[0]


def _replace(function: types.FunctionType, source: str) -> None:
    space: dict[str, Any] = dict(function.__globals__)
    exec(compile("from __future__ import annotations\n" + source, function.__code__.co_filename, "exec"), space)
    function.__code__ = inspect.unwrap(space[function.__name__]).__code__


def program_of(wait: Wait) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the program that notices, and its arguments."""
    parts: dict[str, tuple[Any, ...]] = {
        "background save": (saved, 2),
        "save through device": (saved_through_device,),
        "between groups": (between_groups, 2, torch.float32),
        "between groups of one": (between_groups, 1, None),
        "crowded": (crowded,),
        "overtaken": (overtaken,),
        "dropped": (dropped,),
        "in chunks": (in_chunks,),
        "order of chunks": (order_of_chunks, 6),
        "pinned anywhere": (pinned_anywhere,),
        "given up": (given_up, False),
        "given up, sent again": (given_up, True),
    }
    if wait.program in parts:
        program, *arguments = parts[wait.program]
        return program, tuple(arguments)
    if wait.program.startswith("streamed "):
        return streamed, (wait.program.removeprefix("streamed "),)
    return fit, FITS[wait.program]
