"""``ls-strategy bench-inference`` on a checkpoint, and on a model of transformers with random weights."""

from __future__ import annotations

from pathlib import Path

import lightning
import pytest
import torch

from ls_strategy.extras.cli import main
from ls_strategy.extras.inference.measure import triad_gbs, weights_read
from recipes.gpt.model import GPTModule
from recipes.gpt.network import GPT, GPTConfig
from tests.unit.test_cli_json import check

SIZE = GPTConfig(vocab_size=256, block_size=64, num_layers=2, num_heads=2, width=64, tied_embeddings=False)
SHORT = ["--prompt-length", "8", "--new-tokens", "4", "--rounds", "1"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    module = GPTModule(config=SIZE)
    module.configure_model()
    state = {
        "state_dict": module.state_dict(),
        "hyper_parameters": dict(module.hparams),
        "pytorch-lightning_version": lightning.__version__,
    }
    torch.save(state, tmp_path / "model.ckpt")
    return str(tmp_path / "model.ckpt")


def test_a_checkpoint(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("Wer reitet so spät durch Nacht und Wind? " * 20)
    command = ["bench-inference", checkpoint, "--module", "recipes.gpt.model.GPTModule", *SHORT, "--text", str(text)]
    command += ["--context", "32", "--windows", "8"]
    assert main([*command, "--quantize", "int8", "--batch", "2", "--json"]) == 0
    captured = capsys.readouterr()
    result = check("bench-inference", captured.out)
    assert result["peak_device_bytes"] is result["resting_bytes"] is None
    assert "round 1 of 1" in captured.err
    assert result["batch"] == 2
    assert result["token_s"] > 0
    assert result["tokens_per_s"] == pytest.approx(2 / result["token_s"])
    assert abs(result["perplexity_change"]) < 0.01
    assert result["weight_bytes"] < 0.5 * result["weight_bytes_before"]
    assert result["weights_read"] == pytest.approx(result["weight_bytes"], rel=0.4)  # but for the embedding
    assert result["bandwidth_share"] > 0
    assert main([*command, "--offload", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "time to first token" in out
    assert "perplexity" in out


def test_models_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=97, **sizes)
    config.save_pretrained(tmp_path)
    assert main(["bench-inference", str(tmp_path / "config.json"), *SHORT, "--dtype", "bf16"]) == 0
    assert "fraction of that limit" in capsys.readouterr().out
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)  # now block by block, never whole
    capsys.readouterr()  # transformers imports DeepSpeed where it is installed, which prints
    options = ["--offload", "nvme", "--nvme-path", str(tmp_path), "--quantize", "int8", "--json"]
    assert main(["bench-inference", str(tmp_path), *SHORT, *options]) == 0
    result = check("bench-inference", capsys.readouterr().out)
    assert 0 < result["resting_bytes"] < result["weight_bytes"] < result["weight_bytes_before"]


def test_errors_say_what_to_do(
    checkpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_module = [checkpoint, "--module", "recipes.gpt.model.GPTModule"]
    for arguments, words in (
        (["nowhere"], "does not exist"),
        ([checkpoint], "give its class: --module"),
        ([checkpoint, "--module", "recipes.gpt.model.Nothing"], "Give an importable class"),
        ([*with_module, "--new-tokens", "1"], "new_tokens at least 2"),
        ([*with_module, "--new-tokens", "60"], "92 tokens, but the model reads 64 at once"),
        ([*with_module, "--context", "65"], "--context of 65 tokens, but the model reads 64 at once"),
        ([*with_module, "--device", "meta"], "which computes nothing"),
        ([*with_module, "--tensor-parallel-size", "2"], "torchrun --nproc-per-node 2"),
    ):
        assert main(["bench-inference", *arguments]) == 1
        assert words in capsys.readouterr().err


def test_what_is_read_for_a_token() -> None:
    network = GPT(SIZE)
    everything = sum(t.nbytes for t in (*network.parameters(), *network.buffers()))
    assert weights_read(network) == everything - network.token_embedding.weight.nbytes
    tied = GPT(GPTConfig(**{**vars(SIZE), "tied_embeddings": True}))
    assert weights_read(tied) == weights_read(network)
    assert 0.1 < triad_gbs(torch.device("cpu"), rounds=1) < 10_000
