"""Instructions and their responses: from JSON lines, or made of the functions in the Python standard library.

====================================================  ===============================================================
keys of a line                                        the text that the model sees
====================================================  ===============================================================
``prompt``, ``completion``                            both, as they are
``instruction``, ``input`` (optional), ``output``     the template below (that of Alpaca, without its preamble)
``messages``: a list of ``role`` and ``content``      the tokenizer's chat template; every answer is a response
====================================================  ===============================================================
"""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
"""Folders of the standard library whose functions are not documented for readers."""

LONGEST = 300
"""Maximum characters of a function's source in the embedded instructions, so that a byte-level model sees all of it."""


@dataclass(frozen=True)
class Record:
    """A conversation. The loss counts the responses."""

    turns: tuple[tuple[str, str], ...]
    """Pairs of a prompt and its response, in plain text; empty if there are ``messages``."""

    messages: tuple[dict[str, str], ...] = ()
    """Messages for a chat template."""


def template(instruction: str, given: str = "") -> str:
    r"""Return the prompt of an instruction.

    >>> template("Add.", "1 2")
    '### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n'
    """
    middle = f"### Input:\n{given}\n\n" if given else ""
    return f"### Instruction:\n{instruction}\n\n{middle}### Response:\n"


def read_records(path: Path) -> list[Record]:
    """Read a file of JSON lines.

    Raises:
        ValueError: a line is not JSON, or has none of the known keys.
    """
    records = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                records.append(_record(line, f"{path}, line {number}"))
    return records


def _record(line: str, where: str) -> Record:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}. Write one JSON object per line.") from error
    if isinstance(entry, dict):
        if isinstance(entry.get("messages"), list):
            return Record((), tuple(entry["messages"]))
        if {"prompt", "completion"} <= entry.keys():
            return Record(((entry["prompt"], entry["completion"]),))
        if {"instruction", "output"} <= entry.keys():
            return Record(((template(entry["instruction"], entry.get("input") or ""), entry["output"]),))
    keys = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
    raise ValueError(
        f"{where} has {keys}. Give prompt and completion; instruction, input and output; or messages, a list of role "
        "and content."
    )


def embedded_records() -> list[Record]:
    """Return instructions to document the functions of the standard library; the responses are their docstrings.

    The order is that of a hash of their sources, so that neighbours come from different modules.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, str] = {}
    for file in sorted(root.glob("**/*.py")):
        if not EXCLUDED & set(file.relative_to(root).parts[:-1]):
            found |= dict(_documented(file.read_text(encoding="utf-8", errors="replace")))
    order = sorted(found, key=lambda source: hashlib.blake2b(source.encode()).digest())
    return [Record(((template("Document this function.", source), found[source]),)) for source in order]


def _documented(text: str) -> Iterator[tuple[str, str]]:
    """Yield the source of each short function without its docstring, and the docstring's first line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old modules
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return  # some files of the library are templates or tests of the parser
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        summary = (ast.get_docstring(node) or "").split("\n")[0].strip()
        if not summary or len(node.body) == 1:
            continue
        node.body, node.decorator_list = node.body[1:], []
        source = ast.unparse(node)
        if len(source) <= LONGEST:
            yield source, summary


def split(records: Sequence[Record], fraction: float) -> tuple[list[Record], list[Record]]:
    """Return training and validation records: the last ``fraction`` of them, at least one, validates."""
    held = max(round(len(records) * fraction), 1)
    return list(records[:-held]), list(records[-held:])
