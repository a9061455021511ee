"""Fine-tuning: instructions to packed rows, and the program as a user runs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("jsonargparse")
pytest.importorskip("tensorboard")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ls_strategy.checkpoint.source import read_checkpoint
from recipes.finetune import base_model, export
from recipes.finetune.data import END, ByteEncoder, Files, InstructionData, TokenizerEncoder, make_encoder
from recipes.finetune.instructions import Record, embedded_records, read_records, split
from recipes.finetune.main import FinetuneCLI, main
from recipes.finetune.model import AdapterConfig, FinetuneModule, TeacherConfig
from recipes.finetune.packing import IGNORED, Document, PackedRows, pack
from recipes.gpt.model import OptimConfig
from tests.marks import wide
from tests.recipes import programs
from tests.trainers import bare_trainer

CONFIGS = programs.ROOT / "recipes" / "finetune" / "configs"
OVERLAYS = sorted(file for file in CONFIGS.glob("*.yaml") if file.name != "base.yaml")

# --- instructions ----------------------------------------------------------------------------------------------------


def test_lines_of_every_form_are_read(tmp_path: Path) -> None:
    lines = [
        {"prompt": "1+1=", "completion": "2"},
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Greet.", "output": "Hello"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    ]
    file = tmp_path / "lines.jsonl"
    file.write_text("\n\n".join(map(json.dumps, lines)))
    first, second, third, last = read_records(file)
    assert first.turns == (("1+1=", "2"),)
    assert second.turns == (("### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n", "3"),)
    assert third.turns == (("### Instruction:\nGreet.\n\n### Response:\n", "Hello"),)
    assert [m["content"] for m in last.messages] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "said"), [('{"text": "a"}', r"line 2 has \['text'\]"), ("{", "line 2 is not JSON"), ("[1]", "has list")]
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text(f'{{"prompt": "a", "completion": "b"}}\n{line}\n')
    with pytest.raises(ValueError, match=said):
        read_records(file)


@pytest.mark.wide
def test_the_standard_library_documents_its_functions() -> None:
    records = embedded_records()
    assert len(records) > 1000
    assert len(set(records)) == len(records)
    prompt, response = records[0].turns[0]
    assert prompt.startswith("### Instruction:\nDocument this function.\n\n### Input:\n")
    assert "def " in prompt
    assert response.strip()
    assert response not in prompt
    train, val = split(records, 0.05)
    assert (*train, *val) == tuple(records)
    assert len(val) == round(len(records) * 0.05)


def test_bytes_end_a_response() -> None:
    found = ByteEncoder().document(Record((("ab", "c"), ("d", "e"))))
    assert found.tokens == [*b"abc", END, *b"de", END]
    assert found.predicted == [False, False, True, True, False, True, True]


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of words with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<end>", "<user>", "<bot>", "one", "two", "three", "[?]"])}
    plain = Tokenizer(models.WordLevel(words, unk_token="[?]"))  # type: ignore[arg-type]
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>", unk_token="[?]")
    fast.chat_template = (
        "{% for m in messages %}{{ '<user> ' if m.role == 'user' else '<bot> ' }}{{ m.content }} <end> {% endfor %}"
        "{% if add_generation_prompt %}<bot> {% endif %}"
    )
    folder = tmp_path_factory.mktemp("chat")
    fast.save_pretrained(folder)
    return folder


def test_answers_of_a_conversation_are_its_responses(chat_folder: Path) -> None:
    encoder = make_encoder(str(chat_folder))
    assert isinstance(encoder, TokenizerEncoder)
    talk = [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "one one")]
    found = encoder.document(Record((), tuple({"role": r, "content": c} for r, c in talk)))
    assert found.tokens == [1, 3, 0, 2, 4, 0, 1, 5, 0, 2, 3, 3, 0]
    assert [t for t, p in zip(found.tokens, found.predicted, strict=True) if p] == [4, 0, 3, 3, 0]


def test_a_template_that_rewrites_the_past_is_an_error(chat_folder: Path) -> None:
    encoder = TokenizerEncoder(str(chat_folder))
    tokenizer: Any = encoder._tokenizer
    tokenizer.chat_template = (
        "{{ 'one' if messages | length == 1 else 'two' }} {% for m in messages %}{{ m.content }} {% endfor %}"
    )
    talk = ({"role": "user", "content": "one"}, {"role": "assistant", "content": "two"})
    with pytest.raises(ValueError, match="changes earlier messages"):
        encoder.document(Record((), talk))


# --- packing ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 16), max_size=200))
def test_every_document_is_in_one_row_with_room(lengths: list[int]) -> None:
    rows = pack(lengths, 16)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 16 for row in rows)
    assert all(row == sorted(row) for row in rows)


def test_a_row_is_its_documents() -> None:
    documents = [Document([5, 6, 7], [False, True, True]), Document([8, 9], [True, True])]
    (row,) = PackedRows(documents, 6, packed=True, padding=1)
    assert row["input_ids"].tolist() == [5, 6, 7, 8, 9, 1]
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 1, 0]
    assert row["labels"].tolist() == [IGNORED, 6, 7, IGNORED, 9, IGNORED]  # nothing precedes 8 in its document


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights."""
    folder = tmp_path_factory.mktemp("models") / "base"
    assert base_model.main([str(folder), "--layers=2", "--width=32", "--steps=0", "--block_size=64"]) == 0
    return folder


@pytest.mark.wide
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packing_changes_no_loss(base: Path, attention: str) -> None:
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(1)
    documents = []
    for length in (9, 14, 3, 30, 8, 21, 2, 17):
        tokens = torch.randint(1, 256, (length,), generator=generator).tolist()
        documents.append(Document(tokens, [i >= length // 3 for i in range(length)]))
    module = FinetuneModule(str(base))
    module.model = AutoModelForCausalLM.from_pretrained(base, attn_implementation=attention)
    found = []
    for packed in (True, False):
        rows = PackedRows(documents, 32, packed=packed, padding=END)
        assert (len(rows) < len(documents)) is packed
        loss, _, count = module._losses(torch.utils.data.default_collate(list(rows)))
        found.append((float(loss.detach()), int(count)))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


# --- the program -----------------------------------------------------------------------------------------------------


def build(*args: str, folder: Path) -> FinetuneCLI:
    """The objects, from arguments alone and not from those of pytest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["recipes.finetune"])
        return main([*args, "--trainer.devices=1", f"--trainer.logger.init_args.save_dir={folder}"], run=False)


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> FinetuneCLI:
    return build(f"--config={CONFIGS / 'base.yaml'}", folder=tmp_path_factory.mktemp("runs"))


@pytest.mark.wide
@pytest.mark.sample(3)
@pytest.mark.parametrize("file", OVERLAYS, ids=programs.stem)
def test_an_overlay_is_taken_and_says_only_what_it_changes(cli: FinetuneCLI, file: Path) -> None:
    parsed = cli.parser.parse_args([f"--config={CONFIGS / 'base.yaml'}", f"--config={file}"])
    assert parsed.data.model == parsed.model.model
    base, overlay = (programs.flatten(yaml.safe_load(f.read_text())) for f in (CONFIGS / "base.yaml", file))
    assert not [key for key, value in overlay.items() if key in base and base[key] == value]
    programs.assert_names_no_place(file)


@pytest.fixture(scope="module")
def lines(base: Path) -> Path:
    """Sums of small numbers, in words."""
    file = base.parent / "lines.jsonl"
    file.write_text(
        "".join(
            json.dumps({"prompt": f"{i}+{j}=", "completion": f" {i + j}"}) + "\n" for i in range(12) for j in range(12)
        )
    )
    return file


def data(base: Path) -> InstructionData:
    return InstructionData(str(base), Files(train=str(base.parent / "lines.jsonl")), block_size=64, batch_size=2)


def trained(base: Path, folder: Path, **options: Any) -> tuple[FinetuneModule, Path]:
    """A module after three steps on one rank at stage 3, and its checkpoint."""
    pl.seed_everything(1)
    module = FinetuneModule(str(base), optim=OptimConfig(lr=1e-2, warmup_steps=1), **options)
    trainer = bare_trainer("zero3", max_steps=3, limit_val_batches=2)
    trainer.fit(module, datamodule=data(base))
    trainer.save_checkpoint(folder / "last.ckpt")
    return module, folder / "last.ckpt"


def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(1, 33).view(2, 16)
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.wide
@pytest.mark.usefixtures("lines")
def test_a_trained_model_is_exported(base: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    _, checkpoint = trained(base, tmp_path)
    assert export.main([str(checkpoint), str(tmp_path / "out")]) == 0
    assert export.main([str(checkpoint), str(tmp_path / "out")]) == 1  # it exists
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    kept = read_checkpoint(checkpoint, weights_only=True)["state_dict"]
    assert all(torch.equal(value, kept[f"model.{name}"]) for name, value in again.state_dict().items())
    assert not torch.equal(logits(again), logits(AutoModelForCausalLM.from_pretrained(base)))


@pytest.mark.wide
@pytest.mark.usefixtures("lines")
@pytest.mark.parametrize("options", [wide({}, id="{}"), {"dora": True}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_an_adapter_is_exported_and_merged(base: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    _, checkpoint = trained(base, tmp_path, adapter=AdapterConfig(rank=4, **options))
    export.export(checkpoint, tmp_path / "adapter")
    export.export(checkpoint, tmp_path / "merged", merge=True)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "adapter"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    found, plain = logits(adapted), logits(AutoModelForCausalLM.from_pretrained(base))
    assert not torch.allclose(found, plain, atol=1e-4)
    torch.testing.assert_close(logits(merged), found, atol=1e-5, rtol=1e-5)
    kept = read_checkpoint(checkpoint, weights_only=True)["state_dict"]
    changed = {name for name, p in adapted.named_parameters() if "lora" in name or "modules_to_save" in name}
    assert changed
    assert all(torch.equal(adapted.state_dict()[name], kept[f"model.{name}"]) for name in changed)


@pytest.mark.usefixtures("lines")
def test_a_teacher_is_frozen_and_teaches(base: Path, tmp_path: Path) -> None:
    module, _ = trained(base, tmp_path, teacher=TeacherConfig(model=str(base), weight=1.0))
    assert not any(p.requires_grad for p in module.teacher.parameters())
    assert not module.teacher.training
    # A student that is its own teacher has nothing to learn.
    student = FinetuneModule(str(base), teacher=TeacherConfig(model=str(base), weight=1.0))
    student.configure_model()
    rows = data(base)
    rows.setup("fit")
    loss, entropy, _ = student._losses(next(iter(rows.val_dataloader())))
    assert float(loss.detach()) == pytest.approx(0, abs=1e-3)
    assert float(entropy.detach()) > 1


def scalars(folder: Path) -> dict[str, list[float]]:
    (run,) = folder.glob("finetune/version_0")
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    return {tag: [e.value for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.wide
@pytest.mark.parametrize(
    "overlays", [pytest.param([], marks=pytest.mark.slow, id="in full"), pytest.param(["lora"], id="lora")]
)
def test_losses_are_those_of_ddp(base: Path, lines: Path, tmp_path: Path, overlays: list[str]) -> None:
    options = [
        f"--model.model={base}", "--trainer.max_steps=6", "--trainer.val_check_interval=3",
        "--trainer.log_every_n_steps=1", "--data.block_size=64", "--data.batch_size=2",
        f"--data.files.train={lines}", "--model.optim.warmup_steps=2",
    ]  # fmt: skip
    found = {}
    for name, more in (("zero3", overlays), ("ddp", [*overlays, "ddp"])):
        programs.fit(tmp_path / name, ["base", *more], *options, recipe="finetune")
        found[name] = scalars(tmp_path / name)
    for tag in ("train/loss", "val/loss"):
        assert len(found["ddp"][tag]) == {"train/loss": 6, "val/loss": 2}[tag]
        assert found["zero3"][tag] == pytest.approx(found["ddp"][tag], rel=1e-5)
