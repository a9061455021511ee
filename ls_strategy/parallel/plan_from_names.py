"""A tensor-parallel plan from the names and shapes of a model's layers, for the common blocks of transformers.

Of every repeated block all is understood, or the model is refused: each linear layer is one of query, key, value (or
all fused), out, up and down; whatever else has parameters is a norm of the model's width, or known by name. Every
first layer is paired with the layer that closes its group, and their widths must agree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import nn

from ls_strategy.blocks import CONTAINERS, outermost
from ls_strategy.errors import PlanError
from ls_strategy.moe.sparse import SparseLayer
from ls_strategy.parallel import families
from ls_strategy.parallel.families import Role
from ls_strategy.parallel.fused import fused_heads
from ls_strategy.parallel.heads import Heads, refusal, width_in, width_out
from ls_strategy.parallel.resolved_plan import is_conv1d, plain_name
from ls_strategy.parallel.styles import Column, Features, PartialGradient, Row, Style

Found: TypeAlias = dict[str, Style]
"""By full name of the module."""


_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
_FUSED_TORCH = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def uniform_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children of the outermost lists of modules of one class, by name: the layers of the network."""
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
    return several and len(classes) == 1 and any(_is_linear(m) for c in children for m in list(c.modules())[1:])


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_conv1d(module)


def infer(model: nn.Module, size: int) -> Found:
    """Styles of all repeated blocks.

    Args:
        model: with full parameters, on meta or not.
        size: ranks.

    Raises:
        PlanError: something in a block is not understood, or does not divide.
    """
    blocks = uniform_blocks(model)
    if not blocks:
        raise PlanError(
            'tensor parallelism with plan "auto": the model has no list of repeated blocks (nn.ModuleList or '
            "nn.Sequential of modules of one class with linear layers), and no plan of its own. Give "
            'parallel.tensor.plan={"pattern.of.modules.*": "column", ...}, or a method tensor_parallel_plan() on the '
            "module."
        )
    found: Found = {}
    for name, module in blocks:
        found.update(_Block(name, module).styles(size))
    return found


@dataclass
class Attention:
    """The linear layers of one attention, by role."""

    name: str
    module: nn.Module
    layers: dict[Role, str]
    """Full names."""

    modules: Mapping[str, nn.Module]

    def styles(self, size: int) -> Found:
        """Styles of the layers, and integers of the module.

        Raises:
            PlanError: heads do not divide, or are not known.
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
        missing = [role for role in ("query", "key", "value") if role not in self.layers]
        if missing:
            raise refusal(self.name, self.module, f"has no {missing[0]} layer that is known by name")
        query, key, value = (self.modules[self.layers[role]] for role in ("query", "key", "value"))
        heads = self._heads(width_out(query), width_out(key))
        heads.check(self.name, self.module, size)
        value_size, rest = divmod(width_out(value), heads.key)
        if rest:
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

    def _heads(self, query: int, key: int) -> Heads:
        return Heads.of(self.name, self.module, query, key)

    def _close(self, heads: Heads, value_size: int, size: int) -> Found:
        """The out layer, and the module's integers."""
        out = self.layers["out"]
        if width_in(self.modules[out]) != heads.query * value_size:
            raise refusal(
                out,
                self.modules[out],
                f"takes {width_in(self.modules[out])} features, but {heads.query} heads of {value_size} come in",
            )
        found: Found = {out: Row(granule=value_size)}
        attributes = heads.attributes(self.name, self.module, size)
        if attributes is not None:
            found[self.name] = attributes
        return found

    def _check_norm(self, name: str, norm: nn.Module) -> None:
        reference = self.modules[self.layers.get("query") or self.layers["fused"]]
        heads = self._heads(width_out(reference), width_out(self.modules.get(self.layers.get("key", ""), reference)))
        for parameter in norm.parameters():
            if parameter.numel() != heads.size:
                raise refusal(
                    name,
                    norm,
                    f"has {parameter.numel()} features: a norm over all heads, of which a rank has some only",
                )


@dataclass
class _Block:
    """One block, while its layers are sorted out."""

    name: str
    module: nn.Module
    modules: dict[str, nn.Module] = field(init=False)
    roles: dict[str, Role] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        # Experts are divided by expert parallelism, or not at all.
        whole = tuple(f"{name}." for name, m in self.module.named_modules() if isinstance(m, SparseLayer))
        named = ((name, m) for name, m in self.module.named_modules() if not f"{name}.".startswith(whole))
        self.modules = {self._full(name): m for name, m in named}

    def _full(self, name: str) -> str:
        return plain_name(f"{self.name}.{name}" if name else self.name)

    def styles(self, size: int) -> Found:
        """Styles of everything in the block that is not whole."""
        linears = {name: m for name, m in self.modules.items() if _is_linear(m)}
        self._refuse_special()
        for name, linear in linears.items():
            self.roles[name] = self._role(name, linear, linears)
        found: Found = {}
        divided: set[int] = set()
        for attention in self._attentions():
            found |= attention.styles(size)
        for down, ups in self._feed_forwards():
            found |= self._pair(down, ups)
            divided.add(width_in(self.modules[down]))
        self._check_rest(linears, found, divided)
        return found

    def _refuse_special(self) -> None:
        """What is no plain module: torch's fused layers, experts, quantised layers."""
        for name, module in self.modules.items():
            if isinstance(module, _FUSED_TORCH):
                raise refusal(
                    name,
                    module,
                    "uses its fused weights inside one function, where they cannot be divided from outside",
                )
            if "expert" in type(module).__name__.lower() or name.endswith(".experts"):
                raise refusal(name, module, "is a mixture of experts, which tensor parallelism does not divide here")
            for parameter in module.parameters(recurse=False):
                if not parameter.is_floating_point():
                    raise refusal(name, module, f"is quantised ({parameter.dtype} weights), and cannot be divided")

    def _role(self, name: str, linear: nn.Module, linears: Mapping[str, nn.Module]) -> Role:
        parent = name.rpartition(".")[0]
        siblings = [n.rpartition(".")[2] for n in linears if n != name and n.rpartition(".")[0] == parent]
        role = families.role_of(name[len(self.name) + 1 :], siblings)
        if role is None:
            raise refusal(
                name,
                linear,
                f"({width_in(linear)} -> {width_out(linear)}) is a linear layer of a repeated block that no known name "
                "tells whether it is divided by its output (column) or its input (row)",
            )
        return role

    def _with(self, *roles: Role) -> list[str]:
        return [name for name, role in self.roles.items() if role in roles]

    def _attentions(self) -> Iterator[Attention]:
        owners: defaultdict[str, dict[Role, str]] = defaultdict(dict)
        for name in self._with("query", "key", "value", "fused"):
            layers = owners[name.rpartition(".")[0]]
            if self.roles[name] in layers:
                raise refusal(name, self.modules[name], f"is a second {self.roles[name]} layer of one attention")
            layers[self.roles[name]] = name
        closing = self._with("out")
        for owner, layers in owners.items():
            layers["out"] = self._closest(owner, closing, self.modules[owner])
            closing.remove(layers["out"])
            yield Attention(owner, self.modules[owner], layers, self.modules)
        if closing:
            raise refusal(closing[0], self.modules[closing[0]], "closes an attention whose query layer is not known")

    def _feed_forwards(self) -> Iterator[tuple[str, list[str]]]:
        groups: dict[str, list[str]] = {name: [] for name in self._with("down")}
        for up in self._with("up"):
            groups[self._closest(up, list(groups), self.modules[up])].append(up)
        for down, ups in groups.items():
            if not ups:
                raise refusal(down, self.modules[down], "closes a feed-forward whose first layer is not known")
            yield down, ups

    def _closest(self, name: str, candidates: list[str], module: nn.Module) -> str:
        """Of ``candidates`` the one that shares the longest beginning of its name with ``name``."""
        if not candidates:
            raise refusal(name, module, "has no closing (row) layer that is known by name")
        return max(candidates, key=lambda candidate: shared_beginning(name, candidate))

    def _pair(self, down: str, ups: list[str]) -> Found:
        for up in ups:
            if width_out(self.modules[up]) != width_in(self.modules[down]):
                raise refusal(
                    up,
                    self.modules[up],
                    f"makes {width_out(self.modules[up])} features, but {down!r}, which should take them, takes "
                    f"{width_in(self.modules[down])}",
                )
        found: Found = {down: Row()}
        found.update((up, Column()) for up in ups)
        return found

    def _check_rest(self, linears: Mapping[str, nn.Module], found: Found, divided: set[int]) -> None:
        """What is no linear layer must be a norm of the model's width, or known by name."""
        model_widths = {width_out(self.modules[name]) for name in self._with("out", "down")}
        for name, module in self.modules.items():
            if name in linears or (name in found and name != self.name and not list(module.children())):
                continue
            for key, parameter in module.named_parameters(recurse=False):
                whole = parameter.numel() in model_widths or parameter.numel() == 1
                is_norm = isinstance(module, _NORMS) or "norm" in type(module).__name__.lower()
                if not whole or (not is_norm and parameter.dim() > 1):
                    between = " between layers that are divided" if parameter.numel() in divided else ""
                    raise refusal(
                        name,
                        module,
                        f"has a parameter {key!r} of shape {tuple(parameter.shape)}{between} that is not understood",
                    )


def shared_beginning(one: str, other: str) -> int:
    """Components that two names have in common at their beginning."""
    count = 0
    for mine, its in zip(one.split("."), other.split("."), strict=False):
        if mine != its:
            break
        count += 1
    return count
