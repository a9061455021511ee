"""Find the parameters that only products in fewer bits use, as far as their modules show. No tensor is read."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ls_strategy._torch import inside_compiled, is_compiled

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def casts_of(model: nn.Module, autocast: torch.dtype | None) -> dict[int, torch.dtype]:
    """Return the dtypes in which modules read their parameters, by ``id``, where it is another than the parameters'.

    These are weights and biases of plain linear layers and convolutions, which autocast reads in ``autocast``, and
    weights of layers that name a dtype in ``reads_weight_in`` (and take it from `ls_strategy.zero.flat.float8`). Those
    that another kind of module holds too (a tied embedding), of layers with a forward of their own, and of compiled
    modules, whose graphs read parameters without torch functions, are not among them.
    """
    compiled = inside_compiled(model)
    found: dict[int, torch.dtype] = {}
    others: set[int] = set()
    for module in model.modules():
        own = getattr(module, "reads_weight_in", None)
        plain = autocast if type(module) in _LAYERS and "forward" not in vars(module) else None
        hidden = id(module) in compiled or is_compiled(module)
        for name, param in module._parameters.items():
            if not isinstance(param, Tensor):
                continue
            to = own if own is not None and name == "weight" else plain
            if to is None or hidden or name not in ("weight", "bias") or found.setdefault(id(param), to) != to:
                others.add(id(param))
    return {each: to for each, to in found.items() if each not in others}
