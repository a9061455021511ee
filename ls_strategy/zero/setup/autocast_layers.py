"""Find the parameters that only 16-bit functions of autocast use, as far as their modules show. No tensor is read."""

from __future__ import annotations

from torch import Tensor, nn

from ls_strategy._torch import inside_compiled, is_compiled

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def autocast_params(model: nn.Module) -> set[int]:
    """Return ``id`` of the weights and biases of plain linear layers and convolutions.

    Those that another kind of module holds too (a tied embedding), of layers with a forward of their own, and of
    compiled modules, whose graphs read parameters without torch functions, are not among them.
    """
    compiled = inside_compiled(model)
    found: set[int] = set()
    others: set[int] = set()
    for module in model.modules():
        plain = type(module) in _LAYERS and "forward" not in vars(module)
        plain = plain and id(module) not in compiled and not is_compiled(module)
        for name, param in module._parameters.items():
            if isinstance(param, Tensor):
                (found if plain and name in ("weight", "bias") else others).add(id(param))
    return found - others
