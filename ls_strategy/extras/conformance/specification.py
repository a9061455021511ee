"""Strategies as the command line names them.

ddp                                     an alias of Lightning's registry
my_package.Mine(bucket_mib=4)           a class; arguments are literals, or devices: the number of ranks
mine=my_package.Mine @ my_package.shard
  |                    |
  |                    a function of the module, called in configure_model
  its name in the table
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any


class SpecificationError(ValueError):
    """A text that names no strategy."""


@dataclass(frozen=True)
class Specification:
    """A strategy, picklable: it is made again for every Trainer."""

    label: str
    target: str  # alias, or dotted path of a class
    # Keywords; the text ``devices`` as an `ast.Name` stands for the number of ranks.
    arguments: tuple[tuple[str, Any], ...] = ()
    prepare_path: str | None = None

    def make(self, devices: int) -> Any:
        """Return what ``Trainer(strategy=...)`` takes."""
        if "." not in self.target:
            return self.target
        keywords = {name: devices if value is _DEVICES else value for name, value in self.arguments}
        return found(self.target)(**keywords)

    def module(self) -> str | None:
        """Return the module of the strategy's class; None if it cannot be made here, which its runs will show."""
        from ls_strategy.extras.conformance.lightning import strategies

        try:
            made = self.make(1)
            made = strategies.StrategyRegistry.get(made) if isinstance(made, str) else made
        except Exception:
            return None
        return type(made).__module__

    @property
    def prepare(self) -> Callable[[Any], None] | None:
        """What the strategy's documentation asks for in ``configure_model``."""
        return None if self.prepare_path is None else found(self.prepare_path)

    def check(self) -> None:
        """Look up all names.

        Raises:
            SpecificationError: a name is missing.
        """
        if self.prepare_path is not None:
            found(self.prepare_path)
        if "." in self.target:
            found(self.target)
            return
        from ls_strategy.extras.conformance.lightning import strategies

        known = strategies.StrategyRegistry.available_strategies()
        if self.target not in list(known):
            raise SpecificationError(
                f"Got the strategy {self.target!r}, which is no alias of Lightning. Give a dotted path of a class, or "
                f"one of {', '.join(known)}."
            )


class _Devices:
    """Stands for the number of ranks; one object, also after pickling."""

    def __reduce__(self) -> str:
        return "_DEVICES"


_DEVICES = _Devices()


def parse(text: str) -> Specification:
    """Return the strategy that a text names.

    >>> parse("mine=a.b.C(x=1) @ a.b.shard")
    Specification(label='mine', target='a.b.C', arguments=(('x', 1),), prepare_path='a.b.shard')
    >>> parse("zero3").label, parse("a.b.C").label
    ('zero3', 'C')

    Raises:
        SpecificationError: it is not of the form ``[name=]alias or path[(keyword=literal, ...)][@ path]``.
    """
    match = re.fullmatch(r"(?:([\w.+-]+)=)?([A-Za-z_][\w.]*)(\(.*\))?(?:\s*@\s*([\w.]+))?", text.strip(), re.DOTALL)
    if match is None:
        raise SpecificationError(
            f"Got the strategy {text!r}. Write [name=]alias or [name=]package.Class(keyword=value), and after it "
            "@ package.function where configure_model has to be prepared."
        )
    label, target, arguments, prepare = match.groups()
    if arguments and "." not in target:
        raise SpecificationError(f"Got arguments for the alias {target!r}. Give the dotted path of the class instead.")
    keywords = _keywords(arguments or "()", text)
    return Specification(label or target.rpartition(".")[2], target, keywords, prepare)


def _keywords(arguments: str, text: str) -> tuple[tuple[str, Any], ...]:
    try:
        call = ast.parse(f"f{arguments}", mode="eval").body
        assert isinstance(call, ast.Call)
        assert not call.args
        return tuple((str(each.arg), _value(each.value)) for each in call.keywords)
    except (SyntaxError, ValueError, AssertionError):
        raise SpecificationError(
            f"Got the arguments {arguments} in {text!r}. Use keywords, with literals or devices (the number of ranks)."
        ) from None


def _value(node: ast.expr) -> Any:
    return _DEVICES if isinstance(node, ast.Name) and node.id == "devices" else ast.literal_eval(node)


def found(path: str) -> Any:
    """Import the object of a dotted path.

    Raises:
        SpecificationError: there is none.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SpecificationError(f"Got {path}, which cannot be imported: {error}") from error
