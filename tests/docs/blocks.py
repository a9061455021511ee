"""Code blocks of README.md and docs/*.md, and the invisible markers above them.

==============================================  =====================================================================
marker, on the line above the fence             meaning
==============================================  =====================================================================
``<!-- file: PATH -->``                         the block is this file
``<!-- file: PATH#NAME -->``                    the block is this function or class of it, for example ``A.method``
``<!-- test: OLD -> NEW; OLD -> NEW -->``       what the test replaces, since it has no GPU, drive or eight ranks
``<!-- test: save NAME -->``                    a file that commands of the same page use
``<!-- test: edit NAME -->``                    a diff of a file that was saved before (the tutorial)
``<!-- test: output -->``                       lines that the commands before print (the tutorial)
``<!-- test: serve -->``                        a command that runs until it is interrupted (the tutorial)
==============================================  =====================================================================

The Python blocks of a page that have no ``file`` or ``save`` are one program: later ones use what earlier ones define.
``python -m tests.docs.blocks`` writes quoted files into their blocks anew.
"""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
LANGUAGES = ("python", "yaml", "bash", "json", "diff", "")
"""What there is a test for; a block without a language is a picture."""

_BLOCK = re.compile(
    r"^(?:[ ]*<!--[ ](?P<kind>test|file):[ ](?P<marker>.*?)[ ]-->\n)?"
    r"(?P<indent>[ ]*)```(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    """Of its first line of text, from 1 on."""
    language: str
    text: str
    """As readers see it, without the indentation of the fence."""
    kind: str = ""
    marker: str = ""

    @property
    def quotes(self) -> str | None:
        """``PATH`` or ``PATH#NAME`` of what it is a copy of."""
        return self.marker if self.kind == "file" else None

    @property
    def saved_as(self) -> str | None:
        """Name of the file that the page tells to make of it."""
        return self.marker.removeprefix("save ") if self.marker.startswith("save ") else None

    @property
    def edits(self) -> str | None:
        """Name of the file that the page tells to change."""
        return self.marker.removeprefix("edit ") if self.marker.startswith("edit ") else None

    @property
    def replacements(self) -> list[tuple[str, str]]:
        """Pairs of what the block says and what is run."""
        if self.kind != "test" or self.saved_as or self.edits or self.marker in ("output", "serve"):
            return []
        pairs = [each.split(" -> ") for each in self.marker.split("; ")]
        assert all(len(pair) == 2 for pair in pairs), f"{self}: a marker says OLD -> NEW; OLD -> NEW"
        return [(old, new) for old, new in pairs]

    @property
    def code(self) -> str:
        """What is run."""
        code = self.text
        if self.language == "diff":
            code = "".join(line[1:] for line in code.splitlines(keepends=True) if not line.startswith("-"))
        for old, new in self.replacements:
            assert old in code, f"{self}: {old!r} is not in the block"
            code = code.replace(old, new)
        return code

    @property
    def runs_in_page(self) -> bool:
        """Whether it is part of the page's program."""
        named = self.quotes or self.saved_as or self.edits
        return self.language in ("python", "diff") and named is None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """All blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(
            page=page,
            line=text.count("\n", 0, match.start("text")) + 1,
            language=match["language"].strip(),
            text=_without_indent(match["text"], match["indent"]),
            kind=match["kind"] or "",
            marker=match["marker"] or "",
        )
        for match in _BLOCK.finditer(text)
    ]


def program_of(page: Path) -> str:
    """The page's Python blocks as one program, each line under the number that it has in the page."""
    lines = [""] * len(page.read_text().splitlines())
    for block in blocks_of(page):
        if block.runs_in_page:
            code = block.code.splitlines()
            lines[block.line - 1 : block.line - 1 + len(code)] = code
    return "\n".join(lines).rstrip() + "\n"


def quoted(reference: str) -> str:
    """Text of a file, or of one definition in it, without its indentation."""
    path, _, name = reference.partition("#")
    text = (ROOT / path).read_text()
    if not name:
        return text
    scope: ast.AST = ast.parse(text)
    for part in name.split("."):
        scope = next(
            node
            for node in ast.iter_child_nodes(scope)
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == part
        )
    assert isinstance(scope, (ast.FunctionDef, ast.ClassDef))
    first = min([scope.lineno, *(decorator.lineno for decorator in scope.decorator_list)])
    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : scope.end_lineno]) + "\n")


def render(text: str) -> str:
    """``text`` with every quoting block made anew."""

    def anew(match: re.Match[str]) -> str:
        if match["kind"] != "file":
            return match[0]
        start, end = match.start("text") - match.start(), match.end("text") - match.start()
        return match[0][:start] + textwrap.indent(quoted(match["marker"]), match["indent"]) + match[0][end:]

    return _BLOCK.sub(anew, text)


def _without_indent(text: str, indent: str) -> str:
    return "".join(line.removeprefix(indent) for line in text.splitlines(keepends=True))


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(render(each.read_text()))
