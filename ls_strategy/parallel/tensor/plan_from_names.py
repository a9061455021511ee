"""Derive a tensor-parallel plan from the names and shapes of a model's layers, for common transformer blocks.

Every layer of a repeated block must be recognised, or the model is refused. Each linear layer is a query, key, value
(or fused), out, up or down layer. Any other module with parameters is a norm of the model's width, or known by name.
Every column-parallel layer is paired with the row-parallel layer that follows it, and their widths must agree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import nn

from ls_strategy.blocks import CONTAINERS, is_linear, outermost
from ls_strategy.errors import PlanError
from ls_strategy.moe.sparse import SparseLayer
from ls_strategy.parallel.styles import Column, Features, PartialGradient, Row, Style
from ls_strategy.parallel.tensor import families
from ls_strategy.parallel.tensor.families import Role
from ls_strategy.parallel.tensor.fused import fused_heads
from ls_strategy.parallel.tensor.heads import Heads, refusal, width_in, width_out
from ls_strategy.parallel.tensor.resolved_plan import plain_name

Found: TypeAlias = dict[str, Style]
"""Styles by full name of the module."""

SEPARATE: tuple[Role, ...] = ("query", "key", "value")
"""Roles of the layers of an attention without a fused layer."""

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
_FUSED_TORCH = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def uniform_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return ``(name, block)`` of the repeated blocks: the children of the outermost lists of modules of one class."""
    return [
        (plain_name(f"{name}.{key}" if name else key), child)
        for name, module in outermost(model, _looks_repeated)
        for key, child in module.named_children()
    ]


def _looks_repeated(module: nn.Module) -> bool:
    children = list(module.children())
    if not isinstance(module, CONTAINERS) or not children:
        return False
    classes = {type(child) for child in children}
    several = len(children) > 1 or isinstance(module, nn.ModuleList)
    return several and len(classes) == 1 and any(is_linear(m) for c in children for m in list(c.modules())[1:])


def outside_experts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the named modules outside MoE layers: only expert parallelism shards these."""
    skipped = tuple(f"{name}." for name, m in module.named_modules() if isinstance(m, SparseLayer))
    return ((name, m) for name, m in module.named_modules() if not f"{name}.".startswith(skipped))


def infer(model: nn.Module, size: int) -> Found:
    """Return the styles of all repeated blocks on ``size`` ranks.

    Raises:
        PlanError: A layer of a block is not recognised, or cannot be sharded over the ranks.
    """
    blocks = uniform_blocks(model)
    if not blocks:
        raise PlanError(
            'tensor parallelism with plan "auto": the model has no list of repeated blocks (nn.ModuleList or '
            "nn.Sequential of modules of one class with linear layers), and does not define a plan. Set "
            'parallel.tensor.plan={"pattern.of.modules.*": "column", ...}, or give the module a method '
            "tensor_parallel_plan()."
        )
    found: Found = {}
    for name, module in blocks:
        found.update(_NamedBlock(name, module).styles(size))
    return found


@dataclass
class Attention:
    """The linear layers of one attention, by role."""

    name: str
    module: nn.Module
    layers: dict[Role, str]
    """Full names of the layers."""

    modules: Mapping[str, nn.Module]

    def styles(self, size: int) -> Found:
        """Return the styles of the layers and of the module's integer attributes.

        Raises:
            PlanError: The heads are unknown, or cannot be sharded over the ranks.
        """
        fused = self.layers.get("fused")
        found = self._separate(size) if fused is None else self._fused(fused, size)
        for key, child in self.module.named_children():
            full = f"{self.name}.{key}"
            if key in families.HEAD_TABLES:
                found[full] = Features()
            elif key in families.HEAD_NORMS and any(True for _ in child.parameters()):
                self._check_norm(full, child)
                found[full] = PartialGradient()
        return found

    def _separate(self, size: int) -> Found:
        missing = [role for role in SEPARATE if role not in self.layers]
        if missing:
            raise refusal(self.name, self.module, f"has no {missing[0]} layer with a known name")
        query, key, value = (self.modules[self.layers[role]] for role in SEPARATE)
        heads = Heads.of(self.name, self.module, width_out(query), width_out(key))
        heads.check(self.name, self.module, size)
        value_size, remainder = divmod(width_out(value), heads.key)
        if remainder:
            raise refusal(self.layers["value"], value, f"has {width_out(value)} features for {heads.key} heads")
        copies = heads.copies(size)
        found: Found = {
            self.layers["query"]: Column(granule=heads.size),
            self.layers["key"]: Column(granule=heads.size, copies=copies),
            self.layers["value"]: Column(granule=value_size, copies=copies),
        }
        return found | self._close(heads, value_size, size)

    def _fused(self, fused: str, size: int) -> Found:
        heads, style = fused_heads(self.name, self.module, fused, self.modules[fused], size)
        if "query" in self.layers:
            raise refusal(self.name, self.module, "is cross attention with a fused key and value")
        return self._close(heads, heads.size, size) | {fused: style}

    def _close(self, heads: Heads, value_size: int, size: int) -> Found:
        """Return the styles of the out layer and of the module's integer attributes."""
        out = self.layers["out"]
        width = width_in(self.modules[out])
        if width != heads.query * value_size:
            why = f"takes {width} features, but gets {heads.query} heads of {value_size}"
            raise refusal(out, self.modules[out], why)
        found: Found = {out: Row(granule=value_size)}
        attributes = heads.attributes(self.name, self.module, size)
        if attributes is not None:
            found[self.name] = attributes
        return found

    def _check_norm(self, name: str, norm: nn.Module) -> None:
        query = self.modules[self.layers.get("query") or self.layers["fused"]]
        key = self.modules.get(self.layers.get("key", ""), query)
        heads = Heads.of(self.name, self.module, width_out(query), width_out(key))
        for parameter in norm.parameters():
            if parameter.numel() != heads.size:
                why = f"has {parameter.numel()} features: it is a norm over all heads, but a rank holds only some"
                raise refusal(name, norm, why)


@dataclass
class _NamedBlock:
    """One repeated block, and the roles of its layers."""

    name: str
    module: nn.Module
    modules: dict[str, nn.Module] = field(init=False)
    roles: dict[str, Role] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.modules = {
            plain_name(f"{self.name}.{name}" if name else self.name): m for name, m in outside_experts(self.module)
        }

    def styles(self, size: int) -> Found:
        """Return the styles of everything in the block that is not replicated."""
        linears = {name: m for name, m in self.modules.items() if is_linear(m)}
        self._refuse_special()
        for name, linear in linears.items():
            self.roles[name] = self._role(name, linear, linears)
        found: Found = {}
        sharded_widths: set[int] = set()
        for attention in self._attentions():
            found |= attention.styles(size)
        for down, ups in self._feed_forwards():
            taken = width_in(self.modules[down])
            for up in ups:
                width = width_out(self.modules[up])
                if width != taken:
                    raise self._refusal(up, f"computes {width} features, but {down!r}, which follows it, takes {taken}")
            found |= {down: Row(), **dict.fromkeys(ups, Column())}
            sharded_widths.add(width_in(self.modules[down]))
        self._check_others(linears, found, sharded_widths)
        return found

    def _refuse_special(self) -> None:
        """Refuse torch's fused layers, experts and quantised layers."""
        for name, module in self.modules.items():
            if isinstance(module, _FUSED_TORCH):
                raise self._refusal(name, "uses its fused weights inside one function, so hooks cannot shard them")
            if "expert" in type(module).__name__.lower() or name.endswith(".experts"):
                raise self._refusal(name, "is a mixture of experts, which this plan does not shard")
            for parameter in module.parameters(recurse=False):
                if not parameter.is_floating_point():
                    raise self._refusal(name, f"is quantised ({parameter.dtype} weights), and cannot be sharded")

    def _role(self, name: str, linear: nn.Module, linears: Mapping[str, nn.Module]) -> Role:
        parent = name.rpartition(".")[0]
        siblings = [n.rpartition(".")[2] for n in linears if n != name and n.rpartition(".")[0] == parent]
        role = families.role_of(name[len(self.name) + 1 :], siblings)
        if role is None:
            raise self._refusal(
                name,
                f"({width_in(linear)} -> {width_out(linear)}) is a linear layer of a repeated block whose name does "
                "not show whether it is column- or row-parallel",
            )
        return role

    def _with(self, *roles: Role) -> list[str]:
        return [name for name, role in self.roles.items() if role in roles]

    def _attentions(self) -> Iterator[Attention]:
        owners: defaultdict[str, dict[Role, str]] = defaultdict(dict)
        for name in self._with("query", "key", "value", "fused"):
            layers = owners[name.rpartition(".")[0]]
            if self.roles[name] in layers:
                raise self._refusal(name, f"is a second {self.roles[name]} layer of one attention")
            layers[self.roles[name]] = name
        outs = self._with("out")
        for owner, layers in owners.items():
            layers["out"] = self._closest(owner, outs)
            outs.remove(layers["out"])
            yield Attention(owner, self.modules[owner], layers, self.modules)
        if outs:
            raise self._refusal(outs[0], "is the last layer of an attention without a query layer")

    def _feed_forwards(self) -> Iterator[tuple[str, list[str]]]:
        groups: dict[str, list[str]] = {name: [] for name in self._with("down")}
        for up in self._with("up"):
            groups[self._closest(up, list(groups))].append(up)
        for down, ups in groups.items():
            if not ups:
                raise self._refusal(down, "is the last layer of a feed-forward without a first layer")
            yield down, ups

    def _closest(self, name: str, candidates: list[str]) -> str:
        """Return the candidate that shares the longest prefix of its name with ``name``."""
        if not candidates:
            raise self._refusal(name, "is followed by no row-parallel layer with a known name")
        return max(candidates, key=lambda candidate: shared_prefix(name, candidate))

    def _check_others(self, linears: Mapping[str, nn.Module], found: Found, sharded_widths: set[int]) -> None:
        """Check that every module besides linear layers is a norm of the model's width, or known by name."""
        model_widths = {width_out(self.modules[name]) for name in self._with("out", "down")}
        for name, module in self.modules.items():
            if name in linears or (name in found and name != self.name and not list(module.children())):
                continue
            for key, parameter in module.named_parameters(recurse=False):
                replicated = parameter.numel() in model_widths or parameter.numel() == 1
                is_norm = isinstance(module, _NORMS) or "norm" in type(module).__name__.lower()
                if not replicated or (not is_norm and parameter.dim() > 1):
                    between = " between sharded layers" if parameter.numel() in sharded_widths else ""
                    shape = tuple(parameter.shape)
                    raise self._refusal(
                        name, f"has a parameter {key!r} of shape {shape}{between} that is not recognised"
                    )

    def _refusal(self, name: str, why: str) -> PlanError:
        return refusal(name, self.modules[name], why)


def shared_prefix(one: str, other: str) -> int:
    """Return the number of leading components that two names have in common."""
    count = 0
    for a, b in zip(one.split("."), other.split("."), strict=False):
        if a != b:
            break
        count += 1
    return count
