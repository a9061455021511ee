"""What tests ask the system about processes, and programs in processes that need not import torch first."""

from __future__ import annotations

import io
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ls_strategy import testing


def is_running(pid: int | str) -> bool:
    """Whether a process is there, and has not ended as a zombie."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def output_of(command: Sequence[str], **options: Any) -> str:
    """Run a program to its end, which is to be a success; return what it has printed. Options of `subprocess.run`."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def anonymous_bytes() -> int:
    """This process' memory that is no file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


def fork_of_server(function: Callable[..., None], *args: Any) -> Any:
    """Start a function in a fork of the server that ranks of tests come from: it has imported torch and Lightning."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(testing._PRELOAD)  # no effect on a server that already runs
    process = context.Process(target=function, args=args)
    process.start()
    return process


class Program:
    """Source text of a program, started as ``python -c`` would, but in such a fork: ready within milliseconds."""

    def __init__(self, code: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        """Start it with ``env``, by default the environment of this process, in the folder of this process."""
        theirs_in, ours_in = multiprocessing.Pipe(duplex=False)
        ours_out, theirs_out = multiprocessing.Pipe(duplex=False)
        given = (code, arguments, dict(os.environ if env is None else env), str(Path.cwd()), theirs_in, theirs_out)
        self.process = fork_of_server(_run, *given)
        self.pid: int = self.process.pid
        for end in (theirs_in, theirs_out):
            end.close()
        self.stdin = os.fdopen(os.dup(ours_in.fileno()), "w")
        self.stdout = os.fdopen(os.dup(ours_out.fileno()))
        for end in (ours_in, ours_out):
            end.close()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill it if it runs."""
        self.kill()
        self.stdin.close()
        self.stdout.close()

    def kill(self) -> None:
        """Kill it, and wait until it has ended."""
        self.process.kill()
        self.process.join()

    def output(self) -> str:
        """Wait for its end, which is to be a success; return what it has printed."""
        text = self.stdout.read()
        self.process.join()
        assert self.process.exitcode == 0, text
        return text


def _run(
    code: str, arguments: tuple[str, ...], env: dict[str, str], folder: str, given: Connection, out: Connection
) -> None:
    for number, end in enumerate((given, out)):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdin = sys.__stdin__ = os.fdopen(0)  # the second name keeps it open where the first gets another stream
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(os.fdopen(1, "wb", 0), write_through=True)
    sys.argv = ["-c", *arguments]
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
