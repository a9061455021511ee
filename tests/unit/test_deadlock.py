"""Which waits can never end, by what ranks say of themselves."""

from __future__ import annotations

from typing import Any

from ls_strategy.distributed.watchdog.deadlock import awaited, explain, proof

RANKS = [0, 1, 2]


def rank(number: int, counts: dict[str, int], wait: str | None = None, **more: Any) -> dict[str, Any]:
    """A rank that has entered so many collectives of every group, and waits in the last one of the group ``wait``."""
    tags = more.pop("tags", {})
    needs = more.pop("needs", None)
    journals = {
        name: [count, [[i, tags.get((name, i), 7)] for i in range(1, count + 1)], RANKS]
        for name, count in counts.items()
    }  # fmt: skip
    return {
        "rank": number,
        "era": 1,
        "late": wait is not None,
        "left": False,
        "wait": None if wait is None else {"group": wait, "number": counts[wait], "needs": needs},
        "call": "",
        "everyone": False,
        "what": "has waited 20 s in barrier" if wait else "is in no collective",
        "batch": (1, 3, "training epoch"),
        "line": "at train.py:7 in main",
        "journals": journals,
        **more,
    }


def among(*answers: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {answer["rank"]: answer for answer in answers}


def test_two_that_wait_for_each_other() -> None:
    a, b = rank(0, {"g": 5, "h": 2}, "g"), rank(1, {"g": 4, "h": 3}, "h")
    assert proof(among(a, b)) == [0, 1]


def test_three_in_a_circle() -> None:
    a = rank(0, {"g": 2, "h": 1, "i": 1}, "g", needs=[1])
    b = rank(1, {"g": 1, "h": 2, "i": 1}, "h", needs=[2])
    c = rank(2, {"g": 1, "h": 1, "i": 2}, "i", needs=[0])
    assert proof(among(a, b, c)) == [0, 1, 2]
    c["wait"] = None
    assert proof(among(a, b, c)) == []


def test_a_slow_rank_is_no_proof() -> None:
    waiting = [rank(r, {"g": 5}, "g") for r in (0, 2)]
    slow = rank(1, {"g": 4})
    answers = among(*waiting, slow)
    assert proof(answers) == []
    assert awaited(waiting[0], answers) == [1]


def test_a_slow_connection_is_no_proof() -> None:
    """All wait in the same collective, or for those that do."""
    assert proof(among(*(rank(r, {"g": 5}, "g") for r in RANKS))) == []
    assert proof(among(rank(0, {"g": 5, "h": 0}, "g"), rank(1, {"g": 5, "h": 0}, "g"), rank(2, {"g": 4, "h": 1}, "h")))\
        == [0, 2]  # fmt: skip
    answers = among(*(rank(r, {"g": 5, "h": 0}, "g") for r in (0, 1)), rank(2, {"g": 5, "h": 1}, "h"))
    assert proof(answers) == []


def test_the_source_of_a_broadcast_is_all_that_is_needed() -> None:
    a, b = rank(0, {"g": 5, "h": 2}, "g", needs=[2]), rank(1, {"g": 4, "h": 3}, "h")
    assert proof(among(a, b, rank(2, {"g": 5, "h": 2}))) == []


def test_something_else_in_the_same_place() -> None:
    a, b = rank(0, {"g": 5}, "g"), rank(1, {"g": 9}, tags={("g", 5): 8})
    assert proof(among(a, b)) == [0, 1]
    a["late"] = False
    assert proof(among(a, b)) == []


def test_a_rank_that_is_done_with_the_run_will_not_come() -> None:
    a, b = rank(0, {"g": 5}, "g"), rank(1, {"g": 4}, left=True)
    assert proof(among(a, b)) == [0, 1]
    assert "rank 1 is in no collective (after the run, " in explain([a, b])
    a["left"] = True  # both are in the user's code, which may still do the same
    assert proof(among(a, b)) == []
    b["journals"]["g"][0] = 5  # it came, and has left since
    assert proof(among({**a, "left": False}, b)) == []


def test_numbers_of_different_eras_are_not_compared() -> None:
    a, b = rank(0, {"g": 5, "h": 2}, "g"), rank(1, {"g": 4, "h": 3}, "h", era=2, tags={("g", 4): 8})
    assert proof(among(a, b)) == []


def test_a_call_of_torchs_own() -> None:
    call = {"call": "torch.distributed.barrier", "everyone": True, "late": True}
    a, b = rank(0, {"g": 4}, **call), rank(1, {"g": 5}, "g")
    assert proof(among(a, b)) == [0, 1]
    assert proof(among(a, rank(1, {"g": 4}))) == []
    assert proof(among(a, rank(1, {"g": 4}, **call))) == []
    assert proof(among({**a, "everyone": False}, b)) == []


def test_the_words_name_places_and_a_cure() -> None:
    answers = [rank(0, {"g": 5}, "g"), rank(1, {"g": 4}, batch=(0, 0, ""))]
    words = explain(answers)
    assert "rank 0 has waited 20 s in barrier (batch 3 of this training epoch, at train.py:7 in main)" in words
    assert "rank 1 is in no collective (before the first batch, at train.py:7 in main)" in words
    assert "trainer.is_global_zero" in words
    modules = [{**rank(r, {"g": 5}, "g"), "what": "has waited 20 s in all_gather of 'b.weight'"} for r in (0, 1)]
    assert "same branch" in explain(modules)
