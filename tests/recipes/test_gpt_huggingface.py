"""A GPT as a Hugging Face Llama: the same logits; and clear words where Llama has no such network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from recipes.gpt import huggingface
from recipes.gpt.model import GPTModule
from recipes.gpt.network import GPTConfig
from tests.unit.checkpoint_folders import write_folder

SMALL = {"vocab_size": 70, "block_size": 24, "num_layers": 2, "num_heads": 4, "width": 48}

VARIANTS = {
    "tied": {},
    "grouped": {"num_kv_heads": 2, "tied_embeddings": False},
    "one_kv_head": {"num_kv_heads": 1, "rotary_base": 500.0},
}


def module_of(**options: Any) -> GPTModule:
    torch.manual_seed(0)
    module = GPTModule(GPTConfig(**{**SMALL, **options}))
    module.configure_model()
    for name, p in module.named_parameters():  # norms start at one, which hides where they go
        torch.nn.init.normal_(p, mean=1.0 if "norm" in name else 0.0, std=0.3)
    return module.eval()


def save(module: GPTModule, path: Path) -> Path:
    """A folder as three ranks save it."""
    meta = {"pytorch-lightning_version": pl.__version__, "hyper_parameters": dict(module.hparams)}
    state, tied = module.state_dict(), module.config.tied_embeddings
    tensors = {("model", name): value for name, value in state.items() if not (tied and name == "model.head.weight")}
    aliases = {("model", "model.head.weight"): ("model", "model.token_embedding.weight")} if tied else {}
    return write_folder(path, tensors, {}, meta, aliases=aliases)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("folder", [True, False])
def test_llama_computes_the_same_logits(tmp_path: Path, variant: str, folder: bool) -> None:
    transformers = pytest.importorskip("transformers")
    module = module_of(**VARIANTS[variant])
    if folder:
        source = save(module, tmp_path / "x.ckpt")
    else:
        source = tmp_path / "x.ckpt"
        meta = {"hyper_parameters": dict(module.hparams), "state_dict": module.state_dict()}
        torch.save(meta, source)
    assert huggingface.main([str(source), str(tmp_path / "out"), "--max-shard-gb", "1e-4"]) == 0
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    llama, report = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokens = torch.randint(SMALL["vocab_size"], (3, SMALL["block_size"]), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, logits = module(tokens), llama.eval()(tokens).logits
    assert expected.std() > 0.5, "logits that are all alike would show nothing"
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_names_shapes_and_dtype(tmp_path: Path, capsys: Any) -> None:
    module = module_of(num_kv_heads=2, tied_embeddings=False)
    assert huggingface.main([str(save(module, tmp_path / "x.ckpt")), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header.pop("__metadata__")
    shapes = {name: entry["shape"] for name, entry in header.items()}
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == [48, 48]
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == [24, 48]
    assert shapes["model.layers.1.mlp.up_proj.weight"] == [128, 48]
    assert shapes["lm_head.weight"] == shapes["model.embed_tokens.weight"] == [70, 48]
    assert len(shapes) == 2 * 9 + 3
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["torch_dtype"], config["num_key_value_heads"]) == ("bfloat16", 2)
    assert "LlamaForCausalLM.from_pretrained" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": "learned"}, "positions='learned' (Llama has 'rotary')."),
        ({"mlp": "gelu"}, "mlp='gelu' (Llama has 'swiglu')."),
        ({"mlp": "gelu", "positions": "learned"}, "positions='learned' (Llama has 'rotary') and mlp='gelu'"),
    ],
)
def test_networks_that_llama_does_not_have(tmp_path: Path, capsys: Any, options: dict[str, Any], message: str) -> None:
    folder = save(module_of(**options), tmp_path / "x.ckpt")
    assert huggingface.main([str(folder), str(tmp_path / "out")]) == 1
    assert f"error: LlamaForCausalLM cannot express this GPT: {message}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_checkpoints_of_something_else(tmp_path: Path, capsys: Any) -> None:
    meta = {"hyper_parameters": {"width": 3}}
    folder = write_folder(tmp_path / "x.ckpt", {("model", "w"): torch.ones(2)}, {}, meta)
    assert huggingface.main([str(folder), str(tmp_path / "out")]) == 1
    assert "has no hyperparameter 'config': it was not saved by GPTModule" in capsys.readouterr().err
    meta = {"hyper_parameters": dict(module_of().hparams)}
    folder = write_folder(tmp_path / "y.ckpt", {("model", "model.other"): torch.ones(2)}, {}, meta)
    assert huggingface.main([str(folder), str(tmp_path / "out")]) == 1
    assert "Got model.other, which is not a weight of the GPT" in capsys.readouterr().err
