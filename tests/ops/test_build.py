"""The builder, in processes of their own: whatever is missing, held, broken or killed, the results are right."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ls_strategy.ops import _build, _session
from ls_strategy.ops._session import _session as processes_of
from ls_strategy.ops._session import start as start_session
from tests.limits import wall
from tests.marks import slow
from tests.processes import Program, is_running, output_of

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, logging, sys
lines = []
class Keep(logging.Handler):
    def emit(self, record): lines.append((record.levelname, record.getMessage()))
logging.getLogger("ls_strategy.ops").addHandler(Keep())
logging.getLogger("ls_strategy.ops").setLevel(logging.INFO)
import torch
from ls_strategy.ops import _build, moments, update
p, m, v = torch.ones(1000), moments.empty(1000, "fp32", True), moments.empty(1000, "fp32", False)
for step in (1, 2):
    update.adamw_(p, m, v, torch.full((1000,), 0.5), lr=0.1, beta1=0.9, beta2=0.99, eps=0.0, weight_decay=0.0,
                  step=step, decoupled=True)
print(json.dumps({"p": p.unique().tolist(), "lines": lines, "status": _build.status()}))
"""


def environment(cache, **env) -> dict[str, str]:
    variables = {k: v for k, v in os.environ.items() if k not in ("LS_STRATEGY_OPS", "CXX")}
    return variables | {"LS_STRATEGY_CACHE": str(cache), "PYTHONPATH": str(ROOT), **env}


def start(cache, program=PROGRAM, **env) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment(cache, **env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def finish(process: subprocess.Popen) -> dict:
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    return result_of(out)


def result_of(out: str) -> dict:
    result = json.loads(out.splitlines()[-1])
    assert len(result["p"]) == 1
    assert result["p"][0] == pytest.approx(0.8, abs=1e-6)
    return result


def builds(result) -> int:
    return sum("compiled" in text for _, text in result["lines"])


def warnings(result) -> list[str]:
    return [text for level, text in result["lines"] if level == "WARNING"]


@pytest.fixture(scope="module")
def built(tmp_path_factory, request):
    """A cache that four processes filled at the same time, and what they reported."""
    request.getfixturevalue("compiler_of_torch")
    cache = tmp_path_factory.mktemp("cache")
    processes = [start(cache) for _ in range(4)]
    return cache, [finish(p) for p in processes]


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
class TestWithCompiler:
    def test_many_processes_one_build(self, built):
        cache, results = built
        assert sum(builds(r) for r in results) == 1
        assert all(r["status"]["cpu"].startswith("native") for r in results)
        assert not any(warnings(r) for r in results)
        assert len(list(cache.glob("*.so"))) == 1
        assert not list(cache.glob("*.build-*"))

    def test_the_library_is_kept(self, built):
        cache, _ = built
        assert builds(finish(start(cache))) == 0

    @pytest.mark.parametrize("damage", [b"", b"not a library", None])
    def test_a_damaged_library_is_built_again(self, built, damage):
        cache, _ = built
        (library,) = cache.glob("*.so")
        content = library.read_bytes()
        library.write_bytes(content[: len(content) // 2] if damage is None else damage)
        assert builds(finish(start(cache))) == 1

    def test_a_killed_builder_leaves_no_lock(self, tmp_path):
        first = start(tmp_path)
        deadline = time.monotonic() + wall(60)
        while not list(tmp_path.glob("*.build-*/build.ninja")) and not list(tmp_path.glob("*.build-*/*.o")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(first.pid, signal.SIGKILL)
        first.communicate()
        assert builds(finish(start(tmp_path))) == 1
        assert not list(tmp_path.glob("*.build-*"))

    def test_without_ninja(self, tmp_path):
        tools = tmp_path / "bin"
        tools.mkdir()
        import shutil

        for tool in ("g++", "as", "ld"):
            (tools / tool).symlink_to(shutil.which(tool))
        code = "import shutil; w = shutil.which; shutil.which = lambda c, **k: None if c == 'ninja' else w(c, **k)\n"
        variables = {**os.environ, "LS_STRATEGY_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
        printed = output_of([sys.executable, "-c", code + PROGRAM], env=variables, timeout=150)
        result = json.loads(printed.splitlines()[-1])
        assert builds(result) == 1

    def test_a_cache_that_cannot_be_written(self, tmp_path):
        (tmp_path / "file").touch()
        result = finish(start(tmp_path / "file" / "cache"))
        assert builds(result) == 1
        library = Path(result["status"]["cpu"].removeprefix("native: "))
        assert not library.parent.exists()  # gone with its process


@pytest.mark.parametrize("env", [{"CXX": "/nonexistent/g++"}, slow({"PATH": "/nonexistent"})])
def test_no_compiler(tmp_path, env):
    with Program(PROGRAM, env=environment(tmp_path, **env)) as process:
        result = result_of(process.output())
    assert len(warnings(result)) == 1
    assert re.search(r"no compiler .* 6 to 60 times as much memory; ls-strategy doctor", warnings(result)[0])
    assert result["status"]["cpu"].startswith("reference: no compiler")


@pytest.mark.parametrize(
    ("cxx", "says"),
    [
        ("/nonexistent/g++", "no compiler /nonexistent/g++"),
        ('g++ "', "it is no command line: no closing quotation"),
        ("FAILS", "no such luck"),
    ],
)
def test_a_build_that_is_impossible_says_why(tmp_path, monkeypatch, cxx, says):
    """In this process: the tests below see that results are right all the same, and one warning."""
    monkeypatch.setenv("CXX", str(failing_compiler(tmp_path)) if cxx == "FAILS" else cxx)
    monkeypatch.setattr(_build, "cache_dir", lambda: tmp_path)
    with pytest.raises(_build.BuildError, match=says):
        _build.library(_build.cpu_recipe())
    assert not list(tmp_path.glob("*.so"))


@pytest.mark.wide
def test_a_compiler_that_is_no_command_line(tmp_path):
    result = finish(start(tmp_path, CXX='g++ "'))
    (line,) = warnings(result)
    assert """Got CXX='g++ "', but it is no command line: no closing quotation. Set CXX to a compiler""" in line


def failing_compiler(folder):
    compiler = folder / "cxx"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo fake 1.0 && exit 0\necho "x.cpp:1: error: no such luck" >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    return compiler


@pytest.mark.wide
def test_a_compiler_that_fails(tmp_path):
    result = finish(start(tmp_path / "cache", CXX=str(failing_compiler(tmp_path))))
    (line,) = warnings(result)
    assert "no such luck" in line


SLOW_COMPILER = """#!/bin/sh
case "$*" in *--version*) echo "slow 1.0"; exit 0;; esac
echo $$ >> {pids}
sleep 300
"""


def compiling(tmp_path: Path, *, ninja: bool) -> tuple[subprocess.Popen, Callable[[], list[str]]]:
    """A process that waits for slow compilers, and a function that returns those that run."""
    if ninja and shutil.which("ninja") is None:
        pytest.skip("no ninja here")
    pids, compiler = tmp_path / "pids", tmp_path / "c++"
    compiler.write_text(SLOW_COMPILER.format(pids=pids))
    compiler.chmod(0o755)
    # Python itself has to see SIGINT also where a shell has switched it off for what runs in the background.
    program = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n{PROGRAM}"
    if not ninja:
        program = f"import shutil; shutil.which = lambda *_, **__: None\n{program}"
    process = start(tmp_path / "cache", CXX=str(compiler), program=program)
    deadline = time.monotonic() + wall(60)
    while not pids.exists() or len(pids.read_text().split()) < (2 if ninja else 1):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process, lambda: [pid for pid in pids.read_text().split() if is_running(pid)]


@pytest.mark.wide
@pytest.mark.parametrize("ninja", [True, slow(False)])
def test_ctrl_c_leaves_no_compiler_running(tmp_path, ninja):
    """ninja gives every compiler a process group of its own, which the end of ninja's does not reach."""
    process, running = compiling(tmp_path, ninja=ninja)
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=30)[1]
    deadline = time.monotonic() + wall(5)
    while left := running():
        assert time.monotonic() < deadline, f"compilers still run: {left}"
        time.sleep(0.05)
    assert not list((tmp_path / "cache").glob("*.build-*"))


ASKS = """
import runpy, sys, time
from pathlib import Path
sleeping = runpy.run_path(sys.argv[1])["start"](["sh", "-c", "sleep 300 & sleep 300"], Path(), sys.stderr)
print(sleeping.pid, flush=True)
time.sleep(300)
"""


def test_kill_leaves_no_command_running():
    """Without torch, which the module of sessions does not need; compilers are below."""
    process = subprocess.Popen([sys.executable, "-c", ASKS, _session.__file__], stdout=subprocess.PIPE, text=True)
    session = int(process.stdout.readline())
    deadline = time.monotonic() + wall(10)
    while len(processes_of(session)) < 4:  # the guard, the shell, and what that runs
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.communicate()
    while left := processes_of(session):
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.02)


@pytest.mark.wide
@pytest.mark.parametrize("ninja", [True, slow(False)])
def test_kill_leaves_no_compiler_running(tmp_path, ninja):
    """Nothing in the killed process can end them."""
    process, running = compiling(tmp_path, ninja=ninja)
    session = os.getsid(int(running()[0]))
    assert session != os.getsid(process.pid)
    process.kill()
    process.communicate(timeout=30)
    deadline = time.monotonic() + wall(10)
    while left := processes_of(session):
        assert time.monotonic() < deadline, f"compilers still run: {left}"
        time.sleep(0.05)
    assert not running()


def test_the_status_and_the_words_of_a_command_arrive(tmp_path):
    for command, code, words in (
        (["sh", "-c", "echo bad >&2; exit 3"], 3, "bad"),
        (["sh", "-c", "kill -9 $$"], 137, ""),
        (["no such compiler"], 127, "No such file"),
        (["true"], 0, ""),
    ):
        with (tmp_path / "output").open("w+") as output:
            assert start_session(command, tmp_path, output).wait(30) == code
            output.seek(0)
            assert words in output.read()


@pytest.mark.wide
def test_off(tmp_path):
    result = finish(start(tmp_path, LS_STRATEGY_OPS="0"))
    assert result["lines"] == []
    assert result["status"] == {"cpu": "reference: LS_STRATEGY_OPS=0"}
    assert not list(tmp_path.iterdir())


@pytest.mark.wide
def test_required(tmp_path):
    process = start(tmp_path, LS_STRATEGY_OPS="1", CXX="/nonexistent/g++")
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "ConfigError: LS_STRATEGY_OPS=1, but there is no kernel for cpu: no compiler" in err


@pytest.mark.slow
def test_neither(tmp_path):
    process = start(tmp_path, LS_STRATEGY_OPS="yes")
    assert "ConfigError: Got LS_STRATEGY_OPS='yes'" in process.communicate(timeout=60)[1]
