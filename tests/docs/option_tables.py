"""The tables of docs/options.md, and those of DeepSpeed's keys in docs/migration.md.

A marker ``<!-- options: NAME -->`` stands above the table of a class or of the strategy, and ``<!-- keys: OUTCOME -->``
above that of DeepSpeed's keys with this outcome. A table ends at the next empty line.
``python -m tests.docs.option_tables`` writes them.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from datetime import timedelta
from typing import Any

import ls_strategy
from ls_strategy import ZeROStrategy
from ls_strategy.extras.deepspeed.keys import documented
from tests.docs.blocks import ROOT

PAGES = (ROOT / "docs" / "options.md", ROOT / "docs" / "migration.md")
_MARKER = re.compile(r"^<!-- (options: (\w+)|keys: (\w+)) -->\n(?:\|.*\n)*", re.MULTILINE)


def described(kind: type[Any]) -> dict[str, str]:
    """What the docstring under each field of a dataclass says, in Markdown."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[ast.unparse(field.target)] = _markdown(str(text.value.value))
    return found


def arguments() -> dict[str, str]:
    """What the docstring of the strategy says of each argument."""
    section = str(inspect.getdoc(ZeROStrategy)).split("Args:\n")[1]
    pairs = re.findall(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", section, re.MULTILINE | re.DOTALL)
    return {name: _markdown(text[:1].upper() + text[1:]) for name, text in pairs}


def _markdown(text: str) -> str:
    text = " ".join(text.split()).replace("``", "`")
    return text.replace("|", "\\|")


def _shown(default: Any) -> str:
    if isinstance(default, timedelta):
        return f"{default.total_seconds() / 60:g} minutes"
    if dataclasses.is_dataclass(default):
        return f"`{type(default).__name__}()`"
    if isinstance(default, int) and not isinstance(default, bool) and default >= 1000:
        return f"`{default:_}`"
    return f"`{default!r}`".replace("'", '"')


def table(name: str) -> str:
    """The table of a class of options, or of the strategy's arguments."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    if name == "ZeROStrategy":
        parameters = {n: p for n, p in inspect.signature(ZeROStrategy.__init__).parameters.items() if n != "self"}
        texts = arguments()
        rows += [f"| `{n}` | {_shown(p.default)} | {texts[n]} |" for n, p in parameters.items()]
        return "\n".join(rows) + "\n"
    kind = getattr(ls_strategy, name)
    texts = described(kind)
    for field in dataclasses.fields(kind):
        made = field.default_factory is not dataclasses.MISSING
        default = field.default_factory() if made else field.default  # type: ignore[misc]
        shown = "required" if default is dataclasses.MISSING else _shown(default)
        rows.append(f"| `{field.name}` | {shown} | {texts[field.name]} |")
    return "\n".join(rows) + "\n"


_HEADS = {"mapped": "becomes", "ignored": "reason", "refused": "what to do"}


def keys(outcome: str) -> str:
    """Table of DeepSpeed's keys with one outcome.

    Keys with the same text share a row. The page says that ``bfloat16`` is read as ``bf16``, so it has no rows.
    """
    by_text: dict[str, list[str]] = {}
    for key, entry in documented():
        if entry.outcome == outcome and not key.startswith("bfloat16."):
            by_text.setdefault(entry.text, []).append(f"`{key}`")
    rows = [f"| {', '.join(names)} | {_capitalized(text)} |" for text, names in by_text.items()]
    return "\n".join([f"| key | {_HEADS[outcome]} |", "|---|---|", *rows]) + "\n"


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:] if text.split()[0].strip(":,;").isalpha() else text


def written(text: str) -> str:
    """A page with its tables as the source has them."""

    def block(match: re.Match[str]) -> str:
        made = table(match[2]) if match[2] else keys(match[3])
        return f"<!-- {match[1]} -->\n{made}"

    return _MARKER.sub(block, text)


def classes(text: str) -> list[str]:
    """Names of the classes that a page has tables of."""
    return [match[2] for match in _MARKER.finditer(text) if match[2]]


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page.read_text()))
