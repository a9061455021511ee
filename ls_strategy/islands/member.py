"""One rank as a member of its island: joins, exchanges in the background, and knows the number of the round.

::

    Member.join        own: continue with what there is      fetch: take over what another island has sent
    Member.begin       a thread sends, waits for the other islands, and takes the outer step
    Member.settle      wait for it

Nothing here is collective inside the island: the hub gives all ranks of an island the same answers.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from ls_strategy.errors import StateError
from ls_strategy.islands import buffers, wire
from ls_strategy.islands.client import HubClient
from ls_strategy.islands.link import HubLostError
from ls_strategy.islands.outer import Outer, Place


@dataclass(frozen=True)
class Contribution:
    """What this rank sends in a round."""

    places: list[Place]
    steps: int
    """Steps since the last round: without any, the island is only there to get the result."""

    gradient: bytes
    buffers: Tensor
    """Empty in rounds without buffers."""

    about: dict[str, Any]
    """What has to be equal on all islands."""

    ends: bool


@dataclass(frozen=True)
class Result:
    """How a round has ended for this island."""

    what: Literal["done", "missed", "ends", "fetch"]
    """``fetch``: the hub was lost, and its successor has given this island the state of another one."""

    islands: tuple[int, ...] = ()
    square: float = 0.0
    """Sum of squares of this rank's part of the mean pseudo-gradient."""

    buffers: Tensor | None = None
    """The mean over the islands."""

    refused: tuple[tuple[int, str], ...] = ()
    """Islands whose contribution to this rank's shards does not count, and why."""

    seconds: float = 0.0


class Member:
    """This rank's part in the rounds."""

    def __init__(self, client: HubClient, outer: Outer) -> None:
        """Come to no hub yet."""
        self.client, self.outer = client, outer
        self.fingerprint: dict[str, Any] = {}
        """What has to be equal on all islands when this one joins."""
        self.run: str | None = None
        """Identity of the run that all islands are in; None before the first join."""
        self.round = 0
        """The number of rounds so far."""
        self.buffers: Tensor | None = None
        """Their mean in the last round that had any."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ls_strategy_islands")
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
            StateError: there is no hub, or it is lost before it has answered.
        """
        self.client.connect()
        line = {"fingerprint": self.fingerprint, "run": self.run, "round": self.round, "again": again}
        try:
            answer, parts = self.client.ask("join", line)
            fetched = answer["what"] == "fetch"
            if fetched:
                self._take(answer["buffers"], parts[0])
            self.run, self.round = answer["run"], answer["round"]
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

    def _take(self, numel: int, data: bytes | bytearray) -> None:
        end = len(data) - 8 * numel
        self.outer.unpack(data[:end])
        self.buffers = wire.decode(data[end:], numel, "exact", buffers.DTYPE)

    # rounds ----------------------------------------------------------------------------------------------------------

    def begin(self, contribution: Contribution) -> None:
        """Begin a round in the background."""
        assert self._pending is None
        self._pending = self._thread.submit(self._exchange, contribution)

    @property
    def in_flight(self) -> bool:
        """Whether a round was begun whose result was not taken."""
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
        started = time.perf_counter()
        data = own.gradient + wire.encode(own.buffers, "exact") if own.steps else b""
        line = {"round": self.round, "ends": own.ends, "steps": own.steps, "fingerprint": own.about}
        line["run"] = self.run
        try:
            answer, parts = self.client.ask("exchange", line, data)
        except HubLostError:
            if self.join(own.buffers, again=True):
                return Result("fetch")
            try:
                answer, parts = self.client.ask("exchange", {**line, "run": self.run, "round": self.round}, data)
            except HubLostError as error:
                raise StateError(
                    f"the hub was lost twice in a round ({error}). Start `ls-strategy meet` again, and the islands "
                    "from their last checkpoints."
                ) from None
        if answer["what"] != "done":
            return Result(answer["what"])
        return self._apply(own, data, answer, parts, started)

    def _apply(
        self, own: Contribution, data: bytes, answer: dict[str, Any], parts: list[bytearray], started: float
    ) -> Result:
        steps = dict(answer["islands"])
        others = iter(parts)
        of = {i: data if i == self.client.island else next(others) for i in sorted(steps)}
        end = self.outer.nbytes(own.places)
        given, refused = [], []
        for i in sorted(of):
            if steps[i]:
                why = self._problem(own, of[i], end)
                refused += [(i, why)] if why else []
                given += [] if why else [of[i]]
        square, means = 0.0, None
        if given:
            square = self.outer.step(own.places, [each[:end] for each in given])
            numel = own.buffers.numel()
            if numel:
                means = buffers.mean([wire.decode(each[end:], numel, "exact", buffers.DTYPE) for each in given])
                self.buffers = means
        self.round += 1
        if answer["joiners"]:
            self._send_state(own.buffers)
        seconds = time.perf_counter() - started
        return Result("done", tuple(sorted(steps)), square, means, tuple(refused), seconds)

    def _problem(self, own: Contribution, data: bytes | bytearray, end: int) -> str | None:
        """Return what is wrong with an island's contribution of ``end`` bytes and its buffers; None if nothing is."""
        expected = end + wire.nbytes(own.buffers.numel(), "exact", buffers.DTYPE)
        if len(data) != expected:
            return f"{len(data)} bytes instead of {expected}"
        return self.outer.problem(own.places, data[:end])

    def close(self) -> None:
        """Leave the other islands, and end the thread."""
        self.client.close()
        self._thread.shutdown(wait=True)
        self._pending = None
