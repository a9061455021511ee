"""Frames around pictures: the rows stay as they are, and everything around them is written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ls_strategy.extras.callbacks.expert_monitor import cells
from ls_strategy.extras.callbacks.expert_monitor import draw as draw_loads
from ls_strategy.extras.plots.figure import Frame, framed, ticks
from ls_strategy.extras.plots.pipeline import bars
from ls_strategy.extras.plots.pipeline import draw as draw_spans
from ls_strategy.extras.plots.ranks import draw_ranks
from ls_strategy.parallel.pipeline.schedules import make_table
from ls_strategy.parallel.pipeline.simulate import simulate

ImageDraw: Any = pytest.importorskip("PIL.ImageDraw")

PLAIN = Frame(title="", rows=["", ""], x_label="", x_ticks=[], legend=[])


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All texts that are drawn."""
    texts: list[str] = []
    draw = ImageDraw.ImageDraw.text

    def text(self: Any, xy: Any, text: str, *args: Any, **options: Any) -> None:
        texts.append(text)
        draw(self, xy, text, *args, **options)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", text)
    return texts


def contains(image: Tensor, body: Tensor) -> bool:
    """Whether the rows are somewhere in the image, unchanged."""
    height, width = body.shape[1:]
    return any(
        torch.equal(image[:, y : y + height, x : x + width], body)
        for y in range(image.shape[1] - height + 1)
        for x in range(image.shape[2] - width + 1)
        if torch.equal(image[:, y : y + height, x], body[:, :, 0])
    )


@pytest.mark.parametrize(
    "part",
    [
        {"title": "what this is"},
        {"rows": ["first", "second"]},
        {"x_label": "time, ms"},
        {"x_ticks": [(0.0, "0"), (1.0, "10")]},
        {"legend": [((200, 0, 0), "busy")]},
        {"scale": ("load: 0", [(0, 0, 200), (200, 0, 0)], "2")},
    ],
    ids=lambda part: next(iter(part)),
)
def test_every_part_is_drawn_beside_the_rows(part: dict[str, Any]) -> None:
    body = torch.randint(0, 255, (3, 60, 200), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    without, image = framed(body, PLAIN), framed(body, replace(PLAIN, **part))
    assert image.dtype == torch.uint8
    assert contains(without, body)
    assert contains(image, body)
    assert (image < 128).all(0).sum() + (image[0] - image[2].int()).abs().gt(100).sum() > (
        (without < 128).all(0).sum() + (without[0] - without[2].int()).abs().gt(100).sum() + 5
    )  # more ink


def test_a_long_name_keeps_its_end(written: list[str]) -> None:
    name = "model." + "very_" * 20 + "long.mlp"
    framed(torch.zeros(3, 60, 200, dtype=torch.uint8), replace(PLAIN, rows=[name, "b"]))
    assert any(text.startswith("...") and text.endswith("long.mlp") and len(text) == 48 for text in written)


@pytest.mark.parametrize(
    ("length", "last"),
    [(1.0, "1"), (3.3, "3"), (10.0, "10"), (99.0, "90"), (1234.5, "1200"), (0.0007, "0.0007"), (0.0, "0")],
)
def test_ticks_are_round_numbers_up_to_the_end(length: float, last: str) -> None:
    found = ticks(length)
    assert found[0] == (0.0, "0")
    assert found[-1][1] == last
    assert len(found) <= 11
    for place, text in found:
        assert place * length == pytest.approx(float(text))
        assert 0 <= place <= 1 + 1e-9


def test_loads_have_names_numbers_and_a_scale_of_colours(written: list[str]) -> None:
    loads = {"blocks.0.mlp": torch.tensor([0.0, 1.0, 1.0, 2.0]), "blocks.1.mlp": torch.ones(4)}
    assert contains(draw_loads(loads), cells(list(loads.values())))
    names = {"blocks.0.mlp", "blocks.1.mlp", "0", "1", "2", "3", "number of the expert", "2 or more", "no token"}
    assert names <= set(written)
    assert any("over the layer's mean load" in text for text in written)


def test_layers_of_different_sizes_have_no_common_numbers(written: list[str]) -> None:
    draw_loads({"a": torch.ones(4), "b": torch.ones(64)})
    assert {"a, 4 experts", "b, 64 experts"} <= set(written)
    assert "1" not in written


def test_numbers_of_many_experts_do_not_overlap(written: list[str]) -> None:
    draw_loads({"a": torch.ones(512)})
    assert [text for text in written if text.isdigit()] == [str(32 * i) for i in range(16)]


@pytest.mark.parametrize(
    ("schedule", "kinds"),
    [
        ("1f1b", {"F: forward", "B: backward"}),
        ("zbv", {"F: forward", "I: backward, gradients of inputs", "W: backward, of weights"}),
    ],
)
def test_a_timeline_has_ranks_milliseconds_and_a_legend(schedule: str, kinds: set[str], written: list[str]) -> None:
    spans = [[(a, s / 1e3, e / 1e3) for a, s, e in row] for row in simulate(make_table(schedule, 2, 8)).spans]
    image = draw_spans(spans, width=400)
    assert contains(image, bars(spans, width=400))
    assert {"pipeline rank 0", "pipeline rank 1", "time since the first action, ms", "bubble (no work)"} <= set(written)
    assert {text for text in written if text[1:3] == ": "} == kinds
    assert ("lighter" in written[0]) == (schedule == "zbv")  # two stages on each rank
    longest = 1e3 * (max(e for row in spans for _, _, e in row) - min(s for row in spans for _, s, _ in row))
    assert float([text for text in written if text.isdigit()][-1]) <= longest


DARKEST = torch.tensor([213, 94, 0], dtype=torch.uint8)


def dark(image: Tensor) -> Tensor:
    """Where an image has the color of 1.5 x, without the scale above the rows, ``(H, W)``."""
    return (image == DARKEST[:, None, None]).all(0)[50:]


def test_ranks_by_phases_show_where_a_rank_is_slow(written: list[str]) -> None:
    ratios = torch.tensor([[0.8, 1.0, 0.7], [1.7, 1.0, 2.0]])
    image = draw_ranks(ratios, ["step", "forward", "backward"], "optimizer step 7")
    assert {"optimizer step 7", "rank 0: 0.80 x", "rank 1: 1.70 x", "step", "forward", "backward"} <= set(written)
    rows, columns = dark(image).nonzero(as_tuple=True)
    assert len(rows.unique()) == 20  # one row of the map
    assert len(columns.unique()) == 2 * 128  # two of its columns, with gaps
    assert not dark(draw_ranks(ratios.clamp(max=1.2), ["step", "forward", "backward"], "")).any()


def test_of_many_ranks_the_slowest_are_shown(written: list[str]) -> None:
    ratios = torch.ones(100, 2)
    ratios[77] = 1.4
    draw_ranks(ratios, ["step", "data"], "optimizer step 7")
    assert written[0] == "optimizer step 7; the slowest 32 of 100 ranks"
    assert "rank 77: 1.40 x" in written
    assert sum(text.startswith("rank ") for text in written) == 32
