"""Find the tensor-parallel plan of a model.

``"auto"`` takes the first of:

1. the method ``tensor_parallel_plan()`` of the model or of its submodules, with patterns relative to that submodule;
2. Hugging Face's plan, which some of its models hold;
3. a plan from the names and shapes of the layers in the repeated blocks (`plan_from_names`).

Every plan is checked against the model before anything is sharded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias, cast

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from ls_strategy.blocks import outermost
from ls_strategy.errors import PlanError
from ls_strategy.parallel.styles import ExpertFeatures, Style, parse_all
from ls_strategy.parallel.tensor import huggingface
from ls_strategy.parallel.tensor.heads import starred
from ls_strategy.parallel.tensor.plan_from_names import infer, uniform_blocks
from ls_strategy.parallel.tensor.resolved_plan import Resolved, plain_name, resolve
from ls_strategy.parallel.tensor.vocabulary import vocabulary

Given: TypeAlias = "Literal['auto'] | Mapping[str, Style | str | Sequence[Style | str] | ParallelStyle]"


@dataclass(frozen=True)
class ResolvedPlan:
    """A plan that fits the model."""

    source: str
    """Where the plan came from, for messages."""

    styles: dict[str, Style | list[Style]] = field(default_factory=dict)
    """By pattern of module names, for `apply_tensor_parallel`."""

    torch_styles: dict[str, ParallelStyle] = field(default_factory=dict)
    """For torch's ``parallelize_module`` instead: see `dtensor.parallelize`."""

    blocks: list[nn.Module] = field(default_factory=list)
    """The repeated blocks of the model, in order."""

    rows: list[tuple[str, str, str, str, int]] = field(default_factory=list)
    """Rows of the table: names, class, style, shapes, and the number of modules."""

    def describe(self) -> str:
        """Return a table of what is sharded. Read it once when a plan was found automatically."""
        heading = ("module", "class", "style", "weight -> on each rank", "modules")
        lines = [heading, *((*row[:4], str(row[4])) for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(heading))]
        table = [
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        return "\n".join([f"Tensor-parallel plan from {self.source}; modules not listed are replicated:", *table])


def resolve_tensor_plan(model: nn.Module, given: Given, size: int) -> ResolvedPlan:
    """Find the plan for ``model``, and check it. Not collective; the same result or error on every rank.

    Args:
        model: unsharded, on meta or not.
        given: ``"auto"``, or a mapping from patterns of module names to styles or their names, or to torch's
            ``ParallelStyle`` objects. The two kinds cannot be mixed.
        size: number of tensor-parallel ranks.

    Raises:
        PlanError: No plan was found, or it does not fit the model.
    """
    if isinstance(given, str):
        if given != "auto":
            raise PlanError(
                f'Got parallel.tensor.plan={given!r}. Set "auto", or a mapping from patterns of module names to styles.'
            )
        source, plan = _automatic(model, size)
    else:
        source, plan = "parallel.tensor.plan", dict(given)
    blocks = [block for _, block in uniform_blocks(model)]
    torch_styles = {pattern: value for pattern, value in plan.items() if isinstance(value, ParallelStyle)}
    if torch_styles:
        _check_torch_styles(model, plan, torch_styles)
        rows = [(pattern, "", type(style).__name__, "", 1) for pattern, style in torch_styles.items()]
        return ResolvedPlan(source, torch_styles=torch_styles, blocks=blocks, rows=rows)
    styles: dict[str, Style | list[Style]] = {
        pattern: list(parse_all(cast("Any", value))) for pattern, value in plan.items()
    }
    if not styles:
        raise PlanError(
            f"the tensor-parallel plan from {source} is empty: every rank would hold and compute the same. Name the "
            "layers to shard, or set parallel.tensor=1."
        )
    return ResolvedPlan(source, styles, blocks=blocks, rows=_rows(resolve(model, styles, size), size))


def _automatic(model: nn.Module, size: int) -> tuple[str, dict[str, Any]]:
    """Return ``(source, plan)`` for ``"auto"``."""
    plan: dict[str, Any] = {}
    found = outermost(model, lambda module: callable(getattr(module, "tensor_parallel_plan", None)))
    own = [(plain_name(name), module) for name, module in found]
    for prefix, module in own:
        for pattern, value in _call(prefix, module).items():
            plan[".".join(part for part in (prefix, pattern) if part)] = value
    if own:
        classes = sorted({f"{type(module).__name__}.tensor_parallel_plan()" for _, module in own})
        return ", ".join(classes), plan
    carried = list(huggingface.with_plans(model))
    for prefix, module, names in carried:
        plan |= huggingface.styles_of(plain_name(prefix), module, names, size)
    source = ", ".join(sorted({f"Hugging Face's {type(module).__name__}" for _, module, _ in carried}))
    if not carried:
        source, plan = "names and shapes of the layers", dict(infer(model, size))
    return source, plan | vocabulary(model, size)


def _call(prefix: str, module: nn.Module) -> Mapping[str, Any]:
    plan = module.tensor_parallel_plan()  # type: ignore[operator]
    if not isinstance(plan, Mapping):
        raise PlanError(
            f"{type(module).__name__}.tensor_parallel_plan() of {prefix or 'the model'} returned "
            f"{type(plan).__name__}. Return a mapping from patterns of module names, relative to the module, to "
            'styles: {"blocks.*.up": "column", ...}.'
        )
    return plan


def _check_torch_styles(model: nn.Module, plan: Mapping[str, Any], torch_styles: Mapping[str, ParallelStyle]) -> None:
    others = [pattern for pattern in plan if pattern not in torch_styles]
    if others:
        raise PlanError(
            f"the tensor-parallel plan mixes torch's ParallelStyle objects with other styles ({others[0]!r}: "
            f"{plan[others[0]]!r}). Use one kind in the entire plan."
        )
    names = [name.split(".") for name, _ in model.named_modules()]
    for pattern in torch_styles:
        tokens = pattern.split(".")
        if not any(len(n) == len(tokens) and all(map(fnmatchcase, n, tokens)) for n in names):
            raise PlanError(
                f"pattern {pattern!r} of the tensor-parallel plan matches no module of the model. With torch's styles "
                "every component between dots is matched separately. Correct the pattern."
            )


def _rows(resolved: Resolved, size: int) -> list[tuple[str, str, str, str, int]]:
    """Return the rows of the table, one for all modules that differ only in layer numbers."""
    counts: dict[tuple[str, str, str, str], int] = {}

    def add(name: str, cls: str, style: str, shapes: str) -> None:
        row = (starred(name), cls, style, shapes)
        counts[row] = counts.get(row, 0) + 1

    for layer in resolved.layers:
        key = "down_proj" if isinstance(layer.style, ExpertFeatures) else "weight"
        weight, shard = getattr(layer.module, key, None), layer.shards.get(key)
        shapes = "replicated"
        if isinstance(weight, nn.Parameter) and shard is not None:
            shapes = f"{tuple(weight.shape)} -> {shard.part(weight.shape, 0, size).shape}"
        add(layer.name, type(layer.module).__name__, _short(layer.style), shapes)
    for owned, style, shards in resolved.parameters:
        shard, shape = shards.get(owned.key), tuple(owned.parameter.shape)
        shapes = f"{shape} -> {shard.part(shape, 0, size).shape}" if shard else "replicated"
        add(owned.name, "Parameter", _short(style), shapes)
    for module, attribute, value in resolved.attributes.values():
        name = resolved.names[id(module)]
        add(f"{name}.{attribute}", type(module).__name__, "attribute", f"{getattr(module, attribute)} -> {value}")
    return [(*row, count) for row, count in counts.items()]


def _short(style: Style) -> str:
    """Return the class of the style with the fields that differ from their defaults."""
    values = {f.name: (getattr(style, f.name), f.default) for f in fields(style)}
    changed = [f"{key}={value!r}" for key, (value, default) in values.items() if value != default]
    return type(style).__name__ + (f"({', '.join(changed)})" if changed else "")
