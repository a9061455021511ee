"""One line on stderr: overwritten on a terminal, line by line elsewhere."""

from __future__ import annotations

import sys

from ls_strategy.extras.cli.status_line import Progress, show_status


def test_elsewhere_every_text_is_a_line(capsys):
    show_status("a")
    show_status("")
    show_status("b")
    assert capsys.readouterr().err == "a\nb\n"


def test_on_a_terminal_a_text_overwrites_the_one_before(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    show_status("reading")
    show_status("x" * 200)
    found = capsys.readouterr().err
    assert found == f"\r{'reading':<79}\r{'x' * 79}"


def test_on_a_terminal_an_empty_text_clears_the_line(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    show_status("")
    assert capsys.readouterr().err == f"\r{'':<79}\r"


def test_counts_are_few_where_lines_stay(capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr("ls_strategy.extras.cli.status_line.time.monotonic", lambda: now)
    progress = Progress()
    progress.phase("... tracing")
    for done in range(20):
        now = done * 1.0
        progress.count("zero2", done, 20)
    progress.phase("")
    told = ["... tracing", *(f"... {done} of 20 done, now zero2" for done in (6, 12, 18))]
    assert capsys.readouterr().err.splitlines() == told
