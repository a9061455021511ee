"""Test whether an optimizer can step parts of parameters, and gradients without a closure, by running a copy of it."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ls_strategy._torch import copy_of_optimizer, forget_step_hooks
from ls_strategy.errors import PlanError


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether the optimizer updates every element of all its parameters independently.

    Raises:
        PlanError: the optimizer cannot step without a closure (LBFGS).
    """
    if isinstance(optimizer, torch.optim.SparseAdam):  # probes are dense
        return False
    return all(splits_tensors(optimizer, group) for group in optimizer.param_groups)


def splits_tensors(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return whether one group's parameters may be split anywhere, as flat shards split them.

    The test compares steps on a tensor with steps on its two halves, each stepped without the other. An optimizer that
    uses the full matrix (Muon, LAMB, Adafactor), or numbers computed over several tensors, would train differently on
    every world size.

    Raises:
        PlanError: the optimizer cannot step without a closure (LBFGS).
    """
    settings = {k: v for k, v in group.items() if k != "params"}
    known = known_of(optimizer, settings, *probed_shapes(group["params"]))
    if known not in _SPLITS:
        found = _halves_agree(optimizer, settings, group["params"])
        if known is None:
            return found
        _SPLITS[known] = found
    return _SPLITS[known]


_SPLITS: dict[Any, bool] = {}
"""What probes of torch's optimizers have found, by `known_of`: a search for a plan asks thousands of times."""

_TAKE_ONE_PASS: set[Any] = set()
"""Torch's optimizers that need one pass."""


def known_of(optimizer: Optimizer, settings: dict[str, Any], *more: Any) -> Any:
    """Return what a probe depends on, for one of torch's own classes; None for others, and with a state."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim.") or optimizer.state:
        return None
    return (kind, kind.step, repr(sorted(each for each in settings.items() if each[0] != "lr")), more)  # see `copy_of`


def _halves_agree(optimizer: Optimizer, settings: dict[str, Any], params: list[Tensor]) -> bool:
    for shape in probed_shapes(params):
        generator = torch.Generator().manual_seed(0)
        value = torch.randn(shape, generator=generator)
        grads = [torch.randn(shape, generator=generator) for _ in range(3)]
        with on_gradients_alone(optimizer):
            (full,) = probe(optimizer, settings, [value], [[g] for g in grads])
        try:
            halves = [
                probe(optimizer, settings, [half], [[_halves(g)[i]] for g in grads])[0]
                for i, half in enumerate(_halves(value))
            ]
        except Exception:
            return False
        if not torch.allclose(full.flatten(), torch.cat(halves), rtol=1e-5, atol=1e-7):
            return False
    return True


_SHAPES = {1: (48,), 2: (8, 6), 3: (4, 4, 3), 4: (4, 3, 2, 2)}


def probed_shapes(params: list[Tensor]) -> list[tuple[int, ...]]:
    """Return one small shape for every number of dimensions that the parameters have: optimizers may depend on it."""
    found = sorted({min(p.dim(), max(_SHAPES)) for p in params if p.dim() and p.numel()})
    return [_SHAPES[n] for n in found or [2]]


ONE_PASS = (
    "ZeROStrategy runs forward and backward once per step, before it. Use a first-order optimizer (AdamW, SGD, ...); "
    "for several passes per step (SAM) set automatic_optimization=False, and run them in training_step."
)
"""Cure for optimizers that need more than one pass, for messages."""


def refuse_wrapper(optimizer: Optimizer) -> None:
    """Refuse an optimizer that steps another one (Lookahead, SAM), whose states would be neither sharded nor saved.

    Raises:
        PlanError: the optimizer wraps another one.
    """
    inner = next((v for v in vars(optimizer).values() if isinstance(v, Optimizer) and v is not optimizer), None)
    if inner is not None:
        raise PlanError(
            f"{type(optimizer).__name__} wraps another optimizer, {type(inner).__name__}, whose states would be "
            "neither sharded nor saved. Return the inner one from configure_optimizers, and do what the wrapper adds "
            "in a hook (on_train_batch_end), or with automatic_optimization=False in training_step."
        )


def takes_closure(optimizer: Optimizer) -> bool:
    """Return whether ``step`` may be called with ``closure=...``."""
    parameters = inspect.signature(type(optimizer).step).parameters
    return "closure" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def require_one_pass(optimizer: Optimizer) -> None:
    """Refuse an optimizer that runs its closure several times in a step, or in the middle of it.

    A step with a closure that computes weight-dependent gradients has to equal a step with gradients computed before.

    Raises:
        PlanError: the optimizer needs more than one pass, or the loss.
    """
    if not takes_closure(optimizer) or isinstance(optimizer, torch.optim.SparseAdam):  # probes are dense
        return
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        settings = {k: v for k, v in group.items() if k != "params"}
        known = known_of(optimizer, settings)
        if known in _TAKE_ONE_PASS:
            continue
        with on_gradients_alone(optimizer):
            _, before = _probe_closure(optimizer, settings, inside=False)
            calls, inside = _probe_closure(optimizer, settings, inside=True)
        if calls > _CLOSURE_STEPS:
            raise PlanError(f"{name}.step() calls its closure {calls / _CLOSURE_STEPS:g} times in a step. {ONE_PASS}")
        if calls and not torch.allclose(before, inside, rtol=1e-5, atol=1e-7, equal_nan=True):
            raise PlanError(
                f"{name}.step(closure) computes something else than step() with the closure's gradients, so it needs "
                f"the loss, or gradients at other weights. {ONE_PASS}"
            )
        if known is not None:
            _TAKE_ONE_PASS.add(known)


@contextmanager
def on_gradients_alone(optimizer: Optimizer) -> Iterator[None]:
    """Turn what ``step`` raises inside into the error that says which optimizers work.

    Raises:
        PlanError: the optimizer cannot step on gradients alone.
    """
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".rstrip(" :")
        name = type(optimizer).__name__
        raise PlanError(f"{name}.step() cannot run on gradients alone ({reason}). {ONE_PASS}") from error


_CLOSURE_STEPS = 3


def _probe_closure(optimizer: Optimizer, settings: dict[str, Any], *, inside: bool) -> tuple[int, Tensor]:
    """Return how often a copy of the optimizer calls its closure in `_CLOSURE_STEPS` steps, and the final weights.

    Args:
        optimizer: stays unchanged.
        settings: of a parameter group.
        inside: the closure computes gradients. Otherwise they are computed before, and it returns a different loss.
    """
    generator = torch.Generator().manual_seed(0)
    param = torch.randn(8, 6, generator=generator).requires_grad_()
    fresh = copy_of(optimizer, settings, [param])
    calls = 0

    def backward() -> None:
        param.grad = 0.3 * param.detach() + torch.randn(8, 6, generator=generator)

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        if inside:
            backward()
        return torch.tensor(1.5 if inside else 2.5)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for _ in range(_CLOSURE_STEPS):
            if not inside:
                backward()
            type(optimizer).step(fresh, closure=closure)  # type: ignore[call-arg]
    return calls, param.detach()


def _halves(value: Tensor) -> list[Tensor]:
    flat = value.flatten()
    return [flat[:19].clone(), flat[19:].clone()]


def probe(
    optimizer: Optimizer,
    settings: dict[str, Any],
    values: list[Tensor],
    grads: list[list[Tensor]],
    *,
    seed: int = 0,
) -> list[Tensor]:
    """Run a copy of the optimizer on ``values`` for ``len(grads)`` steps; return their values after it."""
    params = [v.clone().requires_grad_() for v in values]
    fresh = copy_of(optimizer, settings, params)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for step_grads in grads:
            for p, g in zip(params, step_grads, strict=True):
                p.grad = g.clone()
            type(optimizer).step(fresh)
    return [p.detach() for p in params]


def early_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return a state that the constructor creates, such as Adagrad's accumulators, with one value of every tensor."""
    found = next((s for s in optimizer.state.values() if s), {})
    return {k: v.flatten()[:1].clone() if isinstance(v, Tensor) and v.numel() > 1 else v for k, v in found.items()}


def copy_of(
    optimizer: Optimizer, settings: dict[str, Any], params: list[Tensor], early: Mapping[str, Any] | None = None
) -> Optimizer:
    """Return a copy with one parameter group, and with the state that the constructor creates.

    ``early``: this state. None: it is still the optimizer's.
    """
    settings = {k: (v.detach().cpu() if isinstance(v, Tensor) and not v.is_meta else v) for k, v in settings.items()}
    if settings.get("capturable"):  # only on a GPU
        settings["capturable"] = False
    if "lr" in settings:
        settings["lr"] = 1e-2  # a warm-up may start at 0, which would change nothing
    fresh = copy_of_optimizer(optimizer, [{**settings, "params": params}])
    forget_step_hooks(fresh)
    _own_attributes(fresh, optimizer)
    fresh.state = defaultdict(dict)
    early = early_state(optimizer) if early is None else early
    for p in params:
        for k, v in early.items():
            if isinstance(v, Tensor) and k != "step" and v.numel():
                fresh.state[p][k] = torch.full_like(p, float(v.flatten()[0]))
            else:
                fresh.state[p][k] = copy.deepcopy(v)
    return fresh


def _own_attributes(fresh: Optimizer, optimizer: Optimizer) -> None:
    """Copy what a copy of an optimizer shares with it and could change in place, such as a counter in a tensor."""
    memo: dict[int, Any] = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    for name, value in list(vars(fresh).items()):
        own = not name.startswith("_optimizer_") and name not in ("defaults", "param_groups", "state")  # not torch's
        if own and isinstance(value, (Tensor, list, dict, set)):
            try:
                vars(fresh)[name] = copy.deepcopy(value, memo)
            except Exception:  # it cannot be copied, like a process group: the class does not compute with it in place
                continue
