"""Every token is used once per pass over the text, by one rank, in an order that a resumed run continues."""

from __future__ import annotations

import builtins
import itertools
import math
import threading
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint

from recipes.gpt.corpus import ByteTokenizer, Corpus, CorpusConfig, Tokens, vocab_size
from recipes.gpt.data import Crops, CropSampler, ResumableLoader, TextData
from recipes.gpt.model import GPTModule, OptimConfig, SampleConfig
from recipes.gpt.network import GPTConfig


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty files of text, one in a folder that is left out, one that is no text file, one empty."""
    root = tmp_path / "text"
    for i in range(20):
        file = root / f"part{i % 3}" / f"file{i}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# file {i}\n" + "".join(f"x{j} = {i * j}\n" for j in range(60)))
    (root / "tests").mkdir()
    (root / "tests" / "left_out.py").write_text("LEFT OUT" * 100)
    (root / "part0" / "other.txt").write_text("OTHER" * 100)
    (root / "part0" / "empty.py").write_text("")
    return root


def corpus(folder: Path, tmp_path: Path, **options) -> CorpusConfig:
    return CorpusConfig(path=str(folder), cache_dir=str(tmp_path / "cache"), **options)


def opened(config: CorpusConfig) -> tuple[Tokens, Tokens]:
    c = Corpus(config)
    c.build()
    return c.open()


# --- corpus ----------------------------------------------------------------------------------------------------------


def test_the_text_is_whole_and_validation_files_are_not_trained_on(folder, tmp_path) -> None:
    config = corpus(folder, tmp_path, val_fraction=0.2)
    train, val = (bytes(t.values).decode() for t in opened(config))
    texts = [f.read_text() for f in Corpus(config).files()]
    assert len(texts) == 20
    assert train + val == "".join(texts)
    cut = len([t for t in texts if t in train])
    assert train == "".join(texts[:cut])
    assert 0.2 <= len(val) / len(train + val) < 0.3
    assert "LEFT OUT" not in train + val
    assert "OTHER" not in train + val


def test_a_single_file_is_cut(tmp_path) -> None:
    file = tmp_path / "one.txt"
    file.write_text("abcdefghij" * 100)
    train, val = opened(corpus(file, tmp_path, val_fraction=0.1, max_bytes=500))
    assert (bytes(train.values) + bytes(val.values)).decode() == ("abcdefghij" * 50)
    assert len(val) == 50


def test_a_cap_takes_whole_files_of_the_same_order(folder, tmp_path) -> None:
    everything = Corpus(corpus(folder, tmp_path)).files()
    capped = Corpus(corpus(folder, tmp_path, max_bytes=3000)).files()
    assert capped == everything[: len(capped)]
    assert sum(f.stat().st_size for f in capped) <= 3000 < sum(f.stat().st_size for f in everything[: len(capped) + 1])


def test_an_entry_is_built_once_and_again_when_the_text_or_an_option_changes(folder, tmp_path) -> None:
    config = corpus(folder, tmp_path)
    opened(config)
    first = Corpus(config).entry
    stamp = (first / "train.bin").stat().st_mtime_ns
    opened(config)
    assert (first / "train.bin").stat().st_mtime_ns == stamp
    assert Corpus(corpus(folder, tmp_path, val_fraction=0.3)).entry != first
    (folder / "part0" / "file0.py").write_text("changed")
    assert Corpus(config).entry != first


def test_a_broken_build_leaves_nothing(folder, tmp_path, monkeypatch) -> None:
    config = corpus(folder, tmp_path)
    broken = Corpus(config)
    calls = iter(range(100))

    def fail(_self: ByteTokenizer, text: str) -> list[int]:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return list(text.encode())

    monkeypatch.setattr(ByteTokenizer, "encode", fail)
    with pytest.raises(KeyboardInterrupt):
        broken.build()
    assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.undo()
    assert len(opened(config)[0]) > 0


def test_builders_at_the_same_time_end_with_one_entry(folder, tmp_path) -> None:
    config = corpus(folder, tmp_path)
    errors: list[BaseException] = []
    start = threading.Barrier(4)

    def build() -> None:
        try:
            c = Corpus(config)
            start.wait()
            c.build()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=build) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == []
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [Corpus(config).entry.name]


def test_unigram_entropy_is_that_of_the_frequencies(tmp_path) -> None:
    file = tmp_path / "two.txt"
    file.write_text("ab" * 400)
    _, val = opened(corpus(file, tmp_path, val_fraction=0.5))
    assert val.unigram_entropy == pytest.approx(math.log(2))


@pytest.mark.wide
def test_the_default_text_is_the_standard_library_without_its_tests() -> None:
    c = Corpus(CorpusConfig())
    names = {str(f.relative_to(c.root)) for f in c.files()}
    assert "dataclasses.py" in names
    assert not [n for n in names if {"test", "tests", "site-packages"} & set(Path(n).parts[:-1])]


@given(st.text())
def test_bytes_decode_to_the_text_they_encode(text: str) -> None:
    encodable = text.encode(errors="replace").decode()
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(encodable)) == encodable


def test_tokens_beyond_the_vocabulary_decode_to_nothing() -> None:
    assert ByteTokenizer().decode([104, 105, 300]) == "hi"


@pytest.mark.parametrize("name", ["bytes", "gpt2", "cl100k_base", "o200k_base"])
def test_every_token_fits_its_file(name: str, tmp_path) -> None:
    assert vocab_size(name) % 64 == 0
    c = Corpus(CorpusConfig(path=str(tmp_path)))
    c.config = CorpusConfig(path=str(tmp_path), tokenizer=name)  # type: ignore[arg-type]  # not by __init__: needs tiktoken
    assert np.iinfo(c.dtype).max + 64 > vocab_size(name) - 1


def test_errors_say_what_to_do(folder, tmp_path, monkeypatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"data\.corpus\.path.*does not exist"):
        Corpus(CorpusConfig(path=str(tmp_path / "nowhere")))
    nothing = Corpus(corpus(folder, tmp_path, pattern="*.nothing"))
    nothing.build()
    with pytest.raises(FileNotFoundError, match=r"matches data\.corpus\.pattern"):
        nothing.open()
    with pytest.raises(FileNotFoundError, match="not tokenized on this node"):
        Corpus(corpus(folder, tmp_path)).open()
    with pytest.raises(ValueError, match="val_fraction"):
        CorpusConfig(val_fraction=1.0)

    real_import = builtins.__import__

    def without_tiktoken(name, *args, **kwargs):
        if name == "tiktoken":
            raise ModuleNotFoundError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_tiktoken)
    with pytest.raises(ModuleNotFoundError, match="pip install tiktoken"):
        Corpus(corpus(folder, tmp_path, tokenizer="gpt2"))


# --- order -----------------------------------------------------------------------------------------------------------


@given(
    num_tokens=st.integers(40, 2000),
    block_size=st.integers(1, 20),
    ranks=st.integers(1, 5),
    text_pass=st.integers(0, 3),
    seed=st.integers(0, 5),
)
def test_a_pass_uses_every_token_once_but_those_at_the_ends(num_tokens, block_size, ranks, text_pass, seed) -> None:
    samplers = [CropSampler(num_tokens, block_size, seed=seed, num_replicas=ranks, rank=r) for r in range(ranks)]
    assert all(torch.equal(s.order(text_pass), samplers[0].order(text_pass)) for s in samplers)
    starts = samplers[0].order(text_pass).sort().values.tolist()
    assert all(b - a == block_size for a, b in itertools.pairwise(starts))
    assert starts[0] >= 0
    assert starts[-1] + block_size + 1 <= num_tokens
    assert len(starts) * block_size > num_tokens - 2 * block_size


@given(ranks=st.integers(1, 5), first=st.integers(0, 300), num_tokens=st.integers(120, 900))
def test_ranks_take_turns_in_one_stream(ranks, first, num_tokens) -> None:
    """Trusted: the orders of the passes, one after the other."""
    samplers = [CropSampler(num_tokens, 10, seed=1, num_replicas=ranks, rank=r) for r in range(ranks)]
    for s in samplers:
        s.first = first
    parts = [list(s) for s in samplers]
    assert {len(p) for p in parts} == {len(samplers[0])}
    dealt = [start for turn in zip(*parts, strict=True) for start in turn]
    passes = (first + len(dealt)) // samplers[0].num_crops + 1
    stream = torch.cat([samplers[0].order(i) for i in range(passes)]).tolist()
    assert dealt == stream[first : first + len(dealt)]


def test_passes_differ_and_repeat_with_the_seed() -> None:
    def order(text_pass: int, seed: int = 0) -> list[int]:
        return CropSampler(1000, 10, seed=seed, num_replicas=1, rank=0).order(text_pass).tolist()

    assert order(0) == order(0)
    assert order(0) != order(1)
    assert order(0) != order(0, seed=1)
    assert len({order(i)[0] % 10 for i in range(10)}) > 1  # the crops themselves differ, not only their order


def test_targets_are_the_next_tokens(folder, tmp_path) -> None:
    train, _ = opened(corpus(folder, tmp_path))
    crops = Crops(train, 16, stride=16)
    x, y = crops[3]
    assert x.tolist() == train.values[48:64].tolist()
    assert y.tolist() == train.values[49:65].tolist()
    assert len(crops[len(crops) - 1][1]) == 16  # the last one is whole


def loader(tokens: Tokens, *, ranks: int, rank: int, workers: int = 0) -> ResumableLoader:
    sampler = CropSampler(len(tokens), 16, seed=1, num_replicas=ranks, rank=rank)
    return ResumableLoader(Crops(tokens, 16, stride=1), sampler, batch_size=2, num_workers=workers)


def take(source: ResumableLoader, count: int) -> list[torch.Tensor]:
    """The next batches, from as many iterators as it needs."""
    result: list[torch.Tensor] = []
    while len(result) < count:
        for x, _ in source:
            result.append(x)
            if len(result) == count:
                break
    return result


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_loader_has_the_batches_that_were_left(folder, tmp_path, workers: int) -> None:
    """Trusted: an uninterrupted one, over two passes. With workers it has read ahead of what it has handed out."""
    train, _ = opened(corpus(folder, tmp_path, max_bytes=2000))
    interrupted = loader(train, ranks=2, rank=0, workers=workers)  # rank 0's state serves every rank
    length = len(interrupted)
    whole = take(loader(train, ranks=2, rank=1), 2 * length)
    take(interrupted, 5)
    state = interrupted.state_dict()
    assert state["crops"] == 5 * 2 * 2
    resumed = loader(train, ranks=2, rank=1, workers=workers)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    rest = take(resumed, 2 * length - 5)
    assert all(torch.equal(a, b) for a, b in zip(whole[5:], rest, strict=True))


def test_another_world_size_goes_on_with_unseen_crops(folder, tmp_path) -> None:
    train, _ = opened(corpus(folder, tmp_path, max_bytes=2000))
    two = [loader(train, ranks=2, rank=r) for r in range(2)]
    seen = torch.cat([x for source in two for x in take(source, 5)])
    one = loader(train, ranks=1, rank=0)
    one.load_state_dict(two[0].state_dict())
    rest = torch.cat(take(one, 7))
    everything = torch.cat(take(loader(train, ranks=1, rank=0), 17))
    assert sorted(torch.cat((seen, rest)).tolist()) == sorted(everything.tolist())


def test_a_position_in_another_order_is_refused(folder, tmp_path) -> None:
    train, val = opened(corpus(folder, tmp_path))
    state = loader(train, ranks=1, rank=0).state_dict()
    with pytest.raises(ValueError, match=r"num_crops was \d+ and is \d+.*Resume with the data options"):
        loader(val, ranks=1, rank=0).load_state_dict(state)


# --- data module -----------------------------------------------------------------------------------------------------


def module() -> GPTModule:
    config = GPTConfig(vocab_size=256, block_size=16, num_layers=1, num_heads=2, width=16)
    return GPTModule(config, OptimConfig(warmup_steps=2, total_steps=40), SampleConfig(max_new_tokens=4))


class Recorder(pl.Callback):
    """Remembers what was trained on."""

    def __init__(self) -> None:
        self.batches: list[torch.Tensor] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.batches.append(batch[0].clone())


def run(data: TextData, folder: Path, max_steps: int, *callbacks: pl.Callback, ckpt_path: Path | None = None):
    recorder = Recorder()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=max_steps, max_epochs=-1, logger=False, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=1, num_sanity_val_steps=1,
        val_check_interval=7, check_val_every_n_epoch=None, callbacks=[recorder, *callbacks],
        enable_checkpointing=bool(callbacks),
    )  # fmt: skip
    torch.manual_seed(0)
    model = module()
    trainer.fit(model, data, ckpt_path=ckpt_path)
    return recorder.batches, model, trainer


def data_of(folder: Path, tmp_path: Path, **options) -> TextData:
    return TextData(corpus(folder, tmp_path, max_bytes=5000, val_fraction=0.2), block_size=16, batch_size=8, **options)


@pytest.mark.wide
@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("saved", ["by a callback", "after the end"])
@pytest.mark.parametrize("stop", [5, 7, 27, 29])
def test_a_resumed_run_sees_what_an_uninterrupted_one_sees(folder, tmp_path, stop: int, saved: str) -> None:
    """Trusted: 34 steps in one go, over more than one epoch; ``stop`` amid one, at a validation, at the end of one.

    Lightning counts the epoch that ``max_steps`` cuts short as complete, but not the one a callback saves amid.
    """
    whole, model, _ = run(data_of(folder, tmp_path), tmp_path, 34)
    if saved == "by a callback":
        save = ModelCheckpoint(tmp_path / "saved", filename="{step}", every_n_train_steps=stop, save_top_k=-1)
        first = run(data_of(folder, tmp_path), tmp_path, stop + 1, save)[0][:stop]
    else:
        first, _, trainer = run(data_of(folder, tmp_path), tmp_path, stop)
        trainer.save_checkpoint(tmp_path / "saved" / f"step={stop}.ckpt")
    second, resumed, _ = run(
        data_of(folder, tmp_path), tmp_path, 34, ckpt_path=tmp_path / "saved" / f"step={stop}.ckpt"
    )
    assert len(whole) == 34
    assert all(torch.equal(a, b) for a, b in zip(whole, first + second, strict=True))
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_sample_follows_every_validation_but_the_sanity_check(folder, tmp_path, capsys) -> None:
    run(data_of(folder, tmp_path), tmp_path, 14)
    printed = capsys.readouterr().out
    assert "step 7 -" in printed
    assert "step 14 -" in printed
    assert "step 0 -" not in printed
    assert printed.count("def ") == 2


def test_bits_per_byte_of_bytes_are_the_loss_in_bits(folder, tmp_path) -> None:
    _, _, trainer = run(data_of(folder, tmp_path), tmp_path, 7)
    metrics = trainer.callback_metrics
    assert metrics["val/bits_per_byte"].item() == pytest.approx(metrics["val/loss"].item() / math.log(2))


def test_what_the_text_is_gets_told(folder, tmp_path, caplog) -> None:
    data = data_of(folder, tmp_path)
    data.prepare_data()
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):  # a test before may have silenced others
        data.setup("fit")
    assert "unigram entropy" in caplog.text
    assert data.val_tokens_per_byte == 1.0


def test_validation_crops_are_spread_and_do_not_overlap(folder, tmp_path) -> None:
    data = data_of(folder, tmp_path, val_crops=4)
    data.prepare_data()
    data.setup("fit")
    crops = data.val_dataloader().dataset
    assert len(crops) == 4
    _, val = opened(data.corpus.config)
    assert crops.stride >= 16
    assert 3 * crops.stride + 17 > 0.9 * len(val)
    every = data_of(folder, tmp_path, val_crops=None)
    every.setup("fit")
    assert every.val_dataloader().dataset.stride == 16


def test_texts_too_short_are_refused(folder, tmp_path) -> None:
    data = TextData(corpus(folder, tmp_path, max_bytes=2000), block_size=4096)
    data.prepare_data()
    with pytest.raises(ValueError, match=r"lower data\.block_size"):
        data.setup("fit")
    big_batch = TextData(data_of(folder, tmp_path).corpus.config, block_size=16, batch_size=10_000)
    with pytest.raises(ValueError, match=r"lower data\.batch_size"):
        run(big_batch, tmp_path, 1)
