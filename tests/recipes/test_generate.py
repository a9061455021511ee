"""Texts from checkpoints: on the command line, after validation and by ``predict``, under every strategy."""

from __future__ import annotations

import doctest
import io
import math
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("jsonargparse")

from ls_strategy.errors import PlanError
from ls_strategy.extras.inference.sampling import Uniforms, row_seed, sample
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from recipes.gpt import generate, model
from recipes.gpt.corpus import ByteTokenizer, CorpusConfig
from recipes.gpt.data import TextData
from recipes.gpt.generate import InTurn, TextStream
from recipes.gpt.model import GPTModule, SampleConfig
from recipes.gpt.network import GPTConfig
from recipes.moe.model import MoEGPTModule
from recipes.moe.network import MoEConfig
from tests.dist.ranks import quiet
from tests.unit.checkpoint_folders import write_folder

SMALL = GPTConfig(block_size=32, num_layers=2, num_heads=4, num_kv_heads=2, width=32)
SAMPLE = SampleConfig(max_new_tokens=12, temperature=1.0, top_k=20, top_p=0.95)
PROMPTS = ["def f(", "x", "class Something:", "import os", "# "]


def build(kind: type[GPTModule] = GPTModule, **options: Any) -> GPTModule:
    """A module whose logits differ by far more than rounding."""
    torch.manual_seed(0)
    options = {"config": SMALL, "sample": SAMPLE, **options}
    if kind is MoEGPTModule:
        options.setdefault("moe", MoEConfig(num_experts=[4], eval_capacity_factor=0.5, min_capacity=1))
    module = kind(**options)
    module.configure_model()
    fill(module)
    return module.eval()


def fill(module: GPTModule) -> None:
    for name, p in module.named_parameters():
        torch.nn.init.normal_(p, mean=1.0 if "norm" in name else 0.0, std=0.3)


def save(module: GPTModule, path: Path, *, tokenizer: str | None = "bytes") -> str:
    """A folder as three ranks save it."""
    meta: dict[str, Any] = {"pytorch-lightning_version": pl.__version__, "hyper_parameters": dict(module.hparams)}
    if tokenizer is not None:
        meta["TextData"] = {"tokenizer": tokenizer}
    state = module.state_dict()
    tensors = {("model", name): value for name, value in state.items() if name != "model.head.weight"}
    aliases = {("model", "model.head.weight"): ("model", "model.token_embedding.weight")}
    return str(write_folder(path, tensors, {}, meta, aliases=aliases))


def expected(module: GPTModule, prompts: list[str]) -> list[str]:
    """Trusted: each prompt alone, without a cache, in a loop over whole sequences."""
    found = []
    for i, prompt in enumerate(prompts):
        uniforms = Uniforms.of_seed([row_seed(SAMPLE.seed, i)], 1)
        tokens = list(prompt.encode())
        for _ in range(SAMPLE.max_new_tokens):
            with torch.no_grad():
                logits = module(torch.tensor([tokens[-SMALL.block_size :]]))[:, -1]
            tokens.append(int(sample(logits, SAMPLE.sampling, uniforms)))
        found.append(bytes(tokens[len(prompt.encode()) :]).decode(errors="replace"))
    return found


# --- text as it comes -----------------------------------------------------------------------------------------------


@example(text="0e0", stop=["e", "0e0"])
@given(text=st.text(max_size=20), stop=st.lists(st.text(min_size=1, max_size=4), max_size=3))
def test_pieces_put_together_are_the_text_up_to_the_first_stop(text: str, stop: list[str]) -> None:
    data = text.encode(errors="replace")
    stream = TextStream(ByteTokenizer(), stop)
    pieces = [stream.add(token) for token in data]
    assert "".join([*pieces, stream.end()]) == SampleConfig(stop=stop).until_stop(data.decode())
    assert stream.add(65) in ("", "A")


def test_only_whole_characters_are_shown_and_nothing_that_may_begin_a_stop() -> None:
    stream = TextStream(ByteTokenizer(), ["\n\n"])
    assert [stream.add(byte) for byte in "é€".encode()] == ["", "é", "", "", "€"]
    assert [stream.add(byte) for byte in b"\nx\n\ny"] == ["", "\nx", "", "", ""]
    assert stream.ended
    broken = TextStream(ByteTokenizer())
    assert [broken.add(byte) for byte in (0xE2, 0x82)] == ["", ""]
    assert broken.end() == "\N{REPLACEMENT CHARACTER}"


def test_texts_that_grow_together_are_shown_one_after_the_other() -> None:
    out, texts = io.StringIO(), [TextStream(ByteTokenizer(), ["."]) for _ in range(3)]
    shown = InTurn(["a", "b", "c"], texts, out)
    rule = "-" * 20

    def step(tokens: bytes) -> None:
        for row, token in enumerate(tokens):
            shown.add(row, texts[row].add(token))
        shown.advance()

    step(b"12.")
    assert out.getvalue() == f"{rule} 1 of 3 {rule}\na1"
    step(b".34")
    assert out.getvalue().endswith(f"a1\n{rule} 2 of 3 {rule}\nb23")
    step(b"..5")
    shown.end()
    assert out.getvalue().endswith(f"b23\n{rule} 3 of 3 {rule}\nc\n")


# --- command line ---------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *args: str, kind: type[GPTModule] = GPTModule) -> tuple[int, str, str]:
    status = generate.main(kind, args, "generate")
    captured = capsys.readouterr()
    return status, captured.out, captured.err


OPTIONS = ("--max-new-tokens=12", "--temperature=1", "--top-k=20", "--top-p=0.95", "--seed=1", "--device=cpu")


@pytest.mark.wide
@pytest.mark.parametrize("kind", [GPTModule, MoEGPTModule])
def test_a_folder_of_any_ranks_continues_prompts(tmp_path: Path, capsys: Any, kind: type[GPTModule]) -> None:
    module = build(kind, **({"moe": MoEConfig(num_experts=[4], drop_tokens=False)} if kind is MoEGPTModule else {}))
    folder = save(module, tmp_path / "x.ckpt")
    prompts = [f"--prompt={prompt}" for prompt in PROMPTS]
    status, out, _ = run(capsys, "--ckpt", folder, *prompts, *OPTIONS, kind=kind)
    texts = re.split(r"-{20} \d of 5 -{20}\n", out)[1:]
    assert status == 0
    assert texts == [f"{p}{new}\n" for p, new in zip(PROMPTS, expected(module, PROMPTS), strict=True)]
    _, alone, _ = run(capsys, "--ckpt", folder, prompts[0], *OPTIONS, kind=kind)
    assert alone == texts[0]


def test_a_single_file_and_a_stop(tmp_path: Path, capsys: Any) -> None:
    module = build()
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    (text,) = expected(module, ["def "])
    stop = text[4]
    status, out, _ = run(capsys, f"--ckpt={tmp_path / 'x.ckpt'}", "--prompt", "def ", f"--stop={stop}", *OPTIONS)
    assert (status, out) == (0, f"def {text[: text.index(stop)]}\n")


@pytest.mark.wide
def test_errors_say_what_to_do(tmp_path: Path, capsys: Any) -> None:
    folder = save(build(), tmp_path / "x.ckpt")
    strange = save(build(config=GPTConfig(vocab_size=70, num_layers=1, width=32)), tmp_path / "y.ckpt", tokenizer=None)
    other = str(write_folder(tmp_path / "z.ckpt", {("model", "w"): torch.ones(2)}, {}, {"hyper_parameters": {}}))
    for args, message in (
        ((f"--ckpt={tmp_path / 'nothing'}", "--prompt=x"), "does not exist. Give a checkpoint"),
        ((f"--ckpt={other}", "--prompt=x"), "it was not saved by GPTModule"),
        ((f"--ckpt={folder}",), 'Give --prompt "..."'),
        ((f"--ckpt={folder}", "--prompt=x", f"--prompt={'y' * 33}"), "prompt 2 has 33 tokens, but must have between 1"),
        ((f"--ckpt={folder}", "--prompt="), "prompt 1 has 0 tokens"),
        ((f"--ckpt={folder}", "--prompt=x", "--temperature=-1"), "temperature=-1.0"),
        (
            (f"--ckpt={folder}", "--prompt=x", "--tokenizer=gpt2"),
            "50257 tokens, but the checkpoint's network has 256",
        ),
        ((f"--ckpt={strange}", "--prompt=x"), "Give --tokenizer"),
        ((f"--ckpt={folder}", "--prompt=x", "--device=nonsense"), "device='nonsense', but it cannot be used"),
        ((f"--ckpt={folder}", "--prompt=x", "--device=cuda:999"), "device='cuda:999', but it cannot be used"),
    ):
        status, out, err = run(capsys, *args)
        assert (status, out) == (1, ""), args
        assert err.startswith("error: "), args
        assert message in err, args
    status, _, err = run(capsys, f"--ckpt={folder}", "--prompt=x", kind=MoEGPTModule)
    assert status == 1
    assert "Use recipes.moe for checkpoints with 'moe'" in err


def test_the_tokenizer_is_the_checkpoints_or_follows_from_an_earlier_ones_vocabulary(
    tmp_path: Path, capsys: Any
) -> None:
    assert generate.tokenizer_of({"TextData": {"tokenizer": "o200k_base"}}, 256) == "o200k_base"
    assert [generate.tokenizer_of({}, size) for size in (256, 50304)] == ["bytes", "gpt2"]
    data = TextData(CorpusConfig(path=str(tmp_path)))
    assert data.state_dict() == {"tokenizer": "bytes"}
    data.load_state_dict({"tokenizer": "bytes"})


def test_every_option_is_explained(capsys: Any) -> None:
    with pytest.raises(SystemExit) as end:
        generate.main(GPTModule, ["--help"], "python -m recipes.gpt generate")
    assert end.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for option in (*generate.GenerateConfig.__dataclass_fields__,):
        assert f"--{option}" in shown
    assert "together have this probability" in shown
    for module in (generate, model):
        assert doctest.testmod(module).failed == 0


# --- strategies -----------------------------------------------------------------------------------------------------


def predict(rank: int, world_size: int, runs: dict[str, Any], folder: str, cache: str, kind: type[GPTModule]) -> Any:
    """Predictions of every strategy, from one checkpoint; one start of the ranks."""
    quiet()
    found: dict[str, Any] = {}
    for name, strategy in runs.items():
        module = kind(SMALL, sample=SAMPLE) if kind is GPTModule else MoEGPTModule(SMALL, MOE, sample=SAMPLE)
        data = TextData(CorpusConfig(path=__file__, cache_dir=cache), block_size=32, batch_size=2, prompts=PROMPTS)
        trainer = pl.Trainer(
            accelerator="cpu", devices=world_size, strategy=strategy, logger=False, enable_progress_bar=False,
            enable_checkpointing=False,
        )  # fmt: skip
        written: list[str] = []
        sizes: set[int] = set()

        def note_size(*_: Any, module: GPTModule = module, sizes: set[int] = sizes) -> None:
            sizes.add(module._cache.num_bytes if module._cache is not None else 0)

        module.on_predict_batch_end = note_size  # type: ignore[method-assign]
        module.print = lambda text, written=written: written.append(text)  # type: ignore[method-assign]
        texts = trainer.predict(module, data, ckpt_path=folder)
        found[name] = [text for batch in texts or [] for text in batch], written, sizes
    return found


MOE = MoEConfig(num_experts=[4], eval_capacity_factor=0.5, min_capacity=1)


CACHE_BYTES = 2 * SMALL.num_layers * 2 * SMALL.kv_heads * SMALL.block_size * SMALL.head_width * 4
"""Keys and values of a batch of two, in fp32, with all heads."""


def check(
    tmp_path: Path,
    runs: dict[str, Any],
    kind: type[GPTModule],
    replicas: dict[str, int],
    heads_over: dict[str, float] | None = None,
) -> None:
    """Every run predicts what one process does, on so many replicas, with heads over so many ranks."""
    heads_over = heads_over or {}
    module = build(kind, **({"moe": MOE} if kind is MoEGPTModule else {}))
    folder = save(module, tmp_path / "x.ckpt")
    if kind is MoEGPTModule:  # the trusted loop reads whole sequences, where experts would drop tokens
        module = build(kind, moe=MoEConfig(num_experts=[4], drop_tokens=False))
    texts = expected(module, PROMPTS)
    ranks = spawn(predict, 2, runs, folder, str(tmp_path / "cache"), kind, init_process_group=False, timeout_s=120)
    for name in runs:
        shares = [[0, 2, 4], [1, 3, 0]] if replicas.get(name, 2) == 2 else [[0, 1, 2, 3, 4]] * 2
        for rank, share in enumerate(shares):
            mine, written, sizes = ranks[rank][name]
            assert mine == [texts[i] for i in share], (name, rank)
            assert sizes == {CACHE_BYTES // heads_over.get(name, 1)}, (name, rank)
            assert len(written) == len(PROMPTS), (name, rank)
            for i, text in enumerate(written):
                assert text == f"{'-' * 20} prompt {i + 1} of 5 {'-' * 20}\n{PROMPTS[i]}{texts[i]}", (name, rank)


@pytest.mark.wide
def test_predict_writes_the_texts_of_one_process_under_every_strategy(tmp_path: Path) -> None:
    """Five prompts over two replicas: one is computed twice, and written once."""
    tensor = ZeROStrategy(stage=1, parallel={"tensor": 2})
    check(tmp_path, {"zero3_offload": "zero3_offload", "tp2": tensor}, GPTModule, {"tp2": 1}, {"tp2": 2})


@pytest.mark.slow
def test_predict_at_every_stage(tmp_path: Path) -> None:
    check(tmp_path, {name: name for name in ("zero0", "zero1", "zero2", "zero3", "zero2_offload")}, GPTModule, {})


@pytest.mark.slow
def test_predict_where_layers_and_sequences_are_divided_otherwise(tmp_path: Path) -> None:
    runs = {
        "tokens": ZeROStrategy(stage=2, parallel={"tensor": {"size": 2, "sequence_parallel": True}}),
        "sp2": ZeROStrategy(stage=3, parallel={"context": 2}),
        "tp2_zero3": ZeROStrategy(stage=3, parallel={"tensor": 2}),
    }
    check(tmp_path, runs, GPTModule, dict.fromkeys(runs, 1), {"tokens": math.inf, "tp2_zero3": 2})


@pytest.mark.slow
def test_predict_with_experts_on_other_ranks_whose_prompts_differ(tmp_path: Path) -> None:
    runs = {
        "ep2": ZeROStrategy(stage=0, parallel={"expert": 2}),
        "ep2_zero3": ZeROStrategy(stage=3, parallel={"expert": 2}),
        "tp2": ZeROStrategy(stage=1, parallel={"tensor": 2}),
        "zero1": "zero1",
    }
    check(tmp_path, runs, MoEGPTModule, {"tp2": 1}, {"tp2": 2})


def predict_in_a_pipeline(rank: int, world_size: int, folder: str, cache: str) -> str:
    strategy = ZeROStrategy(stage=0, parallel={"pipeline": {"size": 2, "micro_batches": 2}})
    with pytest.raises(PlanError) as error:
        predict(rank, world_size, {"pp2": strategy}, folder, cache, GPTModule)
    return str(error.value)


@pytest.mark.slow
def test_a_pipeline_refuses_to_predict_on_all_ranks(tmp_path: Path) -> None:
    folder = save(build(), tmp_path / "x.ckpt")
    for message in spawn(predict_in_a_pipeline, 2, folder, str(tmp_path / "c"), init_process_group=False, timeout_s=60):
        assert "pipeline stages" in message
        assert "Save a checkpoint, and generate from it" in message


def test_predict_needs_prompts_and_the_recipes_data(tmp_path: Path) -> None:
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    options |= {"enable_progress_bar": False}
    corpus = CorpusConfig(path=__file__, cache_dir=str(tmp_path))
    for prompts, cure in ((None, r"Give data\.prompts"), (["x", "y" * 33], "number 2 has 33 tokens")):
        with pytest.raises(ValueError, match=cure):
            pl.Trainer(**options).predict(build(), TextData(corpus, block_size=32, prompts=prompts))
    with pytest.raises(RuntimeError, match="datamodule=TextData"):
        pl.Trainer(**options).predict(build(), torch.utils.data.DataLoader([0]))  # type: ignore[arg-type]
