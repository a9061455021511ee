"""The aliases as classes for jsonargparse: ``zero3_offload`` is `ZeROStrategy` with the defaults of that name.

jsonargparse finds classes by name. With these, ``strategy: zero0`` in a file can be combined with
``--trainer.strategy.stage 3`` on the command line, and ``--help`` lists the names.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any

import yaml

from ls_strategy.autoload import ALIASES
from ls_strategy.config import OffloadConfig, ZeROConfig
from ls_strategy.config.option_names import is_group, nested, option_names, refuse_unknown
from ls_strategy.errors import NOTED, ConfigError, LSError
from ls_strategy.lightning.strategy import ZeROStrategy

_SIGNATURE = inspect.signature(ZeROStrategy.__init__)
_OPTIONS = frozenset(_SIGNATURE.parameters) - {"self"}


def _make(name: str, defaults: Mapping[str, Any]) -> type[ZeROStrategy]:
    groups = {n: d for n, d in defaults.items() if n in ("stage", "offload")}
    preset = ZeROConfig.of(**{"stage": 3, **groups}).offload
    shown = {**defaults, "offload": preset} if "offload" in defaults else defaults

    @wraps(ZeROStrategy.__init__)
    def init(self: ZeROStrategy, *args: Any, **kwargs: Any) -> None:
        refuse_unknown(kwargs, [*_SIGNATURE.parameters])
        options = {**shown, **_SIGNATURE.bind(self, *args, **kwargs).arguments}
        del options["self"]
        if "offload" in defaults:
            options["offload"] = _completed(options["offload"], preset)
        ZeROStrategy.__init__(self, **options)

    parameters = [p.replace(default=shown.get(n, p.default)) for n, p in _SIGNATURE.parameters.items()]
    init.__signature__ = _SIGNATURE.replace(parameters=parameters)  # type: ignore[attr-defined]
    members = {"__init__": init, "__module__": __name__, "__qualname__": name, "__doc__": ZeROStrategy.__doc__}
    members["PRESET"] = frozenset(defaults)
    return type(name, (ZeROStrategy,), members)


# --- mistakes in options ----------------------------------------------------------------------------------------------


def explain_mistakes(parser: Any) -> None:
    """Make a parser class of jsonargparse say what this package says of a mistake in its options, and only that.

    Alone, jsonargparse lists what each member of a union of types has against the whole value, level by level, and
    drops an unknown option that is empty (``ofload: {}``).
    """
    if parser is None or "error" in vars(parser):
        return  # jsonargparse is missing, or this was called before
    method = "instantiate" if hasattr(parser, "instantiate") else "instantiate_classes"  # before jsonargparse 4.49
    error, build = parser.error, getattr(parser, method)

    @wraps(error)
    def explained(self: Any, message: str, *args: Any, **kwargs: Any) -> Any:
        if self.exit_on_error:  # not where the text becomes part of an outer parser's message
            message = _sentence(str(message)) or message
        return error(self, message, *args, **kwargs)

    @wraps(build)
    def building(self: Any, *args: Any, **kwargs: Any) -> Any:
        if NOTED.get() is not None:
            return build(self, *args, **kwargs)  # a part of another parser
        made: list[LSError] = []
        token = NOTED.set(made)
        try:
            return build(self, *args, **kwargs)
        except Exception as failure:
            if isinstance(failure, LSError):
                raise
            found = next((error for error in made if _tells(failure, error)), None)
            sentence = None if found is not None else _refused_in(args[0] if args else None)
            if found is None and sentence is None:
                raise
            raise (found.with_traceback(None) if found is not None else ConfigError(sentence)) from None
        finally:
            NOTED.reset(token)

    parser.error = explained
    setattr(parser, method, building)
    _see_dropped(parser)


def _see_dropped(parser: Any) -> None:
    """Make a parser class look for unknown options that are empty before it drops them."""
    parse, parse_words = parser.parse_object, parser.parse_args

    @wraps(parse)
    def parsing(self: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_dropped(self, options)
        return parse(self, options, *args, **kwargs)

    @wraps(parse_words)
    def parsing_words(self: Any, words: Any = None, *args: Any, **kwargs: Any) -> Any:
        for word in words if isinstance(words, list) else ():
            name, _, value = str(word).partition("=")
            if value.strip() == "{}":
                _refuse_dropped(self, nested({name.lstrip("-"): {}}))
        return parse_words(self, words, *args, **kwargs)

    parser.parse_object, parser.parse_args = parsing, parsing_words


def _refuse_dropped(parser: Any, options: Any) -> None:
    """Refuse an option that is empty, if it is unknown or means nothing, in the parser of a strategy's options."""
    if {each.dest for each in parser._actions}.issuperset(_OPTIONS):
        dropped = next(_dropped(options), None)
        if dropped is not None:
            parser.error(f"Option '{dropped}' is not accepted")


def _dropped(options: Any, group: str = "") -> Iterator[str]:
    """Yield the dotted names of options that are empty mappings, or hold nothing else, and unknown or refused so."""
    for name, value in (_mapping(options) or {}).items():
        path = f"{group}.{name}" if group else str(name)
        known = path in (*_OPTIONS, *option_names())
        if _is_empty(value) and (not known or _refusal(ZeROStrategy.__name__, {path: {}}) is not None):
            yield path
        elif is_group(path):
            yield from _dropped(value, path)


def _is_empty(value: Any) -> bool:
    found = _mapping(value)
    return found is not None and all(map(_is_empty, found.values()))


def _mapping(value: Any) -> Mapping[Any, Any] | None:
    found = vars(value) if hasattr(value, "as_dict") else value
    return found if isinstance(found, Mapping) else None


def _tells(failure: Exception, error: LSError) -> bool:
    """Return whether the text of ``failure`` contains that of ``error``, however jsonargparse has indented it."""
    return " ".join(str(error).split()) in " ".join(str(failure).split())


def _refused_in(config: Any, depth: int = 0) -> str | None:
    """Return why a strategy of this package in a parsed configuration refuses its options."""
    found = _mapping(config)
    if found is None or depth > 3:
        return None
    if "class_path" in found:
        options: Any = found.get("init_args") or {}
        return _refusal(found["class_path"], options.as_dict() if hasattr(options, "as_dict") else options)
    return next((why for each in found.values() if (why := _refused_in(each, depth + 1))), None)


def _sentence(message: str) -> str | None:
    """Return this package's own words for an option that jsonargparse refuses; None if it has none."""
    names = re.findall(r"(?:Option|[Kk]ey) ['\"]([\w.]+)['\"]", message)
    class_path = re.search(r"Problem with given class_path '([\w.]+)'", message)
    options = _given(message)
    for name in reversed(names):
        option = next((each for each in options if each.partition(".")[0] == name.partition(".")[0]), None)
        if option == "timeout":
            return (
                f"Got timeout={options[option]!r}, but here timeout must be a text of the form 'h:m:s'. "
                "Set timeout='0:30:00'."
            )
        if option is not None and class_path is not None:
            return _refusal(class_path[1], {option: options[option]})
    return None


def _given(message: str) -> dict[str, Any]:
    """Return the options of the value that jsonargparse refuses, from the end of its message."""
    value = re.search(r"^ *Given value: (\{'class_path'.*\})\s*\Z", message, re.MULTILINE | re.DOTALL)
    one = re.search(r"^ *Given value: NestedArg\(key='([\w.]+)', val=(.*)\)\s*\Z", message, re.MULTILINE | re.DOTALL)
    try:
        if one is None:
            return dict(ast.literal_eval(value[1])["init_args"]) if value else {}
        found = ast.literal_eval(one[2])
        return {one[1]: yaml.safe_load(found) if isinstance(found, str) else found}
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, yaml.YAMLError):
        return {}


def _refusal(class_path: Any, options: Mapping[str, Any]) -> str | None:
    """Return why a strategy of this package refuses options; None if it does not, or is not of this package."""
    kind = _kind_of(class_path) if isinstance(class_path, str) else None
    if kind is None:
        return None
    try:
        kind(**nested(options))
    except LSError as error:
        return str(error)
    except Exception:
        return None
    return None


def _kind_of(class_path: str) -> type[ZeROStrategy] | None:
    name = class_path.rpartition(".")[2]
    found = ZeROStrategy if name == ZeROStrategy.__name__ else globals().get(name)
    return found if isinstance(found, type) and issubclass(found, ZeROStrategy) else None


def _completed(given: Any, preset: OffloadConfig) -> Any:
    """Return ``given`` with the alias's tiers where it sets none: ``zero3_nvme`` with a folder still offloads."""
    tiers = {kind: tier for kind in ("optimizer", "parameters") if (tier := preset.tier_of(kind)) is not None}
    if isinstance(given, OffloadConfig):
        return replace(given, **{kind: tier for kind, tier in tiers.items() if getattr(given, kind) is None})
    if not isinstance(given, Mapping):
        return given
    filled = {}
    for kind, tier in tiers.items():
        option = given.get(kind, tier)
        filled[kind] = {"tier": tier.tier, **option} if isinstance(option, Mapping) else option
    return {**given, **filled}


globals().update({name: _make(name, defaults) for name, defaults in ALIASES.items() if "strategy" not in name})
