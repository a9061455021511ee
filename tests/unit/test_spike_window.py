"""`SpikeWindow`: quiet numbers of many kinds stay inside, whatever is far above them does not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from ls_strategy.extras.callbacks.spike_guard import SpikeWindow, limit_of

Draw = Callable[[random.Random, int], float]

QUIET: dict[str, Draw] = {
    "normal": lambda rng, _: rng.gauss(2.5, 0.05),
    "smooth": lambda rng, _: rng.gauss(2.5, 1e-6),
    "around zero": lambda rng, _: rng.gauss(0, 1),
    "skewed": lambda rng, _: rng.lognormvariate(0, 1),
    "falling": lambda rng, i: 10 * math.exp(-i / 50) + rng.gauss(2, 0.1),
    "one batch of ten from another domain": lambda rng, i: rng.gauss(3 if rng.random() < 0.1 else 1, 0.05),
    "zero": lambda *_: 0.0,
    "mostly zero": lambda rng, _: max(rng.gauss(-1, 1), 0),
}


def refused(draw: Draw, seed: int, steps: int = 300) -> int:
    window, rng, found = SpikeWindow(128, 6.0), random.Random(seed), 0
    for i in range(steps):
        value = draw(rng, i)
        if window.refuses(value):
            found += 1
        else:
            window.add(value)
    return found


@pytest.mark.parametrize("draw", QUIET.values(), ids=QUIET)
def test_nothing_quiet_is_refused(draw: Draw) -> None:
    assert sum(refused(draw, seed) for seed in range(5)) == 0


@pytest.mark.parametrize("name", ["normal", "smooth", "skewed", "falling", "one batch of ten from another domain"])
def test_ten_thousand_times_as_much_is_refused(name: str) -> None:
    window, rng = SpikeWindow(128, 6.0), random.Random(1)
    values = [QUIET[name](rng, i) for i in range(64)]
    for value in values[:-1]:
        assert not window.refuses(1e4 * value), "the window is not half full"
        window.add(value)
    window.add(values[-1])
    assert window.refuses(1e4 * values[-1])


def test_the_limit_is_so_many_deviations_above_the_level() -> None:
    assert limit_of([2.0] * 100, 6.0) == pytest.approx(2 + 6 * 0.02), "at least one percent of it"
    spread = [float(i) for i in range(-50, 51)]
    assert limit_of(spread, 2.0) == pytest.approx(45 + 2 * 1.4826 * 25)


def test_what_is_not_finite_is_always_refused() -> None:
    assert all(SpikeWindow(8, 6.0).refuses(value) for value in (math.nan, math.inf, -math.inf))


def test_a_shorter_window_continues_with_the_latest_values() -> None:
    long, short = SpikeWindow(16, 6.0), SpikeWindow(8, 6.0)
    for i in range(16):
        long.add(float(i))
    short.restore(long.state())
    assert short.state() == [float(i) for i in range(8, 16)]
