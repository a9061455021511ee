"""Events in Chrome's format: microseconds from the zero of the trace."""

from __future__ import annotations

import json

from ls_strategy.spans.chrome_trace import ChromeTrace


def events(trace: ChromeTrace) -> list[dict]:
    return json.loads(trace.json())["traceEvents"]


def test_a_slice_has_begin_and_duration_in_microseconds() -> None:
    trace = ChromeTrace(zero_s=100.0)
    trace.slice((1, 2), "forward", "phase", 100.5, 100.75, bytes=3)
    (event,) = events(trace)
    assert (event["ph"], event["pid"], event["tid"]) == ("X", 1, 2)
    assert (event["ts"], event["dur"], event["args"]) == (500_000.0, 250_000.0, {"bytes": 3})


def test_instants_and_counters_are_at_their_time() -> None:
    trace = ChromeTrace()
    trace.instant((0, 0), "step", 0.001)
    trace.counter(0, "memory", 0.002, {"parameters": 5.0})
    instant, counter = events(trace)
    assert (instant["ph"], instant["ts"]) == ("i", 1000.0)
    assert (counter["ph"], counter["ts"], counter["args"]) == ("C", 2000.0, {"parameters": 5.0})


def test_processes_are_named_and_sorted_by_number() -> None:
    trace = ChromeTrace()
    trace.name_process(3, "rank 3")
    trace.name_row((3, 1), "phases")
    found = {event["name"]: event["args"] for event in events(trace)}
    assert found["process_name"] == {"name": "rank 3"}
    assert found["process_sort_index"] == {"sort_index": 3}
    assert found["thread_name"] == {"name": "phases"}
