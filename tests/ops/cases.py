"""Updates with arguments, as the tests of equality use them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ls_strategy.ops import moments, update
from ls_strategy.ops.moments import Moment, MomentFormat

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS: tuple[MomentFormat, ...] = ("fp32", "bf16", "int8")


@dataclass(frozen=True)
class Case:
    """An update, the signs of its moments, and its numbers."""

    update: Callable[..., None]
    signed: tuple[bool, ...]
    settings: dict[str, Any] = field(default_factory=dict)


_ADAM = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 3}
_SGD = {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}
CASES = {
    "adamw": Case(update.adamw_, (True, False), {**_ADAM, "decoupled": True}),
    "adam": Case(update.adamw_, (True, False), {**_ADAM, "decoupled": False, "maximize": True}),
    "adam_beta1_0.3": Case(update.adamw_, (True, False), {**_ADAM, "beta1": 0.3, "decoupled": True}),
    "lion": Case(update.lion_, (True,), {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}),
    "sgd": Case(lambda p, *a, **k: update.sgd_(p, None, *a, **k), (),
                {**_SGD, "momentum": 0.0, "nesterov": False, "maximize": True, "first": False}),
    "momentum": Case(update.sgd_, (True,), {**_SGD, "nesterov": False, "maximize": False, "first": False}),
    "nesterov": Case(update.sgd_, (True,), {**_SGD, "nesterov": True, "maximize": False, "first": False}),
    "momentum_first": Case(update.sgd_, (True,), {**_SGD, "nesterov": True, "maximize": True, "first": True}),
    "adagrad": Case(update.adagrad_, (False,),
                    {"lr": 1e-2, "lr_decay": 0.1, "eps": 1e-10, "weight_decay": 0.1, "maximize": False, "step": 3}),
}  # fmt: skip


@dataclass
class Buffers:
    """What an update reads and writes."""

    param: torch.Tensor
    moments: list[Moment]
    grad: torch.Tensor
    out: torch.Tensor | None

    def clone(self) -> "Buffers":
        stored = [
            Moment(m.codes.clone(), None if m.scales is None else m.scales.clone(), m.signed) for m in self.moments
        ]
        return Buffers(self.param.clone(), stored, self.grad, None if self.out is None else self.out.clone())

    def narrow(self, start: int, stop: int) -> "Buffers":
        out = None if self.out is None else self.out[start:stop]
        return Buffers(
            self.param[start:stop], [m.narrow(start, stop) for m in self.moments], self.grad[start:stop], out
        )

    def tensors(self) -> list[torch.Tensor]:
        stored = [t for m in self.moments for t in (m.codes, m.scales)]
        return [t for t in (self.param, *stored, self.out) if t is not None]


def make(case, n, moment_format, grad_dtype, out_dtype, *, device="cpu", magnitudes=6) -> Buffers:
    """Random buffers whose gradients span so many decades up and down, with some zeros."""
    generator = torch.Generator().manual_seed(n)

    def spread() -> torch.Tensor:
        x = torch.randn(n, generator=generator) * 10 ** (torch.rand(n, generator=generator) * magnitudes - magnitudes)
        return x * (torch.rand(n, generator=generator) > 0.05)

    stored = []
    for signed in case.signed:
        m = moments.empty(n, moment_format, signed)
        x = spread()
        m.store_(x if signed else x * x, seed=n)
        if m.scales is not None:
            m.scales = m.scales.to(device)
        m.codes = m.codes.to(device)
        stored.append(m)
    out = None if out_dtype is None else torch.zeros(n, dtype=out_dtype, device=device)
    return Buffers(
        torch.randn(n, generator=generator).to(device), stored, (spread() * 8).to(grad_dtype).to(device), out
    )


def run(case: Case, b: Buffers, *, offset: int = 0, clip: Any = 0.37, unscale: float = 0.3) -> None:
    """The update, with factors that are not powers of two."""
    case.update(
        b.param, *b.moments, b.grad, **case.settings, unscale=unscale, clip=clip, out=b.out, seed=1234567, offset=offset
    )  # fmt: skip


def assert_same_bits(a: Buffers, b: Buffers) -> None:
    """Every tensor, bit for bit."""
    for x, y in zip(a.tensors(), b.tensors(), strict=True):
        integer = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[x.element_size()]
        different = (x.view(integer) != y.view(integer)).nonzero().view(-1)
        assert not different.numel(), (x.dtype, different.numel(), different[:5], x[different[:5]], y[different[:5]])
