"""The stack of blocks that a sequence passes through, and the head after it."""

from __future__ import annotations

from torch import nn

from ls_strategy.blocks import repeated_blocks
from ls_strategy.errors import PlanError


def one_stack(module: nn.Module) -> list[nn.Module]:
    """Return the blocks that a sequence passes through, in order."""
    stacks = repeated_blocks(module)
    if len(stacks) != 1:
        found = ", ".join(stacks) or "none"
        raise PlanError(
            "parallel.context requires one stack of blocks, a ModuleList or Sequential that the tokens pass "
            f"through from the first to the last; found: {found}. Encoder-decoder models are not supported: set "
            "parallel.context=1."
        )
    return next(iter(stacks.values()))


def head_after(module: nn.Module, blocks: list[nn.Module]) -> nn.Module | None:
    """Return the layer that computes logits from the output of the blocks, None unless there is one candidate."""
    for candidate in module.modules():
        get = getattr(candidate, "get_output_embeddings", None)
        named = get() if callable(get) else None
        if isinstance(named, nn.Module):
            return named
    inside = {id(m) for block in blocks for m in block.modules()}
    after = False
    heads: list[nn.Module] = []
    for candidate in module.modules():
        if id(candidate) in inside:
            after = True
        elif after and isinstance(candidate, nn.Linear):
            heads.append(candidate)
    return heads[0] if len(heads) == 1 else None
