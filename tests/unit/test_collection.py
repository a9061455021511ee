"""pytest finds every test module there is: a folder that it skips passes by not being run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.tables import ROOT


@pytest.mark.slow
def test_every_test_module_is_collected() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", "-p", "no:cacheprovider"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout
    collected = {line.split("::")[0] for line in listing.splitlines() if "::" in line}
    present = {str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py")}
    assert present - collected == set()
