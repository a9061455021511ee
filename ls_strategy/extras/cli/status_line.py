"""A status line on stderr."""

from __future__ import annotations

import sys


def show_status(text: str) -> None:
    """Overwrite the last line of a terminal, or print a line elsewhere. An empty text clears the line."""
    if sys.stderr.isatty():
        print(f"\r{text[:79]:<79}", end="" if text else "\r", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)
