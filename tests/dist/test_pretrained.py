"""``from_pretrained`` in ``configure_model``: every rank reads its shards, and training is the same as with DDP."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy.errors import CheckpointError
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.zero_stages import POLICIES
from tests.dist.ranks import Net, assert_equal, fit, on_ranks, weights
from tests.marks import few_or_all, slow

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")

VOCABULARY, LENGTH = 96, 8
GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64,
    "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 64,
    "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0,
}  # fmt: skip
T5 = {
    "vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 112, "num_layers": 2, "num_heads": 4,
    "dropout_rate": 0, "decoder_start_token_id": 0,
}  # fmt: skip
MOE = {
    **LLAMA, "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48, "decoder_sparse_step": 1, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
VIT = {
    "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 4,
    "image_size": 16, "patch_size": 4, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, "num_labels": 5,
}  # fmt: skip
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "tie_word_embeddings": False}),
    "llama, tied": ("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "tie_word_embeddings": True}),
    "bert": ("BertModel", "BertConfig", BERT),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "qwen2-moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", MOE),
    "vit": ("ViTForImageClassification", "ViTConfig", VIT),
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

    # torch's fused update for CPUs rounds the last elements of a tensor otherwise than those that fill a vector, so a
    # bias of 5 elements has other bits alone than within a long buffer. The update in a loop has no such border.
    fused: bool | None = False

    def __init__(self, folder: Path, auto: str = "AutoModelForCausalLM", **options: Any) -> None:
        self.folder, self.auto, self.options = str(folder), auto, options
        super().__init__()

    def build(self) -> None:
        self.model: Any = None
        self.was_on_meta: bool | None = None

    def load(self) -> Any:
        import transformers

        return getattr(transformers, self.auto).from_pretrained(self.folder, **self.options)

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.load()
            self.model.config.use_cache = False  # its first, empty tensor is on the host
            self.was_on_meta = next(self.model.parameters()).is_meta

    def on_fit_start(self) -> None:
        self.at_start = weights(self)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-4, fused=self.fused)

    def loss(self, batch: Any) -> Tensor:
        ids = batch[0]
        if "ImageClassification" in self.auto:
            images = torch.stack([torch.sin(ids[:, :3, None, None] + torch.arange(16.0) * i) for i in range(16)], 3)
            return self.model(pixel_values=images.squeeze(2), labels=ids[:, 0] % 5).loss
        labels = ids[:, 0] % 2 if "SequenceClassification" in self.auto else ids
        return self.model(input_ids=ids, labels=labels).loss


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
        count = torch.tensor(self.nbytes).to("cpu:0")  # the device of `tests.native_ranks`
        if dist.is_initialized():
            dist.all_reduce(count)
        return int(count)


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def compare(place: Path, what: str, auto: str = "AutoModelForCausalLM", stage: Any = None, **options: Any) -> int:
    """A fit from files against DDP. Returns bytes read by all ranks. Collective."""
    with pytest.MonkeyPatch.context() as patch:
        reads = Reads(patch)
        ours = Pretrained(place, auto, **options)
        fit(stage or ZeROStrategy(3, sharding={"min_unit_numel": 0}), ours, tokens(), max_epochs=1)
        total = reads.total()
    on_meta = stage is None or POLICIES[stage.config.stage].parameters
    assert ours.was_on_meta is on_meta, what
    trusted = Pretrained(place, auto, **options)
    fit("ddp", trusted, tokens(), max_epochs=1)
    assert not trusted.was_on_meta
    assert_equal(ours.at_start, trusted.at_start, f"{what}, at the start")
    assert_equal(ours.losses, trusted.losses, f"{what}, losses")
    assert_equal(weights(ours), weights(trusted), f"{what}, at the end")
    return total


@on_ranks(2)
def _equal_to_ddp(rank: int, world_size: int, folder: str, cases: dict[str, dict[str, Any]]) -> None:
    for name, options in cases.items():
        place = Path(folder) / name
        assert 0 < compare(place, name, **options) <= 1.1 * bytes_of(place), name


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_training_from_files_is_what_ddp_makes_of_them(name: str, tmp_path: Path) -> None:
    save(tmp_path, name)
    _equal_to_ddp(folder=str(tmp_path), cases={name: {}})


@pytest.mark.wide
def test_tied_weights_and_several_files(tmp_path: Path) -> None:
    place = save(tmp_path, "llama, tied", max_shard_size="60KB")
    assert len(list(place.glob("*.safetensors"))) > 3
    _equal_to_ddp(folder=str(tmp_path), cases={"llama, tied": {}})


@on_ranks(2)
def _on_every_rank(rank: int, world_size: int, folder: str, cases: dict[str, dict[str, Any]]) -> None:
    stages: Any = itertools.cycle((0, 1, 2))
    for (name, options), stage in zip(cases.items(), stages, strict=False):
        place = Path(folder) / name
        strategy = ZeROStrategy(stage, sharding={"min_unit_numel": 0})
        total = compare(place, f"{name}, stage {stage}", stage=strategy, **options)
        assert 0 < total <= 1.1 * bytes_of(place), (name, total, bytes_of(place))


CASES = {
    "bert": {"auto": "AutoModelForSequenceClassification"},
    "t5": {"auto": "AutoModelForSeq2SeqLM"},
    "qwen2-moe": {},
    "vit": {"auto": "AutoModelForImageClassification"},
}


@pytest.mark.wide
@pytest.mark.parametrize(
    "names", few_or_all(("gpt2", "llama, tied"), ("gpt2", "llama, tied", *CASES))
)  # fmt: skip
def test_where_every_rank_has_the_full_model_the_ranks_read_the_files_once(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    for name in names:
        save(tmp_path, name)
    _on_every_rank(folder=str(tmp_path), cases={name: CASES.get(name, {}) for name in names})


@pytest.mark.sample(1)
@pytest.mark.parametrize("names", [("qwen2-moe",), ("bert", "t5", "vit")], ids=", ".join)
def test_families(names: tuple[str, ...], tmp_path: Path) -> None:
    """BERT gets a head that no file has: rank 0's random numbers, as under DDP."""
    for name in names:
        save(tmp_path, name)
    _equal_to_ddp(folder=str(tmp_path), cases={name: CASES[name] for name in names})


@on_ranks(2)
def _dtypes(rank: int, world_size: int, folder: str, dtypes: tuple[Any, ...]) -> None:
    for dtype in dtypes:
        ours, trusted = (Pretrained(Path(folder) / "gpt2", dtype=dtype) for _ in range(2))
        fit(3, ours, tokens(), max_steps=1)
        fit("ddp", trusted, tokens(), max_steps=1)
        assert_equal(ours.at_start, trusted.at_start, f"{dtype}, at the start")
        assert_equal(ours.losses, trusted.losses, f"{dtype}, loss")


@pytest.mark.wide
@pytest.mark.parametrize(
    "dtypes", few_or_all(("auto", torch.float16), ("auto", torch.float32, torch.bfloat16, torch.float16))
)
def test_dtypes_are_those_of_transformers(dtypes: tuple[Any, ...], tmp_path: Path) -> None:
    save(tmp_path, "gpt2", dtype=torch.bfloat16)
    _dtypes(folder=str(tmp_path), dtypes=dtypes)


class Classifier(Pretrained):
    """Every rank draws other numbers for the head, and expects rank 0's. ``reports``: what was logged."""

    def load(self) -> Any:
        import transformers

        reports = self.reports = []

        class Listener(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                reports.append(record.getMessage())

        listener = Listener()
        transformers.utils.logging.get_logger("transformers").addHandler(listener)
        torch.manual_seed(dist.get_rank())
        try:
            return super().load()
        finally:
            transformers.utils.logging.get_logger("transformers").removeHandler(listener)


@on_ranks(2)
def _missing_keys(rank: int, world_size: int, folder: str) -> None:
    options: dict[str, Any] = {"auto": "AutoModelForSequenceClassification", "num_labels": 7}
    for name, more in (("bert", {}), ("bert with 3 classes", {"ignore_mismatched_sizes": True})):
        ours, trusted = (Classifier(Path(folder) / name, **options, **more) for _ in range(2))
        fit(3, ours, tokens(), max_steps=1)
        fit("ddp", trusted, tokens(), max_steps=1)
        assert_equal(ours.at_start, trusted.at_start, f"{name}, at the start")
        assert_equal(ours.losses, trusted.losses, f"{name}, losses")
        (expected,) = [text for text in trusted.reports if "LOAD REPORT" in text]
        assert "classifier.weight" in expected
        assert [text for text in ours.reports if "LOAD REPORT" in text] == ([expected] if rank == 0 else [])
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        fit(3, Classifier(Path(folder) / "bert with 3 classes", **options), tokens(), max_steps=1)


@pytest.mark.wide
def test_missing_and_mismatched_entries_are_as_transformers_fills_them_and_reported_once(tmp_path: Path) -> None:
    save(tmp_path, "bert")
    MODELS["bert with 3 classes"] = ("BertForSequenceClassification", "BertConfig", {**BERT, "num_labels": 3})
    save(tmp_path, "bert with 3 classes")
    _missing_keys(folder=str(tmp_path))


BLOCK = {"hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8}
WIDE: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 8192, "n_embd": 512, "n_layer": 12, "n_head": 8},
    "llama": {**BLOCK, "vocab_size": 8192, "intermediate_size": 1376, "num_key_value_heads": 8},
    "bert": {**BLOCK, "vocab_size": 8192, "intermediate_size": 2048},
    "t5": {"vocab_size": 8192, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
    "qwen2-moe": {
        **BLOCK, "num_hidden_layers": 6, "num_key_value_heads": 8, "vocab_size": 8192, "num_experts": 8,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    },
    "vit": {**BLOCK, "intermediate_size": 2048},
}  # fmt: skip
"""Sizes with which models have 100 to 200 MiB."""

CONSTANT = 32 << 20
"""Bytes that reading and setting up take in addition."""


class Peak(Pretrained):
    """Resident memory of the set-up: what is added at the highest, to the code of the model."""

    def configure_model(self) -> None:
        import transformers

        with torch.device("meta"):
            getattr(transformers, self.auto).from_config(transformers.AutoConfig.from_pretrained(self.folder))
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        self.before = resident("VmRSS")
        super().configure_model()

    def on_fit_start(self) -> None:
        self.peak = resident("VmHWM") - self.before
        self.trainer.should_stop = True

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def second_rank_cannot_read(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let the fourth read of rank 1 fail."""
    from ls_strategy.pretrained import safetensors as files

    plain, calls = files.read_into, []

    def read_into(path: Path, first: int, target: memoryview, what: str) -> None:
        calls.append(what)
        if rank == 1 and len(calls) == 4:
            raise CheckpointError(f"{path} cannot be read: Input/output error.")
        plain(path, first, target, what)

    patch.setattr(files, "read_into", read_into)


def resident(what: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


@on_ranks(2, timeout_s=120)
def of_a_shard_and_a_tensor(
    rank: int, world_size: int, folder: str, options: dict[str, Any], strategy: dict[str, Any]
) -> None:
    """Loading and a step take the memory of this rank's shard and of the largest tensor; all is read once."""
    place = Path(folder)
    with pytest.MonkeyPatch.context() as patch:
        reads = Reads(patch)
        module = Peak(place, **options)
        fit(ZeROStrategy(**strategy), module, tokens(4), max_steps=1)
        total = reads.total()
    assert module.was_on_meta
    model = bytes_of(place)
    largest = max(p.numel() for p in module.parameters()) * 4
    allowed = model / world_size + largest + CONSTANT
    assert module.peak <= allowed, f"peak {module.peak / 2**20:.0f} MiB of {model / 2**20:.0f}"
    assert total <= 1.01 * model


def save_wide(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Save a model whose tensors are larger than what loading takes anyway, and return the folder and options."""
    model, config, sizes = MODELS[name]
    monkeypatch.setitem(MODELS, name, (model, config, {**sizes, **WIDE[name]}))
    return {"folder": str(save(folder, name)), "options": CASES.get(name, {})}


@pytest.mark.wide
@pytest.mark.parametrize("name", ["llama", *(slow(name) for name in WIDE if name != "llama")])
def test_no_rank_needs_more_memory_than_its_shard_and_a_tensor(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_a_shard_and_a_tensor(**save_wide(tmp_path, name, monkeypatch), strategy={"stage": 3})
