"""Check a plan against a model, and resolve it into the shards of every parameter. Works on shapes alone.

Nothing is changed and nothing is sent. Every rank gets the same result or raises the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter

from ls_strategy.blocks import is_conv1d
from ls_strategy.errors import PlanError
from ls_strategy.layout import TensorPart
from ls_strategy.parallel.hooks import Owned
from ls_strategy.parallel.styles import (
    Attributes,
    Column,
    Divide,
    ExpertFeatures,
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
from ls_strategy.parallel.tensor import families

LayerStyle: TypeAlias = Column | Row | Vocab | Features | ExpertFeatures | Replicate | PartialGradient


@dataclass(frozen=True)
class ParamShard:
    """Sharding of one parameter: its dimension, the sections of it that are cut separately, and their copies."""

    dim: int
    sections: tuple[int, ...]
    granule: int = 1
    copies: int | tuple[int, ...] = 1

    @property
    def sections_differ(self) -> bool:
        """Return whether some sections are held by more ranks than other sections."""
        return not isinstance(self.copies, int) and len(set(self.copies)) > 1

    def part(self, shape: Iterable[int], rank: int, size: int) -> TensorPart:
        """Return what ``rank`` of ``size`` holds of a parameter of this shape."""
        return TensorPart.cut(
            shape, self.dim, rank, size, sections=self.sections, granule=self.granule, copies=self.copies
        )


@dataclass(frozen=True)
class StyledLayer:
    """A module with a style."""

    name: str
    module: nn.Module
    style: LayerStyle
    shards: Mapping[str, ParamShard]
    """Shards of the module's direct parameters, by key."""


@dataclass
class Resolved:
    """A plan, resolved for one model."""

    layers: list[StyledLayer] = field(default_factory=list)
    attributes: dict[tuple[int, str], tuple[nn.Module, str, int]] = field(default_factory=dict)
    """``(module, attribute, value)`` to set, by the module's id and the attribute."""

    parameters: list[tuple[Owned, LayerStyle, Mapping[str, ParamShard]]] = field(default_factory=list)
    """Bare parameters with a style, and their shards by key."""

    names: dict[int, str] = field(default_factory=dict)
    """Names of all modules, by id."""

    def shards(self) -> list[tuple[Owned, ParamShard]]:
        """Return every sharded parameter, once per module that owns it."""
        result = [
            (Owned(f"{layer.name}.{key}".lstrip("."), layer.module, key), shard)
            for layer in self.layers
            for key, shard in layer.shards.items()
        ]
        return result + [(owned, shards[owned.key]) for owned, _, shards in self.parameters if owned.key in shards]


def plain_name(name: str) -> str:
    """Return a module's name without the components that `torch.compile` inserts."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def resolve(model: nn.Module, plan: Plan, size: int) -> Resolved:
    """Find the modules of every pattern, and check that their styles are possible on ``size`` ranks.

    ``model`` has full parameters, on meta or not.

    Raises:
        PlanError: A pattern matches nothing, a style does not fit its module, or a length is not divisible.
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
        result.layers.append(StyledLayer(name, module, style, _check_layer(name, module, style, size)))
    elif before[1] != style:
        raise PlanError(
            f"module {name!r} is {before[1]} by pattern {before[0]!r}, but {style} by {pattern!r}. "
            "Make the patterns narrower, so that only one of them matches it."
        )


def _add_attributes(result: Resolved, name: str, module: nn.Module, style: Attributes | Divide, size: int) -> None:
    names = [key for key, _ in style.values] if isinstance(style, Attributes) else style.names
    for key in names:
        if not hasattr(module, key):
            integers = sorted(k for k, v in vars(module).items() if isinstance(v, int) and not k.startswith("_"))
            raise PlanError(
                f"module {name!r} ({type(module).__name__}) is {style}, but has no attribute {key!r}. Use one of its "
                f"integers: {', '.join(i for i in integers if i != 'training') or 'none'}."
            )
    if isinstance(style, Attributes):
        values = dict(style.values)
    else:
        values = {key: style.local(name, key, getattr(module, key), size) for key in style.names}
    for key, value in values.items():
        before = result.attributes.setdefault((id(module), key), (module, key, value))
        if before[2] != value:
            raise PlanError(f"the plan sets {name}.{key} to {before[2]} and to {value}. Name the attribute once.")


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
            f"pattern {pattern!r} of the tensor-parallel plan matches no module of the model and no parameter. Correct "
            f"it. The first modules are {listed}{', ...' if len(modules) > 12 else ''}."
        )
    for owned in matched.values():
        for style in styles:
            if not isinstance(style, Features | Vocab | PartialGradient | Replicate):
                raise PlanError(
                    f"pattern {pattern!r} matches parameter {owned.name!r}, not a module, so it cannot be {style}. Use "
                    "Features, Vocab, PartialGradient or Replicate, or name the module."
                )
            shards = {owned.key: _features_shard(owned, style, size)} if isinstance(style, Features) else {}
            if isinstance(style, Vocab):  # one row per token of the vocabulary
                shards = {owned.key: ParamShard(0, (owned.parameter.shape[0],))}
            result.parameters.append((owned, style, shards))


# --- one layer -------------------------------------------------------------------------------------------------------


def _check_layer(name: str, module: nn.Module, style: LayerStyle, size: int) -> Mapping[str, ParamShard]:
    for key, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, UninitializedParameter):
            raise PlanError(
                f"parameter {name}.{key} has no shape yet ({type(module).__name__}). Run a batch through the model "
                "first, or build the layer with its sizes."
            )
    check = _CHECKS.get(type(style))
    return {} if check is None else check(name, module, style, size)  # type: ignore[arg-type]


def _misfit(name: str, module: nn.Module, style: LayerStyle, required: str) -> PlanError:
    return PlanError(
        f"module {name!r} is {style} in the tensor-parallel plan, which requires {required}, but it is "
        f"{type(module).__name__}. Correct the pattern, or replicate the module."
    )


def _require_linear(name: str, module: nn.Module, style: LayerStyle) -> None:
    if isinstance(module, NonDynamicallyQuantizableLinear):
        raise PlanError(
            f"module {name!r} ({type(module).__name__}) is part of nn.MultiheadAttention, which uses its weights "
            "without calling it. Write the attention with nn.Linear layers, or replicate it."
        )
    if not isinstance(module, nn.Linear) and not is_conv1d(module):
        raise _misfit(name, module, style, "nn.Linear (or transformers' Conv1D)")


def _column(name: str, module: nn.Module, style: Column, size: int) -> Mapping[str, ParamShard]:
    _require_linear(name, module, style)
    each = (style.copies,) if isinstance(style.copies, int) else style.copies
    if any(c < 1 or size % c for c in each) or (each != (style.copies,) and len(each) != len(style.sections)):
        raise PlanError(
            f"module {name!r} is {style}, but copies must divide the number of tensor-parallel ranks, {size}, and be "
            "one number, or one per section. Change copies."
        )
    if style.gather and max(each) > 1:
        raise PlanError(f"module {name!r} is {style}, but gather=True cannot be combined with copies. Remove one.")
    dim = 1 if is_conv1d(module) else 0
    sections = _sections(name, module, style, dim, [size // c for c in each])
    shards = {"weight": ParamShard(dim, sections, style.granule, style.copies)}
    if module.bias is not None:
        shards["bias"] = ParamShard(0, sections, style.granule, style.copies)
    return shards


def _row(name: str, module: nn.Module, style: Row, size: int) -> Mapping[str, ParamShard]:
    _require_linear(name, module, style)
    known = type(module).forward is nn.Linear.forward or type(module).__name__ in families.PLAIN_LINEARS
    if not known and not is_conv1d(module) and module.bias is not None:
        raise PlanError(
            f"module {name!r} ({type(module).__name__}) is {style}, but overrides forward and has a bias, which must "
            "be added once, after the sum over the ranks. Use nn.Linear, or bias=False."
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
                f"module {name!r}: {section} {what} are not a multiple of granule={style.granule}. Set granule to the "
                "number of features of one head."
            )
        if section // style.granule % parts:
            of = f" in granules of {style.granule} ({section // style.granule})" if style.granule > 1 else ""
            raise PlanError(
                f"module {name!r}: {section} {what}{of} cannot be split into {parts} equal shards. Use a number of "
                "tensor-parallel ranks that divides them"
                + (", or `copies` for fewer heads than ranks." if isinstance(style, Column) else ".")
            )
    return sections


def _vocab(name: str, module: nn.Module, style: Vocab, size: int) -> Mapping[str, ParamShard]:
    if not isinstance(module, nn.Embedding | nn.Linear):
        raise _misfit(name, module, style, "nn.Embedding or nn.Linear")
    rows = module.weight.shape[0]
    if rows < size:
        raise PlanError(f"module {name!r} has {rows} rows, fewer than the {size} tensor-parallel ranks. Replicate it.")
    shards = {"weight": ParamShard(0, (rows,))}
    if isinstance(module, nn.Embedding):
        for option in ("max_norm", "sparse", "scale_grad_by_freq"):
            if getattr(module, option):
                raise PlanError(
                    f"module {name!r} has {option}={getattr(module, option)!r}, which needs the rows of other ranks. "
                    f"Build it without {option}, or replicate it."
                )
    elif module.bias is not None:
        shards["bias"] = ParamShard(0, (rows,))
    return shards


def _features(name: str, module: nn.Module, style: Features, size: int) -> Mapping[str, ParamShard]:
    if not isinstance(module, nn.Embedding) or style.dim != 1:
        raise _misfit(name, module, style, "nn.Embedding, along dim=1 (or a bare parameter)")
    if module.max_norm:
        raise PlanError(
            f"module {name!r} has max_norm={module.max_norm}, which needs the norm of full rows. Replicate it."
        )
    return {"weight": _features_shard(Owned(f"{name}.weight", module, "weight"), style, size)}


def _features_shard(owned: Owned, style: Features, size: int) -> ParamShard:
    shape = tuple(owned.parameter.shape)
    if not 0 <= style.dim < len(shape) or shape[style.dim] % size:
        raise PlanError(
            f"parameter {owned.name!r} of shape {shape} is {style}, but dimension {style.dim} is not divisible by the "
            f"{size} tensor-parallel ranks. Replicate it, or use a number of ranks that divides it."
        )
    return ParamShard(style.dim, (shape[style.dim],))


def _experts(name: str, module: nn.Module, style: ExpertFeatures, size: int) -> Mapping[str, ParamShard]:
    """Shard gate and up by rows, down by columns.

    Raises:
        PlanError: The module's weights have another layout, or cannot be sharded over the ranks.
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
            f"module {name!r} is {style}, but gate_up_proj has the shape {tuple(gate_up.shape)}, where down_proj of "
            f"shape {tuple(down.shape)} requires {(down.shape[0], 2 * inner, down.shape[1])}. Replicate the module."
        )
    if inner % size:
        raise PlanError(
            f"module {name!r}: the {inner} inner features of an expert are not divisible by the {size} tensor-parallel "
            f"ranks. Use a number of ranks that divides {inner}."
        )
    return {"gate_up_proj": ParamShard(1, (inner, inner)), "down_proj": ParamShard(2, (inner,))}


_CHECKS: dict[type, Callable[..., Mapping[str, ParamShard]]] = {
    Column: _column,
    Row: _row,
    Vocab: _vocab,
    Features: _features,
    ExpertFeatures: _experts,
}


# --- shared parameters -----------------------------------------------------------------------------------------------


def _check_shared(result: Resolved, modules: Mapping[str, nn.Module]) -> None:
    """Check that a shared parameter is sharded in the same way by every module that owns it."""
    shards: dict[int, tuple[Owned, ParamShard]] = {}
    owners: set[tuple[int, str]] = set()
    for owned, shard in result.shards():
        first, before = shards.setdefault(id(owned.parameter), (owned, shard))
        owners.add((id(owned.module), owned.key))
        if before != shard:
            raise PlanError(
                f"{first.name} and {owned.name} are one parameter, but the plan shards it as {before} and as {shard}. "
                "Give both modules styles that shard it in the same way (an embedding and its output head: 'vocab')."
            )
    for name, module in modules.items():
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) in shards and (id(module), key) not in owners:
                raise PlanError(
                    f"{f'{name}.{key}'.lstrip('.')} and {shards[id(parameter)][0].name} are one parameter, but the "
                    "plan shards only the latter. Give both modules styles that shard it in the same way (an embedding "
                    "and its output head: 'vocab')."
                )
