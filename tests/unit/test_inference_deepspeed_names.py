"""Every argument of `deepspeed.init_inference` is an option here, ignored with a reason, or refused with the cure."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ls_strategy
from ls_strategy import ConfigError
from ls_strategy.extras.inference.deepspeed_names import NAMES, OURS, SHORT, read_options

DOCUMENTED = (
    *(
        "replace_with_kernel_inject",
        "kernel_inject",
        "dtype",
        "tensor_parallel",
        "tp",
        "enable_cuda_graph",
        "use_triton",
    ),
    *("triton_autotune", "zero", "triangular_masking", "tm", "moe", "keep_module_on_host", "quant", "checkpoint"),
    *("base_dir", "set_empty_params", "save_mp_checkpoint_path", "checkpoint_config", "ckpt_config", "return_tuple"),
    *("training_mp_size", "replace_method", "injection_policy", "injection_dict", "injection_policy_tuple", "config"),
    *("args", "max_out_tokens", "max_tokens", "min_out_tokens", "min_tokens", "transposed_mode", "mp_size", "mpu"),
    *("ep_size", "ep_group", "expert_group", "ep_mp_group", "expert_mp_group", "moe_experts", "moe_type"),
)
"""Fields of DeepSpeed's inference configuration, and their short forms."""

DEFAULTS: dict[str, Any] = {
    **{"replace_with_kernel_inject": False, "tensor_parallel": {}, "enable_cuda_graph": False, "use_triton": False},
    **{"triton_autotune": False, "zero": {}, "triangular_masking": True, "moe": {}, "keep_module_on_host": False},
    **{"quant": {}, "checkpoint": None, "base_dir": "", "set_empty_params": False, "save_mp_checkpoint_path": None},
    **{"checkpoint_config": {}, "return_tuple": True, "training_mp_size": 1, "replace_method": "auto"},
    **{"injection_policy": None, "injection_policy_tuple": None, "config": None, "max_out_tokens": 1024},
    **{"min_out_tokens": 1, "transposed_mode": False, "mpu": None, "ep_size": 1, "ep_group": None},
    **{"ep_mp_group": None, "moe_experts": [1], "moe_type": "standard"},
}


def read(config: Any = None, ours: Any = None, **given: Any) -> dict[str, Any]:
    return read_options(config, given, ours or {}).values


def notes(**given: Any) -> list[str]:
    return read_options(None, given, {}).notes


def test_every_documented_name_is_known() -> None:
    known = {*NAMES, *SHORT, "dtype", "injection_policy", "config"}
    assert set(DOCUMENTED) == known
    assert read_options(None, DEFAULTS, {}).values == {}
    assert notes(**DEFAULTS) == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"mp_size": 2}, {"tensor_parallel_size": 2}),
        ({"tensor_parallel": {"tp_size": 2}}, {"tensor_parallel_size": 2}),
        ({"tp": {"tp_size": 4, "enabled": True, "tp_grain_size": 64}}, {"tensor_parallel_size": 4}),
        ({"tp": {"tp_size": 4, "enabled": False}}, {"tensor_parallel_size": 1}),
        ({"tp": SimpleNamespace(tp_size=2)}, {"tensor_parallel_size": 2}),
        ({"mp_size": 2, "tp": {"tp_size": 2}}, {"tensor_parallel_size": 2}),
        ({"args": {"tp": {"tp_size": 2}}, "dtype": "fp16"}, {"tensor_parallel_size": 2, "dtype": "fp16"}),
        ({"config": {"dtype": torch.half, "quantize": "int8"}}, {"dtype": torch.half, "quantize": "int8"}),
        ({"injection_dict": {"Block": ("out",)}}, {"injection_policy": {"Block": ("out",)}}),
        ({"checkpoint": "folder"}, {"fill_from": "folder"}),
        ({"ckpt_config": {"checkpoint_dir": "folder"}}, {"fill_from": "folder"}),
        ({"moe": True, "quant": {"enabled": False}}, {}),
        ({"moe": {"enabled": True, "ep_size": 1, "num_experts": [8]}}, {}),
    ],
)
def test_arguments_that_are_options_here(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert read(given) == expected
    assert read_options(None, given, {}).values == expected


@pytest.mark.parametrize("text", ["", "[" * 200_000, "{'a': 1}"])
def test_a_file_that_is_no_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "inference.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        read(path)


def test_an_index_names_weights_and_no_policy() -> None:
    index = "weights/model.safetensors.index.json"
    assert read({"checkpoint": index}) == {"fill_from": index}


def test_a_json_file(tmp_path: Path) -> None:
    path = tmp_path / "inference.json"
    path.write_text(json.dumps({"tensor_parallel": {"tp_size": 2}, "dtype": "bf16"}))
    assert read(path) == {"tensor_parallel_size": 2, "dtype": "bf16"}
    path.write_text("[1]")
    with pytest.raises(ConfigError, match="must contain a JSON object"):
        read(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        read(str(path))
    with pytest.raises(ConfigError, match="give a dict, or the path"):
        read(3)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"replace_with_kernel_inject": True}, "no kernels are injected.*scaled_dot_product_attention"),
        ({"kernel_inject": True}, "no kernels are injected"),
        ({"mp_size": 2}, "old name: write tensor_parallel_size=2"),
        ({"enable_cuda_graph": True}, "reduce-overhead"),
        ({"use_triton": True}, "torch chooses its kernels"),
        ({"triton_autotune": True}, "torch chooses its kernels"),
        ({"replace_method": "transformers"}, "injection_policy or the model"),
        ({"max_out_tokens": 2048}, "caches grow"),
        ({"min_tokens": 8}, "caches grow"),
        ({"return_tuple": False}, "what they returned before"),
        ({"keep_module_on_host": True}, "stays on the device"),
        ({"transposed_mode": True}, "are detected"),
        ({"moe_experts": [8]}, "defines its number of experts"),
        ({"moe": {"type": "residual"}}, "defines the type"),
        ({"tp": {"tp_size": 2, "tp_grain_size": 1}}, "equal shard"),
    ],
)
def test_arguments_without_effect_are_explained(given: dict[str, Any], words: str) -> None:
    (note,) = notes(**given)
    assert re.search(words, note)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mp_size": 0}, "at least 1"),
        ({"mp_size": True}, "at least 1"),
        ({"mp_size": "2"}, "at least 1"),
        (
            {"mp_size": 2, "tp": {"tp_size": 4}},
            "mp_size=2 and tensor_parallel.tp_size=4, which contradict|tp_size=4 and mp_size=2",
        ),
        ({"tp": 2}, "tp_size.*tensor_parallel_size="),
        ({"tp": {"size": 2}}, "no entry 'size'"),
        ({"tp": {"tp_size": 2, "mpu": object()}}, "neighbors in the default group"),
        ({"tp": {"tp_size": 2}, "tensor_parallel": {"tp_size": 4}}, "Give it once"),
        ({"replace_with_kernel_inject": "yes"}, "True or False"),
        ({"enable_cuda_graph": 1}, "give a bool"),
        ({"max_out_tokens": 0}, "at least 1"),
        ({"max_out_tokens": "many"}, "give a int"),
        ({"injection_policy_tuple": ("a", "b")}, "give injection_policy="),
        ({"injection_policy": {"Block": int}}, "policy class"),
        ({"injection_policy": "all"}, "injection_policy must be a dictionary or 'auto' or None"),
        ({"mpu": object()}, "neighbors"),
        ({"ep_size": 2}, "experts are sharded by tensor_parallel_size"),
        ({"ep_group": object()}, "neighbors"),
        ({"moe": {"ep_size": 2}}, "experts are sharded"),
        ({"moe": {"size": 2}}, "no entry 'size'"),
        ({"zero": {"stage": 3}}, "offload='cpu'"),
        ({"triangular_masking": False}, "own mask"),
        ({"quant": {"weight": {"num_bits": 8}}}, 'quantize="int8"'),
        ({"checkpoint": {"type": "bloom", "checkpoints": []}}, "load policies"),
        ({"checkpoint": "checkpoints.json"}, "load policies"),
        ({"base_dir": "/data"}, "fill_from"),
        ({"set_empty_params": True}, "device..meta"),
        ({"save_mp_checkpoint_path": "out"}, "reads its shard from any checkpoint"),
        ({"training_mp_size": 4}, "ls-strategy consolidate"),
        ({"checkpoint_config": {"dir": "x"}}, "no entry 'dir'"),
        ({"tensor_paralel": {}}, "Did you mean 'tensor_parallel'"),
        ({"mp": 2}, "init_inference has no argument 'mp'"),
    ],
)
def test_arguments_that_cannot_be_had(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ls_strategy.init_inference(nn.Linear(2, 2), **given)


def test_contradictions_with_our_own_names() -> None:
    cases: list[dict[str, Any]] = [{"mp_size": 2}, {"tensor_parallel": {"tp_size": 2}}]
    for given in cases:
        with pytest.raises(
            ConfigError, match=r"tensor_parallel_size=1 and .*contradict.*Give tensor_parallel_size alone"
        ):
            ls_strategy.init_inference(nn.Linear(2, 2), tensor_parallel_size=1, **given)
    with pytest.raises(ConfigError, match="dtype is"):
        ls_strategy.init_inference(nn.Linear(2, 2), {"dtype": "fp16"}, dtype="bf16")
    assert set(OURS) <= set(inspect.signature(ls_strategy.init_inference).parameters)


def test_kernel_injection_changes_no_result(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    x = torch.randn(3, 4)
    expected = model(x)
    engine = ls_strategy.init_inference(model, mp_size=1, dtype="float", replace_with_kernel_inject=True)
    assert engine(x).equal(expected)
    assert "no kernels are injected" in engine.describe()
    assert "mp_size=1 is the old name" in caplog.text
    assert "no kernels are injected" in caplog.text
