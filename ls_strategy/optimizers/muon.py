"""The Muon optimizer, with AdamW for what is not a hidden matrix."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from ls_strategy.checked import Range, above, at_least, checked
from ls_strategy.errors import ConfigError
from ls_strategy.optimizers.newton_schulz import COEFFICIENTS, multiplications, orthogonalized
from ls_strategy.optimizers.qk_clip import LogitClip

AdjustLR = Literal["match_rms_adamw", "original", "spectral"]
"""How the learning rate depends on a matrix's shape."""


class Muon(Optimizer):
    """Updates every matrix by its orthogonalized momentum, and other groups as AdamW does.

    A group with ``use_muon=False`` is updated by AdamW: give it embeddings, the output head, norms and biases. The same
    optimizer steps both, so one scheduler and one checkpoint serve both. A 3-d parameter is a batch of matrices, such
    as a stack of experts; one with more dimensions is a matrix of its first dimension and all others.

    Jordan et al., https://kellerjordan.github.io/posts/muon; Liu et al., "Muon is Scalable for LLM Training",
    arXiv:2502.16982.

    Args:
        params: parameters, or groups of them, each with its own values of the arguments below if it has any.
        lr: learning rate.
        weight_decay: decoupled.
        momentum: share of the old momentum in the new one.
        nesterov: look ahead by one step of the momentum.
        ns_steps: steps of the Newton-Schulz iteration.
        ns_coefficients: of its polynomial.
        adjust_lr: ``"match_rms_adamw"`` multiplies the rate by ``0.2 * sqrt(max(m, n))``, so that updates are as large
            as AdamW's, and its rates and weight decay can be used. ``"original"``: by ``sqrt(max(1, m / n))``;
            ``"spectral"``: by ``sqrt(m / n)``.
        ns_dtype: of the iteration, ``"bf16"`` or ``"fp32"``. It is what is sent per element, too.
        use_muon: update by Muon. False: by AdamW.
        betas: of AdamW.
        eps: of AdamW.

    Raises:
        ConfigError: a value is out of range, or a parameter of a Muon group is not a matrix.
    """

    logit_clip: LogitClip | None = None
    """What `clip_logits` was given."""

    batches_matrices = True
    """Every matrix of a 3-d parameter is updated by itself, so ranks may hold some of them (expert parallelism)."""

    @checked(
        lr=at_least(0), weight_decay=at_least(0), momentum=Range(least=0, below=1), ns_steps=Range(least=1, most=99),
        betas=Range(least=0, below=1), eps=above(0),
    )  # fmt: skip
    def __init__(  # noqa: PLR0913  (one argument per setting of a group, as in torch)
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        ns_dtype: Literal["bf16", "fp32"] = "bf16",
        adjust_lr: AdjustLR = "match_rms_adamw",
        use_muon: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps,
            "ns_coefficients": ns_coefficients, "ns_dtype": ns_dtype, "adjust_lr": adjust_lr,
            "use_muon": use_muon, "betas": betas, "eps": eps,
        }  # fmt: skip
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does.

        Raises:
            ConfigError: the group is for Muon, but has a parameter that is not a matrix.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        wrong = next((p for p in group["params"] if group["use_muon"] and p.dim() < 2), None)
        if wrong is not None:
            del self.param_groups[-1]
            raise ConfigError(
                f"Got a parameter of shape {tuple(wrong.shape)} in a group of Muon, which orthogonalizes matrices. Put "
                "vectors, and also embeddings and the output head, in a group with use_muon=False."
            )

    @staticmethod
    def whole_tensors(group: dict[str, Any]) -> bool:
        """Return whether a group's parameters must be stepped unsharded: those of Muon, but not those of AdamW."""
        return bool(group["use_muon"])

    @staticmethod
    def tensor_cost(group: dict[str, Any], shape: tuple[int, ...]) -> float:
        """Return the multiplications of one tensor's update."""
        if not group["use_muon"]:
            return float(math.prod(shape))
        return float(multiplications(_matrices(shape), group["ns_steps"]))

    def clip_logits(self, module: nn.Module, *, limit: float = 100.0, query_share: float = 0.5) -> None:
        """Clip attention logits from now on (MuonClip): scale query and key weights after each step.

        Of a head whose largest logit since the last step was above ``limit``, the rows of queries are multiplied by
        ``(limit / logit) ** query_share``, and those of keys by the rest; of keys that several heads share, by the
        smallest of these. Biases in this optimizer too. The maxima come from the `QKClip` modules in ``module``, over
        all ranks.

        Moonshot AI, "Kimi K2", arXiv:2507.20534, section 2.1.

        Raises:
            ConfigError: a value is out of range.
        """
        if not (limit > 0 and 0 <= query_share <= 1):
            raise ConfigError(
                f"Got limit={limit!r} and query_share={query_share!r}, but a limit is above 0, and a share in [0, 1]."
            )
        self.logit_clip = LogitClip(weakref.ref(module), limit, query_share)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if not group["use_muon"]:
                self._adamw(group)
                continue
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)
        if self.logit_clip is not None:
            taken = {id(p) for group in self.param_groups for p in group["params"]}
            for each in self.logit_clip.scalings(lambda p: id(p) in taken, lambda logits: logits):
                rows = each.param[each.first : each.first + len(each.factors)]
                factors = each.factors.to(rows.device, rows.dtype)
                rows.mul_(factors.view(-1, *[1] * (rows.dim() - 1)))
        return loss

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        direction = self.direction(group, grad, self.state[p])
        self.apply_update(group, p, self.full_update(group, direction), tuple(p.shape))

    @staticmethod
    def iteration_dtype(group: dict[str, Any]) -> torch.dtype:
        """Return the dtype of the iteration, of its argument and of its result."""
        return torch.bfloat16 if group["ns_dtype"] == "bf16" else torch.float32

    @staticmethod
    def direction(group: dict[str, Any], grad: Tensor, state: dict[str, Any]) -> Tensor:
        """Return the momentum, with Nesterov's look-ahead: element-wise, for any range of a parameter."""
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        momentum = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
        return grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum

    @classmethod
    def full_update(cls, group: dict[str, Any], direction: Tensor) -> Tensor:
        """Return the orthogonalized direction of a full parameter, in its shape."""
        update = orthogonalized(
            direction.reshape(_matrices(tuple(direction.shape))),
            steps=group["ns_steps"],
            coefficients=tuple(group["ns_coefficients"]),
            dtype=cls.iteration_dtype(group),
        )
        return update.reshape(direction.shape)

    @staticmethod
    def apply_update(group: dict[str, Any], param: Tensor, update: Tensor, shape: tuple[int, ...]) -> None:
        """Change any range of a parameter of this shape by its range of the update: element-wise."""
        lr = float(group["lr"])
        param.mul_(1 - lr * group["weight_decay"])
        factor = _factor(group["adjust_lr"], *_matrices(shape)[-2:])
        param.add_(update.to(param.dtype), alpha=-lr * factor)

    def _adamw(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        for p in params:
            state = self.state[p]
            if "step" not in state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        states = [self.state[p] for p in params]
        adamw(
            params,
            [p.grad for p in params],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _matrices(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the matrices, or batch of matrices, that a parameter is."""
    return shape if len(shape) <= 3 else (shape[0], math.prod(shape[1:]))


def _factor(adjust: str, rows: int, columns: int) -> float:
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(rows / columns if adjust == "spectral" else max(1, rows / columns))
