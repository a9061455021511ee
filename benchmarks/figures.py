"""Figures in running text that come from records, and those that do not.

A traced figure is written between two comments, which readers do not see::

    <!--=step_time:results/5M/contenders/zero1/ratio .2f-->1.02<!---->

Not at the beginning of a line, where Markdown takes the comment for the start of a block that is no text.

The first names a record, the way to a number in it, and how it is shown: a format of Python, with ``%`` for a share as
a percentage, and behind it ``*1000`` or ``/2**20`` to change the unit. ``python -m benchmarks.tables`` writes the
figure; a test asserts that it is up to date.

`untraced` finds what looks measured and is not traced: numbers with a unit of time, of bytes or of speed, percentages
and multiples. Code, tables made from records and comments do not count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.record import RECORDS, ROOT

TRACED = re.compile(
    r"<!--=(?P<record>\w+):(?P<way>[^>]+?) (?P<format>[,+]?(?:\.\d)?[dfeg%])(?P<scale>[*/][\d.*e]+)?-->"
    r"(?P<shown>[^<]*)<!---->"
)
_NUMBER = r"(?<![\w.,])[+-]?\d(?:[\d,.]*\d)?"
_UNITS = (
    "ms", "µs", "us", "ns", "s", "seconds?", "minutes?", "hours?", "%", r"x(?! ?\d)", "times", "kB", "MB", "GB", "TB",
    "KiB", "MiB", "GiB", "TiB", "[kMGT]i?B/s", "[MGT]FLOP/s", "tokens/s", "tokens per second", "nats",
)  # fmt: skip
FIGURE = re.compile(rf"{_NUMBER}[ \u00a0]?(?:{'|'.join(_UNITS)})(?![\w/])")
_NOT_TEXT = re.compile(
    r"^[ ]*(?P<fence>`{3,}|~{3,}).*?^[ ]*(?P=fence)[ \t]*$"  # code
    r"|^<!-- record: \S+ -->\n(?:\|[^\n]*(?:\n|\Z))*"  # tables that `tables` writes
    r"|<!--.*?-->"
    r"|(?P<ticks>`+)(?!`).*?(?<!`)(?P=ticks)(?!`)"  # code in text
    r"|\]\([^)]*\)"  # addresses
    r"|https?://\S+",
    re.DOTALL | re.MULTILINE,
)


@cache
def load(name: str) -> dict[str, Any]:
    """A record of `RECORDS`, by its name.

    Raises:
        FileNotFoundError: there is none.
    """
    return json.loads((ROOT / RECORDS / f"{name}.json").read_text())


def value_at(record: Any, way: str) -> float:
    """The number at a way of keys, and of indices of lists, with slashes between.

    >>> value_at({"results": {"5M": [1.0, 2.5]}}, "results/5M/1")
    2.5

    Raises:
        KeyError: the way ends somewhere, or at what is no number.
    """
    at = record
    for key in way.split("/"):
        try:
            at = at[int(key)] if isinstance(at, list) else at[key]
        except (KeyError, IndexError, TypeError, ValueError):
            known = f"0 to {len(at) - 1}" if isinstance(at, list) else ", ".join(at) if isinstance(at, dict) else at
            raise KeyError(f"{way}: no {key!r}; there is {known}") from None
    if isinstance(at, bool) or not isinstance(at, (int, float)):
        raise KeyError(f"{way} is {at!r}, not a number")
    return at


def shown(value: float, form: str, scale: str | None = None) -> str:
    """The figure.

    >>> shown(1.0234, ".2f"), shown(0.814, ".1%"), shown(33554432, ".0f", "/2**20"), shown(0.0123, ".1f", "*1000")
    ('1.02', '81.4 %', '32', '12.3')
    """
    if scale:
        base, _, power = scale[1:].partition("**")
        factor = float(base) ** float(power or 1)
        value = value * factor if scale[0] == "*" else value / factor
    if form.endswith("d"):
        value = round(value)
    return f"{value:{form}}".replace("%", " %")


def render(text: str) -> str:
    """``text`` with every traced figure written anew."""

    def write(found: re.Match[str]) -> str:
        value = value_at(load(found["record"]), found["way"])
        begin = found.group().index("-->") + 3
        return f"{found.group()[:begin]}{shown(value, found['format'], found['scale'])}<!---->"

    return TRACED.sub(write, text)


def documents() -> list[Path]:
    """Every text for users whose figures have to be traced."""
    found = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").rglob("README.md")]
    return sorted(path for path in found if not {"_build", "build"} & set(path.parts))


@dataclass
class Untraced:
    """Of one text."""

    figures: list[str]  # that look measured, are not traced and are not allowed, each with the words around it
    used: set[str]  # which of the allowed words were there


def untraced(text: str, allowed: Iterable[str] = ()) -> Untraced:
    """Figures of a text that have no record.

    Args:
        text: Markdown.
        allowed: words, each with a figure in it that is none of a measurement.

    >>> untraced("Saving takes 3 s, in portions of 64 MiB.", ["portions of 64 MiB"]).figures
    ['3 s: Saving takes 3 s, in portions of 64 MiB.']
    """
    rest = _NOT_TEXT.sub(_blank, TRACED.sub(_blank, text))
    words = " ".join(rest.split())
    result, excused = Untraced([], set()), []
    for phrase in allowed:
        spans = [found.span() for found in re.finditer(re.escape(phrase), words)]
        excused += spans
        if spans:
            result.used.add(phrase)
    for found in FIGURE.finditer(words):
        if not any(begin <= found.start() and found.end() <= end for begin, end in excused):
            around = words[max(0, found.start() - 50) : found.end() + 50]
            result.figures.append(f"{found.group()}: {around}")
    return result


def _blank(found: re.Match[str]) -> str:
    """Something that is no number, and does not join what stands before and behind."""
    return " _ "
