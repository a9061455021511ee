"""What a habit has come to under a strategy, computed from the reports of the ranks alone.

An error is a refusal with a cure if its text says what to do instead (`_CURE`): that rule is the same for everybody,
and crude. All other errors are raw ones. If ranks fail one after the other, the first error counts.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ls_strategy.extras.conformance.case import Note, Notes, Over
from ls_strategy.extras.conformance.habit import Habit, Phase
from ls_strategy.extras.conformance.ranks import Ending, Report

Outcome = Literal[
    "equal", "refused", "other, with a warning", "silently other", "raw error", "hang", "lost data", "not run"
]

SERIOUS: tuple[Outcome, ...] = ("silently other", "hang", "lost data")
TOLERANCE = 1e-6  # largest difference that is rounding: relative to the largest number of a tensor, all in fp32
_DO = (
    "Add|Call|Change|Choose|Consider|Convert|Copy|Define|Disable|Do not|Drop|Enable|Give|Install|Keep|Leave|Let|Load|"
    "Make|Move|Omit|Override|Pass|Place|Please|Put|Read|Register|Remove|Replace|Run|Save|Set|Start|Switch|Take|Train|Try|Turn|"
    "Update|Use|Wrap|Write"
)
_CURE = re.compile(
    rf"(?:^|[.:;!?)]\s+|\n\s*|, (?:or |and )?)(?:{_DO})\b|\b[Pp]lease\b|\binstead\b|\b[Cc]onsider \w+ing\b|"
    r"\byou (?:can|should|must|need to|are required to)\b|\bby (?:passing|setting|calling|using|making)\b|"
    r"\bor (?:pass|set|use|call)\b|\btry (?:to )?\w+",
)


@dataclass(frozen=True)
class Verdict:
    """What came out, why, and in which time."""

    outcome: Outcome
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Trusted:
    """The notes of the trusted run, for each phase those of its ranks."""

    phases: list[list[Notes]]


def failure(habit: Habit, endings: list[Ending]) -> Verdict | None:
    """Return the verdict if a phase has not ended as it should. ``endings`` holds the phases up to there."""
    for index, ending in enumerate(endings):
        found = _failure(habit, habit.phases[index], ending)
        if found is not None:
            where = "" if len(habit.phases) == 1 else f"in phase {index + 1}: "
            return Verdict(found.outcome, where + found.detail)
    return None


def judge(habit: Habit, endings: list[Ending], trusted: Trusted | None) -> Verdict:
    """Return what a habit has come to that has not failed."""
    if habit.ends == "in an error":
        return Verdict("equal")
    notes = [[report.notes for report in ending.reports if report is not None] for ending in endings]
    compared = list(_compared(habit, notes, trusted))
    other = _broken_claim(notes) or _other_numbers(compared)
    if other is None:
        return Verdict("equal", _remark(habit, endings, compared))
    warned = habit.warning is not None and any(re.search(habit.warning, ending.said) for ending in endings)
    return replace(other, outcome="other, with a warning") if warned and other.outcome == "silently other" else other


def _remark(habit: Habit, endings: list[Ending], compared: list[_Compared]) -> str:
    """Return what to know of a right answer: how large the rounding was, and whether a kill came too late."""
    largest = max((by for each in compared for by, _ in each.values()), default=0.0)
    remarks = [f"within {largest:.0e}"] if largest else []
    for phase, ending in zip(habit.phases, endings, strict=True):
        if phase.killed_rank is not None and ending.reports[phase.killed_rank] is not None:
            remarks.append("the save was over before the kill")
    return "; ".join(remarks)


def _failure(habit: Habit, phase: Phase, ending: Ending) -> Verdict | None:
    """Return the verdict if the phase has not ended as it should."""
    if ending.hung:
        return _hang(ending)
    if phase.killed_rank is not None:
        return None
    if habit.ends == "in an error":
        return _must_fail(ending)
    outcome, detail = _error(ending)
    if not detail:
        return None
    return Verdict("lost data" if phase.loses_data else outcome, detail)


def _hang(ending: Ending) -> Verdict:
    ranks = ", ".join(map(str, ending.hung))
    detail = f"rank {ranks} had not ended at the limit; it stood at {ending.stood_at or 'an unknown place'}"
    first = _first_error(ending)
    return Verdict("hang", detail + (f", after {_line(first[1])} on rank {first[0]}" if first else ""))


def _error(ending: Ending) -> tuple[Outcome, str]:
    """Return what kind of an error the first one is, and a text on it; an empty one if there is none."""
    first = _first_error(ending)
    if first is None:
        died = next((rank for rank, report in enumerate(ending.reports) if report is None), None)
        return "raw error", "" if died is None else f"rank {died} {_death(ending, died)}"
    rank, report = first
    is_alone = any(each is None or not each.error for each in ending.reports)
    return (
        "refused" if says_what_to_do(report.message) else "raw error",
        _line(report) + (f" (on rank {rank} alone)" if is_alone else ""),
    )


def _must_fail(ending: Ending) -> Verdict | None:
    for rank, report in enumerate(ending.reports):
        if report is None:
            return Verdict("raw error", f"rank {rank} {_death(ending, rank)}")
        if not report.error:
            return Verdict("silently other", f"rank {rank} went on as if nothing had happened")
    return None


def _first_error(ending: Ending) -> tuple[int, Report] | None:
    failed = [(rank, report) for rank, report in enumerate(ending.reports) if report is not None and report.error]
    return min(failed, key=lambda pair: pair[1].at, default=None)


def _death(ending: Ending, rank: int) -> str:
    code = ending.exit_codes[rank]
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit status {code} and no error"


def _line(report: Report) -> str:
    text = " ".join(report.message.split())
    if len(text) > 300:
        text = f"{text[:200]} ... {text[-100:]}"
    return f"{report.error}: {text}"


def says_what_to_do(message: str) -> bool:
    """Return whether an error's text contains what to do instead.

    >>> says_what_to_do("Got x=1. Set x=2."), says_what_to_do("mat1 and mat2 shapes cannot be multiplied")
    (True, False)
    """
    return _CURE.search(message) is not None


# --- numbers ----------------------------------------------------------------------------------------------------------


def _broken_claim(phases: list[list[Notes]]) -> Verdict | None:
    for notes in phases:
        for rank, each in enumerate(notes):
            for what, holds in each.claims:
                if not holds:
                    return Verdict("silently other", f"not so on rank {rank}: {what}")
    return None


@dataclass(frozen=True)
class _Compared:
    """The notes of a phase beside the right ones."""

    found: dict[str, list[Any]]
    right: dict[str, list[Any]]

    is_part: bool  # whether the right notes are those of the undisturbed run, of which this phase repeats some

    def values(self) -> Iterator[tuple[float, str]]:
        """Yield by how much each value that both have is wrong, and a text on it."""
        for name, values in self.found.items():
            right = self.right.get(name, [])
            for rank, value in enumerate(values if right else []):
                expected = right[rank if len(right) == len(values) else 0]
                where = f" on rank {rank}" if len(values) > 1 else ""
                yield difference(value, expected), f"{name}{where}: {_shown(value)}, right is {_shown(expected)}"

    def lack(self) -> str | None:
        """Return a text on notes that only one side has."""
        if self.is_part and not self.found:
            return "it has trained on nothing"
        missing = [] if self.is_part else [name for name in self.right if name not in self.found]
        more = [name for name in self.found if name not in self.right]
        if not missing and not more:
            return None
        what = f"no {missing[0]}" if missing else f"{more[0]}, which the trusted run does not have"
        return f"{what} ({len(missing) + len(more)} in all)"


def _compared(habit: Habit, phases: list[list[Notes]], trusted: Trusted | None) -> Iterator[_Compared]:
    for index, notes in enumerate(phases):
        if habit.phases[index].killed_rank is not None:
            continue
        found = combined(notes)
        if trusted is None:  # ranks have to agree
            yield _Compared(found, {name: values[:1] for name, values in found.items()}, False)
            continue
        is_part = habit.trusted_phases == "first" and index > 0
        yield _Compared(found, combined(trusted.phases[0 if is_part else index]), is_part)


def _other_numbers(compared: list[_Compared]) -> Verdict | None:
    lack = next((text for each in compared if (text := each.lack()) is not None), None)
    if lack is not None:
        return Verdict("silently other", lack)
    wrong = [(by, text) for each in compared for by, text in each.values() if by > TOLERANCE]
    if not wrong:
        return None
    first, largest = wrong[0], max(wrong)
    return Verdict(
        "silently other", f"{first[1]} (by {first[0]:.1e}; at most by {largest[0]:.1e}, in {len(wrong)} values)"
    )


def combined(ranks: Sequence[Notes]) -> dict[str, list[Any]]:
    """Return by name what is compared: one value for each rank, or one for all; None where a rank has noted none."""
    kinds: dict[str, Over] = {name: note.over for each in ranks for name, note in each.notes.items()}
    nothing = Note(None, "each")
    return {name: _over(over, [each.notes.get(name, nothing).value for each in ranks]) for name, over in kinds.items()}


def _over(over: Over, values: list[Any]) -> list[Any]:
    if over == "each":
        return values
    if over == "first":
        return values[:1]
    return [None if any(value is None for value in values) else sum(values[1:], values[0]) / len(values)]


def difference(value: Any, right: Any) -> float:
    """Return by how much a value is wrong, relative to the largest number of the right one.

    NaN is right where NaN is expected. Infinite: another type, shape, text, or NaN elsewhere.

    >>> difference(2.0, 1.0), difference(float("nan"), float("nan")), difference("a", "b")
    (1.0, 0.0, inf)
    """
    if isinstance(value, (float, Tensor)) and isinstance(right, (float, Tensor)):
        a, b = torch.as_tensor(value, dtype=torch.float64), torch.as_tensor(right, dtype=torch.float64)
        if a.shape != b.shape or not torch.equal(_infinite(a), _infinite(b)):
            return math.inf
        a, b = a[a.isfinite()], b[b.isfinite()]
        by = (a - b).abs()
        return 0.0 if not by.numel() else float(by.max() / b.abs().max().clamp_min(torch.finfo(torch.float32).tiny))
    return 0.0 if type(value) is type(right) and value == right else math.inf


def _infinite(values: Tensor) -> Tensor:
    """Return 0 for numbers, 1 and -1 for infinities, 2 for NaN."""
    return torch.where(values.isfinite(), 0.0, values.nan_to_num(2.0, 1.0, -1.0))


def _shown(value: Any) -> str:
    if isinstance(value, Tensor) and value.numel() > 1:
        return f"a tensor {tuple(value.shape)} of norm {float(value.double().norm()):.9g}"
    return f"{float(value):.9g}" if isinstance(value, (float, Tensor)) else repr(value)[:80]
