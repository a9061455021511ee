"""Arguments of `deepspeed.init_inference`: read, ignored with a logged reason, or rejected with the cure.

`NAMES` lists them under DeepSpeed's names and `SHORT` under its short forms. An argument of neither library is an error
that suggests the nearest name.
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

OURS = ("tensor_parallel_size", "dtype", "quantize", "injection_policy", "offload", "nvme_path", "fill_from")
"""The options of `init_inference` itself."""

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
"""DeepSpeed's short names of its arguments."""

KERNELS = (
    "no kernels are injected, and the model computes as before. Attention is fused by torch's "
    "scaled_dot_product_attention if the model was built with attn_implementation='sdpa' (transformers' default). "
    "Quantized linear layers use the kernels of this package. For fused pointwise operations call "
    "engine.module.compile()"
)
"""The note for ``replace_with_kernel_inject=True``."""


@dataclass
class Options:
    """The given arguments, translated to options of `init_inference`."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)  # option -> the argument that set it, for error messages
    notes: list[str] = field(default_factory=list)  # one line for each argument that has no effect here

    def put(self, option: str, value: Any, origin: str) -> None:
        """Set an option. Setting it again to the same value is allowed.

        Raises:
            ConfigError: the option was set to another value.
        """
        if option in self.values and self.values[option] != value:
            raise ConfigError(
                f"init_inference: Got {self.origins[option]} and {origin}, which contradict each other: {option} is "
                f"{self.values[option]!r} in the first and {value!r} in the second. Give {option} alone."
            )
        self.values[option] = value
        self.origins.setdefault(option, origin)


def read_options(config: Given, given: Mapping[str, Any], ours: Mapping[str, Any]) -> Options:
    """Translate all arguments to options of `init_inference`. Not collective; the result is the same on every rank.

    Args:
        config: DeepSpeed's configuration, as a dict or a JSON file.
        given: further keyword arguments.
        ours: options of `init_inference` that are not None.

    Raises:
        ConfigError: a name is unknown, a value is invalid or unsupported, or two arguments contradict each other.
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
            f"init_inference has no argument {name!r}.{meant} Its options are {', '.join(OURS)}. Arguments of "
            "deepspeed.init_inference are accepted too."
        )
    if full in merged and merged[full] != value:
        raise ConfigError(f"init_inference: Got {full}={merged[full]!r} and {full}={value!r}. Give it once.")
    merged[full] = value


def _mapping(config: Given) -> Mapping[str, Any]:
    if config is None or isinstance(config, Mapping):
        return config or {}
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(f"init_inference: Got config={config!r}: give a dict, or the path of a JSON file.")
    try:
        found = json.loads(Path(config).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"init_inference: Got config={os.fspath(config)!r}, but it cannot be read as JSON: {error}."
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(
            f"init_inference: Got config={os.fspath(config)!r}, but the file must contain a JSON object. Write {{...}}."
        )
    return found


def _check_policy(policy: Any) -> None:
    """Check that the values are names of layers or styles, not DeepSpeed's policy classes."""
    if policy is None or policy == "auto":
        return
    if not isinstance(policy, Mapping) or not policy:
        raise ConfigError(
            f"Got injection_policy={policy!r}. Give {{Class: (names of layers whose outputs are summed)}}, a plan that "
            "maps names to styles, or None for the automatic plan."
        )
    for key, value in policy.items():
        if isinstance(value, type):
            raise ConfigError(
                f"Got injection_policy with {value.__name__} for {getattr(key, '__name__', key)}, a policy class that "
                "injects kernels. Give the names of the layers whose outputs are summed, or omit injection_policy."
            )


# --- how each argument is read ---------------------------------------------------------------------------------------

Reader: TypeAlias = Callable[[Options, str, Any], None]


def _wrong(name: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(f"init_inference: Got {name}={value!r}: {wanted}.")


def _ignored(default: Any, why: str, kind: type | None = None) -> Reader:
    """Return a reader that notes the reason why any value but ``default`` has no effect."""

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
    """Return a reader that rejects any value that is not one of ``defaults``."""

    def read(_options: Options, name: str, value: Any) -> None:
        if not any(value is default or (type(value) is type(default) and value == default) for default in defaults):
            raise ConfigError(f"init_inference: Got {name}={value!r}, which is not supported: {cure}.")

    return read


def _size(options: Options, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _wrong(name, value, "give the number of ranks that share each layer, at least 1")
    options.put("tensor_parallel_size", value, f"{name}={value!r}")
    if name == "mp_size":
        options.notes.append(f"mp_size={value} is the old name: write tensor_parallel_size={value}")


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
    _ignored(64, "every rank gets an equal shard")(options, f"{name}.tp_grain_size", entries.get("tp_grain_size"))


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
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else ".json"
    if path.endswith(".json") and not path.endswith(".safetensors.index.json"):
        raise _wrong(
            name,
            value,
            "load policies are not read. Give fill_from=<file or folder of safetensors, a checkpoint folder of this "
            "package, or a .ckpt>, and build the model under torch.device('meta')",
        )
    options.put("fill_from", path, f"{name}={path!r}")


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
    raise _wrong(name, value, 'set quantize="int8" or quantize="int4", which quantize the weights of linear layers')


_GROUPS = "tensor-parallel ranks are neighbors in the default group; give tensor_parallel_size alone"
_LAYOUT_FREE = "every rank reads its shard from any checkpoint of this package, for any number of ranks that wrote it"

NAMES: dict[str, Reader] = {
    "replace_with_kernel_inject": _kernels,
    "tensor_parallel": _tensor_parallel,
    "mp_size": _size,
    "mpu": _refused((None,), _GROUPS),
    "injection_policy_tuple": _refused((None,), "give injection_policy={Class: (names of layers,)}"),
    "replace_method": _ignored("auto", "layers are sharded according to injection_policy or the model"),
    "enable_cuda_graph": _ignored(
        False, "call engine.module.compile(mode='reduce-overhead') for graphs; results are the same without", bool
    ),
    "use_triton": _ignored(False, "torch chooses its kernels; results are the same", bool),
    "triton_autotune": _ignored(False, "torch chooses its kernels; results are the same", bool),
    "zero": _refused((None, {}), "set offload='cpu' or offload='nvme' to store weights off the device"),
    "triangular_masking": _refused((None, True), "the model's own mask is used, causal or not. Omit it"),
    "moe": _moe,
    "ep_size": _refused(
        (None, 1), "experts are sharded by tensor_parallel_size, or replicated. Omit it"
    ),
    "ep_group": _refused((None,), _GROUPS),
    "ep_mp_group": _refused((None,), _GROUPS),
    "moe_experts": _ignored([1], "the model defines its number of experts"),
    "moe_type": _ignored("standard", "the model defines the type of its experts"),
    "keep_module_on_host": _ignored(False, "the model stays on the device where it is", bool),
    "quant": _quant,
    "checkpoint": _checkpoint,
    "base_dir": _refused((None, ""), "give the full path as fill_from"),
    "set_empty_params": _refused(
        (None, False), "build the model under torch.device('meta') and give its weights as fill_from"
    ),
    "save_mp_checkpoint_path": _refused((None,), _LAYOUT_FREE),
    "checkpoint_config": _checkpoint_config,
    "return_tuple": _ignored(True, "modules return what they returned before", bool),
    "training_mp_size": _refused((None, 1), _LAYOUT_FREE + ". Convert DeepSpeed's by `ls-strategy consolidate`"),
    "max_out_tokens": _ignored(1024, "caches grow with max_new_tokens of generate", int),
    "min_out_tokens": _ignored(1, "caches grow with max_new_tokens of generate", int),
    "transposed_mode": _ignored(False, "linear layers with transposed weights are detected", bool),
}  # fmt: skip
"""Argument of `deepspeed.init_inference` -> its reader. ``dtype`` and ``injection_policy`` mean the same here."""
