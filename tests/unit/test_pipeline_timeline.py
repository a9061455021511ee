"""Recorded times of pipeline actions, and the share of time without work."""

from __future__ import annotations

import pytest
import torch

from ls_strategy.extras.plots.pipeline import draw
from ls_strategy.parallel.pipeline.schedules import Action
from ls_strategy.parallel.pipeline.simulate import bubble
from ls_strategy.parallel.pipeline.timeline import TimelineRecorder

FORWARD, BACKWARD = Action("F", 0, 0), Action("B", 0, 0)


def recorded() -> TimelineRecorder:
    recorder = TimelineRecorder(torch.device("cpu"))
    for action in (FORWARD, BACKWARD):
        start = recorder.mark()
        recorder.add(action, start, recorder.mark())
    return recorder


def test_actions_are_recorded_in_order() -> None:
    spans = recorded().take()
    assert [action for action, _, _ in spans] == [FORWARD, BACKWARD]
    times = [time for _, start, end in spans for time in (start, end)]
    assert times == sorted(times)


def test_actions_are_taken_once() -> None:
    recorder = recorded()
    recorder.take()
    assert recorder.take() == []


def test_bubble_is_the_idle_share_of_all_ranks() -> None:
    spans = [[(FORWARD, 10.0, 12.0), (BACKWARD, 12.0, 14.0)], [(FORWARD, 12.0, 14.0)]]
    assert bubble(spans) == pytest.approx(1 - 6 / 8)


def test_later_stages_of_a_rank_are_lighter() -> None:
    pytest.importorskip("matplotlib")
    image = draw([[(FORWARD, 0.0, 1.0), (Action("F", 2, 0), 1.0, 2.0)]])
    colours = {tuple(colour) for colour in image.flatten(1).t().unique(dim=0).tolist()}
    assert {(66, 133, 244), (113, 164, 247)} <= colours
