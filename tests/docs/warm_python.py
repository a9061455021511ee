"""A Python that starts at once: its programs are forks of one process that has imported the large packages.

::

    server ── imports the modules that it is told, once
      │ a fork for each client
    keeper ── waits for its program and for its client
      │ a fork                    │ the exit status
    program: the client's words,  └──> client: this file as a script, without any package
    folder, environment, streams

The invariant: whoever starts the client cannot tell it from ``python``, but for the time it takes. Signals go on to the
program, a client that is killed takes its program with it, and the server's end takes all of them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
from pathlib import Path

TYPE_CHECKING = False  # typing and subprocess would take most of the time that the client takes
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_NUMBER = struct.Struct("q")
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_STARTED = b"started\n"


def command(address: str, executable: str) -> list[str]:
    """What a script named ``executable`` has to start in order to be this Python; words of ``python`` follow."""
    return [sys.executable, "-I", "-S", str(Path(__file__).resolve()), "ask", address, executable]


@contextlib.contextmanager
def serving(address: str, modules: Sequence[str], environment: dict[str, str]) -> Iterator[None]:
    """Have a server at ``address``, the path of a socket, that has imported ``modules``."""
    import subprocess

    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), "serve", address, *modules],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        with server.stdin, server.stdout:  # it ends when its standard input does, even if this process is killed
            assert server.stdout.readline() == _STARTED, "the server could not import its modules"
            yield
    finally:
        server.wait()


def _receive(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size and (more := connection.recv(size - len(found))):
        found += more
    return found


# --- the client -------------------------------------------------------------------------------------------------------


def _ask(address: str, executable: str, *words: str) -> None:
    """Have the server run a program; end with its exit status, or by the signal that ended it."""
    first = next((word for word in words if word != "-u"), "")
    if first != "-m" and not first.endswith(".py"):  # -c, --version: an ordinary Python is as fast
        os.execv(sys.executable, [sys.executable, *words])
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    request = json.dumps([executable, words, str(Path.cwd()), dict(os.environ)]).encode()
    socket.send_fds(connection, [_NUMBER.pack(len(request))], [0, 1, 2])
    connection.sendall(request)
    (pid,) = _NUMBER.unpack(_receive(connection, _NUMBER.size))
    for number in _FORWARDED:
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    (status,) = _NUMBER.unpack(_receive(connection, _NUMBER.size))
    if status < 0:
        if -status in _FORWARDED:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


# --- the server -------------------------------------------------------------------------------------------------------


class _Program:
    """What a client has asked for."""

    def __init__(self, client: socket.socket) -> None:
        size, self.streams, _, _ = socket.recv_fds(client, _NUMBER.size, 3)
        request = json.loads(_receive(client, *_NUMBER.unpack(size)))
        self.executable, self.words, self.folder, self.environment = request

    def enter(self) -> None:
        """Make this process what a new one would be that the client has started."""
        for number, stream in enumerate(self.streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)
        sys.executable = self.executable
        unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
        if self.words[0] == "-u":
            unbuffered = bool(self.words.pop(0))
        # New objects: the server's know whether its streams can be sought in.
        sys.stdin = open(0)  # noqa: SIM115
        sys.stdout = open(1, "w", buffering=1 if os.isatty(1) else -1)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
        sys.stdout.reconfigure(write_through=unbuffered)

    def run(self) -> None:
        """Run it as ``__main__``."""
        import runpy

        if self.words[0] == "-m":
            sys.argv, sys.path[0] = self.words[1:], self.folder
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = self.words, str(Path(self.words[0]).resolve().parent)
            runpy.run_path(sys.argv[0], run_name="__main__")


def _serve(address: str, *modules: str) -> _Program | None:
    """Fork programs until standard input ends. Returns in a fork, with what it shall run, and in the end."""
    own, sys.path[0] = sys.path[0], str(Path.cwd())
    for name in modules:
        importlib.import_module(name)
    sys.path[0] = own
    gc.collect()
    gc.freeze()  # a fork shares the memory of these objects as long as it does not visit them
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, "a fork has only the thread that forks, but the locks of all"
    server = socket.socket(socket.AF_UNIX)
    server.bind(address)
    server.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    os.write(1, _STARTED)
    while True:
        ready = select.select([server, 0], [], [])[0]
        if 0 in ready:
            return None
        client, _ = server.accept()
        if os.fork() == 0:
            server.close()
            return _keep(client)
        client.close()


def _keep(client: socket.socket) -> _Program | None:
    """Fork the program that a client asks for and tell how that ended. Returns in the fork, and in the end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    program = _Program(client)
    pid = os.fork()
    if pid == 0:
        client.close()
        return program
    for stream in program.streams:
        os.close(stream)  # a pipe has to end with the program
    client.sendall(_NUMBER.pack(pid))
    process = os.pidfd_open(pid)
    if process not in select.select([process, client, 0], [], [])[0]:  # the client was killed, or the server ends
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        client.sendall(_NUMBER.pack(status))
    return None


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        _ask(*sys.argv[2:])
    asked = _serve(*sys.argv[2:])
    if asked is not None:
        asked.enter()
        asked.run()
