"""Hugging Face's own tensor-parallel plans, read without importing transformers, and made exact.

A model that has one carries it merged, in ``_tp_plan``: names relative to it, a number of a layer written ``*``, and
names of styles. It does not say which features belong to one head, nor what happens with fewer key and value heads than
ranks; both are added here from the attention modules themselves.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from torch import nn

from ls_strategy.errors import PlanError
from ls_strategy.moe.sparse import SparseLayer
from ls_strategy.parallel import families
from ls_strategy.parallel.families import Role
from ls_strategy.parallel.fused import fused_heads
from ls_strategy.parallel.heads import Heads, width_out
from ls_strategy.parallel.plan_from_names import Found
from ls_strategy.parallel.resolved_plan import plain_name
from ls_strategy.parallel.styles import Attributes, Column, Experts, Style, parse

_LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_WHOLE = "replicate"


def with_plans(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module, Mapping[str, str]]]:
    """The outermost modules that carry such a plan: name, module, plan."""
    plan = getattr(model, "_tp_plan", None)
    if isinstance(plan, Mapping) and plan and hasattr(model, "config"):
        yield prefix, model, plan
        return
    for name, child in model.named_children():
        yield from with_plans(child, f"{prefix}.{name}" if prefix else name)


def styles_of(prefix: str, model: nn.Module, plan: Mapping[str, str], size: int) -> Found:
    """Styles by full name.

    Args:
        prefix: name of ``model`` in the whole one.
        model: that carries the plan.
        plan: of it.
        size: ranks.

    Raises:
        PlanError: a style has no counterpart here, or heads do not divide.
    """
    found: Found = {}
    modules: dict[str, nn.Module] = {}
    # Layers of experts stay whole here; expert parallelism shards them.
    whole = tuple(f"{name}." for name, m in model.named_modules() if isinstance(m, SparseLayer))
    for name, module in ((n, m) for n, m in model.named_modules() if not f"{n}.".startswith(whole)):
        full = plain_name(f"{prefix}.{name}" if prefix and name else prefix or name)
        modules[full] = module
        style = plan.get(_LAYER_NUMBER.sub(".*", name))
        if style is not None and style != _WHOLE:
            found[full] = _parse(full, module, style)
        for key, _ in module.named_parameters(recurse=False):
            style = plan.get(_LAYER_NUMBER.sub(".*", f"{name}.{key}"))
            if style is not None and style != _WHOLE and not isinstance(found.get(full), Experts):
                raise PlanError(
                    f"Hugging Face's tensor-parallel plan shards the parameter {full}.{key} ({type(module).__name__}) "
                    f"as {style!r}, which is not supported here. Give the whole plan as parallel.tensor.plan={{...}}."
                )
    for name, layers in _attentions(found).items():
        _refine(found, name, modules[name], {role: (at, modules[at]) for role, at in layers.items()}, size)
    return found


def _parse(name: str, module: nn.Module, style: str) -> Style:
    try:
        return parse(style)
    except PlanError as error:
        raise PlanError(
            f"Hugging Face's tensor-parallel plan for {name!r} ({type(module).__name__}): {error} The whole plan "
            "can be given as parallel.tensor.plan={...}."
        ) from error


def _attentions(found: Found) -> dict[str, dict[Role, str]]:
    """Modules whose query, key and value layers are divided by columns, with those layers."""
    owners: defaultdict[str, dict[Role, str]] = defaultdict(dict)
    for name, style in found.items():
        owner, _, last = name.rpartition(".")
        role = families.ROLES.get(last)
        if role in ("query", "key", "value", "fused") and style == Column():
            owners[owner][role] = name
    return owners


def _refine(
    found: Found, name: str, module: nn.Module, layers: Mapping[Role, tuple[str, nn.Module]], size: int
) -> None:
    """Make the layers of one attention keep whole heads."""
    if "fused" in layers:
        fused, layer = layers["fused"]
        if type(module).__name__ in families.FUSED_PER_HEAD:
            found[fused] = fused_heads(name, module, fused, layer, size)[1]
        return
    if not {"query", "key", "value"} <= set(layers):
        return
    (query, query_layer), (key, key_layer), (value, value_layer) = (layers[role] for role in ("query", "key", "value"))
    heads = Heads.of(name, module, width_out(query_layer), width_out(key_layer))
    heads.check(name, module, size)
    copies = heads.copies(size)
    found[query] = Column(granule=heads.size)
    found[key] = Column(granule=heads.size, copies=copies)
    found[value] = Column(granule=width_out(value_layer) // heads.key, copies=copies)
    groups = heads.query // size // max(heads.key // size, 1)
    changed = tuple(
        (attribute, groups)
        for attribute in sorted(families.GROUP_COUNTS)
        if getattr(module, attribute, groups) != groups
    )
    if changed:
        found[name] = Attributes(changed)
