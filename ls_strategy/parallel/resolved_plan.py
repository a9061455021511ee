"""A plan, checked against a model: which module is divided how, and which parameter is cut where. Shapes only.

Nothing is changed here, nothing is sent, and every rank comes to the same result or the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter

from ls_strategy.errors import PlanError
from ls_strategy.layout import TensorPart
from ls_strategy.parallel import families
from ls_strategy.parallel.styles import (
    Attributes,
    Column,
    Divide,
    Experts,
    Features,
    PartialGradient,
    Plan,
    Replicate,
    Row,
    Style,
    Vocab,
    parse_all,
    resolve_sections,
)

LayerStyle: TypeAlias = Column | Row | Vocab | Features | Experts | Replicate | PartialGradient


@dataclass(frozen=True)
class ParamShard:
    """How one parameter is divided."""

    dim: int
    sections: tuple[int, ...]
    granule: int = 1
    copies: int | tuple[int, ...] = 1

    @property
    def sections_differ(self) -> bool:
        """Whether some sections are held by more ranks than others."""
        return not isinstance(self.copies, int) and len(set(self.copies)) > 1

    def part(self, shape: Iterable[int], rank: int, size: int) -> TensorPart:
        """What of a parameter of this shape ``rank`` of ``size`` holds."""
        return TensorPart.cut(
            shape, self.dim, rank, size, sections=self.sections, granule=self.granule, copies=self.copies
        )


@dataclass(frozen=True)
class Owned:
    """A parameter, by the module that owns it."""

    name: str
    module: nn.Module
    key: str

    @property
    def parameter(self) -> nn.Parameter:
        """What the module holds at this moment."""
        parameter = self.module._parameters[self.key]
        assert parameter is not None
        return parameter


@dataclass(frozen=True)
class Layer:
    """A module that a style was given to."""

    name: str
    module: nn.Module
    style: LayerStyle
    cuts: Mapping[str, ParamShard]
    """By key of the module's own parameters."""


@dataclass
class Resolved:
    """What a plan means for a model."""

    layers: list[Layer] = field(default_factory=list)
    attributes: dict[tuple[int, str], tuple[nn.Module, str, int]] = field(default_factory=dict)
    """``(module, attribute, value)`` to be set, by id and name."""

    parameters: list[tuple[Owned, LayerStyle, Mapping[str, ParamShard]]] = field(default_factory=list)
    """Bare parameters that a style was given to."""

    names: dict[int, str] = field(default_factory=dict)
    """Of all modules, by id."""

    def cuts(self) -> list[tuple[Owned, ParamShard]]:
        """Every cut, once per owner of the parameter."""
        result = [
            (Owned(f"{layer.name}.{key}".lstrip("."), layer.module, key), cut)
            for layer in self.layers
            for key, cut in layer.cuts.items()
        ]
        return result + [(owned, cuts[owned.key]) for owned, _, cuts in self.parameters if owned.key in cuts]


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is transformers' Conv1D, a linear layer whose weight is ``(in, out)``. Told by its name."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def plain_name(name: str) -> str:
    """A module's name without what `torch.compile` adds."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def resolve(model: nn.Module, plan: Plan, size: int) -> Resolved:
    """Find the modules of every pattern, and check each against its style.

    Args:
        model: with full parameters, on meta or not.
        plan: see `ls_strategy.parallel.styles`.
        size: ranks along the axis.

    Raises:
        PlanError: a pattern matches nothing, a style does not fit its module, or lengths do not divide.
    """
    result = Resolved()
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        modules[plain_name(name)] = module
        result.names.setdefault(id(module), plain_name(name))
    given: dict[int, tuple[str, LayerStyle]] = {}
    for pattern, value in plan.items():
        styles = parse_all(value)
        matched = {id(m): m for name, m in modules.items() if fnmatchcase(name, pattern)}
        if not matched:
            _add_parameters(result, modules, pattern, styles, size)
        for module in matched.values():
            for style in styles:
                _add_style(result, given, pattern, module, style, size)
    _check_shared(result, modules)
    return result


def _add_style(
    result: Resolved,
    given: dict[int, tuple[str, LayerStyle]],
    pattern: str,
    module: nn.Module,
    style: Style,
    size: int,
) -> None:
    name = result.names[id(module)]
    if isinstance(style, Attributes | Divide):
        _add_attributes(result, name, module, style, size)
        return
    before = given.get(id(module))
    if before is None:
        given[id(module)] = pattern, style
        result.layers.append(Layer(name, module, style, _check_layer(name, module, style, size)))
    elif before[1] != style:
        raise PlanError(
            f"module {name!r} is {before[1]} by pattern {before[0]!r} and {style} by {pattern!r}. "
            "Make the patterns narrower, so that one of them matches it."
        )


def _add_attributes(result: Resolved, name: str, module: nn.Module, style: Attributes | Divide, size: int) -> None:
    names = [key for key, _ in style.values] if isinstance(style, Attributes) else style.names
    for key in names:
        if not hasattr(module, key):
            integers = sorted(k for k, v in vars(module).items() if isinstance(v, int) and not k.startswith("_"))
            raise PlanError(
                f"{style} of module {name!r} ({type(module).__name__}): it has no attribute {key!r}. "
                f"Its integers are {', '.join(i for i in integers if i != 'training') or 'none'}."
            )
    if isinstance(style, Attributes):
        values = dict(style.values)
    else:
        values = {key: style.local(name, key, getattr(module, key), size) for key in style.names}
    for key, value in values.items():
        before = result.attributes.setdefault((id(module), key), (module, key, value))
        if before[2] != value:
            raise PlanError(f"the plan sets {name}.{key} to {before[2]} and to {value}. Name it once.")


def _add_parameters(
    result: Resolved, modules: Mapping[str, nn.Module], pattern: str, styles: tuple[Style, ...], size: int
) -> None:
    matched: dict[int, Owned] = {}
    for name, module in modules.items():
        for key, parameter in module.named_parameters(recurse=False):
            full_name = f"{name}.{key}" if name else key
            if fnmatchcase(full_name, pattern):
                matched.setdefault(id(parameter), Owned(full_name, module, key))
    if not matched:
        listed = ", ".join(name for name in list(modules)[1:12])
        raise PlanError(
            f"pattern {pattern!r} of the tensor-parallel plan matches no module of the model, nor a parameter. "
            f"Its modules begin with {listed}{', ...' if len(modules) > 12 else ''}."
        )
    for owned in matched.values():
        for style in styles:
            if not isinstance(style, Features | Vocab | PartialGradient | Replicate):
                raise PlanError(
                    f"pattern {pattern!r} matches parameter {owned.name!r}, not a module, so it cannot be {style}. "
                    "Parameters can be Features, Vocab, PartialGradient or Replicate; name the module otherwise."
                )
            cuts = {owned.key: _features_shard(owned, style, size)} if isinstance(style, Features) else {}
            if isinstance(style, Vocab):  # one row per word, as the layers that are divided by words
                cuts = {owned.key: ParamShard(0, (owned.parameter.shape[0],))}
            result.parameters.append((owned, style, cuts))


# --- one layer -------------------------------------------------------------------------------------------------------


def _check_layer(name: str, module: nn.Module, style: LayerStyle, size: int) -> Mapping[str, ParamShard]:
    for key, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, UninitializedParameter):
            raise PlanError(
                f"parameter {name}.{key} has no shape yet ({type(module).__name__}). Run a batch through the model "
                "before, or build the layer with its sizes."
            )
    check = _CHECKS.get(type(style))
    return {} if check is None else check(name, module, style, size)  # type: ignore[arg-type]


def _misfit(name: str, module: nn.Module, style: LayerStyle, wanted: str) -> PlanError:
    return PlanError(
        f"module {name!r} is {style} in the tensor-parallel plan, which takes {wanted}, but it is "
        f"{type(module).__name__}. Correct the pattern, or leave the module whole."
    )


def _require_linear(name: str, module: nn.Module, style: LayerStyle) -> None:
    if isinstance(module, NonDynamicallyQuantizableLinear):
        raise PlanError(
            f"module {name!r} ({type(module).__name__}) is part of nn.MultiheadAttention, which uses its weights "
            "without calling it. Write the attention with nn.Linear layers, or leave it whole."
        )
    if not isinstance(module, nn.Linear) and not is_conv1d(module):
        raise _misfit(name, module, style, "nn.Linear (or transformers' Conv1D)")


def _column(name: str, module: nn.Module, style: Column, size: int) -> Mapping[str, ParamShard]:
    _require_linear(name, module, style)
    each = (style.copies,) if isinstance(style.copies, int) else style.copies
    if any(c < 1 or size % c for c in each) or (each != (style.copies,) and len(each) != len(style.sections)):
        raise PlanError(
            f"module {name!r} is {style}, but copies={style.copies} does not divide the {size} tensor-parallel ranks, "
            "or is not one number per section."
        )
    if style.gather and max(each) > 1:
        raise PlanError(f"module {name!r} is {style}: gather=True has no meaning with copies. Leave copies out.")
    dim = 1 if is_conv1d(module) else 0
    sections = _sections(name, module, style, dim, [size // c for c in each])
    cuts = {"weight": ParamShard(dim, sections, style.granule, style.copies)}
    if module.bias is not None:
        cuts["bias"] = ParamShard(0, sections, style.granule, style.copies)
    return cuts


def _row(name: str, module: nn.Module, style: Row, size: int) -> Mapping[str, ParamShard]:
    _require_linear(name, module, style)
    known = type(module).forward is nn.Linear.forward or type(module).__name__ in families.PLAIN_LINEARS
    if not known and not is_conv1d(module) and module.bias is not None:
        raise PlanError(
            f"module {name!r} ({type(module).__name__}) is {style}, but has a forward of its own and a bias, which is "
            "to be added once, after the sum over the ranks. Use nn.Linear, or bias=False."
        )
    dim = 0 if is_conv1d(module) else 1
    return {"weight": ParamShard(dim, _sections(name, module, style, dim, [size]), style.granule)}


def _sections(name: str, module: nn.Module, style: Column | Row, dim: int, parts_of: Sequence[int]) -> tuple[int, ...]:
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    what = "output features" if isinstance(style, Column) else "input features"
    sections = resolve_sections(style.sections, weight.shape[dim], f"module {name!r}, {what}")
    for section, parts in zip(sections, parts_of if len(parts_of) > 1 else [*parts_of] * len(sections), strict=True):
        if style.granule < 1 or section % style.granule:
            raise PlanError(
                f"module {name!r}: {section} {what} are no whole number of granules of {style.granule}. Set granule to "
                "the features of one head."
            )
        if section // style.granule % parts:
            of = f" in granules of {style.granule} ({section // style.granule})" if style.granule > 1 else ""
            raise PlanError(
                f"module {name!r}: {section} {what}{of} do not divide into {parts} parts. Use a number of "
                "tensor-parallel ranks that shards them"
                + (" (or `copies`, for fewer heads than ranks)." if isinstance(style, Column) else ".")
            )
    return sections


def _vocab(name: str, module: nn.Module, style: Vocab, size: int) -> Mapping[str, ParamShard]:
    if not isinstance(module, nn.Embedding | nn.Linear):
        raise _misfit(name, module, style, "nn.Embedding or nn.Linear")
    rows = module.weight.shape[0]
    if rows < size:
        raise PlanError(
            f"module {name!r} has {rows} rows, fewer than the {size} tensor-parallel ranks. Leave it whole."
        )
    cuts = {"weight": ParamShard(0, (rows,))}
    if isinstance(module, nn.Embedding):
        for option in ("max_norm", "sparse", "scale_grad_by_freq"):
            if getattr(module, option):
                raise PlanError(
                    f"module {name!r} has {option}={getattr(module, option)!r}, which looks at rows that other ranks "
                    f"hold. Build it without {option}, or leave it whole."
                )
    elif module.bias is not None:
        cuts["bias"] = ParamShard(0, (rows,))
    return cuts


def _features(name: str, module: nn.Module, style: Features, size: int) -> Mapping[str, ParamShard]:
    if not isinstance(module, nn.Embedding) or style.dim != 1:
        raise _misfit(name, module, style, "nn.Embedding, along dim=1 (or a bare parameter)")
    if module.max_norm:
        raise PlanError(f"module {name!r} has max_norm={module.max_norm}, the norm of whole rows. Leave it whole.")
    return {"weight": _features_shard(Owned(f"{name}.weight", module, "weight"), style, size)}


def _features_shard(owned: Owned, style: Features, size: int) -> ParamShard:
    shape = tuple(owned.parameter.shape)
    if not 0 <= style.dim < len(shape) or shape[style.dim] % size:
        raise PlanError(
            f"parameter {owned.name!r} of shape {shape} is {style}, but dimension {style.dim} does not divide by the "
            f"{size} tensor-parallel ranks. Leave it whole, or use a number of ranks that shards it."
        )
    return ParamShard(style.dim, (shape[style.dim],))


def _experts(name: str, module: nn.Module, style: Experts, size: int) -> Mapping[str, ParamShard]:
    """Gate and up are cut by rows, down by columns.

    Raises:
        PlanError: the module holds its weights otherwise, or they do not divide.
    """
    gate_up, down = (getattr(module, key, None) for key in families.EXPERT_WEIGHTS)
    plain = {key for key, _ in module.named_parameters()} == set(families.EXPERT_WEIGHTS)
    special = getattr(module, "is_transposed", False) or not getattr(module, "is_concatenated", True)
    if not plain or special or not isinstance(gate_up, nn.Parameter) or not isinstance(down, nn.Parameter):
        raise _misfit(
            name,
            module,
            style,
            "experts with the parameters gate_up_proj (E, 2 * inner, D) and down_proj (E, D, inner)",
        )
    inner = down.shape[-1]
    if tuple(gate_up.shape) != (down.shape[0], 2 * inner, down.shape[1]):
        raise PlanError(
            f"module {name!r} is {style}: gate_up_proj of shape {tuple(gate_up.shape)} does not belong to down_proj of "
            f"shape {tuple(down.shape)}, for which it would be {(down.shape[0], 2 * inner, down.shape[1])}. Leave the "
            "module whole."
        )
    if inner % size:
        raise PlanError(
            f"module {name!r}: the {inner} inner features of an expert do not divide by the {size} tensor-parallel "
            f"ranks. Use a number of ranks that shards {inner}."
        )
    return {"gate_up_proj": ParamShard(1, (inner, inner)), "down_proj": ParamShard(2, (inner,))}


_CHECKS: dict[type, Callable[..., Mapping[str, ParamShard]]] = {
    Column: _column,
    Row: _row,
    Vocab: _vocab,
    Features: _features,
    Experts: _experts,
}


# --- shared parameters -----------------------------------------------------------------------------------------------


def _check_shared(result: Resolved, modules: Mapping[str, nn.Module]) -> None:
    """A parameter of several modules must be cut the same way in each."""
    cuts: dict[int, tuple[Owned, ParamShard]] = {}
    cut_owners: set[tuple[int, str]] = set()
    for owned, cut in result.cuts():
        first, before = cuts.setdefault(id(owned.parameter), (owned, cut))
        cut_owners.add((id(owned.module), owned.key))
        if before != cut:
            raise PlanError(
                f"{first.name} and {owned.name} are one parameter, but the plan cuts it as {before} and as {cut}. "
                "Give both modules styles that cut it the same way (an embedding and its output head: 'vocab')."
            )
    for name, module in modules.items():
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) in cuts and (id(module), key) not in cut_owners:
                raise PlanError(
                    f"{f'{name}.{key}'.lstrip('.')} and {cuts[id(parameter)][0].name} are one parameter, which is cut "
                    "in the latter only. Give both modules styles that cut it the same way (an embedding and its "
                    "output head: 'vocab')."
                )
