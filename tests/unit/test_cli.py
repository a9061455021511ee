"""The ``ls-strategy`` command, as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from ls_strategy.config import NVMeIOConfig
from ls_strategy.extras import cli
from ls_strategy.extras.cli import arguments
from ls_strategy.extras.cli.tuning import Measured, best
from tests.processes import output_of

SMALL = ["--gib", "0.004", "--seconds", "0", "--block-mib", "0.25", "0.5", "--parallelism", "1", "2"]


def start(*args):
    return subprocess.run(
        [sys.executable, "-m", "ls_strategy.cli", *map(str, args)], capture_output=True, text=True, check=False
    )


@pytest.mark.wide
def test_tune_io_prints_a_table_and_the_setting_and_leaves_nothing(tmp_path):
    done = start("tune-io", tmp_path, *SMALL)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    table = [line.split() for line in lines if len(line.split()) == 6 and line.split()[0].startswith("0.")]
    assert {(row[0], row[1]) for row in table} == {("0.25", "1"), ("0.25", "2"), ("0.5", "1"), ("0.5", "2")}
    speeds = [float(row[4]) for row in table]
    assert speeds == sorted(speeds, reverse=True)
    assert f"      nvme_path: {tmp_path}" in lines
    assert "      nvme_io: {block_bytes: " in done.stdout
    assert "round 1, 4/4" in done.stderr
    assert not list(tmp_path.iterdir())


def test_json_is_all_that_stands_on_standard_output(capsys, monkeypatch):
    def add(subcommands):
        parser = subcommands.add_parser("talk")
        parser.add_argument("--json", action="store_true")
        parser.set_defaults(run=run)

    def run(args):
        print("another package is imported")
        if args.json:
            arguments.print_json(args, {"a": 1})
        return 0

    monkeypatch.setattr(cli, "SUBCOMMANDS", (SimpleNamespace(add=add),))
    assert cli.main(["talk", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"a": 1}
    assert printed.err == "another package is imported\n"
    assert cli.main(["talk"]) == 0
    assert capsys.readouterr().out == "another package is imported\n"


def test_the_snippet_is_yaml_that_the_options_accept(tmp_path, capsys):
    yaml = pytest.importorskip("yaml")
    assert cli.main(["tune-io", str(tmp_path), *SMALL, "--buffered"]) == 0
    text = capsys.readouterr().out
    options = yaml.safe_load(text[text.index("strategy:") :])["strategy"]["init_args"]["offload"]
    assert options["nvme_path"] == str(tmp_path)
    assert not NVMeIOConfig(**options["nvme_io"]).direct


def test_help_needs_no_torch():
    code = "import sys; from ls_strategy.cli import main\ntry: main(['tune-io', '--help'])\nexcept SystemExit: pass\n"
    code += "print([m for m in ('torch', 'lightning') if m in sys.modules])"
    printed = output_of([sys.executable, "-c", code])
    assert printed.splitlines()[-1] == "[]"
    assert "folder on the NVMe device" in printed


def test_a_missing_path(tmp_path, capsys):
    assert cli.main(["tune-io", str(tmp_path / "typo")]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"ls-strategy tune-io: error: Got '{tmp_path}/typo', which does not exist.")
    assert not (tmp_path / "typo").exists()


def test_a_path_that_is_a_file(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert cli.main(["tune-io", str(tmp_path / "file")]) == 1
    assert "is a file" in capsys.readouterr().err


def test_a_path_that_is_read_only(tmp_path, capsys, monkeypatch):
    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    assert cli.main(["tune-io", str(tmp_path)]) == 1
    assert "cannot be written: Permission denied" in capsys.readouterr().err


def test_a_drive_that_is_too_small(tmp_path, capsys):
    assert cli.main(["tune-io", str(tmp_path), "--gib", "1e6"]) == 1
    assert "GB free" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs")
def test_host_memory_is_refused(capsys):
    assert cli.main(["tune-io", "/dev/shm"]) == 1
    assert "host memory" in capsys.readouterr().err
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        assert cli.main(["tune-io", folder, *SMALL, "--allow-ram"]) == 0
    assert f"nvme_path: {folder}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value", "expected"), [("--gib", "0", "above 0"), ("--block-mib", "0", "from 0.0039")]
)
def test_wrong_options(tmp_path, capsys, option, value, expected):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["tune-io", str(tmp_path), option, value])
    assert expected in capsys.readouterr().err


def test_the_best_setting_is_the_smallest_of_the_fastest():
    def measured(block, threads, read_s, write_s):
        return Measured(NVMeIOConfig(block_bytes=block, parallelism=threads), 10**9, [read_s], [write_s])

    fast = measured(8 << 20, 4, 0.5, 0.5)
    close = measured(8 << 20, 2, 0.505, 0.505)
    smaller = measured(4 << 20, 2, 0.51, 0.5)
    slow = measured(4 << 20, 1, 0.7, 0.4)
    assert best([fast, close, smaller, slow]) is smaller
    assert slow.both_gbs == pytest.approx(2 / 1.1)
