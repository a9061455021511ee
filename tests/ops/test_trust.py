"""A library is loaded only from where nobody else can have put it."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from ls_strategy.extras.doctor import kernels
from ls_strategy.ops import _build
from tests.processes import Program

ROOT = Path(__file__).parents[2]
OTHER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


def mode(bits):
    return lambda path: path.chmod(bits)


def other_user(path):
    os.chown(path, OTHER, -1, follow_symlinks=False)


def other_group(path):
    os.chown(path, -1, OTHER)
    path.chmod(0o770)


def link(path):
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    """A cache with a library in it, that a compiler which fails would have to replace; what is loaded."""
    compiler = tmp_path / "cxx"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo fake 1.0 && exit 0\necho "error: fails" >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("LS_STRATEGY_CACHE", str(tmp_path / "above" / "cache"))
    monkeypatch.delenv("LS_STRATEGY_OPS", raising=False)
    paths = []
    monkeypatch.setattr(torch.ops, "load_library", paths.append)
    _build.cache_dir.cache_clear()
    recipe = _build.cpu_recipe()
    library = _build.cache_dir() / f"{recipe.name}-{recipe.key}.so"
    library.write_bytes(b"code" + hashlib.sha256(b"code").digest())
    library.chmod(0o644)
    yield library, paths
    _build.cache_dir.cache_clear()


def test_the_cache_is_made_for_this_user_alone(loaded):
    library, paths = loaded
    assert [p.stat().st_mode & 0o777 for p in (library.parent, library.parent.parent)] == [0o700, 0o700]
    assert _build._load("cpu") == f"native: {library}"
    assert paths == [library]
    assert kernels.cache().state == "ok"


CACHES = {
    "everybody writes": (mode(0o777), "all users may write to .*cache"),
    "everybody writes, sticky": (mode(0o1777), "all users may write to .*cache"),
    "a group writes": pytest.param(other_group, f"group {OTHER} may write to .*cache", marks=as_root),
    "another user's": pytest.param(other_user, f"cache belongs to user {OTHER}", marks=as_root),
}


@pytest.mark.parametrize("above", [False, True])
@pytest.mark.parametrize(("change", "message"), CACHES.values(), ids=CACHES)
def test_a_cache_that_others_may_write_to_is_refused(loaded, change, message, above, monkeypatch):
    library, paths = loaded
    change(library.parent.parent if above else library.parent)
    if above and change is CACHES["everybody writes, sticky"][0]:
        assert _build._load("cpu").startswith("native")  # as in /tmp: nobody can rename what is not theirs
        return
    status = _build._load("cpu")
    assert status.startswith("reference: ")
    with pytest.raises(_build.BuildError, match=message.replace("cache", "above") if above else message):
        _build.library(_build.cpu_recipe())
    assert paths == []
    assert "set LS_STRATEGY_CACHE to a folder that only you may write to" in status
    assert kernels.cache().state == "problem"
    monkeypatch.setenv("LS_STRATEGY_OPS", "1")
    with pytest.raises(_build.ConfigError, match=r"may write to|belongs to"):
        _build._load("cpu")


@pytest.mark.parametrize(
    "change", [mode(0o666), link, pytest.param(other_user, marks=as_root), pytest.param(other_group, marks=as_root)]
)
def test_a_library_that_others_may_have_written_is_built_again(loaded, change):
    library, paths = loaded
    change(library)
    assert "fails" in _build._load("cpu")
    assert paths == []


def test_a_lock_that_is_a_link_is_not_followed(loaded, tmp_path):
    library, _ = loaded
    library.unlink()
    library.with_suffix(".lock").symlink_to(tmp_path / "victim")
    assert _build._load("cpu").startswith("reference: ")
    assert not (tmp_path / "victim").exists()


PROGRAM = """
import pathlib, os, sys
from ls_strategy.ops import _build
cache, planted, marker = map(pathlib.Path, sys.argv[1:])
recipe = _build.cpu_recipe()
library = _build.cache_dir() / f"{recipe.name}-{recipe.key}.so"
library.write_bytes(planted.read_bytes())
for mode in (0o777, 0o700):
    cache.chmod(mode)
    _build._load("cpu")
    print(marker.exists())
"""


@pytest.mark.wide
def test_a_planted_library_does_not_run(tmp_path):
    """With rights as they should be it does: the test would see it."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no compiler")
    marker, cache, planted = tmp_path / "marker", tmp_path / "cache", tmp_path / "planted.so"
    source = f'#include <cstdio>\n__attribute__((constructor)) void run() {{ fclose(fopen("{marker}", "w")); }}\n'
    subprocess.run([compiler, "-shared", "-fPIC", "-xc++", "-", "-o", planted], input=source, text=True, check=True)
    content = planted.read_bytes()
    planted.write_bytes(content + hashlib.sha256(content).digest())
    variables = {k: v for k, v in os.environ.items() if k not in ("LS_STRATEGY_OPS", "CXX")}
    variables |= {"LS_STRATEGY_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
    with Program(PROGRAM, str(cache), str(planted), str(marker), env=variables) as process:
        assert process.output().split() == ["False", "True"]
