"""How a name becomes a strategy. Each claim is about a fresh interpreter, so each test starts one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.marks import slow
from tests.unit.checkpoint_folders import small_folder

ROOT = Path(__file__).resolve().parents[2]
NAMES = "['zero0', 'zero1', 'zero2', 'zero3', 'zero2_notebook', 'zerostrategy', 'ls_strategy.zerostrategy']"
ALL_THERE = f"""
from lightning.pytorch.strategies import StrategyRegistry
missing = set({NAMES}) - set(StrategyRegistry.available_strategies())
assert not missing, missing
"""


def _entry_point_is_installed() -> bool:
    return any(ep.value == "ls_strategy.autoload:install" for ep in metadata.entry_points(group="torch.backends"))


needs_entry_point = pytest.mark.skipif(
    not _entry_point_is_installed(), reason="the distribution is not installed: pip install -e . --no-deps"
)


def run(code: str, *arguments: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter; only the environment named here differs from the present one."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("LS_STRATEGY_AUTOLOAD", "PYTHONPATH")}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=cwd,
        env={**inherited, "OMP_NUM_THREADS": "1", **env},
        check=False,
    )


def check(code: str, *arguments: str, cwd: Path = ROOT, **env: str) -> str:
    """`run`, and the code must succeed."""
    done = run(code, *arguments, cwd=cwd, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.wide
@needs_entry_point
def test_a_trainer_takes_an_alias_with_lightning_alone(tmp_path: Path) -> None:
    check(
        f"""
import lightning as L
{ALL_THERE}
import sys
assert "ls_strategy.lightning.strategy" not in sys.modules
trainer = L.Trainer(accelerator="cpu", devices=1, strategy="zero2", logger=False, enable_checkpointing=False)
assert type(trainer.strategy).__name__ == "ZeROStrategy"
""",
        cwd=tmp_path,
    )


OFF = """
import ls_strategy, ls_strategy.autoload, lightning.pytorch
from lightning.pytorch.strategies import StrategyRegistry
assert "zero3" not in StrategyRegistry.available_strategies()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(OFF.replace("ls_strategy, ls_strategy.autoload, ", ""), marks=needs_entry_point, id="alone"),
        pytest.param(f"{OFF}ls_strategy.autoload.register()\n{ALL_THERE}", id="then by hand"),
    ],
)
def test_the_entry_point_can_be_switched_off(tmp_path: Path, code: str) -> None:
    check(code, cwd=tmp_path, PYTHONPATH=str(ROOT), LS_STRATEGY_AUTOLOAD="0")


@pytest.mark.wide
@pytest.mark.parametrize(
    "imports", ["import ls_strategy, torch, lightning as L", slow("import lightning as L, ls_strategy")]
)
def test_an_explicit_import_registers_in_any_order(imports: str) -> None:
    check(imports + ALL_THERE, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


def test_importing_the_package_loads_no_torch_and_no_lightning() -> None:
    check(
        """
import sys, ls_strategy
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"torch", "lightning", "pytorch_lightning", "numpy"}, loaded
"""
    )


@pytest.mark.wide
def test_every_public_name_resolves_and_is_listed() -> None:
    check(
        """
import ls_strategy
for name in ls_strategy.__all__:
    assert getattr(ls_strategy, name) is not None, name
    assert name in dir(ls_strategy), name
assert set(ls_strategy._HOME) | {"__version__"} == set(ls_strategy.__all__)
try:
    ls_strategy.nonsense
except AttributeError as error:
    assert "nonsense" in str(error)
else:
    raise AssertionError
"""
    )


def test_the_version_is_the_distribution_s() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    version = check("import ls_strategy; print(ls_strategy.__version__)").strip()
    assert f'\nversion = "{version}"\n' in text


BREAK = {
    "register": "ls_strategy.autoload.register = None",
    "table": "ls_strategy.autoload.ALIASES = None",
    "finder": "ls_strategy.autoload._act_after = None",
    "strategy": "sys.modules['ls_strategy.lightning.strategy'] = None",
}


@pytest.mark.wide
@pytest.mark.parametrize("how", [pytest.param(h, marks=[pytest.mark.slow] * (i > 0)) for i, h in enumerate(BREAK)])
def test_a_broken_package_breaks_neither_torch_nor_lightning(how: str) -> None:
    check(
        f"""
import sys, warnings, ls_strategy.autoload
warnings.simplefilter("error", UserWarning)  # not even where a warning is an error
{BREAK[how]}
import torch
ls_strategy.autoload.install()
import lightning.pytorch.strategies as strategies
assert "ddp" in strategies.StrategyRegistry.available_strategies()
"""
    )


@pytest.mark.slow
def test_an_error_in_install_is_one_warning() -> None:
    done = run(
        """
import ls_strategy.autoload
ls_strategy.autoload.ALIASES = None
import lightning.pytorch.strategies
ls_strategy.autoload.install()
"""
    )
    assert done.returncode == 0, done.stderr
    assert 1 <= done.stderr.count("UserWarning: ls_strategy could not register") <= 2


REGISTRIES = {
    "an alias that is taken is left alone": """
from lightning.pytorch.strategies import StrategyRegistry
StrategyRegistry.pop("zero1", None)
StrategyRegistry.register("zero1", dict, description="mine")
import ls_strategy.autoload
ls_strategy.autoload.install()
assert StrategyRegistry.get("zero1") == {}
""",
    "a reloaded one is filled again": f"""
import ls_strategy, importlib, lightning.pytorch.strategies as s
importlib.reload(s)
{ALL_THERE}
""",
    "aliases are lower case and make strategies": """
import ls_strategy.autoload, lightning.pytorch
from lightning.pytorch.strategies import StrategyRegistry
for name, arguments in ls_strategy.autoload.ALIASES.items():
    assert name == name.lower()
    assert "deepspeed" not in name  # Lightning looks for this substring
    assert "ddp" not in name or name.startswith("ddp_zero")  # Lightning refuses MPS with such names
    assert type(StrategyRegistry.get(name)) is ls_strategy.ZeROStrategy
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", REGISTRIES)
def test_the_registry(what: str) -> None:
    check(REGISTRIES[what])


CLI = """
import lightning.pytorch as pl
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel, BoringDataModule
{imports}
cli = LightningCLI(BoringModel, BoringDataModule, run=False, save_config_callback=None)
print(type(cli.trainer.strategy).__name__)
"""
QUIET = ("--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false")


def in_yaml(folder: Path, strategy: str) -> str:
    """Return the flag of a file in which the Trainer has this strategy."""
    pytest.importorskip("jsonargparse")
    config = folder / "config.yaml"
    config.write_text(f"trainer:\n  strategy: {strategy}\n")
    return f"--config={config}"


@pytest.mark.slow
def test_cli_takes_an_alias_from_yaml(tmp_path: Path) -> None:
    out = check(CLI.format(imports="import ls_strategy"), in_yaml(tmp_path, "zero3"), *QUIET)
    assert "ZeROStrategy" in out


@pytest.mark.wide
def test_cli_takes_a_class_path_from_yaml_without_any_registration(tmp_path: Path) -> None:
    arguments = "{stage: 2, precision: {reduce_dtype: fp32}, sharding: {block_classes: [Linear]}}"
    config = in_yaml(tmp_path, f"{{class_path: ls_strategy.ZeROStrategy, init_args: {arguments}}}")
    assert "ZeROStrategy" in check(CLI.format(imports=""), config, *QUIET, LS_STRATEGY_AUTOLOAD="0")


@pytest.mark.slow
@pytest.mark.parametrize(("init_args", "word"), [("stage: 5", "stage"), ("typo: 1", "typo")])
def test_cli_refuses_a_bad_value(tmp_path: Path, init_args: str, word: str) -> None:
    config = in_yaml(tmp_path, f"{{class_path: ls_strategy.ZeROStrategy, init_args: {{{init_args}}}}}")
    done = run(CLI.format(imports=""), config, *QUIET)
    assert done.returncode == 2, done.stdout + done.stderr
    assert word in done.stderr


@pytest.mark.wide
@pytest.mark.parametrize(
    "flags",
    [
        slow(("--trainer.strategy=zero1",)),
        slow(("--trainer.strategy=ls_strategy.ZeROStrategy",)),
        ("--trainer.strategy=ls_strategy.ZeROStrategy", "--trainer.strategy.stage=2"),
    ],
)
def test_cli_takes_flags(flags: tuple[str, ...]) -> None:
    pytest.importorskip("jsonargparse")
    assert "ZeROStrategy" in check(CLI.format(imports="import ls_strategy"), *flags, *QUIET)


@pytest.mark.wide
@pytest.mark.dist
def test_the_readme_s_usage_runs(tmp_path: Path) -> None:
    after_marker = (ROOT / "README.md").read_text().split("<!-- usage -->", 1)[1]
    code = after_marker.split("```python\n", 1)[1].split("```", 1)[0]
    assert len(code.splitlines()) <= 8
    script = tmp_path / "usage.py"
    script.write_text(code)
    check(
        f"""
import os, runpy, sys
sys.argv = [{str(script)!r}]  # what the launcher starts the other rank with
runpy.run_path({str(script)!r}, run_name="__main__")
os._exit(0)  # gloo aborts a regular interpreter exit now and then; that is not what this is about
""",
        cwd=tmp_path,
        PYTHONPATH=str(ROOT),
    )


# --- checkpoint folders -----------------------------------------------------------------------------------------------

MODEL = """
import {package} as L
class Toy(L.LightningModule):
    def __init__(self, scale=1.0):
        super().__init__()
        self.save_hyperparameters()
        import torch
        self.table = torch.nn.Embedding(11, 6)
import sys
early = {{name for name in sys.modules if name.startswith("ls_strategy.")}}
names = (
    "autoload", "distributed", "distributed.launch", "distributed.launch.launcher", "errors", "host", "lightning",
    "lightning.checkpointing", "lightning.checkpointing.files", "short_paths",
)
assert early == {{f"ls_strategy.{{name}}" for name in names}}, early
found = Toy.load_from_checkpoint(sys.argv[1], strict=False, scale=2.0)
assert found.hparams.scale == 2.0 and "ls_strategy.checkpoint.source" in sys.modules
print(found.table.weight.sum().item())
"""


@pytest.mark.wide
@needs_entry_point
@pytest.mark.parametrize("package", ["lightning", slow("lightning.pytorch"), slow("pytorch_lightning")])
def test_a_folder_is_loaded_with_lightning_alone(tmp_path: Path, package: str) -> None:
    """Nothing of it but the two files without torch is there before."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    folder = small_folder(tmp_path / "x.ckpt")
    out = check(MODEL.format(package=package), str(folder), cwd=tmp_path)
    from ls_strategy.checkpoint.source import read_weights

    assert float(out) == pytest.approx(float(read_weights(folder).tensors["table.weight"].sum()))


@pytest.mark.slow
def test_a_folder_is_loaded_after_a_late_import_or_registration_by_hand(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "x.ckpt")
    late = """
import lightning, sys
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
try:
    TorchCheckpointIO().load_checkpoint(sys.argv[1])
except IsADirectoryError:
    pass
else:
    raise AssertionError
{}
assert TorchCheckpointIO().load_checkpoint(sys.argv[1])["state_dict"]
"""
    check(late.format("import ls_strategy"), str(folder), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    by_hand = "import ls_strategy.autoload\nls_strategy.autoload.register()"
    check(late.format(by_hand), str(folder), LS_STRATEGY_AUTOLOAD="0")


def test_what_is_no_folder_of_ours_is_as_without_us(tmp_path: Path) -> None:
    """The same errors, word for word."""
    import torch
    from lightning.fabric.utilities import cloud_io

    import ls_strategy.autoload

    ls_strategy.autoload.install()
    theirs, ours = cloud_io._load.__wrapped__, cloud_io._load  # type: ignore[attr-defined]
    foreign, named = tmp_path / "foreign.ckpt", tmp_path / "named.ckpt"
    for folder in (foreign, named):
        folder.mkdir()
        (folder / "data.bin").write_bytes(b"x")
    (named / "manifest.json").write_text('{"name": "a page"}')
    damaged = tmp_path / "damaged.ckpt"
    damaged.write_bytes(b"PK\x03\x04 and nothing")
    for path in (foreign, named, damaged, tmp_path / "absent.ckpt", "", "memory://absent.ckpt", "nothing://x", None, 3):
        errors = []
        for load in (theirs, ours):
            with pytest.raises(Exception) as caught:  # noqa: PT011
                load(path, weights_only=True)
            errors.append((type(caught.value), str(caught.value)))
        assert errors[0] == errors[1], path
    torch.save({"a": torch.ones(2)}, tmp_path / "file.ckpt")
    with (tmp_path / "file.ckpt").open("rb") as file:
        assert ours(file)["a"].tolist() == ours(path_or_url=str(tmp_path / "file.ckpt"))["a"].tolist() == [1, 1]
    cloud_io._atomic_save({"a": 1}, tmp_path / "other.ckpt")
    assert ours(tmp_path / "other.ckpt") == {"a": 1}


def test_a_folder_on_another_file_system_is_loaded(tmp_path: Path) -> None:
    import fsspec
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

    import ls_strategy.autoload

    ls_strategy.autoload.install()
    folder = small_folder(tmp_path / "x.ckpt")
    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "/elsewhere/x.ckpt", recursive=True)
    for path in ("memory://elsewhere/x.ckpt", f"file://{folder}"):
        found = TorchCheckpointIO().load_checkpoint(path)
        assert found["state_dict"]["table.weight"].shape == (11, 6)
    memory.rm("/elsewhere", recursive=True)
