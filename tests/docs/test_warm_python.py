"""`tests.docs.warm_python` is a Python: what starts its programs sees what it would see of one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs import warm_python
from tests.limits import wall

REPORT = "import json, os, sys; print(json.dumps([sys.argv, sys.path[0], os.getcwd(), os.environ.get('WORD'), "
REPORT += "sys.executable, __name__, sys.stdin.read()])); print('error', file=sys.stderr); sys.exit(7)"


@pytest.fixture
def python(tmp_path: Path) -> Iterator[list[str]]:
    """The command, of a server that has imported a module which would be an error for its programs."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "heavy.py").write_text("import os\npid = os.getpid()\n")
    with tempfile.TemporaryDirectory() as folder:
        address = str(Path(folder) / "socket")
        with warm_python.serving(address, ["heavy"], {**os.environ, "PYTHONPATH": str(tmp_path / "modules")}):
            yield warm_python.command(address, "/its/name")


def start(command: list[str], folder: Path, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, cwd=folder, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


def wait_for(file: Path) -> str:
    end = time.monotonic() + wall(60)
    while not file.exists() or not file.read_text():
        assert time.monotonic() < end, f"{file} is not there"
        time.sleep(0.02)
    return file.read_text()


def has_ended(pid: int) -> bool:
    end = time.monotonic() + wall(60)
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.sample(1)
@pytest.mark.parametrize("words", [["program.py"], ["-u", "program.py"], ["-m", "program"]], ids=" ".join)
def test_a_program_gets_what_its_client_has(python: list[str], tmp_path: Path, words: list[str]) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "program.py").write_text(REPORT)
    client = start([*python, *words, "-x", "a b"], folder, env={"WORD": "é"})
    out, error = client.communicate("input")
    argv, path, place, word, executable, name, given = json.loads(out)
    assert (Path(argv[0]).name, argv[1:]) == ("program.py", ["-x", "a b"])
    assert (path, place, word, given) == (str(folder), str(folder), "é", "input")
    assert (executable, name) == ("/its/name", "__main__")
    assert (error, client.returncode) == ("error\n", 7)


def test_a_program_is_a_fork_of_the_server(python: list[str], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import os, sys; print('heavy' in sys.modules, sys.modules['heavy'].pid)")
    first, second = (start([*python, "program.py"], tmp_path).communicate()[0] for _ in range(2))
    assert first == second
    assert first.startswith("True")


def test_a_line_of_code_runs_in_an_ordinary_python(python: list[str], tmp_path: Path) -> None:
    client = start([*python, "-c", "import sys; print('heavy' in sys.modules, sys.argv)", "-m", "x"], tmp_path)
    assert client.communicate()[0] == "False ['-c', '-m', 'x']\n"


def test_an_error_is_the_status_and_the_traceback(python: list[str], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("print('before')\nraise ValueError('why')")
    client = start([*python, "program.py"], tmp_path)
    out, error = client.communicate()
    assert (out, client.returncode) == ("before\n", 1)
    assert "ValueError: why" in error


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
def test_a_client_ends_by_the_signal_of_its_program(python: list[str], tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "program.py").write_text(f"import os; os.kill(os.getpid(), {int(number)})")
    client = start([*python, "program.py"], tmp_path)
    client.communicate()
    assert client.returncode == -number


def test_a_signal_goes_on_to_the_program(python: list[str], tmp_path: Path) -> None:
    text = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
    (tmp_path / "program.py").write_text(text + "open('ready', 'w').write('yes')\ntime.sleep(100)")
    client = start([*python, "program.py"], tmp_path)
    wait_for(tmp_path / "ready")
    client.terminate()
    client.communicate()
    assert client.returncode == 5


def test_a_killed_client_takes_its_program_with_it(python: list[str], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(100)")
    client = start([*python, "program.py"], tmp_path)
    pid = int(wait_for(tmp_path / "pid"))
    client.kill()
    client.communicate()
    assert has_ended(pid)


def test_nothing_outlives_the_server(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(100)")
    with tempfile.TemporaryDirectory() as folder:
        address = str(Path(folder) / "socket")
        with warm_python.serving(address, [], dict(os.environ)):
            client = start([*warm_python.command(address, sys.executable), "program.py"], tmp_path)
            pid = int(wait_for(tmp_path / "pid"))
    client.communicate()
    assert client.returncode == -signal.SIGKILL
    assert has_ended(pid)
