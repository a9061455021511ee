"""Sizes and bandwidths as text, and tables. Plain Python: commands refuse a wrong one before torch is imported."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ls_strategy.errors import ConfigError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?i?)b?\s*", re.IGNORECASE)

_RATE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt])(bit|b)(?:/s|ps)?\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Parse bytes from a number with a unit; GB are 10**9 bytes and GiB 2**30.

    >>> parse_bytes("80GB"), parse_bytes("1.5 GiB"), parse_bytes("4TB")
    (80000000000, 1610612736, 4000000000000)

    Raises:
        ConfigError: the text is not a size.
    """
    found = _NUMBER.fullmatch(text)
    if found is None or found[2].lower() not in _UNITS:
        raise ConfigError(f"Got {text!r}, which is not a size. Give bytes, or a number and a unit: 80GB, 512GiB, 4TB.")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def parse_rate(text: str) -> float:
    """Parse a bandwidth, in 10**9 bytes per second: bits or bytes per second, with a unit.

    >>> parse_rate("100Gbit"), parse_rate("25 GB/s"), parse_rate("1Gbit/s")
    (12.5, 25.0, 0.125)

    Raises:
        ConfigError: the text is not a bandwidth.
    """
    found = _RATE.fullmatch(text)
    if found is None or float(found[1]) <= 0:
        raise ConfigError(f"Got {text!r}, which is not a bandwidth. Give a number and a unit: 100Gbit, 25GB/s.")
    return float(found[1]) * _UNITS[found[2].lower()] / (8 if found[3].lower() == "bit" else 1) / 1e9


def show_bytes(nbytes: float) -> str:
    """Format bytes in the unit that gives a number below 1000.

    >>> show_bytes(512), show_bytes(1.31e9), show_bytes(2.5e13)
    ('512 B', '1.31 GB', '25 TB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: the first column from the left, the others from the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
