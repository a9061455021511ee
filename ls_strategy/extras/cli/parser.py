"""A parser of arguments whose errors name the nearest correct word, and the printing of errors in lines."""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import NoReturn

_WIDTH = 100  # a longer error is broken after its sentences
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`'\"(])")


class Parser(argparse.ArgumentParser):
    """Prints what is wrong and where the options are listed, without the usage of all options."""

    @property
    def commands(self) -> dict[str, Parser]:
        """The parsers of its subcommands, by name."""
        found = (action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction))
        return next(found, {})  # pyright: ignore[reportReturnType]  (a dict, whatever argparse calls it)

    def error(self, message: str) -> NoReturn:
        """Print the error, and end with status 2."""
        message = message if message.endswith((".", "?")) else f"{message}."
        print_error(self.prog, f"{message} `{self.prog} --help` lists what there is.")
        self.exit(2)

    def refuse_unknown(self, words: Iterable[str]) -> None:
        """Refuse arguments that the parser does not know, if there are any; end with status 2."""
        for word in words:
            name = word.partition("=")[0]
            if not word.startswith("-"):
                self.error(f"Got {word!r}, but {self.prog} takes no more words")
            near = did_you_mean(name, self._option_string_actions)
            self.error(f"Got {name}, but {self.prog} has no such option.{near}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a sentence with the nearest known word, after a space; empty if none is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {near[0]}?" if near else ""


def print_error(prog: str, message: str) -> None:
    """Print an error on stderr; a long one with a line per sentence, which a terminal shows unbroken words of."""
    print("\n".join(error_lines(f"{prog}: error: {message}")), file=sys.stderr)


def error_lines(text: str) -> list[str]:
    """Return a message in lines: as it is if it is short, otherwise a line for each sentence.

    Sentences are broken further only on a terminal, so that elsewhere a program finds their words in one line.
    """
    if len(text) <= _WIDTH and "\n" not in text:
        return [text]
    lines = [part for line in text.splitlines() for part in (_SENTENCE_END.split(line) if line.strip() else ())]
    lines = [lines[0], *(f"  {line}" for line in lines[1:])]
    if not sys.stderr.isatty():
        return lines
    width = max(shutil.get_terminal_size().columns, 40)
    wrapped = (
        textwrap.wrap(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for line in lines
    )
    return [each for line in wrapped for each in line]
