"""Fused layers and losses of others, at every stage as under DDP: they read a layer's weight without calling the layer.

Triton's interpreter runs Liger's kernels on the CPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.dist.ranks import Net, assert_equal, fit, on_ranks, weights
from tests.dist.test_adapters import Adapted
from tests.dist.test_pretrained import Pretrained, save, tokens

NEEDED = ("liger_kernel", "peft", "transformers", "triton")


def interpret() -> None:
    """Complete triton's interpreter."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def with_floats(argument: Any) -> Any:
        """Compiled kernels get numbers as fp32; the interpreter leaves them as they are in Python."""
        if isinstance(argument, float):
            return tl.tensor(interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)
        return convert(argument)

    interpreter._implicit_cvt = with_floats
    norms = importlib.import_module("liger_kernel.ops.rms_norm")
    norms.rsqrt = lambda x: tl.rsqrt(x)  # instead of that of CUDA's libdevice


class Fused(Pretrained):
    """Liger's norms, rotations, feed-forwards, and its loss that never makes all logits."""

    def load(self) -> Any:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        model = super().load()
        apply_liger_kernel_to_llama(model=model)
        return model

    def training_step(self, batch: Any, i: int) -> Any:
        assert "Liger" in str(self.model.model.layers[0].mlp.forward)
        return super().training_step(batch, i)


class FusedAdapted(Adapted):
    """The same below adapters."""

    def load(self) -> Any:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        model = super().load()
        apply_liger_kernel_to_llama(model=model.get_base_model())
        return model


@on_ranks(2, timeout_s=150)
def _as_ddp(rank: int, world_size: int, folder: str, adapted: bool, stages: tuple[int, ...]) -> None:
    interpret()
    make = FusedAdapted if adapted else Fused
    runs: dict[Any, Any] = {}
    for strategy in ("ddp", *stages):
        module = make(Path(folder) / "llama")
        fit(strategy, module, tokens(8), max_steps=2)
        runs[strategy] = (module.losses, weights(module))
    for stage in stages:
        for ours, trusted, what in zip(runs[stage], runs["ddp"], ("losses", "weights"), strict=True):
            assert_equal(ours, trusted, f"stage {stage}, {what}")


@pytest.mark.wide
@pytest.mark.skipif(not all(map(importlib.util.find_spec, NEEDED)), reason=f"needs {', '.join(NEEDED)}")
@pytest.mark.parametrize(("adapted", "stages"), [(False, (0, 1, 2, 3)), (True, (3,))], ids=["full", "adapters"])
def test_fused_models_train_as_under_ddp(adapted: bool, stages: tuple[int, ...], tmp_path: Path) -> None:
    save(tmp_path, "llama")
    arguments = f"folder={str(tmp_path)!r}, adapted={adapted}, stages={stages}"
    code = f"from tests.dist.test_fused_models import _as_ddp; _as_ddp({arguments})"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # before triton is imported, in all processes
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class TorchsLoss(Net):
    """torch's loss of a linear layer, of all logits and in chunks by turns."""

    def loss(self, batch: Any) -> Any:
        h = self.first(batch[0])
        for block in self.blocks:
            h = block(h)
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2) if len(self.losses) % 2 else None
        return functional.linear_cross_entropy(
            h, self.last.weight, batch[1].argmax(1), linear_bias=self.last.bias, options=options
        )


@on_ranks(2)
def _torchs_loss(rank: int, world_size: int) -> None:
    fit("ddp", trusted := TorchsLoss())
    for stage in (0, 1, 2, 3):
        fit(stage, ours := TorchsLoss())
        assert_equal(ours.losses, trusted.losses, f"stage {stage}, losses")
        assert_equal(weights(ours), weights(trusted), f"stage {stage}, weights")


@pytest.mark.skipif(not hasattr(functional, "linear_cross_entropy"), reason="torch has no such loss yet")
def test_torchs_own_loss_of_a_linear_layer_trains_as_under_ddp() -> None:
    _torchs_loss()
