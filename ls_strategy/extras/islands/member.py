"""One rank as a member of its island: joins, exchanges in the background, and knows the number of the round.

::

    Member.join        own: continue with what there is      fetch: take over what another island has sent
    Member.begin       a thread sends, waits for the other islands, and takes the outer step
    Member.settle      wait for it

Nothing here is collective inside the island: the hub gives all ranks of an island the same answers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from ls_strategy import device as dev
from ls_strategy.errors import StateError
from ls_strategy.extras.islands import buffers, wire
from ls_strategy.extras.islands.client import HubClient
from ls_strategy.extras.islands.link import HubLostError
from ls_strategy.extras.islands.outer import Outer, Place


@dataclass(frozen=True)
class Contribution:
    """Contribution of this rank to a round: its part of the pseudo-gradient, and what the hub checks."""

    places: list[Place]
    steps: int  # steps since the last round: without any, the island is only there to get the result
    gradient: bytes
    buffers: Tensor  # empty in rounds without buffers
    about: dict[str, Any]  # what has to be equal on all islands
    ends: bool


@dataclass(frozen=True)
class Result:
    """Outcome of a round for this island."""

    # ``fetch``: the hub was lost, and its successor has given this island the state of another one.
    what: Literal["done", "missed", "ends", "fetch"]
    islands: tuple[int, ...] = ()
    square: float = 0.0  # sum of squares of this rank's part of the mean pseudo-gradient
    buffers: Tensor | None = None  # the mean over the islands
    # Islands whose contribution this rank refuses, so that it does not count on any rank, and why.
    refused: tuple[tuple[int, str], ...] = ()
    seconds: float = 0.0


class Member:
    """This rank's part in the rounds."""

    def __init__(self, client: HubClient, outer: Outer) -> None:
        self.client, self.outer = client, outer
        self.fingerprint: dict[str, Any] = {}  # what has to be equal on all islands when this one joins
        self.run: str | None = None  # identity of the run that all islands are in; None before the first join
        self.round = 0
        self.over = False  # whether the other islands have ended, and this one is only late
        self.buffers: Tensor | None = None  # their mean in the last round that had any
        self.present: set[int] = set()  # the islands in the last round
        self._thread = ThreadPoolExecutor(1, "ls_strategy_islands", dev.selecting())
        self._pending: Future[Result] | None = None

    def join(self, own_buffers: Tensor, *, again: bool = False) -> bool:
        """Join the others. Blocks until there are enough islands, or until the round that they are in is over.

        Args:
            own_buffers: of this island, for those that get its state.
            again: this process was in the run before: the hub was lost, or the others went on without this island.

        Returns:
            whether global weights and momentum are now those of another island.

        Raises:
            ConfigError: this island does not fit to the others.
            StateError: there is no hub, or it is lost before it has answered; or the state of the other island is none
                to continue from.
        """
        self.client.connect()
        line = {"fingerprint": self.fingerprint, "run": self.run, "round": self.round, "again": again}
        try:
            answer, parts = self.client.ask("join", line)
            fetched = answer["what"] == "fetch"
            if fetched:
                self._take(answer["buffers"], parts[0], own_buffers)
            self.run, self.round, self.over = answer["run"], answer["round"], bool(answer.get("over"))
            if answer.get("joiners"):
                self._send_state(own_buffers)
        except HubLostError as error:
            raise StateError(
                f"the hub was lost while islands joined ({error}). Start `ls-strategy meet` again, and the islands "
                "from their last checkpoints."
            ) from None
        return fetched

    def _send_state(self, own_buffers: Tensor) -> None:
        there = self.buffers if self.buffers is not None else own_buffers
        data = self.outer.packed() + wire.encode(there, "exact")
        self.client.ask("state", {"round": self.round, "buffers": there.numel()}, data)

    def _take(self, numel: int, data: bytes | bytearray, own_buffers: Tensor) -> None:
        end = len(data) - wire.nbytes(numel, "exact", buffers.DTYPE)
        try:
            values = wire.decode(data[end:], numel, "exact", buffers.DTYPE) if end >= 0 else own_buffers[:0]
            if numel and own_buffers.numel():
                if values.numel() != own_buffers.numel():
                    raise ValueError(f"{numel} values of buffers instead of {own_buffers.numel()}")
                if buffers.problems({0: own_buffers, 1: values}, None).get(1):
                    raise ValueError("buffers that are not finite")
            self.outer.unpack(data[: max(end, 0)])
        except ValueError as error:
            raise StateError(
                f"the island that gives this one its state has sent {error}. Look for a divergence there, and start "
                "all islands from checkpoints before it."
            ) from None
        self.buffers = values if numel else None

    # rounds ----------------------------------------------------------------------------------------------------------

    def begin(self, contribution: Contribution) -> None:
        """Begin a round in the background."""
        assert self._pending is None
        self._pending = self._thread.submit(self._exchange, contribution)

    @property
    def in_flight(self) -> bool:
        """Return whether a round has begun and its result was not taken yet."""
        return self._pending is not None

    def wait(self) -> None:
        """Return when the round in flight is over for this rank, if there is one; raise its error."""
        if self._pending is not None:
            self._pending.result()

    def peek(self) -> Result:
        """Return the result of the round in flight, and leave it to `settle`."""
        assert self._pending is not None
        return self._pending.result()

    def settle(self) -> Result:
        """Return the result of the round in flight.

        Raises:
            ConfigError: the islands do not fit together any more.
            StateError: the hub was lost, and not replaced in time.
        """
        pending, self._pending = self._pending, None
        assert pending is not None
        return pending.result()

    def _exchange(self, own: Contribution) -> Result:
        started, data = time.perf_counter(), own.gradient + wire.encode(own.buffers, "exact") if own.steps else b""
        try:
            return self._attempt(own, data, started)
        except HubLostError:
            if self.join(own.buffers, again=True):
                return Result("fetch")
        try:
            return self._attempt(own, data, started, again=True)
        except HubLostError as error:
            raise StateError(
                f"the hub was lost twice in a round ({error}). Start `ls-strategy meet` again, and the islands "
                "from their last checkpoints."
            ) from None

    def _attempt(self, own: Contribution, data: bytes, started: float, *, again: bool = False) -> Result:
        """Send, wait for the others, and take the outer step. If the hub is lost, nothing has changed."""
        line = {"run": self.run, "round": self.round, "ends": own.ends, "steps": own.steps, "fingerprint": own.about}
        answer, parts = self.client.ask("exchange", line, data)
        if answer["what"] != "done":
            return Result(answer["what"])
        steps, others = dict(answer["islands"]), iter(parts)
        of = {i: data if i == self.client.island else next(others) for i in sorted(steps)}
        lost = self.present - set(steps)
        if again and own.ends and lost and not answer.get("late"):
            raise StateError(
                f"the hub was lost in the last round, and islands {sorted(lost)} do not take part in it again: they "
                "may have ended with other weights. Take theirs, or start all islands from their last checkpoints."
            )
        given = {i: of[i] for i in of if steps[i]}
        problems = self._problems(own, given)
        refused = self._agree(problems) if given else set()
        if refused is None:
            return Result("missed")
        counted = [given[i] for i in given if i not in refused]
        square, means = self._step(own, counted)
        self.round, self.present = self.round + 1, set(steps)
        if answer["joiners"]:
            with contextlib.suppress(HubLostError):  # the next round finds it out
                self._send_state(own.buffers)
        seconds = time.perf_counter() - started
        return Result("done", tuple(sorted(steps)), square, means, tuple(sorted(problems.items())), seconds)

    def _step(self, own: Contribution, counted: Sequence[bytes | bytearray]) -> tuple[float, Tensor | None]:
        """Take the outer step; return the sum of squares of this rank's part, and the mean of the buffers."""
        if not counted:
            return 0.0, None
        end, numel = self.outer.nbytes(own.places), own.buffers.numel()
        square = self.outer.step(own.places, [each[:end] for each in counted])
        if not numel:
            return square, None
        self.buffers = buffers.mean([wire.decode(each[end:], numel, "exact", buffers.DTYPE) for each in counted])
        return square, self.buffers

    def _problems(self, own: Contribution, given: Mapping[int, bytes | bytearray]) -> dict[int, str]:
        """Return the islands whose contribution to this rank's shards, or buffers, cannot be right, and why."""
        end, numel = self.outer.nbytes(own.places), own.buffers.numel()
        expected, found = end + wire.nbytes(numel, "exact", buffers.DTYPE), {}
        for island, data in given.items():
            if len(data) != expected:
                found[island] = f"{len(data)} bytes instead of {expected}"
            elif (why := self.outer.problem(own.places, data[:end])) is not None:
                found[island] = why
        sound = {i: data for i, data in given.items() if i not in found}
        values = {i: wire.decode(data[end:], numel, "exact", buffers.DTYPE) for i, data in sound.items()}
        return {**found, **(buffers.problems(values, self.buffers) if values and numel else {})}

    def _agree(self, problems: Mapping[int, str]) -> set[int] | None:
        """Return the islands that any rank of this island refuses; None if this island is out.

        An island counts with all of its shards or with none: half of a step is a step of another model. All islands
        have the same bytes, so all refuse the same ones.
        """
        if self.client.ranks == 1:
            return set(problems)
        answer, _ = self.client.ask("verdict", {"round": self.round, "refused": sorted(problems)})
        return set(answer["islands"]) if answer["what"] == "refused" else None

    def close(self) -> None:
        """Leave the other islands, and end the thread."""
        self.client.close()
        self._thread.shutdown(wait=True)
        self._pending = None
