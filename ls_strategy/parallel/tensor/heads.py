"""The heads of an attention module: their counts, the attributes that hold them, and what its forward relies on.

Every tensor-parallel rank holds complete heads. Code that reshapes with ``-1`` and the size of a head works as it is.
Code that reshapes with the number of heads needs the local number in that attribute. Code that takes the width of all
heads from its input cannot work; reading its source finds it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ls_strategy.blocks import is_conv1d
from ls_strategy.errors import PlanError
from ls_strategy.parallel.styles import Attributes
from ls_strategy.parallel.tensor import families

_RESHAPES = frozenset(("view", "reshape", "split", "expand", "unflatten", "chunk"))


def refusal(name: str, module: nn.Module, why: str, example: str = "") -> PlanError:
    """Return the error for a module that the automatic plan cannot shard."""
    cure = example or f'{{"{starred(name)}": ...}}'
    return PlanError(
        f'tensor parallelism with plan "auto": module {name!r} ({type(module).__name__}) {why}. Set the complete plan, '
        f"parallel.tensor.plan={cure}, with the styles column, row, vocab, features, replicate and divide:<attribute>. "
        "Modules that it does not name are replicated."
    )


def starred(name: str) -> str:
    """Replace layer numbers in a name by ``*``."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def width_in(module: nn.Module) -> int:
    """Return the number of input features of a linear layer or a Conv1D."""
    return int(module.weight.shape[0 if is_conv1d(module) else 1])  # type: ignore[union-attr, index, arg-type]


def width_out(module: nn.Module) -> int:
    """Return the number of output features of a linear layer or a Conv1D."""
    return int(module.weight.shape[1 if is_conv1d(module) else 0])  # type: ignore[union-attr, index, arg-type]


@dataclass(frozen=True)
class Heads:
    """The numbers of query heads and of key and value heads of one attention module."""

    query: int
    key: int
    size: int
    """Number of features of one head."""

    @classmethod
    def of(cls, name: str, module: nn.Module, query: int, key: int) -> Heads:
        """Read the attributes of the attention ``module`` called ``name``, or of its ``config``.

        ``query`` and ``key`` are the output features of the query and key layers.

        Raises:
            PlanError: Neither the number nor the size of the heads is known, or they contradict the layers' widths.
        """
        size = _integer(module, families.HEAD_SIZES)
        count = _integer(module, sorted(families.HEAD_COUNTS))
        if size is None and count is None:
            known = ", ".join((*families.HEAD_SIZES, *sorted(families.HEAD_COUNTS)))
            raise refusal(name, module, f"has none of the attributes that hold the number of heads: {known}")
        if size is None:
            assert count is not None
            size = query // count
        count = query // size if count is None else count
        if count * size != query or key % size or count % (key // size or 1):
            raise refusal(
                name,
                module,
                f"has {count} heads of {size} features, but its query and key layers have {query} and {key} features",
            )
        return cls(count, key // size, size)

    def check(self, name: str, module: nn.Module, ranks: int) -> None:
        """Raise `PlanError` if the heads cannot be sharded over ``ranks``."""
        if self.query % ranks:
            raise PlanError(
                f"module {name!r} ({type(module).__name__}) has {self.query} attention heads, which is not divisible "
                f"by parallel.tensor={ranks}. Use a size that divides {self.query}."
            )
        if self.key % ranks and ranks % self.key:
            raise PlanError(
                f"module {name!r} ({type(module).__name__}) has {self.key} key and value heads, which is neither a "
                f"multiple nor a divisor of parallel.tensor={ranks}. Use a size that divides {self.key}, or a multiple "
                "of it."
            )

    def copies(self, ranks: int) -> int:
        """Return the number of adjacent ranks that hold the same key and value head."""
        return max(ranks // self.key, 1)

    def attributes(self, name: str, module: nn.Module, ranks: int) -> Attributes | None:
        """Return the local values of the module's integer attributes; None if none changes.

        Raises:
            PlanError: Its forward relies on widths that differ from those of the local heads.
        """
        uses = _Uses.of(name, module)
        unsharded = families.UNSHARDED_WIDTHS.get(type(module).__name__, ())
        local_key = max(self.key // ranks, 1)
        values: dict[str, int] = {}
        for key, value in vars(module).items():
            if not isinstance(value, int) or isinstance(value, bool):
                continue
            if key in families.HEAD_COUNTS and value == self.query:
                values[key] = self.query // ranks
            elif key in families.KEY_HEAD_COUNTS and value == self.key:
                values[key] = local_key
            elif key in families.GROUP_COUNTS and value == self.query // self.key:
                values[key] = self.query // ranks // local_key
            elif value == self.query * self.size and uses.is_joint_width(key):
                values[key] = value // ranks
            elif key in families.MODEL_WIDTHS and uses.is_ambiguous(key) and key not in unsharded:
                raise refusal(
                    name,
                    module,
                    f"computes with self.{key} = {value} in {uses.methods(key)}, which may mean the width of the model "
                    "or of the local heads. Reshape with -1 and the size of a head instead",
                )
        changed = tuple((key, value) for key, value in values.items() if value != getattr(module, key))
        return Attributes(changed) if changed else None


def head_size(module: nn.Module) -> int | None:
    """Return the number of features of one head, if the module or its ``config`` holds it."""
    return _integer(module, families.HEAD_SIZES)


def _integer(module: nn.Module, names: Any) -> int | None:
    """Return the first of ``names`` that is a positive integer attribute of the module, or else of its ``config``."""
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


class _Uses:
    """Uses of ``self.<name>`` in the methods of a module's class, except its constructor."""

    def __init__(self) -> None:
        self._contexts: defaultdict[str, set[str]] = defaultdict(set)
        self._methods: defaultdict[str, set[str]] = defaultdict(set)

    @classmethod
    def of(cls, name: str, module: nn.Module) -> _Uses:
        """Read the source of the module's class.

        Raises:
            PlanError: There is none, or forward takes the width of all heads from its input.
        """
        uses = cls()
        for method in _methods(name, module):
            width = _input_width(method)
            if width is not None:
                raise refusal(
                    name,
                    module,
                    f"takes the width of all heads from the shape of its input ({width!r} in {method.name}()), which "
                    "is not sharded, while its heads are. Reshape with -1 and the size of a head instead",
                )
            for key, context in _reads(method, ""):
                uses._contexts[key].add(context)
                uses._methods[key].add(method.name)
        return uses

    def is_joint_width(self, key: str) -> bool:
        """Return whether ``self.key`` is the width of all local heads: by its name, or since only reshapes use it."""
        if key in families.JOINT_WIDTHS:
            return True
        return key in families.MODEL_WIDTHS and self._contexts.get(key) == {"shape"}

    def is_ambiguous(self, key: str) -> bool:
        """Return whether ``self.key`` is used outside of checks, so that its meaning matters."""
        return not self._contexts.get(key, set()) <= {"check"}

    def methods(self, key: str) -> str:
        """List the methods that read ``self.key``."""
        return ", ".join(f"{method}()" for method in sorted(self._methods[key]))


def _methods(name: str, module: nn.Module) -> Iterator[ast.FunctionDef]:
    """Yield the methods of the module's class, and those of its bases up to torch's that it does not override."""
    overridden = {"__init__"}
    for cls in type(module).__mro__:
        if cls.__module__.startswith("torch.") or not issubclass(cls, nn.Module):
            return
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        except (OSError, TypeError, SyntaxError) as error:
            raise refusal(name, module, "has no readable source, so that its reshapes cannot be checked") from error
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        methods = [node for node in body if isinstance(node, ast.FunctionDef) and node.name not in overridden]
        yield from methods
        overridden |= {method.name for method in methods if not _calls_super(method)}


def _calls_super(method: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "super" for node in ast.walk(method))


def _reads(node: ast.AST, context: str) -> Iterator[tuple[str, str]]:
    """Yield ``(name, context)`` of every ``self.name`` under ``node``: "shape", "check" or "" for anything else."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        yield node.attr, context
        return
    if isinstance(node, ast.Raise):
        return  # the text of an error
    if isinstance(node, ast.Compare):
        context = "check"
    elif isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load):
        context = "shape"
    elif isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Add):
        context = ""  # the result of arithmetic is another quantity
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _RESHAPES:
        yield from _reads(node.func, context)
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            yield from _reads(argument, "shape")
        return
    for child in ast.iter_child_nodes(node):
        yield from _reads(child, context)


def _input_width(method: ast.FunctionDef) -> str | None:
    """Return the variable that receives the last of three dimensions of a tensor, if the method uses it later."""
    names: set[str] = set()
    for node in ast.walk(method):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and _is_shape(node.value):
            last = node.targets[0].elts[-1]
            if len(node.targets[0].elts) == 3 and isinstance(last, ast.Name) and last.id != "_":
                names.add(last.id)
    checked = {id(n) for c in ast.walk(method) if isinstance(c, ast.Compare | ast.Raise) for n in ast.walk(c)}
    loads = (n for n in ast.walk(method) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
    return next((node.id for node in loads if node.id in names and id(node) not in checked), None)


def _is_shape(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr == "size" and not node.args
    return isinstance(node, ast.Attribute) and node.attr == "shape"
