"""What a platform wheel must do without a compiler: ``python tests/packaging/shipped_kernels.py`` from any folder.

The environment has that wheel and what it requires. Two ranks fit with ``zero2``, once with no program on PATH, an
empty cache and the kernels of the wheel, and once with kernels compiled here, which needs a compiler: the bits are the
same.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel

from ls_strategy.ops import _build

LIMIT_S = 300


class Model(BoringModel):
    """Steps by AdamW, so by a fused update; clipping needs the sum of squares as well."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class FirstStep(Callback):
    """Notes when the first step is over."""

    at: float | None = None

    def on_train_batch_end(self, *_: Any) -> None:
        """Note it once."""
        self.at = self.at or time.time()


def fit(kernels: str, folder: str, started: str) -> None:
    """Fit on two ranks, of which Lightning starts the second, and write what rank 0 has found."""
    if kernels == "compiled":
        _build.SHIPPED = Path(folder, "nothing")
    seed_everything(1, verbose=False)
    first, model = FirstStep(), Model()
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options["enable_model_summary"] = False
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="zero2", max_steps=4, gradient_clip_val=0.5, callbacks=[first],
        default_root_dir=folder, **options,
    )  # fmt: skip
    assert not _build.status(), "the fit has to ask for the kernels"
    trainer.fit(model)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.state_dict().values())
    found = {"weights": hashlib.sha256(weights).hexdigest(), "status": _build.status()["cpu"]}
    assert first.at is not None
    found["first_step_s"] = str(first.at - float(started))
    if kernels == "shipped":  # those that this fit does not use
        for name in _build.CPU_LIBRARIES[1:]:
            assert _build.load_library(name).parent == _build.SHIPPED
    if trainer.is_global_zero:
        Path(folder, "found").write_text(json.dumps(found))


def outcome(kernels: str, **environment: str) -> dict[str, str]:
    """Return what `fit` has found in a process with changes of its environment."""
    variables = {name: text for name, text in os.environ.items() if name not in ("CXX", "LS_STRATEGY_OPS")}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--fit", kernels, folder, str(time.time())]
        done = subprocess.run(command, env=variables | environment, timeout=LIMIT_S, check=False)
        if done.returncode:
            raise SystemExit(f"the fit with {kernels} kernels ended with {done.returncode}")
        return json.loads(Path(folder, "found").read_text())


def main() -> None:
    """Compare both."""
    if sys.argv[1:2] == ["--fit"]:
        fit(*sys.argv[2:5])
        return
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as cache:
        shipped = outcome("shipped", PATH=empty, LS_STRATEGY_CACHE=cache)
        assert not list(Path(cache).iterdir()), "something was compiled"
    assert Path(shipped["status"].removeprefix("native: ")).parent == _build.SHIPPED, shipped
    compiled = outcome("compiled")
    assert compiled["status"].startswith("native: "), compiled
    assert _build.SHIPPED.name not in compiled["status"], compiled
    assert shipped["weights"] == compiled["weights"], "the kernels differ in their bits"
    print(f"without a compiler: {float(shipped['first_step_s']):.1f} s to the end of the first step")


if __name__ == "__main__":
    main()
