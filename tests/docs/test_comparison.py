"""docs/comparison.md: every cell says where it can be checked, in a version that the page names."""

from __future__ import annotations

import re

import pytest

from tests.docs.blocks import ROOT

PAGE = ROOT / "docs" / "comparison.md"
TEXT = PAGE.read_text()
DEFINED = dict(re.findall(r"^\[([\w-]+)\]: (\S+)$", TEXT, re.MULTILINE))
LINK = re.compile(r"\[(?P<text>[^\]]+)\](?:\((?P<path>[^)]+)\)|\[(?P<name>[\w-]+)\])")
PEERS = {
    "ds": ("deepspeedai/DeepSpeed", "v0.19.8"),
    "pl": ("Lightning-AI/pytorch-lightning", "2.6.6"),
    "tr": ("huggingface/transformers", "v5.24.0"),
    "ac": ("huggingface/accelerate", "v1.15.0"),
    "tt": ("pytorch/torchtitan", "4f9e9a47"),
    "mc": ("NVIDIA/Megatron-LM", "d98e8a64"),
}
# DeepSpeed's package has no documents; theirs are of a commit before it.
DOCUMENTS = {"ds": "edaa7221"}
COLUMNS = ("ds", "pl", "hf", "tt", "mc")


def rows() -> list[list[str]]:
    """Cells of the tables that compare: the first is the question, the second ours."""
    found = []
    for table in re.split(r"\n\n", TEXT):
        lines = table.splitlines()
        if lines and lines[0].startswith("| | `ls_strategy` |"):
            found += [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return found


ROWS = rows()


def test_there_are_rows() -> None:
    assert len(ROWS) > 20
    assert all(len(row) == 7 for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_cell_has_evidence_of_its_own_column(row: list[str]) -> None:
    ours = LINK.findall(row[1])
    assert ours, "ours names no guide"
    assert all(path.split("#")[0].endswith(".md") and not name for _, path, name in ours)
    for peer, cell in zip(COLUMNS, row[2:], strict=True):
        links = [match for match in LINK.finditer(cell)]
        assert links or cell == "not found", f"{peer}: {cell!r} has no link"
        for link in links:
            # FSDP2 is PyTorch's, which torchtitan's documentation describes; what runs here was measured here.
            of_others = {"pl": ("pl", "tt"), "ds": ("ds", "pl-ds"), "hf": ("tr", "ac")}.get(peer, (peer,))
            assert link["name"] is None or link["name"].startswith(of_others), f"{peer}: {link[0]}"
            measured_here = ("benchmarks.md", "conformance.md")
            assert link["path"] is None or link["path"].startswith(measured_here), f"{peer}: {link[0]}"


def test_links_are_of_the_versions_that_the_page_names() -> None:
    for name, url in DEFINED.items():
        peer = name.split("-")[0]
        repository, version = PEERS[peer]
        if "/docs/" in url:
            version = DOCUMENTS.get(peer, version)
        assert re.match(rf"https://github.com/{repository}/(?:blob|tree)/{version}[0-9a-f]*/", url), (name, url)
        assert f"`{version}`" in TEXT or f"Lightning {version}" in TEXT


def test_links_are_defined_and_used() -> None:
    used = {match["name"] for match in LINK.finditer(TEXT) if match["name"]}
    assert used == set(DEFINED)


def test_what_this_package_lacks_comes_first() -> None:
    """A page that praises itself first is no comparison."""
    sections = re.findall(r"^## (.*)$", TEXT, re.MULTILINE)
    assert sections[0] == "Where the others are ahead"
    first = TEXT.split("## ")[1]
    assert "Nothing of it has run over NCCL" in " ".join(first.split())
    assert "**no**" in next(row for row in ROWS if row[0] == "has run on many GPUs")[1]
