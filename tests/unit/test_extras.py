"""The core without its side products, what it asks of them by name, and their short paths."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from shutil import copytree, ignore_patterns, rmtree

import pytest

import ls_strategy
from ls_strategy import extensions
from ls_strategy.errors import CheckpointError, ConfigError
from tests.processes import Program, output_of

PACKAGE = Path(ls_strategy.__file__).parent
FOLDERS = sorted(path.parent.name for path in (PACKAGE / "extras").glob("*/__init__.py"))

FIT = """
import sys
import lightning as L
import torch
import ls_strategy

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

def trainer(strategy):
    return L.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_steps=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)

def fit(absent):
    model, data = Model(), torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)
    before = model.layer.weight.detach().clone()
    trainer("zero2").fit(model, data)
    assert not torch.equal(before, model.layer.weight)
    loaded = {name.split(".")[2] for name in sys.modules if name.startswith("ls_strategy.extras.")}
    loaded -= {"_lightning", "run_file"}  # files below the folders
    assert loaded <= {"planner"} - absent, loaded  # which explains steps that do not fit into memory
    for strategy, folder in (("zero_auto", "planner"), (dict(deepspeed_config={}), "deepspeed")):
        try:
            trainer(strategy if isinstance(strategy, str) else ls_strategy.ZeROStrategy(**strategy)).fit(model, data)
        except ls_strategy.ConfigError as error:
            assert folder in absent and f"needs ls_strategy.extras.{folder}" in str(error), error
        else:
            assert folder not in absent
"""

ONCE = """
import pathlib
extras = pathlib.Path(ls_strategy.__file__).parent / "extras"
fit({"planner", "deepspeed"} - {path.parent.name for path in extras.glob("*/__init__.py")})
print("fitted")
"""

BLOCKED = """
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("ls_strategy.extras.") and name.split(".")[2] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

assert not [name for name in sys.modules if name.startswith("ls_strategy.extras.") and "_lightning" not in name]
absent = set(sys.argv[1:])
sys.meta_path.insert(0, Absent())
fit(absent)
print("fitted without all")
absent = {"planner"}
fit(absent)
print("fitted without one")
"""
"""In a process that has imported the strategy, and so what the strategy imports of the extras: nothing."""


def without(folders: list[str], parent: Path) -> Path:
    """Return a folder with a copy of the package that lacks some of the extras."""
    copytree(PACKAGE, parent / "ls_strategy", ignore=ignore_patterns("__pycache__"))
    for folder in folders:
        rmtree(parent / "ls_strategy" / "extras" / folder)
    return parent


def run(code: str, path: Path) -> str:
    environment = {"PYTHONPATH": str(path), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(path)}
    command = [sys.executable, "-c", code]
    return output_of(command, env=environment, cwd=path)


@pytest.mark.wide
@pytest.mark.parametrize("folder", FOLDERS)
def test_the_core_trains_without_one_of_its_extras(folder: str, tmp_path: Path) -> None:
    assert "fitted" in run(FIT + ONCE, without([folder], tmp_path))


@pytest.mark.wide
def test_the_core_trains_without_all_of_its_extras(tmp_path: Path) -> None:
    assert "fitted" in run(FIT + ONCE, without(FOLDERS, tmp_path))


def test_the_core_trains_where_extras_cannot_be_imported() -> None:
    with Program(FIT + BLOCKED, *FOLDERS) as process:
        assert process.output().splitlines()[-1] == "fitted without one"


def test_what_does_not_draw_is_imported_where_nothing_can_be_drawn() -> None:
    code = """
import importlib, pkgutil, sys
for name in [name for name in sys.modules if name.split(".")[0] in ("matplotlib", "jinja2")]:
    del sys.modules[name]
sys.modules["matplotlib"] = sys.modules["jinja2"] = None
import ls_strategy.extras
for folder in ("callbacks", "cli", "planner", "plots", "report"):
    package = importlib.import_module(f"ls_strategy.extras.{folder}")
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
from ls_strategy.extras.plots.figure import missing
print(missing())
"""
    with Program(code) as process:
        assert process.output().splitlines()[-1] == "matplotlib is missing"


@pytest.fixture
def offers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "_OFFERED", {name: list(them) for name, them in extensions._OFFERED.items()})


def test_every_offer_of_the_package_can_be_loaded() -> None:
    code = (
        "from ls_strategy import extensions\n"
        "for name in extensions._OFFERED.keys() - {'strategy_in_ray'}:\n"  # needs Ray
        "    print(name, *(each.__name__ for each in extensions.find_all(name)))"
    )
    expected = ["checkpoint_reader read_if_deepspeed", "deepspeed_config with_config", "planner FitPlanner"]
    with Program(code) as process:
        assert sorted(process.output().splitlines()) == expected


@pytest.mark.usefixtures("offers")
def test_another_packages_offer_comes_first() -> None:
    extensions.offer("checkpoint_reader", "json:loads")
    extensions.offer("checkpoint_reader", "json:loads")
    import json

    first, second = extensions.find_all("checkpoint_reader")
    assert first is json.loads is extensions.find("checkpoint_reader")
    assert second.__name__ == "read_if_deepspeed"


@pytest.mark.usefixtures("offers")
def test_another_packages_reader_reads_its_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "def read(path, *, weights_only):\n    return {'epoch': 3} if (path / 'theirs').exists() else None\n"
    (tmp_path / "reader_of_theirs.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    extensions.offer("checkpoint_reader", "reader_of_theirs:read")
    (tmp_path / "run" / "theirs").mkdir(parents=True)
    from ls_strategy.lightning.checkpointing import contents

    assert contents.read(tmp_path / "run", None, None)["epoch"] == 3  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="manifest"):  # it is asked, and then our own
        contents.read(tmp_path, None, None)  # type: ignore[arg-type]


@pytest.mark.usefixtures("offers")
def test_what_is_not_installed_is_not_found_and_required_with_the_cure() -> None:
    extensions._OFFERED["planner"] = ["ls_strategy.extras.nothing.fit:FitPlanner"]
    assert extensions.find("planner") is None
    with pytest.raises(ConfigError, match=r"Got stage='auto', which needs ls_strategy\.extras\.nothing\.fit"):
        extensions.require("planner", "stage='auto'")


@pytest.mark.usefixtures("offers")
def test_an_error_inside_of_a_module_is_not_taken_for_its_absence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_reader.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    extensions.offer("checkpoint_reader", "broken_reader:read")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        extensions.find_all("checkpoint_reader")


@pytest.mark.parametrize(
    ("name", "target", "words"),
    [
        ("planners", "json:loads", "Use checkpoint_reader, deepspeed_config, planner, strategy_in_ray"),
        ("planner", "json.loads", "Write it as"),
        ("planner", "json:", "Write it as"),
    ],
)
def test_a_wrong_offer_is_refused(name: str, target: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        extensions.offer(name, target)


def test_every_extra_has_a_short_path() -> None:
    from ls_strategy.short_paths import _SHORT

    assert sorted(_SHORT) == FOLDERS
    assert not any((PACKAGE / name).with_suffix(".py").exists() for name in FOLDERS)


def test_both_paths_are_one_module(tmp_path: Path) -> None:
    code = (
        "import sys, ls_strategy.slurm.script as short\n"
        "import ls_strategy.extras.slurm.script as full\n"
        "from ls_strategy.slurm import script\n"
        "assert short is full is script and full.__spec__.name == full.__name__ == 'ls_strategy.extras.slurm.script'\n"
        "import ls_strategy.extras.snapshots.memory as full, ls_strategy.snapshots.memory as short\n"
        "assert short is full\n"
        "assert 'torch' not in sys.modules and 'ls_strategy.extras.planner' not in sys.modules\n"
        "try: import ls_strategy.slurm.nothing\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    assert "No module named 'ls_strategy.slurm.nothing'" in run(code, PACKAGE.parent)


def test_a_program_has_a_short_path() -> None:
    command = [sys.executable, "-m", "ls_strategy.cli", "--help"]
    printed = output_of(command, cwd=PACKAGE.parent)
    assert "usage: ls-strategy" in printed
    # The origin of a program is its `sys.argv[0]`, which Lightning joins where srun is installed.
    found = find_spec("ls_strategy.cli.__main__")
    assert found is not None
    assert found.origin == str(PACKAGE / "extras" / "cli" / "__main__.py")
