"""DeepSpeed's explicit form of a tensor-parallel plan: of each class of blocks, the linear layers that are summed.

::

    {T5Block: ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo")}

What is named is divided by its input (row), and its outputs are summed over the ranks; every other linear layer of
such a block is divided by its output (column). Keys are classes, or their names. A name may leave out the beginning.

Unlike DeepSpeed, heads stay whole whatever the widths are, a fused layer whose layout is not known is refused instead
of guessed, and so is a column layer that no row layer closes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import nn

from ls_strategy.errors import PlanError
from ls_strategy.moe.sparse import SparseLayer
from ls_strategy.parallel import families
from ls_strategy.parallel.families import Role
from ls_strategy.parallel.heads import width_in, width_out
from ls_strategy.parallel.plan_from_names import Attention, Found, shared_beginning, uniform_blocks
from ls_strategy.parallel.resolved_plan import is_conv1d, plain_name
from ls_strategy.parallel.styles import Column, Row
from ls_strategy.parallel.vocabulary import vocabulary

Policy: TypeAlias = Mapping[type[nn.Module] | str, Sequence[str] | str]

_SEPARATE: tuple[Role, ...] = ("query", "key", "value")


def is_policy(model: nn.Module, given: Mapping[object, object]) -> bool:
    """Whether the keys are classes, or names of classes of the model's modules; patterns of names are neither."""
    classes = {cls.__name__ for m in model.modules() for cls in type(m).__mro__}
    return all(isinstance(key, type) or key in classes for key in given)


def styles_of_policy(model: nn.Module, policy: Policy, size: int) -> Found:
    """Styles of the blocks, by full name, and of the vocabulary.

    Args:
        model: whole; on meta or not.
        policy: class of a block, or its name -> names of the linear layers whose outputs are summed.
        size: ranks.

    Raises:
        PlanError: a class or a name is not there, or a block cannot be divided in this way.
    """
    found: Found = {}
    for key, given in policy.items():
        names = [given] if isinstance(given, str) else list(given)
        blocks = {plain_name(name): m for name, m in model.named_modules() if _is_a(m, key)}
        if not blocks:
            classes = sorted({type(m).__name__ for _, m in uniform_blocks(model)})
            raise PlanError(
                f"injection_policy names the class {_class_name(key)!r}, of which the model has no module. "
                f"The classes of its repeated blocks: {', '.join(classes) or 'none'}."
            )
        _check_names(_class_name(key), names, blocks)
        for name, block in blocks.items():
            found |= _Block(name, block, names).styles(size)
    inside = {id(m) for _, block in uniform_blocks(model) for m in block.modules()}
    return found | vocabulary(model, inside, size)


def _is_a(module: nn.Module, key: type[nn.Module] | str) -> bool:
    if isinstance(key, str):
        return any(cls.__name__ == key for cls in type(module).__mro__)
    return isinstance(module, key)


def _class_name(key: type[nn.Module] | str) -> str:
    return key if isinstance(key, str) else key.__name__


def _check_names(cls: str, names: Sequence[str], blocks: Mapping[str, nn.Module]) -> None:
    """Each must be a linear layer of some of the blocks: of T5's, only those of the decoder have cross attention."""
    linears = sorted({name for block in blocks.values() for name in _linears(block)})
    if not names:
        raise PlanError(
            f"injection_policy names no layer of {cls}. Name those whose outputs are summed over the ranks, among "
            f"{', '.join(linears)}."
        )
    for name in names:
        if not any(_matches(linear, [name]) for linear in linears):
            raise PlanError(
                f"injection_policy names {name!r}, but {cls} has no such linear layer. It has {', '.join(linears)}."
            )


def _linears(block: nn.Module) -> dict[str, nn.Module]:
    """The block's linear layers by name in it; experts are divided by expert parallelism, or not at all."""
    whole = tuple(f"{name}." for name, m in block.named_modules() if isinstance(m, SparseLayer))
    return {
        plain_name(name): m
        for name, m in block.named_modules()
        if (isinstance(m, nn.Linear) or is_conv1d(m)) and not f"{name}.".startswith(whole)
    }


def _matches(linear: str, names: Sequence[str]) -> bool:
    endings = [name.strip(".") for name in names]
    return any(linear == ending or linear.endswith(f".{ending}") for ending in endings)


@dataclass
class _Block:
    """One block of a class that the policy names."""

    name: str
    module: nn.Module
    summed: Sequence[str]
    modules: dict[str, nn.Module] = field(init=False)
    """All of it, by full name."""

    rows: list[str] = field(init=False)
    columns: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.modules = {self._full(plain_name(name)): m for name, m in self.module.named_modules()}
        linears = _linears(self.module)
        self.rows = [self._full(name) for name in linears if _matches(name, self.summed)]
        self.columns = [self._full(name) for name in linears if not _matches(name, self.summed)]

    def _full(self, name: str) -> str:
        return ".".join(part for part in (self.name, name) if part)

    def styles(self, size: int) -> Found:
        """Styles of the linear layers and of what belongs to their attentions."""
        found: Found = {}
        by_owner: defaultdict[str, list[str]] = defaultdict(list)
        for column in self.columns:
            by_owner[column.rpartition(".")[0]].append(column)
        for owner, columns in by_owner.items():
            layers = self._attention(owner, columns)
            if layers:
                layers["out"] = self._closing(owner, columns[0])
                found |= Attention(owner, self.modules[owner], layers, self.modules).styles(size)
        rows = [row for row in self.rows if row not in found]
        found |= {name: self._up(name, rows) for name in self.columns if name not in found}
        return found | {name: Row() for name in self.rows if name not in found}

    def _attention(self, owner: str, columns: list[str]) -> dict[Role, str]:
        """Query, key and value layers among those of one module, by name or, with a number of heads, by width."""
        named = {families.ROLES.get(column.rpartition(".")[2]): column for column in columns}
        if "fused" in named:
            return {"fused": named["fused"]}
        if set(_SEPARATE) <= set(named):
            return {role: named[role] for role in _SEPARATE}
        counts = families.HEAD_COUNTS | families.KEY_HEAD_COUNTS
        if not any(isinstance(getattr(self.modules[owner], key, None), int) for key in counts):
            return {}
        if len(columns) != 3:
            raise PlanError(
                f"injection_policy: {owner!r} ({type(self.modules[owner]).__name__}) counts heads, but makes query, "
                f"key and value in {len(columns)} layers ({', '.join(columns)}), whose layout is not known. Give a "
                'plan by names instead, {"pattern.of.modules.*": "column", ...}, with sections and granule.'
            )
        widest_first = sorted(columns, key=lambda column: -width_out(self.modules[column]))
        return dict(zip(_SEPARATE, widest_first, strict=True))

    def _closing(self, owner: str, column: str) -> str:
        """The row layer that takes what the module's heads make: the one with the most similar name."""
        if not self.rows:
            raise self._unclosed(column, "has no layer that is summed behind it")
        return max(self.rows, key=lambda row: shared_beginning(owner, row))

    def _up(self, column: str, rows: list[str]) -> Column:
        """The style of a first layer of a feed-forward, by those summed layers that close no attention."""
        made = width_out(self.modules[column])
        close = max((shared_beginning(column, row) for row in rows), default=0)
        taken = {width_in(self.modules[row]) for row in rows if shared_beginning(column, row) == close}
        if made in taken:
            return Column()
        if made in {2 * width for width in taken}:  # gate and up in one matrix, one after the other
            return Column(sections=(-1, -1))
        raise self._unclosed(column, f"makes {made} features, which no layer that is summed takes")

    def _unclosed(self, column: str, why: str) -> PlanError:
        cls = type(self.module).__name__
        rows = [row[len(self.name) :].strip(".") for row in self.rows]
        return PlanError(
            f"injection_policy for {cls}: {column!r} {why} (summed are {', '.join(rows) or 'none'} of {self.name!r}). "
            "Name the layer that closes it, too, or give a plan by names, which leaves whole what it does not name."
        )
