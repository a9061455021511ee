"""Test whether an optimizer can step parts of parameters, and gradients without a closure, by running a copy of it."""

from __future__ import annotations

import copy
import inspect
import math
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ls_strategy._torch import TorchDispatchMode, copy_of_optimizer, forget_step_hooks, tree_iter, uncompiled_code
from ls_strategy.errors import PlanError


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether the optimizer updates every element of all its parameters independently.

    Raises:
        PlanError: the optimizer cannot step without a closure (LBFGS).
    """
    if isinstance(optimizer, torch.optim.SparseAdam):  # probes are dense
        return False
    return all(splits_tensors(optimizer, group) for group in unlike_groups(optimizer.param_groups))


def unlike_groups(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one of the groups that a probe cannot tell apart: a rate per layer makes hundreds of them."""
    return list({group_kind(group): group for group in reversed(groups)}.values())[::-1]


def group_kind(group: dict[str, Any]) -> Any:
    """Return what a probe depends on in a group: `copy_of` sets the rate."""
    settings = {k: type(v) if k in ("lr", "initial_lr") else v for k, v in group.items() if k != "params"}
    return repr(sorted(settings.items())), tuple(probed_dimensions(group["params"]))


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
        if collective_of(optimizer) is not None:
            return False
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


class _CollectiveRefusal(TorchDispatchMode):
    """Raises at the first collective inside, before it is sent, and notes its name in ``called``."""

    def __init__(self) -> None:
        """Begin without any call."""
        super().__init__()
        self.called: str | None = None
        self.sent: torch.Size | None = None
        """Shape of what a gather would send."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation that sends nothing.

        Raises:
            RuntimeError: it sends.
        """
        if func.namespace in ("c10d", "_c10d_functional"):
            self.called = func.overloadpacket.__name__.rstrip("_")
            if self.called == "allgather":
                self.sent = args[1][0].shape
            raise RuntimeError(f"Got a collective, {self.called}, where nothing may be sent.")
        return func(*args, **(kwargs or {}))


def collective_of(optimizer: Optimizer) -> str | None:
    """Return the name of the first collective that ``step`` calls; None if it sends nothing. Nothing is sent.

    A probe of such an optimizer could hang: its ranks may take different ways between two collectives.
    """
    if type(optimizer).__module__.startswith("torch.optim."):
        return None
    called = (_sent_by(optimizer, group)[0] for group in unlike_groups(optimizer.param_groups))
    return next(filter(None, called), None)


def _sent_by(optimizer: Optimizer, group: dict[str, Any]) -> tuple[str | None, bool]:
    """Return the name of the first collective of a group's step, and whether it gathers something like a parameter."""
    settings = {k: v for k, v in group.items() if k != "params"}
    value = torch.ones(probed_shapes(group["params"])[0])
    refusal = _CollectiveRefusal()
    with suppress(Exception), refusal:  # the other probes report what else is wrong
        probe(optimizer, settings, [value], [[value]])
    return refusal.called, refusal.sent == value.shape


def refused_gathers(optimizers: Sequence[Optimizer]) -> PlanError | None:
    """Return why gloo cannot send what an optimizer gathers: parameters of several shapes at once. None if it can."""
    for optimizer in optimizers:
        for group in optimizer.param_groups if collective_of(optimizer) is not None else ():
            shapes = sorted({tuple(p.shape) for p in group["params"]})
            if len(shapes) > 1 and _sent_by(optimizer, group)[1]:
                return PlanError(
                    f"{type(optimizer).__name__}.step() gathers parameters from the ranks, and a group has some of "
                    f"shape {shapes[0]} and {shapes[1]}, but gloo gathers tensors of one shape only. Use a version for "
                    "one device (SingleDeviceMuon, torch.optim.Muon, ls_strategy.Muon), which every stage supports. Or "
                    "give it one group per shape."
                )
    return None


def _halves_agree(optimizer: Optimizer, settings: dict[str, Any], params: list[Tensor]) -> bool:
    dimensions = probed_dimensions(params)
    cases = [*((_SHAPES[n], STEPS) for n in dimensions), *((_LARGE_SHAPES[n], 3) for n in dimensions)]
    for shape, steps in cases:
        value, grads = probed_values(optimizer, settings, shape, steps)
        with on_gradients_alone(optimizer):
            full = probe(optimizer, settings, [value], [[g] for g in grads])
        try:
            halves = [
                probe(optimizer, settings, [half], [[_halves(g)[i]] for g in grads], seed=1)  # what is drawn differs
                for i, half in enumerate(_halves(value))
            ]
        except Exception:
            return False
        joined = torch.cat([half.values[0] for half in halves])
        if torch.equal(full.values[0], value) or full.has_nested_states:
            return False  # it steps something else, such as pairs of tensors, or no store could cut its states
        if not (same_updates(value.flatten(), full.values[0].flatten(), joined) and full.has_states_of(halves)):
            return False
    return True


STEPS = 12
"""Steps of a probe on small tensors: AdaShift begins with SGD, and uses maxima over tensors from the tenth step on."""

_SHAPES = {1: (48,), 2: (8, 6), 3: (4, 4, 3), 4: (4, 3, 2, 2)}

_LARGE_SHAPES = {1: (20480,), 2: (160, 128), 3: (2, 160, 128), 4: (160, 128, 2, 1)}
"""Optimizers may treat large tensors otherwise: Adafactor those with two dimensions of 128, 8-bit states those of 4096
elements and full blocks. Parameters below such a limit are above it in a run."""


def probed_dimensions(params: list[Tensor]) -> list[int]:
    """Return the numbers of dimensions that the parameters have: optimizers may depend on it."""
    return sorted({min(p.dim(), max(_SHAPES)) for p in params if p.dim() and p.numel()}) or [2]


def probed_shapes(params: list[Tensor]) -> list[tuple[int, ...]]:
    """Return one small shape for every number of dimensions that the parameters have."""
    return [_SHAPES[n] for n in probed_dimensions(params)]


def probed_values(
    optimizer: Optimizer, settings: dict[str, Any], shape: tuple[int, ...], steps: int, seed: int = 0
) -> tuple[Tensor, list[Tensor]]:
    """Return a tensor and its gradients in at least three steps, in fp64 if the optimizer can step that.

    Steps may be tiny: D-Adaptation and Prodigy begin with 1e-6. The second gradient is orthogonal to the tensor, row by
    row, where AdamP projects. The third one is large, where optimizers clip.
    """
    generator = torch.Generator().manual_seed(seed)
    value, common, *noise = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2 + steps))
    rows = value.view(shape[0] if len(shape) > 1 else 1, -1)
    along = (common.view_as(rows) * rows).sum(1, keepdim=True) / rows.square().sum(1, keepdim=True) * rows
    grads = [common + 0.5 * each for each in noise]
    grads[1], grads[2] = common - along.view(shape), 100 * grads[2]
    try:
        probe(optimizer, settings, [value], [[grad] for grad in grads])
    except Exception:  # a kernel for 32 bits, or what the caller reports
        return value.float(), [grad.float() for grad in grads]
    return value, grads


def same_updates(before: Tensor, a: Tensor, b: Tensor) -> bool:
    """Return whether two results of steps from the same tensor agree, but for rounding."""
    update = float((a - before).abs().max())
    rounding = 8 * torch.finfo(a.dtype).eps * float(before.abs().max())
    return torch.allclose(a, b, rtol=0.0, atol=1e-5 * update + rounding)


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
    if collective_of(optimizer) is not None:
        return
    name = type(optimizer).__name__
    for group in unlike_groups(optimizer.param_groups):
        settings = {k: v for k, v in group.items() if k != "params"}
        known = known_of(optimizer, settings)
        if known in _TAKE_ONE_PASS:
            continue
        with on_gradients_alone(optimizer):
            _, before = _probe_closure(optimizer, settings, inside=False)
            calls, inside = _probe_closure(optimizer, settings, inside=True)
        if calls > _CLOSURE_STEPS:
            raise PlanError(f"{name}.step() calls its closure several times in a step. {ONE_PASS}")
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


_CLOSURE_STEPS = STEPS


@contextmanager
def probing(seed: int = 0) -> Iterator[None]:
    """Let a copy step inside: with random numbers of its own, and without compiling its code for the probe's shapes.

    Probes are on the CPU. Those of devices are left alone: ``torch.manual_seed`` would replace the user's seed there.
    """
    numpy, python = sys.modules.get("numpy"), random.getstate()
    numbers = None if numpy is None else numpy.random.get_state(legacy=False)
    with torch.random.fork_rng(devices=[]), uncompiled_code():
        try:
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            if numpy is not None:
                numpy.random.seed(seed)
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(numbers)


def _probe_closure(optimizer: Optimizer, settings: dict[str, Any], *, inside: bool) -> tuple[int, Tensor]:
    """Return how often a copy of the optimizer calls its closure in `_CLOSURE_STEPS` steps, and the final weights.

    Args:
        optimizer: stays unchanged.
        settings: of a parameter group.
        inside: the closure computes gradients. Otherwise they are computed before, and it returns growing losses.
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
        return torch.tensor(1.5 if inside else 2.5**calls)

    with probing():
        for _ in range(_CLOSURE_STEPS):
            if not inside:
                backward()
            type(optimizer).step(fresh, closure=closure)  # type: ignore[call-arg]
    return calls, param.detach()


def _halves(value: Tensor) -> list[Tensor]:
    flat = value.flatten()
    return [flat[:19].clone(), flat[19:].clone()]


@dataclass(frozen=True)
class Stepped:
    """What steps of a copy of an optimizer have left."""

    values: list[Tensor]
    states: list[dict[str, Any]]
    group: dict[str, Any]

    @property
    def has_nested_states(self) -> bool:
        """Return whether some states are tensors in dictionaries or lists."""
        values = (v for state in self.states for v in state.values() if not isinstance(v, Tensor))
        return any(isinstance(leaf, Tensor) for v in values for leaf in tree_iter(v))

    def has_states_of(self, parts: Sequence[Stepped], number: int = 0) -> bool:
        """Return whether a tensor's states are those of ``parts`` of it, and its group's numbers too.

        States show what updates do not yet: a sum over tensors (Prodigy), a norm that only counts from a limit on.
        """
        groups = [self.group, *(part.group for part in parts)]
        names = {k for group in groups for k in group if k != "params"}
        if not all(_same_numbers([group.get(name) for group in groups]) for name in names):
            return False
        shape, mine = self.values[number].shape, self.states[number]
        return all(_same_state(shape, mine.get(k), [part.states[0].get(k) for part in parts]) for k in mine)


def _same_numbers(values: Sequence[Any]) -> bool:
    """Return whether values are the same, as long as they are real numbers: counts may be of elements."""
    found = [v.item() if isinstance(v, Tensor) and v.numel() == 1 and not v.is_meta else v for v in values]
    numbers = [v for v in found if isinstance(v, float)]
    return all(math.isclose(n, numbers[0], rel_tol=1e-5) or n == numbers[0] or math.isnan(n) for n in numbers)


def _same_state(shape: torch.Size, full: Any, parts: Sequence[Any]) -> bool:
    """Return whether a tensor of shape ``shape`` has the state of its parts, or of itself if there is only one."""
    if not isinstance(full, Tensor) or full.numel() == 1:
        return _same_numbers([full, *parts])
    if not all(isinstance(part, Tensor) for part in parts) or type(full) is not Tensor:
        return len(parts) == 1
    if full.numel() != sum(part.numel() for part in parts) or (full.shape != shape and len(parts) > 1):
        return False
    a, b = full.detach().flatten().double(), torch.cat([part.detach().flatten() for part in parts]).double()
    return torch.allclose(a, b, rtol=0.0, atol=1e-5 * float(a.abs().max()))


def probe(
    optimizer: Optimizer,
    settings: dict[str, Any],
    values: list[Tensor],
    grads: list[list[Tensor]],
    *,
    seed: int = 0,
) -> Stepped:
    """Run a copy of the optimizer on ``values`` for ``len(grads)`` steps; return their values after it."""
    params = [v.clone().requires_grad_() for v in values]
    fresh = copy_of(optimizer, settings, params)
    with probing(seed):
        for step_grads in grads:
            for p, g in zip(params, step_grads, strict=True):
                p.grad = g.clone()
            type(optimizer).step(fresh)
    return Stepped([p.detach() for p in params], [dict(fresh.state[p]) for p in params], fresh.param_groups[0])


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
    if "lr" in settings:  # a warm-up may start at 0, which would change nothing
        lr = settings["lr"]
        settings["lr"] = torch.full_like(lr, 1e-2) if isinstance(lr, Tensor) and not lr.is_meta else 1e-2
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
    if callable(getattr(type(optimizer), "train", None)):  # schedule-free ones step in this mode only
        type(optimizer).train(fresh)  # type: ignore[attr-defined]
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
