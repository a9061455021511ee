"""Find the token embedding, the output head, and the modules that share parameters with them.

Sharding them along the vocabulary saves memory and the gather of logits. It is optional: modules that do not fit are
replicated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, cast

from torch import nn

from ls_strategy.blocks import outermost
from ls_strategy.parallel.hooks import Owned
from ls_strategy.parallel.styles import Features, Style, Vocab
from ls_strategy.parallel.tensor import families
from ls_strategy.parallel.tensor.plan_from_names import uniform_blocks
from ls_strategy.parallel.tensor.resolved_plan import plain_name


def vocabulary(model: nn.Module, size: int) -> dict[str, Style]:
    """Return the styles of the token embedding and the output head on ``size`` ranks, by full name."""
    owners: defaultdict[int, list[Owned]] = defaultdict(list)
    names: dict[int, str] = {}
    for name, module in model.named_modules():
        names[id(module)] = plain_name(name)
        for key, parameter in module.named_parameters(recurse=False):
            owners[id(parameter)].append(Owned(f"{plain_name(name)}.{key}".lstrip("."), module, key))
    embeddings, heads = _candidates(model, names)
    found: dict[str, Style] = {}
    for module in (*embeddings, *heads):
        tied = _tied(module, owners)
        styles = [_style(owner, size) for owner in tied]
        if all(style is not None for style in styles):
            for owner, style in zip(tied, styles, strict=True):
                bare = isinstance(style, Features)
                found[owner.name if bare else names[id(owner.module)]] = cast("Style", style)
    return found


def output_heads(model: nn.Module) -> list[nn.Linear]:
    """Return the linear layers outside repeated blocks that compute logits, each once."""
    names = {id(m): plain_name(name) for name, m in model.named_modules()}
    return list({id(m): m for m in _candidates(model, names)[1] if isinstance(m, nn.Linear)}.values())


def _candidates(model: nn.Module, names: dict[int, str]) -> tuple[list[nn.Module], list[nn.Module]]:
    embeddings: list[nn.Module] = []
    heads: list[nn.Module] = []
    known: set[int] = set()
    # Of Hugging Face's models.
    for _, source in outermost(model, lambda module: callable(getattr(module, "get_input_embeddings", None))):
        known |= {id(m) for m in source.modules()}
        embeddings += _ask(source, "get_input_embeddings", nn.Embedding)
        heads += _ask(source, "get_output_embeddings", nn.Linear)
    known |= {id(m) for _, block in uniform_blocks(model) for m in block.modules()}
    outside = [m for m in model.modules() if id(m) not in known]
    named = [m for m in outside if isinstance(m, nn.Embedding) and _last(names, m) in families.TOKEN_EMBEDDINGS]
    rows = {m.num_embeddings for m in named}
    named_heads = [
        m
        for m in outside
        if isinstance(m, nn.Linear) and _last(names, m) in families.OUTPUT_HEADS and m.out_features in rows
    ]
    # Without a head module, a function computes the logits from the embedding's weight, which must be replicated then.
    widths = {head.out_features for head in named_heads}
    return embeddings + [m for m in named if m.num_embeddings in widths], heads + named_heads


def _last(names: dict[int, str], module: nn.Module) -> str:
    return names[id(module)].rpartition(".")[2]


def _ask(source: nn.Module, accessor: str, kind: type[nn.Module]) -> list[nn.Module]:
    call = cast("Callable[[], Any] | None", getattr(source, accessor, None))
    try:
        answer = call() if call is not None else None
    except (AttributeError, NotImplementedError):  # a model without one
        return []
    return [answer] if isinstance(answer, kind) else []


def _tied(module: nn.Module, owners: dict[int, list[Owned]]) -> list[Owned]:
    """Return all owners that must be sharded like ``module``: those of its parameters, and in turn of theirs."""
    found: dict[tuple[int, str], Owned] = {}
    pending = [owner for p in module.parameters(recurse=False) for owner in owners[id(p)]]
    while pending:
        owner = pending.pop()
        if (id(owner.module), owner.key) in found:
            continue
        found[id(owner.module), owner.key] = owner
        siblings = owner.module.parameters(recurse=False) if isinstance(owner.module, nn.Embedding | nn.Linear) else ()
        pending += [other for p in siblings for other in owners[id(p)]]
    return list(found.values())


def _style(owner: Owned, size: int) -> Style | None:
    """Return the style that shards the parameter along the vocabulary; None if there is none."""
    module = owner.module
    rows = int(module.get_parameter(owner.key).shape[0])
    if rows < size:
        return None
    if isinstance(module, nn.Embedding):
        special = module.max_norm or module.sparse or module.scale_grad_by_freq
        return None if special else Vocab()
    if type(module) is nn.Linear:
        return Vocab()
    return Features(dim=0) if rows % size == 0 else None
