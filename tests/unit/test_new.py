"""``ls-strategy new``: a project that works at once, under a name that Python can import, and nothing else changes."""

from __future__ import annotations

import os
import re
import resource
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ls_strategy.errors import ConfigError
from ls_strategy.extras import cli
from ls_strategy.extras.cli import new
from ls_strategy.extras.cli.job_program import infer_module
from tests.processes import output_of

ROOT = Path(__file__).parents[2]
LAUNCHER = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def error(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["new", *words]) == 1
    return capsys.readouterr().err


# --- what is written --------------------------------------------------------------------------------------------------


def test_every_file_is_written_with_the_name_in_place(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["new", "sorting"]) == 0
    assert "cd sorting\n  python -m pytest -q\n  python main.py fit --config quick.yaml" in capsys.readouterr().out
    written = tree(folder / "sorting")
    templates = [p for p in new.TEMPLATES.rglob("*") if p.is_file()]
    assert len(written) == len(templates) > 10
    assert {
        "main.py",
        "ray_main.py",
        "sorting/model.py",
        "sorting/data.py",
        "two_nodes.yaml",
        ".gitignore",
        "README.md",
    } <= set(written)
    assert not [name for name, text in written.items() if b"{{" in text or ".template" in name]
    assert names(folder) == ["sorting"]


def test_permissions_are_those_of_new_files(folder: Path) -> None:
    mask = os.umask(0o027)
    try:
        assert cli.main(["new", "sorting"]) == 0
    finally:
        os.umask(mask)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (folder, *folder.rglob("*"))}
    assert modes["sorting"] == 0o750
    assert modes["main.py"] == 0o640
    assert modes["submit.sh"] == 0o750


def test_a_folder_elsewhere(folder: Path) -> None:
    (folder / "experiments").mkdir()
    assert cli.main(["new", "experiments/sorting/"]) == 0
    assert (folder / "experiments" / "sorting" / "sorting" / "model.py").is_file()
    assert names(folder / "experiments") == ["sorting"]


def test_templates_follow_the_style_of_the_package(folder: Path) -> None:
    if shutil.which("ruff") is None:
        pytest.skip("ruff is not installed")
    assert cli.main(["new", "sorting"]) == 0
    for words in (
        ["check", "--select=E,F,W,B,UP,SIM,RET,ANN,C90", "--line-length=120", "--target-version=py310"],
        ["format", "--check", "--line-length=120"],
    ):
        done = subprocess.run(
            ["ruff", *words, "--isolated", "--no-cache", "sorting"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout


def test_yaml_files_name_no_place_and_overlays_change_only_the_trainer(folder: Path) -> None:
    yaml = pytest.importorskip("yaml")
    assert cli.main(["new", "sorting"]) == 0
    files = {p.name: yaml.safe_load(p.read_text()) for p in (folder / "sorting").glob("*.yaml")}
    assert set(files) == {"quick.yaml", "base.yaml", "two_gpus.yaml", "two_nodes.yaml"}
    assert list(files["two_gpus.yaml"]) == list(files["two_nodes.yaml"]) == ["trainer"]
    assert files["two_nodes.yaml"]["trainer"]["num_nodes"] == 2
    with pytest.raises(ConfigError, match="--module"):  # so submit.sh and README.md name it
        infer_module(Path("sorting/base.yaml"))


def test_the_slurm_job_that_submit_prints_is_a_script(folder: Path) -> None:
    pytest.importorskip("yaml")
    assert cli.main(["new", "sorting"]) == 0
    command = folder / "bin" / "ls-strategy"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ls_strategy.cli "$@"\n')
    command.chmod(0o755)
    path = {"PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    printed = output_of(
        ["bash", "sorting/submit.sh", "--dry-run", "--time", "1:00:00"], env={**os.environ, **path}, timeout=120
    )
    subprocess.run(["bash", "-n"], input=printed, text=True, check=True)
    for part in ("--nodes=2", "--time=1:00:00", "-m main fit", "--config=base.yaml", "--config=two_nodes.yaml"):
        assert part in printed
    assert "-m main fit" in printed


# --- it trains --------------------------------------------------------------------------------------------------------


@pytest.mark.wide
@pytest.mark.dist
@pytest.mark.timeout(560)
def test_the_first_three_commands_of_a_newcomer(folder: Path) -> None:
    """Offline, and in less than two minutes of one core: the machine of the test may be busy with others."""
    pytest.importorskip("jsonargparse")
    line = "ls-strategy new x && cd x && python -m pytest -q && python main.py fit --config quick.yaml"
    commands = folder / "bin"
    commands.mkdir()
    for name, arguments in (("python", ""), ("ls-strategy", "-m ls_strategy.cli")):
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (commands / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER} | {
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    printed = output_of(["bash", "-c", f"({line}) < /dev/null"], env=environment, timeout=540)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 120
    assert " passed" in printed
    assert "failed" not in printed
    results = dict(text.split(": ") for text in printed.splitlines() if text.startswith("val/"))
    assert float(results["val/accuracy"]) > 0.9  # a guess is right once in ten times
    runs = folder / "x" / "runs" / "quick" / "version_0"
    assert f"logs and checkpoints: {runs.relative_to(folder / 'x')}" in printed
    assert (runs / "metrics.csv").is_file()
    assert [p.name for p in (runs / "checkpoints").iterdir()] == ["epoch=0-step=150.ckpt"]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(560)
def test_commands_of_its_readme_run(folder: Path) -> None:
    """Those for one machine and SLURM's preview, as printed, with the checkpoint of the run before."""
    pytest.importorskip("jsonargparse")
    test_the_first_three_commands_of_a_newcomer(folder)
    text = (folder / "x" / "README.md").read_text()
    commands = [line for line in text.splitlines() if line.startswith(("python main.py", "ls-strategy plan"))]
    assert len(commands) == 5
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER} | {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"
    }  # fmt: skip
    for command in commands[1:]:
        if "two_gpus" in command:  # no GPU here: the tests of the project read this configuration
            continue
        words = command.replace("CHECKPOINT", "runs/quick/version_0/checkpoints/epoch=0-step=150.ckpt")
        done = subprocess.run(
            shlex.split(words),
            cwd=folder / "x",
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        if "--ckpt_path" in command:
            assert "max_steps=300" in done.stdout + done.stderr
        if "plan" in command:
            assert "zero3" in done.stdout


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(600)
def test_its_entry_for_ray_trains_and_continues(folder: Path) -> None:
    """On a cluster of this host: two workers, then one that goes on with the same run."""
    pytest.importorskip("ray.train", exc_type=ImportError)
    pytest.importorskip("jsonargparse")
    assert cli.main(["new", "x"]) == 0
    readme = (folder / "x" / "README.md").read_text()
    (command,) = [line for line in readme.splitlines() if line.startswith("python ray_main.py")]
    assert command == "python ray_main.py quick.yaml --workers 2 -- --trainer.max_steps=100"
    shorter = ["--data.num_train=2048", "--trainer.val_check_interval=20", "--model.width=32"]

    def train(workers: int, max_steps: int) -> dict[str, float]:
        words = ["ray_main.py", "quick.yaml", f"--workers={workers}", "--save-every=20", "--"]
        output = run_in_session([*words, f"--trainer.max_steps={max_steps}", *shorter], folder / "x")
        pairs = (line.split(": ") for line in output.splitlines() if re.fullmatch(r"[\w/]+: [-\d.e]+", line))
        return {name: float(value) for name, value in pairs}

    first = train(2, 20)
    longer = train(1, 40)  # one epoch of one rank has 64 steps
    assert longer["val/loss"] < first["val/loss"]
    runs = folder / "x" / "runs" / "ray" / "x"
    found = sorted(path.parent.name for path in runs.glob("*/checkpoint.ckpt"))
    assert len(found) == 2, found  # num_to_keep
    assert [name for name in found if "40" in name], found
    assert list((runs / "logs").rglob("metrics.csv"))


def run_in_session(words: list[str], folder: Path) -> str:
    """Run a program with all processes that it starts in a session of its own, which ends with it."""
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_TRAIN_METRICS_ENABLED": "0"}
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER} | quiet
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(280)
        finally:
            if process.poll() is None:
                process.terminate()  # Ray ends its processes
                process.wait(30)
    text = (folder / "log").read_text()
    assert status == 0, text[-6000:]
    return text


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("my-model", "Use my_model."), ("7b", "Use my_7b."), ("class", "Use my_class."), ("über", "Use ber."),
        ("a b", "Use a_b."), ("x.y", "Use x_y."), ("...", "Use a name such as my_project."), ("..", "exists"),
        (".", "exists"), ("True", "Use my_True."),
    ],
)  # fmt: skip
def test_a_name_that_is_no_identifier(folder: Path, capsys: pytest.CaptureFixture[str], name: str, cure: str) -> None:
    message = error(capsys, name)
    assert message.startswith(f"ls-strategy new: error: Got NAME={name!r}")
    assert cure in message
    assert not names(folder)


@pytest.mark.parametrize(
    "name", ["torch", "json", "lightning", "ls_strategy", "sys", "__main__", "_thread", "antigravity"]
)
def test_a_name_of_another_module(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    message = error(capsys, name)
    assert f"already has a module {name!r}" in message
    assert f"Use my_{name}." in message
    assert not names(folder)


@pytest.mark.parametrize("name", ["main", "ray_main", "test_training"])
def test_a_name_of_a_file_of_the_project(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert f"differ from {name}.py" in error(capsys, name)
    assert not names(folder)


def test_what_exists_is_not_changed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "full").mkdir()
    (folder / "full" / "thesis.txt").write_text("years of work")
    (folder / "empty").mkdir()
    (folder / "file").write_text("text")
    (folder / "link").symlink_to("nowhere")
    before = tree(folder)
    for name in ("full", "empty", "file", "link", "full/"):
        assert "exists. It was not changed" in error(capsys, name)
    assert tree(folder) == before
    assert not names(folder / "empty")
    assert names(folder) == ["empty", "file", "full", "link"]


def test_the_folder_above_is_missing_or_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not exist.\n  Create it first: mkdir -p no/where" in error(capsys, "no/where/sorting")
    (folder / "file").touch()
    assert "is not a folder" in error(capsys, "file/sorting")
    assert names(folder) == ["file"]


def test_no_right_to_write(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    assert "you may not write into" in error(capsys, "sorting")
    assert not names(folder)


def test_a_full_disk_leaves_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, written = Path.write_text, []

    def write_text(self: Path, text: str, *args: object, **options: object) -> int:
        if len(written) == 5:
            raise OSError(28, "No space left on device")
        written.append(self)
        return real(self, text, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "write_text", write_text)
    assert "No space left on device" in error(capsys, "sorting")
    assert len(written) == 5
    assert not names(folder)


def test_a_name_taken_in_the_meantime_is_not_replaced(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = new.files

    def files(name: str):  # type: ignore[no-untyped-def]
        (folder / name).mkdir()
        (folder / name / "thesis.txt").write_text("years of work")
        return real(name)

    monkeypatch.setattr(new, "files", files)
    assert "exists. It was not changed" in error(capsys, "sorting")
    assert tree(folder) == {"sorting/thesis.txt": b"years of work"}


def test_a_project_after_a_killed_run(folder: Path) -> None:
    """A kill can leave a hidden folder behind; the name is free."""
    program = "import os, signal\nfrom ls_strategy.extras.cli import main, new\nreal = new.files\n"
    program += "def files(name):\n  for i, each in enumerate(real(name)):\n    yield each\n"
    program += "    if i == 4: os.kill(os.getpid(), signal.SIGKILL)\nnew.files = files\nmain(['new', 'sorting'])"
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode == -9
    assert not (folder / "sorting").exists()
    assert cli.main(["new", "sorting"]) == 0
    assert (folder / "sorting" / "README.md").is_file()
