"""The hub: where islands meet. It decides who is in a round, and passes everyone's bytes on. It computes nothing.

::

    join       every rank of an island comes and says what it trains. The first time, all islands wait for each other;
               the one with the newest state gives it to those that have none. Later an island gets it after a round
    exchange   every rank of the islands that are in sends its bytes, and gets those of the same rank of the others
    verdict    the ranks of an island hear which contributions any of them refuses
    state      one island sends what the islands that have just come need

A round is decided at one place and once: when all islands that are in have come, or some have and `patience_s` is over.
So all islands agree on who was in it. An island that was not, or whose connection ended, is out until it joins again.

An island that is late for the last round gets the contributions to it, or what it has led to: all end with the same
weights, or know that they do not.

The hub keeps no state that matters: if it is lost, islands join its successor, each with the state that it has.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterable
from typing import Any, Protocol

from ls_strategy.extras.islands.decided import Message, Reply, Round
from ls_strategy.extras.islands.fingerprint import disagreement
from ls_strategy.extras.islands.messages import Exchange, Join, Request, State, Verdict

_SEAT_S = 40.0  # seconds that an island which is started again waits until the connections of its lost ranks have ended
_LOOK_EVERY_S = 1.0  # the most seconds between two looks at the clock


_DIFFERENT_RUNS = (
    "Got islands that continue different runs. Start all of them from checkpoints of one run, or some without a "
    "checkpoint."
)


def _after_the_last_round(island: int) -> str:
    return (
        f"Got island {island} after the last round of its run, without what the others have: it would end with other "
        "weights. Take those of another island; or to train on, start all islands from their last checkpoints."
    )


class Connection(Protocol):
    """A rank's connection, as the hub sees it."""

    def ended(self) -> bool:
        """Return whether the other side has gone."""
        ...

    def still_waiting(self) -> None:
        """Let the other side know that its answer is not decided yet; called every second until it is."""
        ...


class Hub:
    """The decisions. Every method may be called from any thread, and returns when the answer is known."""

    def __init__(self, islands: int, patience_s: float) -> None:
        """``islands``: how many there are. ``patience_s``: how long a round waits for those that are late."""
        self._islands, self._patience_s = islands, patience_s
        self._changed = threading.Condition()
        self._seats: dict[tuple[int, int], Connection] = {}  # the connection of every rank that is there
        self._run: str | None = None
        self._number = 0
        self._members: set[int] = set()
        self._fingerprints: dict[int, Any] = {}  # by rank: of the islands that are in
        self._arrived: dict[int, dict[int, Message[Exchange]]] = {}
        self._deadline: float | None = None
        self._ends = False
        self._decided: Round | None = None
        # The last round of the run that has ended, until another one begins: for islands that are late.
        self._over: Round | None = None
        self._joining: dict[int, dict[int, Join]] = {}
        self._join_deadline: float | None = None
        self._outcomes: dict[tuple[int, int], Reply] = {}
        self._source = -1
        self._served: set[int] = set()
        self._states: dict[int, Message[State]] = {}

    # coming and going ------------------------------------------------------------------------------------------------

    def join(self, connection: Connection, request: Join) -> Reply:
        """Let a rank come. It gets what its island starts from.

        Raises:
            ValueError: the connection has joined as another rank.
        """
        seat = island, rank = request.island, request.rank
        with self._changed:
            if any(holder is connection and other != seat for other, holder in self._seats.items()):
                raise ValueError("this connection has joined as another rank")
            if island >= self._islands:
                problem = (
                    f"Got island={island}, but the hub was started for {self._islands} islands, numbered from 0. Set "
                    "DiLoCo(island=...), or `ls-strategy meet --islands`."
                )
                return Reply({"error": problem})
            if not self._take_seat(connection, seat):
                problem = (
                    f"Got island={island} a second time while rank {rank} of the first is still there. Give every "
                    "island a number of its own: DiLoCo(island=...)."
                )
                return Reply({"error": problem})
            there = self._joining.setdefault(island, {})
            if any(other.ranks != request.ranks for other in there.values()):
                problem = (
                    f"Got ranks of island {island} that know of different numbers of them. Start all of them again."
                )
                return Reply({"error": problem})
            self._leave(island)
            self._outcomes.pop(seat, None)
            there[rank] = request
            self._changed.notify_all()
            return self._wait_to_be_in(connection, request)

    def check_seat(self, connection: Connection, request: Request) -> None:
        """Refuse what is asked by one who has not joined as this rank.

        Raises:
            ValueError: it has not.
        """
        with self._changed:
            if self._seats.get((request.island, request.rank)) is not connection:
                raise ValueError(f"this connection has not joined as rank {request.rank} of island {request.island}")

    def _wait(self, connection: Connection) -> None:
        """Wait for a change, without the lock; the one who waits hears that there is none yet."""
        self._changed.wait(_LOOK_EVERY_S)
        self._changed.release()
        try:
            connection.still_waiting()
        finally:
            self._changed.acquire()

    def _wait_to_be_in(self, connection: Connection, request: Join) -> Reply:
        seat = island, rank = request.island, request.rank
        end = time.monotonic() + self._patience_s
        while seat not in self._outcomes:
            after = self._after_the_end(request)
            if after is not None:
                self._joining.get(island, {}).pop(rank, None)
                return after
            self._admit_if_due()
            if seat in self._outcomes:
                break
            if self._seats.get(seat) is not connection:
                return Reply({"error": f"rank {rank} of island {island} was lost."})
            there = self._joining.get(island, {})
            if time.monotonic() > end and rank in there and len(there) < request.ranks:
                self._joining.pop(island)
                problem = (
                    f"Got {len(there)} of the ranks of island {island} in {self._patience_s:g} s, but all of them have "
                    "to come. Give all ranks of an island the same DiLoCo(meet=...)."
                )
                for other in there:
                    self._outcomes[island, other] = Reply({"error": problem})
                self._changed.notify_all()
                break
            self._wait(connection)
        return self._outcomes.pop(seat)

    def _after_the_end(self, request: Join) -> Reply | None:
        """Return what a rank hears that comes again when its run has ended; None if it has not."""
        over = self._over
        if over is None or not request.again or request.run != over.run:
            return None
        if request.round == over.number:  # it has what the last round began with, and gets the contributions to it
            return Reply({"what": "own", "joiners": [], "run": over.run, "round": over.number, "over": True})
        if request.rank in over.states:
            return self._fetched(over.states[request.rank], over.run)
        return None if self._source >= 0 else Reply({"error": _after_the_last_round(request.island)})

    def _take_seat(self, connection: Connection, seat: tuple[int, int]) -> bool:
        end = time.monotonic() + _SEAT_S
        while self._seats.get(seat, connection) is not connection:
            if self._seats[seat].ended():
                self.gone(self._seats[seat])
            elif time.monotonic() > end:
                return False
            else:
                self._wait(connection)
        self._seats[seat] = connection
        return True

    def gone(self, connection: Connection) -> None:
        """Note that a connection has ended."""
        with self._changed:
            for seat in [seat for seat, holder in self._seats.items() if holder is connection]:
                del self._seats[seat]
                island, rank = seat
                self._leave(island)
                self._served.discard(island)
                for other in self._joining.pop(island, {}):
                    if other != rank:
                        self._outcomes[island, other] = Reply({"error": f"rank {rank} of island {island} was lost."})
            self._changed.notify_all()

    def _leave(self, island: int) -> None:
        """Take an island out. What all its ranks have sent for this round counts."""
        self._members.discard(island)
        if not self._is_complete(island):
            self._arrived.pop(island, None)
        if island == self._source:  # those that wait for its state get that of another one
            self._members -= self._served
            self._source, self._served, self._states = -1, set(), {}

    # joining ---------------------------------------------------------------------------------------------------------

    def _joined(self) -> list[int]:
        """Return the islands all of whose ranks wait to join, and that no other island serves."""
        for seat in [(i, rank) for i, ranks in self._joining.items() for rank in ranks]:
            if seat in self._seats and self._seats[seat].ended():
                self.gone(self._seats[seat])
        complete = (i for i, ranks in self._joining.items() if ranks and len(ranks) == next(iter(ranks.values())).ranks)
        return sorted(i for i in complete if i not in self._served)

    def _admit_if_due(self) -> None:
        """Start a run if there is none and enough islands wait; refuse those that do not fit to the one there is."""
        joined = self._joined()
        if not joined:
            return
        if self._members or self._arrived:
            self._refuse_misfits(joined)
            return
        now = time.monotonic()
        if self._join_deadline is None:
            self._join_deadline = now + self._patience_s
        if len(joined) == self._islands or now >= self._join_deadline:
            self._join_deadline = None
            joined = joined if len(joined) == self._islands else self._without_late(joined)
            if joined:
                self._found(joined)

    def _refuse_misfits(self, joined: list[int]) -> None:
        for island in joined:
            first = self._joining[island][0]
            problem = disagreement({-1: self._fingerprints, island: self._prints(island)})
            if first.again and first.run != self._run:
                problem = _DIFFERENT_RUNS
            if problem is not None:
                self._refuse([island], problem)

    def _without_late(self, joined: list[int]) -> list[int]:
        """Refuse islands of a run that has ended without them, unless all are here to continue it."""
        over = self._over
        late = [i for i in joined if over is not None and self._joining[i][0].run == over.run]
        for island in late:
            self._refuse([island], _after_the_last_round(island))
        return [i for i in joined if i not in late]

    def _prints(self, island: int) -> dict[int, Any]:
        return {rank: request.fingerprint for rank, request in self._joining[island].items()}

    def _refuse(self, islands: Iterable[int], problem: str) -> None:
        for island in islands:
            for rank in self._joining.pop(island):
                self._outcomes[island, rank] = Reply({"error": problem})
        self._changed.notify_all()

    def _found(self, islands: list[int]) -> None:
        """Start a run, or let one go on: from the newest state, or from the weights of the first island."""
        first = {i: self._joining[i][0] for i in islands}
        known = {i: request.round for i, request in first.items() if request.run is not None}
        problem = disagreement({i: self._prints(i) for i in islands})
        runs = {request.run for request in first.values() if request.run is not None}
        if problem is None and len(runs) > 1:
            problem = _DIFFERENT_RUNS
        if problem is not None:
            self._refuse(islands, problem)
            return
        newest = max(known.values(), default=0)
        source = min((i for i in islands if known.get(i) == newest), default=islands[0])
        self._run = runs.pop() if runs else secrets.token_hex(8)
        self._number, self._members, self._ends = newest, set(islands), False
        self._decided = self._over = None
        self._fingerprints = self._prints(source)
        behind = [i for i in islands if i != source and known.get(i) != newest]
        self._serve(source, behind)
        for island in islands:
            if island not in behind:
                joiners = behind if island == source else []
                for rank in self._joining.pop(island):
                    self._outcomes[island, rank] = Reply(
                        {"what": "own", "joiners": joiners, "run": self._run, "round": self._number}
                    )
        self._changed.notify_all()

    def _serve(self, source: int, joiners: list[int]) -> None:
        self._source, self._served, self._states = (source, set(joiners), {}) if joiners else (-1, set(), {})

    def state(self, connection: Connection, request: State, data: bytes | memoryview) -> Reply:
        """Take one rank's part of the state, and give it to the islands that wait for it when all parts are there.

        Raises:
            ValueError: the connection has not joined as this rank.
        """
        with self._changed:
            self.check_seat(connection, request)
            if request.island == self._source and request.round == self._number:
                self._states[request.rank] = Message(request, data)
                if self._states.keys() == self._fingerprints.keys():
                    self._hand_out()
            self._changed.notify_all()
        return Reply({})

    def _hand_out(self) -> None:
        over = self._over
        if over is not None:
            over.states = self._states
        for island in self._served & self._joining.keys():
            for rank in self._joining.pop(island):
                self._outcomes[island, rank] = self._fetched(self._states[rank], over.run if over else self._run)
        self._serve(-1, [])

    def _fetched(self, state: Message[State], run: str | None) -> Reply:
        line = {"what": "fetch", "buffers": state.request.buffers, "lengths": [len(state.data)]}
        return Reply({**line, "run": run, "round": state.request.round, "over": self._over is not None}, [state.data])

    # rounds ----------------------------------------------------------------------------------------------------------

    def exchange(self, connection: Connection, request: Exchange, data: bytes | memoryview) -> Reply:
        """Give a rank the bytes of the same rank of the other islands in the round.

        Returns:
            ``done``; or ``missed``: the island is out, and has to join; or ``ends``: another island has come to the end
            of its training, and all send everything now.

        Raises:
            ValueError: the connection has not joined as this rank.
        """
        island, number = request.island, request.round
        with self._changed:
            self.check_seat(connection, request)
            refused = self._late(request) or self._take(request, data)
            while refused is None:
                self._decide_if_due()
                decided = self._decided
                if decided is not None and decided.number == number and island in decided.messages:
                    return decided.reply(request)
                if self._ends and not request.ends:
                    refused = Reply({"what": "ends"})
                elif island not in self._members and not self._is_complete(island):
                    refused = self._late(request) or Reply({"what": "missed"})
                else:
                    self._wait(connection)
            return refused

    def _take(self, request: Exchange, data: bytes | memoryview) -> Reply | None:
        """Take a rank's part of the round; return the answer if it does not count."""
        if request.island not in self._members or request.round != self._number:
            return Reply({"what": "missed"})
        self._check_island(request)
        if request.ends and not self._ends:
            self._ends, self._arrived, self._deadline = True, {}, None
        elif self._ends and not request.ends:
            return Reply({"what": "ends"})
        self._arrived.setdefault(request.island, {})[request.rank] = Message(request, data)
        self._changed.notify_all()
        return None

    def _late(self, request: Exchange) -> Reply | None:
        """Return what a rank gets that sends something for the last round when that is decided; None if it is not."""
        over = self._over
        if over is None or request.run != over.run or request.round not in (over.number, over.number + 1):
            return None
        if not request.ends:
            return Reply({"what": "ends"})
        if request.round > over.number:  # it has been given what the last round has led to
            return Reply({"what": "done", "islands": [], "joiners": [], "late": True})
        reply = over.reply(request)
        reply.line["late"] = True
        return reply

    def verdict(self, connection: Connection, request: Verdict) -> Reply:
        """Give the ranks of an island what any of them has found in a round, when all have said it.

        An island counts with all of its shards, or with none. All islands have the same bytes, so all find the same.

        Raises:
            ValueError: the connection has not joined as this rank.
        """
        island, end = request.island, time.monotonic() + self._patience_s
        with self._changed:
            self.check_seat(connection, request)
            decided = self._decided
            if decided is None or decided.number != request.round or request.ranks != len(self._fingerprints):
                return Reply({"what": "missed"})
            found = decided.verdicts.setdefault(island, {})
            found[request.rank] = request.refused
            self._changed.notify_all()
            while len(found) < request.ranks:
                if not decided.ends and island not in self._members:
                    return Reply({"what": "missed"})
                if decided.ends and time.monotonic() > end:
                    return Reply({"error": f"{request.ranks - len(found)} ranks of island {island} were lost."})
                self._wait(connection)
            return Reply({"what": "refused", "islands": sorted(frozenset().union(*found.values()))})

    def _check_island(self, request: Exchange) -> None:
        """Refuse what does not fit to the other ranks of the island."""
        if request.ranks != len(self._fingerprints):
            raise ValueError(f"ranks is {request.ranks}, but {len(self._fingerprints)} have joined")
        for other in self._arrived.get(request.island, {}).values():
            if other.request.steps != request.steps and other.request.ends == request.ends:
                raise ValueError(f"steps is {request.steps} and {other.request.steps} on another rank of the island")

    def _is_complete(self, island: int) -> bool:
        there = self._arrived.get(island, {})
        return bool(there) and len(there) == len(self._fingerprints)

    def _decide_if_due(self) -> None:
        complete = sorted(i for i in self._arrived if self._is_complete(i))
        if not complete:
            return
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._patience_s
        if not self._members <= set(complete) and now < self._deadline:
            return
        messages = {i: self._arrived[i] for i in complete}
        # Those that are late for the last round get its result when they come, as those do that wait to join.
        joiners = [i for i in range(self._islands) if i not in complete] if self._ends else self._joined()
        if complete[0] not in self._members:
            joiners = []  # it has to be there still, to serve them
        sent = {i: {rank: m.request.fingerprint for rank, m in messages[i].items()} for i in complete}
        self._decided = Round(self._number, self._run, self._ends, messages, joiners, disagreement(sent))
        self._number += 1
        self._members = (self._members & set(complete)) | set(joiners)
        self._arrived, self._deadline = {}, None
        self._serve(complete[0], joiners)
        if self._ends:
            self._members, self._ends, self._run = set(), False, None
            self._over = self._decided if self._decided.problem is None else None
        self._changed.notify_all()
