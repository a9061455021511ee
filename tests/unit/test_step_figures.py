"""Images of a step: what is drawn is what was recorded, by rank, on one clock, in known colors, with units."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ls_strategy.extras.callbacks.step_figures import (
    KINDS,
    PHASES,
    SHOWN_RANKS,
    RankStep,
    StepFigures,
    draw_memory,
    draw_time,
)
from ls_strategy.extras.callbacks.step_trace import RankTrace
from ls_strategy.spans import BACKWARD, COMMUNICATION, COPY, DATA, FORWARD, OPTIMIZER, Span, SpanRecord

pytest.importorskip("matplotlib")

MIB = 1 << 20


def record(*, start: float = 0.0, copies: bool = False, gib: float = 1.0) -> SpanRecord:
    """A step of 100 ms: 10 data, 30 forward, 40 backward, 20 update; a message from 50 to 90, waited for from 80."""
    marks = [(DATA, 0.0, 0.01), (FORWARD, 0.01, 0.04), (BACKWARD, 0.04, 0.08), (OPTIMIZER, 0.08, 0.1)]
    phases = [Span("phase", name, start + begin, start + end) for name, begin, end in marks]
    spans = [
        Span(COMMUNICATION, "reduce_scatter block", start + 0.05, start + 0.09, 8 * MIB),
        Span(COMMUNICATION, "wait", start + 0.08, start + 0.09, waits=True),
    ]
    if copies:
        spans.append(Span(COPY, "to host", start + 0.02, start + 0.03, MIB, waits=True))
    one = round(gib * 1024 * MIB)
    memory = [
        (start + 0.01, DATA, {"parameters": one, "optimizer": 2 * one, "process": 8 * one}),
        (start + 0.04, FORWARD, {"parameters": one, "optimizer": 2 * one, "activations": 3 * one, "process": 8 * one}),
        (start + 0.1, OPTIMIZER, {"parameters": one, "optimizer": 2 * one, "process": 8 * one}),
    ]
    return SpanRecord(start, start + 0.1, phases, spans, memory, {})


def two_ranks(**options: Any) -> list[RankStep]:
    """Rank 1 has another clock, begins 20 ms later, and has more memory."""
    first = StepFigures.of_rank(record(**options), 0)
    second = StepFigures.of_rank(record(start=500.02, gib=1.5, **options), 1)
    return [
        RankStep(RankTrace(first.trace.record, 1000.0), first.peak_bytes),
        RankStep(RankTrace(second.trace.record, 500.0), second.peak_bytes),
    ]


def columns(image: Tensor, colour: tuple[int, int, int]) -> dict[int, tuple[int, int]]:
    """The first and last column of a color, by line of pixels."""
    equal = (image == torch.tensor(colour, dtype=torch.uint8)[:, None, None]).all(0)
    lines = equal.any(1).nonzero().flatten().tolist()
    return {y: (equal[y].nonzero().min().item(), equal[y].nonzero().max().item()) for y in lines}


def test_ranks_are_drawn_on_one_clock_with_names_units_and_a_legend(written: list[str]) -> None:
    image = draw_time(two_ranks(), 7, width=1200)
    assert {"rank 0", "rank 1", "messages", "time since the step began, ms", "forward", "backward",
            "update (optimizer)", "data", "waiting", "messages in flight"} <= set(written)  # fmt: skip
    assert "copies" not in written
    assert "optimizer step 7: what each rank did" in written
    assert "120" in written  # ms: 20 of delay and 100
    spans = [span for span in columns(image, PHASES[BACKWARD][0]).values() if span[1] - span[0] > 100]
    begins = sorted({begin for begin, _ in spans})
    assert len(begins) == 2
    (length,) = {end - begin + 1 for begin, end in spans}  # 40 of 120 ms
    assert begins[1] - begins[0] == pytest.approx(length / 2, abs=2)  # 20 of 120 ms
    assert length > 300


def test_copies_have_a_row_of_their_own_where_there_are_any(written: list[str]) -> None:
    draw_time(two_ranks(copies=True), 7)
    assert written.count("copies") == 2
    assert "copies in flight" in written


def test_only_the_first_ranks_are_shown_and_that_is_said(written: list[str]) -> None:
    ranks = [StepFigures.of_rank(record(), rank) for rank in range(SHOWN_RANKS + 4)]
    assert [bool(r.trace.record.spans) for r in ranks] == [True] * SHOWN_RANKS + [False] * 4
    draw_time(ranks, 1)
    assert "optimizer step 1: what each rank did; the first 8 of 12 ranks" in written
    assert "rank 7" in written
    assert "rank 8" not in written


def test_memory_is_that_of_the_fullest_rank_in_heights(written: list[str]) -> None:
    image = draw_memory(two_ranks(), 7)
    assert any("memory of rank 1 by kind, peak 9 GiB, the most of 2 ranks (least: 6 GiB)" in t for t in written)
    assert {"parameters", "moments (optimizer)", "activations and other"} <= set(written)
    assert any("time since the step began, ms" in t for t in written)
    assert {"8", "GiB"} <= set(written)
    assert not any("measured on CUDA only" in t for t in written)
    assert any("the process had at most 12 GiB resident" in t for t in written)

    def rows(kind: str) -> int:
        wide = [span for span in columns(image, KINDS[kind][0]).values() if span[1] - span[0] > 200]
        return len(wide)

    # A sixth, a third and a half of the peak, but for lines of the grid.
    assert rows("optimizer") == pytest.approx(2 * rows("parameters"), abs=4)
    assert rows("activations") == pytest.approx(3 * rows("parameters"), abs=4)
    assert rows("parameters") > 30


def test_without_activations_the_note_says_why(written: list[str]) -> None:
    plain = record()
    for _, _, held in plain.memory:
        held.pop("activations", None)
    draw_memory([StepFigures.of_rank(plain, 0)], 7)
    assert any("activations are measured on CUDA only" in t for t in written)


def test_an_empty_step_is_drawn() -> None:
    empty = StepFigures.of_rank(SpanRecord(1.0, 1.0, [], [], [], {}), 0)
    assert draw_time([empty], 1).dtype == torch.uint8
    assert draw_memory([empty], 1).dtype == torch.uint8
