"""References on an accelerator: few launches, counted on tensors without memory, and the bits of small portions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ls_strategy.ops import moments, norm, quantized, reference
from ls_strategy.ops.moments import BLOCK, Moment

NUMEL = 10**9 // quantized.TILE * quantized.TILE
LAUNCHES = 5_000
SCALARS = dict.fromkeys(
    ("unscale", "decay", "l2", "rest1", "beta1", "beta2", "weight", "weight2", "root2", "eps", "rate", "momentum"), 0.5
) | {"weight1": 0.1, "nesterov": True, "first": False}
STATES: dict[str, tuple[bool, ...]] = {"adamw_": (True, False), "lion_": (True,), "sgd_": (True,), "adagrad_": (False,)}
"""Whether each moment of a rule has a sign."""


class Launches(TorchDispatchMode):
    """Counts operations that are kernels on a GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        self.count += not (is_view or func.__name__.startswith("empty"))
        return func(*args, **(kwargs or {}))


def launches(work: Callable[[], Any]) -> int:
    with Launches() as counted:
        work()
    return counted.count


def make(numel: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


def update(rule: str, moment_format: Any, numel: int, device: str) -> Callable[[], None]:
    stored = [moments.empty(numel, moment_format, signed, device) for signed in STATES[rule]]
    param, grad, out = (make(numel, d, device) for d in (torch.float32, torch.bfloat16, torch.bfloat16))
    clip = torch.empty((), device=device)
    return lambda: reference.run(
        reference.RULES[rule], param, stored, grad, SCALARS, clip=clip, out=out, seed=0, offset=0
    )


@pytest.mark.parametrize("moment_format", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("rule", STATES)
def test_a_step_is_few_launches(rule: str, moment_format: str) -> None:
    grad = make(NUMEL, torch.float32, "meta")
    clipping = launches(lambda: norm.sum_of_squares_reference(grad, 0.5))
    assert 0 < clipping < clipping + launches(update(rule, moment_format, NUMEL, "meta")) <= LAUNCHES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_few_launches(dtype: torch.dtype) -> None:
    grad = make(NUMEL, dtype, "meta")
    assert 0 < launches(lambda: norm.sum_of_squares_reference(grad, 0.5)) <= LAUNCHES


@pytest.mark.parametrize("form", ["int4", "int8", "nf4"])
def test_quantization_is_few_launches(form: Any) -> None:
    values = make(NUMEL, torch.bfloat16, "meta")
    packed = make(quantized.packed_bytes(NUMEL, form), torch.uint8, "meta")
    assert 0 < launches(lambda: quantized.quantize_reference(values, packed, form)) <= LAUNCHES
    assert 0 < launches(lambda: quantized.dequantize_reference(packed, values, form)) <= LAUNCHES


@pytest.mark.parametrize("moment_format", ["bf16", "int8"])
def test_larger_portions_change_no_bit_of_an_update(moment_format: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    numel = 3 * moments.UPDATE_CHUNK + 5 * BLOCK + 7

    def run() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        param, grad = torch.randn(2, numel, generator=generator)
        stored: list[Moment] = [moments.empty(numel, moment_format, signed) for signed in (True, False)]
        for seed in (3, 4):
            reference.run(
                reference.adamw, param, stored, grad, SCALARS, clip=None, out=None, seed=seed, offset=2 * BLOCK
            )
        return [param, *(t for m in stored for t in (m.codes, m.scales) if t is not None)]

    small = run()
    for module in (moments, reference):
        monkeypatch.setattr(module, "portion", lambda _device, _on_host: numel)
    assert all(map(torch.equal, run(), small))


def test_larger_portions_change_no_bit_of_a_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    grad = torch.randn(2 * norm.CHUNK + 12_345)
    small = norm.sum_of_squares_reference(grad, 0.3)
    monkeypatch.setattr(norm, "portion", lambda *_: 1 << 25)
    assert torch.equal(norm.sum_of_squares_reference(grad, 0.3), small)
