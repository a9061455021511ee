"""Check what ranks ask the hub, entry by entry; nothing else of a request is kept. Standard library only.

An entry that is missing, of another type or out of range raises ValueError before the hub acts on the request. So a
malformed request can only end the connection of the island that sent it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ls_strategy.extras.requests import short_text, whole_number

PROTOCOL = 2  # what ranks and the hub have to agree on before anything else: the form of requests and answers
MOST_BYTES = 1 << 40  # of one request or part of an answer
_MOST_ISLANDS = 1024
_MOST_RANKS = 1 << 20
_MOST_NUMBER = 1 << 53
_MOST_ENTRIES = 64
_MOST_CHARACTERS = 8192


@dataclass(frozen=True)
class Request:
    """Identity of the rank that asks: its island, its number, and the number of ranks of that island."""

    island: int
    rank: int
    ranks: int


@dataclass(frozen=True)
class Join(Request):
    """A rank comes."""

    fingerprint: dict[str, Any]
    run: str | None
    round: int
    again: bool  # whether this process has been in the run before


@dataclass(frozen=True)
class Exchange(Request):
    """A rank sends its part of a round."""

    fingerprint: dict[str, Any]
    run: str | None
    round: int
    steps: int
    ends: bool


@dataclass(frozen=True)
class Verdict(Request):
    """A rank says what it has found in a round."""

    round: int
    refused: frozenset[int]  # islands whose contribution to this rank's shards cannot be right


@dataclass(frozen=True)
class State(Request):
    """A rank sends its part of the state for those that come."""

    round: int
    buffers: int  # how many numbers at the end are values of buffers


def join(request: Mapping[str, Any]) -> Join:
    """Return a checked request.

    Raises:
        ValueError: an entry is something else.
    """
    return Join(
        *_who(request), _fingerprint(request), _run(request), whole_number(request, "round", _MOST_NUMBER),
        _flag(request, "again"),
    )  # fmt: skip


def exchange(request: Mapping[str, Any]) -> Exchange:
    """Return a checked request.

    Raises:
        ValueError: an entry is something else.
    """
    return Exchange(
        *_who(request), _fingerprint(request), _run(request), whole_number(request, "round", _MOST_NUMBER),
        whole_number(request, "steps", _MOST_NUMBER), _flag(request, "ends"),
    )  # fmt: skip


def verdict(request: Mapping[str, Any]) -> Verdict:
    """Return a checked request.

    Raises:
        ValueError: an entry is something else.
    """
    refused = request.get("refused")
    if not isinstance(refused, list) or len(refused) > _MOST_ISLANDS:
        raise ValueError("refused is no list of islands")
    islands = frozenset(whole_number({"refused": island}, "refused", _MOST_ISLANDS - 1) for island in refused)
    return Verdict(*_who(request), whole_number(request, "round", _MOST_NUMBER), islands)


def state(request: Mapping[str, Any]) -> State:
    """Return a checked request.

    Raises:
        ValueError: an entry is something else.
    """
    return State(
        *_who(request), whole_number(request, "round", _MOST_NUMBER), whole_number(request, "buffers", MOST_BYTES // 8)
    )


def _who(request: Mapping[str, Any]) -> tuple[int, int, int]:
    ranks = whole_number(request, "ranks", _MOST_RANKS)
    return whole_number(request, "island", _MOST_ISLANDS - 1), whole_number(request, "rank", ranks - 1), ranks


def _run(request: Mapping[str, Any]) -> str | None:
    return None if request.get("run", "") is None else short_text(request, "run", 64)


def _flag(request: Mapping[str, Any], name: str) -> bool:
    value = request.get(name)
    if not isinstance(value, bool):
        raise ValueError(f"{name} is neither true nor false")
    return value


def _fingerprint(request: Mapping[str, Any]) -> dict[str, Any]:
    found = request.get("fingerprint")
    if not isinstance(found, dict) or len(found) > _MOST_ENTRIES:
        raise ValueError(f"fingerprint does not have up to {_MOST_ENTRIES} entries")
    for key, value in found.items():
        if len(key) > _MOST_CHARACTERS or not (value is None or isinstance(value, bool | int | float | str)):
            raise ValueError("fingerprint has an entry that is no plain value")
        if isinstance(value, str) and len(value) > _MOST_CHARACTERS:
            raise ValueError(f"fingerprint has a text of more than {_MOST_CHARACTERS} characters")
    return found
