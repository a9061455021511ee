"""Where the vocabulary is: the embedding of tokens, the output head, and what shares parameters with them.

Dividing them saves memory and the exchange of logits, but is never needed: what does not fit stays whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from ls_strategy.parallel import families
from ls_strategy.parallel.plan_from_names import uniform_blocks
from ls_strategy.parallel.resolved_plan import plain_name
from ls_strategy.parallel.styles import Features, Style, Vocab


@dataclass(frozen=True)
class _Place:
    """A parameter in a module that owns it."""

    name: str
    module: nn.Module
    key: str


def vocabulary(model: nn.Module, inside: set[int], size: int) -> dict[str, Style]:
    """Styles of the embedding of tokens and the output head.

    Args:
        model: with full parameters, on meta or not.
        inside: ids of the modules of repeated blocks, which are not looked at.
        size: ranks.
    """
    owners: defaultdict[int, list[_Place]] = defaultdict(list)
    names: dict[int, str] = {}
    for name, module in model.named_modules():
        names[id(module)] = plain_name(name)
        for key, parameter in module.named_parameters(recurse=False):
            owners[id(parameter)].append(_Place(plain_name(name), module, key))
    embeddings, heads = _candidates(model, names, inside)
    found: dict[str, Style] = {}
    for module in (*embeddings, *heads):
        places = _together(module, owners)
        styles = [_style(place, size) for place in places]
        if all(style is not None for style in styles):
            for place, style in zip(places, styles, strict=True):
                bare = isinstance(style, Features)
                name = place.name if not bare else f"{place.name}.{place.key}" if place.name else place.key
                found[name] = cast("Style", style)
    return found


def output_heads(model: nn.Module) -> list[nn.Linear]:
    """The linear layers outside of repeated blocks that make logits of the vocabulary, each once."""
    inside = {id(m) for _, block in uniform_blocks(model) for m in block.modules()}
    names = {id(m): plain_name(name) for name, m in model.named_modules()}
    return list({id(m): m for m in _candidates(model, names, inside)[1] if isinstance(m, nn.Linear)}.values())


def _candidates(model: nn.Module, names: dict[int, str], inside: set[int]) -> tuple[list[nn.Module], list[nn.Module]]:
    """Embeddings of tokens, and output heads."""
    embeddings: list[nn.Module] = []
    heads: list[nn.Module] = []
    known: set[int] = set()
    for source in _with_accessors(model):
        known |= {id(m) for m in source.modules()}
        embeddings += _ask(source, "get_input_embeddings", nn.Embedding)
        heads += _ask(source, "get_output_embeddings", nn.Linear)
    outside = [m for m in model.modules() if id(m) not in inside and id(m) not in known]
    named = [m for m in outside if isinstance(m, nn.Embedding) and _last(names, m) in families.TOKEN_EMBEDDINGS]
    rows = {m.num_embeddings for m in named}
    closing = [
        m
        for m in outside
        if isinstance(m, nn.Linear) and _last(names, m) in families.OUTPUT_HEADS and m.out_features in rows
    ]
    # Without a head that is a module, logits are made by a function of the embedding's weight, which must be whole.
    made = {head.out_features for head in closing}
    return embeddings + [m for m in named if m.num_embeddings in made], heads + closing


def _last(names: dict[int, str], module: nn.Module) -> str:
    return names[id(module)].rpartition(".")[2]


def _with_accessors(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that tell their embeddings, as those of Hugging Face do."""
    if callable(getattr(model, "get_input_embeddings", None)):
        yield model
        return
    for child in model.children():
        yield from _with_accessors(child)


def _ask(source: nn.Module, accessor: str, kind: type[nn.Module]) -> list[nn.Module]:
    call = cast("Callable[[], Any] | None", getattr(source, accessor, None))
    try:
        answer = call() if call is not None else None
    except (AttributeError, NotImplementedError):  # a model without one
        return []
    return [answer] if isinstance(answer, kind) else []


def _together(module: nn.Module, owners: dict[int, list[_Place]]) -> list[_Place]:
    """All that must be cut as ``module`` is: the owners of its parameters, and the owners of theirs."""
    found: dict[tuple[int, str], _Place] = {}
    waiting = [place for p in module.parameters(recurse=False) for place in owners[id(p)]]
    while waiting:
        place = waiting.pop()
        if (id(place.module), place.key) in found:
            continue
        found[id(place.module), place.key] = place
        mates = place.module.parameters(recurse=False) if isinstance(place.module, nn.Embedding | nn.Linear) else ()
        waiting += [other for p in mates for other in owners[id(p)]]
    return list(found.values())


def _style(place: _Place, size: int) -> Style | None:
    """How the place is cut along the vocabulary; None if it cannot be."""
    module = place.module
    rows = int(module.get_parameter(place.key).shape[0])
    if rows < size:
        return None
    if isinstance(module, nn.Embedding):
        special = module.max_norm or module.sparse or module.scale_grad_by_freq
        return None if special else Vocab()
    if type(module) is nn.Linear:
        return Vocab()
    return Features(dim=0) if rows % size == 0 else None
