"""``from_pretrained`` in ``configure_model``: every rank reads its shards, and training is the same as with DDP."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy.lightning.strategy import ZeROStrategy
from tests.dist.ranks import Net, assert_equal, fit, on_ranks, weights

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")

VOCABULARY, LENGTH = 96, 8
GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64,
    "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0,
}  # fmt: skip
LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "tie_word_embeddings": False}),
}


def save(folder: Path, name: str, **options: Any) -> Path:
    """A model with random weights, as transformers saves it."""
    import transformers

    model, config, sizes = MODELS[name]
    torch.manual_seed(3)
    made = getattr(transformers, model)(getattr(transformers, config)(**sizes))
    with torch.no_grad():
        for p in made.parameters():  # also what starts as ones and zeros
            p.add_(torch.randn_like(p) / 50)
    made.to(options.pop("dtype", torch.float32)).save_pretrained(folder / name, **options)
    return folder / name


class Pretrained(Net):
    """Reads its weights in ``configure_model``."""

    auto = "AutoModelForCausalLM"

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder, self.options = str(folder), options
        super().__init__()

    def build(self) -> None:
        self.model: Any = None
        self.was_on_meta: bool | None = None

    def configure_model(self) -> None:
        if self.model is None:
            import transformers

            self.model = getattr(transformers, self.auto).from_pretrained(self.folder, **self.options)
            self.was_on_meta = all(p.is_meta for p in self.model.parameters())

    def on_fit_start(self) -> None:
        self.at_start = weights(self)

    def loss(self, batch: Any) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss


def tokens(numel: int = 16) -> DataLoader:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCABULARY, (numel, LENGTH), generator=generator)
    return DataLoader(TensorDataset(ids), batch_size=2)


class Reads:
    """Counts the bytes that this rank reads of safetensors files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from ls_strategy.pretrained import safetensors

        self.nbytes = 0
        plain = safetensors.read_into

        def read_into(path: Path, first: int, target: memoryview, what: str) -> None:
            self.nbytes += len(target)
            plain(path, first, target, what)

        monkeypatch.setattr(safetensors, "read_into", read_into)

    def total(self) -> int:
        """Of all ranks. Collective."""
        count = torch.tensor(self.nbytes)
        if dist.is_initialized():
            dist.all_reduce(count)
        return int(count)


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@on_ranks(2)
def _equal_to_ddp(rank: int, world_size: int, folder: str, names: list[str]) -> None:
    for name in names:
        place = Path(folder) / name
        with pytest.MonkeyPatch.context() as patch:
            reads = Reads(patch)
            ours = Pretrained(place)
            fit(ZeROStrategy(3, sharding={"min_unit_numel": 0}), ours, tokens(), max_epochs=1)
            assert ours.was_on_meta, name
            assert 0 < reads.total() <= 1.1 * bytes_of(place), name
        trusted = Pretrained(place)
        fit("ddp", trusted, tokens(), max_epochs=1)
        assert not trusted.was_on_meta
        assert_equal(ours.at_start, trusted.at_start, f"{name}, at the start")
        assert_equal(ours.losses, trusted.losses, f"{name}, losses")
        assert_equal(weights(ours), weights(trusted), f"{name}, at the end")


def test_training_from_files_is_what_ddp_makes_of_them(tmp_path: Path) -> None:
    for name in ("gpt2", "llama"):
        save(tmp_path, name)
    _equal_to_ddp(folder=str(tmp_path), names=["gpt2", "llama"])
