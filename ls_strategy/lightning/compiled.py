"""``ZeROStrategy(compile=...)``: compile the parts of a module with ``torch.compile``, in place.

=========  ==============================================================  ============================================
regions    what is compiled                                                graphs
=========  ==============================================================  ============================================
blocks     the modules that are gathered and reduced together, or without  one, which equal blocks share; the hooks of
           ``sharding.block_classes`` the children of containers           a block run before and after it
model      the module's children, and its own forward where it is called   one of all below stage 3, where weights in
                                                                           flight arrive before the step; at stage 3
                                                                           those of blocks, and of what lies between
=========  ==============================================================  ============================================
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ls_strategy._torch import CompiledCall, is_compiled
from ls_strategy.blocks import container_children, instances, is_block
from ls_strategy.config import ZeROConfig
from ls_strategy.errors import PlanError
from ls_strategy.host.pytorch import rank_zero_info


def compile_parts(module: nn.Module, config: ZeROConfig) -> list[CompiledCall]:
    """Compile parts of ``module`` as ``config.compile`` says, but none that is compiled already. Not collective.

    Nothing is traced before the first call.

    Raises:
        PlanError: the module has no blocks.
    """
    options = config.compile
    if options.regions is None:
        return []
    parts = list(_blocks(module, config) if options.regions == "blocks" else _callable(module))
    if not parts:
        raise PlanError(
            f"Got compile={options.regions!r}, but {type(module).__name__} has no child of a ModuleList or Sequential "
            "with submodules and parameters. Name the classes of its blocks (sharding.block_classes), or set "
            "compile='model'."
        )
    given: dict[str, Any] = {
        "backend": options.backend,
        "mode": None if options.mode == "default" else options.mode,  # only inductor has modes
        "dynamic": options.dynamic,
        "fullgraph": options.fullgraph,
    }
    calls = [CompiledCall(part, **given) for part in parts if not is_compiled(part)]
    what = "blocks are" if options.regions == "blocks" else "parts of the model are"
    already = f"; {len(parts) - len(calls)} were compiled before" if len(calls) < len(parts) else ""
    rank_zero_info(f"ZeROStrategy: {len(calls)} {what} compiled ({options.backend}) when they run first{already}")
    return calls


def _blocks(module: nn.Module, config: ZeROConfig) -> Iterator[nn.Module]:
    classes = config.sharding.block_classes
    if classes:
        yield from (m for _, m in instances(module, classes, option="sharding.block_classes"))
    else:
        yield from (m for _, m in container_children(module, closed=()) if is_block(m))


def _callable(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module, and the outermost modules in it that have a forward and parameters."""
    yield module
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from (m for m in _callable(child) if m is not child)
        elif any(True for _ in child.parameters()):
            yield child
