"""The built site shows what the sources mean: no marker, backtick or link is left as raw text, no code is cut off."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.docs.only_docs import required

SOURCES = sorted(
    {
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "recipes").rglob("README.md"),
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    }
)
RAW = re.compile(r"`|<!--|-->|\]\(|^% |^#+ ", re.MULTILINE)
"""What readers must not see outside of code."""


class Shown(HTMLParser):
    """Text of a page that is not code."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self._hidden: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("code", "pre", "script", "style", "title", "svg"):
            self._hidden.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._hidden and self._hidden[-1] == tag:
            self._hidden.pop()

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.text.append(data)


def shown(html: str) -> str:
    page = Shown()
    page.feed(html)
    return "".join(page.text)


def raw_blocks(text: str) -> list[str]:
    """Blocks that Markdown passes on as they are, though they have text for readers."""
    markdown_it = pytest.importorskip("markdown_it")
    tokens = markdown_it.MarkdownIt("commonmark").enable("table").parse(text)
    blocks = [token.content for token in tokens if token.type == "html_block"]
    without_comments = [re.sub(r"<!--.*?-->", "", block, flags=re.DOTALL).strip() for block in blocks]
    return [text for text in without_comments if text and not text.startswith("<")]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_comment_takes_a_paragraph_with_it(path: Path) -> None:
    """A line that begins with a comment begins a block that Markdown does not read, up to the next empty line."""
    # A table under its record's comment is a block of its own in this project's renderers, as in those of code hosts.
    text = re.sub(r"^(<!-- (?:record|test|file|ci|usage).*-->)$", r"\1\n", path.read_text(), flags=re.MULTILINE)
    assert raw_blocks(text) == []


def test_such_a_paragraph_is_found() -> None:
    assert raw_blocks("Sizes:\n\n<!--=scaling:a .2f-->1.32<!---->, in `bf16`.\n") == ["1.32, in `bf16`."]
    assert raw_blocks("Sizes: <!--=scaling:a .2f-->1.32<!---->, in `bf16`.\n") == []
    assert RAW.search(shown("<p>a <code>`b`</code> c</p>")) is None
    assert RAW.search(shown("<p>in `bf16-true`</p>"))


def test_what_the_extra_docs_does_not_bring_is_hidden() -> None:
    """In the process that builds the site."""
    pytest.importorskip("sphinx")
    kept = required("ls_strategy", ["docs"])
    assert {"sphinx", "furo", "torch", "lightning"} <= kept
    assert not {"ray", "pytest", "jsonargparse", "tensorboard"} & kept
    asked = """
from importlib.util import find_spec
from tests.docs.only_docs import hide_all_but, required
hide_all_but(required("ls_strategy", ["docs"]))
assert find_spec("sphinx")
assert find_spec("torch")
assert not find_spec("pytest")
assert not find_spec("ray")
"""
    subprocess.run([sys.executable, "-c", asked], cwd=ROOT, check=True, timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_site_builds_without_a_warning_or_raw_marker_and_wraps_code(tmp_path: Path) -> None:
    pytest.importorskip("furo")
    (options,) = re.findall(r"sphinx-build (-W -n -c docs \.) build/docs", (ROOT / "README.md").read_text())
    command = [sys.executable, "-m", "tests.docs.only_docs", "-q", *options.split(), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    pages = [page for page in tmp_path.rglob("*.html") if page.stem not in ("search", "genindex", "py-modindex")]
    assert len(pages) > 20
    for page in pages:
        html = page.read_text()
        main = html[html.index("<article") : html.index("</article>")]
        found = RAW.search(shown(main))
        assert found is None, f"{page.name}: {shown(main)[max(found.start() - 80, 0) : found.end() + 80]!r}"
        assert "site.css" in html
    assert "white-space: pre-wrap" in (tmp_path / "_static" / "site.css").read_text()
    assert "grad_norm" in (tmp_path / "docs" / "api.html").read_text()
    index = (tmp_path / "docs" / "index.html").read_text()
    assert "trainer" in index
    assert len(shown(index[index.index("<article") : index.index("</article>")]).split()) > 200
