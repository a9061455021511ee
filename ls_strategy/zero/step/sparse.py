"""Sparse gradients, of ``nn.Embedding(sparse=True)``: which optimizers step the same on the dense ones.

Averages are dense, since shards and collectives are. For SGD and Adagrad that changes nothing. An optimizer that
updates only the rows of a sparse gradient (SparseAdam) needs to know these: at stage 0, its gradients are made sparse
again, with the rows of all ranks, as under DDP. At the stages that shard its states it is refused. What refuses sparse
gradients in torch (AdamW) is refused here, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ls_strategy.errors import PlanError
from ls_strategy.zero.step.elementwise import collective_of, copy_of, early_state, known_of, probing

_SHAPE = (8, 6)
_ROWS = ((1, 4), (1, 2), (0, 4))
"""Rows of the gradients that optimizers are probed with."""

_SEES_ROWS: dict[Any, bool] = {}
"""What probes of torch's optimizers have found."""


def sparse_params(model: nn.Module) -> dict[int, str]:
    """Return the trainable weights of layers with ``sparse=True``: ``id`` -> name."""
    found: dict[int, str] = {}
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is not True:
            continue  # the weight of a layer with spectral norm is computed, which changes its buffers
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.requires_grad:
            found.setdefault(id(weight), f"{name}.weight" if name else "weight")
    return found


class SparseGradients:
    """The parameters of one model with sparse gradients, and what their optimizers do with these."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], *, by_rows: bool) -> None:
        """Probe the optimizers of the parameters whose layers say that their gradients are sparse.

        Args:
            model: the full model.
            optimizers: stay unchanged.
            by_rows: whether an optimizer that needs the rows of sparse gradients can get them.

        Raises:
            PlanError: an optimizer raises on sparse gradients, or needs their rows.
        """
        self._by_rows = by_rows
        self._owners = {id(p): (o, g) for o in optimizers for g in o.param_groups for p in g["params"]}
        self._early = {id(o): early_state(o) for o in optimizers}  # later it is sharded
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._checked = set(sparse_params(model))
        needing = {p for p in self._checked if self._needs_rows(p)}
        needing |= {p for p, (o, _) in self._owners.items() if isinstance(o, torch.optim.SparseAdam)}
        if needing and not by_rows:
            raise self._refusal(min(needing, key=list(self._owners).index), _CURE)
        self.needing_rows = frozenset(needing)
        """``id`` of parameters of which the optimizer gets gradients with the rows of all ranks."""

    def check(self, param: nn.Parameter) -> None:
        """Probe the optimizer of a parameter that got a sparse gradient.

        Raises:
            PlanError: the optimizer raises on sparse gradients, or needs their rows.
        """
        if id(param) in self._checked:
            return
        self._checked.add(id(param))
        if id(param) not in self.needing_rows and self._needs_rows(id(param)):
            cure = "Let a layer with sparse=True (nn.Embedding) compute it at stage 0" if self._by_rows else _CURE
            raise self._refusal(id(param), cure)

    def _needs_rows(self, param: int) -> bool:
        optimizer, group = self._owners.get(param, (None, {}))
        settings = {k: v for k, v in group.items() if k != "params"}
        if optimizer is None:
            return False
        return sees_rows(optimizer, settings, self._names.get(param, "a parameter"), self._early[id(optimizer)])

    def _refusal(self, param: int, cure: str) -> PlanError:
        optimizer, _ = self._owners[param]
        name = self._names.get(param, "a parameter")
        return PlanError(
            f"Got {type(optimizer).__name__} for {name!r}: it updates only rows that are in a sparse gradient, but "
            f"gradients are dense once they are averaged and sharded. {cure}, use an optimizer that updates all rows "
            "(such as torch.optim.Adam with sparse=False), or train with strategy='ddp'."
        )


_CURE = "Use stage 0 without pipeline, tensor and expert parallelism, virtual ranks and offload"


def sees_rows(optimizer: Optimizer, settings: dict[str, Any], name: str, early: Mapping[str, Any]) -> bool:
    """Return whether ``step`` computes something else on sparse gradients than on the same gradients, dense.

    Args:
        optimizer: stays unchanged.
        settings: of a parameter group.
        name: of a parameter, for the message.
        early: result of `early_state`, before the states were sharded.

    Raises:
        PlanError: it raises on sparse gradients.
    """
    known = known_of(optimizer, settings, "sparse")
    if known not in _SEES_ROWS:
        found = _sees_rows(optimizer, settings, name, early)
        if known is None:
            return found
        _SEES_ROWS[known] = found
    return _SEES_ROWS[known]


def _sees_rows(optimizer: Optimizer, settings: dict[str, Any], name: str, early: Mapping[str, Any]) -> bool:
    if collective_of(optimizer) is not None:
        return True
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(_SHAPE, generator=generator)
    grads = [_rows(rows, torch.randn(len(rows), _SHAPE[1], generator=generator)) for rows in _ROWS]
    try:
        by_rows = _stepped(copy_of(optimizer, settings, [value.clone().requires_grad_()], early), grads)
    except Exception as error:
        kind = type(optimizer).__name__
        raise PlanError(
            f"Got {kind} for {name!r}, whose gradients are sparse (sparse=True), but {kind}.step() cannot run on "
            f"sparse gradients ({type(error).__name__}: {error}). Set sparse=False on the layer, or use "
            "torch.optim.SGD without weight_decay or torch.optim.Adagrad."
        ) from error
    try:
        fresh = copy_of(optimizer, settings, [value.clone().requires_grad_()], early)
        dense = _stepped(fresh, [g.to_dense() for g in grads])
    except Exception:
        return True
    return not torch.allclose(by_rows, dense, rtol=1e-5, atol=1e-7)


def _stepped(optimizer: Optimizer, grads: Sequence[Tensor]) -> Tensor:
    (param,) = optimizer.param_groups[0]["params"]
    with probing():
        for grad in grads:
            param.grad = grad.clone()
            type(optimizer).step(optimizer)
    return param.detach()


def _rows(rows: Sequence[int], values: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([list(rows)]), values, _SHAPE, is_coalesced=True, check_invariants=True)
