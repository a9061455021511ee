"""What the package must do without its extras: ``python tests/packaging/bare_install.py`` from any folder.

``.ci/run`` calls it in an environment that has the built wheel and what the wheel requires, and nothing else: no
jsonargparse, no TensorBoard, no ninja, no pytest. It uses plain asserts, because there is no test runner.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

EXTRAS = ("jsonargparse", "tensorboard", "torchvision", "pytest", "transformers", "peft", "matplotlib")
LIMIT_S = 300


def run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command with an end, and show what it printed if it failed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if check and done.returncode:
        raise SystemExit(f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def check_extras_are_absent() -> None:
    """Otherwise the rest proves nothing."""
    found = [name for name in EXTRAS if importlib.util.find_spec(name)]
    assert not found, f"{found} are installed here: this is no bare environment"


def check_installed_package_is_used() -> None:
    """The checkout must not be what is imported."""
    import ls_strategy

    assert "site-packages" in Path(ls_strategy.__file__).parts, ls_strategy.__file__
    assert (Path(ls_strategy.__file__).parent / "py.typed").is_file()
    assert list((Path(ls_strategy.__file__).parent / "ops" / "csrc").glob("*")), "the wheel lacks the kernels' source"
    assert list((Path(ls_strategy.__file__).parent / "extras" / "report" / "templates").glob("*.html"))


def check_commands() -> None:
    """The console script answers, and a command that needs an extra names it instead of a traceback."""
    script = str(Path(sys.executable).with_name("ls-strategy"))
    assert "consolidate" in run(script, "--help").stdout
    refused = run(script, "plan", "missing.yaml", check=False)
    assert refused.returncode, "plan without jsonargparse must fail"
    assert "Traceback" not in refused.stderr, refused.stderr
    refused = run(script, "report", ".", check=False)
    assert 'Run pip install "ls_strategy[report]"' in " ".join(refused.stderr.split()), refused.stderr


def check_new_project() -> None:
    """The templates are in the wheel, and a project without the extras says what to install."""
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "some_project"
        script = str(Path(sys.executable).with_name("ls-strategy"))
        assert "pip install" in run(script, "new", str(project)).stdout
        for name in ("README.md", "main.py", "quick.yaml", "submit.sh", "some_project/model.py", ".gitignore"):
            assert (project / name).is_file(), f"the wheel lacks the template of {name}"
        run(sys.executable, "-c", f"import sys; sys.path.insert(0, {str(project)!r}); import some_project.model")


def check_training() -> None:
    """Two ranks train by an alias, save a folder, and another stage goes on from it."""
    with tempfile.TemporaryDirectory() as folder:
        for strategy in ("zero3_offload", "zero2"):
            run(sys.executable, __file__, "--fit", strategy, folder)


def fit(strategy: str, folder: str) -> None:
    """The program that `check_training` runs; Lightning starts the second rank itself."""
    import torch
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    checkpoint = Path(folder) / "checkpoint"
    resumed = checkpoint.exists()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=8 if resumed else 4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    model = BoringModel()
    trainer.fit(model, ckpt_path=str(checkpoint) if resumed else None)
    assert trainer.global_step == (8 if resumed else 4)
    assert all(torch.isfinite(p).all() for p in model.state_dict().values())
    if not resumed:
        trainer.save_checkpoint(checkpoint)


def main() -> None:
    """Run every check."""
    if sys.argv[1:2] == ["--fit"]:
        fit(*sys.argv[2:4])
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    checks = (
        check_extras_are_absent,
        check_installed_package_is_used,
        check_commands,
        check_new_project,
        check_training,
    )
    for check in checks:
        check()
        print(f"{check.__name__}: passed", flush=True)


if __name__ == "__main__":
    main()
