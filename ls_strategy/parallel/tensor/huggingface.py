"""Convert Hugging Face's tensor-parallel plans, without importing transformers.

Some models hold such a plan in ``_tp_plan``: relative module names, with ``*`` for layer numbers, mapped to style
names. The plan does not define which features belong to one head, or what to do with fewer key and value heads than
ranks. Both are derived here from the attention modules.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from torch import nn

from ls_strategy.errors import PlanError
from ls_strategy.parallel.styles import Attributes, Column, ExpertFeatures, Style, parse
from ls_strategy.parallel.tensor import families
from ls_strategy.parallel.tensor.families import Role
from ls_strategy.parallel.tensor.fused import fused_heads
from ls_strategy.parallel.tensor.heads import Heads, width_out
from ls_strategy.parallel.tensor.plan_from_names import SEPARATE, Found, outside_experts
from ls_strategy.parallel.tensor.resolved_plan import plain_name

_LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_REPLICATE = "replicate"


def with_plans(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module, Mapping[str, str]]]:
    """Yield ``(name, module, plan)`` of the outermost modules that hold a plan."""
    plan = getattr(model, "_tp_plan", None)
    if isinstance(plan, Mapping) and plan and hasattr(model, "config"):
        yield prefix, model, plan
        return
    for name, child in model.named_children():
        yield from with_plans(child, f"{prefix}.{name}" if prefix else name)


def styles_of(prefix: str, model: nn.Module, plan: Mapping[str, str], size: int) -> Found:
    """Return the styles of ``model``, called ``prefix``, on ``size`` ranks, by full module name.

    Raises:
        PlanError: A style is not supported, or the heads cannot be sharded over the ranks.
    """
    found: Found = {}
    modules: dict[str, nn.Module] = {}
    for name, module in outside_experts(model):
        full = plain_name(f"{prefix}.{name}" if prefix and name else prefix or name)
        modules[full] = module
        style = plan.get(_LAYER_NUMBER.sub(".*", name))
        if style is not None and style != _REPLICATE:
            found[full] = _parse(full, module, style)
        for key, _ in module.named_parameters(recurse=False):
            style = plan.get(_LAYER_NUMBER.sub(".*", f"{name}.{key}"))
            if style is not None and style != _REPLICATE and not isinstance(found.get(full), ExpertFeatures):
                raise PlanError(
                    f"Hugging Face's tensor-parallel plan shards the parameter {full}.{key} ({type(module).__name__}) "
                    f"as {style!r}, which is not supported. Set the complete plan as parallel.tensor.plan={{...}}."
                )
    for name, layers in _attentions(found).items():
        _refine(found, name, modules[name], {role: (at, modules[at]) for role, at in layers.items()}, size)
    return found


def _parse(name: str, module: nn.Module, style: str) -> Style:
    try:
        return parse(style)
    except PlanError as error:
        raise PlanError(
            f"Hugging Face's tensor-parallel plan for {name!r} ({type(module).__name__}): {error} You can set the "
            "complete plan as parallel.tensor.plan={...}."
        ) from error


def _attentions(found: Found) -> dict[str, dict[Role, str]]:
    """Return the attentions whose query, key and value layers are column-parallel, with the names of these layers."""
    owners: defaultdict[str, dict[Role, str]] = defaultdict(dict)
    for name, style in found.items():
        owner, _, last = name.rpartition(".")
        role = families.ROLES.get(last)
        if role in (*SEPARATE, "fused") and style == Column():
            owners[owner][role] = name
    return owners


def _refine(
    found: Found, name: str, module: nn.Module, layers: Mapping[Role, tuple[str, nn.Module]], size: int
) -> None:
    """Refine the styles of one attention so that every rank holds complete heads."""
    if "fused" in layers:
        fused, layer = layers["fused"]
        if type(module).__name__ in families.FUSED_PER_HEAD:
            found[fused] = fused_heads(name, module, fused, layer, size)[1]
        return
    if not set(SEPARATE) <= set(layers):
        return
    (query, query_layer), (key, key_layer), (value, value_layer) = (layers[role] for role in SEPARATE)
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
