"""Checks option values against their type hints and ranges, for dataclasses, classes and functions.

The one invariant: what `accept` returns has the type of the hint and lies in the range; anything else is a
`ConfigError` that says what was given, what is allowed, and a value to set. The hints are those of the signature or of
the dataclass, so every new option is checked; ranges are given in addition:

    @dataclass(frozen=True)                          @checked(prefetch=at_least(0))
    class Config:                                    def load(path: str, *, prefetch: int = 1) -> None: ...
        prefetch: int = 1

        def __post_init__(self):
            check_fields(self, prefetch=at_least(0))
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import numbers
import os
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from functools import wraps
from pathlib import PurePath
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from ls_strategy.errors import ConfigError
from ls_strategy.hints import Unknown, hints_of
from ls_strategy.ranges import ANY, Range
from ls_strategy.ranges import above as above
from ls_strategy.ranges import at_least as at_least
from ls_strategy.ranges import between as between
from ls_strategy.registry import EntryOf

_NOTHING: Any = inspect.Parameter.empty


class _NoMatchError(Exception):
    """A value does not have the type of a hint; the text describes the values that do."""


# --- where options come from ------------------------------------------------------------------------------------------

Function = TypeVar("Function", bound=Callable[..., Any])


def checked(skip: Collection[str] = (), /, **ranges: Range) -> Callable[[Function], Function]:
    """Return a decorator that checks the arguments of a function, or of an ``__init__``, before it runs.

    Defaults are not checked. Values are converted to the type of the hint: a dictionary becomes the dataclass that the
    hint names, as in YAML. The signature does not change, for parsers that read it.

    Args:
        skip: arguments that are not checked.
        ranges: allowed numbers, by argument.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        unknown = {*skip, *ranges} - set(signature.parameters)
        if unknown:
            raise TypeError(f"{function.__qualname__} has no arguments {sorted(unknown)}")

        @wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)  # raises Python's own TypeError for unknown names
            hints = hints_of(function)
            for name, value in bound.arguments.items():
                parameter = signature.parameters[name]
                if name in skip or name == "self" or parameter.kind in (_VARIOUS, _KEYWORDS):
                    continue
                hint = hints.get(name, Any)
                bound.arguments[name] = accept(name, value, hint, ranges.get(name), parameter.default)
            return function(*bound.args, **bound.kwargs)

        return typing.cast("Function", wrapped)

    return decorate


_VARIOUS, _KEYWORDS = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


def check_fields(config: Any, /, *, group: str | None = None, **ranges: Range) -> None:
    """Check the fields of a dataclass, frozen or not, and convert them to the types of their hints.

    Args:
        config: the dataclass, in its ``__post_init__``.
        group: prefix of field names in messages (``group.field``). None: the name of the class.
        ranges: allowed numbers, by field.

    Raises:
        ConfigError: a field has another type, or is out of its range.
    """
    hints = hints_of(type(config))
    for field in dataclasses.fields(config):
        given = getattr(config, field.name)
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        default = _NOTHING if default is dataclasses.MISSING else default
        name = f"{type(config).__name__}({field.name})" if group is None else f"{group}.{field.name}".lstrip(".")
        value = accept(name, given, hints[field.name], ranges.get(field.name), default)
        if value is not given:
            object.__setattr__(config, field.name, value)


# --- one value --------------------------------------------------------------------------------------------------------


def accept(name: str, value: Any, hint: Any, limits: Range | None = None, default: Any = _NOTHING) -> Any:
    """Return ``value`` in the type of ``hint``.

    Args:
        name: name of the option; ``Class(option)`` for a field.
        value: what was given.
        hint: the allowed type.
        limits: allowed numbers.
        default: the value that the message suggests if there is no closer one.

    Raises:
        ConfigError: the value has another type, or is out of range.
    """
    try:
        found = _convert(value, hint, limits, name)
    except _NoMatchError as error:
        raise refusal(name, value, f"must be {error}", _suggestion(value, hint, limits, default)) from None
    if default is None and isinstance(value, Mapping) and not value and dataclasses.is_dataclass(found):
        short = _suggestion(value, hint, limits, default)
        if short is not None:  # else it is no switch
            raise refusal(name, value, "must not be empty: leave it out, or switch it on", short)
    return found


def refusal(name: str, value: Any, rule: str, cure: Any = _NOTHING) -> ConfigError:
    """Return the error for an option that is wrong by itself.

    Args:
        name: name of the option; ``Class(option)`` for a field.
        value: what was given.
        rule: what it must be, as a predicate ("must be 1").
        cure: a value to set.
    """
    owner, _, field = name.rpartition("(")
    field = field.removesuffix(")")
    given = f"{owner}({field}={show(value)})" if owner else f"{field}={show(value)}"
    cure = list(cure) if isinstance(cure, tuple) else cure
    advice = "Give such a value." if cure is _NOTHING else f"Set {field}={show(cure)}."
    if cure is None:
        advice = f"Set another value, or leave {field} out."
    return ConfigError(f"Got {given}, but {field} {rule}. {advice}")


def show(value: Any) -> str:
    """Return ``value`` as source code, shortened."""
    try:
        text = value.__name__ if isinstance(value, type) else repr(value)
    except Exception:  # a user's __repr__
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 120 else f"{text[:117]}..."


def _convert(value: Any, hint: Any, limits: Range | None, name: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(value, get_args(hint), limits, name)
    if origin is typing.Annotated:
        plain, note, *_ = get_args(hint)
        return _convert_name(value, note.names) if isinstance(note, EntryOf) else _convert(value, plain, limits, name)
    if origin is Literal:
        return _convert_literal(value, get_args(hint))
    if hint in _PLAIN:
        return _PLAIN[hint](value, limits)
    return _convert_special(value, hint, origin, limits, name)


def _convert_special(value: Any, hint: Any, origin: Any, limits: Range | None, name: str) -> Any:
    if hint in (Any, object) or isinstance(hint, TypeVar):
        return value
    if hint in (None, type(None)):
        return _same(value, value is None, "None")
    if Callable in (hint, origin):
        return _same(value, callable(value), "something that can be called")
    if type in (hint, origin):
        return _convert_class(value, get_args(hint))
    return _convert_other(value, hint, origin, limits, name)


def _convert_other(value: Any, hint: Any, origin: Any, limits: Range | None, name: str) -> Any:
    kind = hint if origin is None else origin
    if not isinstance(kind, type) or kind is Unknown or getattr(kind, "_is_protocol", False):
        return _same(value, value is not None, "given")
    if issubclass(kind, Mapping):
        return _convert_mapping(value, kind, get_args(hint), name)
    if issubclass(kind, Iterable) and kind.__module__ in ("builtins", "collections.abc"):
        return _convert_collection(value, kind, get_args(hint), limits, name)
    if dataclasses.is_dataclass(kind):
        return _convert_dataclass(value, kind, name)
    if issubclass(kind, PurePath):
        _same(value, isinstance(value, (str, os.PathLike)), "a path")
        return kind(_convert_text(os.fspath(value), None))
    return _same(value, isinstance(value, kind), f"{_article(kind.__name__)} {kind.__name__}")


def _article(word: str) -> str:
    return "an" if word[:1].upper() in "AEIO" else "a"


def _same(value: Any, fits: bool, rule: str) -> Any:
    if not fits:
        raise _NoMatchError(rule)
    return value


def _convert_union(value: Any, hints: Sequence[Any], limits: Range | None, name: str) -> Any:
    rules: list[str] = []
    if isinstance(value, Mapping):  # a dataclass given as a dictionary: report the error inside it
        hints = sorted(hints, key=lambda hint: not dataclasses.is_dataclass(hint))
    for hint in hints:
        try:
            return _convert(value, hint, limits, name)
        except _NoMatchError as error:
            rules.append(str(error))
    unique = [rule for rule in dict.fromkeys(rules) if rule not in ("None", "")]  # "": no name was added
    if "None" in rules:
        unique.append("None")
    raise _NoMatchError(" or ".join(unique))


def _convert_literal(value: Any, choices: Sequence[Any]) -> Any:
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        value = int(value)
    for choice in choices:
        if type(choice) is type(value) and choice == value:
            return choice
    raise _NoMatchError(" or ".join([", ".join(map(repr, choices[:-1])), repr(choices[-1])] if choices[1:] else
                                    [repr(choices[0])]))  # fmt: skip


def _convert_name(value: Any, names: Sequence[str]) -> str:
    return _same(value, isinstance(value, str) and value in names, ", ".join(map(repr, names)))


def _convert_whole(value: Any, limits: Range | None) -> int:
    limits = limits or ANY
    rule = " ".join(filter(None, ("a whole number", str(limits))))
    _same(value, isinstance(value, numbers.Integral) and not isinstance(value, bool), rule)
    _same(value, abs(int(value)) < 1 << 63, f"{rule}, below 2**63")
    return _same(int(value), limits.holds(int(value)), rule)


def _convert_number(value: Any, limits: Range | None) -> float:
    limits = limits or ANY
    rule = " ".join(filter(None, ("a number" if limits.infinite else "a finite number", str(limits))))
    _same(value, isinstance(value, numbers.Real) and not isinstance(value, bool), rule)
    try:
        number = float(value)
    except OverflowError:
        raise _NoMatchError(rule) from None
    return _same(number, not math.isnan(number) and limits.holds(number), rule)


def _convert_text(value: Any, _: Range | None) -> str:
    _same(value, isinstance(value, str), "a text")
    _same(value, "\0" not in value, "a text without a NUL character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _NoMatchError("a text of whole characters") from None
    return value


def _convert_timedelta(value: Any, _: Range | None) -> timedelta:
    rule = "a timedelta above 0 and of at most a year"
    _same(value, isinstance(value, timedelta), rule)
    return _same(value, timedelta(0) < value <= timedelta(days=366), rule)


_PLAIN: dict[Any, Callable[[Any, Range | None], Any]] = {
    bool: lambda value, _: _same(value, isinstance(value, bool), "True or False"),
    int: _convert_whole,
    float: _convert_number,
    str: _convert_text,
    timedelta: _convert_timedelta,
}


def _convert_class(value: Any, bases: Sequence[Any]) -> type:
    base = get_origin(bases[0]) or bases[0] if bases else object
    known = isinstance(base, type) and base is not Unknown
    rule = f"a class derived from {base.__name__}" if known and base is not object else "a class"
    return _same(value, isinstance(value, type) and (not known or issubclass(value, base)), rule)


def _convert_mapping(value: Any, kind: type, hints: Sequence[Any], name: str) -> Any:
    _same(value, isinstance(value, Mapping), "a dictionary")
    if hints:
        for key, each in value.items():
            _within("key", key, hints[0], name)
            _within(f"value of {show(key)}", each, hints[1], name)
    return dict(value) if kind is dict and not isinstance(value, dict) else value


def _within(what: str, value: Any, hint: Any, name: str, limits: Range | None = None) -> Any:
    try:
        return _convert(value, hint, limits, name)
    except _NoMatchError as error:
        raise _NoMatchError(f"such that each {what} is {error}, not {show(value)}") from None


_OF: dict[Any, str] = {str: " of texts", int: " of whole numbers", float: " of numbers"}


def _convert_collection(value: Any, kind: type, hints: Sequence[Any], limits: Range | None, name: str) -> Any:
    if kind in (Iterable, Collection) or not hints:
        return _same(value, isinstance(value, Iterable) and not isinstance(value, (str, bytes)), "a list")
    if issubclass(kind, AbstractSet):
        _same(value, isinstance(value, (AbstractSet, list, tuple)), "a set")
        elements = [_within("element", each, hints[0], name, limits) for each in value]
        return frozenset(elements) if kind is frozenset else set(elements)
    _same(value, isinstance(value, (list, tuple)), f"a list{_OF.get(hints[0], '')}")
    if kind is tuple and hints[-1] is not Ellipsis:
        _same(value, len(value) == len(hints), f"a list of {len(hints)} values")
        return tuple(_within("value", v, h, name, limits) for v, h in zip(value, hints, strict=True))
    elements = [_within("element", each, hints[0], name, limits) for each in value]
    return tuple(elements) if kind is tuple or (isinstance(value, tuple) and kind is not list) else elements


def _convert_dataclass(value: Any, kind: type[Any], name: str) -> Any:
    if isinstance(value, kind):
        return value
    fields = [field.name for field in dataclasses.fields(kind) if field.init]
    example = f"{fields[0]}=..." if fields else ""
    _same(value, isinstance(value, Mapping), f"{_article(kind.__name__)} {kind.__name__}({example})")
    for key in value:
        if key not in fields:
            raise unknown_option(kind, str(key), f"{name}={show(value)}")
    required = [f.name for f in dataclasses.fields(kind) if f.init and f.default is f.default_factory]
    missing = [field for field in required if field not in value]
    if missing:
        raise ConfigError(f"Got {name}={show(value)}, but {kind.__name__} needs {', '.join(missing)}. Add it.")
    try:
        return kind(**value)
    except ConfigError as error:
        if name in str(error):
            raise
        raise ConfigError(f"Got {name}={show(value)}, and in it: {error}") from None


def unknown_option(kind: type[Any], name: str, given: str) -> ConfigError:
    """Return the error for an option that a dataclass does not have, with the most likely correct one.

    Args:
        kind: the dataclass.
        name: the unknown option.
        given: what was given, for the message.
    """
    options = _names(kind)
    near = [f"{option}={call(inner, name)}" for option, inner in inner_kinds(kind).items() if name in _names(inner)]
    near += map(repr, difflib.get_close_matches(name, options, n=1))
    cure = f"Did you mean {near[0]}?" if near else f"Its options are {', '.join(options)}."
    return ConfigError(f"Got {given}, but {kind.__name__} has no option {name!r}. {cure}")


def inner_kinds(kind: type[Any]) -> dict[str, type[Any]]:
    """Return the options of a dataclass that can be a dataclass themselves, each with that class."""
    hints = ((name, each) for name, hint in hints_of(kind).items() for each in (hint, *get_args(hint)))
    return {name: each for name, each in hints if isinstance(each, type) and dataclasses.is_dataclass(each)}


def call(kind: type[Any], option: str, value: str = "...") -> str:
    """Return how a dataclass is written with one option and all that it requires.

    Args:
        kind: the dataclass.
        option: name of the option.
        value: what stands for the option's value.
    """
    required = {f.name: "..." for f in dataclasses.fields(kind) if f.default is f.default_factory}  # both are missing
    written = ", ".join(f"{name}={text}" for name, text in {**required, option: value}.items())
    return f"{kind.__name__}({written})"


def _names(kind: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.init]


# --- what to set instead ----------------------------------------------------------------------------------------------


def _suggestion(value: Any, hint: Any, limits: Range | None, default: Any) -> Any:
    """Return the allowed value that was most likely meant, `_NOTHING` or None if there is none."""
    hints = (hint, *get_args(hint))
    choices = [c for h in hints if get_origin(h) is Literal for c in get_args(h)]
    choices += [
        c for h in hints for note in getattr(h, "__metadata__", ()) if isinstance(note, EntryOf) for c in note.names
    ]
    for guess in (*_guesses(value, limits, choices), default, *choices):
        if guess is _NOTHING or guess is None:
            continue
        try:
            return _convert(guess, hint, limits, "")
        except (_NoMatchError, ConfigError):
            continue
    return None if default is None else _NOTHING


def _guesses(value: Any, limits: Range | None, choices: Sequence[Any]) -> Iterable[Any]:
    if isinstance(value, str):
        yield from _read(value)
        names = {str(choice): choice for choice in choices}
        yield from (names[near] for near in difflib.get_close_matches(value.lower(), names, n=1))
        yield [value]
    elif isinstance(value, timedelta):
        yield timedelta(minutes=30)
    elif isinstance(value, numbers.Real) and math.isfinite(_float(value)):
        number = float(value)
        yield from (int(number), number)
        near = None if limits is None else limits.nearest(number)
        if near is not None:
            yield from (int(near), float(near))
        if 0 < number < 3e7:
            yield timedelta(seconds=number)
        yield bool(number)


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _read(text: str) -> Iterable[Any]:
    """Yield the numbers and the truth value that a text spells."""
    truths = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if text.lower() in truths:
        yield truths[text.lower()]
    for kind in (int, float):
        try:
            yield kind(text)
        except ValueError:
            continue
