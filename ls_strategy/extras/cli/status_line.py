"""A status line on stderr."""

from __future__ import annotations

import sys
import time

_EVERY_S = 5.0  # where lines are not overwritten, a count is printed at most this often


def show_status(text: str) -> None:
    """Overwrite the last line of a terminal, or print a line elsewhere. An empty text clears the line."""
    if sys.stderr.isatty():
        print(f"\r{text[:79]:<79}", end="" if text else "\r", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


class Progress:
    """Shows the phases of work, and how far one is."""

    def __init__(self) -> None:
        self._shown = time.monotonic()

    def phase(self, text: str) -> None:
        """Show what begins; an empty text clears the line."""
        show_status(text)
        self._shown = time.monotonic()

    def count(self, what: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` are done, and that ``what`` begins."""
        if sys.stderr.isatty() or time.monotonic() - self._shown > _EVERY_S:
            self.phase(f"... {done} of {total} done, now {what}")
