"""Decides from the ranks' reports whether ranks that wait for each other can ever continue, and explains it.

A rank's answer has what it waits for (``wait``: process group, number of the collective in it, ranks needed to complete
it), whether it has waited for long (``late``), whether it has ended the run (``left``), and what it has entered so far
(``journals``: for every group the number of collectives, number and tag of the last ones, and the ranks). Numbers count
from the start of an ``era``, where all ranks synchronised. Equal tags mean the same operation at the same batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Answer = dict[str, Any]
"""What a rank reports; JSON and not a pickle, because anyone who reaches the store's port can write to it."""


# --- evidence ---------------------------------------------------------------------------------------------------------


def awaited(answer: Answer, answers: Mapping[int, Answer]) -> list[int]:
    """Return the ranks that this one waits for: those that have not reached the same collective."""
    wait, mine = answer["wait"], answer["rank"]
    if wait is None:
        others = answers if answer["everyone"] else ()
        return [r for r in others if r != mine and answers[r]["call"] != answer["call"]]
    needed = answer["journals"][wait["group"]][2] if wait["needs"] is None else wait["needs"]
    return [
        r
        for r in needed
        if r != mine and r in answers and answers[r]["era"] == answer["era"]
        and answers[r]["journals"].get(wait["group"], [0])[0] < wait["number"]
    ]  # fmt: skip


def differing(answer: Answer, answers: Mapping[int, Answer]) -> list[int]:
    """Return the ranks that have entered a different collective at the same place of a group."""
    return [
        r
        for r, other in answers.items()
        if r != answer["rank"] and other["era"] == answer["era"]
        and any(_differ(mine, other["journals"].get(name)) for name, mine in answer["journals"].items())
    ]  # fmt: skip


def _differ(mine: Sequence[Any], other: Sequence[Any] | None) -> bool:
    if other is None or mine[2] != other[2]:
        return False
    theirs = dict(other[1])
    return any(theirs.get(number, tag) != tag for number, tag in mine[1])


def proof(answers: Mapping[int, Answer]) -> list[int]:
    """Return ranks whose waits can never end; empty without proof.

    Either ranks wait for each other in a circle, or a rank waits and another rank has entered a different collective at
    the same place of a group, or has ended the run. A slow rank, however long it takes, is no proof.
    """
    for rank, answer in answers.items():
        if answer["late"] and (answer["wait"] is not None or answer["what"].endswith("GPU")):
            left = [r for r in awaited(answer, answers) if answers[r]["left"] and not answer["left"]]
            others = differing(answer, answers) or left
            if others:
                return sorted([rank, *others[:1]])
    edges = {rank: awaited(answer, answers) for rank, answer in answers.items()}
    for rank in edges:
        circle = next(_circles(rank, edges, [rank]), None)
        if circle is not None:
            return sorted(circle)
    return []


def _circles(start: int, edges: Mapping[int, Sequence[int]], path: list[int]) -> Iterator[list[int]]:
    """Yield the ranks of circles through ``start``; every rank is visited once."""
    seen, ways = {start}, [path]
    while ways:
        way = ways.pop()
        for rank in edges.get(way[-1], ()):
            if rank == start:
                yield way
            elif rank not in seen:
                seen.add(rank)
                ways.append([*way, rank])


# --- messages ---------------------------------------------------------------------------------------------------------

_TOGETHER = (
    "Collective operations must run on all ranks: move forwards and reads of parameters at stage 3, state_dict(), "
    "save_checkpoint(), barrier(), optimizer steps and self.log(..., sync_dist=True) out of code that only one rank "
    "runs, such as code under `if trainer.is_global_zero:` or after an exception that one rank has caught."
)


def explain(answers: Sequence[Answer]) -> str:
    """Return why these ranks can never continue, and the cure."""
    where = "; ".join(map(place, answers[:8]))
    same_batch = len({tuple(a["batch"]) for a in answers}) == 1
    inside = all(any(w in a["what"] for w in (" all_gather of '", " reduce_scatter of '")) for a in answers)
    if same_batch and inside:
        cure = (
            "In every batch all ranks must run the same modules, forward and backward: let them take the same branch "
            "of the model, or set ZeROStrategy(stage=2), where a rank may skip modules."
        )
    else:
        cure = _TOGETHER
    return f"ranks wait for each other in different places, so none can continue: {where}. {cure}"


def explain_end(gone: Sequence[int], what: str) -> str:
    """Return why this rank waits for ranks that have ended the run, and the cure."""
    have = "has" if len(gone) == 1 else "have"
    return (
        f"this rank {what}, and {named(gone)} {have} ended the run without reaching it. Unless an error in the log "
        f"of {named(gone)} is the cause: {_TOGETHER[0].lower()}{_TOGETHER[1:]}"
    )


def place(answer: Answer) -> str:
    """Return where a rank is, as a line of text."""
    _, batch, what = answer["batch"]
    at = f"batch {batch} of this {what}" if batch else "before the first batch"
    return f"rank {answer['rank']} {answer['what']} ({'after the run' if answer['left'] else at}, {answer['line']})"


def named(ranks: Sequence[int]) -> str:
    """Return ranks as text, ``ranks 1, 2``."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}"
