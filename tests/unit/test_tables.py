"""No text for users quotes a measured number without a record."""

from __future__ import annotations

import datetime
import json
import re

import pytest

from benchmarks import figures
from benchmarks.figures import documents, load, shown, untraced, value_at
from benchmarks.record import RECORDS, REQUIRED, ROOT
from benchmarks.tables import DOCUMENTS, PICTURES, draw, render

NOT_MEASURED: dict[str, str] = {
    "Which of my 24 GB": "the name of a page",
    "in portions of 64 MiB": "a constant of the writer of checkpoints",
    "1 GiB per round": "what the benchmark was configured to move",
    "with 32 MiB in flight": "what the benchmark was configured to keep in flight",
    "20 buffers of 4 MiB": "constants of the NVMe tier",
    "a drive rated for 600 TB": "an example of what makers of drives promise",
    "keeps 30 % of the bytes": "what the option in front of it says",
    "| 30 minutes |": "the default of an option",
    "(30 minutes)": "the default of an option",
    "waits for them below 1 %": "what an option is set to",
    "takes at most 5 % longer": "a constant of the planner",
    "at most 64 MiB of gradients": "a constant of the reducer",
    "1.25 times its share": "the default of an option",
    "1/32 of all, between 1 MiB and 256 MiB": "the default of an option",
    "and 30 s for what comes after": "a constant of the jobs for Kubernetes",
    "120 s unless given": "the default of an option",
    "gives them 30 s": "a constant of torchrun",
    "at most 2 GiB": "where checkpoints become folders, and damaged ones are not read beforehand",
    "beyond 2 GiB": "where checkpoints become folders",
    "up to 2 GiB": "where checkpoints become folders",
    "15 seconds": "a constant of hubs and islands",
    "about 3 GB, which are 6 GB": "the sizes of packages that are downloaded and installed",
    "takes 1.2 x as long as the median": "a constant of Monitor",
    "at 1.3 x is named": "what a test slows a rank by",
    "below 5% of a step": "a constant of Monitor",
    "2 ms, does not count": "a constant of Monitor",
    "CIFAR-10 reaches 94 %": "the accuracy at which a benchmark stops its clock",
}
"""Words of the documents with a figure that looks measured, and why it is none."""


@pytest.mark.parametrize("document", DOCUMENTS)
def test_tables_and_figures_are_those_of_the_records(document: str) -> None:
    text = (ROOT / document).read_text()
    assert render(text) == text, "run python -m benchmarks.tables"


@pytest.mark.parametrize("path", PICTURES)
def test_pictures_are_those_of_the_records(path: str) -> None:
    assert draw(path) == (ROOT / path).read_text(), "run python -m benchmarks.tables"


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_measured_figure_is_traced(path) -> None:
    """A new one gets a marker (see `benchmarks.figures`), or a reason in `NOT_MEASURED`."""
    found = untraced(path.read_text(), NOT_MEASURED).figures
    assert not found, "\n".join(["figures without a record:", *found])


def test_every_exception_is_of_a_text_that_is_there() -> None:
    used = set().union(*(untraced(path.read_text(), NOT_MEASURED).used for path in documents()))
    assert set(NOT_MEASURED) - used == set()
    assert all(len(reason) > 10 for reason in NOT_MEASURED.values())


RECORD_FILES = sorted((ROOT / RECORDS).glob("*.json"))


@pytest.mark.parametrize("path", RECORD_FILES, ids=lambda path: path.stem)
def test_a_record_says_how_it_was_made(path) -> None:
    found = json.loads(path.read_text())
    # Of records from before the writer asked for them, the size of the memory is not known.
    asked = set(REQUIRED) - {"memory_gib"} - ({"python"} if "python" in found["versions"] else set())
    assert asked <= {name for name, value in found.items() if value}, f"not in {path.name}: {asked - set(found)}"
    assert found["command"].startswith(("python -m benchmarks.", "python -m recipes."))
    assert datetime.date.fromisoformat(found["date"])
    assert "torch" in found["versions"]


@pytest.mark.parametrize("path", RECORD_FILES, ids=lambda path: path.stem)
def test_a_record_has_the_spread_that_it_names(path) -> None:
    found = json.loads(path.read_text())
    kind = re.split("[: ]", found["spread"])[0]
    if kind == "quartiles":
        cells = json.dumps(found["results"])
        assert '"q1"' in cells or "_q1" in cells or re.search(r"\[[\d.]+, [\d.]+, [\d.]+\]", cells)
    elif kind == "over":
        assert "spread" in json.dumps(found) or "noise" in json.dumps(found["results"])
    elif kind == "none":
        counted = {
            "conformance", "planner", "scaling", "deepspeed_parity", "published_packages", "long_sequences",
            "memory_kinds",
        }  # fmt: skip
        assert found["benchmark"] in counted, "what is timed varies"
    else:
        assert kind == "unknown"


def test_where_the_spread_is_unknown_the_text_says_so() -> None:
    unknown = {p.name for p in RECORD_FILES if json.loads(p.read_text())["spread"].startswith("unknown")}
    tables = 0
    for path in documents():
        text = path.read_text()
        for marker in re.finditer(r"<!-- record: \S*/(\w+\.json)\S* -->", text):
            if marker[1] in unknown:
                tables += 1
                before = text[: marker.start()].rstrip().split("\n\n")[-1]
                assert "spread unknown" in before.replace("\n", " "), f"{path}: {marker[0]}"
    assert tables


def test_a_table_of_a_record_to_come_says_how_to_make_it() -> None:
    text = "<!-- record: benchmarks/records/no_such_bench.json -->\n"
    rendered = render(text)
    assert "`python -m benchmarks no_such_bench --record`" in rendered
    assert render(rendered) == rendered


# --- how figures are found and shown ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "A step takes 12.5 ms.",
        "It saves 3 s.",
        "faster by 40 %,",
        "(1.3x)",
        "2.97 GB/s",
        "1,024 MiB of it",
        "three of 5 minutes",
        "| `zero1` | 1.02 times |",
        "<!-- record: a.json -->\n| 1 ms |\n\nand 2 ms here",
        "`code` 7 ms",
    ],
)
def test_what_looks_measured_is_found(text: str) -> None:
    assert len(untraced(text).figures) == 1


@pytest.mark.parametrize(
    "text",
    [
        "2 ranks, 8 x 128 tokens, 16 bit, figure 1, 2.15, 4/N bytes, stage 3",
        "`--gpu-memory 80GB` and ``64 MiB``",
        "```bash\nsleep 3 s\n```\n\n   ```\n   4 ms\n   ```",
        "<!-- record: a.json -->\n| 1 ms |\n| 2 ms |\n",
        "<!--=step_time:a/b .2f-->1.02<!----> ms",
        "<!-- 5 ms -->",
        "[5 ms](5ms.md) ".replace("[5 ms]", "[here]"),
    ],
)
def test_what_does_not_is_left_alone(text: str) -> None:
    assert untraced(text).figures == []


def test_words_excuse_their_figure_and_no_other() -> None:
    text = "in portions of 64 MiB, and\nmeasured 64 MiB"
    found = untraced(text, ["portions of 64 MiB", "not there"])
    assert [figure.split(":")[0] for figure in found.figures] == ["64 MiB"]
    assert found.used == {"portions of 64 MiB"}


def test_a_traced_figure_follows_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "load", {"x": {"results": {"folder, async": [0.1, 0.254]}}}.__getitem__)
    text = (
        "waits <!--=x:results/folder, async/1 .1%-->9 %<!----> of the time, "
        "<!--=x:results/folder, async/1 .0f*1000-->?<!----> ms"
    )
    assert figures.render(text) == text.replace("9 %", "25.4 %").replace("?", "254")


@pytest.mark.parametrize("way", ["results/7M", "results/5M", "results/5M/contenders/zero1/ratio/0"])
def test_a_way_that_leads_nowhere_is_an_error(way: str) -> None:
    with pytest.raises(KeyError, match="results"):
        value_at(load("step_time"), way)


@pytest.mark.parametrize(
    ("value", "form", "scale", "expected"),
    [
        (6.657e9, ".2f", "/10**9", "6.66"),
        (4096, ",d", None, "4,096"),
        (0.0184, "+.1%", None, "+1.8 %"),
        (1.5, "d", None, "2"),
        (33554432, ".0f", "/2**20", "32"),
    ],
)
def test_formats(value, form, scale, expected) -> None:
    assert shown(value, form, scale) == expected
