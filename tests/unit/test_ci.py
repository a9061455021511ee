"""``.ci/run`` and ``.ci/gpu`` with tools that only say that they were called: what runs, when, what is said of it."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = "<!-- ci: tests -->\n```bash\npython -m pytest -n 2\n```\n"
SOURCE = ["docs", "import floors", "ruff check", "ruff format", "types"]

TOOL = """#!/usr/bin/env bash
call="$(basename "$0") $*"
echo "$call" >>"$CALLS"
if [[ -n ${FAILS:-} && $call == *"$FAILS"* ]]; then exit 3; fi
case "$call" in
    *"-m pytest -q"*) ;;
    *"-m pytest"*) echo "===== ${SUMMARY:-3 passed in 1.50s} =====" ;;
    *"pip install"*) ;;
    *)  # reads the source: ends when as many have begun as are expected side by side
        touch "$CALLS.begun.$$"
        for _ in {1..600}; do
            begun=("$CALLS".begun.*)
            if ((${#begun[@]} >= ${TOGETHER:-1})); then exit 0; fi
            sleep 0.05
        done
        exit 9
        ;;
esac
"""
PYTHON = """#!/usr/bin/env bash
# python -m venv FOLDER: an environment of tools that only note their calls
mkdir -p "$3/bin"
for name in python pyright sphinx-build lint-imports; do cp "$(dirname "$0")/tool" "$3/bin/$name"; done
"""


class Checkout:
    """A folder with ``.ci/run``, a README, and an ``.ci/oldest`` that notes its call."""

    def __init__(self, folder: Path) -> None:
        self.root, self.calls_file = folder / "checkout", folder / "calls"
        commands = folder / "bin"
        for made in (self.root / ".ci", commands):
            made.mkdir(parents=True)
        shutil.copy(ROOT / ".ci" / "run", self.root / ".ci" / "run")
        (self.root / "README.md").write_text(README)
        (self.root / ".ci" / "oldest").write_text('echo oldest >>"$CALLS"\n')
        for name, text in (("tool", TOOL), ("python", PYTHON), ("chromium", ""), ("apt-get", "exit 1\n")):
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        self.python, self.path = commands / "python", commands

    def run(self, *parts: str, **variables: str) -> tuple[int, str]:
        """Exit status and output."""
        environment = {"PATH": f"{self.path}:/usr/bin:/bin", "PYTHON": str(self.python), "CALLS": str(self.calls_file)}
        done = subprocess.run(
            ["bash", ".ci/run", *parts], cwd=self.root, env=environment | variables,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout

    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_without_arguments_every_part_runs(checkout: Checkout) -> None:
    status, output = checkout.run(WIDE_PART="4/5")
    assert status == 0, output
    assert output.splitlines()[-3:] == ["all steps passed", *["===== 3 passed in 1.50s ====="] * 2]
    calls = checkout.calls()
    assert calls[0].startswith("python -m pip install")
    assert sorted(call.split()[0] for call in calls[1:8]) == [
        "lint-imports",
        "oldest",
        "pyright",
        "python",
        "python",
        "python",
        "sphinx-build",
    ]
    assert "python -m pytest -q -n 2 --dist loadfile -m slow and not gpu tests/ops" in calls[1:8]
    assert calls[8:] == [
        "python -m pytest -n 2 -m wide and not slow --part 4/5",
        "python -m pytest -n 2",
    ]


@pytest.mark.parametrize(
    ("parts", "summaries", "last"),
    [
        (("tests",), 1, ["python -m pytest -n 2"]),
        (("oldest",), 0, ["oldest"]),  # in an environment of its own
        (("tests", "kernels"), 1, ["python -m pytest -q", "python -m pytest -n 2"]),
    ],
    ids=str,
)
def test_parts_run_by_name(checkout: Checkout, parts: tuple[str, ...], summaries: int, last: list[str]) -> None:
    status, output = checkout.run(*parts)
    assert status == 0, output
    assert output.splitlines()[-1 - summaries] == "all steps passed"
    calls = checkout.calls()
    installed = calls[:1] if calls[0].startswith("python -m pip install") else []
    assert bool(installed) == (parts != ("oldest",))
    assert all(call.startswith(start) for call, start in zip(calls[len(installed) :], last, strict=True)), calls


def test_what_reads_the_source_runs_side_by_side(checkout: Checkout) -> None:
    """Each ends only when all five have begun; their outputs do not mix."""
    status, output = checkout.run("source", TOGETHER="5")
    assert status == 0, output
    headings = [line for line in output.splitlines() if line.startswith("=== ")]
    begun, ended = headings[2::2], headings[3::2]
    assert sorted(line.removeprefix("=== ") for line in begun) == SOURCE
    assert [line.split(": exit status 0")[0] for line in ended] == begun
    assert output.splitlines()[-1] == "all steps passed"


@pytest.mark.parametrize(
    ("fails", "name"),
    [
        ("sphinx-build", "docs"),
        ("ruff check", "ruff check"),
        ("slow and not gpu", "kernels for CPUs"),
        ("wide and not slow", "wide tests, part 1/5"),
    ],
)
def test_after_a_failure_everything_else_runs_too(checkout: Checkout, fails: str, name: str) -> None:
    status, output = checkout.run(FAILS=fails, WIDE_PART="1/5")
    assert status == 1
    assert len(checkout.calls()) == 10
    end = output[output.rindex("FAILED") :].splitlines()
    assert end[0] == f"FAILED: {name} (exit status 3)"
    assert len(end) == 3
    assert end[1].startswith("no summary: the wide run" if fails == "wide and not slow" else "===== 3 passed")


def test_failed_tests_are_counted_at_the_end(checkout: Checkout) -> None:
    status, output = checkout.run("tests", FAILS="pytest -n 2")
    assert status == 1
    assert output.splitlines()[-2:] == ["FAILED: tests (exit status 3)", "no summary: the tests run did not finish"]


def test_nothing_runs_without_what_it_needs(checkout: Checkout) -> None:
    status, _ = checkout.run(FAILS="pip install")
    assert (status, len(checkout.calls())) == (1, 1)


def test_an_unknown_part_is_refused(checkout: Checkout) -> None:
    assert checkout.run("source", "speed") == (
        2,
        "Got part 'speed', but the parts are: source kernels oldest wide tests.\n",
    )
    assert checkout.calls() == []


def test_the_commit_chooses_one_of_ten_parts(checkout: Checkout) -> None:
    git = checkout.path / "git"
    for commit, part in (("000", "1/10"), ("009", "10/10"), ("fff", "6/10"), ("abc", "9/10")):
        git.write_text(f"#!/bin/sh\necho {commit}4567890\n")
        git.chmod(0o755)
        checkout.run("wide")
        assert checkout.calls()[-1].endswith(f"--part {part}"), commit


# the first quarter of an hour on a GPU -------------------------------------------------------------------------------

ON_GPU = """#!/usr/bin/env bash
echo "$(($(date +%s) - BEGAN)) ${OMP_NUM_THREADS:-all} $*" >>"$CALLS"
case "$*" in
    *"-m pytest"*)
        echo "tests/gpu/test_kernels.py::test_one ${OUTCOME}"
        trap 'exit 2' INT
        for ((i = 0; i < 10 * TAKES; i++)); do sleep 0.1; done
        exit "${STATUS}"
        ;;
    *benchmarks.gpu*) exec sleep "${BENCH:-0}" ;;
esac
"""


@pytest.mark.parametrize(
    ("outcome", "takes", "tests", "status"),
    [("PASSED", 0, 0, 0), ("FAILED", 0, 1, 1), ("PASSED", 60, 0, 0), ("FAILED", 60, 0, 1)],
)
def test_on_a_gpu_tests_leave_most_of_the_time_to_the_benchmark(
    outcome: str, takes: int, tests: int, status: int, tmp_path: Path
) -> None:
    """Tests that were not reached are no failure, those that failed before are one."""
    (tmp_path / "python").write_text(ON_GPU)
    (tmp_path / "python").chmod(0o755)
    folder, calls = tmp_path / "out", tmp_path / "calls"
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin", "CALLS": str(calls), "OUTCOME": outcome, "TAKES": str(takes),
        "STATUS": str(tests), "BEGAN": str(int(time.time())), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", str(ROOT / ".ci" / "gpu"), str(folder), "0.25"], env=environment, timeout=60, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == status, done.stdout
    doctor, pytest_, bench = [call.split(maxsplit=2) for call in calls.read_text().splitlines()]
    assert doctor[2].startswith("-m ls_strategy.extras.cli doctor")
    assert pytest_[2].startswith("-m pytest -m gpu")
    assert [each[1] for each in (doctor, pytest_, bench)] == ["all"] * 3
    minutes = float(bench[2].split("--minutes ")[1].split()[0])
    assert 60 * minutes + float(bench[0]) <= 15
    assert minutes > 0
    assert bench[2].endswith(f"--device cuda --record {folder}/gpu.json")
    assert (folder / "tests.txt").read_text().startswith(f"tests/gpu/test_kernels.py::test_one {outcome}")
    assert ("the time for tests is over" in done.stdout) == bool(takes)


def test_on_a_gpu_all_files_of_tests_are_run() -> None:
    names = (ROOT / ".ci" / "gpu").read_text().split("for name in ")[1].split(";")[0].split()
    assert sorted(names) == sorted(path.stem.removeprefix("test_") for path in (ROOT / "tests/gpu").glob("test_*.py"))
