"""DeepSpeed's ``injection_policy``: a tensor-parallel plan that names the row-parallel layers of each class of blocks.

::

    {T5Block: ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo")}

The named layers are row-parallel, every other linear layer of these blocks is column-parallel. Keys are classes or
their names. A layer's name may omit leading components.

Unlike in DeepSpeed, heads are never split. A fused layer of unknown layout raises an error, as does a column-parallel
layer without a row-parallel layer after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import nn

from ls_strategy.blocks import is_linear
from ls_strategy.errors import PlanError
from ls_strategy.parallel.styles import Column, Row
from ls_strategy.parallel.tensor import families
from ls_strategy.parallel.tensor.families import Role
from ls_strategy.parallel.tensor.heads import width_in, width_out
from ls_strategy.parallel.tensor.plan_from_names import (
    SEPARATE,
    Attention,
    Found,
    outside_experts,
    shared_prefix,
    uniform_blocks,
)
from ls_strategy.parallel.tensor.resolved_plan import plain_name
from ls_strategy.parallel.tensor.vocabulary import vocabulary

Policy: TypeAlias = Mapping[type[nn.Module] | str, Sequence[str] | str]
"""Class of a block, or its name -> names of its row-parallel layers."""


def is_policy(model: nn.Module, given: Mapping[object, object]) -> bool:
    """Return whether every key is a class, or the name of a class of the model's modules, not a pattern of names."""
    classes = {cls.__name__ for m in model.modules() for cls in type(m).__mro__}
    return all(isinstance(key, type) or key in classes for key in given)


def styles_of_policy(model: nn.Module, policy: Policy, size: int) -> Found:
    """Return the styles of the blocks and of the vocabulary on ``size`` ranks, by full name.

    Raises:
        PlanError: The model has no such class or layer, or a block cannot be sharded in this way.
    """
    found: Found = {}
    for key, given in policy.items():
        cls = key if isinstance(key, str) else key.__name__
        names = [given] if isinstance(given, str) else list(given)
        blocks = {plain_name(name): m for name, m in model.named_modules() if _is_a(m, key)}
        if not blocks:
            classes = sorted({type(m).__name__ for _, m in uniform_blocks(model)})
            raise PlanError(
                f"injection_policy names the class {cls!r}, but the model has no module of that class. "
                f"Use one of the classes of its repeated blocks: {', '.join(classes) or 'none'}."
            )
        _check_names(cls, names, blocks)
        for name, block in blocks.items():
            found |= _PolicyBlock(name, block, names).styles(size)
    return found | vocabulary(model, size)


def _is_a(module: nn.Module, key: type[nn.Module] | str) -> bool:
    if isinstance(key, str):
        return any(cls.__name__ == key for cls in type(module).__mro__)
    return isinstance(module, key)


def _check_names(cls: str, names: Sequence[str], blocks: Mapping[str, nn.Module]) -> None:
    """Check that each name is a linear layer of at least one block: only T5's decoder blocks have cross-attention."""
    linears = sorted({name for block in blocks.values() for name in _linears(block)})
    if not names:
        raise PlanError(
            f"injection_policy names no layer of {cls}. Name the row-parallel layers, among {', '.join(linears)}."
        )
    for name in names:
        if not any(_matches(linear, [name]) for linear in linears):
            raise PlanError(
                f"injection_policy names {name!r}, but {cls} has no such linear layer. Use one of {', '.join(linears)}."
            )


def _linears(block: nn.Module) -> dict[str, nn.Module]:
    """Return the block's linear layers by relative name."""
    return {plain_name(name): m for name, m in outside_experts(block) if is_linear(m)}


def _matches(linear: str, names: Sequence[str]) -> bool:
    endings = [name.strip(".") for name in names]
    return any(linear == ending or linear.endswith(f".{ending}") for ending in endings)


@dataclass
class _PolicyBlock:
    """One block, of a class that the policy names."""

    name: str
    module: nn.Module
    row_names: Sequence[str]
    modules: dict[str, nn.Module] = field(init=False)
    """Modules of the block by full name."""

    rows: list[str] = field(init=False)
    columns: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.modules = {self._full(plain_name(name)): m for name, m in self.module.named_modules()}
        linears = _linears(self.module)
        self.rows = [self._full(name) for name in linears if _matches(name, self.row_names)]
        self.columns = [self._full(name) for name in linears if not _matches(name, self.row_names)]

    def _full(self, name: str) -> str:
        return ".".join(part for part in (self.name, name) if part)

    def styles(self, size: int) -> Found:
        found: Found = {}
        by_owner: defaultdict[str, list[str]] = defaultdict(list)
        for column in self.columns:
            by_owner[column.rpartition(".")[0]].append(column)
        for owner, columns in by_owner.items():
            layers = self._attention(owner, columns)
            if layers:
                if not self.rows:
                    raise self._unpaired(columns[0], "has no row-parallel layer after it")
                # Of the row-parallel layers, the one that shares the longest prefix with its name.
                layers["out"] = max(self.rows, key=lambda row: shared_prefix(owner, row))
                found |= Attention(owner, self.modules[owner], layers, self.modules).styles(size)
        rows = [row for row in self.rows if row not in found]
        found |= {name: self._up(name, rows) for name in self.columns if name not in found}
        return found | {name: Row() for name in self.rows if name not in found}

    def _attention(self, owner: str, columns: list[str]) -> dict[Role, str]:
        """Return the query, key and value layers of one module: by name, or by width if the module counts heads."""
        named = {families.ROLES.get(column.rpartition(".")[2]): column for column in columns}
        if "fused" in named:
            return {"fused": named["fused"]}
        if set(SEPARATE) <= set(named):
            return {role: named[role] for role in SEPARATE}
        counts = families.HEAD_COUNTS | families.KEY_HEAD_COUNTS
        if not any(isinstance(getattr(self.modules[owner], key, None), int) for key in counts):
            return {}
        if len(columns) != 3:
            raise PlanError(
                f"injection_policy: {owner!r} ({type(self.modules[owner]).__name__}) counts heads, but computes query, "
                f"key and value by {len(columns)} layers ({', '.join(columns)}) of unknown layout. Set a plan by names "
                'instead, {"pattern.of.modules.*": "column", ...}, with sections and granule.'
            )
        widest_first = sorted(columns, key=lambda column: -width_out(self.modules[column]))
        return dict(zip(SEPARATE, widest_first, strict=True))

    def _up(self, column: str, rows: list[str]) -> Column:
        """Return the style of the first layer of a feed-forward, given the row-parallel layers outside attentions."""
        width = width_out(self.modules[column])
        nearest = max((shared_prefix(column, row) for row in rows), default=0)
        taken = {width_in(self.modules[row]) for row in rows if shared_prefix(column, row) == nearest}
        if width in taken:
            return Column()
        if width in {2 * w for w in taken}:  # gate and up in one matrix, one after the other
            return Column(sections=(-1, -1))
        raise self._unpaired(column, f"computes {width} features, which no row-parallel layer takes")

    def _unpaired(self, column: str, why: str) -> PlanError:
        cls = type(self.module).__name__
        rows = [row[len(self.name) :].strip(".") for row in self.rows]
        return PlanError(
            f"injection_policy for {cls}: {column!r} {why} (named are {', '.join(rows) or 'none'} of {self.name!r}). "
            "Name the row-parallel layer that follows it as well, or set a plan by names, which replicates what it "
            "does not name."
        )
