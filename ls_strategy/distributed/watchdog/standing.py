"""Finds the line of user code that a thread is executing, for reports of waits."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

_LIBRARIES = ("torch", "lightning", "lightning_fabric", "pytorch_lightning", "torchmetrics", "ls_strategy")

_FOR_ALL = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce", "all_to_all",
    "all_to_all_single", "barrier", "monitored_barrier", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_tensor",
)  # fmt: skip
"""Functions of ``torch.distributed`` that return on no rank before all ranks have called them."""

_FOR_SOME = (
    "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object", "recv", "reduce", "scatter",
    "scatter_object_list", "send",
)  # fmt: skip


_STRATEGY = (
    ("lightning", "strategy.py"),
    ("lightning", "connection.py"),
    ("lightning", "readings.py"),
    ("fabric", "strategy.py"),
)
"""Files with the strategies' public methods, which a report names."""


def standing(thread: int) -> tuple[str, str, bool]:
    """Return where a thread is.

    Args:
        thread: its identifier.

    Returns:
        ``file:line in function`` of the innermost user frame, and of the outer one that Lightning has called; the
        function of ``torch.distributed`` that was called there and has not returned; whether it waits for all ranks of
        the run.
    """
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "its thread has ended", "", False
    folders = _folders()
    call, everyone, method = "", False, ""
    users: list[FrameType] = []
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        in_python = path.startswith(folders["standard"]) and "site-packages" not in path
        if not in_python and not path.startswith((*folders["libraries"], "<frozen")):  # other packages are user code
            users.append(frame)
        elif users and path.startswith(folders["lightning"]):
            break
        elif path.startswith(folders["torch.distributed"]) and not users and name in (*_FOR_ALL, *_FOR_SOME):
            call, everyone = name, name in _FOR_ALL and _of_all(frame)
        elif path in folders["strategy"] and not users and not method and not name.startswith("_"):
            method = f", during {name}"
        frame = frame.f_back
    if not users:
        return f"outside of user code{method}", call, everyone
    text = f"at {_line(users[0])}"
    if len(users) > 1 and frame is not None:
        text += f", from {_line(users[-1])}"
    return text + method, call, everyone


def _line(frame: FrameType) -> str:
    path, here = frame.f_code.co_filename, os.getcwd() + os.sep  # noqa: PTH109
    name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # Python 3.11
    return f"{path.removeprefix(here)}:{frame.f_lineno} in {name}"


def _folders() -> dict[str, Any]:
    """Return the places of code that is not the user's; folders end with a separator."""
    of = {name: os.path.join(os.path.dirname(path), "") for name in _LIBRARIES if (path := _file(name))}  # noqa: PTH118, PTH120
    return {
        "libraries": tuple(of.values()),
        "lightning": tuple(folder for name, folder in of.items() if "lightning" in name),
        "torch.distributed": os.path.join(of["torch"], "distributed", ""),  # noqa: PTH118
        "strategy": tuple(os.path.join(of["ls_strategy"], *path) for path in _STRATEGY),  # noqa: PTH118
        "standard": os.path.join(os.path.dirname(os.__file__), ""),  # noqa: PTH118, PTH120
    }


def _file(module: str) -> str | None:
    return getattr(sys.modules.get(module), "__file__", None)


def _of_all(frame: FrameType) -> bool:
    group = frame.f_locals.get("group")
    return group is None or group is getattr(
        getattr(sys.modules.get("torch.distributed"), "group", None), "WORLD", None
    )
