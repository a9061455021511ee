"""``ls-strategy plan --longest``: the longest samples and the largest micro-batch that fit, for every strategy."""

from __future__ import annotations

from typing import Any


class Reached:
    """Longest samples and largest micro-batch that fit, for every candidate, as text or JSON."""

    def __init__(self, forecaster: Any, hardware: Any) -> None:
        """Search, while the module of a `ls_strategy.extras.planner.forecast.Forecaster` is simulated."""
        from ls_strategy.extras.planner.reach import Reaches

        reaches = Reaches(forecaster, hardware)
        self._length, self._samples = reaches.length, reaches.samples
        self._found = [reaches.of(candidate) for candidate in forecaster.candidates(hardware)]
        longest = max(each.tokens for each in self._found)
        self._accepted = longest <= self._length or reaches.accepts(longest)

    def lines(self) -> list[str]:
        """Return the lines to print."""
        from ls_strategy.extras.planner.reach import reach_lines

        lines = reach_lines(self._found, self._length, self._samples)
        if not self._accepted:
            lines.append(
                f"The model does not run on samples of that length as it is configured (now: {self._length:,} tokens). "
                "Raise its limit, and plan again with it: tables of positions then take more."
            )
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return {
            "tokens_per_sample_now": self._length,
            "samples_now": self._samples,
            "model_accepts_the_longest": self._accepted,
            "strategies": [each.to_dict() for each in self._found],
        }
