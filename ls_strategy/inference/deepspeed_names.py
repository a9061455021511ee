"""The arguments of `deepspeed.init_inference`, so that a call written for it runs here or says what to write instead.

Each name of `NAMES` is read (it becomes an option of `init_inference`), ignored with a reason that is logged, or
refused with the cure. Names and their short forms follow DeepSpeed's inference configuration; one that is in
neither library is an error that suggests the nearest.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from ls_strategy.errors import ConfigError

Given: TypeAlias = "Mapping[str, Any] | str | os.PathLike[str] | None"

OURS = (
    *("tensor_parallel_size", "dtype", "quantize", "injection_policy", "offload", "nvme_path", "fill_from"),
)  # fmt: skip
"""Options of `init_inference` itself."""

SHORT = {
    "kernel_inject": "replace_with_kernel_inject",
    "tp": "tensor_parallel",
    "tm": "triangular_masking",
    "ckpt_config": "checkpoint_config",
    "injection_dict": "injection_policy",
    "args": "config",
    "max_tokens": "max_out_tokens",
    "min_tokens": "min_out_tokens",
    "expert_group": "ep_group",
    "expert_mp_group": "ep_mp_group",
}
"""DeepSpeed's other names of the same arguments."""

KERNELS = (
    "no kernel is injected, and results are the model's own. Attention runs in torch's scaled_dot_product_attention, "
    "which is fused, where the model was built with attn_implementation='sdpa' (transformers' default); products with "
    "quantised weights run in the kernels of this package; for fused pointwise operations call engine.module.compile()"
)
"""What ``replace_with_kernel_inject=True`` means here."""


@dataclass
class Options:
    """What was asked for, in options of `init_inference`."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """Option -> the argument that it was read from, for errors."""

    notes: list[str] = field(default_factory=list)
    """What became of arguments that are no options here."""

    def put(self, option: str, value: Any, origin: str) -> None:
        """Set an option, once or twice to the same.

        Raises:
            ConfigError: it was set to something else.
        """
        if option in self.values and self.values[option] != value:
            raise ConfigError(
                f"init_inference: {self.origins[option]} and {origin} contradict each other: {option} is "
                f"{self.values[option]!r} by the one and {value!r} by the other. Give {option} alone."
            )
        self.values[option] = value
        self.origins.setdefault(option, origin)


def read_options(config: Given, given: Mapping[str, Any], ours: Mapping[str, Any]) -> Options:
    """Options, from all ways in which they can be given. Not collective; the same on every rank.

    Args:
        config: DeepSpeed's, as a dict or a JSON file.
        given: further keyword arguments.
        ours: options of `init_inference` that are not None.

    Raises:
        ConfigError: a name is not known, a value makes no sense or cannot be had here, or two contradict each other.
    """
    options = Options()
    for name, value in ours.items():
        options.put(name, value, f"{name}={value!r}")
    merged: dict[str, Any] = {}
    for source in (_mapping(config), given):
        for name, value in source.items():
            _take(options, merged, name, value)
    nested = merged.pop("config", None)
    if nested is not None:
        for name, value in _mapping(nested).items():
            _take(options, merged, name, value)
    for name, value in merged.items():
        NAMES[name](options, name, value)
    _check_policy(options.values.get("injection_policy"))
    return options


def _take(options: Options, merged: dict[str, Any], name: str, value: Any) -> None:
    full = SHORT.get(name, name)
    if full in OURS and full not in NAMES:
        if value is not None:
            options.put(full, value, f"{name}={value!r}")
        return
    if full not in NAMES and full != "config":
        nearest = difflib.get_close_matches(name, [*OURS, *NAMES, *SHORT], 1)
        meant = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise ConfigError(
            f"init_inference has no argument {name!r}.{meant} Its own are {', '.join(OURS)}; those of "
            "deepspeed.init_inference are taken, too."
        )
    if full in merged and merged[full] != value:
        raise ConfigError(
            f"init_inference: {full} is {merged[full]!r} in one place and {value!r} in another. Give it once."
        )
    merged[full] = value


def _mapping(config: Given) -> Mapping[str, Any]:
    """The configuration as a dict."""
    if config is None or isinstance(config, Mapping):
        return config or {}
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(f"init_inference: config={config!r}: give a dict, or the path of a JSON file.")
    try:
        found = json.loads(Path(config).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"init_inference: config={os.fspath(config)!r} cannot be read as JSON: {error}.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"init_inference: config={os.fspath(config)!r} holds no JSON object. Write {{...}}.")
    return found


def _check_policy(policy: Any) -> None:
    """Values are names of layers or styles, not DeepSpeed's policy classes."""
    if policy is None or policy == "auto":
        return
    if not isinstance(policy, Mapping) or not policy:
        raise ConfigError(
            f"injection_policy={policy!r}: give {{Class: (names of layers whose outputs are summed)}}, a plan of "
            "styles by names, or None for the automatic plan."
        )
    for key, value in policy.items():
        if isinstance(value, type):
            raise ConfigError(
                f"injection_policy: {value.__name__} for {getattr(key, '__name__', key)} is a class of policies, which "
                "inject kernels. Give the names of the layers whose outputs are summed, or leave injection_policy out."
            )


# --- what becomes of an argument -------------------------------------------------------------------------------------

Reader: TypeAlias = Callable[[Options, str, Any], None]


def _wrong(name: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(f"init_inference: {name}={value!r}: {wanted}.")


def _ignored(default: Any, why: str, kind: type | None = None) -> Reader:
    """Anything but ``default`` is noted with the reason."""

    def read(options: Options, name: str, value: Any) -> None:
        if (
            kind is not None
            and value is not None
            and (not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool))
        ):
            raise _wrong(name, value, f"give a {kind.__name__}")
        if kind is int and value is not None and value < 1:
            raise _wrong(name, value, "give a number of at least 1")
        if value not in (None, default):
            options.notes.append(f"{name}={value!r} has no effect: {why}")

    return read


def _refused(defaults: tuple[Any, ...], cure: str) -> Reader:
    """Anything but one of ``defaults`` is an error."""

    def read(_options: Options, name: str, value: Any) -> None:
        if not any(value is default or (type(value) is type(default) and value == default) for default in defaults):
            raise ConfigError(f"init_inference: {name}={value!r} is not supported: {cure}.")

    return read


def _size(options: Options, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _wrong(name, value, "give the number of ranks that divide the model, at least 1")
    options.put("tensor_parallel_size", value, f"{name}={value!r}")
    if name == "mp_size":
        options.notes.append(f"mp_size={value} is the old name of tensor_parallel_size={value}: write that")


def _tensor_parallel(options: Options, name: str, value: Any) -> None:
    entries = value if isinstance(value, Mapping) else vars(value) if hasattr(value, "tp_size") else None
    if entries is None:
        raise _wrong(name, value, 'give {"tp_size": <ranks>}, or tensor_parallel_size=<ranks>')
    _only(name, entries, ("enabled", "tp_size", "tp_grain_size", "mpu", "tp_group"))
    for key in ("mpu", "tp_group"):
        NAMES["mpu"](options, f"{name}.{key}", entries.get(key))
    if not _flag(f"{name}.enabled", entries.get("enabled", True)):
        options.put("tensor_parallel_size", 1, f"{name}.enabled=False")
    elif "tp_size" in entries:
        _size(options, f"{name}.tp_size", entries["tp_size"])
    _ignored(64, "every rank gets an equal part")(options, f"{name}.tp_grain_size", entries.get("tp_grain_size"))


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, value, "give True or False")
    return value


def _only(name: str, entries: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in entries:
        if key not in known:
            raise ConfigError(f"init_inference: {name} has no entry {key!r}. Its entries are {', '.join(known)}.")


def _kernels(options: Options, name: str, value: Any) -> None:
    if _flag(name, value):
        options.notes.append(f"{name}=True: {KERNELS}")


def _checkpoint(options: Options, name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, str | os.PathLike) or str(os.fspath(value)).endswith(".json"):
        raise _wrong(
            name,
            value,
            "files that are listed by a load policy are not read. Give fill_from=<file or folder of safetensors, a "
            "checkpoint folder of this package, or a .ckpt>, and build the model under torch.device('meta')",
        )
    options.put("fill_from", os.fspath(value), f"{name}={os.fspath(value)!r}")


def _checkpoint_config(options: Options, name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise _wrong(name, value, 'give {"checkpoint_dir": <folder>}')
    _only(name, value, ("checkpoint_dir", "save_mp_checkpoint_path", "base_dir"))
    _checkpoint(options, f"{name}.checkpoint_dir", value.get("checkpoint_dir"))
    for key in ("save_mp_checkpoint_path", "base_dir"):
        NAMES[key](options, f"{name}.{key}", value.get(key))


def _moe(options: Options, name: str, value: Any) -> None:
    entries = {"enabled": value} if isinstance(value, bool) else value
    if not isinstance(entries, Mapping):
        raise _wrong(name, value, "give True, False, or a dict")
    for key, entry in entries.items():
        full = {"num_experts": "moe_experts", "type": "moe_type", "expert_group": "ep_group"}.get(key, key)
        if full == "enabled":
            _flag(f"{name}.enabled", entry)
        elif full in ("ep_size", "moe_experts", "moe_type", "ep_group", "ep_mp_group"):
            NAMES[full](options, f"{name}.{key}", entry)
        else:
            raise ConfigError(f"init_inference: {name} has no entry {key!r}.")


def _quant(_options: Options, name: str, value: Any) -> None:
    if value in (None, {}) or (isinstance(value, Mapping) and value.get("enabled") is False):
        return
    raise _wrong(name, value, 'set quantize="int8" or quantize="int4", which round the weights of linear layers')


_GROUPS = "ranks that divide a model are neighbours of the default group; give tensor_parallel_size alone"
_LAYOUT_FREE = "every rank reads its part of any checkpoint of this package, whatever number of ranks wrote it"

NAMES: dict[str, Reader] = {
    "replace_with_kernel_inject": _kernels,
    "tensor_parallel": _tensor_parallel,
    "mp_size": _size,
    "mpu": _refused((None,), _GROUPS),
    "injection_policy_tuple": _refused((None,), "give injection_policy={Class: (names of layers,)}"),
    "replace_method": _ignored("auto", "layers are divided as injection_policy or the model tells"),
    "enable_cuda_graph": _ignored(
        False, "graphs are made by engine.module.compile(mode='reduce-overhead'); results are the same without", bool
    ),
    "use_triton": _ignored(False, "torch chooses its kernels; results are the same", bool),
    "triton_autotune": _ignored(False, "torch chooses its kernels; results are the same", bool),
    "zero": _refused((None, {}), "weights rest elsewhere with offload='cpu' or offload='nvme'"),
    "triangular_masking": _refused((None, True), "the model's own mask is used, causal or not. Leave it out"),
    "moe": _moe,
    "ep_size": _refused(
        (None, 1), "experts are divided by tensor_parallel_size, or stay whole. Leave it out"
    ),
    "ep_group": _refused((None,), _GROUPS),
    "ep_mp_group": _refused((None,), _GROUPS),
    "moe_experts": _ignored([1], "the model tells its number of experts"),
    "moe_type": _ignored("standard", "the model tells the kind of its experts"),
    "keep_module_on_host": _ignored(False, "the model stays on the device where it is", bool),
    "quant": _quant,
    "checkpoint": _checkpoint,
    "base_dir": _refused((None, ""), "give the whole path as fill_from"),
    "set_empty_params": _refused(
        (None, False), "build the model under torch.device('meta') and give its weights as fill_from"
    ),
    "save_mp_checkpoint_path": _refused((None,), _LAYOUT_FREE),
    "checkpoint_config": _checkpoint_config,
    "return_tuple": _ignored(True, "modules return what they returned before", bool),
    "training_mp_size": _refused((None, 1), _LAYOUT_FREE + ". Convert one of DeepSpeed's by `ls-strategy consolidate`"),
    "max_out_tokens": _ignored(1024, "caches grow with max_new_tokens of generate", int),
    "min_out_tokens": _ignored(1, "caches grow with max_new_tokens of generate", int),
    "transposed_mode": _ignored(False, "linear layers with transposed weights are recognised", bool),
}  # fmt: skip
"""Argument of `deepspeed.init_inference` -> how it is read. ``dtype`` and ``injection_policy`` mean the same here."""
