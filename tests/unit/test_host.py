"""Which of Lightning's two packages the strategy is made of: what decides, and what is refused."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ls_strategy import host
from ls_strategy.errors import ConfigError

SOURCE = Path(host.__file__).parent


class _StopError(Exception):
    """Ends a program before its imports."""


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has imported neither package and has not chosen."""
    monkeypatch.setattr(host, "_BOUND", [])
    monkeypatch.delenv(host.VARIABLE, raising=False)
    for module in (*host.HOSTS, *(module for parts in host.HOSTS.values() for module in parts.values())):
        monkeypatch.delitem(sys.modules, module, raising=False)


def choice_in(program: str, **names: Any) -> str:
    """What `host.name` answers at the first line of a program, whose imports come later."""
    chosen: list[str] = []

    def ask() -> None:
        chosen.append(host.name())
        raise _StopError

    with pytest.raises(_StopError):
        exec(compile(f"ask()\n{program}", "program.py", "exec"), {"__name__": "program", "ask": ask, **names})
    return chosen[0]


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("import pytorch_lightning as pl", "pytorch_lightning"),
        ("from pytorch_lightning.callbacks import EarlyStopping", "pytorch_lightning"),
        ("from lightning_fabric import Fabric", "pytorch_lightning"),
        ("import lightning as L", "lightning"),
        ("import lightning.pytorch as pl", "lightning"),
        ("lightning = pytorch_lightning = 1", "lightning"),  # names are no imports
        ("import torch", "lightning"),  # both are installed
    ],
)
def test_a_program_gets_the_package_that_it_imports_even_if_later(program: str, expected: str) -> None:
    assert choice_in(program) == expected


def test_a_module_that_imports_neither_leaves_it_to_its_importer() -> None:
    inner = compile("ask()", "strategies.py", "exec")
    program = "import pytorch_lightning"
    chosen: list[str] = []

    def ask() -> None:
        chosen.append(host.name())
        raise _StopError

    with pytest.raises(_StopError):
        exec(
            compile(f"run()\n{program}", "main.py", "exec"),
            {"__name__": "main", "run": lambda: exec(inner, {"__name__": "strategies", "ask": ask})},
        )
    assert chosen == ["pytorch_lightning"]


def test_a_file_that_imports_both_gets_the_one_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    both = "try:\n    import lightning\nexcept ImportError:\n    import pytorch_lightning"
    assert choice_in(both) == "lightning"
    host._BOUND.clear()
    monkeypatch.setitem(sys.modules, "pytorch_lightning", ModuleType("pytorch_lightning"))
    assert choice_in(both) == "pytorch_lightning"
    host._BOUND.clear()
    monkeypatch.setitem(sys.modules, "lightning.pytorch", ModuleType("lightning.pytorch"))
    assert choice_in(both) == "pytorch_lightning"  # the first


def test_only_one_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    find = host.importlib.util.find_spec
    monkeypatch.setattr(host.importlib.util, "find_spec", lambda name: None if name == "lightning" else find(name))
    assert choice_in("import torch") == "pytorch_lightning"


def test_the_variable_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(host.VARIABLE, "pytorch_lightning")
    assert choice_in("import lightning") == "pytorch_lightning"
    host._BOUND.clear()
    monkeypatch.setenv(host.VARIABLE, "pytorch-lightning")
    with pytest.raises(ConfigError, match="Set it to one of lightning, pytorch_lightning"):
        host.name()


def test_children_choose_as_their_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    host.bind("pytorch_lightning")
    host.remember_for_children()
    assert host.VARIABLE not in host.os.environ, "they find what is loaded"
    for module in ("lightning.fabric", "lightning_fabric"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    monkeypatch.setenv(host.VARIABLE, "")  # restored after the test
    host.remember_for_children()
    assert host.os.environ[host.VARIABLE] == f"pytorch_lightning:{host.os.getpid()}"
    host._BOUND.clear()
    monkeypatch.setattr(host.os, "getppid", host.os.getpid)
    assert choice_in("import lightning") == "pytorch_lightning", "a child"
    host._BOUND.clear()
    monkeypatch.setattr(host.os, "getppid", lambda: 1)
    assert choice_in("import lightning") == "lightning", "another program that was started from it"


def test_the_second_package_is_refused_with_the_cure() -> None:
    host.bind("pytorch_lightning")
    host.bind("pytorch_lightning")
    with pytest.raises(ConfigError, match="set LS_STRATEGY_LIGHTNING=lightning in the environment"):
        host.bind("lightning")
    assert host.name() == "pytorch_lightning"


@pytest.mark.parametrize("version", ["2.6.3", "2.5.6", "2.7.0", "3.0"])
def test_a_version_that_is_not_supported_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    from importlib import metadata

    monkeypatch.setattr(metadata, "version", lambda _: version)
    with pytest.raises(ConfigError, match=r'pip install "pytorch-lightning>=2.6.4,<2.7"'):
        host.bind("pytorch_lightning")
    assert host.bound() is None


@pytest.mark.parametrize("version", ["2.6.4", "2.6.11", "2.6.5+local", "2.6.5.post1"])
def test_versions_that_are_supported(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    from importlib import metadata

    monkeypatch.setattr(metadata, "version", lambda _: version)
    host.bind("lightning")


@pytest.mark.parametrize(("file", "kind"), [("pytorch.py", "pytorch"), ("fabric.py", "fabric")])
def test_both_packages_give_the_same_names(file: str, kind: str) -> None:
    (choice,) = (node for node in ast.parse((SOURCE / file).read_text()).body if isinstance(node, ast.If))
    ours, theirs = (host.HOSTS[name][kind] for name in ("lightning", "pytorch_lightning"))
    first, second = ("\n".join(map(ast.unparse, branch)) for branch in (choice.body, choice.orelse))
    assert first.replace(ours, theirs) == second
