"""Every figure is shown on a page, says what its record says, and the text before it names an unknown spread.

That figures are those of the records, letter by letter, is a test of ``tests/unit/test_tables.py``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import picture
from benchmarks.record import RECORDS
from benchmarks.tables import PICTURES
from tests.docs.blocks import PAGES, ROOT

SOURCES = (*PAGES, ROOT / "docs" / "index.rst")


def shows(page: Path, path: str) -> bool:
    """Whether a page shows a figure."""
    return path.removeprefix("docs/") in page.read_text()


@pytest.mark.parametrize("path", PICTURES)
def test_every_figure_is_on_a_page_with_a_text_in_its_place(path: str) -> None:
    pages = [page for page in SOURCES if shows(page, path)]
    assert pages, f"{path}: on no page"
    for page in pages:
        if page.suffix == ".md":
            texts = re.findall(r"!\[([^\]]*)\]\(\S*" + re.escape(Path(path).name), page.read_text())
            assert all(len(text) > 20 for text in texts), f"{page.name}: {path} needs a text that says what it shows"


def test_every_file_among_the_figures_is_shown() -> None:
    for file in (ROOT / "docs" / "pictures").iterdir():
        assert any(shows(page, f"docs/pictures/{file.name}") for page in SOURCES), file.name


@pytest.mark.parametrize("path", PICTURES)
def test_where_the_spread_is_unknown_the_text_before_the_figure_says_so(path: str) -> None:
    record = json.loads((ROOT / RECORDS / f"{PICTURES[path][0]}.json").read_text())
    if not record["spread"].startswith("unknown"):
        assert PICTURES[path][0] != "exposed_update", "this test needs a figure whose spread is unknown"
        return
    for page in PAGES:
        text = page.read_text()
        for found in re.finditer(r"!\[[^\]]*\]\(\S*" + re.escape(Path(path).name), text):
            before = text[: found.start()].rstrip().split("\n\n")[-1]
            assert "spread unknown" in before.replace("\n", " "), f"{page.name}: {path}"


def drawn(svg: str) -> list[float]:
    """Widths of the bars, from the first row of the first panel on."""
    return [float(width) for width in re.findall(r'<rect x="[\d.]+" y="[\d.]+" width="([\d.]+)" height="16"', svg)]


def test_lengths_of_bars_are_proportional_to_values() -> None:
    rows = [picture.Bar("zero1", 1.0, 0.5, 2.0), picture.Bar("other", 4.0)]
    (one, four) = drawn(picture.bars("title", [picture.Panel("panel", rows)]))
    assert four == pytest.approx(4 * one, abs=0.2)


def test_panels_share_a_scale_unless_told_otherwise() -> None:
    small = picture.Panel("small", [picture.Bar("zero1", 1.0)])
    large = picture.Panel("large", [picture.Bar("zero1", 10.0)])
    (one, ten) = drawn(picture.bars("title", [small, large]))
    assert ten == pytest.approx(10 * one, abs=0.5)
    own = drawn(picture.bars("title", [small, large], one_scale=False))
    assert own[0] == pytest.approx(own[1], abs=0.2)


def test_a_cut_axis_has_dots_and_no_bars() -> None:
    svg = picture.bars("title", [picture.Panel("panel", [picture.Bar("zero1", 1.1, 1.0, 1.2)], origin=0.9)])
    assert drawn(svg) == []
    assert svg.count("<circle") == 1


def test_text_from_a_record_is_escaped() -> None:
    svg = picture.bars('a "b" <c>', [picture.Panel("p & q", [picture.Bar("<x>", 1.0)])])
    assert "<x>" not in svg
    assert "p &amp; q" in svg
    root = ElementTree.fromstring(svg)
    assert root.attrib["aria-label"] == 'a "b" <c>'
