"""Every kind of sparse block that `convert_moe` knows, from files with its experts on two ranks.

The trusted model is loaded by transformers alone, in one process.
"""

from __future__ import annotations

import importlib
import importlib.util
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.moe.convert import convert_moe
from ls_strategy.testing import spawn
from tests.dist.ranks import assert_close, assert_equal, fit, quiet, weights
from tests.dist.test_pretrained import Pretrained, Reads, bytes_of, tokens
from tests.marks import slow
from tests.unit.test_moe_convert import FOLDERS, ROUTERS_OF_5_21, TINY, has_routers_of_5_21

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")

SIZES = {
    **TINY,
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "q_lora_rank", "kv_lora_rank", "v_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 4),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    "vocab_size": 96,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
}
"""Whichever of these a configuration has."""

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MORE: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"head_dim": 4},
    "flint": {"mlp_only_layers": []},
    "glm4v_moe": {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_state": 8, "layer_types": ["linear_attention", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 0},
    "mimo_v2_flash": {
        "num_key_value_heads": 1,
        "rope_parameters": {f"{kind}_attention": {**ROPE, "partial_rotary_factor": 1} for kind in ("full", "sliding")},
    },
}
"""By folder of transformers: what its models need in addition."""


def class_with(kind: str) -> tuple[type[Any], Any]:
    """A small class of models with such blocks, if possible with a head, and its configuration."""
    from transformers import PretrainedConfig, PreTrainedModel

    folder = FOLDERS[kind]
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    classes: list[Any] = [
        each
        for name, each in vars(module).items()
        if isinstance(each, type) and issubclass(each, PreTrainedModel) and each.__module__ == module.__name__
        if not name.endswith("PreTrainedModel") and each.config_class is not None
    ]
    classes.sort(key=lambda each: (not each.__name__.endswith("ForCausalLM"), len(each.__name__)))
    for each in classes:
        default = each.config_class()
        if any(isinstance(value, PretrainedConfig) for value in vars(default).values()):
            continue  # of several models
        sizes = {name: value for name, value in SIZES.items() if hasattr(default, name)}
        config = each.config_class(**{**sizes, **MORE.get(folder, {})})
        try:
            with torch.device("meta"):
                found = any(type(m).__name__ == kind for m in each(config).modules())
        except AttributeError:  # another model's configuration
            continue
        if found:
            return each, config
    raise AssertionError(f"no model of {folder} has a {kind}")


def save_kind(kind: str, folder: Path) -> None:
    """A model with random weights, as transformers saves it."""
    model_class, config = class_with(kind)
    torch.manual_seed(3)
    model = model_class(config)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) / 10)
    model.save_pretrained(folder)


class Converted(Pretrained):
    """With the blocks converted."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.kind = kind
        super().__init__(folder)

    def load(self) -> Any:
        model = class_with(self.kind)[0].from_pretrained(self.folder)
        assert set(convert_moe(model).values()) == {self.kind}
        return model

    def loss(self, batch: Any) -> Tensor:
        self.ids = batch[0]
        return loss_of(self.model, batch[0])


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """A loss of which all experts get gradients."""
    out = model(input_ids=ids, use_cache=False)
    values = getattr(out, "logits", None)
    return (out.last_hidden_state if values is None else values).float().square().mean()


def compare(kind: str, place: Path, rank: int, world_size: int) -> None:
    """A step from files against the model in one process. Collective."""
    with pytest.MonkeyPatch.context() as patch:
        reads = Reads(patch)
        strategy = ZeROStrategy(3, sharding={"min_unit_numel": 0}, parallel={"expert": world_size})
        fit(strategy, ours := Converted(place, kind), tokens(4), max_steps=1)
        total = reads.total()
    assert ours.was_on_meta
    trusted = class_with(kind)[0].from_pretrained(place)
    at_start = {name.removeprefix("model."): value for name, value in ours.at_start.items()}
    assert_equal(at_start, weights(trusted), f"{kind}, at the start")
    convert_moe(trusted)
    assert_close(ours.losses, [float(loss_of(trusted, ours.ids))], f"{kind}, loss", 1e-5)
    params = dict(trusted.named_parameters(remove_duplicate=False))
    buffers = sum(value.nbytes for name, value in trusted.state_dict().items() if name not in params)
    allowed = 1.1 * bytes_of(place) + (world_size - 1) * buffers  # every rank needs these
    assert 0 < total <= allowed, f"{kind}: {total} bytes read of {bytes_of(place)}"


def every_kind(rank: int, world_size: int, folder: str, kinds: list[str]) -> dict[str, str]:
    """What failed, by kind."""
    quiet()
    failed = {}
    for kind in kinds:
        try:
            compare(kind, Path(folder) / kind, rank, world_size)
        except Exception:
            failed[kind] = traceback.format_exc()
    return failed


@pytest.fixture(scope="module")
def failed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What failed on a rank, of the kinds that were chosen."""
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    kinds = [item.callspec.params["kind"] for item in items if is_installed(item.callspec.params["kind"])]
    folder = tmp_path_factory.mktemp("kinds")
    for kind in kinds:
        save_kind(kind, folder / kind)
    results = spawn(every_kind, 2, str(folder), kinds, timeout_s=30 + 15 * len(kinds))
    return results[1] | results[0]


def is_installed(kind: str) -> bool:
    known = importlib.util.find_spec(f"transformers.models.{FOLDERS[kind]}") is not None
    return known and (kind not in ROUTERS_OF_5_21 or has_routers_of_5_21())


@pytest.mark.wide
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [kind if i % 8 == 0 else slow(kind) for i, kind in enumerate(FOLDERS)])
def test_experts_of_every_kind_come_from_files(kind: str, failed: dict[str, str]) -> None:
    if not is_installed(kind):
        pytest.skip(f"the installed transformers has no {kind}")
    assert kind not in failed, failed[kind]
