"""Images for loggers: rows with names, numbers and colors that are explained, and nothing is cut off."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ls_strategy.errors import ConfigError
from ls_strategy.extras.callbacks.expert_monitor import draw as draw_loads
from ls_strategy.extras.plots import figure
from ls_strategy.extras.plots.front import check_picture, draw_front
from ls_strategy.extras.plots.pipeline import draw as draw_spans
from ls_strategy.extras.plots.ranks import draw_ranks
from ls_strategy.parallel.pipeline.schedules import make_table
from ls_strategy.parallel.pipeline.simulate import simulate

pytest.importorskip("matplotlib")


def pixels(image: Tensor, colour: tuple[int, int, int]) -> int:
    return int((image == torch.tensor(colour, dtype=torch.uint8)[:, None, None]).all(0).sum())


def test_a_long_name_keeps_its_end(written: list[str]) -> None:
    name = "model." + "very_" * 20 + "long.mlp"
    image = figure.rows("title", [name, "b"], [], [], "ms", 1.0)
    assert (image.dtype, image.shape[0], image.shape[2]) == (torch.uint8, 3, 1200)
    assert any(t.startswith("...") and t.endswith("long.mlp") and len(t) == 48 for t in written)


def test_bars_are_as_long_as_they_last_and_the_shortest_are_seen() -> None:
    bars = [figure.Band(0, (200, 0, 0), [(0.0, 25.0)]), figure.Band(1, (0, 0, 200), [(50.0, 100.0), (0.0, 1e-9)])]
    image = figure.rows("title", ["a", "b"], bars, [], "ms", 100.0)
    one, two = pixels(image, (200, 0, 0)), pixels(image, (0, 0, 200))
    height = (image == torch.tensor((200, 0, 0), dtype=torch.uint8)[:, None, None]).all(0).any(1).sum().item()
    assert two / one == pytest.approx(2, rel=0.05)
    assert (two - 2 * one) / height >= 0  # and one pixel of the shortest
    assert pixels(image, (245, 245, 245)) > one  # the ground


def test_dollars_and_signs_of_markup_are_letters(written: list[str]) -> None:
    figure.rows("$x_1$ <b>", ["$\\frac$", "\x1b\u6f22"], [], [], "ms", 1.0)
    assert {"$x_1$ <b>", "$\\frac$"} <= set(written)


def test_loads_have_names_numbers_and_a_scale_of_colours(written: list[str]) -> None:
    image = draw_loads({"blocks.0.mlp": torch.tensor([0.0, 1.0, 1.0, 2.0]), "blocks.1.mlp": torch.ones(4)})
    names = {"blocks.0.mlp", "blocks.1.mlp", "0", "1", "2", "3", "number of the expert", "2 or more", "no token"}
    assert names <= set(written)
    assert any("over the layer's mean load" in t for t in written)
    idle, even, busy = (pixels(image, c) for c in ((40, 40, 40), (245, 245, 245), (219, 68, 55)))
    assert even / idle == pytest.approx(6, rel=0.2)  # cells, but for the legend and the scale
    assert busy / idle == pytest.approx(1, rel=0.2)


def test_layers_of_different_sizes_have_no_common_numbers(written: list[str]) -> None:
    draw_loads({"a": torch.ones(4), "b": torch.zeros(64)})
    assert {"a, 4 experts", "b, 64 experts"} <= set(written)
    assert written.count("1") == 1  # of the scale


def test_numbers_of_many_experts_do_not_overlap(written: list[str]) -> None:
    draw_loads({"a": torch.ones(512)})
    assert [t for t in written if t.isdigit()][:16] == [str(32 * i) for i in range(16)]


@pytest.mark.parametrize(
    ("schedule", "kinds"),
    [
        ("1f1b", {"F: forward", "B: backward"}),
        ("zbv", {"F: forward", "I: backward, gradients of inputs", "W: backward, of weights"}),
    ],
)
def test_a_timeline_has_ranks_milliseconds_and_a_legend(schedule: str, kinds: set[str], written: list[str]) -> None:
    spans = [[(a, s / 1e3, e / 1e3) for a, s, e in row] for row in simulate(make_table(schedule, 2, 8)).spans]
    image = draw_spans(spans)
    assert pixels(image, (66, 133, 244)) > 1000
    assert {"pipeline rank 0", "pipeline rank 1", "time since the first action, ms", "bubble (no work)"} <= set(written)
    assert {t for t in written if t[1:3] == ": "} == kinds
    assert any("lighter" in t for t in written) == (schedule == "zbv")  # two stages on each rank
    longest = 1e3 * (max(e for row in spans for _, _, e in row) - min(s for row in spans for _, s, _ in row))
    assert 0.7 * longest <= max(float(t) for t in written if t.isdigit()) <= longest


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_picture_is_the_same_again(suffix: str, tmp_path: Path) -> None:
    files = [tmp_path / f"{i}.{suffix}" for i in range(2)]
    for path in files:
        check_picture(path)
        draw_front([(1.0, 40.0), (1.5, 20.0), (3.0, 8.0)], "memory against time", "s per step", "GB", path)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_picture_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"front.docx, but matplotlib draws .*png"):
        check_picture(tmp_path / "front.docx")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r'matplotlib is missing. Run pip install "ls_strategy\[report\]"'):
        check_picture(tmp_path / "front.png")


DARKEST = (213, 94, 0)
"""The color of 1.5 x; the scale below the map has a strip of it, too."""


def test_ranks_by_phases_show_where_a_rank_is_slow(written: list[str]) -> None:
    ratios = torch.tensor([[0.8, 1.0, 0.7], [1.7, 1.0, 2.0]])
    columns = ["step", "forward", "backward"]
    image = draw_ranks(ratios, columns, "optimizer step 7")
    assert {"optimizer step 7", "rank 0: 0.80 x", "rank 1: 1.70 x", *columns} <= set(written)
    slow, even = pixels(image, DARKEST), pixels(draw_ranks(ratios.clamp(max=1.2), columns, ""), DARKEST)
    one = 5900  # pixels of a cell, more or less
    assert 1.6 * one < slow - even < 2.6 * one


def test_of_many_ranks_the_slowest_are_shown(written: list[str]) -> None:
    ratios = torch.ones(100, 2)
    ratios[77] = 1.4
    draw_ranks(ratios, ["step", "data"], "optimizer step 7")
    assert "optimizer step 7; the slowest 32 of 100 ranks" in written
    assert "rank 77: 1.40 x" in written
    assert len({text for text in written if text.startswith("rank ")}) == 32
