"""Where a thread stands: the user's line, the method of the strategy, the collective."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import ls_strategy
from ls_strategy.distributed.watchdog import standing as standing_module
from ls_strategy.distributed.watchdog.standing import standing
from ls_strategy.fabric.strategy import ZeROFabricStrategy
from ls_strategy.lightning.strategy import ZeROStrategy


def here() -> tuple[str, str, bool]:
    return standing(threading.get_ident())


def test_the_line_is_that_of_the_innermost_user_frame() -> None:
    text, call, everyone = here()
    assert text.startswith("at ")
    assert f"test_standing.py:{here.__code__.co_firstlineno + 1} in here" in text
    assert (call, everyone) == ("", False)


def test_a_thread_that_has_ended_is_named() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert standing(thread.ident or 0)[0] == "its thread has ended"


def test_the_method_of_the_strategy_is_named(monkeypatch: Any) -> None:
    """A wait inside of the strategy has no user frame further in than the method."""
    found: list[tuple[str, str, bool]] = []
    code = compile("def find():\n    found.append(standing(ident))\n", standing_module.__file__, "exec")
    space: dict[str, Any] = {"found": found, "standing": standing, "ident": threading.get_ident()}
    exec(code, space)
    strategy = ZeROStrategy(2)
    monkeypatch.setattr(strategy.saves, "wait", space["find"])
    strategy.wait_for_saves()
    assert found[0][0].endswith("in test_the_method_of_the_strategy_is_named, during wait_for_saves")


def test_the_files_with_the_strategys_methods_exist() -> None:
    root = standing_module._folders()["strategy"]
    assert ls_strategy.lightning.strategy.__file__ in root  # type: ignore[attr-defined]
    classes = {*ZeROStrategy.__mro__, *ZeROFabricStrategy.__mro__}
    classes = {kind for kind in classes if any(map(inspect.isfunction, vars(kind).values()))}
    modules = [kind.__module__.split(".") for kind in classes if kind.__module__.startswith("ls_strategy.")]
    assert {(folder, f"{file}.py") for _, folder, file in modules} == set(standing_module._STRATEGY)
