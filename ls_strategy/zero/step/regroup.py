"""Changes of the optimizers' groups by user code in the middle of a fit."""

from __future__ import annotations

from torch.optim import Optimizer

from ls_strategy.errors import PlanError
from ls_strategy.zero.step.stepper import Stepper


def follows(stepper: Stepper, optimizers: list[Optimizer]) -> bool:
    """Return whether these are the engine's optimizers with unchanged groups. Not collective; takes microseconds."""
    return len(optimizers) == len(stepper.optimizers) and all(
        state.sharded.optimizer is optimizer and state.sharded.is_current
        for state, optimizer in zip(stepper.optimizers, optimizers, strict=True)
    )


def check_change(stepper: Stepper, optimizers: list[Optimizer], parallel: str) -> None:
    """Refuse changes of groups that another engine could not adopt. Not collective; equal on all ranks.

    ``parallel`` names the kinds of parallelism that split the model; empty for none.

    Raises:
        PlanError: the model is split, or a parameter is in no group any more.
    """
    changed = [
        type(o).__name__
        for o in optimizers
        if (i := stepper.index_of(o)) is None or not stepper.optimizers[i].sharded.is_current
    ]
    what = f"the parameter groups of {', '.join(changed) or 'the optimizers'} changed while training runs"
    if parallel:
        raise PlanError(
            f"{what}, under {parallel} parallelism, which needs a fixed layout of the shards. Give all parameters to "
            "the optimizer in configure_optimizers, and freeze those that train later by requires_grad_(False)."
        )
    now = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    for state in stepper.optimizers:
        for flat in state.flats:
            for slot, param in zip(flat.layout.slots, flat.params, strict=True):
                if id(param) not in now:
                    raise PlanError(
                        f"{what}, and {slot.name!r} is in none of them any more. Keep it in its group, and set the "
                        "group's learning rate and weight decay to 0, or freeze it by requires_grad_(False)."
                    )


def mirror_requires_grad(stepper: Stepper) -> None:
    """Copy ``requires_grad`` from the pieces in the optimizers' groups to the parameters. Not collective."""
    for state in stepper.optimizers:
        if not state.sharded.shows_pieces:
            continue
        params = [p for f in state.flats for p in f.params]
        for piece, p in zip(state.sharded.pieces, params, strict=True):
            p.requires_grad_(piece.requires_grad)
