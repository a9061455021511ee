"""Gradients that are read, changed and logged between backward and the step."""

from __future__ import annotations

from typing import Any

import torch

from ls_strategy.extras.conformance.case import AdamNet, Case, Net
from ls_strategy.extras.conformance.habit import habit
from ls_strategy.extras.conformance.lightning import utilities


def _full(value: Any) -> Any:
    """Return all of a tensor that torch shows as a shard: public for whoever reads FSDP2's gradients."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


class _Reads(Net):
    def __init__(self) -> None:
        super().__init__()
        self.read: dict[str, torch.Tensor] = {}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, p in self.named_parameters():
            assert p.grad is not None, f"{name} has no gradient"
            self.read[f"gradient of {name} in step {self.global_step}"] = _full(p.grad).detach().clone()


@habit(right="the gradients of one process, and its losses")
def reads_gradients(case: Case) -> None:
    """Reads p.grad of all parameters in on_before_optimizer_step."""
    model = case.module(_Reads)
    case.fit(model, max_epochs=1)
    for name, gradient in model.read.items():
        case.note(name, gradient)
    case.note_losses(model)


class _Changes(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, p in self.named_parameters():
            if p.grad is None:
                continue
            if "bias" in name:
                p.grad.mul_(0.25)
            else:
                p.grad.clamp_(-0.01, 0.01)


@habit()
def changes_gradients(case: Case) -> None:
    """Scales and clamps p.grad in place in on_before_optimizer_step."""
    case.train(_Changes, max_epochs=2)


class _AfterBackward(Net):
    def on_after_backward(self) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad = torch.nan_to_num(p.grad) * 0.5


@habit()
def replaces_gradients(case: Case) -> None:
    """Replaces p.grad by another tensor in on_after_backward."""
    case.train(_AfterBackward, max_epochs=2)


class _Clips(AdamNet):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


@habit()
def clips_by_itself(case: Case) -> None:
    """Clips with torch.nn.utils.clip_grad_norm_ in configure_gradient_clipping."""
    case.train(_Clips, max_epochs=2)


class _LogsNorms(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(utilities.grad_norm(self, norm_type=2))


@habit(right="the norms of one process, and its losses")
def logs_gradient_norms(case: Case) -> None:
    """Logs the gradient norms of Lightning's grad_norm."""
    trainer = case.train(_LogsNorms)
    for name, value in trainer.logged_metrics.items():
        case.note(name, value)


class _Hooked(Net):
    def build(self) -> None:
        super().build()
        self.head.weight.register_hook(lambda gradient: 0.25 * gradient)
        self.blocks[1].register_full_backward_hook(lambda module, given, made: (0.5 * given[0],))


@habit()
def gradient_hooks(case: Case) -> None:
    """Scales gradients by a hook of a parameter, and by a full backward hook of a module."""
    case.train(_Hooked, max_epochs=2)
